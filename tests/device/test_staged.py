"""Scattered blocks by way of the buffer on the device: right bytes, few copies, one stream, bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device.simulated import Machine, filled
from device.streaming import PATIENCE_S, Engine
from layerflow import EmbeddedServer, Settings
from layerflow.device.base import CopyCounts
from layerflow.findings import Severity
from layerflow.objects import object_bytes
from layerflow.ops import staged
from layerflow.ops.copier import copier_for
from layerflow.ops.extents import BlockList, Extents
from layerflow.ops.paged import PagedMemory
from layerflow.ops.staged import BELOW_BYTES, BELOW_BYTES_SINGLE, INDEX_SLOTS, MIN_ROW_BYTES, fills_of
from layerflow.ops.streamed import StreamCopier
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.system.memfd import SharedMemory
from layerflow_cli import device_check

BLOCKS, SIZE, WIDTH, PER_OBJECT = 128, 4, 128, 16
BLOCK = SIZE * WIDTH  # bytes of one plane
PLANES = (Plane("k", "uint8", (WIDTH,)), Plane("v", "uint8", (WIDTH,)))
SPEC = ModelSpec("m", "c", (GroupSpec("full", SIZE, (0,), PLANES),), chunk_tokens=SIZE * PER_OBJECT)
MOVED = BLOCKS // 2
OBJECTS = MOVED // PER_OBJECT


class Bench:
    """A copier on a simulated device whose kernels, too, run when their stream comes to them.

    Both planes lie in one allocation, block by block, as in vLLM.

    :ivar kernels: the stream of each kernel.
    """

    def __init__(self, machine: Machine, arena: SharedMemory, monkeypatch: pytest.MonkeyPatch, pinned: bool = True):
        self.machine, self.arena = machine, arena
        self.device = machine.accelerator()
        self.memory = torch.from_numpy(filled(2 * BLOCKS * BLOCK, 0)).view(BLOCKS, 2, SIZE, WIDTH)
        paged = PagedMemory(SPEC, {0: {"k": self.memory[:, 0], "v": self.memory[:, 1]}})
        if pinned:
            assert self.device.pin(arena.address, arena.nbytes)
        copier = copier_for(paged, arena, self.device)
        assert isinstance(copier, StreamCopier)
        copier.way = "auto"
        self.copier, self.paged = copier, paged
        self.kernels: list[object] = []
        enqueue_kernels(machine, monkeypatch, self.kernels)

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


def enqueue_kernels(machine: Machine, monkeypatch: pytest.MonkeyPatch, streams: list[object]) -> None:
    """From now on they run when their stream, which is noted, comes to them."""

    def enqueued(kernel: Callable[..., None]) -> Callable[..., None]:
        def enqueue(*tensors: torch.Tensor) -> None:
            stream = machine.current_stream()
            streams.append(stream)
            stream.put(lambda: kernel(*tensors))

        return enqueue

    for name in ("select_rows", "copy_rows"):
        monkeypatch.setattr(staged, name, enqueued(getattr(staged, name)))


@pytest.fixture
def bench(arena: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(Machine(), arena, monkeypatch)
    yield bench
    bench.machine.code = 0
    bench.copier.close()
    bench.device.unpin(arena.address)
    assert bench.machine.registered == {}, "all is given back"


def test_a_save_and_a_load_are_one_copy_each_of_few_ranges(bench: Bench) -> None:
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
    # The list of blocks is sent once; each object is one range.
    assert [(call.ranges, call.to_device) for call in machine.calls] == [(1, True), (OBJECTS, False), (OBJECTS, True)]
    assert bench.device.copies.counts == CopyCounts(batches=2, calls=3, staged=2)
    assert machine.torn == []


def test_the_same_blocks_of_the_next_layer_cost_one_call(bench: Bench) -> None:
    extents = bench.extents()
    bench.copier.load(extents)
    before = len(bench.machine.calls)
    for _ in range(5):
        bench.copier.save(extents)
        bench.copier.load(extents)
    bench.machine.run()
    assert len(bench.machine.calls) - before == 10


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
    streams = {call.stream for call in machine.calls} | set(bench.kernels)
    assert streams == {stream for stream, _ in machine.waits}
    assert len(streams) == 1 and not streams & {engine, machine.default}
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


@pytest.mark.parametrize("rows", [5, MOVED * 2])
def test_the_buffer_is_used_again_in_the_streams_order(
    arena: SharedMemory, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Many fills, and nothing has run when the last is enqueued."""
    monkeypatch.setattr(staged, "STAGING_BYTES", 8 * BLOCK)
    monkeypatch.setattr(staged, "INDEX_ROWS", rows)
    monkeypatch.setattr(staged, "INDEX_SLOTS", 64)
    bench = Bench(Machine(), arena, monkeypatch)
    extents = [bench.extents(seed) for seed in (1, 2)]
    before = bench.bytes_of(extents[0])
    bench.copier.way = "staged"
    bench.copier.save(extents[0])
    bench.copier.load(extents[1])
    assert len(bench.kernels) >= 2 * (2 * MOVED // 8)
    bench.machine.run()
    assert bench.stored(extents[0]) == bench.bytes_of(extents[1]) == before
    assert bench.device.copies.counts.staged == 2
    buffer = bench.copier._staging._buffer
    assert buffer is not None and buffer.numel() == 8 * BLOCK
    bench.copier.close()
    bench.device.unpin(bench.arena.address)


def test_a_list_of_blocks_is_overwritten_only_once_the_device_has_it(bench: Bench) -> None:
    """More block tables than are remembered, on a device that has done nothing yet."""
    bench.arena.array[:] = filled(bench.arena.nbytes, 3)
    seen: list[bool] = []
    for seed in range(2 * INDEX_SLOTS + 1):
        extents = bench.extents(seed)
        bench.copier.load(extents)
        stream = bench.machine.calls[-1].stream
        stream.put(lambda extents=extents: seen.append(bench.bytes_of(extents) == bench.stored(extents)))
    bench.machine.run()
    assert seen == [True] * (2 * INDEX_SLOTS + 1)
    assert len(bench.copier._staging._slots) == INDEX_SLOTS


def test_the_list_that_was_not_used_for_longest_is_forgotten(bench: Bench) -> None:
    def sent(seed: int) -> bool:
        """Loads that table; was its list sent with it?"""
        bench.copier.load(bench.extents(seed))
        bench.machine.run()
        return bench.machine.calls[-1].ranges == OBJECTS + 1

    assert all(sent(seed) for seed in range(INDEX_SLOTS))
    assert not sent(0)
    assert sent(INDEX_SLOTS)
    assert not sent(0) and sent(1)


def test_a_call_that_fails_leaves_no_list_behind_that_was_never_sent(bench: Bench) -> None:
    machine, extents = bench.machine, bench.extents()
    for move in (bench.copier.save, bench.copier.load):
        machine.code = 1
        move(extents)  # range by range, this once
        machine.code = 0
    machine.run()
    before = bench.bytes_of(extents)
    bench.copier.save(extents)
    machine.run()
    assert bench.stored(extents) == before


def test_a_list_that_was_refused_takes_no_other_lists_place(bench: Bench) -> None:
    machine = bench.machine
    saved = [bench.extents(seed) for seed in range(INDEX_SLOTS)]
    kept = []
    for extents in saved:
        kept.append(bench.bytes_of(extents))
        bench.copier.save(extents)
        machine.run()
    machine.code = 1
    bench.copier.save(bench.extents(INDEX_SLOTS))
    machine.code = 0
    machine.run()
    for extents, before in reversed(list(zip(saved, kept, strict=True))):
        bench.copier.save(extents)
        machine.run()
        assert bench.stored(extents) == before


@pytest.mark.parametrize("way", ["auto", "staged"])
def test_a_driver_without_the_call_copies_each_object_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    bench.copier.way = way
    bench.machine.code = 801
    extents = bench.extents()
    # torch's copies of host memory do not wait for a stream here, so neither do the kernels.
    monkeypatch.setattr(staged, "select_rows", lambda source, index, out: torch.index_select(source, 0, index, out=out))
    monkeypatch.setattr(staged, "copy_rows", lambda target, index, source: target.index_copy_(0, index, source))
    before = bench.bytes_of(extents)
    bench.copier.save(extents)
    assert bench.stored(extents) == before
    bench.memory.zero_()
    bench.copier.load(extents)
    assert bench.machine.calls == [] and bench.bytes_of(extents) == before
    assert bench.device.copies.counts == CopyCounts(batches=2, single=2 * OBJECTS + 1, staged=2)


def test_what_is_not_pinned_yet_goes_through_the_pinned_buffer(
    arena: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(Machine(), arena, monkeypatch, pinned=False)
    bench.copier.way = "staged"
    bench.copier.save(bench.extents())
    bench.machine.run()
    assert bench.device.copies.counts == CopyCounts(batches=1, calls=1, bounced=1)
    bench.copier.close()


def test_no_buffer_is_made_while_a_graph_is_captured(bench: Bench) -> None:
    bench.device.leave_captures()
    bench.machine.capturing = True
    bench.copier.save(bench.extents())
    assert bench.device.copies.counts.staged == 0 and bench.copier._staging._buffer is None
    bench.machine.capturing = False
    bench.copier.save(bench.extents())
    bench.machine.capturing = True
    bench.copier.save(bench.extents())
    bench.machine.capturing = False
    bench.machine.run()
    assert bench.device.copies.counts.staged == 2


def test_a_device_without_room_for_the_buffer_is_said_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty", full)
    extents = bench.extents()
    with structlog.testing.capture_logs() as logs:
        bench.copier.save(extents)
        bench.copier.save(extents)
    bench.machine.run()
    assert [line["event"] for line in logs] == ["staging_not_allocated"]
    assert bench.device.copies.counts == CopyCounts(batches=2, calls=2)
    assert bench.stored(extents) == bench.bytes_of(extents)


def ranges(count: int, nbytes: int, *, apart: int = 0, phase: int = 0) -> Extents:
    """Blocks whose places in the arena are neighbours, or `apart` bytes from each other."""
    n = np.arange(count, dtype=np.int64)
    sizes = np.full(count, nbytes, np.int64)
    return Extents(n * (nbytes + apart), (1 << 20) + n[::-1] * 2 * nbytes + phase, sizes, count * nbytes)


@pytest.mark.parametrize(
    ("extents", "in_one_call", "auto", "forced"),
    [
        (ranges(64, BELOW_BYTES - 8), True, True, True),
        (ranges(64, BELOW_BYTES), True, False, True),
        (ranges(64, BELOW_BYTES), False, True, True),
        (ranges(64, BELOW_BYTES_SINGLE), False, False, True),
        (ranges(3, 4096), True, False, True),
        (ranges(64, 4096, apart=64), True, False, True),  # not fewer copies
        (ranges(64, MIN_ROW_BYTES - 8), True, False, False),
        (ranges(64, MIN_ROW_BYTES + 4), True, False, False),  # no whole words
        (ranges(64, 4096, phase=4), True, False, False),
        (ranges(1, staged.STAGING_BYTES * 2), True, False, False),
    ],
)
def test_the_rule(bench: Bench, extents: Extents, in_one_call: bool, auto: bool, forced: bool) -> None:
    staging = bench.copier._staging
    staging._starts = np.array([1 << 20], np.int64)
    for way, wanted in (("auto", auto), ("staged", forced), ("ranges", False)):
        assert (staging.fills(extents, way, 1 << 40, in_one_call=in_one_call) is not None) is wanted, way


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=10),
    st.integers(0, 1 << 30),
    st.sampled_from([512, 768]),
    st.integers(2000, 9000),
)
def test_fills_move_the_bytes_of_the_batch_and_no_others(runs: list[int], seed: int, row: int, piece: int) -> None:
    """Runs of blocks in two allocations, anywhere in both memories."""
    rng = np.random.default_rng(seed)
    nbytes = np.array(runs, np.int64) * row
    gaps = rng.integers(0, 2, nbytes.size) * 64
    arena = np.cumsum(nbytes + gaps) - nbytes
    starts = np.array([10_000, 1_000_000], np.int64)
    of = rng.integers(0, 2, nbytes.size)
    engine = starts[of] + 8 * of + row * rng.permutation(np.cumsum(np.full(nbytes.size, 4)))
    order = rng.permutation(nbytes.size)
    extents = Extents(arena[order], engine[order], nbytes[order], int(nbytes.sum()))
    fills = fills_of(extents, starts, piece, most_bytes=4 * row, most_rows=4)
    assert fills is not None
    wanted = {
        int(to) + n: int(at) + n for at, to, size in zip(*extents[:3], strict=True) for n in range(0, int(size), 8)
    }
    moved: dict[int, int] = {}
    for fill in fills:
        buffer: dict[int, int] = {}
        for at, place, size in zip(*fill.copies[:3], strict=True):
            assert at // piece == (at + size - 1) // piece
            buffer |= {int(place) + n: int(at) + n for n in range(int(size))}
        assert set(buffer) == set(range(fill.copies.total)) and fill.copies.total <= 4 * row
        assert sum(rows.rows.size for rows in fill.rows) <= 4
        for rows in fill.rows:
            for position, number in enumerate(rows.rows.tolist()):
                start = int(starts[rows.region]) + rows.phase + number * rows.row_bytes
                for n in range(0, rows.row_bytes, 8):
                    assert start + n not in moved, "a block is written once"
                    moved[start + n] = buffer[rows.lo + position * rows.row_bytes + n]
        assert [rows.lo for rows in fill.rows[1:]] == [rows.hi for rows in fill.rows[:-1]]
    assert moved == wanted


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_a_devices_streams_gives_the_same_bytes(
    arena: SharedMemory, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    bench = Bench(Machine(seed=seed), arena, monkeypatch)
    other = copier_for(bench.paged, arena, bench.device)  # the other lane's
    other.way = bench.copier.way = "staged"
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


@pytest.mark.parametrize("way", ["auto", "ranges", "staged"])
def test_the_servers_setting_is_the_workers_way(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """An engine saves a prompt and loads it into other blocks, by the way that the configuration names."""
    machine, kernels = Machine(), []
    device = machine.accelerator()
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: device)
    enqueue_kernels(machine, monkeypatch, kernels)
    settings = Settings(pool={"size": "8MiB"}, transfer={"copy_way": way, "step_timeout_ms": 60_000})
    with EmbeddedServer(settings) as server:
        engine = Engine(machine, server)
        try:
            assert engine.agent.wait_warm(PATIENCE_S)
            with machine.running():
                engine.save("one")
                request = engine.request("two")
                with machine.stream(engine.stream), engine.agent.open_step([request]) as step:
                    engine.attend_all(step)
                engine.assert_saw_all()
                assert engine.agent.wait_idle("two", PATIENCE_S)
                engine.agent.close()
        finally:
            machine.run()
    counts = device.copies.counts
    assert counts.staged == (counts.batches if way == "staged" else 0) and counts.batches > 0
    assert bool(kernels) is (way == "staged")


@pytest.mark.parametrize("broken", ["", "copy_rows", "select_rows", "Staging.save"])
def test_the_doctor_tries_both_ways(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    machine = Machine()
    monkeypatch.setattr(device_check, "device_for", lambda _: machine.accelerator())
    kernels: list[object] = []
    if broken:
        monkeypatch.setattr(f"layerflow.ops.staged.{broken}", lambda *_: None)
    enqueue_kernels(machine, monkeypatch, kernels)
    with machine.running():
        findings = {finding.check: finding for finding in device_check.examine_device("cpu")}
    assert {"copies", "staged copies"} <= set(findings)
    assert findings["copies"].state is Severity.OK and "2 calls for 2 batches" in findings["copies"].found
    told = findings["staged copies"]
    assert kernels and told.state is (Severity.PROBLEM if broken else Severity.OK), told
    assert not broken or "transfer.copy_way" in told.advice
    assert machine.registered == {}
