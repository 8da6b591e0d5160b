"""cuda and npu: one code path, through torch's module of that name."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from layerflow.device.base import KERNEL_WIDTHS, Capabilities, CopyCounter, DeviceEvent, RangeKernel
from layerflow.errors import Unsupported

# The driver's calls that torch has none for: copy many ranges in one call, own a stream, stay out of captures.
#
# Addresses, offsets and lengths are passed as the int64 arrays that they are; no loop over them is Python's.


log = structlog.get_logger(__name__)

Int64 = npt.NDArray[np.int64]


class BatchCopied(NamedTuple):
    """What the driver said of one call.

    :param code: 0 = everything was enqueued.
    :param failed: the first range it refused; -1 = it names none.
    """

    code: int
    failed: int = -1


class Native(Protocol):
    """A driver's library.

    :ivar most: ranges that one call of :meth:`copy_batch` takes.
    :ivar unsupported: codes by which the driver says that this machine has no such call.
    """

    most: int
    unsupported: frozenset[int]

    def copy_batch(self, dst: Int64, src: Int64, nbytes: Int64, stream: int, to_device: bool) -> BatchCopied:
        """Enqueue copies between pinned host memory and device memory on a stream of the thread's current device.

        :param dst: int64, shape ``(n,)``, contiguous, n > 0: addresses; so is `src`. No two ranges overlap.
        :param nbytes: int64, shape ``(n,)``, contiguous.
        :param stream: its handle; not that of the default stream.
        """
        ...

    def new_stream(self) -> int:
        """Handle of a new stream of the thread's current device; 0 = torch's are nobody else's, or the driver has none.

        As torch's, it does not wait for the default stream.
        """
        ...

    def end_stream(self, stream: int) -> int:
        """Give a stream of :meth:`new_stream` back, on which nothing is under way.

        :returns: the driver's code; 0 = it is gone.
        """
        ...

    def leave_captures(self) -> None:
        """Let the calling thread use the driver while another thread captures a graph.

        Without it, a pinned range, a new stream or a queried event of this thread would invalidate that graph.
        """
        ...

    def is_capturing(self, stream: int) -> bool:
        """Does the stream capture a graph now? Disturbs none; from any thread."""
        ...

    def reads_pinned(self, index: int) -> bool:
        """Does device `index` read and write pinned host memory at the host's addresses?"""
        ...


