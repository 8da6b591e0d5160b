"""A CUDA device that is none, for vLLM's second model runner, which runs on no CPU: an emulation, without timing.

Import it before vLLM, with Triton on the path and ``TRITON_INTERPRET=1``. Every step below says what is not real:

* tensors "on cuda" are of the host, and so is pinned memory: a copy between them is a copy within the host;
* streams and events do nothing, because every operation has ended when its call returns: what would race does not;
* Triton's kernels run in its interpreter, one program after another;
* compiled operators are those of vLLM's build for CPUs; of CUDA's there are none, and whoever calls one gets an error
  (``rms_norm`` there takes strided rows for contiguous ones, the likely reason why a Gemma 3, whose keys are normed,
  comes out wrong);
* a whole graph's replay is the Python function again that was captured, with vLLM's connector out of its reach, because
  a graph calls no hooks; piecewise graphs want a compiler, which there is none for this device;
* memory sizes, the device's name and its capability are an H100's, so that vLLM chooses as it does there.

vLLM's Python code runs as it is: engine, asynchronous scheduler, worker, second model runner, attention backend.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

if folder := os.environ.get("EMULATED_DEVICE_TRITON"):
    sys.path.append(folder)

import torch
import vllm  # noqa: F401  with torch's compiler, which looks at torch's functions once
from torch.overrides import TorchFunctionMode
from vllm.utils import torch_utils

GIB = 1 << 30
CPU = torch.device("cpu")
ABSENT = "the emulated device has no kernels of CUDA"
ASKED_FOR = (
    "cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)  # fmt: skip
NAMED_ONLY = (
    "silu_and_mul_quant", "silu_and_mul_per_block_quant", "static_scaled_fp8_quant", "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant", "rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant", "fused_qk_norm_rope", "fatrelu_and_mul", "mul_and_silu", "gelu_and_mul",
    "gelu_tanh_and_mul", "gelu_new", "gelu_fast", "gelu_quick", "relu_squared", "relu2_no_mul",
    "silu_and_mul_with_clamp", "swigluoai_and_mul",
)  # fmt: skip
"""Operators that vLLM's modules name when they are imported."""
MEMORY = (79 * GIB, 80 * GIB)
_KEPT: list[Any] = []


def on_host(device: Any) -> Any:
    """The host, for any way to name a device of CUDA."""
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    if isinstance(device, str | torch.device):
        return CPU if torch.device(device).type == "cuda" else device
    return device


class OnHost(TorchFunctionMode):  # type: ignore[misc]
    """Makes tensors of the host where a program asks for ones of CUDA, or for pinned ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with the host for the device."""
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_host(kwargs["device"])
        name = getattr(func, "__name__", "")
        if name in ("pin_memory", "cuda"):
            return args[0]
        if name == "is_pinned":
            return True
        if name == "record_stream":
            return None
        kwargs.pop("pin_memory", None)
        if name == "to":
            args = tuple(on_host(each) if isinstance(each, str | torch.device) else each for each in args)
        return func(*args, **kwargs)


class Stream:
    """In order with everything."""

    device, cuda_stream, stream_id, device_index, device_type = CPU, 0, 0, 0, 1

    def __init__(self, *_given: Any, **_named: Any) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        """Nothing is under way."""

    def wait_event(self, _event: Any) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Nothing is under way."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """Has happened."""

    def __init__(self, *_given: Any, **_named: Any) -> None:
        pass

    def record(self, _stream: Any = None) -> None:
        """Nothing is under way."""

    wait = record

    def synchronize(self) -> None:
        """It has happened."""

    def query(self) -> bool:
        """It has happened."""
        return True


class Graph:
    """Runs a captured function again."""

    #: What is about to be captured.
    function: Any = None

    def __init__(self, *_given: Any, **_named: Any) -> None:
        self._function: Any = None

    @contextlib.contextmanager
    def capturing(self, *_given: Any, **_named: Any) -> Iterator[None]:
        """As ``torch.cuda.graph``."""
        self._function = Graph.function
        yield

    def replay(self) -> None:
        """Without hooks."""
        from vllm.config import CUDAGraphMode
        from vllm.distributed.kv_transfer import kv_transfer_state

        connector, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
        try:
            self._function(CUDAGraphMode.NONE)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = connector


STREAM = Stream()
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, total_memory=MEMORY[1], multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
    is_integrated=0, uuid="emulated",
)  # fmt: skip


def _return(value: Any) -> Any:
    return lambda *_given, **_named: value


@contextlib.contextmanager
def _within(_what: Any) -> Iterator[None]:
    yield


def _raise(name: str) -> Any:
    def raising(*_given: Any, **_named: Any) -> None:
        raise NotImplementedError(f"{name}: {ABSENT}")

    return raising


def _stand_in(module: str, **made: Any) -> None:
    sys.modules[module] = types.ModuleType(module)
    _replace(sys.modules[module], **made)


def _answer(module: Any, **values: Any) -> None:
    """Each name gets a function of its own: torch's compiler has rules by function."""
    _replace(module, **{name: _return(value) for name, value in values.items()})


