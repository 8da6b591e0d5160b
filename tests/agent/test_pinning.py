"""An agent is attached, and moves bytes, long before its arena is pinned; a captured graph is left alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from device.simulated import Machine
from device.streaming import BLOCKS, LAYERS, PATIENCE_S, SIZE, SPEC, WIDTH, Engine
from e2e.known import eventually

from layerflow import Agent, EmbeddedServer, Settings
from layerflow.agent import dispatcher, mapping
from layerflow.device.captures import CaptureGate
from layerflow.ops.bounced import SLOT_BYTES, SLOTS
from layerflow.ops.kernel import LIST_RANGES, LIST_SLOTS
from layerflow.system.memfd import SharedMemory

PIECE = 64 << 10
MIB = 1 << 20
ROWS = (BLOCKS, SIZE, WIDTH)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pins nothing but what the two copiers have for themselves until it is let."""
    machine = Machine(pins=threading.Semaphore(4))
    device = machine.accelerator()
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: device)
    monkeypatch.setattr(mapping.Pinning.__init__, "__defaults__", (PIECE,))
    return machine


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    settings = Settings(pool={"size": "8MiB"}, server={"heartbeat_ms": 20}, transfer={"step_timeout_ms": 60_000})
    with EmbeddedServer(settings) as server:
        yield server


def let(machine: Machine, pieces: int = 10_000) -> None:
    assert machine.pins is not None
    machine.pins.release(pieces)


def test_saves_and_loads_work_while_the_arena_is_being_pinned(machine: Machine, server: EmbeddedServer) -> None:
    engine = Engine(machine, server)
    try:
        assert engine.agent.attached and not engine.agent.wait_warm(0.0)
        with machine.running():
            engine.save("one")
            engine.load("two")
        told = engine.agent.statistics()
        assert told.pinned_bytes == 0
        assert told.copies.bounced == told.copies.batches > 0 and not told.copies.single
        assert machine.torn == []

        let(machine)
        assert engine.agent.wait_warm(PATIENCE_S)
        assert engine.agent.statistics().pinned_bytes == 8 * MIB
        engine.seen.clear()
        with machine.running():
            engine.load("three")
        after = engine.agent.statistics().copies
        assert after.bounced == told.copies.bounced and after.batches > told.copies.batches
        assert machine.torn == [], "no range across two pieces"
        assert set(machine.registered.values()) >= {PIECE}
    finally:
        with machine.running():
            engine.agent.close()
    assert machine.registered == {}, "all is given back"


def test_status_and_log_tell_how_far_pinning_is(machine: Machine, server: EmbeddedServer) -> None:
    with structlog.testing.capture_logs() as logs:
        engine = Engine(machine, server)
        try:
            let(machine, 3)
            assert eventually(lambda: engine.agent.statistics().pinned_bytes == 3 * PIECE, PATIENCE_S)
            assert eventually(lambda: pinned(engine) == 3 * PIECE, PATIENCE_S)
            let(machine)
            assert eventually(lambda: pinned(engine) == 8 * MIB, PATIENCE_S)
            assert {"event": "arena_pinning", "nbytes": 8 * MIB}.items() <= next(
                line for line in logs if line["event"] == "arena_pinning"
            ).items()
            assert eventually(lambda: any(line["event"] == "arena_pinned" for line in logs), PATIENCE_S)
        finally:
            engine.agent.close()


def pinned(engine: Engine) -> int | None:
    sessions = engine.agent._control.status(PATIENCE_S)["sessions"]
    return next(session["pinned_bytes"] for session in sessions if session["memory"])


