"""A batch is one native call, on the copier's stream, behind the event that it was told to come after."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import structlog
import torch

from device.simulated import POOL, Machine, filled
from layerflow.device.accelerator import Accelerator, BatchCopied, CannNative, CudaNative
from layerflow.device.base import CopyCounts
from layerflow.device.poller import Poller
from layerflow.errors import InvalidTransition
from layerflow.ops.base import PinnedPart
from layerflow.ops.copier import copier_for
from layerflow.ops.extents import BlockList, Extents
from layerflow.ops.paged import PagedMemory
from layerflow.ops.streamed import MOST_REFUSED, StreamCopier
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.system.memfd import SharedMemory

BLOCKS, SIZE, WIDTH = 64, 4, 32
PLANES = (Plane("k", "uint8", (WIDTH,)), Plane("v", "uint8", (WIDTH,)))
SPEC = ModelSpec("m", "c", (GroupSpec("full", SIZE, (0,), PLANES),), chunk_tokens=SIZE * BLOCKS)


class Bench:
    """A copier on a simulated device, with the extents of every block, none of which lies beside the next."""

    def __init__(
        self, machine: Machine, arena: SharedMemory, *, pinned: bool = True, part: PinnedPart | None = None
    ) -> None:
        self.machine, self.arena = machine, arena
        self.device: Accelerator = machine.accelerator()
        self.planes = {
            name: torch.from_numpy(filled(BLOCKS * SIZE * WIDTH, seed).reshape(BLOCKS, SIZE, WIDTH))
            for seed, name in enumerate("kv")
        }
        self.memory = PagedMemory(SPEC, {0: self.planes})
        if pinned:
            assert self.device.pin(arena.address, arena.nbytes)
        copier = copier_for(self.memory, arena, self.device, part)
        assert isinstance(copier, StreamCopier)
        self.copier = copier
        order = np.random.default_rng(1).permutation(BLOCKS)
        n = np.arange(BLOCKS, dtype=np.int64)
        held = np.full(BLOCKS, BLOCKS, np.int64)
        blocks = BlockList(self.memory, 0, arena.nbytes, order, np.zeros(BLOCKS, np.int64), held, n)
        self.extents: Extents = blocks.extents(0, 0, BLOCKS)
        assert self.extents.nbytes.size > BLOCKS

    def engine_bytes(self) -> list[bytes]:
        return [plane.numpy().tobytes() for plane in self.planes.values()]

    def clear(self) -> None:
        for plane in self.planes.values():
            plane.zero_()


@pytest.fixture
def bench(arena: SharedMemory) -> Iterator[Bench]:
    bench = Bench(Machine(), arena)
    yield bench
    bench.device.unpin(arena.address)


def test_a_batch_is_one_call_both_ways(bench: Bench) -> None:
    before = bench.engine_bytes()
    saved = bench.copier.save(bench.extents)
    assert not saved.query()
    assert not bench.arena.array.any(), "nothing is copied before the device has come to it"
    bench.machine.run()
    assert saved.query()
    bench.clear()
    loaded = bench.copier.load(bench.extents)
    assert not loaded.query()
    bench.machine.run()
    assert loaded.query()
    assert bench.engine_bytes() == before
    assert [(call.ranges, call.to_device) for call in bench.machine.calls] == [
        (bench.extents.nbytes.size, False),
        (bench.extents.nbytes.size, True),
    ]
    assert bench.device.copies.counts == CopyCounts(batches=2, calls=2, single=0)


class TestStreams:
    def test_are_nobody_elses_however_many_the_engine_takes(self, bench: Bench) -> None:
        of_engine = {bench.machine.Stream().cuda_stream for _ in range(2 * POOL)}
        other = StreamCopier(bench.memory, bench.arena, bench.device, lambda *_: None)
        bench.copier.save(bench.extents)
        other.load(bench.extents)
        used = {call.stream.cuda_stream for call in bench.machine.calls}
        assert len(used) == 2
        assert not used & of_engine

    def test_are_given_back_and_nothing_is_copied_behind_that(self, bench: Bench) -> None:
        streams = len(bench.machine.streams)
        bench.copier.save(bench.extents)
        with bench.machine.running():
            bench.copier.close()
        assert len(bench.machine.streams) == streams - 1
        with pytest.raises(InvalidTransition, match="has ended"):
            bench.copier.load(bench.extents)
        bench.copier.drain()
        bench.copier.close()

    def test_of_torch_are_taken_where_the_driver_makes_none(self, arena: SharedMemory) -> None:
        bench = Bench(Machine(own_streams=0), arena)
        of_torch = list(bench.machine.streams)
        bench.copier.save(bench.extents)
        with bench.machine.running():
            bench.copier.close()
        assert bench.machine.calls[0].stream in of_torch[1:]
        assert bench.machine.streams == of_torch
        bench.device.unpin(arena.address)


def test_a_copy_waits_on_its_own_stream_for_what_the_engine_computes_on_its_stream(bench: Bench) -> None:
    machine, before = bench.machine, bench.engine_bytes()
    engine = machine.Stream()
    with machine.stream(engine):  # of the engine's thread, and not the default one
        writing = engine.put(bench.clear, held=True)
        computed = bench.device.record()
    saved = bench.copier.save(bench.extents, after=computed)
    machine.run()
    assert not saved.query(), "the engine still writes what is to be read"
    assert {stream for stream, _ in machine.waits} == {machine.calls[0].stream}
    assert machine.calls[0].stream not in (engine, machine.default)
    writing.held = False
    machine.run()
    assert saved.query()
    assert not bench.arena.array.any(), "what was read is what the engine wrote last"
    assert before != bench.engine_bytes()


def test_the_engines_stream_waits_on_the_device_for_a_load(bench: Bench) -> None:
    machine, before = bench.machine, bench.engine_bytes()
    bench.copier.save(bench.extents)
    machine.run()
    bench.clear()
    engine, seen = machine.Stream(), []
    loaded = bench.copier.load(bench.extents)
    with machine.stream(engine):
        bench.device.wait(loaded)
        engine.put(lambda: seen.append(bench.engine_bytes()))
    machine.run()
    assert seen == [before]


def test_where_nothing_can_be_pinned_each_range_is_a_copy_and_counted(arena: SharedMemory) -> None:
    bench = Bench(Machine(lockable=4096), arena, pinned=False)
    before = bench.engine_bytes()
    bench.copier.save(bench.extents)
    bench.clear()
    bench.copier.load(bench.extents)
    assert bench.engine_bytes() == before
    assert bench.machine.calls == []
    assert bench.device.copies.counts == CopyCounts(batches=2, calls=0, single=2 * bench.extents.nbytes.size)


def test_a_driver_without_the_call_is_asked_once(bench: Bench) -> None:
    bench.machine.code = 801
    before = bench.engine_bytes()
    bench.copier.save(bench.extents)
    bench.machine.code = 0
    bench.clear()
    bench.copier.load(bench.extents)
    assert bench.engine_bytes() == before
    assert bench.machine.calls == []
    assert bench.device.copies.counts.single == 2 * bench.extents.nbytes.size


def test_what_the_driver_refuses_for_once_is_copied_range_by_range(bench: Bench) -> None:
    before = bench.engine_bytes()
    bench.machine.code = 1
    with structlog.testing.capture_logs() as logs:
        bench.copier.save(bench.extents)
    [told] = [entry for entry in logs if entry["event"] == "batch_copy_refused"]
    assert (told["code"], told["at"], told["ranges"]) == (1, 1, bench.extents.nbytes.size)
    bench.machine.code = 0
    bench.clear()
    bench.copier.load(bench.extents)
    bench.machine.run()
    assert bench.engine_bytes() == before
    counts = bench.device.copies.counts
    assert counts.single == bench.extents.nbytes.size and counts.calls == 1


def test_a_driver_that_refuses_every_batch_is_asked_for_no_more(bench: Bench) -> None:
    bench.machine.code = 1
    for _ in range(MOST_REFUSED):
        bench.copier.load(bench.extents)
    bench.machine.code = 0
    bench.copier.load(bench.extents)
    assert bench.machine.calls == []


def test_more_ranges_than_the_driver_takes_are_as_few_calls_as_can_be(arena: SharedMemory) -> None:
    bench = Bench(Machine(most=50), arena)
    before = bench.engine_bytes()
    bench.copier.save(bench.extents)
    bench.machine.run()
    bench.clear()
    bench.copier.load(bench.extents)
    bench.machine.run()
    bench.device.unpin(arena.address)
    assert bench.engine_bytes() == before
    calls = -(-bench.extents.nbytes.size // 50)
    assert bench.device.copies.counts == CopyCounts(batches=2, calls=2 * calls)


def test_nothing_of_ours_invalidates_a_graph_that_is_captured(arena: SharedMemory) -> None:
    """An agent attaches, and moves bytes, on threads of its own while the engine's thread captures."""
    machine = Machine()
    machine.accelerator()  # the engine's thread makes an agent, before it captures
    machine.capturing = True
    failed: list[BaseException] = []

    def attach_and_move() -> None:
        try:
            bench = Bench(machine, arena)
            event = bench.copier.save(bench.extents)
            poller = Poller("test-poller", prepare=bench.device.leave_captures)
            fired = threading.Event()
            poller.watch(event, fired.set)
            machine.run()
            assert fired.wait(20)
            assert poller.close(20)
            bench.device.unpin(arena.address)
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failed.append(error)

    thread = threading.Thread(target=attach_and_move, name="link")
    thread.start()
    thread.join()
    assert not failed, failed
    assert machine.invalidated == []
    Machine.called(machine, "register")
    assert machine.invalidated == ["register by MainThread"], "the test would notice"


