"""vLLM's second model runner on a CPU, over :mod:`emulated_device`: engines that tests drive like the others.

Streams, graphs, timing and CUDA's kernels are not in it. What is: vLLM's engine, its asynchronous scheduler, its worker
for devices, the second model runner with its Triton kernels, and the order in which that one calls a connector.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing.connection
from pathlib import Path
from typing import Any, ClassVar

import models
import scenario
from engines import COMMON, ENVIRONMENT, Engine
from scenario import Scenario

LAYERS, BLOCK = 2, 16
TRITON = Path(__file__).parents[2] / ".venv-vllm-triton"
Hook = tuple[str, Any]
"""Its name, and its layer; of the two that open a step whether the pass's forward context is set."""


class SecondRunner(Engine):
    """A vLLM whose worker has the second model runner."""

    preload: ClassVar[Any] = ("emulated_device", "vllm.entrypoints.llm", "second_runner")
    environment: ClassVar[Any] = ENVIRONMENT | {
        "EMULATED_DEVICE_TRITON": str(TRITON),
        "CUDA_VISIBLE_DEVICES": "0",
        "TRITON_INTERPRET": "1",
        "TORCH_COMPILE_DISABLE": "1",  # there is no compiler for the device
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_USE_DEEP_GEMM": "0",
    }
    patience = 10  # its kernels are interpreted
    common: ClassVar[Any] = COMMON | {
        "worker_cls": "emulated_device.EmulatedWorker",
        "attention_backend": "TRITON_ATTN",
        "block_size": BLOCK,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 20,
        "gpu_memory_utilization": 0.5,
        "disable_log_stats": True,
    }

    def hooks(self) -> list[Hook]:
        """What vLLM's worker has called since the last time, in its order."""
        return self._ask("hooks")

    def blocks(self) -> list[set[str]]:
        """By layer, a digest of each block of vLLM's cache that holds anything."""
        return self._ask("blocks")


class EmulatedScenario(Scenario):
    """What runs in its process.

    :param arguments: as of :class:`Scenario`; ``zeroing``: vLLM zeroes new blocks as it does for recurrent state.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        import emulated_device

        assert emulated_device.torch.cuda.is_available(), "vLLM was imported before the device was emulated"
        if arguments.pop("zeroing", False):
            _zero_new_blocks()
        self._hooks: list[Hook] = []
        _record(self._hooks)
        super().__init__(arguments)
        self._runner = self._core.model_executor.driver_worker.worker.model_runner

    def facts(self) -> dict[str, Any]:
        """Also which runner it is."""
        config = self._engine.vllm_config
        runner = type(self._runner).__module__
        return super().facts() | {"runner": runner, "asynchronous": config.scheduler_config.async_scheduling}

    def hooks(self) -> list[Hook]:
        """See :meth:`SecondRunner.hooks`."""
        seen = list(self._hooks)
        self._hooks.clear()
        return seen

    def blocks(self) -> list[set[str]]:
        """See :meth:`SecondRunner.blocks`."""
        count, found = self._runner.kv_cache_config.num_blocks, []
        for cache in self._runner.kv_caches:
            rows = cache.movedim(list(cache.shape).index(count), 0).flatten(1)
            found.append({hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in rows if row.any()})
        return found


def _zero_new_blocks() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _config: True)


def _record(into: list[Hook]) -> None:
    from vllm.forward_context import is_forward_context_available
    from vllm.v1.worker.utils import KVBlockZeroer

    from layerflow.connectors.vllm.connector import LayerflowConnector

    def record(owner: Any, name: str, detail: Any = lambda *_: None) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def recorded(self: Any, *given: Any, **named: Any) -> Any:
            into.append((name, detail(*given)))
            return inner(self, *given, **named)

        setattr(owner, name, recorded)

    record(KVBlockZeroer, "zero_block_ids", len)
    for name in ("handle_preemptions", "bind_connector_metadata"):
        record(LayerflowConnector, name, lambda _: is_forward_context_available())
    for name in ("wait_for_layer_load", "save_kv_layer"):
        record(LayerflowConnector, name, lambda layer, *_: layer)
    for name in ("start_load_kv", "wait_for_save", "get_transfer_results"):
        record(LayerflowConnector, name)


def serve(pipe: multiprocessing.connection.Connection, arguments: dict[str, Any], log: str) -> None:
    """As :func:`scenario.serve`."""
    scenario.serve(pipe, arguments, log, EmulatedScenario)


SecondRunner.serve = staticmethod(serve)


def build(folder: Path) -> Path:
    """A model that an interpreter can compute: two layers, two heads over one of keys and values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "initializer_range": 0.16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**models.COMMON | heads | sizes)).save_pretrained(folder)
    return folder
