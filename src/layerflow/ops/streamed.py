"""Copies on a side stream of an accelerator (cuda or npu, through torch's module of that name)."""

from __future__ import annotations

import bisect

import numpy as np
import structlog
import torch

from layerflow.device.accelerator import Accelerator
from layerflow.device.base import DeviceEvent
from layerflow.errors import Unsupported
from layerflow.ops.base import MappedArena
from layerflow.ops.extents import Extents
from layerflow.ops.paged import Int64, PagedMemory

log = structlog.get_logger("layerflow.ops")


class StreamCopier:
    """One side stream; each batch is one native call that is given the extents' addresses as they are, then an event.

    The addresses were checked against both memories when the step was planned
    (:class:`layerflow.ops.extents.BlockList`); the registered tensors are kept alive by :class:`PagedMemory`.

    Where the driver has no such call, and for an arena that is not pinned (:meth:`Accelerator.pin`), each extent is a
    copy of byte views of its own; those copies are counted (:attr:`Accelerator.copies`).
    """

    def __init__(self, memory: PagedMemory, arena: MappedArena, device: Accelerator) -> None:
        self._device = device
        self._stream = device.stream()
        self._memory = memory
        self._regions = memory.regions()
        self._starts = [region.address for region in self._regions]
        self._arena = torch.from_numpy(arena.array)
        self._base = arena.address
        self._in_one_call = device.native is not None and device.is_pinned(arena.address)

    def load(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent:
        return self._enqueue(extents, after, loads=True)

    def save(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent:
        return self._enqueue(extents, after, loads=False)

    def drain(self) -> None:
        """Return once nothing that was enqueued here touches either memory any more."""
        self._stream.synchronize()

    def _enqueue(self, extents: Extents, after: DeviceEvent | None, *, loads: bool) -> DeviceEvent:
        with self._device.on(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            if extents.nbytes.size and not (self._in_one_call and self._as_batch(extents, loads)):
                self._one_by_one(extents, loads)
            return self._device.event(self._stream)

    def _as_batch(self, extents: Extents, loads: bool) -> bool:
        """Copy in one native call, or in as few as the driver takes; False if it has none, after all."""
        native = self._device.native
        assert native is not None
        arena, engine, nbytes = (
            np.ascontiguousarray(array, np.int64)
            for array in (extents.arena + self._base, extents.engine, extents.nbytes)
        )
        dst, src = (engine, arena) if loads else (arena, engine)
        # torch_npu hands its calls to a thread of its own; asking for the handle waits until that thread has made them,
        # so that this copy comes behind the event it is to wait for.
        handle = self._device.handle(self._stream)
        for at in range(0, nbytes.size, native.most):
            part = slice(at, at + native.most)
            code, failed = native.copy_batch(dst[part], src[part], nbytes[part], handle, loads)
            if code in native.unsupported and not at:
                self._in_one_call = False
                log.warning("batch_copy_unavailable", device=str(self._device), reason=f"the driver answers {code}")
                return False
            if code:
                where = f", at range {at + failed} of {nbytes.size}" if failed >= 0 else ""
                raise Unsupported(
                    f"device {self._device}: the driver refused a batch of {nbytes.size} copies with code {code}{where}"
                )
            self._device.copies.add(calls=1)
        self._device.copies.add(batches=1)
        return True

    def _one_by_one(self, extents: Extents, loads: bool) -> None:
        sizes = extents.nbytes.tolist()
        arena = [self._arena[at : at + size] for at, size in zip(extents.arena.tolist(), sizes, strict=True)]
        engine = self._engine_views(extents.engine, sizes)
        dst, src = (engine, arena) if loads else (arena, engine)
        torch._foreach_copy_(dst, src, non_blocking=True)
        self._device.copies.add(batches=1, single=len(sizes))

    def _engine_views(self, addresses: Int64, sizes: list[int]) -> list[torch.Tensor]:
        views = []
        for address, size in zip(addresses.tolist(), sizes, strict=True):
            region = self._regions[bisect.bisect_right(self._starts, address) - 1]
            views.append(region.bytes[address - region.address : address - region.address + size])
        return views
