"""How fast bytes move: scattered blocks through the real path, against one contiguous copy of as many bytes.

Worst case on purpose: every object holds one block, so that neighbours in one memory are strangers in the
other. Beside that, objects of real sizes in the slots that an arena gives them, against the same objects at random
places: slots put all of them at nearly the same distance, modulo a page, from the engine's tensors. What is compared
takes turns, so that a noisy machine is noisy for both.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.table import Table

from layerflow.device import device_for
from layerflow.objects import object_bytes
from layerflow.ops.copier import copier_for, copy_native
from layerflow.ops.extents import BlockList, Extents, joined
from layerflow.ops.paged import PagedMemory
from layerflow.pool.slots import Slots
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.system.memfd import SharedMemory
from layerflow_cli.bench.transfer.turns import Call, median_seconds
from layerflow_cli.output import tables

BLOCK_KIB = (16, 64, 256)
OBJECT_MIB = (4, 8, 24)
CHUNK_BLOCKS = 16
ENGINE_BASE = 64  # where torch's large tensors begin, modulo a page
PAGE = 4096
TOKENS = 16  # of one block
SPREAD = 3  # both memories are so many times larger than what one turn moves
LANES = 2
TWICE = ("two_lanes", "two_contiguous", "two_cores")
REPEATS = 3  # of one copy, where threads are compared
HASHED = bytes(4 << 20)  # a few milliseconds of work that runs without the GIL


def measure(
    moved_bytes: int = 64 << 20,
    turns: int = 9,
    block_kib: Sequence[int] = BLOCK_KIB,
    object_mib: Sequence[int] = OBJECT_MIB,
    seed: int = 0,
) -> dict[str, Any]:
    """Save and load random blocks from and to a shared arena, on the cpu: to random places, and in an arena's slots.

    :param moved_bytes: bytes that one copy moves.
    :param turns: copies of each kind; medians are reported.
    :param block_kib: block sizes, KiB.
    :param object_mib: sizes of objects in slots, MiB; each has layers of 16 blocks.
    :returns: for each block size, e.g. ``"64KiB"``: ``save_gbps``, ``load_gbps`` (extents included),
        ``memcpy_gbps`` (one contiguous ``torch.Tensor.copy_`` of the same bytes on one thread, the faster
        direction), their ratios ``save_ratio`` and ``load_ratio``, ``extents_us`` (of one batch);
        ``two_lanes``: throughput of two lanes saving at once ÷ of one, ``two_contiguous``: the same for two
        contiguous copies, i.e. what the machine's memory has left, ``two_cores``: the same for work that touches no
        memory (hashing), i.e. what other processes leave of two cores. Beside the sizes: these three of the smallest
        one, where memory limits a single lane least; ``native``: the C extension is used. ``slots``: by object and
        block size, e.g. ``"4MiB, 64KiB"``, ``save_gbps`` and ``load_gbps`` of objects that lie in slots, and their
        ratios ``save_of_random`` and ``load_of_random`` to the same objects at random places; ``slots_worst``: the
        smallest of these ratios.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result: dict[str, Any] = {f"{kib}KiB": _Field(kib << 10, moved_bytes, seed).figures(turns) for kib in block_kib}
        slots = {
            f"{mib}MiB, {kib}KiB": _Objects(kib << 10, mib << 20, moved_bytes, seed).figures(turns)
            for mib in object_mib
            for kib in block_kib
        }
    finally:
        torch.set_num_threads(threads)
    smallest = result[f"{min(block_kib)}KiB"]
    worst = min((min(of["save_of_random"], of["load_of_random"]) for of in slots.values()), default=None)
    result |= {name: smallest[name] for name in TWICE}
    return result | {"native": copy_native is not None, "slots": slots, "slots_worst": worst}


def present(result: Mapping[str, Any]) -> list[Table]:
    """Blocks at random places in one table, objects in slots in another."""
    places = {name: value for name, value in result.items() if name != "slots"}
    return [*tables("copy", places), *tables("copy: objects in slots", result["slots"])]


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


class _Objects:
    """Objects of one size in an arena's slots, and as many at random places; tensors begin where torch's do."""

    def __init__(self, block_bytes: int, nbytes: int, moved_bytes: int, seed: int) -> None:
        layers = range(max(1, nbytes // (CHUNK_BLOCKS * block_bytes)))
        group = GroupSpec("full", TOKENS, tuple(layers), (Plane("kv", "uint8", (block_bytes // TOKENS,)),))
        spec = ModelSpec("bench", "bench", (group,), chunk_tokens=CHUNK_BLOCKS * TOKENS)
        size = object_bytes(group, CHUNK_BLOCKS)
        count = max(2, moved_bytes // size)
        blocks = count * CHUNK_BLOCKS
        self.moved = blocks * block_bytes * len(layers)
        shape = (blocks, TOKENS, block_bytes // TOKENS)
        self.memory = memory = PagedMemory(spec, {layer: {"kv": _tensor_at(ENGINE_BASE, shape)} for layer in layers})
        rng = np.random.default_rng(seed)
        pitch = -(-size // PAGE) * PAGE + PAGE
        slots = Slots(max(2 * count * pitch, 64 << 20))
        self.arena = SharedMemory.create(slots.capacity_bytes, name="layerflow-bench")
        self.arena.populate()
        places = {
            "slots": np.array([slots.alloc(size)[0] for _ in range(count)], np.int64),
            "random": rng.permutation(2 * count)[:count] * pitch + rng.integers(0, PAGE // 64, count) * 64,
        }
        ids, ones = rng.permutation(blocks).astype(np.int64), np.ones(blocks, np.int64)
        index = np.tile(np.arange(CHUNK_BLOCKS, dtype=np.int64), count)
        self.extents: dict[str, Extents] = {}
        for name, offsets in places.items():
            at = np.repeat(offsets.astype(np.int64), CHUNK_BLOCKS)
            listed = BlockList(memory, 0, self.arena.nbytes, ids, at, ones * CHUNK_BLOCKS, index)
            self.extents[name] = joined([listed.extents(layer, 0, blocks) for layer in layers])
        self.copier = copier_for(memory, self.arena, device_for(memory.device))

    def figures(self, turns: int) -> dict[str, float]:
        calls: dict[str, Call] = {}
        for name, extents in self.extents.items():
            calls[f"{name}, save"] = functools.partial(self.copier.save, extents)
            calls[f"{name}, load"] = functools.partial(self.copier.load, extents)
        seconds = median_seconds(calls, turns)
        return {
            "save_gbps": self.moved / seconds["slots, save"] / 1e9,
            "load_gbps": self.moved / seconds["slots, load"] / 1e9,
            "save_of_random": seconds["random, save"] / seconds["slots, save"],
            "load_of_random": seconds["random, load"] / seconds["slots, load"],
        }


def _tensor_at(base: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of bytes, written once, that begins at `base` modulo a page."""
    nbytes = math.prod(shape)
    raw = torch.ones(nbytes + PAGE, dtype=torch.uint8)
    skip = (base - raw.data_ptr()) % PAGE
    return raw[skip : skip + nbytes].view(shape)


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
