"""Both ends of SGLang's hand-offs, against a real server and agents: what prefill saves is what decode gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from e2e.known import PATIENCE_S, eventually
from server.support import Embed
from sglang_fakes import crawl

from layerflow.agent import Agent
from layerflow.agent.lookups import Lookups
from layerflow.agent.step.step import NO_STEP, NoStep, Step
from layerflow.agent.values import Ended
from layerflow.connectors.sglang.batch_saves import BatchSaves
from layerflow.connectors.sglang.layout import KV, MAMBA, PoolGroup, PoolLayout
from layerflow.connectors.sglang.pd import decoding, prefilling
from layerflow.connectors.sglang.pd.decoding import DecodeSide, Following, PromptProgress
from layerflow.connectors.sglang.pd.prefilling import LOST, NONE_FAILED, PollPause, PrefillSide, PromptPart
from layerflow.keys import HashedChain
from layerflow.server import EmbeddedServer
from layerflow.spec import GroupSpec, ModelSpec, Plane

PAGE, LAYERS, SLOTS, ROW = 4, 3, 64, 8
HASHES = [f"{number:064x}" for number in range(5)]
EMPTY = 255


def layout(*, state: bool = False) -> PoolLayout:
    """Three layers of attention, by token; with `state` the last one is recurrent."""
    attention = tuple(range(LAYERS - state))
    groups = [GroupSpec("full", 1, attention, (Plane("k", "uint8", (ROW,)),))]
    pools = [PoolGroup(KV)]
    if state:
        groups.append(GroupSpec("state", PAGE, (LAYERS - 1,), (Plane("s", "uint8", (ROW,)),)))
        pools.append(PoolGroup(MAMBA))
    spec = ModelSpec("m", "c", tuple(groups), chunk_tokens=PAGE)
    tensors = {
        layer: {spec.groups[group].planes[0].name: torch.full((SLOTS, 1, ROW), EMPTY, dtype=torch.uint8)}
        for layer, (group, _) in enumerate(spec.layer_places())
    }
    return PoolLayout(spec, tensors, tuple(pools), {layer: layer for layer in range(LAYERS)})


def slots(pages: list[int], state: int = -1) -> dict[str, np.ndarray]:
    found = {KV: np.concatenate([np.arange(page * PAGE, (page + 1) * PAGE) for page in pages] or [np.empty(0, int)])}
    return found | ({MAMBA: np.array([state])} if state >= 0 else {})


@dataclass
class Engine:
    """One engine's agent, scheduler and cache."""

    layout: PoolLayout
    agent: Agent
    lookups: Lookups

    def __init__(self, server: EmbeddedServer, name: str, **shape: Any) -> None:
        self.layout = layout(**shape)
        spec = self.layout.spec
        self.agent = Agent(server.endpoint, spec, self.layout.tensors, name, context=server.context)
        self.lookups = Lookups(server.endpoint, name, spec, context=server.context, timeout_s=PATIENCE_S)
        assert self.lookups.wait_connected(PATIENCE_S)

    def rows(self, layer: int) -> torch.Tensor:
        return next(iter(self.layout.tensors[layer].values()))[:, 0]

    def close(self) -> None:
        self.lookups.close()
        self.agent.close()


