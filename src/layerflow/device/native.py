"""The driver's calls that torch has none for: copy many ranges in one call, own a stream, stay out of captures.

Addresses, offsets and lengths are passed as the int64 arrays that they are; no loop over them is Python's.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

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

    most = 1 << 62
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