class _CudaAttributes(ctypes.Structure):  # cudaMemcpyAttributes, driver_types.h
    _fields_ = (
        ("access_order", ctypes.c_int),
        ("src_type", ctypes.c_int),
        ("src_id", ctypes.c_int),
        ("dst_type", ctypes.c_int),
        ("dst_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class CudaNative:
    """The cuda runtime.

    :param library: with ``cudaMemcpyBatchAsync``, which came with 12.8.
    :param version: of the runtime, e.g. 12080. From 13000 on the call has no argument for the failed range.
    """

    # The call holds the driver's lock, and the engine's launches wait for it. Thousands of ranges in one call also move
    # several times slower than in a few calls (docs/benchmarks.md).
    most = 512
    # cudaErrorInsufficientDriver, cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported
    unsupported = frozenset((35, 36, 801))

    def __init__(self, library: ctypes.CDLL, version: int) -> None:
        self._library = library
        self._tells_failed = version < 13000
        self._attributes = _CudaAttributes(
            access_order=1,  # cudaMemcpySrcAccessOrderStream: sources are read in the stream's order
            flags=1,  # cudaMemcpyFlagPreferOverlapWithCompute: copy engines rather than the cores that compute
        )
        self._applies_from = ctypes.c_size_t(0)

    def copy_batch(self, dst: Int64, src: Int64, nbytes: Int64, stream: int, to_device: bool) -> BatchCopied:
        failed = ctypes.c_size_t(_NONE)
        code = self._library.cudaMemcpyBatchAsync(
            *map(_pointer, (dst, src, nbytes)),
            ctypes.c_size_t(dst.size),
            ctypes.byref(self._attributes),
            ctypes.byref(self._applies_from),
            ctypes.c_size_t(1),
            *((ctypes.byref(failed),) if self._tells_failed else ()),
            ctypes.c_void_p(stream),
        )
        if code:
            self._library.cudaGetLastError()  # else torch would find it behind its next kernel
        return BatchCopied(code, -1 if failed.value == _NONE else failed.value)

    def new_stream(self) -> int:
        stream = ctypes.c_void_p()
        if self._library.cudaStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, 0):
            self._library.cudaGetLastError()
            return 0
        return stream.value or 0

    def end_stream(self, stream: int) -> int:
        code = int(self._library.cudaStreamDestroy(ctypes.c_void_p(stream)))
        if code:
            self._library.cudaGetLastError()
        return code

    def leave_captures(self) -> None:
        mode = ctypes.c_int(_RELAXED)
        self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int(0)  # cudaStreamCaptureStatusNone
        self._library.cudaStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
        return bool(status.value)

    def reads_pinned(self, index: int) -> bool:
        told = ctypes.c_int(0)
        if self._library.cudaDeviceGetAttribute(ctypes.byref(told), _HOST_POINTERS, index):
            self._library.cudaGetLastError()
            return False
        return bool(told.value)


class _CannAttributes(ctypes.Structure):  # aclrtMemcpyBatchAttr, acl_rt.h
    _fields_ = (
        ("dst_id", ctypes.c_uint32),
        ("dst_type", ctypes.c_int),
        ("src_id", ctypes.c_uint32),
        ("src_type", ctypes.c_int),
        ("reserved", ctypes.c_uint8 * 16),
    )


class CannNative:
    """CANN's runtime.

    :param library: with ``aclrtMemcpyBatchAsync``, which came with 8.3.
    :param index: of the device.
    """

    most = 4096  # what one call of aclrtMemcpyBatch takes
    unsupported = frozenset((207000,))  # ACL_ERROR_RT_FEATURE_NOT_SUPPORT

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self._library = library
        host, device = 0, 1  # ACL_MEM_LOCATION_TYPE_
        self._loads = _CannAttributes(dst_id=index, dst_type=device, src_type=host)
        self._saves = _CannAttributes(dst_type=host, src_id=index, src_type=device)
        self._applies_from = ctypes.c_size_t(0)

    def copy_batch(self, dst: Int64, src: Int64, nbytes: Int64, stream: int, to_device: bool) -> BatchCopied:
        failed = ctypes.c_size_t(_NONE)
        code = self._library.aclrtMemcpyBatchAsync(
            _pointer(dst),
            _pointer(nbytes),  # the room at each destination
            _pointer(src),
            _pointer(nbytes),
            ctypes.c_size_t(dst.size),
            ctypes.byref(self._loads if to_device else self._saves),
            ctypes.byref(self._applies_from),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
        return BatchCopied(code, -1 if failed.value == _NONE else failed.value)

    def new_stream(self) -> int:
        return 0  # torch_npu makes each of its own when it is asked for one

    def end_stream(self, stream: int) -> int:
        raise NotImplementedError(f"stream {stream:#x} was not made here")

    def leave_captures(self) -> None:
        exchange = getattr(self._library, "aclmdlRICaptureThreadExchangeMode", None)
        if exchange is not None:
            mode = ctypes.c_int(_RELAXED)
            exchange(ctypes.byref(mode))

    def is_capturing(self, stream: int) -> bool:
        told = getattr(self._library, "aclmdlRICaptureGetInfo", None)
        if told is None:
            return False
        status, graph = ctypes.c_int(0), ctypes.c_void_p()  # ACL_MODEL_RI_CAPTURE_STATUS_NONE
        told(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(graph))
        return bool(status.value)

    def reads_pinned(self, index: int) -> bool:
        return False


def native_of(kind: str, index: int) -> Native | None:
    """The library that torch has loaded for the device; None where it has no call that copies many ranges."""
    try:
        return _cann(index) if kind == "npu" else _cuda()
    except OSError as error:
        log.warning("batch_copy_unavailable", device=f"{kind}:{index}", reason=str(error))
        return None


def _cuda() -> CudaNative | None:
    if torch.version.cuda is None:  # ROCm, which torch calls cuda, too
        return None
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    runtime, driver = ctypes.c_int(0), ctypes.c_int(0)
    library.cudaRuntimeGetVersion(ctypes.byref(runtime))
    library.cudaDriverGetVersion(ctypes.byref(driver))
    if min(runtime.value, driver.value) < _CUDA_BATCHES or not hasattr(library, "cudaMemcpyBatchAsync"):
        return None
    return CudaNative(library, runtime.value)


def _cann(index: int) -> CannNative | None:
    library = ctypes.CDLL("libascendcl.so")
    return CannNative(library, index) if hasattr(library, "aclrtMemcpyBatchAsync") else None


def _pointer(array: Int64) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


_NONE = ctypes.c_size_t(-1).value  # SIZE_MAX: the driver names no range
_RELAXED = 2  # cudaStreamCaptureModeRelaxed, ACL_MODEL_RI_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # cudaStreamNonBlocking, driver_types.h
_CUDA_BATCHES = 12080
_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem, driver_types.h


def range_kernel_of(device: torch.device, native: Native) -> RangeKernel:
    """The kernel of a cuda device, compiled and seen to copy; seconds, once on a machine, whose disk Triton uses.

    :raises Unsupported: there is none, with the reason.
    """
    if device.type != "cuda":
        raise Unsupported(f"a kernel that copies ranges is made for cuda, not for {device.type}")
    if not native.reads_pinned(device.index):
        raise Unsupported("the device does not use pinned host memory at the host's addresses")
    try:
        from layerflow.device.range_kernel import TritonKernel  # noqa: PLC0415 - only where there is a device

        kernel = TritonKernel()
        beside: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(beside):
            right = _copies_right(kernel, device)
    except Exception as error:  # whatever an import, a compiler or a driver raises
        raise Unsupported(f"Triton makes no kernel here: {type(error).__name__}: {error}") from error
    if not right:
        raise Unsupported("the kernel that Triton makes here copies other bytes than it should")
    return kernel


def _copies_right(kernel: RangeKernel, device: torch.device) -> bool:
    """Whether ranges of every width come out of pinned memory, and back into it, as they were."""
    size, count = KERNEL_WIDTHS[-1], 100
    memory = mmap.mmap(-1, 2 * count * size)
    host = np.frombuffer(memory, np.uint8)
    address = int(host.ctypes.data)
    there = torch.zeros(count * size, dtype=torch.uint8, device=device)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, host.nbytes, _CUDA_HOST_REGISTER_PORTABLE)):
        raise Unsupported("the driver pins no memory to try it with")
    try:
        rng = np.random.default_rng(0)
        for width in KERNEL_WIDTHS:
            host[: count * size] = rng.integers(1, 256, count * size, dtype=np.uint8)
            host[count * size :] = 0
            words = rng.integers(1, width // 16 + 1, count) * 2
            at, to, back = (rng.permutation(count).astype(np.int64) * size for _ in range(3))
            last = address + count * size
            for dst, src in ((to + there.data_ptr(), at + address), (back + last, to + there.data_ptr())):
                listed = torch.from_numpy(np.concatenate((dst, src, words))).to(device)
                kernel.launch(listed, count, width)
                torch.cuda.current_stream(device).synchronize()
            wanted = np.zeros(count * size, np.uint8)
            for source, target, nbytes in zip(at.tolist(), back.tolist(), (words * 8).tolist(), strict=True):
                wanted[target : target + nbytes] = host[source : source + nbytes]
            if not np.array_equal(host[count * size :], wanted):
                return False
    finally:
        runtime.cudaHostUnregister(address)
    return True


# How often each range is pinned, by device kind, device and address: engines of one process share an arena, and
# the driver refuses a second registration (cuda keeps that error for the next kernel launch to stumble over).
_pins: Counter[tuple[str, int, int]] = Counter()
_pins_lock = threading.Lock()

_MOST_STREAMS = 64  # twice what torch's pool has, should a torch hand out ever new ones
_CUDA_HOST_REGISTER_PORTABLE = 0x1  # cudaHostRegisterPortable, driver_types.h
_ACL_HOST_REG_MAPPED = 0x2  # ACL_HOST_REG_MAPPED, acl_rt.h; keeps full copy bandwidth, needs 4 KiB-aligned memory


class Accelerator:
    """One cuda or npu device.

    :param device: e.g. ``torch.device("npu", 0)``; without an index, the calling thread's current device.
    :param module: torch's module of that kind; None = import it.
    :param native: the driver's own calls; None = those of the library that torch has loaded.
    :param make_kernel: makes :attr:`kernel`.
    :raises Unsupported: no such device here, or torch_npu cannot be imported.

    :ivar copies: what was copied to and from the device, by all copiers.
    :ivar native: None where the driver cannot copy many ranges in one call.
    :ivar kernel: copies many small ranges at once; None: not yet (:meth:`prepare`), or this device has none.
    """

    def __init__(
        self,
        device: torch.device,
        module: Any = None,
        native: Native | None = None,
        make_kernel: Callable[[torch.device, Native], RangeKernel] = range_kernel_of,
    ) -> None:
        self.kind = device.type
        self.copies = CopyCounter()
        self._module = module or module_of(device.type)
        if not self._module.is_available():
            raise Unsupported(f"device {device}: torch sees no {device.type} device on this machine")
        index = self._module.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self.native = native or native_of(self.kind, index)
        self._beside = threading.local()
        self.kernel: RangeKernel | None = None
        self._make_kernel = make_kernel
        self._preparing, self._prepared = threading.Lock(), False
        self._own_streams: set[int] = set()
        self._capture_streams = self._pool_of_streams() if self.native is not None and self.kind == "cuda" else ()

    def __str__(self) -> str:
        return str(self._device)

    def prepare(self) -> None:
        if self.native is None or self.kind != "cuda":
            return
        self.leave_captures()
        with self._preparing:
            if self._prepared:
                return
            self._prepared = True
            try:
                self.kernel = self._make_kernel(self._device, self.native)
            except Unsupported as error:
                log.warning("copy_kernel_unavailable", device=str(self._device), reason=str(error))

    def stream(self) -> Any:
        """A stream; nobody else's, where the driver's calls are known. To be given back by :meth:`end_stream`.

        torch's cuda streams are 32 that it hands out in turn: an engine's own work would take turns with the copies.
        """
        self.leave_captures()
        handle = self.native.new_stream() if self.native is not None and hasattr(self._module, "ExternalStream") else 0
        if not handle:
            return self._module.Stream(device=self._device)
        self._own_streams.add(handle)
        return self._module.ExternalStream(handle, device=self._device)

    def end_stream(self, stream: Any) -> None:
        """Give a stream back, on which nothing is under way: nobody uses it again. Those of torch stay torch's."""
        handle = self.handle(stream)
        if handle not in self._own_streams:
            return
        assert self.native is not None
        self._own_streams.discard(handle)
        if code := self.native.end_stream(handle):
            log.warning("stream_not_ended", device=str(self._device), code=code)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes a stream and its device the calling thread's current ones."""
        self.leave_captures()
        current: AbstractContextManager[Any] = self._module.stream(stream)
        return current

    def event(self, stream: Any, *, timed: bool = False) -> DeviceEvent:
        """An event behind everything that was enqueued on the stream."""
        event = self._module.Event(enable_timing=timed)
        event.record(stream)
        recorded: DeviceEvent = event
        return recorded

    def handle(self, stream: Any) -> int:
        """The driver's handle of the stream; on npu, once the driver has got what was enqueued on it before."""
        return int(getattr(stream, f"{self.kind}_stream"))

    def leave_captures(self) -> None:
        """From now on no call of this thread disturbs a graph that another thread captures, or is another device's.

        Not the engine's thread.
        """
        if hasattr(self._beside, "left"):
            return
        # For good: an event that is asked or waited for takes the thread's current device, and would make a context
        # on device 0 for each rank.
        self._module.set_device(self._device)
        if self.native is not None:
            self.native.leave_captures()
        self._beside.left = True

    def capturing(self) -> bool:
        # Of all ways to tell, only a stream answers on another thread than the one that captures.
        native = self.native
        if native is None:
            return False
        default = getattr(getattr(self._module, "graph", None), "default_capture_stream", None)
        handles = self._capture_streams if default is None else (*self._capture_streams, self.handle(default))
        return any(map(native.is_capturing, handles))

    def record(self, *, timed: bool = False) -> DeviceEvent:
        return self.event(self._module.current_stream(self._device), timed=timed)

    def seconds_between(self, first: object, last: object) -> float | None:
        try:
            return float(first.elapsed_time(last)) / 1e3  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError, ValueError):  # an engine's own event need not be timed
            return None

    def wait(self, event: DeviceEvent) -> None:
        self._module.current_stream(self._device).wait_event(event)

    def pin(self, address: int, nbytes: int) -> bool:
        key = self._pin_key(address)
        self.leave_captures()
        with _pins_lock:
            if not _pins[key]:
                code = self._register(address, nbytes)
                if code is None:
                    log.warning("arena_not_pinned", device=str(self._device), reason="this torch_npu has no npurt()")
                    return False
                if code:
                    raise Unsupported(
                        f"device {self._device}: pinning {nbytes} bytes of host memory at {address:#x} failed with "
                        f"code {code}; raise the process's locked-memory limit (ulimit -l) or make the arena smaller"
                    )
            _pins[key] += 1
        return True

    def is_pinned(self, address: int) -> bool:
        """Was the range that begins there pinned, and not given back?"""
        return _pins[self._pin_key(address)] > 0

    def unpin(self, address: int) -> None:
        key = self._pin_key(address)
        with _pins_lock:
            if not _pins[key]:
                return
            _pins[key] -= 1
            code = 0 if _pins[key] else self._unregister(address)
        if code:
            log.warning("arena_unpin_failed", device=str(self._device), code=code)

    def capabilities(self) -> Capabilities:
        pinned = self.kind == "cuda" or hasattr(self._module, "npurt")
        return Capabilities(streams=True, events=True, pinned=pinned, count=self._module.device_count())

    def _pool_of_streams(self) -> tuple[int, ...]:
        """Handles of the streams that torch hands out in turn and never destroys: what captures takes one of them.

        c10/cuda/CUDAStream.h has 32 a priority. On npu torch makes each when it is asked for, and captures on
        :attr:`torch.npu.graph.default_capture_stream`.
        """
        seen: dict[int, None] = {}
        while len(seen) < _MOST_STREAMS:
            handle = self.handle(self._module.Stream(device=self._device))
            if handle in seen:
                break
            seen[handle] = None
        return tuple(seen)

    def _pin_key(self, address: int) -> tuple[str, int, int]:
        """cuda pins for every device at once (portable), npu for one."""
        return (self.kind, 0 if self.kind == "cuda" else self._device.index, address)

    def _register(self, address: int, nbytes: int) -> int | None:
        """The driver's return code; None where this build cannot register memory."""
        if self.kind == "npu" and not hasattr(self._module, "npurt"):
            return None
        with self._module.device(self._device):
            if self.kind == "cuda":
                return int(self._module.cudart().cudaHostRegister(address, nbytes, _CUDA_HOST_REGISTER_PORTABLE))
            return int(self._module.npurt().npuHostRegister(address, nbytes, _ACL_HOST_REG_MAPPED))

    def _unregister(self, address: int) -> int:
        """The driver's return code."""
        with self._module.device(self._device):
            if self.kind == "cuda":
                return int(self._module.cudart().cudaHostUnregister(address))
            return int(self._module.npurt().npuHostUnregister(address))


def module_of(kind: str) -> Any:
    """torch's module of a device kind.

    :raises Unsupported: there is none, or torch_npu cannot be imported.
    """
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # without CANN: ImportError, RuntimeError or bare Exception, by what is missing
            raise Unsupported(f"device kind 'npu': torch_npu cannot be imported here: {error}") from error
    try:
        return torch.get_device_module(kind)
    except RuntimeError as error:
        raise Unsupported(f"device kind {kind!r}: this torch has no such backend") from error
