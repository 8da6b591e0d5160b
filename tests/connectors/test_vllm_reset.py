"""What a worker has under way when the weights are replaced: none of it reaches vLLM, the arena or a later plan.

vLLM is played here; the agent, its memory and the server are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e2e.known import KnownWorker, Run

from layerflow.agent import StepRequest
from layerflow.agent.descriptors import describe_loads, describe_saves
from layerflow.connectors.common.loaded import WRITTEN, LoadedWeights
from layerflow.connectors.vllm.plan import LazySaves, StepPlan
from layerflow.connectors.vllm.worker.worker import WorkerSide
from layerflow.server import EmbeddedServer

TOKENS, HIT = 64, 48
SETTLE_S = 20.0


class World:
    """One worker of vLLM's, and prompts of known bytes."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.worker = KnownWorker(server.endpoint, context=server.context)
        spec = self.worker.spec
        self.names = {f"layer.{layer}": layer for layer in range(spec.num_layers)}
        layout: Any = SimpleNamespace(spec=spec, numbers=self.names, vllm_groups=(0,))
        self.model = torch.nn.Linear(64, 64)
        self.side = WorkerSide(
            self.worker.agent,
            layout,
            "ipc://nowhere",
            several_groups=False,
            early=False,
            weights=LoadedWeights([self.model]),
        )

    def stored(self) -> Run:
        """A prompt that can be loaded."""
        return self.worker.admit(self.worker.serve(self.worker.prompt(TOKENS)).chain)

    def saving(self, run: Run) -> StepPlan:
        """A plan that saves all of a prompt."""
        asked = StepRequest(run.name, run.chain, run.tables, save=(0, TOKENS))
        parts = describe_saves(self.worker.spec, [asked], True)
        return StepPlan(number=1, saves=LazySaves([run.name], [[run.tables[0].tolist()]], lambda: parts))

    def loading(self, run: Run, **others: Any) -> StepPlan:
        """A plan that loads what is stored of a prompt."""
        asked = StepRequest(run.name, run.chain, run.tables, (0, HIT), run.hit)
        return StepPlan(loads=describe_loads(self.worker.spec, [asked]), **others)

    def train(self) -> None:
        """Other weights, in place."""
        self.model.weight.data += 1

    def compute(self, run: Run) -> None:
        """The hooks of a forward pass."""
        for name, layer in self.names.items():
            self.side.wait_layer(name)
            self.worker.compute(run, layer, 0, TOKENS)
            self.side.layer_done(name)

    def found(self, run: Run) -> int:
        """Tokens of the prompt that are stored, once nothing of it is under way."""
        assert self.worker.agent.wait_idle(run.name, SETTLE_S)
        return self.worker.agent.lookup("looks", run.chain).tokens


@pytest.fixture
def world(embed: Callable[..., EmbeddedServer]) -> Iterator[World]:
    made = World(embed())
    yield made
    made.side.close()


def step(side: WorkerSide, plan: StepPlan) -> None:
    side.prepare(plan)
    side.begin(plan)


def test_a_background_load_that_has_come_and_is_not_told_yet_has_failed(world):
    run = world.stored()
    asked = StepRequest(run.name, run.chain, run.tables, (0, HIT), run.hit)
    step(world.side, StepPlan(background={run.name: describe_loads(world.worker.spec, [asked])}))
    loading = world.side._background[run.name]
    assert loading.wait_loaded(SETTLE_S)
    assert loading.wait_all().ready, "every byte of it is of the old weights"
    step(world.side, StepPlan(replaced=True))
    _, arrived, _ = world.side.transfers(forward=False)
    assert arrived == {run.name}
    blocks = HIT // world.worker.block_size
    assert world.side.failed_blocks() == set(run.tables[0][:blocks].tolist())
    assert world.side.report().failed == {run.name: 1.0}


def test_a_load_that_the_next_plan_begins_is_not_touched(world):
    run = world.stored()
    asked = StepRequest(run.name, run.chain, run.tables, (0, HIT), run.hit)
    parts = describe_loads(world.worker.spec, [asked])
    step(world.side, StepPlan(replaced=True, background={run.name: parts}))
    assert world.side._background[run.name].wait_loaded(SETTLE_S)
    assert world.side.transfers(forward=False)[1] == {run.name}
    assert not world.side.failed_blocks()


