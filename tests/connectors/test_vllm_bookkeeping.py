"""vLLM's books: every request that has ended is freed exactly once, by one report of every rank, whatever happens.

The world below is vLLM's scheduler and its aggregator, as far as they look at reports, with their assertions; around
the real scheduler's side and the real worker's sides of the connector, whose transfers a test ends.
"""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm_fakes import BLOCK, BlockState, FakeLookups, output, request, spec_of

from layerflow.agent.values import READY, Ended, Hit
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.plan import StepPlan, WorkerLayout, WorkerReport
from layerflow.connectors.vllm.scheduler import scheduler
from layerflow.connectors.vllm.scheduler.scheduler import SchedulerSide
from layerflow.connectors.vllm.worker import worker
from layerflow.flow.cost import Mode

RANKS = 2
PROMPT = 4 * BLOCK
HIT = 2 * BLOCK
WAITING, LOADING, RUNNING, OVER = "waiting", "loading", "running", "over"


class FakeStep:
    """A step whose loads and saves end when a test says so."""

    def __init__(self, loads: list[Any], saves: list[Any]) -> None:
        self.loads, self.saves = loads, saves
        self.loading, self.saving = bool(loads), bool(saves)
        self.requests = {part.request for part in (*loads, *saves)}

    def wait_loaded(self, timeout_s: float) -> bool:
        return not self.loading

    def begin_loads(self, timeout_s: float) -> bool:
        return True

    def want_all(self) -> None:
        pass

    def wait_all(self) -> Any:
        return READY

    def close(self, ok: bool | None = None) -> None:
        pass

    def layer_done(self, layer: int) -> None:
        pass


class FakeAgent:
    """Opens such steps. It does not end them."""

    def __init__(self) -> None:
        self.costs = (None, None)
        self.measured: deque[Any] = deque()
        self.steps: list[FakeStep] = []

    def open_descriptors(
        self, loads: Any, saves: Any, work: Any = None, timeout_s: Any = None, after: Any = None
    ) -> FakeStep:
        self.steps.append(FakeStep(list(loads), list(saves)))
        return self.steps[-1]

    def record(self) -> None:
        """It is on the cpu."""

    def abort(self, name: str) -> None:
        """Its step ends when the test says so."""

    def reclaim(self, blocks: Any, timeout_s: float) -> int:
        return 0

    def doubt_reads(self) -> None:
        pass

    def overwritten(self, blocks: Any) -> int:
        return 0

    def busy(self, name: str) -> bool:
        return any(name in step.requests for step in self.steps if step.loading or step.saving)

    def saving(self, name: str) -> bool:
        return any(step.saving for step in self.steps if any(part.request == name for part in step.saves))

    def poll(self) -> Ended:
        return Ended()

    def close(self) -> None:
        pass


