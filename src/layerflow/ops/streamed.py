"""Copies on a side stream of an accelerator (cuda or npu, through torch's module of that name)."""

from __future__ import annotations

import bisect
from typing import Any

import torch

from layerflow.device.base import DeviceEvent
from layerflow.ops.base import MappedArena
from layerflow.ops.extents import Extents
from layerflow.ops.paged import Int64, PagedMemory


class StreamCopier:
    """One side stream; each batch is one multi-tensor copy of byte views, then an event.

    The views are slices of the registered tensors' own storages, which :class:`PagedMemory` keeps alive, and
    of the arena; no raw address reaches the driver. Copies overlap with compute only if the arena is pinned
    (:meth:`layerflow.device.base.Device.pin`); otherwise the driver stages them and the call takes as long.
    """

    def __init__(self, memory: PagedMemory, arena: MappedArena) -> None:
        self._module: Any = torch.get_device_module(memory.device)
        self._device = memory.device
        self._stream = self._module.Stream(device=memory.device)
        self._memory = memory
        self._regions = memory.regions()
        self._starts = [region.address for region in self._regions]
        self._arena = torch.from_numpy(arena.array)

    def load(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent:
        arena, engine = self._views(extents)
        return self._enqueue(engine, arena, after)

    def save(self, extents: Extents, after: DeviceEvent | None = None) -> DeviceEvent:
        arena, engine = self._views(extents)
        return self._enqueue(arena, engine, after)

    def drain(self) -> None:
        """Return once nothing that was enqueued here touches either memory any more."""
        self._stream.synchronize()

    def _enqueue(self, dst: list[torch.Tensor], src: list[torch.Tensor], after: DeviceEvent | None) -> DeviceEvent:
        with self._module.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            if dst:
                torch._foreach_copy_(dst, src, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        done: DeviceEvent = event
        return done

    def _views(self, extents: Extents) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        sizes = extents.nbytes.tolist()
        arena = [self._arena[at : at + size] for at, size in zip(extents.arena.tolist(), sizes, strict=True)]
        return arena, self._engine_views(extents.engine, sizes)

    def _engine_views(self, addresses: Int64, sizes: list[int]) -> list[torch.Tensor]:
        views = []
        for address, size in zip(addresses.tolist(), sizes, strict=True):
            region = self._regions[bisect.bisect_right(self._starts, address) - 1]
            views.append(region.bytes[address - region.address : address - region.address + size])
        return views
