"""What the vLLM connector's copies come after on a device: vLLM's steps are replayed on the stream that it computes on.

The scheduler is a step ahead of its device: while a step runs, the next one is prepared. The device, its streams and
events are simulated; the agent, the server and the worker's side are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device.simulated import Machine, Work
from device.streaming import HERE, LAYERS, PATIENCE_S, PATIENT, SPEC, THERE, TOKENS, Engine
from e2e.known import eventually
from vllm_fakes import request as vllm_request
from vllm_fakes import spec_of, tracked

from layerflow import EmbeddedServer, StepRequest
from layerflow.agent import Step
from layerflow.agent.descriptors import describe_loads, describe_saves
from layerflow.connectors.vllm.plan import LazySaves, StepPlan
from layerflow.connectors.vllm.scheduler.loads import are_rewritten
from layerflow.connectors.vllm.worker.order import steps_in_flight
from layerflow.connectors.vllm.worker.worker import WorkerSide
from layerflow.spec import GroupSpec, Plane

NAMES = {f"layer.{layer}": layer for layer in range(LAYERS)}


class Replay:
    """vLLM's worker: its hooks, and what it enqueues between them."""

    def __init__(self, engine: Engine, in_flight: int | None) -> None:
        self.engine, self.machine = engine, engine.machine
        layout: Any = SimpleNamespace(spec=SPEC, numbers=NAMES, vllm_groups=(0,))
        self.side = WorkerSide(engine.agent, layout, "ipc://x", several_groups=False, early=False, in_flight=in_flight)

    def other_step(self) -> Work:
        """One that neither loads nor saves; its forward pass, which does not end before the test says so."""
        plan = StepPlan()
        self.side.prepare(plan)
        self.side.begin(plan)
        forward = self.engine.stream.put(held=True)
        self.side.end()
        return forward

    def plan(self, *, background: bool, rewritten: bool = False) -> StepPlan:
        """One that loads the prompt which is stored."""
        parts = describe_loads(SPEC, [self.engine.request("two")])
        if background:
            return StepPlan(background={"two": parts}, rewritten=rewritten)
        return StepPlan(loads=parts, rewritten=rewritten)

    def prepare(self, plan: StepPlan) -> None:
        """Up to the forward pass; vLLM zeroes blocks of the load where the plan says so."""
        self.side.prepare(plan)
        if plan.rewritten:
            self.engine.stream.put(self.zero)
        self.side.begin(plan)

    def enqueued(self, plan: StepPlan) -> None:
        """The lane has given all copies to the device."""
        if plan.background:
            step = self.side._background["two"]
            assert isinstance(step, Step)
            assert eventually(lambda: not step.loading, PATIENCE_S)
        else:
            assert isinstance(self.side._step, Step)
            assert self.side._step.await_layer(LAYERS - 1)

    def attend(self) -> None:
        """The forward pass: each layer waits for its own blocks."""
        for name, layer in NAMES.items():
            self.side.wait_layer(name)
            self.engine.attend(layer)
        self.side.end()

    def zero(self) -> None:
        table = torch.from_numpy(THERE)
        for planes in self.engine.tensors.values():
            for tensor in planes.values():
                tensor[table] = 0

    @property
    def has_loaded(self) -> bool:
        """Of the last layer, by the device."""
        return bool(self.engine.tensors[LAYERS - 1]["k"][int(THERE[0])].any())


@pytest.fixture(params=range(3))
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(seed=request.param)


@pytest.fixture
def replay_of(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Replay]]:
    """Makes one whose pool holds the prompt."""
    device, made = machine.accelerator(), []
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: device)

    def make(in_flight: int | None, *, stored: bool = True) -> Replay:
        made.append(Replay(Engine(machine, server), in_flight))
        assert made[0].engine.agent.wait_warm(PATIENCE_S)
        if stored:
            with machine.running():
                made[0].engine.save("one")
        return made[0]

    with EmbeddedServer(PATIENT) as server:
        yield make
        with machine.running():
            made[0].side.close()


@pytest.mark.parametrize("background", [False, True], ids=["in the step", "in the background"])
@pytest.mark.parametrize(
    ("in_flight", "steps", "rewritten", "passes"),
    [(2, 1, False, True), (3, 2, False, True), (2, 1, True, False), (2, 2, False, False), (1, 1, False, False),
     (None, 1, False, False)],
    ids=["behind none in flight", "nor with a pipeline", "zeroed", "used two steps ago", "no overlap", "not known"],
)  # fmt: skip
def test_a_load_waits_for_the_steps_that_may_touch_its_blocks(
    replay_of: Callable[..., Replay],
    machine: Machine,
    in_flight: int | None,
    steps: int,
    rewritten: bool,
    passes: bool,
    background: bool,
) -> None:
    """`steps` forward passes are in flight on the device when the load's own step is prepared."""
    replay = replay_of(in_flight)
    with machine.stream(replay.engine.stream):
        forwards = [replay.other_step() for _ in range(steps)]
        plan = replay.plan(background=background, rewritten=rewritten)
        replay.prepare(plan)
        replay.enqueued(plan)
        machine.run()
        loaded = replay.has_loaded
        if not background:
            replay.attend()
        for forward in forwards:  # whatever was seen: nothing is to wait for a pass that never ends
            forward.held = False
        machine.run()
        if background:
            assert eventually(lambda: replay.side.transfers(forward=True)[1] == {"two"}, PATIENCE_S)
            for layer in range(LAYERS):
                replay.engine.attend(layer)
            machine.run()
    assert loaded is passes
    replay.engine.assert_saw_all()
    assert not replay.side.failed_blocks()


