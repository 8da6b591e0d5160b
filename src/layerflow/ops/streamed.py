"""Copies on a side stream of an accelerator (cuda or npu, through torch's module of that name)."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import structlog
import torch

from layerflow.device.accelerator import Accelerator
from layerflow.device.base import DeviceEvent
from layerflow.errors import InvalidTransition
from layerflow.ops.base import MappedArena, PinnedPart
from layerflow.ops.bounced import BounceBuffer, CopyCall, within_pieces
from layerflow.ops.extents import Extents
from layerflow.ops.kernel import KernelCopies
from layerflow.ops.paged import Int64, PagedMemory

MOST_REFUSED = 3
"""Batches that the driver refuses for a reason of its own before no more are tried."""

log = structlog.get_logger("layerflow.ops")


class _NoBatchesError(Exception):
    """The driver has not copied many ranges in one call.

    :param for_good: it cannot, or has refused to too often.
    """

    def __init__(self, *, for_good: bool) -> None:
        self.for_good = for_good


class ByteViews:
    """Finds the tensor that a range of memory lies in.

    :param tensors: uint8, one-dimensional, contiguous; no two overlap. They are kept alive.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = sorted(tensors, key=torch.Tensor.data_ptr)
        self._starts = [tensor.data_ptr() for tensor in self._tensors]

    def of(self, addresses: Int64, nbytes: Int64) -> list[torch.Tensor]:
        """A view of each range, none of which lies across two tensors."""
        views = []
        for address, size in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            number = bisect.bisect_right(self._starts, address) - 1
            at = address - self._starts[number]
            views.append(self._tensors[number][at : at + size])
        return views


class _Whole(NamedTuple):
    """An arena that is pinned in one piece, or not at all."""

    piece_bytes: int
    pinned_bytes: int


class StreamCopier:
    """One side stream; each batch is one native call that is given the extents' addresses as they are, then an event.

    The addresses were checked against both memories when the step was planned
    (:class:`layerflow.ops.extents.BlockList`); the registered tensors are kept alive by :class:`PagedMemory`.

    Many small extents are copied by a kernel instead; see :mod:`layerflow.ops.kernel`.
    A batch of a part of the arena that is not pinned (yet) passes through a pinned buffer. Where the driver has no such
    call, or pins nothing, each extent is a copy of byte views of its own, and counted (:attr:`Accelerator.copies`).

    :param copy: the host's copies, for the pinned buffer.
    :param pinned: see :func:`layerflow.ops.copier.copier_for`.

    :ivar way: see :class:`layerflow.ops.base.Copier`.
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
        self._closed = False
        self._memory = memory
        regions = memory.regions()
        self._engine_views = ByteViews(region.bytes for region in regions)
        self._arena_views = ByteViews((torch.from_numpy(arena.array),))
        self._base = arena.address
        self._in_one_call = device.native is not None
        self._refused = 0
        whole = device.is_pinned(arena.address)
        self._pinned = pinned or _Whole(arena.nbytes, arena.nbytes if whole else 0)
        self._bounce = None if whole or not self._in_one_call else BounceBuffer(device, arena, copy)
        self.way = "auto"
        self._kernel = KernelCopies(device, regions[0].bytes if regions else None, self._event)
        # Its memory may have been the engine's, who may not be done with it: torch orders that on one stream alone.
        self._stream.wait_event(device.record())

    def load(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent:
        return self._enqueue(extents, after, loads=True)

    def save(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent:
        return self._enqueue(extents, after, loads=False)

    def drain(self) -> None:
        """Return once nothing that was enqueued here touches either memory any more."""
        if self._closed:
            return
        self._stream.synchronize()
        if self._bounce is not None:
            self._bounce.drain()

    def close(self) -> None:
        """Drain, unpin the buffers and give the stream back. Nothing is copied any more."""
        if self._closed:
            return
        self.drain()
        self._closed = True
        self._kernel.close()
        if self._bounce is not None:
            self._bounce.close()
        self._device.end_stream(self._stream)

    def _enqueue(self, extents: Extents, after: DeviceEvent | None, *, loads: bool) -> DeviceEvent:
        if self._closed:
            raise InvalidTransition("a copy was asked of an attachment that has ended")
        with self._device.on(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            if not extents.nbytes.size:
                return self._device.event(self._stream)
            try:
                event, by_kernel = self._move(extents, loads)
            except _NoBatchesError as refused:
                # What is copied a second time holds the same bytes.
                self._in_one_call = False
                event, by_kernel = self._move(extents, loads)
                self._in_one_call = not refused.for_good
            self._device.copies.add(batches=1, kernels=by_kernel)
            return event

    def _move(self, extents: Extents, loads: bool) -> tuple[DeviceEvent, bool]:
        """Enqueue the copies; the event behind them, and whether a kernel makes them.

        :raises _NoBatchesError: the driver has no call for many ranges, after all, or refuses these.
        """
        pinned = int((extents.arena + extents.nbytes).max()) <= self._pinned.pinned_bytes
        if pinned and self._kernel.takes(extents, self._base, self.way, in_one_call=self._in_one_call):
            try:
                self._kernel.copy(*self._ends(extents, loads))
                return self._event(), True
            except Exception as error:  # noqa: BLE001 - of Triton or a driver; what is copied a second time is the same
                self._kernel.give_up(error)
        extents = within_pieces(extents, extents.arena, self._pinned.piece_bytes)
        if self._in_one_call and not pinned:
            bounce = self._bounce
            if bounce is not None and bounce.usable:
                event = (bounce.load if loads else bounce.save)(extents, self._call, self._event)
                self._device.copies.add(bounced=1)
                return event, False
            self._one_by_one(*self._ends(extents, loads), loads)
        else:
            (self._call if self._in_one_call else self._one_by_one)(*self._ends(extents, loads), loads)
        return self._event(), False

    def _ends(self, extents: Extents, loads: bool) -> tuple[Int64, Int64, Int64]:
        """Destinations, sources, bytes."""
        arena = extents.arena + self._base
        dst, src = (extents.engine, arena) if loads else (arena, extents.engine)
        return dst, src, extents.nbytes

    def _event(self) -> DeviceEvent:
        return self._device.event(self._stream)

    def _call(self, dst: Int64, src: Int64, nbytes: Int64, loads: bool) -> None:
        """One native call, or as few as the driver takes.

        :raises _NoBatchesError: the driver has none, or refused.
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
                raise _NoBatchesError(for_good=True)
            if code:
                # A device that is broken refuses single copies too, and that is the batch's failure.
                self._refused += 1
                log.warning(
                    "batch_copy_refused",
                    device=str(self._device),
                    code=code,
                    ranges=nbytes.size,
                    at=at + failed if failed >= 0 else None,
                    refused=self._refused,
                )
                raise _NoBatchesError(for_good=self._refused >= MOST_REFUSED)
            self._device.copies.add(calls=1)

    def _one_by_one(self, dst: Int64, src: Int64, nbytes: Int64, loads: bool) -> None:
        engine, arena = (dst, src) if loads else (src, dst)
        ends = self._engine_views.of(engine, nbytes), self._arena_views.of(arena, nbytes)
        torch._foreach_copy_(*(ends if loads else ends[::-1]), non_blocking=True)
        self._device.copies.add(single=nbytes.size)
