"""A load fails while vLLM has scheduled the next step already, or on another rank: garbage is never found again.

vLLM on a CPU never schedules ahead, so its scheduler is played here; the agent, its memory and the server are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from e2e.known import POISON, KnownWorker, Run, eventually
from vllm_fakes import BlockState, FakeLookups, hooked, output

from layerflow.agent import Step
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.plan import StepPlan, WorkerLayout, WorkerReport
from layerflow.connectors.vllm.scheduler import scheduler
from layerflow.connectors.vllm.scheduler.scheduler import SchedulerSide
from layerflow.connectors.vllm.worker.worker import WorkerSide
from layerflow.flow.cost import Mode
from layerflow.server import EmbeddedServer

Embed = Callable[..., EmbeddedServer]
CHUNK, HIT, PROMPT = 16, 32, 60
MIDDLE = 44  # the prompt is computed in two steps: tokens 32 to 44, and 44 to 60
SETTLE_S = 20.0
PUBLISHED_S = 0.3  # what may leave has left by then; what is held never does


class Engine:
    """One vLLM whose scheduler runs ahead of its one worker."""

    def __init__(self, server: EmbeddedServer, ranks: int) -> None:
        self.worker = KnownWorker(server.endpoint, context=server.context)
        spec = self.worker.spec
        self.side = SchedulerSide(Options(), "e2e", [spec.groups[0].block_size], can_fail_in_background=True)
        self.side.meet_workers([WorkerLayout(msgspec.msgpack.encode(spec), (0,), "ipc://nowhere")] * ranks)
        self.side.step_loads.seen(hooked(spec, ranks))
        names = {f"layer.{layer}": layer for layer in range(spec.num_layers)}
        layout: Any = SimpleNamespace(spec=spec, numbers=names, vllm_groups=(0,))
        self.hooks = WorkerSide(self.worker.agent, layout, "ipc://nowhere", several_groups=False, early=False)
        self.names = list(names)

    def store(self, run: Run) -> None:
        """Compute and save a prompt without vLLM."""
        with self.worker.agent.open_step([run.request()]) as step:
            self.worker.forward(step, [run])
        assert self.worker.agent.wait_idle(run.name, SETTLE_S)

    def admit(self, run: Run) -> SimpleNamespace:
        """vLLM takes a request with its hit."""
        tokens = [int(token) for token in run.tokens]
        made = SimpleNamespace(
            request_id=run.name, prompt_token_ids=tokens, prompt_embeds=None, all_token_ids=tokens,
            num_prompt_tokens=len(tokens), num_tokens=len(tokens), num_computed_tokens=0, mm_features=[],
            lora_request=None, cache_salt=None, kv_transfer_params=None, skip_reading_prefix_cache=False,
        )  # fmt: skip
        self.side._lookups.answers[run.name] = run.hit  # type: ignore[union-attr]
        self.side.arrived(made)
        assert self.side.matched(made, 0) == (HIT, False)
        self.tables = (run.tables[0].tolist(),)
        self.side.allocated(made, SimpleNamespace(get_block_ids=lambda: self.tables), HIT)
        made.num_computed_tokens = HIT
        return made

    def plan(self, made: SimpleNamespace, tokens: int) -> StepPlan:
        """vLLM schedules a step, and counts its tokens as computed at once."""
        name = made.request_id
        planned = self.side.plan(output({name: tokens}, state=BlockState({name: self.tables})))
        made.num_computed_tokens += tokens
        return planned

    def run(self, plan: StepPlan, compute: Callable[[int], None], fails: bool = False) -> SimpleNamespace:
        """The worker's part of a step. Returns what vLLM hears of it."""
        hooks = self.hooks
        hooks.prepare(plan)
        hooks.begin(plan)
        if fails:
            step = hooks._step
            assert isinstance(step, Step)
            eventually(lambda: step.blocks[0])  # the server's plan is there
            step.load_failed(0, 0, 1, "its object was evicted")
        hooks.wait_tails()
        for layer, name in enumerate(self.names):
            hooks.wait_layer(name)
            compute(layer)
            hooks.layer_done(name)
        hooks.end()
        news = hooks.report()
        return SimpleNamespace(
            invalid_block_ids=hooks.failed_blocks(),
            kv_connector_worker_meta=news,
            finished_recving=None,
            finished_sending=None,
        )

    def found(self, run: Run) -> int:
        """Tokens of the prompt that a lookup finds once nothing moves any more."""
        assert self.worker.agent.wait_idle(run.name, SETTLE_S)
        return self.worker.agent.lookup(f"again-{run.name}", run.chain).tokens


@pytest.fixture
def engine(embed: Embed, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Engine]:
    monkeypatch.setattr(scheduler, "Lookups", FakeLookups)
    monkeypatch.setattr(FakeLookups, "wait_connected", lambda *_: True, raising=False)
    monkeypatch.setattr(scheduler, "Control", lambda *_, **__: SimpleNamespace(close=lambda: None))
    advisor = SimpleNamespace(advise=lambda *_: Mode.LAYERWISE, adopt=lambda *_: None, compute_seconds=lambda _: None)
    monkeypatch.setattr(scheduler, "LoadPolicy", lambda *_: advisor)
    made = Engine(embed(), ranks=getattr(request, "param", 1))
    yield made
    made.hooks.close()


def begun(engine: Engine) -> tuple[Run, SimpleNamespace]:
    """A request of which the first two chunks are in the pool."""
    worker = engine.worker
    head = worker.admit(worker.prompt(HIT), look=False)
    engine.store(head)
    run = worker.admit(worker.prompt(PROMPT, like=head.chain, shared=HIT))
    assert run.hit.tokens == HIT
    return run, engine.admit(run)


