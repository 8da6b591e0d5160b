"""Many small ranges by the kernel: right bytes, one launch, one stream, and lists that the device reads in time."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st

from device.simulated import Machine, filled
from device.streaming import PATIENCE_S, Engine
from layerflow import EmbeddedServer, Settings
from layerflow.device.base import CopyCounts
from layerflow.findings import Severity
from layerflow.objects import object_bytes
from layerflow.ops import kernel
from layerflow.ops.copier import copier_for
from layerflow.ops.extents import BlockList, Extents
from layerflow.ops.kernel import (
    ALIGNED_BYTES,
    BELOW_BYTES,
    BELOW_BYTES_SINGLE,
    LIST_SLOTS,
    MIN_RANGES,
    MIN_RANGES_SINGLE,
    cut,
)
from layerflow.ops.paged import PagedMemory
from layerflow.ops.streamed import StreamCopier
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.system.memfd import SharedMemory
from layerflow_cli import device_check

BLOCKS, SIZE, WIDTH, PER_OBJECT = 128, 4, 128, 16
BLOCK = SIZE * WIDTH  # bytes of one plane
PLANES = (Plane("k", "uint8", (WIDTH,)), Plane("v", "uint8", (WIDTH,)))
SPEC = ModelSpec("m", "c", (GroupSpec("full", SIZE, (0,), PLANES),), chunk_tokens=SIZE * PER_OBJECT)
MOVED = BLOCKS // 2


class Bench:
    """A copier on a simulated device that has the kernel.

    Both planes lie in one allocation, block by block, as in vLLM.
    """

    def __init__(self, machine: Machine, arena: SharedMemory, pinned: bool = True):
        machine.cores = True
        self.machine, self.arena = machine, arena
        self.device = machine.accelerator()
        self.device.prepare()
        self.memory = torch.from_numpy(filled(2 * BLOCKS * BLOCK, 0)).view(BLOCKS, 2, SIZE, WIDTH)
        paged = PagedMemory(SPEC, {0: {"k": self.memory[:, 0], "v": self.memory[:, 1]}})
        if pinned:
            assert self.device.pin(arena.address, arena.nbytes)
        copier = copier_for(paged, arena, self.device)
        assert isinstance(copier, StreamCopier)
        self.copier, self.paged = copier, paged

    def extents(self, seed: int = 1) -> Extents:
        """Half of the blocks, in any order, as objects of 16 blocks that lie apart."""
        n = np.arange(MOVED, dtype=np.int64)
        slot = object_bytes(SPEC.groups[0], PER_OBJECT) + 4096
        blocks = np.random.default_rng(seed).permutation(BLOCKS)[:MOVED].astype(np.int64)
        held = np.full(MOVED, PER_OBJECT, np.int64)
        listed = BlockList(self.paged, 0, self.arena.nbytes, blocks, n // PER_OBJECT * slot, held, n % PER_OBJECT)
        return listed.extents(0, 0, MOVED)

    def bytes_of(self, extents: Extents) -> bytes:
        """What the engine's blocks hold, in the order of the batch."""
        at = extents.engine - self.memory.data_ptr()
        flat = self.memory.view(-1).numpy()
        return b"".join(flat[lo : lo + size].tobytes() for lo, size in zip(at, extents.nbytes, strict=True))

    def stored(self, extents: Extents) -> bytes:
        """The same of the arena."""
        flat = self.arena.array
        return b"".join(flat[lo : lo + size].tobytes() for lo, size in zip(extents.arena, extents.nbytes, strict=True))


@pytest.fixture
def bench(arena: SharedMemory) -> Iterator[Bench]:
    bench = Bench(Machine(), arena)
    yield bench
    bench.copier.close()
    bench.device.unpin(arena.address)
    assert bench.machine.registered == {}, "all is given back"


def test_a_save_and_a_load_are_one_launch_each(bench: Bench) -> None:
    machine, extents = bench.machine, bench.extents()
    assert extents.nbytes.size == 2 * MOVED
    before = bench.bytes_of(extents)
    saved = bench.copier.save(extents)
    assert not saved.query() and not bench.arena.array.any(), "nothing is read before the device has come to it"
    machine.run()
    assert saved.query() and bench.stored(extents) == before
    bench.memory.zero_()
    loaded = bench.copier.load(extents)
    machine.run()
    assert loaded.query() and bench.bytes_of(extents) == before
    outside = np.ones(bench.memory.numel(), bool)
    for at in (extents.engine - bench.memory.data_ptr()).tolist():
        outside[at : at + BLOCK] = False
    assert not bench.memory.view(-1).numpy()[outside].any(), "no block of another is written"
    assert len(machine.kernels) == 2 and machine.calls == []
    assert bench.device.copies.counts == CopyCounts(batches=2, kernels=2)