@pytest.mark.parametrize("call", ["stream", "on", "pin"])
def test_each_call_leaves_captures_by_itself(arena: SharedMemory, call: str) -> None:
    """Whichever is a thread's first."""
    machine = Machine()
    device, stream = machine.accelerator(), machine.Stream()
    calls = {
        "stream": device.stream,
        "on": lambda: device.on(stream).__enter__(),
        "pin": lambda: device.pin(arena.address, arena.nbytes),
    }
    machine.capturing = True
    thread = threading.Thread(target=lambda: (calls[call](), machine.called("next")), name="lane")
    thread.start()
    thread.join()
    assert machine.during[-1] == "next" and machine.invalidated == []


class Library:
    """A runtime's library that notes what it is called with."""

    def __init__(self, code: int = 0, failed: int | None = None) -> None:
        self.code, self.failed = code, failed
        self.cleared = 0
        self.arguments: tuple[object, ...] = ()

    def cudaMemcpyBatchAsync(self, *arguments: object) -> int:
        self.arguments = arguments
        if self.failed is not None:
            arguments[7]._obj.value = self.failed  # type: ignore[attr-defined]
        return self.code

    def aclrtMemcpyBatchAsync(self, *arguments: object) -> int:
        self.arguments = arguments
        if self.failed is not None:
            arguments[8]._obj.value = self.failed  # type: ignore[attr-defined]
        return self.code

    def cudaStreamCreateWithPriority(self, stream: object, flags: int, priority: int) -> int:
        self.arguments = (flags, priority)
        plain(stream).value = None if self.code else 77  # type: ignore[attr-defined]
        return self.code

    def cudaStreamDestroy(self, stream: ctypes.c_void_p) -> int:
        self.arguments = (stream.value,)
        return self.code

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 0


