"""How fast bytes move: scattered blocks through the real path, against one contiguous copy of as many bytes.

Worst case on purpose: every object holds one block, so that neighbours in one memory are strangers in the
other. The two kinds of copies take turns, so that a noisy machine is noisy for both.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from layerflow.device import device_for
from layerflow.objects import object_bytes
from layerflow.ops.copier import copier_for, copy_native
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.system.memfd import SharedMemory
from layerflow_cli.bench.transfer.turns import Call, median_seconds

BLOCK_KIB = (16, 64, 256)
TOKENS = 16  # of one block
SPREAD = 3  # both memories are so many times larger than what one turn moves
LANES = 2
TWICE = ("two_lanes", "two_contiguous", "two_cores")
REPEATS = 3  # of one copy, where threads are compared
HASHED = bytes(4 << 20)  # a few milliseconds of work that runs without the GIL


def measure(
    moved_bytes: int = 64 << 20, turns: int = 9, block_kib: Sequence[int] = BLOCK_KIB, seed: int = 0
) -> dict[str, Any]:
    """Save and load random blocks from and to random places of a shared arena, on the cpu.

    :param moved_bytes: bytes that one copy moves.
    :param turns: copies of each kind; medians are reported.
    :param block_kib: block sizes, KiB.
    :returns: for each block size, e.g. ``"64KiB"``: ``save_gbps``, ``load_gbps`` (extents included),
        ``memcpy_gbps`` (one contiguous ``torch.Tensor.copy_`` of the same bytes on one thread, the faster
        direction), their ratios ``save_ratio`` and ``load_ratio``, ``extents_us`` (of one batch);
        ``two_lanes``: throughput of two lanes saving at once ÷ of one, ``two_contiguous``: the same for two
        contiguous copies, i.e. what the machine's memory has left, ``two_cores``: the same for work that touches no
        memory (hashing), i.e. what other processes leave of two cores. Beside the sizes: these three of the smallest
        one, where memory limits a single lane least; ``native``: the C extension is used.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result: dict[str, Any] = {f"{kib}KiB": _Field(kib << 10, moved_bytes, seed).figures(turns) for kib in block_kib}
    finally:
        torch.set_num_threads(threads)
    smallest = result[f"{min(block_kib)}KiB"]
    return result | {name: smallest[name] for name in TWICE} | {"native": copy_native is not None}


class _Field:
    """Engine memory and an arena, both populated, and random blocks of one size in each."""

    def __init__(self, block_bytes: int, moved_bytes: int, seed: int) -> None:
        self.moved = moved_bytes
        count = moved_bytes // block_bytes
        group = GroupSpec("full", TOKENS, (0,), (Plane("kv", "uint8", (block_bytes // TOKENS,)),))
        spec = ModelSpec("bench", "bench", (group,), chunk_tokens=TOKENS)
        self.engine = torch.ones(SPREAD * count, TOKENS, block_bytes // TOKENS, dtype=torch.uint8)
        memory = PagedMemory(spec, {0: {"kv": self.engine}})
        slot = object_bytes(group, 1)
        self.arena = SharedMemory.create(SPREAD * count * slot, name="layerflow-bench")
        self.arena.populate()
        self.flat_engine = self.engine.view(-1)
        self.flat_arena = torch.from_numpy(self.arena.array)
        rng = np.random.default_rng(seed)
        ids, places = (rng.permutation(SPREAD * count).astype(np.int64) for _ in range(2))
        ones = np.ones(count, np.int64)
        # One list per lane; lanes share no block and no object.
        self.lists = [
            BlockList(memory, 0, self.arena.nbytes, ids[part], places[part] * slot, ones, ones * 0)
            for part in (slice(lane * count, (lane + 1) * count) for lane in range(LANES))
        ]
        self.copiers = [copier_for(memory, self.arena, device_for(memory.device)) for _ in self.lists]

    def save(self, lane: int = 0) -> None:
        self.copiers[lane].save(self.lists[lane].extents(0, 0, len(self.lists[lane])))

    def load(self, lane: int = 0) -> None:
        self.copiers[lane].load(self.lists[lane].extents(0, 0, len(self.lists[lane])))

    def contiguous(self, lane: int = 0, *, back: bool = False) -> None:
        here = slice(lane * self.moved, (lane + 1) * self.moved)
        dst, src = self.flat_arena[here], self.flat_engine[here]
        (src.copy_(dst) if back else dst.copy_(src))

    def figures(self, turns: int) -> dict[str, float]:
        return self.one_lane(turns) | self.two_lanes(turns)

    def one_lane(self, turns: int) -> dict[str, float]:
        calls: dict[str, Call] = {
            "there": self.contiguous,
            "save": self.save,
            "back": lambda: self.contiguous(back=True),
            "load": self.load,
            "extents": lambda: self.lists[0].extents(0, 0, len(self.lists[0])),
        }
        seconds = median_seconds(calls, turns)
        gbps = {name: self.moved / seconds[name] / 1e9 for name in ("there", "back", "save", "load")}
        memcpy = max(gbps["there"], gbps["back"])
        return {
            "save_gbps": gbps["save"],
            "load_gbps": gbps["load"],
            "memcpy_gbps": memcpy,
            "save_ratio": gbps["save"] / memcpy,
            "load_ratio": gbps["load"] / memcpy,
            "extents_us": seconds["extents"] * 1e6,
        }

    def two_lanes(self, turns: int) -> dict[str, float]:
        work = dict(zip(TWICE, (self.save, self.contiguous, _hash), strict=True))
        calls = {f"{name}, {lanes}": _lanes(call, lanes) for name, call in work.items() for lanes in (1, LANES)}
        seconds = median_seconds(calls, turns)
        return {name: LANES * seconds[f"{name}, 1"] / seconds[f"{name}, {LANES}"] for name in work}


def _hash(lane: int) -> None:
    hashlib.sha256(HASHED).digest()


def _lanes(work: Callable[[int], None], lanes: int) -> Call:
    """`work` some times over on so many threads, long enough that starting them does not count."""

    def repeat(lane: int) -> None:
        for _ in range(REPEATS):
            work(lane)

    def call() -> None:
        threads = [threading.Thread(target=repeat, args=(lane,)) for lane in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return call
