"""vLLM's hooks replayed at random, in the order of both of its model runners: no wrong byte is read or published.

A small vLLM schedules requests, takes blocks away from some, zeroes and copies new ones, and runs its passes on a
simulated device. What a token's row holds follows from the tokens up to it and from its layer, so every byte that a
pass reads can be checked, and at the end every byte that a prompt would hit. The scheduler's and the worker's side,
the agent and the server are real.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from device.simulated import Machine, Stream, Work
from e2e.known import eventually
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from vllm_fakes import BlockState, FakeInquiry, FakeLookups, output, request

from layerflow import Agent, EmbeddedServer, GroupSpec, ModelSpec, Plane, Settings, StepRequest
from layerflow.agent.values import Follow
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.plan import StepPlan, WorkerLayout
from layerflow.connectors.vllm.scheduler import scheduler
from layerflow.connectors.vllm.scheduler.scheduler import SchedulerSide
from layerflow.connectors.vllm.worker import worker
from layerflow.connectors.vllm.worker.worker import WorkerSide
from layerflow.flow.cost import Mode
from layerflow.keys import Chain
from layerflow.spec import Shard

LAYERS, BLOCKS, BLOCK, CHUNK, WIDTH = 4, 28, 8, 16, 16
PATIENCE_S = 20.0
ROWS = (Plane("kv", "uint8", (WIDTH,)),)
WAITING, LOADING, RUNNING, OVER = "waiting", "loading", "running", "over"
JUNK = 255
SETTINGS = Settings(pool={"size": "4MiB"}, transfer={"step_timeout_ms": 60_000}, server={"liveness_ms": 20_000})
ONE_OF_FOUR = st.integers(0, 3).map(lambda drawn: drawn == 3)


@dataclass(frozen=True)
class Model:
    """What vLLM registers.

    :param groups: layerflow's.
    :param vllm: of each, whose block table it shares.
    :param names: of the layers' caches, in the order in which a pass reads them.
    :param hooked: caches whose layers call hooks.
    """

    groups: tuple[GroupSpec, ...]
    vllm: tuple[int, ...]
    names: tuple[str, ...] = tuple(f"layer.{layer}" for layer in range(LAYERS))
    hooked: frozenset[int] = frozenset(range(LAYERS))
    shard: Shard = field(default_factory=Shard)

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec("m", "c", self.groups, self.shard, chunk_tokens=CHUNK)


def full(*layers: int) -> GroupSpec:
    return GroupSpec("full", BLOCK, layers, ROWS)


MODELS = {
    "one group": Model((full(0, 1, 2, 3),), (0,)),
    "several groups": Model((full(0, 2), full(1, 3)), (0, 1)),
    "indexer": Model(
        (full(1, 3), full(0, 2)), (0, 0), ("m.0.index", "m.0.attn", "m.1.index", "m.1.attn"), frozenset((1, 3))
    ),
    "state": Model((full(0, 1, 2), GroupSpec("state", BLOCK, (3,), ROWS)), (0, 1), hooked=frozenset((0, 1, 2))),
    "draft": Model((full(0, 1, 2), full(3)), (0, 0), shard=Shard(drafts=("", "eagle"))),
    "indexed draft": Model(
        (full(0, 1), full(3), full(2)),
        (0, 0, 0),
        ("m.0.attn", "m.1.attn", "m.9.index", "m.9.attn"),
        frozenset((0, 1, 3)),
        Shard(drafts=("", "mtp", "mtp")),
    ),
    "no hooks": Model((full(0, 1, 2, 3),), (0,), hooked=frozenset()),
}


class Prompt:
    """Its tokens, and what each layer's rows hold."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.rows = np.zeros((LAYERS, len(self.tokens), WIDTH), np.uint8)
        digest = b""
        for at, token in enumerate(self.tokens):
            digest = hashlib.blake2b(digest + bytes([token % 251, token // 251]), digest_size=WIDTH).digest()
            for layer in range(LAYERS):
                row = hashlib.blake2b(digest + bytes([layer]), digest_size=WIDTH).digest()
                self.rows[layer, at] = np.frombuffer(row, np.uint8)


@dataclass(eq=False)
class Req:
    """A request of vLLM's. `tables`: block ids per vLLM group."""

    made: Any
    prompt: Prompt
    tables: tuple[list[int], ...]
    state: str = WAITING
    resumed: bool = False
    started: bool = False
    come: bool = False

    @property
    def name(self) -> str:
        return str(self.made.request_id)


@dataclass(eq=False)
class Part:
    """A request's part of a pass. `bad`: it has read wrong bytes; `excused`: vLLM was told in time."""

    req: Req
    start: int
    end: int
    tables: tuple[list[int], ...]
    bad: bool = False
    bad_draft: bool = False
    excused: bool = False


class Asker(FakeLookups):
    """Answers at once, from the server."""

    agent: Agent

    def ask(
        self, name: str, chain: Chain, follow: Follow | None = None, *, compute_s: float | None = None
    ) -> FakeInquiry:
        self.answers[name] = self.agent.lookup(name, chain)
        return super().ask(name, chain, follow, compute_s=compute_s)

    def wait_connected(self, timeout_s: float) -> bool:
        return True

    def drop_lease(self, name: str) -> None:
        self.agent.drop_lease(name)


class SlowMachine(Machine):
    """Stands still at one place of a stream until it is told to go on, or a thread waits for it."""

    slow: Work | None = None

    def stand_still(self, stream: Stream) -> None:
        """From what the stream is given next on."""
        self.slow = stream.put(held=True)

    def go_on(self) -> None:
        """The stream runs again."""
        if self.slow is not None:
            self.slow.held, self.slow = False, None

    def run_until(self, reached: Callable[[], bool]) -> None:
        self.go_on()
        super().run_until(reached)


class Replay(RuleBasedStateMachine):
    """One worker of vLLM's and its scheduler."""

    @initialize(
        kind=st.sampled_from(sorted(MODELS)),
        second=st.booleans(),
        splits=st.booleans(),
        zeroes=st.booleans(),
        mode=st.sampled_from([Mode.LAYERWISE, Mode.LAYERWISE, Mode.BULK]),
        seed=st.integers(0, 99),
    )
    def start(self, kind: str, second: bool, splits: bool, zeroes: bool, mode: Mode, seed: int) -> None:
        self.model, self.second, self.splits, self.zeroes = MODELS[kind], second, splits, zeroes
        self.kind, spec = kind, self.model.spec
        several = len(set(self.model.vllm)) > 1
        self.stack = contextlib.ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.machine = SlowMachine(seed=seed)
        device = self.machine.accelerator()
        patch.setattr("layerflow.agent.agent.device_for", lambda _: device)
        server = self.stack.enter_context(EmbeddedServer(SETTINGS))
        self.stack.enter_context(self.machine.running())
        self.stream = self.machine.Stream()
        self.stack.enter_context(self.machine.stream(self.stream))
        groups = [group for group, _ in spec.layer_places()]
        self.state_layers = {layer for layer, group in enumerate(groups) if spec.groups[group].rules.exact}
        self.drafts = {layer for layer, group in enumerate(groups) if spec.shard.drafts and spec.shard.drafts[group]}
        self.table_of = [self.model.vllm[group] for group in groups]
        self.tensors = {
            layer: {"kv": torch.zeros((BLOCKS, spec.groups[group].entries, WIDTH), dtype=torch.uint8)}
            for layer, group in enumerate(groups)
        }
        self.agent = Agent(server.endpoint, spec, self.tensors, context=server.context, lookup_timeout_s=PATIENCE_S)
        self.stack.callback(self.agent.close)
        patch.setattr(Asker, "agent", self.agent, raising=False)
        patch.setattr(scheduler, "Lookups", Asker)
        patch.setattr(scheduler, "Control", lambda *_, **__: SimpleNamespace(close=lambda: None))
        policy = SimpleNamespace(advise=lambda *_: mode, adopt=lambda *_: None, compute_seconds=lambda _: None)
        patch.setattr(scheduler, "LoadPolicy", lambda *_: policy)
        patch.setattr(worker, "TransferStats", SimpleNamespace)
        patch.setattr(worker, "RECLAIM_S", 0.05)
        sizes = {vllm: group.block_size for vllm, group in zip(self.model.vllm, spec.groups, strict=True)}
        block_tokens = [sizes[vllm] for vllm in sorted(sizes)]
        self.side = SchedulerSide(Options(), "engine", block_tokens, can_fail_in_background=True, recovers=several)
        self.side.meet_workers([WorkerLayout(msgspec.msgpack.encode(spec), self.model.vllm, "ipc://nowhere")])
        layout: Any = SimpleNamespace(
            spec=spec, numbers={name: at for at, name in enumerate(self.model.names)}, vllm_groups=self.model.vllm
        )
        self.hooks = WorkerSide(
            self.agent, layout, "ipc://x", several_groups=several, early=False, in_flight=2, splits=splits
        )
        self.late = False
        self.hooks._is_short = lambda _: self.late  # type: ignore[method-assign]
        self.free = list(range(BLOCKS - 1, 0, -1))
        self.requests: dict[str, Req] = {}
        self.kept: dict[str, tuple[list[int], ...]] = {}
        self.prompts: dict[tuple[int, ...], tuple[Prompt, Chain]] = {}
        self.parts: list[Part] = []
        self.count = 0
        self.left_out = False
        self.passes = [self.stream.put(), self.stream.put()]
        self.deferred: list[tuple[Work, list[int]]] = []

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            with self.stack:
                self.publish()
                self.assert_all_right()

    # -- what happens -------------------------------------------------------------------------------

    @rule(
        arrives=st.booleans(),
        prompt=st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 30)),
        preempts=ONE_OF_FOUR,
        aborts=ONE_OF_FOUR,
        which=st.integers(0, 9),
        chunk=st.sampled_from([8, 16, 24, 64]),
        late=st.booleans(),
        copies=st.booleans(),
        holds=st.booleans(),
        how=st.sampled_from(["hooks"] * 8 + ["graph", "halves", "loops", "one is silent", "no draft"]),
        ends=st.sampled_from([True, True, True, False]),
    )
    def turn(
        self, arrives: bool, prompt: tuple[int, int, int], preempts: bool, aborts: bool, which: int, **step: Any
    ) -> None:
        """Requests come and go; then a step."""
        live = self.live()
        running = [req for req in live if req.state == RUNNING and req.started]
        if aborts and live:
            self.finish(live[which % len(live)])
        elif preempts and running:
            self.take_back(running[which % len(running)])
        if (arrives or not live) and len(live) < 4:
            self.arrive(*prompt)
        self.step(**step)

    def arrive(self, head: int, shared: int, own: int) -> None:
        """A request that shares the beginning of its prompt with others."""
        name = f"r{self.count}"
        self.count += 1
        tokens = [*range(head * 100, head * 100 + shared * BLOCK)]
        tokens += range(1000 + 50 * (self.count % 5), 1000 + 50 * (self.count % 5) + own)
        prompt = self.prompts[tuple(tokens)][0] if tuple(tokens) in self.prompts else Prompt(tokens)
        made = request(name, len(tokens), prompt_token_ids=[*tokens], all_token_ids=[*tokens])
        self.requests[name] = Req(made, prompt, self.no_blocks())
        self.side.arrived(made)
        self.prompts.setdefault(tuple(tokens), (prompt, self.side._tracked[name].chain))

    def step(self, chunk: int, late: bool, copies: bool, holds: bool, how: str, ends: bool) -> None:
        """vLLM schedules and runs a pass, and reads what the worker reports.

        :param late: its saves begin behind it. :param copies: into some of its new blocks.
        :param holds: the device stands still until the next step is prepared.
        :param ends: with ``wait_for_save``: not on the first runner's pipeline stages before the last.
        """
        self.await_passes()
        parts, out, plan = self.schedule(chunk, copies=copies)
        self.late = late
        graph = how == "graph"
        if self.second:
            self.prepare(out, parts)
            self.hooks.prepare(plan, inside=not graph)
            hooked = self.hooks.begin(plan, inside=not graph)
        else:
            self.hooks.prepare(plan, inside=False)
            self.prepare(out, parts)
            hooked = self.hooks.begin(plan, inside=True)
        self.machine.go_on()
        if holds:
            self.machine.stand_still(self.stream)
        self.hooks.wait_tails()
        if graph:
            self.hooks.wait_whole()
        if parts:
            self.forward(parts, how, hooked=hooked and not graph)
        self.passes = [self.passes[-1], self.stream.put()]
        if ends or self.second:
            self.hooks.end()
        sent, arrived, failed = self.hooks.transfers(forward=bool(parts))
        self.report(parts, plan, sent, arrived, failed)

    # -- vLLM's scheduler ---------------------------------------------------------------------------

    def live(self) -> list[Req]:
        return [req for req in self.requests.values() if req.state != OVER]

    def no_blocks(self) -> tuple[list[int], ...]:
        return tuple([] for _ in set(self.model.vllm))

    def grow(self, req: Req, upto: int) -> tuple[list[int], ...] | None:
        """New blocks for so many tokens; None = there are not enough."""
        missing = [-(-upto // BLOCK) - len(table) for table in req.tables]
        if sum(max(0, each) for each in missing) > len(self.free):
            return None
        new = tuple([self.free.pop() for _ in range(max(0, each))] for each in missing)
        for table, more in zip(req.tables, new, strict=True):
            table.extend(more)
        return new

    def schedule(self, chunk: int, *, copies: bool) -> tuple[list[Part], Any, StepPlan]:
        news, cached, scheduled, taken = [], [], {}, list[int]()
        parts: list[Part] = []
        offers: dict[str, list[tuple[int, int, int]]] = {}
        for req in self.live():
            made, first = req.made, False
            if req.state == LOADING and req.come:
                req.state, req.come, first = RUNNING, False, True
            if req.state == WAITING:
                if len(self.free) < len(req.tables) * -(-len(req.prompt.tokens) // BLOCK):
                    continue
                tokens, background = self.side.matched(made, 0)
                if tokens is None:
                    continue
                made.num_computed_tokens = tokens
                size = tokens if background else min(tokens + chunk, len(req.prompt.tokens))
                new = self.grow(req, self.aligned(size, req))
                assert new is not None
                self.side.allocated(made, SimpleNamespace(get_block_ids=lambda req=req: req.tables), tokens)
                if background:
                    req.state = LOADING
                    continue
                req.state, first = RUNNING, True
                taken += [block for each in new for block in each]
            if req.state != RUNNING:
                continue
            start = made.num_computed_tokens
            end = self.aligned(min(start + chunk, len(req.prompt.tokens)), req)
            more = self.grow(req, end)
            if more is None or end <= start:
                continue
            taken += [block for each in more for block in each]
            copied = tuple([*table] for table in req.tables)
            if first and not req.resumed:
                news.append((req.name, copied, start))
            elif first:
                cached.append((req.name, copied, start, True))
            else:
                cached.append((req.name, more if any(more) else None, start, False))
            req.started = True
            scheduled[req.name] = end - start
            parts.append(Part(req, start, end, copied))
            if self.state_layers and end % BLOCK == 0:
                offers[req.name] = [(1, req.tables[1][end // BLOCK - 1], end)]
        state = BlockState({part.req.name: part.tables for part in parts}, offers)
        out = output(scheduled, new=news, cached=cached, state=state)
        out.new_block_ids_to_zero = taken if self.zeroes else None
        out.kv_cache_block_copies = [
            SimpleNamespace(src_block_id=BLOCKS - 1, dst_block_id=block) for block in taken[:1] if copies
        ]
        plan = self.side.plan(out)
        for part in parts:
            part.req.made.num_computed_tokens = part.end
        self.parts += parts
        return parts, out, plan

    def aligned(self, end: int, req: Req) -> int:
        """Where a step of a model with recurrent state may end."""
        return end if not self.state_layers or end == len(req.prompt.tokens) else max(BLOCK, end // BLOCK * BLOCK)

    def take_back(self, req: Req) -> None:
        """Preempt it: its blocks are free at once."""
        self.release(req.tables)
        req.tables, req.state, req.resumed = self.no_blocks(), WAITING, True
        req.made.num_computed_tokens = 0

    def finish(self, req: Req) -> None:
        loading = req.state == LOADING and not req.come
        req.state = OVER
        stays, _ = self.side.finished(req.made, req.tables)
        if stays or loading:
            self.kept[req.name] = req.tables
        else:
            self.release(req.tables)

    def release(self, tables: tuple[list[int], ...]) -> None:
        """Free once the last pass that may use them has ended, as ``Scheduler.defer_block_free``."""
        self.deferred.append((self.passes[-1], [block for table in tables for block in table]))

    def await_passes(self) -> None:
        """One pass at most is in flight while the next is scheduled."""
        assert eventually(lambda: self.passes[-2].done, PATIENCE_S)
        for over, blocks in self.deferred:
            if over.done:
                self.free += blocks
        self.deferred = [(over, blocks) for over, blocks in self.deferred if not over.done]

    def report(self, parts: list[Part], plan: StepPlan, sent: set[str], arrived: set[str], failed: set[str]) -> None:
        """As vLLM's scheduler reads a step's output."""
        invalid, news = self.hooks.failed_blocks(), self.hooks.report()
        lost = set(news.lost) if news is not None else set()
        for req in self.live():
            bad = [at for at, block in enumerate(req.tables[0]) if block in invalid]
            if bad or req.name in lost:
                for part in self.parts:
                    part.excused |= part.req is req
            if req.name in lost and req.state == RUNNING:
                self.take_back(req)
            elif bad and req.state != WAITING:
                req.made.num_computed_tokens = min(bad[0] * BLOCK, req.made.num_computed_tokens)
            if req.name in failed:
                req.made.num_computed_tokens = 0
        for name in arrived:
            req = self.requests[name]
            req.come = req.state == LOADING
            if req.state == OVER:
                self.release(self.kept.pop(name))
        self.side.update_from_output(
            SimpleNamespace(
                invalid_block_ids=invalid,
                kv_connector_worker_meta=news,
                finished_recving=arrived or None,
                finished_sending=sent or None,
            )
        )
        for name in sent:
            self.release(self.kept.pop(name))
        for part in parts:
            if part.req.state == RUNNING and part.req.made.num_computed_tokens == len(part.req.prompt.tokens):
                self.finish(part.req)

    # -- vLLM's worker ------------------------------------------------------------------------------

    def prepare(self, out: Any, parts: list[Part]) -> None:
        """What a runner enqueues before the pass: zeroes new blocks, copies, moves states."""
        zeroed = torch.tensor(out.new_block_ids_to_zero or [], dtype=torch.int64)
        copies = [(copy.src_block_id, copy.dst_block_id) for copy in out.kv_cache_block_copies]
        moves = [
            (layer, part.tables[self.table_of[layer]][(part.start - 1) // BLOCK], self.state_block(part, layer))
            for layer in self.state_layers
            for part in parts
            if part.start
        ]

        def run() -> None:
            for planes in self.tensors.values():
                planes["kv"].index_fill_(0, zeroed, 0)
                for src, dst in copies:
                    planes["kv"][dst] = planes["kv"][src]
            for layer, src, dst in moves:
                self.tensors[layer]["kv"][dst] = self.tensors[layer]["kv"][src]

        self.stream.put(run)

    def state_block(self, part: Part, layer: int) -> int:
        return part.tables[self.table_of[layer]][(part.end - 1) // BLOCK]

    def forward(self, parts: list[Part], how: str, *, hooked: bool) -> None:
        twice = self.splits or how in ("halves", "loops")
        self.left_out |= how == "no draft"
        layers = [layer for layer in range(LAYERS) if not (how == "no draft" and layer in self.drafts)]
        silent = 1 if how == "one is silent" and 1 in self.model.hooked else -1

        def layer_pass(layer: int, half: int | None) -> None:
            calls = hooked and layer in self.model.hooked and layer != silent
            if calls:
                self.hooks.wait_layer(self.model.names[layer])
            self.stream.put(self.attention(parts, layer, half))
            if calls:
                self.hooks.layer_done(self.model.names[layer])

        order = [(layer, half) for layer in layers for half in (0, 1)]
        if how == "loops":
            order.sort(key=lambda each: each[1])
        for layer, half in order if twice else [(layer, None) for layer in layers]:
            layer_pass(layer, half)

    def attention(self, parts: list[Part], layer: int, half: int | None) -> Callable[[], None]:
        """A layer's reads and writes, when the device comes to it."""
        memory = self.tensors[layer]["kv"]

        def run() -> None:
            for part in parts:
                rows = part.req.prompt.rows[layer]
                middle = (part.start + part.end) // 2
                lo, hi = {None: (part.start, part.end), 0: (part.start, middle), 1: (middle, part.end)}[half]
                if layer in self.state_layers:
                    self.run_state(part, layer, rows, last=half != 0)
                    continue
                blocks, table = memory.numpy(), part.tables[self.table_of[layer]]
                right = self.holds(blocks, table, rows[: part.start])
                if layer in self.drafts:
                    part.bad_draft |= not right
                else:
                    part.bad |= not right
                wrong = part.bad or (layer in self.drafts and part.bad_draft)
                for at in range(lo, hi):
                    blocks[table[at // BLOCK], at % BLOCK] = JUNK if wrong else rows[at]

        return run

    def run_state(self, part: Part, layer: int, rows: np.ndarray, *, last: bool) -> None:
        blocks, block = self.tensors[layer]["kv"].numpy(), self.state_block(part, layer)
        if last:
            part.bad |= bool(part.start) and not np.array_equal(blocks[block, 0], rows[part.start - 1])
            blocks[block, 0] = JUNK if part.bad else rows[part.end - 1]

    def holds(self, blocks: np.ndarray, table: list[int], rows: np.ndarray) -> bool:
        held = [blocks[table[at // BLOCK], at % BLOCK] for at in range(len(rows))]
        return not held or np.array_equal(np.stack(held), rows)

    # -- what must be true --------------------------------------------------------------------------

    def publish(self) -> None:
        """All requests end, and all that moves."""
        for req in self.live():
            self.finish(req)
        quiet = {"chunk": 8, "late": False, "copies": False, "holds": False, "how": "hooks", "ends": True}

        def over() -> bool:
            self.step(**quiet)  # type: ignore[arg-type]
            return not self.kept and not self.deferred and not any(self.agent.busy(name) for name in self.requests)

        assert eventually(over, PATIENCE_S), f"kept {sorted(self.kept)}"
        assert eventually(lambda: not self.stream.queue, PATIENCE_S)
        assert sorted(self.free) == list(range(1, BLOCKS))

    def assert_all_right(self) -> None:
        wrong = [(part.req.name, part.start, part.end) for part in self.parts if part.bad and not part.excused]
        assert not wrong, "passes have read bytes that are not theirs, and vLLM was told nothing"
        for number, (prompt, chain) in enumerate(self.prompts.values()):
            name = f"check{number}"
            hit = self.agent.lookup(name, chain)
            if hit.tokens:
                self.assert_stored_right(name, prompt, chain, hit)

    def assert_stored_right(self, name: str, prompt: Prompt, chain: Chain, hit: Any) -> None:
        count = -(-len(prompt.tokens) // BLOCK)
        tables = [[*range(1 + vllm * count, 1 + (vllm + 1) * count)] for vllm in self.model.vllm]
        asked = StepRequest(name, chain, [np.array(table) for table in tables], load=(0, hit.tokens), hit=hit)
        with self.agent.open_step([asked]) as step:
            assert step.wait_all()
        done = self.stream.put()
        assert eventually(lambda: done.done, PATIENCE_S)
        for layer, planes in self.tensors.items():
            if layer in self.drafts and (self.left_out or not hit.drafts):
                continue  # behind rows that it has not computed, a draft model computes what is only worth less
            rows, blocks = prompt.rows[layer, : hit.tokens], planes["kv"].numpy()
            table = tables[[group for group, _ in self.model.spec.layer_places()][layer]]
            if layer in self.state_layers:
                assert np.array_equal(blocks[table[(hit.tokens - 1) // BLOCK], 0], rows[-1]), "another prefix"
            else:
                assert self.holds(blocks, table, rows), f"layer {layer}: published bytes are not those of their tokens"


# Threads take their own turns: a sequence that fails need not fail when a part of it is tried again.
SHORT = settings(
    max_examples=12,
    stateful_step_count=16,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TestReplay = Replay.TestCase
TestReplay.settings = SHORT


@pytest.mark.campaign
class TestCampaign(Replay.TestCase):  # type: ignore[name-defined,misc]
    """Ten thousand steps."""

    settings = settings(SHORT, max_examples=400, stateful_step_count=25)