class World(RuleBasedStateMachine):
    """One vLLM with two ranks."""

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(scheduler, "Lookups", FakeLookups)
        self.patch.setattr(FakeLookups, "wait_connected", lambda *_: True, raising=False)
        self.patch.setattr(scheduler, "Control", lambda *_, **__: SimpleNamespace(close=lambda: None))
        advisor = SimpleNamespace(advise=lambda *_: Mode.BULK, adopt=lambda *_: None, compute_seconds=lambda _: None)
        self.patch.setattr(scheduler, "LoadPolicy", lambda *_: advisor)
        self.patch.setattr(worker, "TransferStats", SimpleNamespace)
        spec = spec_of()
        self.side = SchedulerSide(Options(), "engine", [spec.groups[0].block_size], can_fail_in_background=True)
        self.side.meet_workers([WorkerLayout(msgspec.msgpack.encode(spec), (0,), "ipc://x")] * RANKS)
        self.agents = [FakeAgent() for _ in range(RANKS)]
        layout: Any = SimpleNamespace(spec=spec, numbers={}, vllm_groups=(0,))
        self.workers = [
            worker.WorkerSide(agent, layout, "ipc://x", several_groups=False, early=True)  # type: ignore[arg-type]
            for agent in self.agents
        ]
        self.requests: dict[str, SimpleNamespace] = {}
        self.state: dict[str, str] = {}
        self.arrived: set[str] = set()
        self.freed: Counter[str] = Counter()
        self.recv, self.send = Counter[str](), Counter[str]()
        self.kept: set[str] = set()
        self.finished: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "workers"):
            self.publish()
            for side in self.workers:
                side.close()
            self.patch.undo()

    # -- what happens -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.requests) < 4)
    @rule(hit=st.booleans())
    def arrive(self, hit: bool) -> None:
        name = f"r{len(self.requests)}"
        made = self.requests[name] = request(name, PROMPT)
        self.state[name] = WAITING
        self.side._lookups.answers[name] = Hit(HIT) if hit else Hit(0)  # type: ignore[union-attr]
        self.side.arrived(made)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = [name for name, state in self.state.items() if state == RUNNING]
        if running:
            name = data.draw(st.sampled_from(running))
            self.state[name] = WAITING
            self.requests[name].num_computed_tokens = 0
            self.side._lookups.answers[name] = Hit(HIT)  # type: ignore[union-attr]

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Aborted by its client at any time, or stopped."""
        live = [name for name, state in self.state.items() if state != OVER]
        if live:
            self.finish(data.draw(st.sampled_from(live)))

    @rule(rank=st.integers(0, RANKS - 1), data=st.data())
    def transfer_ends(self, rank: int, data: st.DataObject) -> None:
        steps = [step for step in self.agents[rank].steps if step.loading or step.saving]
        if steps:
            step = data.draw(st.sampled_from(steps))
            step.loading = step.saving = False

    @rule()
    def step(self) -> None:
        """vLLM schedules, the ranks run, vLLM reads what they report."""
        scheduled, new, tables = {}, [], {}
        for number, (name, made) in enumerate(self.requests.items()):
            blocks = ([10 * number + at for at in range(1, 5)],)
            if self.state[name] == LOADING and name in self.arrived:
                self.arrived.discard(name)
                self.state[name] = RUNNING
            elif self.state[name] == WAITING:
                tokens, background = self.side.matched(made, 0)
                tokens = tokens or 0
                self.side.allocated(made, SimpleNamespace(get_block_ids=lambda blocks=blocks: blocks), tokens)
                made.num_computed_tokens = tokens
                self.state[name] = LOADING if background else RUNNING
                new.append((name, blocks, tokens))
            if self.state[name] == RUNNING:
                scheduled[name] = max(1, PROMPT - made.num_computed_tokens)
                tables[name] = blocks
        plan = self.side.plan(output(scheduled, new=new, state=BlockState(tables)))
        for name, tokens in scheduled.items():
            made = self.requests[name]
            made.num_computed_tokens = min(made.num_computed_tokens + tokens, made.num_tokens - 1)
        self.finished.clear()
        self.report([self.run(side, plan) for side in self.workers])

    # -- vLLM -------------------------------------------------------------------------------------------

    def run(self, side: worker.WorkerSide, plan: StepPlan) -> tuple[set[str], set[str], WorkerReport | None]:
        side.prepare(plan)
        side.begin(plan)
        side.end()
        sent, arrived, _ = side.transfers(forward=True)
        return sent, arrived, side.report()

    def report(self, reports: list[tuple[set[str], set[str], WorkerReport | None]]) -> None:
        """As KVOutputAggregator and Scheduler._update_from_kv_xfer_finished."""
        sending, recving, news = set(), set(), None
        for sent, arrived, told in reports:
            assert not sent & arrived
            for names, counts, done in ((sent, self.send, sending), (arrived, self.recv, recving)):
                for name in names:
                    counts[name] += 1
                    if counts[name] == RANKS:
                        done.add(name)
                        del counts[name]
            if told is not None:
                news = told if news is None else news.aggregate(told)
        self.side.update_from_output(
            SimpleNamespace(
                invalid_block_ids=set(),
                kv_connector_worker_meta=news,
                finished_recving=recving or None,
                finished_sending=sending or None,
            )
        )
        for name in recving:
            assert name not in self.freed, "assert req_id in self.requests"
            if self.state[name] == LOADING:
                self.arrived.add(name)
            else:
                assert self.state[name] == OVER
                self.free(name)
        for name in sending:
            assert name not in self.freed, "assert req_id in self.requests"
            assert self.state[name] == OVER
            self.free(name)

    def finish(self, name: str) -> None:
        delay = self.state[name] == LOADING and name not in self.arrived
        self.arrived.discard(name)
        self.state[name] = OVER
        stays, _ = self.side.finished(self.requests[name])
        if delay or stays:
            self.kept.add(name)
        else:
            self.free(name)

    def free(self, name: str) -> None:
        self.kept.discard(name)
        self.freed[name] += 1
        assert self.freed[name] == 1

    @invariant()
    def books(self) -> None:
        for name, state in getattr(self, "state", {}).items():
            assert (state == OVER) == (name in self.kept or name in self.freed)

    def publish(self) -> None:
        """Everything ends: then nothing is kept and nothing is counted."""
        for name, state in list(self.state.items()):
            if state != OVER:
                self.finish(name)
        for _ in range(4):
            self.step()
            for agent in self.agents:
                for step in agent.steps:
                    step.loading = step.saving = False
        assert not self.kept, "blocks that are never freed"
        assert not self.recv and not self.send, "a report that not every rank has made"


TestBooks = World.TestCase
TestBooks.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