def test_a_save_that_waits_for_the_next_step_is_not_even_begun(world):
    run = world.worker.admit(world.worker.prompt(TOKENS))
    plan = world.saving(run)
    world.side._put_off, world.side._unopened_saves[plan.number] = plan, plan
    step(world.side, StepPlan(replaced=True))
    assert not world.side._unopened_saves
    assert world.found(run) == 0


@pytest.mark.parametrize("replaced", [False, True])
def test_a_save_that_waits_for_a_verdict_is_given_up(world, replaced):
    run = world.worker.admit(world.worker.prompt(TOKENS))
    plan = world.saving(run)
    plan.depends_on_load = True
    step(world.side, plan)
    world.compute(run)
    world.side.end()
    step(world.side, StepPlan(replaced=replaced, verdicts=((plan.number, True),)))
    assert world.found(run) == (0 if replaced else TOKENS - 1)


class TestNobodyHasSaid:
    """The weights are replaced in place, and no reset tells."""

    def test_what_is_loaded_by_the_old_keys_has_failed(self, world: World) -> None:
        run = world.stored()
        world.train()
        step(world.side, world.loading(run, step=7))
        world.compute(run)
        world.side.end()
        world.side.transfers(forward=True)
        blocks = HIT // world.worker.block_size
        assert world.side.failed_blocks() == set(run.tables[0][:blocks].tolist())
        news = world.side.report()
        assert news is not None
        assert (news.failed, news.changed) == ({run.name: 1.0}, {7: WRITTEN})

    def test_a_load_in_the_background_has_failed(self, world: World) -> None:
        run = world.stored()
        world.train()
        plan = world.loading(run)
        step(world.side, StepPlan(background={run.name: plan.loads}))
        assert world.side.transfers(forward=False)[1] == {run.name}
        assert world.side.failed_blocks()

    def test_what_is_computed_with_them_is_not_saved_and_its_blocks_are_free(self, world: World) -> None:
        run = world.worker.admit(world.worker.prompt(TOKENS))
        world.train()
        plan = world.saving(run)
        step(world.side, plan)
        world.compute(run)
        world.side.end()
        news = world.side.report()
        assert news is not None
        assert news.drained == {(run.name, plan.number): 1}
        assert world.found(run) == 0

    def test_what_is_not_stored_yet_is_given_up(self, world: World) -> None:
        run = world.worker.admit(world.worker.prompt(TOKENS))
        plan = world.saving(run)
        world.side._put_off, world.side._unopened_saves[plan.number] = plan, plan
        world.train()
        step(world.side, world.loading(world.stored()))
        assert not world.side._unopened_saves
        assert world.found(run) == 0

    def test_it_is_told_once_and_holds_until_the_plans_know(self, world: World) -> None:
        run = world.stored()
        world.train()
        told = []
        for number in (1, 2):
            step(world.side, world.loading(run, step=number))
            world.side.end()
            news = world.side.report()
            assert news is not None and news.failed == {run.name: 1.0}
            told.append(news.changed)
            world.side.failed_blocks()
        assert told == [{1: WRITTEN}, {}]
        step(world.side, world.loading(run, step=3, replaced=True))
        world.compute(run)
        world.side.end()
        assert not world.side.failed_blocks()

    def test_new_weights_behind_a_reset_are_those_that_it_has_told_of(self, world: World) -> None:
        run, later = world.stored(), world.stored()
        world.train()
        for plan, hit in ((world.loading(run, replaced=True), run), (world.loading(later), later)):
            step(world.side, plan)
            world.compute(hit)
            world.side.end()
            assert not world.side.failed_blocks()

    def test_a_step_that_moves_nothing_looks_at_nothing(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LoadedWeights, "change", lambda _: pytest.fail("looked"))
        step(world.side, StepPlan())
        step(world.side, StepPlan(leaving=("r",)))
