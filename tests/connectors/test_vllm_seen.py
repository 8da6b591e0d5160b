"""What vLLM does with a layer is seen, not inferred: layers without hooks, called twice, steps without an end.

And blocks that its second model runner zeroes before it asks the connector. The device is simulated; the agent, the
server and the worker's side are real, the hooks are replayed as vLLM 0.32's two model runners call them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from device.simulated import Machine
from device.streaming import HERE, LAYERS, PATIENCE_S, PATIENT, SPEC, THERE, TOKENS, Engine
from e2e.known import eventually
from vllm_fakes import BLOCK, request, spec_of, tracked

from layerflow import EmbeddedServer, StepRequest
from layerflow.agent.descriptors import PartDescriptor, describe_loads, describe_saves
from layerflow.agent.values import Hit
from layerflow.connectors.vllm.plan import Asking, LazySaves, StepPlan, WorkerLayout
from layerflow.connectors.vllm.scheduler.loads import StepLoads, plan_load
from layerflow.connectors.vllm.worker import worker
from layerflow.connectors.vllm.worker.hooks import LayerHooks, forward_pass
from layerflow.connectors.vllm.worker.order import RunnerOrder
from layerflow.connectors.vllm.worker.worker import WorkerSide
from layerflow.spec import GroupSpec, Plane, Shard

NAMES = {f"layer.{layer}": layer for layer in range(LAYERS)}
HIT = len(TOKENS) - 1
OTHERS = np.arange(30, 34)


class Runner:
    """vLLM's worker: the hooks of one of its model runners, and what it enqueues on its stream."""

    def __init__(self, engine: Engine, second: bool, **side: Any) -> None:
        self.engine, self.machine, self.second = engine, engine.machine, second
        layout: Any = SimpleNamespace(spec=SPEC, numbers=NAMES, vllm_groups=(0,))
        self.side = WorkerSide(
            engine.agent, layout, "ipc://x", several_groups=False, early=False, **{"in_flight": 2, **side}
        )
        self.side._is_short = lambda _: False  # type: ignore[method-assign]
        self.numbers = 0
        self.step(StepPlan())  # in which every layer is seen

    def arrive(self, plan: StepPlan) -> None:
        """Up to the forward pass: the second runner zeroes before the first hook."""
        if self.second:
            self.zero(plan.prepared)
            self.side.prepare(plan, inside=True)
        else:
            self.side.prepare(plan, inside=False)
            self.zero(plan.prepared)
        self.side.begin(plan, inside=True)
        self.side.wait_tails()

    def step(
        self, plan: StepPlan, compute: Callable[[int], None] = lambda _: None, *, hooked: bool = True
    ) -> tuple[set[str], set[str], set[str]]:
        """All of it; which transfers vLLM is told to have ended."""
        self.arrive(plan)
        self.forward(compute, hooked=hooked)
        self.side.end()
        return self.side.transfers(forward=True)

    def forward(self, compute: Callable[[int], None] = lambda _: None, *, hooked: bool = True) -> None:
        for name, layer in NAMES.items():
            if hooked:
                self.side.wait_layer(name)
            compute(layer)
            if hooked:
                self.side.layer_done(name)

    def saving(self, **plan: Any) -> StepPlan:
        """One that computes and saves the prompt."""
        self.numbers += 1
        asked = StepRequest("one", self.engine.chain, (HERE,), save=(0, len(TOKENS)))
        return StepPlan(number=self.numbers, saves=self.saves_of("one", HERE, asked), work=(128, 0), **plan)

    def saves_of(self, name: str, table: np.ndarray, asked: StepRequest) -> LazySaves:
        return LazySaves([name], [[table.tolist()]], lambda: describe_saves(SPEC, [asked], True))

    def loads(self, name: str = "two") -> list[PartDescriptor]:
        return describe_loads(SPEC, [self.engine.request(name)])

    def zero(self, blocks: Any) -> None:
        table = torch.tensor(list(blocks), dtype=torch.int64)
        if len(table):
            self.engine.stream.put(
                lambda: [
                    plane.index_fill_(0, table, 0) for each in self.engine.tensors.values() for plane in each.values()
                ]
            )

    def write_half(self, layer: int, lo: int, hi: int) -> None:
        """Enqueue a micro-batch of the layer's forward."""

        def write() -> None:
            for plane, rows in zip("kv", self.engine.kv(layer), strict=True):
                self.engine.tensors[layer][plane][torch.from_numpy(HERE[lo:hi].copy())] = torch.from_numpy(rows[lo:hi])

        self.engine.stream.put(write)

    def ends(self, request: str) -> bool:
        """Run steps, as vLLM does while a request's blocks are kept, until nothing of it moves."""

        def idle() -> bool:
            self.step(StepPlan())
            return not self.engine.agent.busy(request)

        return eventually(idle, PATIENCE_S)

    def found(self) -> int:
        """Tokens of the prompt that a lookup hits once nothing moves any more."""
        assert self.ends("one")
        return self.engine.agent.lookup("check", self.engine.chain).tokens

    def assert_stored_right(self) -> None:
        """Load all that is found, and compare."""
        self.step(StepPlan(loads=self.loads("reader")), self.engine.attend)
        self.engine.assert_saw_all()
        assert not self.side.failed_blocks()