@pytest.mark.parametrize("background", [False, True], ids=["in the step", "in the background"])
def test_vllms_stream_waits_for_the_copies_on_the_device(
    replay_of: Callable[..., Replay], machine: Machine, background: bool
) -> None:
    replay = replay_of(2)
    plan = replay.plan(background=background)
    machine.waits.clear()
    with machine.stream(replay.engine.stream):
        replay.prepare(plan)
        replay.enqueued(plan)  # the device stands still: only the host works
        if background:
            assert not replay.side.transfers(forward=True)[1], "what fails on the device is still to come"
            machine.run()
            assert eventually(lambda: replay.side.transfers(forward=True)[1] == {"two"}, PATIENCE_S)
            for layer in range(LAYERS):
                replay.engine.attend(layer)
        else:
            replay.attend()
    assert not replay.engine.seen
    assert replay.has_loaded is background
    ordered = {stream for stream, _ in machine.waits}
    assert replay.engine.stream in ordered and machine.default not in ordered
    machine.run()
    replay.engine.assert_saw_all()


def test_a_late_save_waits_for_the_stream_that_has_computed(
    replay_of: Callable[..., Replay], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened on a thread of the connector's, whose current stream nothing computes on."""
    replay = replay_of(2, stored=False)
    engine, side = replay.engine, replay.side
    monkeypatch.setattr(side, "_is_short", lambda _: True)
    asked = StepRequest("one", engine.chain, (HERE,), save=(0, len(TOKENS)))
    parts = describe_saves(SPEC, [asked], True)
    plan = StepPlan(number=1, saves=LazySaves(["one"], [[HERE.tolist()]], lambda: parts))
    with machine.stream(engine.stream):
        side.prepare(plan)
        side.begin(plan)
        forward = engine.stream.put(held=True)
        for layer in range(LAYERS):
            engine.compute(layer)
        side.end()
        replay.other_step().held = False  # hands the save over
    assert eventually(lambda: len(machine.calls) >= LAYERS, PATIENCE_S), "enqueued, to run behind the pass"
    assert machine.default not in {stream for stream, _ in machine.waits}
    machine.run()
    assert not any(call.to_device for call in machine.calls)
    forward.held = False
    with machine.running():
        assert engine.agent.wait_idle("one", PATIENCE_S)
        loading = replay.plan(background=False)
        with machine.stream(engine.stream):
            replay.prepare(loading)
            replay.attend()
        engine.assert_saw_all()


RECURRENT = GroupSpec("state", 32, (2,), (Plane("conv", "uint8", (8,)),))
STEP: dict[str, Any] = {"new_block_ids_to_zero": None, "kv_cache_block_copies": None}


@pytest.mark.parametrize(
    ("step", "rewritten"),
    [
        ({}, False),
        ({"new_block_ids_to_zero": [8, 9]}, False),
        ({"new_block_ids_to_zero": [8, 5]}, True),
        ({"kv_cache_block_copies": [SimpleNamespace(src_block_id=5, dst_block_id=9)]}, False),
        ({"kv_cache_block_copies": [SimpleNamespace(src_block_id=9, dst_block_id=6)]}, True),
    ],
    ids=["nothing", "zeroes others", "zeroes one", "copies from one", "copies into one"],
)
def test_vllm_rewrites_blocks_of_a_load(step: dict[str, Any], rewritten: bool) -> None:
    spec = spec_of()
    loading = tracked(vllm_request("r", 64), spec)
    loading.tables, loading.background = ([5, 6],), True
    assert are_rewritten(spec, SimpleNamespace(**STEP | step), [loading]) is rewritten
    assert not are_rewritten(spec, SimpleNamespace(**STEP | step), [])
    assert not are_rewritten(spec, SimpleNamespace(), [loading]), "an older vLLM says nothing of it"


@pytest.mark.parametrize("background", [False, True])
def test_vllm_copies_recurrent_state_of_what_runs_in_the_step(background: bool) -> None:
    spec = spec_of(*spec_of().groups, RECURRENT)
    loading = tracked(vllm_request("r", 64), spec)
    loading.tables, loading.background = ([5, 6], [7]), background
    assert are_rewritten(spec, SimpleNamespace(**STEP), [loading]) is not background


@pytest.mark.parametrize(
    ("version", "scheduler", "overlap", "consumer", "known"),
    [
        ("0.32.0", None, False, True, 1),
        ("0.27.1", None, False, True, 1),
        ("0.32.0", None, True, True, 2),
        ("0.31.2", None, True, True, None),
        ("0.32.0", "mine.Scheduler", True, True, None),
        ("0.32.0", None, True, False, None),
    ],
)
def test_which_vllm_keeps_blocks_until_no_step_in_flight_uses_them(
    version: str, scheduler: str | None, overlap: bool, consumer: bool, known: int | None
) -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=scheduler), max_concurrent_batches=2)
    assert steps_in_flight(config, version, overlap=overlap, consumer=consumer) == known