def test_a_worker_of_an_arena_of_64_gib_attaches_before_any_of_it_is_pinned(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of it is touched either: nothing that the attachment waits for depends on its size."""
    monkeypatch.setattr("layerflow.system.machine.total_bytes", lambda: 1 << 40)  # smaller machines refuse it
    settings = Settings(pool={"size": "64GiB", "warm": False}, transfer={"step_timeout_ms": 60_000})
    with EmbeddedServer(settings) as server:
        engine = Engine(machine, server)
        try:
            assert engine.agent.attached
            assert engine.agent.statistics().pinned_bytes == 0
            with machine.running():
                engine.save("one")
                engine.load("two")
        finally:
            let(machine)
            with machine.running():
                engine.agent.close()
    assert machine.registered == {}


def test_a_limit_on_pinned_memory_leaves_the_rest_to_the_buffer(machine: Machine, server: EmbeddedServer) -> None:
    buffers = 2 * (SLOTS * SLOT_BYTES + LIST_SLOTS * LIST_RANGES * 3 * 8)
    machine.lockable = buffers + 2 * PIECE
    let(machine)
    with structlog.testing.capture_logs() as logs:
        engine = Engine(machine, server)
        try:
            assert engine.agent.wait_warm(PATIENCE_S)
            assert engine.agent.statistics().pinned_bytes == 2 * PIECE
            with machine.running():
                engine.save("one")
                engine.load("two")
        finally:
            with machine.running():
                engine.agent.close()
    assert machine.torn == [] and machine.registered == {}
    (told,) = [line for line in logs if line["event"] == "arena_not_pinned"]
    assert told["pinned_bytes"] == 2 * PIECE and "ulimit -l" in told["reason"]


@pytest.mark.parametrize("told", [True, False], ids=["told", "seen"])
def test_nothing_is_attached_pinned_or_made_during_a_capture(machine: Machine, tmp_path: Path, told: bool) -> None:
    """The server comes while the engine captures; the worker attaches once it has."""
    let(machine)
    endpoint = f"ipc://{tmp_path}/private/control"
    tensors = {layer: {plane: torch.zeros(ROWS, dtype=torch.uint8) for plane in "kv"} for layer in range(LAYERS)}
    with Agent(endpoint, SPEC, tensors, wait_s=0) as agent, contextlib.ExitStack() as capture:
        if told:
            capture.enter_context(agent.capture())
        else:
            machine.capturing = True
        link, asked = agent._link, threading.Semaphore(0)
        may_attach = link._listener.may_attach

        def asks() -> bool:
            asked.release()
            return may_attach()

        with EmbeddedServer(Settings(pool={"size": "8MiB"}), endpoint) as _, pytest.MonkeyPatch.context() as patch:
            patch.setattr(link._listener, "may_attach", asks)
            tried: list[bool] = []
            make = dispatcher.ArenaAccess
            patch.setattr(dispatcher, "ArenaAccess", lambda *made: tried.append(machine.capturing) or make(*made))
            for _ in range(3):
                assert asked.acquire(timeout=PATIENCE_S)
            assert not agent.attached and machine.registered == {}
            assert not {"register", "stream", "event", "synchronize"} & set(machine.during)
            assert len(tried) <= 1, "but for an attempt that the capture has overtaken, no server is even asked"
            capture.close()
            machine.capturing = False
            assert agent.wait_attached(PATIENCE_S)
            assert agent.wait_warm(PATIENCE_S)
            agent.close()
    assert machine.invalidated == []


def test_bytes_that_move_beside_a_capture_do_not_disturb_it(machine: Machine, server: EmbeddedServer) -> None:
    """Lanes, link and poller go on with steps that were opened before; each thread of them has left captures."""
    let(machine)
    engine = Engine(machine, server)
    try:
        assert engine.agent.wait_warm(PATIENCE_S)
        with machine.running():
            engine.save("one")
            request = engine.request("two")
            zeroing = engine.stream.put(held=True)  # the engine's: loads wait for it
            machine.capturing = True
            with machine.stream(engine.stream), engine.agent.open_step([request]) as step:
                zeroing.held = False
                engine.attend_all(step)
            engine.assert_saw_all()
            assert engine.agent.wait_idle("two", PATIENCE_S)
            machine.capturing = False
        beside = [call for call in machine.invalidated if not call.endswith(threading.current_thread().name)]
        assert {"event", "record", "query"} <= set(machine.during) and beside == []
    finally:
        machine.capturing = False
        with machine.running():
            engine.agent.close()


def test_pinning_pauses_for_a_capture(machine: Machine, server: EmbeddedServer) -> None:
    engine, over = Engine(machine, server), threading.Event()
    try:
        let(machine, 1)
        assert eventually(lambda: engine.agent.statistics().pinned_bytes == PIECE, PATIENCE_S)
        assert eventually(lambda: engine.agent._gate._working, PATIENCE_S), "the driver has been given the next piece"
        entered = threading.Event()

        def captures() -> None:
            with engine.agent.capture():
                entered.set()
                assert over.wait(PATIENCE_S)

        thread = threading.Thread(target=captures)
        thread.start()
        assert eventually(lambda: engine.agent._gate._captures, PATIENCE_S)
        assert not entered.wait(0.05), "the driver pins a piece: the capture waits for that"
        let(machine, 1)
        assert entered.wait(PATIENCE_S)
        assert eventually(lambda: engine.agent.statistics().pinned_bytes == 2 * PIECE, PATIENCE_S)
        let(machine)
        assert not eventually(lambda: engine.agent.statistics().pinned_bytes > 2 * PIECE, 0.1)
        over.set()
        thread.join()
        assert engine.agent.wait_warm(PATIENCE_S)
        assert engine.agent.statistics().pinned_bytes == 8 * MIB
    finally:
        over.set()
        let(machine)
        engine.agent.close()


def test_work_that_is_given_up_during_a_capture_is_not_done() -> None:
    gate = CaptureGate(lambda: True)
    with gate.work(lambda: True) as may:
        assert may is False
    assert gate.capturing
    with CaptureGate().work() as may:
        assert may is True


def test_nothing_is_pinned_for_which_no_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    free = [0.0]
    monkeypatch.setattr(mapping, "free_bytes", lambda: free[0])
    monkeypatch.setattr(mapping, "FREE_LOOK_S", 0.001)
    with SharedMemory.create(4 * PIECE) as memory:
        memory.populate(0, PIECE)
        pinning = mapping.Pinning(memory, machine.accelerator(), CaptureGate(), PIECE)
        with structlog.testing.capture_logs() as logs:
            pinning.start()
            assert eventually(lambda: pinning.pinned_bytes == PIECE, PATIENCE_S), "its pages are there"
            assert eventually(lambda: any(entry["event"] == "arena_pinning_waits" for entry in logs), PATIENCE_S)
            free[0] = PIECE + mapping.SPARE_BYTES
            assert pinning.wait(PATIENCE_S)
        assert pinning.pinned_bytes == 4 * PIECE
        pinning.undo()
        free[0] = 0.0
    with SharedMemory.create(PIECE) as memory:
        pinning = mapping.Pinning(memory, machine.accelerator(), CaptureGate(), PIECE)
        pinning.start()
        pinning.undo()  # ends the wait
        assert not pinning.pinned_bytes