@pytest.fixture(params=range(2))
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(seed=request.param)


Make = Callable[..., Runner]


@pytest.fixture
def runner_of(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes one, on the thread that its stream is current on; the device runs beside the test."""
    device, made = machine.accelerator(), []
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: device)
    monkeypatch.setattr(worker, "RECLAIM_S", PATIENCE_S)  # saves that are waited for end within it

    def make(*, stored: bool = False, second: bool = False, **side: Any) -> Runner:
        engine = Engine(machine, server)
        current.enter_context(machine.stream(engine.stream))
        if stored:
            engine.save("zero")
        made.append(Runner(engine, second, **side))
        return made[0]

    with (
        EmbeddedServer(PATIENT) as server,
        machine.running(),
        contextlib.ExitStack() as current,
    ):
        yield make
        made[0].side.close()


@pytest.fixture(params=[False, True], ids=["first runner", "second runner"])
def second(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class TestLoads:
    def test_where_no_layer_asks_they_have_failed(self, runner_of: Make, second: bool) -> None:
        runner = runner_of(stored=True, second=second)
        runner.step(StepPlan(loads=runner.loads()), hooked=False)
        assert runner.side.failed_blocks() == set(THERE.tolist())

    def test_where_one_layer_does_not_ask_nothing_that_was_computed_is_published(
        self, runner_of: Make, second: bool
    ) -> None:
        runner = runner_of(stored=True, second=second)
        plan = runner.saving(loads=runner.loads())
        other = runner.engine.agent.chain([*range(500, 628)])
        asked = StepRequest("other", other, (HERE,), save=(0, 128))
        plan.saves = runner.saves_of("other", HERE, asked)
        runner.arrive(plan)
        for name in list(NAMES)[1:]:
            runner.side.wait_layer(name)
            runner.side.layer_done(name)
        runner.side.end()
        runner.side.transfers(forward=True)
        assert runner.side.failed_blocks() == set(THERE.tolist())
        runner.step(StepPlan())
        assert runner.ends("other")
        assert runner.engine.agent.lookup("check", other).tokens == 0

    def test_before_a_pass_that_may_be_one_graph_all_are_waited_for(self, runner_of: Make, second: bool) -> None:
        runner = runner_of(stored=True, second=second)
        runner.arrive(StepPlan(loads=runner.loads()))
        runner.side.wait_whole()
        runner.forward(runner.engine.attend, hooked=False)
        runner.side.end()
        assert not runner.side.failed_blocks()
        runner.engine.assert_saw_all()

    def test_too_late_is_not_waited_for(self, runner_of: Make) -> None:
        """Blocks that are to be there before the pass, asked for behind its first layer."""
        runner = runner_of(stored=True)
        plan = StepPlan(tails=runner.loads())
        runner.side.prepare(plan)
        runner.side.begin(plan)
        runner.side.wait_layer("layer.0")
        runner.side.wait_tails()
        runner.side.end()
        assert runner.side.failed_blocks() == set(THERE.tolist())

    def test_of_a_step_that_never_runs_have_failed(self, runner_of: Make, second: bool) -> None:
        runner = runner_of(stored=True, second=second)
        runner.side.prepare(StepPlan(loads=runner.loads()), inside=second)
        runner.step(StepPlan())
        assert runner.side.failed_blocks() == set(THERE.tolist())

    def test_in_the_background_of_a_step_that_never_runs_go_on(self, runner_of: Make) -> None:
        runner = runner_of(stored=True)
        runner.side.prepare(StepPlan(background={"two": runner.loads()}, leaving=("gone",)))
        sent, arrived, _ = runner.step(StepPlan())

        def over() -> bool:
            ended = runner.side.transfers(forward=True)
            sent.update(ended[0])
            arrived.update(ended[1])
            return arrived == {"two"}

        assert eventually(over, PATIENCE_S)
        for layer in range(LAYERS):
            runner.engine.attend(layer)
        runner.engine.assert_saw_all()

    def test_a_hook_of_another_step_counts_for_none(self, runner_of: Make) -> None:
        runner = runner_of(stored=True)
        plan = StepPlan(loads=runner.loads())
        runner.side.prepare(plan)
        for name in NAMES:  # of the pass before: of its draft model, say
            runner.side.wait_layer(name)
            runner.side.layer_done(name)
        runner.side.begin(plan)
        runner.forward(hooked=False)
        runner.side.end()
        assert runner.side.failed_blocks() == set(THERE.tolist())


class TestStepsWithoutAnEnd:
    """The first runner ends no step with ``wait_for_save`` on pipeline stages before the last, if vLLM speculates."""

    def unended(self, runner: Runner, plan: StepPlan, compute: Callable[[int], None] = lambda _: None) -> None:
        runner.arrive(plan)
        runner.forward(compute)
        runner.side.transfers(forward=True)

    def saves_another(self, runner: Runner) -> StepPlan:
        other = runner.engine.agent.chain([*range(1000, 1064)])
        asked = StepRequest("p", other, (OTHERS,), save=(0, 64))
        return StepPlan(number=9, saves=runner.saves_of("p", OTHERS, asked), work=(64, 0))

    def test_the_next_plan_is_loaded(self, runner_of: Make) -> None:
        runner = runner_of(stored=True, in_flight=None)
        self.unended(runner, self.saves_another(runner))
        self.unended(runner, StepPlan(loads=runner.loads()), runner.engine.attend)
        runner.engine.assert_saw_all()
        assert not runner.side.failed_blocks()

    def test_what_was_computed_is_published(self, runner_of: Make) -> None:
        runner = runner_of()
        self.unended(runner, runner.saving(), runner.engine.compute)
        self.unended(runner, self.saves_another(runner))
        assert runner.found() == HIT
        runner.assert_stored_right()

    def test_loads_that_no_layer_asks_for_have_failed_with_their_own_step(self, runner_of: Make) -> None:
        runner = runner_of(stored=True)
        runner.arrive(StepPlan(loads=runner.loads()))
        runner.forward(hooked=False)
        runner.side.transfers(forward=True)
        assert runner.side.failed_blocks() == set(THERE.tolist())


class TestLayersThatAreComputedTwice:
    def halves(self, runner: Runner) -> None:
        """Micro-batches take turns at each layer."""
        for name, layer in NAMES.items():
            for lo, hi in ((0, 4), (4, 8)):
                runner.side.wait_layer(name)
                runner.write_half(layer, lo, hi)
                runner.side.layer_done(name)
                self.let_saves_run(runner)

    def loops(self, runner: Runner) -> None:
        """All layers, and then all again."""
        for lo, hi in ((0, 4), (4, 8)):
            for name, layer in NAMES.items():
                runner.side.wait_layer(name)
                runner.write_half(layer, lo, hi)
                runner.side.layer_done(name)
                self.let_saves_run(runner)

    def let_saves_run(self, runner: Runner) -> None:
        """What may leave by now does."""
        calls = len(runner.machine.calls)
        eventually(lambda: len(runner.machine.calls) > calls, 0.05)

    @pytest.mark.parametrize("way", ["halves", "loops"])
    def test_announced_they_are_saved_behind_the_pass(self, runner_of: Make, second: bool, way: str) -> None:
        runner = runner_of(second=second, splits=True)
        runner.arrive(runner.saving())
        getattr(self, way)(runner)
        runner.side.end()
        runner.step(StepPlan())
        assert runner.found() == HIT
        runner.assert_stored_right()

    @pytest.mark.parametrize("way", ["halves", "loops"])
    def test_unannounced_nothing_of_the_step_is_published_and_later_ones_are(
        self, runner_of: Make, second: bool, way: str
    ) -> None:
        runner = runner_of(second=second)
        runner.arrive(runner.saving())
        getattr(self, way)(runner)
        runner.side.end()
        runner.step(StepPlan())
        assert runner.found() == 0
        runner.arrive(runner.saving())
        getattr(self, way)(runner)
        runner.side.end()
        runner.step(StepPlan())
        assert runner.found() == HIT
        runner.assert_stored_right()

    def test_a_layer_that_is_skipped_once_is_not_published(self, runner_of: Make) -> None:
        runner = runner_of()
        runner.arrive(runner.saving())
        for name, layer in list(NAMES.items())[:-1]:
            runner.side.wait_layer(name)
            runner.engine.compute(layer)
            runner.side.layer_done(name)
        runner.side.end()
        runner.step(StepPlan())
        assert runner.found() == 0


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


class TestBlocksThatAreZeroed:
    @pytest.mark.parametrize("late", [False, True], ids=["saved in the pass", "saved behind it"])
    def test_nothing_that_may_have_been_read_behind_it_is_published(
        self, runner_of: Make, second: bool, late: bool
    ) -> None:
        runner = runner_of(second=second)
        runner.side._is_short = lambda _: late  # type: ignore[method-assign]
        blocks = tuple(HERE[2:4].tolist())
        runner.step(runner.saving(), runner.engine.compute)
        runner.step(StepPlan(fresh=(blocks,), prepared=blocks))
        runner.side._is_short = lambda _: False  # type: ignore[method-assign]
        runner.step(StepPlan())
        if runner.found():
            runner.assert_stored_right()
        else:
            assert second, "the first runner asks before: the saves are waited for"

    @pytest.mark.parametrize("late", [False, True], ids=["saved in the pass", "saved behind it"])
    @pytest.mark.parametrize(
        ("part", "method"), [("_runner", "arrived"), ("_agent", "overwritten"), ("_hooks", "begin")]
    )
    def test_nothing_is_published_where_the_hook_that_should_have_seen_to_that_is_broken(
        self, runner_of: Make, second: bool, late: bool, part: str, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = runner_of(second=second)
        runner.side._is_short = lambda _: late  # type: ignore[method-assign]
        blocks = tuple(HERE[2:4].tolist())
        runner.arrive(runner.saving())
        forward = runner.engine.stream.put(held=True)
        runner.forward(runner.engine.compute)
        runner.side.end()
        runner.side.transfers(forward=True)
        with monkeypatch.context() as patch:
            patch.setattr(getattr(runner.side, part), method, fails)
            forward.held = False
            runner.step(StepPlan(fresh=(blocks,), prepared=blocks))
        runner.side._is_short = lambda _: False  # type: ignore[method-assign]
        runner.step(StepPlan())
        if runner.found():
            runner.assert_stored_right()

    def test_read_before_it_is_published(self, runner_of: Make, second: bool) -> None:
        runner = runner_of(second=second)
        runner.step(runner.saving(), runner.engine.compute)
        runner.arrive(StepPlan())
        assert eventually(lambda: not runner.engine.agent.saving("one"), PATIENCE_S)
        runner.side.end()
        blocks = tuple(HERE[2:4].tolist())
        runner.step(StepPlan(fresh=(blocks,), prepared=blocks))
        assert runner.found() == HIT
        runner.assert_stored_right()

    def test_what_was_read_while_it_was_not_known_is_told_with_the_next_plan(self, runner_of: Make) -> None:
        runner = runner_of(second=True)
        runner.arrive(runner.saving())
        forward = runner.engine.stream.put(held=True)
        runner.forward(runner.engine.compute)
        runner.side.end()
        forward.held = False
        assert not runner.engine.agent.wait_idle("one", 0.2)
        assert runner.engine.agent.lookup("early", runner.engine.chain).tokens == 0
        runner.step(StepPlan())
        assert runner.found() == HIT
        runner.assert_stored_right()


class TestRunnerOrder:
    @pytest.mark.parametrize(
        ("hooks", "asks_first"),
        [
            ([], False),
            ([(False, True)], True),
            ([(True, True)], False),
            ([(False, False)], False),
            ([(False, False), (False, True)], False),
            ([(False, True), (True, True)], False),
        ],
        ids=["not seen", "first", "second", "second, whole graphs", "second, later eager", "both"],
    )
    def test_is_seen(self, hooks: list[tuple[bool, bool]], asks_first: bool) -> None:
        order = RunnerOrder()
        for arrived, bound in hooks:
            order.arrived(inside=arrived)
            order.bound(inside=bound)
        assert order.asks_first is asks_first


ALONE = Shard()


def hooks_of(names: dict[str, int], *groups: GroupSpec, shard: Shard = ALONE) -> LayerHooks:
    layout: Any = SimpleNamespace(
        spec=msgspec.structs.replace(spec_of(*groups), shard=shard), numbers=names, vllm_groups=(0,)
    )
    return LayerHooks(layout)


PLANES = (Plane("kv", "uint8", (8,)),)
MAIN, INDEX = GroupSpec("full", 32, (0, 2), PLANES), GroupSpec("full", 32, (1, 3), PLANES)
INDEXED = {"m.0.attn": 0, "m.0.indexer.k_cache": 1, "m.1.attn": 2, "m.1.indexer.k_cache": 3}


class TestSeeing:
    def run(self, hooks: LayerHooks, *layers: int) -> bool:
        hooks.begin()
        for layer in layers:
            hooks.ask(layer)
            hooks.save(layer)
        return hooks.end()

    def test_every_layer(self) -> None:
        hooks = hooks_of({"l.0": 0, "l.1": 1})
        assert hooks.unseen and hooks.asking == (Asking.UNSEEN,)
        assert not self.run(hooks)
        assert not self.run(hooks, 0) and hooks.unseen
        assert self.run(hooks, 1) and not hooks.unseen
        assert hooks.asking == (Asking.BY_LAYER,)

    def test_an_indexer_is_read_before_its_layer_asks(self) -> None:
        hooks = hooks_of(INDEXED, MAIN, INDEX)
        assert self.run(hooks, 0, 2)
        assert hooks.asking == (Asking.BY_LAYER, Asking.BEFORE) and not hooks.unseen

    def test_a_layer_of_which_no_cache_asks_is_never_loaded_in_the_step(self) -> None:
        hooks = hooks_of(INDEXED, MAIN, INDEX)
        self.run(hooks, 0)
        assert hooks.asking == (Asking.UNSEEN, Asking.UNSEEN) and hooks.unseen

    def test_states_and_drafts_are_not_waited_for(self) -> None:
        state = GroupSpec("state", 32, (1,), PLANES)
        draft = GroupSpec("full", 32, (2,), PLANES)
        main = GroupSpec("full", 32, (0,), PLANES)
        hooks = hooks_of({"l.0": 0, "l.1": 1, "l.2": 2}, main, state, draft, shard=Shard(drafts=("", "", "eagle")))
        assert self.run(hooks, 0) and not hooks.unseen
        assert hooks.drafts == {2}

    def test_a_draft_models_indexer_is_read_before_its_layer_asks_and_written_with_it(self) -> None:
        groups = [GroupSpec("full", 32, (layer,), PLANES) for layer in range(3)]
        names = {"m.0.attn": 0, "m.9.attn": 1, "m.9.indexer.k_cache": 2}
        hooks = hooks_of(names, *groups, shard=Shard(drafts=("", "mtp", "mtp")))
        assert self.run(hooks, 0) and not hooks.drafted, "the draft model was left out"
        assert hooks.asking == (Asking.BY_LAYER,) * 3
        assert self.run(hooks, 0, 1) and hooks.drafted
        assert hooks.asking == (Asking.BY_LAYER, Asking.BY_LAYER, Asking.BEFORE)
        assert not self.run(hooks, 0) and not hooks.drafted and hooks.ever_drafted

    def test_a_draft_layer_of_which_nothing_is_called_is_not_known_to_be_written(self) -> None:
        groups = GroupSpec("full", 32, (0,), PLANES), GroupSpec("full", 32, (1, 2), PLANES)
        hooks = hooks_of({"m.0.attn": 0, "m.8.attn": 1, "m.9.attn": 2}, *groups, shard=Shard(drafts=("", "mtp")))
        self.run(hooks, 0, 1)
        assert not hooks.drafted and not hooks.ever_drafted
        assert hooks.asking == (Asking.BY_LAYER, Asking.BY_LAYER)
        self.run(hooks, 0, 1, 2)
        assert hooks.drafted
        self.run(hooks, 0, 1)
        assert not hooks.drafted

    def test_the_scheduler_waits_for_all_ranks(self) -> None:
        spec = msgspec.structs.replace(spec_of(MAIN, INDEX), shard=Shard(0, 2))
        loads = StepLoads([BLOCK], recovers=False)
        loads.meet_workers([WorkerLayout(msgspec.msgpack.encode(spec), (0, 0), "ipc:///nowhere")] * 2)
        hit = SimpleNamespace(plan=None)
        seen = (Asking.BY_LAYER, Asking.BEFORE)
        assert not loads.may(hit, 64)  # type: ignore[arg-type]
        loads.seen({0: seen})
        assert not loads.may(hit, 64)  # type: ignore[arg-type]
        loads.seen({1: (Asking.BY_LAYER, Asking.UNSEEN)})
        assert not loads.may(hit, 64)  # type: ignore[arg-type]
        loads.seen({1: seen})
        assert loads.may(hit, 64) and loads.early_groups == {1}  # type: ignore[arg-type]


def test_what_is_read_before_its_layer_asks_is_loaded_before_the_pass() -> None:

    spec = spec_of(MAIN, INDEX)
    loading, plan = tracked(request("r", 150), spec), StepPlan()
    loading.load, loading.hit = (0, 128), Hit(128)
    plan_load(spec, loading, [np.arange(1, 6)] * 2, 22, plan=plan, early={1})
    assert {part.group for part in plan.loads} == {0}
    assert {part.group for part in plan.tails} == {1}


@pytest.mark.parametrize(
    ("context", "told", "computes", "replayed"),
    [
        ({"attn_metadata": {}, "cudagraph_runtime_mode": SimpleNamespace(name="PIECEWISE")}, {}, True, False),
        ({"attn_metadata": {}, "cudagraph_runtime_mode": SimpleNamespace(name="FULL")}, {}, True, True),
        ({"attn_metadata": None, "cudagraph_runtime_mode": SimpleNamespace(name="NONE")}, {}, False, False),
        ({"attn_metadata": None}, {"request_ids": ["r"], "attn_metadata": {}}, True, True),
        ({"attn_metadata": {}}, {"request_ids": ["r"]}, True, False),
        ({"attn_metadata": {}}, {}, True, False),
    ],
    ids=["first", "first, graph", "no pass", "second, graph", "second", "an old one"],
)
def test_what_pass_comes(context: dict[str, Any], told: dict[str, Any], computes: bool, replayed: bool) -> None:
    assert forward_pass(SimpleNamespace(**context), told) == (computes, replayed)
