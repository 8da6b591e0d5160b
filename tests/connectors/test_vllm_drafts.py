"""Which of vLLM's layers are a draft model's, and what becomes of its caches that have no hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from e2e.known import KnownWorker, Run

from layerflow.agent import Agent, StepRequest
from layerflow.agent.descriptors import describe_loads, describe_saves, with_more
from layerflow.connectors.vllm.layout import draft_layers, draft_name, guesses_unseen
from layerflow.connectors.vllm.plan import Asking, LazySaves, StepPlan
from layerflow.connectors.vllm.worker.worker import WorkerSide
from layerflow.server import EmbeddedServer
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

OWN = ["model.layers.0.self_attn.attn", "language_model.model.layers.7.self_attn.attn"]


def config(method: str | None = "eagle", layers: int = 8) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method) if method else None,
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
    )


@pytest.mark.parametrize(
    "name",
    [
        "draft_model.model.layers.0.self_attn.attn",  # a small model
        "model.layers.8.self_attn.attn",  # EAGLE, EAGLE-3
        "model.layers.8.mtp_block.self_attn.attn",  # DeepSeek's MTP
        "mtp.layers.0.self_attn.attn",  # Qwen3-Next's MTP
    ],
)
def test_its_layers_are_told_by_their_names(name: str) -> None:
    assert draft_layers(config(), [*OWN, name]) == {name}


def test_a_model_that_runs_alone_has_none() -> None:
    assert draft_layers(config(None, layers=1), OWN) == set()


@pytest.mark.parametrize(("method", "unseen"), [("ngram", False), ("suffix", False), ("eagle", True), (None, False)])
def test_a_draft_model_whose_layers_are_not_found_is_known(method: str | None, unseen: bool) -> None:
    assert guesses_unseen(config(method), frozenset()) is unseen
    assert guesses_unseen(config(method), frozenset({"draft"})) is False


def test_every_fact_of_it_is_in_its_name() -> None:
    group = GroupSpec("full", 16, (4,), (Plane("kv", "uint8", (8,)),))
    wider = GroupSpec("full", 16, (4,), (Plane("kv", "uint8", (16,)),))
    longer = GroupSpec("full", 16, (4, 5), (Plane("kv", "uint8", (8,)),))
    elsewhere = GroupSpec("full", 16, (9,), (Plane("kv", "uint8", (8,)),))
    named = [draft_name("c", "p", each) for each in (group, wider, longer)]
    named += [draft_name("other", "p", group), draft_name("c", "other", group)]
    assert len(set(named)) == 5
    assert draft_name("c", "p", elsewhere) == named[0], "where a layer stands among the model's changes no byte"


ROWS = (Plane("k", "uint8", (32,)), Plane("v", "uint8", (32,)))
LAYERS = {"m.0.attn": 0, "m.1.attn": 1, "m.9.attn": 2, "m.9.indexer.k_cache": 3}
HOOKED = ("m.0.attn", "m.1.attn", "m.9.attn")
MAIN, ATTENTION, INDEXER = range(3)
TOKENS, HIT = 64, 48
SETTLE_S = 20.0


class IndexedDraft:
    """One worker of vLLM's: a model of two layers, and an MTP layer whose indexer calls no hook."""

    def __init__(self, server: EmbeddedServer) -> None:
        groups = tuple(GroupSpec("full", 4, layers, ROWS) for layers in ((0, 1), (2,), (3,)))
        self.spec = ModelSpec("m", "c", groups, Shard(drafts=("", "mtp", "mtp")), chunk_tokens=16)
        self.worker = KnownWorker(server.endpoint, self.spec, context=server.context)
        self.side = self.attach()

    def attach(self) -> WorkerSide:
        layout: Any = SimpleNamespace(spec=self.spec, numbers=LAYERS, vllm_groups=(0, 0, 0))
        return WorkerSide(self.worker.agent, layout, "ipc://nowhere", several_groups=False, early=False)

    def restart(self) -> None:
        """Nothing of a layer is seen."""
        self.side._deferred.close()
        self.side = self.attach()

    def arrive(self, plan: StepPlan) -> None:
        self.side.prepare(plan)
        self.side.begin(plan)
        self.side.wait_tails()

    def forward(self, run: Run, hooked: tuple[str, ...] = HOOKED, start: int = 0) -> None:
        """A pass that computes the rest of a prompt: of a draft layer the indexer first, which asks for nothing."""
        for name in hooked:
            layer = LAYERS[name]
            if layer == LAYERS["m.9.attn"]:
                self.worker.compute(run, LAYERS["m.9.indexer.k_cache"], start, TOKENS)
            self.side.wait_layer(name)
            self.worker.compute(run, layer, start, TOKENS)
            self.side.layer_done(name)
        self.side.end()
        self.side.transfers(forward=True)

    def run(self, plan: StepPlan, run: Run, hooked: tuple[str, ...] = HOOKED) -> None:
        """A whole step."""
        self.arrive(plan)
        self.forward(run, hooked)

    def new(self, tokens: int = TOKENS) -> Run:
        return self.worker.admit(self.worker.prompt(tokens))

    def saves(self, run: Run, start: int = 0) -> LazySaves:
        asked = StepRequest(run.name, run.chain, run.tables, save=(start, TOKENS))
        parts = describe_saves(self.spec, [asked], True)
        return LazySaves([run.name], [[table.tolist() for table in run.tables]], lambda: parts)

    def loads(self, run: Run, *groups: int) -> list[Any]:
        asked = StepRequest(run.name, run.chain, run.tables, (0, run.hit.tokens), run.hit)
        return [part for part in describe_loads(self.spec, [asked]) if part.group in groups]

    def found(self, run: Run) -> Any:
        """What of the prompt is stored, once nothing of it is under way."""
        assert self.worker.agent.wait_idle(run.name, SETTLE_S)
        return self.worker.agent.lookup("looks", run.chain)


