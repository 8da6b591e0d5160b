"""An agent and an engine on a stream of its own are ordered by events alone; the device works when it likes to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from e2e.known import eventually

from device.simulated import Event, Machine, Stream, filled
from layerflow import Agent, EmbeddedServer, GroupSpec, ModelSpec, Plane, Settings, StepRequest
from layerflow.agent.aio import AsyncAgent, AsyncStep

LAYERS, BLOCKS, SIZE, WIDTH = 4, 48, 16, 64
PATIENCE_S = 20.0
PLANES = (Plane("k", "uint8", (WIDTH,)), Plane("v", "uint8", (WIDTH,)))
SPEC = ModelSpec("m", "c", (GroupSpec("full", SIZE, tuple(range(LAYERS)), PLANES),), chunk_tokens=32)
TOKENS = list(range(SIZE * 8))
HERE, THERE = np.arange(8)[::-1].copy(), np.arange(8) * 2 + 9


class Engine:
    """Its thread enqueues on a stream that is not the default one, and hardly ever waits for it."""

    def __init__(self, machine: Machine, server: EmbeddedServer) -> None:
        self.machine = machine
        self.stream: Stream = machine.Stream()
        self.tensors = {
            layer: {plane: torch.zeros((BLOCKS, SIZE, WIDTH), dtype=torch.uint8) for plane in "kv"}
            for layer in range(LAYERS)
        }
        self.agent = Agent(server.endpoint, SPEC, self.tensors, context=server.context)
        self.chain = self.agent.chain(TOKENS)
        self.seen: dict[int, np.ndarray] = {}

    def kv(self, layer: int) -> np.ndarray:
        """What the layer's forward computes, both planes."""
        return filled(2 * 8 * SIZE * WIDTH, layer).reshape(2, 8, SIZE, WIDTH)

    def compute(self, layer: int) -> None:
        """Enqueue the layer's forward, which writes its KV."""

        def write() -> None:
            for plane, rows in zip("kv", self.kv(layer), strict=True):
                self.tensors[layer][plane][torch.from_numpy(HERE)] = torch.from_numpy(rows)

        self.stream.put(write)

    def attend(self, layer: int) -> None:
        """Enqueue the layer's attention, which reads what was loaded."""

        def read() -> None:
            table = torch.from_numpy(THERE)
            self.seen[layer] = np.stack([self.tensors[layer][plane][table].numpy() for plane in "kv"])

        self.stream.put(read)

    def save(self, name: str) -> None:
        """A step that computes the prompt and saves it."""
        request = StepRequest(name, self.chain, (HERE,), save=(0, len(TOKENS)))
        with self.machine.stream(self.stream), self.agent.open_step([request]) as step:
            for layer in range(LAYERS):
                assert step.wait_layer(layer)
                self.compute(layer)
                step.layer_done(layer)
        assert self.agent.wait_idle(name, PATIENCE_S)

    def request(self, name: str) -> StepRequest:
        """One that loads all that was saved into other blocks."""
        hit = self.agent.lookup(name, self.chain)
        assert hit.tokens == len(TOKENS) - 1
        return StepRequest(name, self.chain, (THERE,), load=(0, hit.tokens), hit=hit)

    def assert_saw_all(self) -> None:
        """Every layer's attention has read the loaded bytes; the machine is to have done all."""
        assert eventually(lambda: len(self.seen) == LAYERS, PATIENCE_S)
        for layer, seen in self.seen.items():
            np.testing.assert_array_equal(seen, self.kv(layer), f"layer {layer}")


@pytest.fixture(params=range(3))
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(seed=request.param)


@pytest.fixture
def engine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    device = machine.accelerator()
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: device)
    with EmbeddedServer(Settings(pool={"size": "8MiB"})) as server:
        engine = Engine(machine, server)
        yield engine
        with machine.running():
            engine.agent.close()


def test_saves_and_loads_come_in_the_order_of_the_engines_own_stream(machine: Machine, engine: Engine) -> None:
    with machine.running():
        engine.save("one")
        request = engine.request("two")
        with machine.stream(engine.stream), engine.agent.open_step([request]) as step:
            for layer in range(LAYERS):
                assert step.wait_layer(layer)
                engine.attend(layer)
        engine.assert_saw_all()
        assert engine.agent.wait_idle("two", PATIENCE_S)
    told = engine.agent.statistics()
    assert told.copies.batches == told.copies.calls == len(machine.calls) > 0
    assert not told.copies.single
    assert {call.thread for call in machine.calls} == {"layerflow-load", "layerflow-save"}
    assert engine.stream not in {call.stream for call in machine.calls}
    assert machine.default not in {stream for stream, _ in machine.waits}, "nothing computes there"


def test_the_engines_thread_is_not_held_until_the_bytes_are_there(machine: Machine, engine: Engine) -> None:
    with machine.running():
        engine.save("one")
        request = engine.request("two")
    # From here on the device stands still: only the host works.
    before = len(machine.calls)
    with machine.stream(engine.stream):
        step = engine.agent.open_step([request])
        for layer in range(LAYERS):
            assert step.wait_layer(layer)
            engine.attend(layer)
        step.close()
    assert len(machine.calls) > before and not engine.seen
    machine.run()
    engine.assert_saw_all()
    assert eventually(lambda: not engine.agent.busy("two"), PATIENCE_S)


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
            for layer in range(LAYERS):
                assert loading.wait_layer(layer)
                engine.attend(layer)
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
