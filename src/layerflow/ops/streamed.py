"""Copies on a side stream of an accelerator (cuda or npu, through torch's module of that name)."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np
import structlog
import torch

from layerflow.device.accelerator import Accelerator
from layerflow.device.base import DeviceEvent
from layerflow.errors import Unsupported
from layerflow.ops.base import MappedArena, PinnedPart
from layerflow.ops.bounced import BounceBuffer, CopyCall, within_pieces
from layerflow.ops.extents import Extents
from layerflow.ops.paged import Int64, PagedMemory

log = structlog.get_logger("layerflow.ops")


class _NoBatchesError(Exception):
    """The driver answers that it cannot copy many ranges in one call."""


class _Whole(NamedTuple):
    """An arena that is pinned in one piece, or not at all."""

    piece_bytes: int
    pinned_bytes: int


class StreamCopier:
    """One side stream; each batch is one native call that is given the extents' addresses as they are, then an event.

    The addresses were checked against both memories when the step was planned
    (:class:`layerflow.ops.extents.BlockList`); the registered tensors are kept alive by :class:`PagedMemory`.

    A batch of a part of the arena that is not pinned (yet) passes through a pinned buffer. Where the driver has no such
    call, or pins nothing, each extent is a copy of byte views of its own; those copies are counted
    (:attr:`Accelerator.copies`).

    :param copy: the host's copies, for that buffer.
    :param pinned: see :func:`layerflow.ops.copier.copier_for`.
    """

    def __init__(
        self,
        memory: PagedMemory,
        arena: MappedArena,
        device: Accelerator,
        copy: CopyCall,
        pinned: PinnedPart | None = None,
    ) -> None:
        self._device = device
        self._stream = device.stream()
        self._memory = memory
        self._regions = memory.regions()
        self._starts = [region.address for region in self._regions]
        self._arena = torch.from_numpy(arena.array)
        self._base = arena.address
        self._in_one_call = device.native is not None
        whole = device.is_pinned(arena.address)
        self._pinned = pinned or _Whole(arena.nbytes, arena.nbytes if whole else 0)
        self._bounce = None if whole or not self._in_one_call else BounceBuffer(device, arena, copy)

    def load(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent:
        return self._enqueue(extents, after, loads=True)

    def save(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent:
        return self._enqueue(extents, after, loads=False)

    def drain(self) -> None:
        """Return once nothing that was enqueued here touches either memory any more."""
        self._stream.synchronize()
        if self._bounce is not None:
            self._bounce.drain()

    def close(self) -> None:
        """Drain, and unpin the buffer."""
        self.drain()
        if self._bounce is not None:
            self._bounce.close()

    def _enqueue(self, extents: Extents, after: DeviceEvent | None, *, loads: bool) -> DeviceEvent:
        with self._device.on(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            if not extents.nbytes.size:
                return self._device.event(self._stream)
            extents = within_pieces(extents, extents.arena, self._pinned.piece_bytes)
            try:
                event = self._in_one_call and self._as_batch(extents, loads)
            except _NoBatchesError:
                self._in_one_call, event = False, None
            if not event:
                self._one_by_one(extents, loads)
                event = self._device.event(self._stream)
            self._device.copies.add(batches=1)
            return event

    def _as_batch(self, extents: Extents, loads: bool) -> DeviceEvent | None:
        """Copy in one native call, through the buffer if need be; None = neither part nor buffer is pinned.

        :raises _NoBatchesError: the driver has no such call, after all.
        """
        if int((extents.arena + extents.nbytes).max()) <= self._pinned.pinned_bytes:
            arena = extents.arena + self._base
            dst, src = (extents.engine, arena) if loads else (arena, extents.engine)
            self._call(dst, src, extents.nbytes, loads)
            return self._event()
        bounce = self._bounce
        if bounce is None or not bounce.usable:
            return None
        event = (bounce.load if loads else bounce.save)(extents, self._call, self._event)
        self._device.copies.add(bounced=1)
        return event

    def _event(self) -> DeviceEvent:
        return self._device.event(self._stream)

    def _call(self, dst: Int64, src: Int64, nbytes: Int64, loads: bool) -> None:
        """One native call, or as few as the driver takes.

        :raises _NoBatchesError: the driver has none.
        :raises Unsupported: the driver refused.
        """
        native = self._device.native
        assert native is not None
        dst, src, nbytes = (np.ascontiguousarray(array, np.int64) for array in (dst, src, nbytes))
        # torch_npu hands its calls to a thread of its own; asking for the handle waits until that thread has made them,
        # so that this copy comes behind the event it is to wait for.
        handle = self._device.handle(self._stream)
        for at in range(0, nbytes.size, native.most):
            part = slice(at, at + native.most)
            code, failed = native.copy_batch(dst[part], src[part], nbytes[part], handle, loads)
            if code in native.unsupported and not at:
                log.warning("batch_copy_unavailable", device=str(self._device), reason=f"the driver answers {code}")
                raise _NoBatchesError
            if code:
                where = f", at range {at + failed} of {nbytes.size}" if failed >= 0 else ""
                raise Unsupported(
                    f"device {self._device}: the driver refused a batch of {nbytes.size} copies with code {code}{where}"
                )
            self._device.copies.add(calls=1)

    def _one_by_one(self, extents: Extents, loads: bool) -> None:
        sizes = extents.nbytes.tolist()
        arena = [self._arena[at : at + size] for at, size in zip(extents.arena.tolist(), sizes, strict=True)]
        engine = self._engine_views(extents.engine, sizes)
        dst, src = (engine, arena) if loads else (arena, engine)
        torch._foreach_copy_(dst, src, non_blocking=True)
        self._device.copies.add(single=len(sizes))

    def _engine_views(self, addresses: Int64, sizes: list[int]) -> list[torch.Tensor]:
        views = []
        for address, size in zip(addresses.tolist(), sizes, strict=True):
            region = self._regions[bisect.bisect_right(self._starts, address) - 1]
            views.append(region.bytes[address - region.address : address - region.address + size])
        return views