def garbage(engine: Engine, run: Run, start: int, stop: int) -> Callable[[int], None]:
    """What a forward pass writes that has read a block which was never loaded."""
    size = engine.worker.block_size
    return lambda layer: engine.worker.fill(run, layer, range(start // size, -(-stop // size)), POISON + 1)


def right(engine: Engine, run: Run, start: int, stop: int) -> Callable[[int], None]:
    return lambda layer: engine.worker.compute(run, layer, start, stop)


def test_the_step_that_was_scheduled_before_the_failure_was_known(engine: Engine) -> None:
    run, made = begun(engine)
    first = engine.plan(made, MIDDLE - HIT)
    second = engine.plan(made, PROMPT - MIDDLE)  # before anything is heard of the first
    assert first.loads and first.saves is not None and second.saves
    told = engine.run(first, garbage(engine, run, HIT, MIDDLE), fails=True)
    assert told.invalid_block_ids
    behind = engine.run(second, garbage(engine, run, MIDDLE, PROMPT))
    assert not behind.invalid_block_ids
    assert not engine.worker.agent.wait_idle(run.name, PUBLISHED_S)
    engine.side.update_from_output(told)
    made.num_computed_tokens = 0  # vLLM takes the tokens back
    third = engine.plan(made, PROMPT)
    engine.hooks.prepare(third)
    assert engine.worker.agent.lookup("early", run.chain).tokens <= HIT
    told = engine.run(third, right(engine, run, 0, PROMPT))
    engine.side.update_from_output(behind)
    engine.side.update_from_output(told)
    made.num_tokens += 1
    made.all_token_ids = [*made.all_token_ids, 1]
    engine.run(engine.plan(made, 1), lambda _: None)
    # The third step finds the places of what it saves still taken by what is given up: that costs a later miss.
    assert engine.found(run) in (HIT, PROMPT - 1)
    again = engine.worker.admit(run.chain)
    with engine.worker.agent.open_step([again.request(save=False)]) as step:
        assert step.wait_all().ready
    assert sum(engine.worker.wrong_bytes(again, layer, 0, again.hit.tokens) for layer in range(4)) == 0


@pytest.mark.parametrize("engine", [2], indirect=True)
def test_a_load_that_failed_on_another_rank(engine: Engine) -> None:
    """Its garbage comes to this rank's layers through tensor parallelism; here every load was fine."""
    run, made = begun(engine)
    told = engine.run(engine.plan(made, PROMPT - HIT), garbage(engine, run, HIT, PROMPT))
    assert not told.invalid_block_ids
    assert not engine.worker.agent.wait_idle(run.name, PUBLISHED_S)
    told.invalid_block_ids = {int(run.tables[0][0])}
    engine.side.update_from_output(told)
    made.num_computed_tokens = 0
    engine.hooks.prepare(engine.plan(made, PROMPT))
    assert engine.worker.agent.lookup("early", run.chain).tokens <= HIT


@pytest.mark.parametrize("engine", [2], indirect=True)
@pytest.mark.parametrize("fails", [False, True])
def test_what_one_rank_has_run_waits_for_the_other_one(engine: Engine, fails: bool) -> None:
    """The other rank's copies end later: only then it can say whether its load was fine."""
    run, made = begun(engine)
    plan = engine.plan(made, PROMPT - HIT)
    told = engine.run(plan, right(engine, run, HIT, PROMPT))
    assert eventually(lambda: plan.number in told.kv_connector_worker_meta.ran or _again(engine, told), SETTLE_S)
    engine.side.update_from_output(told)
    made.num_tokens += 1
    made.all_token_ids = [*made.all_token_ids, 1]
    told = engine.run(engine.plan(made, 1), lambda _: None)
    assert not engine.worker.agent.wait_idle(run.name, PUBLISHED_S), "the other rank has said nothing yet"
    other = WorkerReport(ran={plan.number: 1})
    told.kv_connector_worker_meta = other.aggregate(told.kv_connector_worker_meta or WorkerReport())
    told.invalid_block_ids = {int(run.tables[0][0])} if fails else set()
    engine.side.update_from_output(told)
    engine.hooks.prepare(engine.plan(made, 1))
    if fails:
        assert engine.worker.agent.lookup("early", run.chain).tokens <= HIT
    else:
        assert engine.found(run) == PROMPT - 1


def _again(engine: Engine, told: SimpleNamespace) -> bool:
    """A lane may tell a moment late that its loads have ended; not yet."""
    told.kv_connector_worker_meta = told.kv_connector_worker_meta.aggregate(engine.hooks.report() or WorkerReport())
    return False


def test_what_is_sound_is_published_with_the_next_step(engine: Engine) -> None:
    run, made = begun(engine)
    told = engine.run(engine.plan(made, PROMPT - HIT), right(engine, run, HIT, PROMPT))
    assert engine.worker.agent.busy(run.name)
    engine.side.update_from_output(told)
    made.num_tokens += 1
    made.all_token_ids = [*made.all_token_ids, 1]

    def published() -> bool:
        """Steps go on: a lane may tell a moment late that its loads have ended."""
        engine.side.update_from_output(engine.run(engine.plan(made, 1), lambda _: None))
        return not engine.worker.agent.busy(run.name)

    assert eventually(published, SETTLE_S)
    assert engine.found(run) == PROMPT - 1