DST, SRC, BYTES = (np.arange(3, dtype=np.int64) + at for at in (100, 200, 300))


def plain(argument: object) -> object:
    """A value, or the structure that is pointed to."""
    return getattr(argument, "_obj", argument)


def read(argument: object) -> list[int]:
    """The array of three that is pointed to."""
    assert isinstance(argument, ctypes.c_void_p)
    assert argument.value
    return list((ctypes.c_int64 * 3).from_address(argument.value))


@pytest.mark.parametrize(("version", "arguments"), [(12080, 9), (12090, 9), (13000, 8)])
def test_cuda_gets_the_arguments_of_its_version(version: int, arguments: int) -> None:
    library = Library()
    native = CudaNative(library, version)  # type: ignore[arg-type]
    assert native.copy_batch(DST, SRC, BYTES, 7, True) == BatchCopied(0)
    told = library.arguments
    assert len(told) == arguments
    assert [read(each) for each in told[:3]] == [DST.tolist(), SRC.tolist(), BYTES.tolist()]
    count, attributes, applies_from, of, stream = (plain(each) for each in (*told[3:7], told[-1]))
    assert ctypes.sizeof(attributes) == 24  # type: ignore[arg-type]
    assert (attributes.access_order, attributes.flags) == (1, 1)  # type: ignore[attr-defined]
    assert [each.value for each in (count, applies_from, of, stream)] == [3, 0, 1, 7]  # type: ignore[attr-defined]


def test_an_error_of_cuda_is_not_left_for_the_engine_to_find() -> None:
    library = Library(code=1, failed=2)
    assert CudaNative(library, 12080).copy_batch(DST, SRC, BYTES, 7, True) == BatchCopied(1, 2)  # type: ignore[arg-type]
    assert library.cleared == 1


def test_a_stream_of_cuda_waits_for_no_default_stream() -> None:
    library = Library()
    native = CudaNative(library, 12080)  # type: ignore[arg-type]
    assert native.new_stream() == 77
    assert library.arguments == (1, 0), "cudaStreamNonBlocking, and the priority of torch's"
    assert native.end_stream(77) == 0
    assert library.arguments == (77,)
    library.code = 2
    assert (native.new_stream(), native.end_stream(77), library.cleared) == (0, 2, 2)


@pytest.mark.parametrize("to_device", [True, False])
def test_cann_gets_the_direction_with_the_attributes(to_device: bool) -> None:
    library = Library(code=0, failed=None)
    assert CannNative(library, 5).copy_batch(DST, SRC, BYTES, 7, to_device) == BatchCopied(0)  # type: ignore[arg-type]
    told = library.arguments
    assert [read(each) for each in told[:4]] == [DST.tolist(), BYTES.tolist(), SRC.tolist(), BYTES.tolist()]
    attributes = plain(told[5])
    assert ctypes.sizeof(attributes) == 32  # type: ignore[arg-type]
    fields = (attributes.dst_id, attributes.dst_type, attributes.src_id, attributes.src_type)  # type: ignore[attr-defined]
    assert fields == ((5, 1, 0, 0) if to_device else (0, 0, 5, 1))
    assert len(told) == 10