def _replace(module: Any, **made: Any) -> None:
    for name, value in made.items():
        setattr(module, name, value)


def _emulate_torch() -> None:
    """``torch.cuda`` and ``torch.accelerator`` of one device."""
    OnHost().__enter__()
    run = threading.Thread.run

    def run_on_host(thread: threading.Thread) -> None:
        with OnHost():  # a mode is of one thread
            run(thread)

    threading.Thread.run = run_on_host  # type: ignore[method-assign]
    for module in (torch.cuda, torch.accelerator):
        _answer(
            module, current_stream=STREAM, synchronize=None, empty_cache=None, device_count=1,
            is_available=True, reset_peak_memory_stats=None, memory_reserved=0, memory_allocated=0,
            max_memory_allocated=0, memory_stats={f"allocated_bytes.all.{each}": 0 for each in ("peak", "current")},
        )  # fmt: skip
    _answer(
        torch.cuda, default_stream=STREAM, set_device=None, current_device=0, get_device_properties=PROPERTIES,
        get_device_capability=(9, 0), get_device_name=PROPERTIES.name, mem_get_info=MEMORY, manual_seed=None,
        manual_seed_all=None, is_initialized=False, set_rng_state=None, is_current_stream_capturing=False,
    )  # fmt: skip
    _answer(
        torch.accelerator, set_stream=None, current_device_index=0, set_device_index=None, get_memory_info=MEMORY,
        current_accelerator=torch.device("cuda"), empty_host_cache=None,
    )  # fmt: skip
    _replace(torch.cuda, Stream=Stream, Event=Event, stream=_within, get_rng_state=lambda *_: torch.get_rng_state())
    _replace(torch.accelerator, device_index=_within)
    _replace(torch.cuda, CUDAGraph=Graph, graph=Graph.capturing, graph_pool_handle=_return((0, 0)))
    torch_utils.prev_set_stream = _return(None)  # what vLLM puts before torch.cuda.set_stream remembers the stream
    torch.cuda.memory.get_allocator_backend = _return("none")  # it is not tuned
    torch.Event = Event  # type: ignore[misc, assignment]


def _emulate_platform() -> None:
    """vLLM's platform for CUDA over the compiled operators of its build for CPUs."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()
    operators = torch.library.Library("_C", "FRAGMENT")
    _KEPT.append(operators)
    operators.define("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor")
    operators.impl("get_cuda_view_from_cpu_tensor", lambda tensor: tensor.view(tensor.shape), "CPU")
    for name in ASKED_FOR:
        operators.define(f"{name}(int capability) -> bool")
        operators.impl(name, _return(False), "CompositeExplicitAutograd")
    for name in NAMED_ONLY:
        if not hasattr(torch.ops._C, name):
            operators.define(f"{name}(Tensor! result, Tensor input) -> ()")
            operators.impl(name, _raise(name), "CompositeExplicitAutograd")
    operators.define("weak_ref_tensor(Tensor input) -> Tensor")
    operators.impl("weak_ref_tensor", lambda tensor: tensor.view(tensor.shape), "CPU")
    _stand_in("vllm._C_stable_libtorch")
    raising = ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func", "get_scheduler_metadata")
    _stand_in(
        "vllm.vllm_flash_attn", is_fa_version_supported=_return(False), fa_version_unsupported_reason=_return(ABSENT),
        **{name: _raise(name) for name in raising},
    )  # fmt: skip
    platforms.vllm_version_matches_substr = _return(False)  # "cpu": Triton would be off
    from vllm.platforms.cuda import CudaPlatform

    CudaPlatform.dispatch_key, CudaPlatform.dist_backend = "CPU", "gloo"
    platforms._current_platform = CudaPlatform()


_emulate_torch()
_emulate_platform()

from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager  # noqa: E402

_capture = CudaGraphManager.capture


def _capture_functions(manager: Any, create_forward: Any, *given: Any, **named: Any) -> None:
    def create(*given: Any, **named: Any) -> Any:
        Graph.function = create_forward(*given, **named)
        return Graph.function

    _capture(manager, create, *given, **named)


CudaGraphManager.capture = _capture_functions

topk_topp_sampler.HAS_TRITON = False  # the interpreter cannot run its kernel: torch does
gpu_worker.kernel_warmup = _return(None)  # there is nothing to warm up


class EmulatedWorker(gpu_worker.Worker):  # type: ignore[misc]
    """vLLM's worker for devices. Its device is the host, because the runner compares it with that of its tensors."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self._device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._device = on_host(device)