class Pair:
    """A prefill and a decode engine on one server."""

    def __init__(self, server: EmbeddedServer, *, deadline_s: float = PATIENCE_S, **shape: Any) -> None:
        self.server = server
        self.p, self.d = Engine(server, "P", **shape), Engine(server, "D", **shape)
        self.prefill = PrefillSide(
            self.p.agent,
            self.p.lookups,
            self.p.layout,
            BatchSaves(self.p.agent, self.p.layout, written=self.p.agent.record, passed=self.p.agent.record),
            leads=True,
        )
        self.decode = DecodeSide(
            self.d.agent, self.d.lookups, self.d.layout, after=self.d.agent.record, deadline_s=deadline_s
        )

    def compute(self, *parts: PromptPart, told: range = range(LAYERS), failed: Mapping[int, str] = NONE_FAILED) -> None:
        """Run a batch: each layer writes its rows, then says so where it is told to."""
        self.prefill.begin(parts)
        self.compute_begun(parts, told=told, failed=failed)

    def compute_begun(
        self, parts: Sequence[PromptPart], *, told: range = range(LAYERS), failed: Mapping[int, str] = NONE_FAILED
    ) -> None:
        for layer in range(LAYERS):
            rows = self.p.rows(layer)
            for part in parts:
                for slot in [*part.slots[KV], *part.slots.get(MAMBA, ())]:
                    rows[slot] = (7 * slot + 31 * layer) % 251
            if layer in told:
                self.prefill.saves.layer_done(layer)
        self.prefill.end_batch(failed)

    def ended(self, following: Following) -> PromptProgress:
        assert eventually(lambda: self.decode.poll(following) is not PromptProgress.COMING)
        return following.progress

    def check(self, mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
        """Decode's slots hold what prefill's do, in every layer, and no other slot was written."""
        for layer in range(LAYERS):
            group = self.d.layout.spec.layer_places()[layer][0]
            pool = self.d.layout.groups[group].pool
            wanted = torch.full((SLOTS, ROW), EMPTY, dtype=torch.uint8)
            if pool in mine:
                wanted[mine[pool]] = self.p.rows(layer)[theirs[pool]]
            assert torch.equal(self.d.rows(layer), wanted), layer

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def pair(embed: Embed) -> Iterator[Any]:
    made: list[Pair] = []

    def start(*, link_gbps: float = 0.0, **more: Any) -> Pair:
        made.append(
            Pair(
                embed(pool__link_gbps=link_gbps, transfer__step_timeout_ms=60_000, transfer__save_timeout_ms=60_000),
                **more,
            )
        )
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize("early", [True, False], ids=["decode-first", "prefill-first"])
@pytest.mark.parametrize("told", [range(LAYERS), range(1), range(0)], ids=["layers", "one-layer", "in-bulk"])
def test_decode_gets_what_prefill_computes_in_chunks(pair: Any, early: bool, told: range) -> None:
    both = pair()
    mine, theirs = slots([9, 8, 7, 6, 5]), slots([0, 1, 2, 3, 4])
    following = both.decode.follow(1, HASHES, 0, mine) if early else None
    both.compute(PromptPart(1, HASHES, 2, slots([0, 1])), told=told)
    both.compute(PromptPart(1, HASHES, 5, theirs), told=told)
    both.prefill.end(1)
    following = following or both.decode.follow(1, HASHES, 0, mine)
    assert both.ended(following) is PromptProgress.THERE, following.reason
    both.check(mine, theirs)
    assert eventually(lambda: not both.prefill.saving(1)), "prefill's pages are free"
    assert not both.prefill.refusal(1)


def test_decode_loads_only_what_it_does_not_have(pair: Any) -> None:
    both = pair()
    both.compute(PromptPart(1, HASHES, 5, slots([0, 1, 2, 3, 4])))
    both.prefill.end(1)
    following = both.decode.follow(1, HASHES, 3, slots([11, 12]))
    assert both.ended(following) is PromptProgress.THERE, following.reason
    both.check(slots([11, 12]), slots([3, 4]))


def test_a_recurrent_state_comes_with_the_last_page(pair: Any) -> None:
    both = pair(state=True)
    mine, theirs = slots([9, 8, 7, 6, 5], state=40), slots([0, 1, 2, 3, 4], state=50)
    following = both.decode.follow(1, HASHES, 0, mine)
    both.compute(PromptPart(1, HASHES, 3, slots([0, 1, 2])))
    both.compute(PromptPart(1, HASHES, 5, theirs))
    both.prefill.end(1)
    assert both.ended(following) is PromptProgress.THERE, following.reason
    both.check(mine, theirs)


def test_a_prompt_that_is_given_up_fails_at_decode_with_its_reason(pair: Any) -> None:
    both = pair()
    following = both.decode.follow(1, HASHES, 0, slots([9, 8, 7, 6, 5]))
    both.compute(PromptPart(1, HASHES, 2, slots([0, 1])))
    both.prefill.give_up(1, "the request was aborted")
    assert not both.p.agent.saving("sglang-1"), "nothing reads its pages"
    assert both.ended(following) is PromptProgress.LOST
    assert "aborted" in following.reason
    both.compute(PromptPart(1, HASHES, 5, slots([0, 1, 2, 3, 4])))  # a batch that was under way already
    both.prefill.forget(1)


def test_what_is_computed_on_a_load_that_has_failed_is_never_stored(pair: Any, monkeypatch: Any) -> None:
    """The verdict comes when every layer has been saved. Each load decides about its own request."""
    both = pair()
    opened: list[Step] = []
    judged: dict[str, bool] = {}
    open_step, release_saves = both.p.agent.open_step, both.p.agent.release_saves

    def opening(requests: Any) -> Any:
        opened.append(open_step(requests))
        return opened[-1]

    def releasing(step: Step, *, sound: bool) -> None:
        (request,) = step.requests
        judged[request] = sound
        release_saves(step, sound=sound)

    monkeypatch.setattr(both.p.agent, "open_step", opening)
    monkeypatch.setattr(both.p.agent, "release_saves", releasing)
    prompts = {room: [f"{10 * room + number:064x}" for number in range(3)] for room in range(3)}
    theirs = {room: slots(list(range(3 * room, 3 * room + 3))) for room in prompts}
    mine = {room: slots([15 - 3 * room, 14 - 3 * room, 13 - 3 * room]) for room in prompts}
    followed = {room: both.decode.follow(room, prompts[room], 0, mine[room]) for room in prompts}
    parts = [PromptPart(room, prompts[room], 3, theirs[room], loads=room != 1) for room in prompts]
    both.prefill.begin(parts)
    held = {request: step.saves_held for step in opened for request in step.requests}
    assert held == {"sglang-0": True, "sglang-1": False, "sglang-2": True}
    both.compute_begun(parts, failed={0: "deadline"})
    assert judged == {"sglang-0": False, "sglang-2": True}
    for room in prompts:
        both.prefill.end(room)
    assert both.ended(followed[0]) is PromptProgress.LOST
    assert followed[0].reason
    for room in (1, 2):
        assert both.ended(followed[room]) is PromptProgress.THERE, followed[room].reason
    assert eventually(lambda: not any(both.prefill.saving(room) for room in prompts))
    chain = both.p.agent.hashed_chain([each.encode() for each in prompts[0]])
    assert both.p.agent.lookup("later", chain).tokens == 0, "garbage is under the prompt's keys"


def test_a_retracted_request_is_handed_over_once_more(pair: Any) -> None:
    """Under the same room, with its output so far in its last page, asked for before prefill begins it."""
    both = pair()
    mine, theirs = slots([9, 8, 7, 6, 5]), slots([0, 1, 2, 3, 4])
    for attempt in range(3):
        hashes = [*HASHES[:-1], f"{100 + attempt:064x}"]
        following = both.decode.follow(1, hashes, 0, mine, attempt=attempt)
        assert both.decode.poll(following) is PromptProgress.COMING, following.reason
        both.compute(PromptPart(1, hashes, 5, theirs, attempt=attempt))
        both.prefill.end(1)
        assert both.ended(following) is PromptProgress.THERE, following.reason
        both.check(mine, theirs)
        assert eventually(lambda: not both.prefill.saving(1))
        both.prefill.forget(1)


def test_a_prompt_that_does_not_fit_its_pages_fails_alone(pair: Any) -> None:
    both = pair()
    others = [f"{number:064x}" for number in range(10, 13)]
    wrong = both.decode.follow(1, HASHES, 0, slots([9, 8, 7, 6, 5]))
    right = both.decode.follow(2, others, 0, slots([12, 11, 10]))
    both.compute(PromptPart(1, HASHES, 3, slots([0, 1, 2, 3])), PromptPart(2, others, 3, slots([5, 6, 7])))
    both.prefill.end(2)
    assert both.ended(wrong) is PromptProgress.LOST
    assert both.prefill.refusal(1)
    assert both.ended(right) is PromptProgress.THERE, right.reason


def test_neither_engine_keeps_what_its_agent_has_told(pair: Any) -> None:
    both = pair()
    following = both.decode.follow(1, HASHES, 0, slots([9, 8, 7, 6, 5]))
    both.compute(PromptPart(1, HASHES, 5, slots([0, 1, 2, 3, 4])))
    both.prefill.end(1)
    assert both.ended(following) is PromptProgress.THERE, following.reason
    both.d.agent.abort("sglang-1")
    assert eventually(lambda: not both.prefill.saving(1) and not both.d.agent.busy("sglang-1"))
    both.decode.poll(following)
    both.prefill.begin([])
    assert both.p.agent.poll() == both.d.agent.poll() == Ended()


def test_a_prompt_that_is_given_up_does_not_take_those_with_it_that_share_its_pages(pair: Any) -> None:
    """Its saves hold the keys that another hand-off waits for."""
    both = pair(link_gbps=0.2)
    crawl(both.p.agent, both.server, gbps=2e-6)  # 480 bytes take 0.2 s
    others = [*HASHES[:4], f"{10:064x}"]
    following = both.decode.follow(2, others, 0, slots([9, 8, 7, 6, 5]))
    both.compute(PromptPart(1, HASHES, 5, slots([0, 1, 2, 3, 4])), PromptPart(2, others, 5, slots([5, 6, 7, 8, 9])))
    both.prefill.end(1)
    both.prefill.end(2)
    assert both.p.agent.saving("sglang-1")
    both.prefill.give_up(1, "the request was aborted")
    assert not both.p.agent.saving("sglang-1"), "nothing reads its pages"
    assert both.ended(following) is PromptProgress.THERE, following.reason


def test_pages_that_are_freed_are_read_to_the_end_before(pair: Any) -> None:
    """Two requests compute the same pages under other keys; SGLang frees the second one's at once."""
    both = pair(link_gbps=0.2)
    crawl(both.p.agent, both.server, gbps=2e-6)
    keys = {room: [f"{10 * room + number:064x}" for number in range(3)] for room in (1, 2)}
    theirs = {1: slots([0, 1, 2]), 2: slots([3, 4, 5])}
    mine = {1: slots([9, 8, 7]), 2: slots([12, 11, 10])}
    followed = {room: both.decode.follow(room, keys[room], 0, mine[room]) for room in keys}
    assert not both.prefill.saves.reads
    both.compute(*(PromptPart(room, keys[room], 3, theirs[room]) for room in keys))
    for room in keys:
        both.prefill.end(room)
    assert both.prefill.saves.reads and both.p.agent.saving("sglang-2")
    computed = [both.p.rows(layer)[theirs[2][KV]].clone() for layer in range(LAYERS)]
    both.prefill.let_go([torch.tensor([3, 4]), torch.tensor([5])])
    assert not both.p.agent.saving("sglang-2")
    for layer in range(LAYERS):
        both.p.rows(layer)[theirs[2][KV]] = EMPTY
    for each in followed.values():
        assert both.ended(each) is PromptProgress.THERE, each.reason
    assert all(torch.equal(both.d.rows(layer)[mine[2][KV]], computed[layer]) for layer in range(LAYERS))


def test_a_decode_request_that_is_given_up_does_not_take_others_with_it(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loads are under way, and are not waited for."""
    monkeypatch.setattr(decoding, "DRAIN_S", 0.0)
    both = pair(link_gbps=0.2)
    prompts = {room: [f"{10 * room + number:064x}" for number in range(3)] for room in (1, 2)}
    theirs = {1: slots([0, 1, 2]), 2: slots([3, 4, 5])}
    mine = {1: slots([9, 8, 7]), 2: slots([12, 11, 10])}
    both.compute(*(PromptPart(room, prompts[room], 3, theirs[room]) for room in prompts))
    for room in prompts:
        both.prefill.end(room)
    assert eventually(lambda: not any(both.prefill.saving(room) for room in prompts))
    crawl(both.d.agent, both.server, gbps=1e-6)
    followed = {room: both.decode.follow(room, prompts[room], 0, mine[room]) for room in prompts}
    for each in followed.values():
        assert eventually(lambda each=each: both.decode.poll(each) is not None and each.step is not None)
    both.decode.give_up(followed[1])
    left = both.d.rows(LAYERS - 1).clone()
    assert both.ended(followed[2]) is PromptProgress.THERE, followed[2].reason
    left[mine[2][KV]] = both.p.rows(LAYERS - 1)[theirs[2][KV]]
    assert torch.equal(both.d.rows(LAYERS - 1), left), "it wrote on"


class NotedStep(Step):
    """A step that notes the events behind its layers."""

    def __init__(self) -> None:
        self.events: dict[int, object] = {}

    def layer_done(self, layer: int, event: object = None) -> None:
        self.events[layer] = event

    def close(self, ok: bool | None = None) -> None:
        pass


@pytest.mark.parametrize(
    ("by_layer", "events"),
    [(True, {0: "pass", 1: "layer", 2: "pass"}), (False, dict.fromkeys(range(LAYERS), "pass"))],
    ids=["by-layer", "two-batch-overlap"],
)
def test_layers_that_no_hook_tells_of_are_saved_behind_the_pass(by_layer: bool, events: dict[int, str]) -> None:
    """A graph that is replayed calls no hook. Of a batch in two halves a hook is called for the first one, too."""
    agent, step, made = SlowAgent("", "nothing"), NotedStep(), list[str]()

    def event(kind: str) -> str:
        made.append(kind)
        return kind

    agent.open_step = lambda requests: step  # type: ignore[assignment]
    shape = layout()
    saves = BatchSaves(
        agent,  # type: ignore[arg-type]
        shape,
        written=lambda: event("layer"),
        passed=lambda: event("pass"),
        by_layer=by_layer,
    )
    prefill = PrefillSide(agent, None, shape, saves, leads=False)  # type: ignore[arg-type]
    prefill.begin([PromptPart(1, HASHES[:1], 1, slots([3]))])
    saves.layer_done(1)
    saves.layer_done(1)
    prefill.end_batch()
    assert step.events == events
    assert made == ["layer"] * by_layer + ["pass"]


class SlowAgent:
    """An agent whose saves of one prompt end after so many steps of giving it up."""

    attached = True
    spec = layout().spec

    def __init__(self, reading: str, ends_with: str) -> None:
        self.reading, self.ends_with = reading, ends_with
        self.calls: list[str] = []

    def _called(self, call: str) -> None:
        self.calls.append(call)
        if call == self.ends_with:
            self.reading = ""

    def saving(self, name: str) -> bool:
        return name == self.reading

    def wait_idle(self, name: str, timeout_s: float) -> bool:
        if "wait" not in self.calls:
            self._called("wait")
        return False

    def abort(self, name: str) -> None:
        self._called("abort")

    def reclaim(self, blocks: Sequence[np.ndarray], timeout_s: float) -> int:
        self._called(f"reclaim {[each.tolist() for each in blocks]}")
        return 1

    def poll(self) -> Ended:
        return Ended()

    def hashed_chain(self, hashes: Sequence[bytes]) -> HashedChain:
        return HashedChain(bytes(16), hashes, PAGE)

    def statistics(self) -> Any:
        return SimpleNamespace(attachments=1)

    def open_step(self, requests: Any) -> NoStep:
        return NO_STEP


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("ends_with", ["nothing", "wait", "abort"])
def test_a_prompt_that_is_given_up_is_cut_off_only_as_far_as_it_must(
    monkeypatch: pytest.MonkeyPatch, sound: bool, ends_with: str
) -> None:
    """First waited for, unless it is worthless; then cut; at last all that reads its pages is. Never all steps."""
    monkeypatch.setattr(prefilling, "DRAIN_S", 0.01)
    agent = SlowAgent("sglang-1", ends_with)
    shape = layout()
    saves = BatchSaves(agent, shape, written=lambda: None, passed=lambda: None)  # type: ignore[arg-type]
    prefill = PrefillSide(agent, None, shape, saves, leads=False)  # type: ignore[arg-type]
    prefill.begin([PromptPart(1, HASHES[:1], 1, slots([3]))])
    prefill.end_batch()
    prefill.give_up(1, "for a test", sound=sound)
    calls = [*["wait"] * sound, "abort", *["wait"] * (not sound), "reclaim [[12, 13, 14, 15]]"]
    expected = calls[: calls.index(ends_with) + 1] if ends_with in calls else calls
    assert agent.calls == expected


def test_a_prefill_engine_that_dies_fails_at_decode(pair: Any) -> None:
    both = pair()
    following = both.decode.follow(1, HASHES, 0, slots([9, 8, 7, 6, 5]))
    both.compute(PromptPart(1, HASHES, 2, slots([0, 1])))
    both.p.close()
    assert both.ended(following) is PromptProgress.LOST
    assert following.reason


def test_a_decode_request_that_is_given_up_writes_nothing_any_more(pair: Any) -> None:
    both = pair()
    following = both.decode.follow(1, HASHES, 0, slots([9, 8, 7, 6, 5]))
    both.compute(PromptPart(1, HASHES, 2, slots([0, 1])))
    both.decode.poll(following)
    both.decode.give_up(following)
    assert both.decode.poll(following) is PromptProgress.LOST
    assert not both.d.agent.busy("sglang-1")
    both.compute(PromptPart(1, HASHES, 5, slots([0, 1, 2, 3, 4])))
    both.prefill.end(1)
    assert eventually(lambda: not both.prefill.saving(1)), "prefill does not wait for it"


def test_a_decode_request_is_quiet_before_anything_else_is_done_about_its_end(pair: Any, monkeypatch: Any) -> None:
    """SGLang frees its pages whatever comes of the rest."""
    both = pair()
    following = both.decode.follow(1, HASHES, 0, slots([9, 8, 7, 6, 5]))
    both.compute(PromptPart(1, HASHES, 2, slots([0, 1])))
    assert eventually(lambda: both.decode.poll(following) and following.step is not None)
    with monkeypatch.context() as broken:
        broken.setattr(both.d.lookups, "drop_lease", lambda name: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            both.decode.give_up(following)
    assert not both.d.agent.busy("sglang-1")
    both.decode.give_up(following)


def test_the_hand_off_is_kept_until_sglang_lets_go_of_the_request(pair: Any) -> None:
    """A rank that has loaded its part releases nothing: another one of its engine may be late."""
    both = pair()

    def state() -> str:
        told = both.d.lookups.handoff(both.d.lookups.watch_handoff("sglang-1", PATIENCE_S), PATIENCE_S)
        return told.state if told is not None else "unknown"

    following = both.decode.follow(1, HASHES, 0, slots([9, 8, 7, 6, 5]))
    both.compute(PromptPart(1, HASHES, 5, slots([0, 1, 2, 3, 4])))
    both.prefill.end(1)
    both.decode.release(following)
    assert both.ended(following) is PromptProgress.THERE
    assert state() in ("open", "complete")
    both.decode.give_up(following)
    both.decode.release(following)
    assert state() == "released"


def test_polls_of_many_requests_share_one_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [0.0], list[float]()
    agent = SlowAgent("", "nothing")
    monkeypatch.setattr(agent, "busy", lambda name: True, raising=False)
    monkeypatch.setattr(agent, "wait_idle", lambda name, timeout_s: waited.append(timeout_s))
    shape = layout()
    saves = BatchSaves(agent, shape, written=lambda: None, passed=lambda: None)  # type: ignore[arg-type]
    prefill = PrefillSide(agent, None, shape, saves, leads=False, pause=PollPause(lambda: now[0]))  # type: ignore[arg-type]
    prefill.begin([PromptPart(room, HASHES[:1], 1, slots([3])) for room in range(64)])
    for _ in range(2):
        assert all(prefill.saving(room) for room in range(64))
        now[0] += 1.0
    assert sum(waited) == 2 * prefilling.PAUSE_S and len(waited) == 128


def test_a_prompt_that_nobody_computes_fails_at_its_deadline(pair: Any) -> None:
    both = pair(deadline_s=0.2)
    following = both.decode.follow(1, HASHES, 0, slots([9, 8, 7, 6, 5]))
    assert both.ended(following) is PromptProgress.LOST
    assert "0 of 20 tokens" in following.reason or "deadline" in following.reason


def test_a_server_that_goes_fails_both_ends_and_holds_neither(embed: Embed) -> None:
    server = embed()
    both = Pair(server)
    following = both.decode.follow(1, HASHES, 0, slots([9, 8, 7, 6, 5]))
    both.compute(PromptPart(1, HASHES, 2, slots([0, 1])))
    server.close()
    assert both.ended(following) is PromptProgress.LOST
    assert eventually(lambda: not both.p.agent.attached)
    both.compute(PromptPart(1, HASHES, 5, slots([0, 1, 2, 3, 4])))
    both.prefill.end(1)
    assert both.prefill.refusal(1) == LOST
    assert eventually(lambda: not both.prefill.saving(1))
    both.close()


def test_a_prompt_that_begins_without_a_server_is_refused_to_its_reader(embed: Embed) -> None:
    """Nobody else would tell: a server that comes later waits for its hand-off to open."""
    server = embed()
    both = Pair(server)
    server.close()
    assert eventually(lambda: not both.p.agent.attached)
    both.compute(PromptPart(1, HASHES, 5, slots([0, 1, 2, 3, 4])))
    both.prefill.end(1)
    assert eventually(lambda: not both.prefill.undecided(1))
    assert both.prefill.refusal(1) == LOST
    both.close()


def test_the_servers_answer_decides(pair: Any) -> None:
    both = pair()
    both.compute(PromptPart(1, HASHES, 5, slots([0, 1, 2, 3, 4])))
    both.prefill.end(1)
    assert eventually(lambda: not both.prefill.undecided(1))
    assert not both.prefill.refusal(1)
    assert not both.prefill.undecided(2), "of prompts that it does not know"
