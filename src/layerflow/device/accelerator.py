"""cuda and npu: one code path, through torch's module of that name."""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import structlog
import torch

from layerflow.device.base import Capabilities, CopyCounter, DeviceEvent
from layerflow.device.native import Native, native_of
from layerflow.errors import Unsupported

log = structlog.get_logger(__name__)

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
    :raises Unsupported: no such device here, or torch_npu cannot be imported.

    :ivar copies: what was copied to and from the device, by all copiers.
    :ivar native: None where the driver cannot copy many ranges in one call.
    """

    def __init__(self, device: torch.device, module: Any = None, native: Native | None = None) -> None:
        self.kind = device.type
        self.copies = CopyCounter()
        self._module = module or module_of(device.type)
        if not self._module.is_available():
            raise Unsupported(f"device {device}: torch sees no {device.type} device on this machine")
        index = self._module.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self.native = native or native_of(self.kind, index)
        self._beside = threading.local()
        self._own_streams: set[int] = set()
        self._capture_streams = self._pool_of_streams() if self.native is not None and self.kind == "cuda" else ()

    def __str__(self) -> str:
        return str(self._device)

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
