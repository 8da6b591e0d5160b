"""An agent and an engine on a stream of its own are ordered by events alone; the device works when it likes to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from e2e.known import eventually

from device.simulated import Event, Machine, Stream
from device.streaming import HERE, LAYERS, PATIENCE_S, PATIENT, THERE, TOKENS, Engine
from layerflow import EmbeddedServer, StepRequest
from layerflow.agent.aio import AsyncAgent, AsyncStep


@pytest.fixture(params=range(3))
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(seed=request.param)


@pytest.fixture
def engine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    device = machine.accelerator()
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: device)
    with EmbeddedServer(PATIENT) as server:
        engine = Engine(machine, server)
        assert engine.agent.wait_warm(PATIENCE_S)
        yield engine
        with machine.running():
            engine.agent.close()


def test_saves_and_loads_come_in_the_order_of_the_engines_own_stream(machine: Machine, engine: Engine) -> None:
    with machine.running():
        engine.save("one")
        engine.load("two")
    told = engine.agent.statistics()
    assert told.copies.batches == told.copies.calls == len(machine.calls) > 0
    assert not told.copies.single
    assert {call.thread for call in machine.calls} == {"layerflow-load", "layerflow-save"}
    assert engine.stream not in {call.stream for call in machine.calls}
    ours = {"layerflow-load", "layerflow-save", "layerflow-link", "layerflow-pin", machine.accelerator().kind}
    current = [name for name in machine.current if name != "layerflow-kernel"]  # whom nobody waits for
    assert sorted(current) == sorted(ours), "each has made the device its own, once; the engine's has not"
    assert machine.default not in {stream for stream, _ in machine.waits}, "nothing computes there"


def test_the_engines_thread_is_not_held_until_the_bytes_are_there(machine: Machine, engine: Engine) -> None:
    with machine.running():
        engine.save("one")
        request = engine.request("two")
    # From here on the device stands still: only the host works.
    before = len(machine.calls)
    with machine.stream(engine.stream):
        step = engine.agent.open_step([request])
        engine.attend_all(step)
        step.close()
    assert len(machine.calls) > before and not engine.seen
    machine.run()
    engine.assert_saw_all()
    assert eventually(lambda: not engine.agent.busy("two"), PATIENCE_S)


def test_what_is_revoked_touches_nothing_any_more_on_the_device_either(machine: Machine, engine: Engine) -> None:
    """All is in place for the engine's stream, and nothing of it has landed: SGLang may let the memory go next."""
    with machine.running():
        engine.save("one")
        request = engine.request("two")
    with machine.stream(engine.stream):
        step = engine.agent.open_step([request])
        assert step.wait_layer(LAYERS - 1)
        assert any(stream.queue for stream in machine.streams if stream is not engine.stream), "loads are enqueued"
        assert engine.agent.revoke("the memory goes") == 1
        assert not any(stream.queue for stream in machine.streams if stream is not engine.stream)
        step.close()


def test_a_save_leaves_with_its_layer_and_not_with_the_host_clock(machine: Machine, engine: Engine) -> None:
    """The host is through with the pass; the device has not begun with it. Nothing is to be held back on the host."""
    with machine.stream(engine.stream):
        computing = engine.stream.put(held=True)
        step = engine.agent.open_step([StepRequest("one", engine.chain, (HERE,), save=(0, len(TOKENS)))])
        for layer in range(LAYERS):
            assert step.wait_layer(layer)
            engine.compute(layer)
            step.layer_done(layer)
        # The step is open still: no end of it is waited for.
        assert eventually(lambda: len(machine.calls) >= LAYERS, PATIENCE_S), "enqueued, to run behind their layers"
        machine.run()
        assert not any(call.to_device for call in machine.calls)
        step.close()
    assert engine.agent.busy("one")
    computing.held = False
    with machine.running():
        assert engine.agent.wait_idle("one", PATIENCE_S)
        assert engine.agent.poll().saved == ("one",)
        request = engine.request("two")
        with machine.stream(engine.stream), engine.agent.open_step([request]) as loading:
            engine.attend_all(loading)
        engine.assert_saw_all()


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_loads_pass_a_forward_that_does_not_touch_their_blocks(machine: Machine, engine: Engine, told: bool) -> None:
    """The engine is a pass ahead of its device, and says since when the blocks are free; else loads wait for it all."""
    with machine.running():
        engine.save("one")
        request = engine.request("two")
    with machine.stream(engine.stream):
        free = engine.agent.record()
        passing = engine.stream.put(held=True)
        step = engine.agent.open_step([request], after=free if told else None)
        assert step.wait_layer(LAYERS - 1)
        machine.run()
        loaded = bool(engine.tensors[LAYERS - 1]["k"][int(THERE[0])].any())
        step.close()
    passing.held = False  # whatever was seen: nothing is to wait for a pass that never ends
    with machine.running():
        assert engine.agent.wait_idle("two", PATIENCE_S)
    assert loaded is told


def test_an_asyncio_engines_stream_is_the_one_that_waits(machine: Machine, engine: Engine) -> None:
    """The wait itself is on a worker thread, whose current stream nothing computes on."""
    with machine.running():
        engine.save("one")
        request = engine.request("two")
    machine.waits.clear()

    async def forward() -> None:
        with machine.stream(engine.stream):
            async with AsyncAgent(engine.agent).open_step([request]) as step:
                assert isinstance(step, AsyncStep)
                for layer in range(LAYERS):
                    assert await step.wait_layer(layer)
                    engine.attend(layer)

    asyncio.run(forward())
    ordered = {stream for stream, _ in machine.waits}
    assert engine.stream in ordered and machine.default not in ordered
    machine.run()
    engine.assert_saw_all()
    assert eventually(lambda: not engine.agent.busy("two"), PATIENCE_S)


def test_no_copy_waits_for_an_event_that_was_never_recorded(machine: Machine, engine: Engine) -> None:
    """A device takes such a wait for done: the copy would not wait at all."""
    unrecorded: list[Event] = []
    wait = Stream.wait_event

    def noted(stream: Stream, event: Event) -> None:
        if event.work is None:
            unrecorded.append(event)
        wait(stream, event)

    with pytest.MonkeyPatch.context() as patch, machine.running():
        patch.setattr(Stream, "wait_event", noted)
        engine.save("one")
        request = engine.request("two")
        with machine.stream(engine.stream), engine.agent.open_step([request]) as step:
            assert all(step.wait_layer(layer) for layer in range(LAYERS))
        assert engine.agent.wait_idle("two", PATIENCE_S)
    assert machine.waits and not unrecorded


def test_a_device_that_fails_fails_the_load_and_nothing_hangs(machine: Machine, engine: Engine) -> None:
    with machine.running():
        engine.save("one")
        request = engine.request("two")
        machine.broken = True
        with machine.stream(engine.stream), engine.agent.open_step([request]) as step:
            assert eventually(lambda: bool(step.failed), PATIENCE_S)
            assert not step.wait_layer(LAYERS - 1).ready
        assert engine.agent.wait_idle("two", PATIENCE_S)
        machine.broken = False
    assert engine.agent.statistics().failed_batches > 0