def test_everything_is_on_the_copiers_stream_behind_the_engines_event(bench: Bench) -> None:
    machine, extents = bench.machine, bench.extents()
    engine = machine.Stream()
    new = filled(bench.memory.numel(), 7)
    with machine.stream(engine):
        writing = engine.put(lambda: bench.memory.view(-1).copy_(torch.from_numpy(new)), held=True)
        computed = bench.device.record()
    saved = bench.copier.save(extents, after=computed)
    machine.run()
    assert not saved.query() and not bench.arena.array.any(), "the engine still writes what is to be read"
    assert set(machine.kernels) == {stream for stream, _ in machine.waits}
    assert not set(machine.kernels) & {engine, machine.default}
    writing.held = False
    machine.run()
    assert saved.query() and bench.stored(extents) == bench.bytes_of(extents)
    assert bench.memory.view(-1).numpy().tobytes() == new.tobytes()


def test_a_loads_event_is_behind_its_last_block(bench: Bench) -> None:
    machine, extents = bench.machine, bench.extents()
    bench.copier.save(extents)
    machine.run()
    before = bench.bytes_of(extents)
    bench.memory.zero_()
    engine, seen = machine.Stream(), []
    loaded = bench.copier.load(extents)
    with machine.stream(engine):
        bench.device.wait(loaded)
        engine.put(lambda: seen.append(bench.bytes_of(extents)))
    while machine.step():
        assert not loaded.query() or bench.bytes_of(extents) == before
    assert seen == [before]


def test_a_list_is_overwritten_only_once_the_device_has_read_it(bench: Bench) -> None:
    """More launches than there are lists, on a device that has done nothing yet."""
    bench.arena.array[:] = filled(bench.arena.nbytes, 3)
    seen: list[bool] = []
    for seed in range(2 * LIST_SLOTS + 1):
        extents = bench.extents(seed)
        bench.copier.load(extents)
        bench.machine.kernels[-1].put(
            lambda extents=extents: seen.append(bench.bytes_of(extents) == bench.stored(extents))
        )
    bench.machine.run()
    assert seen == [True] * (2 * LIST_SLOTS + 1)


def test_more_ranges_than_a_list_has_are_some_launches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LIST_RANGES", 50)
    extents = bench.extents()
    before = bench.bytes_of(extents)
    saved = bench.copier.save(extents)
    bench.machine.run()
    assert saved.query() and bench.stored(extents) == before
    assert len(bench.machine.kernels) == -(-2 * MOVED // 50)
    assert bench.device.copies.counts == CopyCounts(batches=1, kernels=1)


def test_a_driver_without_the_call_leaves_the_kernel_as_it_is(bench: Bench) -> None:
    extents = bench.extents()
    before = bench.bytes_of(extents)
    bench.copier.way, bench.machine.code = "ranges", 801
    bench.copier.save(extents)
    assert bench.device.copies.counts == CopyCounts(batches=1, single=2 * MOVED)
    bench.copier.way = "auto"
    bench.memory.zero_()
    bench.copier.load(extents)
    bench.machine.run()
    assert bench.bytes_of(extents) == before
    assert bench.device.copies.counts.kernels == 1


def test_what_is_not_pinned_yet_goes_through_the_pinned_buffer(arena: SharedMemory) -> None:
    bench = Bench(Machine(), arena, pinned=False)
    bench.copier.way = "kernel"
    bench.copier.save(bench.extents())
    bench.machine.run()
    assert bench.device.copies.counts == CopyCounts(batches=1, calls=1, bounced=1)
    bench.copier.close()


def test_lists_that_cannot_be_pinned_leave_the_ranges_to_the_driver(arena: SharedMemory) -> None:
    machine = Machine(lockable=arena.nbytes)
    with structlog.testing.capture_logs() as logs:
        bench = Bench(machine, arena)
    assert [line["event"] for line in logs] == ["copy_kernel_unavailable"]
    extents = bench.extents()
    bench.copier.save(extents)
    machine.run()
    assert bench.stored(extents) == bench.bytes_of(extents)
    assert bench.device.copies.counts == CopyCounts(batches=1, calls=1)
    bench.copier.close()


def test_a_lane_whose_launch_fails_goes_on_without(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the module is gone")

    extents = bench.extents()
    before = bench.bytes_of(extents)
    with monkeypatch.context() as broken, structlog.testing.capture_logs() as logs:
        broken.setattr(bench.machine, "launch", fails)
        bench.copier.save(extents)
    bench.machine.run()
    bench.memory.zero_()
    bench.copier.load(extents)
    bench.machine.run()
    assert bench.bytes_of(extents) == before
    assert [(line["event"], "is gone" in line["reason"]) for line in logs] == [("copy_kernel_unavailable", True)]
    assert bench.device.copies.counts == CopyCounts(batches=2, calls=2)


def test_its_lists_wait_for_whoever_had_their_memory(arena: SharedMemory) -> None:
    """torch hands memory on that the engine's stream is not done with: in order on the thread's own stream alone."""
    machine = Machine()
    engines = machine.default.put(held=True)
    bench = Bench(machine, arena)
    bench.copier.save(bench.extents())
    machine.run()
    assert not bench.arena.array.any()
    engines.held = False
    machine.run()
    assert bench.arena.array.any()
    bench.copier.close()
    bench.device.unpin(arena.address)


def ranges(count: int, nbytes: int, *, phase: int = 0) -> Extents:
    """Blocks in both memories."""
    n = np.arange(count, dtype=np.int64)
    sizes = np.full(count, nbytes, np.int64)
    return Extents(n * nbytes, (1 << 20) + n[::-1] * 2 * nbytes + phase, sizes, count * nbytes)


@pytest.mark.parametrize(
    ("extents", "in_one_call", "auto", "forced"),
    [
        (ranges(64, BELOW_BYTES - 16), True, True, True),
        (ranges(64, BELOW_BYTES), True, False, True),
        (ranges(64, BELOW_BYTES), False, True, True),
        (ranges(64, BELOW_BYTES_SINGLE), False, False, True),
        (ranges(MIN_RANGES - 1, 4096), True, False, True),
        (ranges(MIN_RANGES_SINGLE - 1, 4096), False, False, True),
        (ranges(MIN_RANGES_SINGLE, 4096), False, True, True),
        (ranges(64, 4096 + 8), True, False, False),  # of no whole 16 bytes
        (ranges(64, 4096, phase=8), True, False, False),
    ],
)
def test_the_rule(bench: Bench, extents: Extents, in_one_call: bool, auto: bool, forced: bool) -> None:
    for way, wanted in (("auto", auto), ("kernel", forced), ("ranges", False), ("of another version", auto)):
        assert bench.copier._kernel.takes(extents, 1 << 30, way, in_one_call=in_one_call) is wanted, way


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 20), st.integers(0, 1 << 30))
def test_ranges_are_cut_and_nothing_else(sizes: list[int], most: int, seed: int) -> None:
    nbytes, most = np.array(sizes, np.int64) * ALIGNED_BYTES, most * ALIGNED_BYTES
    order = np.random.default_rng(seed).permutation(nbytes.size)
    places = (np.cumsum(nbytes) - nbytes)[order]
    dst, src, nbytes = places * 2 + (1 << 20), places + (1 << 30), nbytes[order]
    wanted = {
        int(to) + n: int(at) + n for to, at, size in zip(dst, src, nbytes, strict=True) for n in range(0, size, 16)
    }
    got: dict[int, int] = {}
    for to, at, size in zip(*cut(dst, src, nbytes, most), strict=True):
        assert 0 < size <= most and not size % ALIGNED_BYTES
        for n in range(0, int(size), 16):
            assert int(to) + n not in got, "written once"
            got[int(to) + n] = int(at) + n
    assert got == wanted


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_a_devices_streams_gives_the_same_bytes(arena: SharedMemory, seed: int) -> None:
    bench = Bench(Machine(seed=seed), arena)
    other = copier_for(bench.paged, arena, bench.device)  # the other lane's
    other.way, bench.copier.way = "kernel", "ranges" if seed % 2 else "kernel"
    tables = [bench.extents(table) for table in range(3)]
    for first, then in itertools.pairwise(tables):
        before = bench.bytes_of(first)
        saved = bench.copier.save(first)
        loaded = other.load(then, after=saved)
        bench.machine.run()
        assert loaded.query() and bench.bytes_of(then) == before
    bench.copier.close()
    other.close()
    bench.device.unpin(arena.address)


