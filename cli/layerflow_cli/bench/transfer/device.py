"""How fast scattered blocks move to and from a device, against one contiguous copy from pinned memory in the same run.

Blocks lie at random places of the engine's memory. As a worst case every object holds one of them, and lies at a random
place too; with more blocks to an object, their ranges of the arena are neighbours, as those of a chunk are.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from layerflow.device import Device, device_for, is_emulated
from layerflow.device.base import CopyCounts
from layerflow.objects import object_bytes
from layerflow.ops.copier import copier_for, copy_native
from layerflow.ops.extents import BlockList, Extents
from layerflow.ops.paged import PagedMemory
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.system.memfd import SharedMemory
from layerflow_cli.bench.transfer.turns import median_seconds

BLOCK_KIB = (16, 64, 256)
TOKENS = 16  # of one block
ON_DEVICE, ON_CPU = 1024, 64  # MiB that one copy moves
BATCH_BYTES = 64 << 20  # of one batch, as lanes copy at most
MATRIX_ON_DEVICE, MATRIX_ON_CPU = 4096, 512
PRODUCTS = 20  # of one turn
WAITS = 200


def measure(
    device: str = "cpu",
    moved_mib: int = 0,
    turns: int = 5,
    block_kib: Sequence[float] = BLOCK_KIB,
    matrix: int = 0,
    seed: int = 0,
    way: str = "auto",
    blocks_per_object: int = 1,
) -> dict[str, Any]:
    """Move random blocks both ways through the copier that engines use; medians of all turns.

    :param device: ``"cpu"``, ``"cuda"``, ``"npu"``, or one of several, e.g. ``"cuda:1"``.
    :param moved_mib: MiB that are moved each way; 0 = 1024 on a device, 64 on the cpu.
    :param block_kib: block sizes, KiB; multiples of 1/64.
    :param matrix: rows of the matrices that are multiplied; 0 = 4096 on a device, 512 on the cpu.
    :param way: ``transfer.copy_way``.
    :param blocks_per_object: a model's chunk has as many blocks as its tokens fill.
    :returns: ``h2d`` and ``d2h``: for each block size ``gbps``, and ``ratio``: to the contiguous copy that way.
        ``pinned_gbps``: that copy, the faster way. ``calls_per_batch``: native calls, launches or single copies.
        ``compute_slowdown``: how much longer matrix products take beside loads, 0.03 = 3 %. ``wait_us``: what an event
        that is recorded, waited for by a stream and asked by the host costs the calling thread. ``first_byte_us``: from
        submitting one block to its event. ``register_gb_per_s``: of pinning, None where nothing is pinned.
        ``emulated``: the device is an emulation, and no figure says anything about a real one.
    :raises Unsupported: no such device here.
    """
    target = device_for(device)
    target.prepare()
    matrix = matrix or (MATRIX_ON_CPU if target.kind == "cpu" else MATRIX_ON_DEVICE)
    moved = (moved_mib or (ON_CPU if target.kind == "cpu" else ON_DEVICE)) << 20
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fields = {
            f"{kib:g}KiB": _field_figures(
                _Field(target, device, int(kib * 1024), blocks_per_object, moved, matrix, seed, way), turns
            )
            for kib in block_kib
        }
    finally:
        torch.set_num_threads(threads)
    ways = {way: {size: figures[way] for size, figures in fields.items()} for way in ("h2d", "d2h")}
    first = next(iter(fields.values()))
    pinned = max(figures["pinned_gbps"] for figures in fields.values())
    rest = ("calls_per_batch", "compute_slowdown", "wait_us", "first_byte_us", "register_gb_per_s")
    about = {"device": device, "emulated": is_emulated(device), "way": way, "blocks_per_object": blocks_per_object}
    return {**ways, "pinned_gbps": pinned, **{name: first[name] for name in rest}, **about}


def _field_figures(field: _Field, turns: int) -> dict[str, Any]:
    try:
        return field.figures(turns)
    finally:
        field.close()


class _Field:
    """Engine memory on the device, a pinned arena, and random blocks of one size in each."""

    def __init__(
        self,
        target: Device,
        where: str,
        block_bytes: int,
        per_object: int,
        moved: int,
        matrix: int,
        seed: int,
        way: str,
    ) -> None:
        self.target = target
        objects = moved // (block_bytes * per_object)
        count = objects * per_object
        self.moved = count * block_bytes
        group = GroupSpec("full", TOKENS, (0,), (Plane("kv", "uint8", (block_bytes // TOKENS,)),))
        spec = ModelSpec("bench", "bench", (group,), chunk_tokens=TOKENS * per_object)
        self.engine = torch.empty(count, TOKENS, block_bytes // TOKENS, dtype=torch.uint8, device=where)
        memory = PagedMemory(spec, {0: {"kv": self.engine}})
        slot = object_bytes(group, per_object)
        self.arena = SharedMemory.create(objects * slot, name="layerflow-bench")
        self.arena.populate()
        began = time.perf_counter()
        self.pinned = target.pin(self.arena.address, self.arena.nbytes)
        self.register_s = time.perf_counter() - began
        self.flat_arena = torch.from_numpy(self.arena.array)[: self.moved]
        rng = np.random.default_rng(seed)
        ids, places = (rng.permutation(number).astype(np.int64) for number in (count, objects))
        inside = np.tile(np.arange(per_object), objects)
        sizes = np.full(count, per_object, np.int64)
        blocks = BlockList(memory, 0, self.arena.nbytes, ids, places.repeat(per_object) * slot, sizes, inside)
        step = max(1, BATCH_BYTES // block_bytes)
        self.batches = [blocks.extents(0, at, min(count, at + step)) for at in range(0, count, step)]
        self.one = blocks.extents(0, 0, 1)
        self.copier = copier_for(memory, self.arena, target)
        self.copier.way = way
        self.matrix = torch.randn(matrix, matrix).to(where)  # matrix units run faster on equal numbers

    def close(self) -> None:
        self.copier.close()
        if self.pinned:
            self.target.unpin(self.arena.address)
        self.arena.close()

    def load(self) -> None:
        for batch in self.batches:
            self.copier.load(batch)
        self.copier.drain()

    def save(self) -> None:
        for batch in self.batches:
            self.copier.save(batch)
        self.copier.drain()

    def contiguous(self, to_device: bool) -> None:
        engine = self.engine.view(-1)
        if to_device:
            engine.copy_(self.flat_arena, non_blocking=True)
        else:
            self.flat_arena.copy_(engine, non_blocking=True)
        self.settle()

    def settle(self) -> None:
        """Wait until the calling thread's stream has done all."""
        self.target.record().synchronize()

    def compute(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self.matrix, self.matrix)
        self.settle()

    def figures(self, turns: int) -> dict[str, Any]:
        before = self.target.copies.counts
        seconds = median_seconds(
            {
                "h2d": self.load,
                "d2h": self.save,
                "pinned h2d": lambda: self.contiguous(True),
                "pinned d2h": lambda: self.contiguous(False),
                "first byte": lambda: _synchronize(self.copier.load(self.one)),
                "compute": self.compute,
            },
            turns,
        )
        beside = statistics.median([self._compute_beside() for _ in range(turns)])
        gbps = {name: self.moved / taken / 1e9 for name, taken in seconds.items()}
        ways = {way: {"gbps": gbps[way], "ratio": gbps[way] / gbps[f"pinned {way}"]} for way in ("h2d", "d2h")}
        return ways | {
            "pinned_gbps": max(gbps["pinned h2d"], gbps["pinned d2h"]),
            "calls_per_batch": self._calls(before),
            "compute_slowdown": beside / seconds["compute"] - 1,
            "wait_us": self._waits(),
            "first_byte_us": seconds["first byte"] * 1e6,
            "register_gb_per_s": self.arena.nbytes / self.register_s / 1e9 if self.pinned else None,
        }

    def _calls(self, before: CopyCounts) -> float:
        batches, calls, single, _, kernels = (
            now - then for now, then in zip(self.target.copies.counts, before, strict=True)
        )
        if batches:
            return (calls + single + kernels) / batches
        return 1.0 if copy_native is not None else statistics.mean(_ranges(batch) for batch in self.batches)

    def _compute_beside(self) -> float:
        """Seconds that the same products take while another thread loads all the time."""
        stop = threading.Event()

        def move() -> None:
            while not stop.is_set():
                self.load()

        mover = threading.Thread(target=move)
        mover.start()
        try:
            began = time.perf_counter()
            self.compute()
            return time.perf_counter() - began
        finally:
            stop.set()
            mover.join()

    def _waits(self) -> dict[str, float]:
        taken = []
        for _ in range(WAITS):
            began = time.perf_counter()
            event = self.target.record()
            self.target.wait(event)
            event.query()
            taken.append((time.perf_counter() - began) * 1e6)
        return {"p50": float(np.percentile(taken, 50)), "p99": float(np.percentile(taken, 99))}


def _ranges(batch: Extents) -> int:
    return int(batch.nbytes.size)


def _synchronize(event: Any) -> None:
    if event is not None:
        event.synchronize()
