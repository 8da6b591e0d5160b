"""How long the server's loop stands still at most while a directory of a million objects fills and is replaced."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

from layerflow.objects import HEADER_BYTES
from layerflow.pool.base import NewObject
from layerflow.pool.memory import MemoryPool
from layerflow.system.garbage import keep_collections_short, leave_collections

BATCH = 32
WORST_MS = 50.0
ROOM = 2 * HEADER_BYTES
SLACK = 1 << 20  # of the arena: a pool has a little less room than bytes


class _Memory:
    """An arena that no other process maps."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.warm_bytes = nbytes
        self.view = memoryview(bytearray(nbytes))


def measure(objects: int = 1_000_000, replaced: int = 200_000) -> dict[str, Any]:
    """Store objects until the arena is full, read each three times, and store others in their place.

    :param objects: that the arena has room for, or some more.
    :param replaced: objects that are stored behind them.
    :returns: processor time of the loop for one save of 32 objects, or one hit of as many, collections of garbage
        included: by phase the longest and the mean; ``worst_ms`` of all, to stay within ``target_ms``;
        ``first_eviction_ms``; ``objects`` and ``evictions``.
    """
    pool = MemoryPool(_Memory(objects * ROOM + SLACK))
    keep_collections_short()
    try:
        phases = {"filling": _timed(_save(pool, 0, objects))}
        phases["reading"] = _timed(_read(pool, objects))
        used = pool.statistics().capacity_bytes - pool.statistics().used_bytes
        left = used // ROOM
        phases["filling the rest"] = _timed(_save(pool, objects, objects + left))
        first = _timed(_save(pool, objects + left, objects + left + BATCH))
        phases["evicting"] = _timed(_save(pool, objects + left + BATCH, objects + left + replaced))
    finally:
        leave_collections()
        gc.collect()
    return {
        "worst_ms": max(phase["worst_ms"] for phase in phases.values()),
        "target_ms": WORST_MS,
        "first_eviction_ms": first["worst_ms"],
        "objects": pool.statistics().objects,
        "evictions": pool.statistics().evictions,
        "phases": phases,
    }


def _timed(work: Iterator[None]) -> dict[str, float]:
    worst, count, began = 0.0, 0, time.thread_time()
    last = began
    for _ in work:
        now = time.thread_time()
        worst, last, count = max(worst, now - last), now, count + 1
    return {"worst_ms": worst * 1e3, "mean_us": (last - began) / max(count, 1) * 1e6}


def _save(pool: MemoryPool, first: int, stop: int) -> Iterator[None]:
    for at in range(first, stop, BATCH):
        keys = [number.to_bytes(24, "big") for number in range(at, min(at + BATCH, stop))]
        pool.reserve([NewObject(key, ROOM, 1, 1) for key in keys], "bench")
        pool.commit(keys, "bench")
        yield


def _read(pool: MemoryPool, stop: int) -> Iterator[None]:
    for _ in range(3):
        for at in range(0, stop, BATCH):
            keys = [number.to_bytes(24, "big") for number in range(at, min(at + BATCH, stop))]
            pool.lease(keys, "bench", 1e9)
            pool.release("bench")
            yield