@pytest.mark.parametrize("way", ["auto", "ranges", "kernel"])
def test_the_servers_setting_is_the_workers_way(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """An engine saves a prompt and loads it into other blocks, by the way that the configuration names."""
    machine = Machine(cores=True)
    device = machine.accelerator()
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: device)
    settings = Settings(pool={"size": "8MiB"}, transfer={"copy_way": way, "step_timeout_ms": 60_000})
    with EmbeddedServer(settings) as server:
        engine = Engine(machine, server)
        try:
            assert engine.agent.wait_warm(PATIENCE_S)
            with machine.running():
                engine.save("one")
                engine.load("two")
                engine.agent.close()
        finally:
            machine.run()
    counts = device.copies.counts
    assert counts.batches > 0
    # Two planes of eight blocks a layer are too few to pay.
    assert counts.kernels == (counts.batches if way == "kernel" else 0)


def spoil(address: int, nbytes: int) -> None:
    last = ctypes.c_uint8.from_address(address + nbytes - 1)
    last.value = (last.value + 1) % 256


@pytest.mark.parametrize("found", ["right", "wrong", "none"])
def test_the_doctor_tries_the_kernel_too(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    machine = Machine(cores=found != "none", breaks=spoil if found == "wrong" else None)
    monkeypatch.setattr(device_check, "device_for", lambda _: machine.accelerator())
    with machine.running():
        findings = {finding.check: finding for finding in device_check.examine_device("cpu")}
    assert findings["copies"].state is Severity.OK and "2 calls for 2 batches" in findings["copies"].found
    told = findings["copies by kernel"]
    states = {"right": Severity.OK, "wrong": Severity.PROBLEM, "none": Severity.WARNING}
    assert told.state is states[found], told
    assert bool(machine.kernels) is (found != "none")
    assert found != "wrong" or "transfer.copy_way" in told.advice
    assert machine.registered == {}