@pytest.fixture
def indexed(embed: Callable[..., EmbeddedServer]) -> Iterator[IndexedDraft]:
    made = IndexedDraft(embed())
    yield made
    made.side.close()


class TestADraftLayersCacheWithoutAHook:
    def test_is_stored_with_the_one_beside_it_and_in_place_before_a_pass(self, indexed: IndexedDraft) -> None:
        first = indexed.new()
        indexed.run(StepPlan(number=1, saves=indexed.saves(first)), first)
        hit = indexed.found(first)
        assert (hit.tokens, hit.drafts) == (TOKENS - 1, True)
        news = indexed.side.report()
        assert news is not None and news.asking == {0: (Asking.BY_LAYER, Asking.BY_LAYER, Asking.BEFORE)}

        again = indexed.worker.admit(first.chain)
        indexed.arrive(
            StepPlan(loads=indexed.loads(again, MAIN, ATTENTION), tails=with_more(indexed.loads(again, INDEXER)))
        )
        stored = again.hit.tokens
        assert indexed.worker.wrong_bytes(again, LAYERS["m.9.indexer.k_cache"], 0, stored) == 0
        for name in HOOKED:
            indexed.side.wait_layer(name)
            assert indexed.worker.wrong_bytes(again, LAYERS[name], 0, stored) == 0
            indexed.side.layer_done(name)
        indexed.side.end()
        assert not indexed.side.failed_blocks()

    def test_is_not_stored_where_the_draft_model_was_left_out(self, indexed: IndexedDraft) -> None:
        seen, left_out = indexed.new(), indexed.new()
        indexed.run(StepPlan(number=1, saves=indexed.saves(seen)), seen)
        indexed.run(StepPlan(number=2, saves=indexed.saves(left_out)), left_out, HOOKED[:2])
        hit = indexed.found(left_out)
        assert (hit.tokens, hit.drafts) == (TOKENS - 1, False)

    def test_that_was_read_before_its_load_was_there_has_nothing_stored_behind_it(self, indexed: IndexedDraft) -> None:
        """In the first step of an engine nobody knows yet that it must be there before the pass."""
        first = indexed.new()
        indexed.run(StepPlan(number=1, saves=indexed.saves(first)), first)
        assert indexed.found(first).drafts
        indexed.restart()
        longer = indexed.worker.prompt(TOKENS, like=first.chain, shared=HIT)
        run = indexed.worker.admit(longer)
        assert run.hit.tokens == HIT and run.hit.drafts
        saves = indexed.saves(run, HIT)
        indexed.arrive(StepPlan(number=1, loads=indexed.loads(run, MAIN, ATTENTION, INDEXER), saves=saves))
        indexed.forward(run, start=HIT)
        hit = indexed.found(run)
        assert (hit.tokens, hit.drafts) == (TOKENS - 1, False)

    def test_beside_none_that_has_one_takes_no_room_again(
        self, indexed: IndexedDraft, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved: list[set[int]] = []
        opened = Agent.open_descriptors

        def noted(agent: Agent, loads: Any, saves: Any, **more: Any) -> Any:
            saved.append({part.group for part in saves})
            return opened(agent, loads, saves, **more)

        monkeypatch.setattr(Agent, "open_descriptors", noted)
        for number in (1, 2):
            run = indexed.new()
            indexed.run(StepPlan(number=number, saves=indexed.saves(run)), run, HOOKED[:2])
        assert saved == [{MAIN}, {ATTENTION, INDEXER}, {MAIN}]
        for number in (3, 4):  # it computes after all
            run = indexed.new()
            indexed.run(StepPlan(number=number, saves=indexed.saves(run)), run)
        assert indexed.found(run).drafts
