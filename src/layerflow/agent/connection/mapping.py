"""A server's arena made ready for copies: pinned for the device, its pages mapped into this process."""

from __future__ import annotations

import threading

import structlog

from layerflow.device.base import Device
from layerflow.errors import Unsupported
from layerflow.machine import free_bytes
from layerflow.memfd import POPULATE_PIECE_BYTES, SharedMemory

log = structlog.get_logger("layerflow.agent")


def pin(arena: SharedMemory, device: Device) -> None:
    """Pin it where the device's copies are faster from pinned memory; without, copies work too."""
    if not device.capabilities().pinned:
        return
    try:
        pinned = device.pin(arena.address, arena.nbytes)
    except Unsupported as error:
        log.warning("arena_not_pinned", device=device.kind, error=str(error))
    else:
        if not pinned:
            log.warning("arena_not_pinned", device=device.kind)


class Populating:
    """Maps the arena's pages into this process, on a thread of its own, so that no copy pays for it."""

    def __init__(self, arena: SharedMemory) -> None:
        self._thread = threading.Thread(target=_populate, args=(arena,), name="layerflow-populate", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all are mapped; False after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _populate(arena: SharedMemory) -> None:
    try:
        # What the server has not warmed for want of memory is not taken here either.
        for begin in range(0, arena.nbytes, POPULATE_PIECE_BYTES):
            if free_bytes() < 2 * POPULATE_PIECE_BYTES:
                log.info("arena_populated_partly", populated_bytes=begin, arena_bytes=arena.nbytes)
                return
            arena.populate(begin, min(begin + POPULATE_PIECE_BYTES, arena.nbytes))
    except Unsupported as error:
        log.warning("arena_not_populated", error=str(error))
