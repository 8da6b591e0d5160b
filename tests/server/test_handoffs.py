"""Hand-offs on one server: states, room that is kept and taken over, readers that wait, and everything's end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from e2e.known import PATIENCE_S, KnownWorker, Run, eventually, small_spec

from layerflow.agent import Control, Follow
from layerflow.agent.client import Inquiry
from layerflow.agent.lookups import Lookups
from layerflow.agent.presence import WITHDRAWN, hit_of
from layerflow.agent.values import Hit
from layerflow.flow.cost import ComputeCost
from layerflow.keys import Chain
from layerflow.server import EmbeddedServer
from layerflow.spec import ModelSpec
from layerflow.wire.messages import Found
from server.support import Embed, observe

TOKENS = 100  # six chunks of 16 and a tail of 4


class Pair:
    """A prefill and a decode engine on one server: their workers and their schedulers."""

    def __init__(self, server: EmbeddedServer, spec: ModelSpec | None = None, **more: Any) -> None:
        self.spec = spec = spec or small_spec(4)
        self.server = server
        self.p = KnownWorker(server.endpoint, spec=spec, engine="P", context=server.context, **more)
        self.d = KnownWorker(server.endpoint, spec=spec, engine="D", context=server.context, **more)
        self.p_control = Control(server.endpoint, "P", spec, context=server.context, lookup_timeout_s=PATIENCE_S)
        self.p_control.status()  # connects it: what it only tells is not sent before
        self.d_lookups = Lookups(server.endpoint, "D", spec, context=server.context, timeout_s=PATIENCE_S)
        assert self.d_lookups.wait_connected(PATIENCE_S)
        self.observer = observe(server)

    def ask(self, name: str, chain: Chain, *, within_s: float = 20.0) -> Inquiry:
        return self.d_lookups.ask(f"D-{name}", chain, Follow(time.monotonic() + within_s, name))

    def figures(self) -> dict[str, Any]:
        return self.observer.status()["handoffs"]

    def balanced(self) -> bool:
        pool = self.observer.status()["pool"]
        return pool["pinned"] == 0 and pool["half_written"] == 0

    def close(self) -> None:
        self.d_lookups.close()
        for each in (self.p_control, self.observer):
            each.close()
        self.p.agent.close()
        self.d.agent.close()


@pytest.fixture
def pair(embed: Embed) -> Iterator[Pair]:
    made = Pair(embed())
    yield made
    made.close()


def prefilled(pair: Pair, name: str, chain: Chain) -> Run:
    assert pair.p_control.open_handoff(name, chain, len(chain))
    run = pair.p.serve(chain, look=False)
    pair.p_control.end_handoff(name, tokens=len(chain))
    return run


def test_a_hand_off_that_ends_while_it_is_looked_up_is_a_miss_with_a_reason() -> None:
    spec = small_spec()
    chain = Chain(b"r" * 16, list(range(3 * spec.chunk_tokens)), spec.chunk_tokens)
    asked = Follow(1e9, "h")
    assert hit_of(Found(1, 0, [], following=True), chain, spec, asked) == Hit(0, reason=WITHDRAWN)
    assert hit_of(Found(1, 0, [], following=True, reason="failed"), chain, spec, asked).reason == "failed"
    assert hit_of(Found(1, 0, [], following=True), chain, spec, Follow(1e9)) == Hit(0), "of no hand-off"
    assert hit_of(Found(1, spec.chunk_tokens, [], following=True), chain, spec, asked).following


def test_a_handoff_is_open_then_complete_and_its_reader_finds_all_but_a_token(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    opened = pair.p_control.open_handoff("h", chain, len(chain))
    assert (opened.state, opened.tokens) == ("open", TOKENS)
    assert pair.observer.status()["pool"]["half_written"] == 7
    pair.p.serve(chain, look=False)
    assert pair.observer.status()["pool"]["half_written"] == 0
    assert pair.figures()["open"] == 1
    pair.p_control.end_handoff("h", tokens=TOKENS)
    assert pair.p_control.watch_handoff("h", PATIENCE_S).state == "complete"
    assert pair.observer.status()["pool"]["pinned"] == 7
    hit = pair.d_lookups.wait(pair.ask("h", chain), PATIENCE_S)
    assert hit is not None and hit.following
    assert (hit.tokens, hit.reason) == (TOKENS - 1, "")
    pair.p_control.release_handoff("h")
    pair.d_lookups.drop_lease("D-h")
    assert eventually(pair.balanced)


def test_who_asks_before_it_is_opened_waits(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    inquiry = pair.ask("h", chain)
    assert pair.d_lookups.wait(inquiry, 0.0) is None
    assert eventually(lambda: pair.figures()["announced"] == 1)
    assert pair.d_lookups.wait(inquiry, 0.0) is None
    prefilled(pair, "h", chain)
    hit = pair.d_lookups.wait(inquiry, PATIENCE_S)
    assert hit is not None and hit.following and hit.tokens == TOKENS - 1


def test_one_that_nobody_opens_ends_at_the_readers_deadline(pair: Pair) -> None:
    hit = pair.d_lookups.wait(pair.ask("h", pair.p.prompt(TOKENS), within_s=0.1), PATIENCE_S)
    assert hit is not None and not hit.following
    assert (hit.tokens, hit.reason) == (0, "announced and not readable in time")
    assert eventually(lambda: pair.figures()["announced"] == 0)


@pytest.mark.parametrize("asked", [False, True])
def test_one_that_is_released_before_it_is_opened_is_refused_to_the_prefiller(pair: Pair, asked: bool) -> None:
    """A decoder's client may be gone before the prefiller's scheduler gets to the request: nothing is kept for it."""
    chain = pair.p.prompt(TOKENS)
    inquiry = pair.ask("h", chain) if asked else None
    if inquiry is not None:
        assert eventually(lambda: pair.figures()["announced"] == 1)
    pair.p_control.release_handoff("h")
    if inquiry is not None:  # answered before the prompt is stored: later it would hit, and its lease pin what it hits
        hit = pair.d_lookups.wait(inquiry, PATIENCE_S)
        assert hit is not None and (hit.tokens, hit.reason) == (0, "released")
    opened = pair.p_control.open_handoff("h", chain, len(chain))
    assert (opened.state, opened.reason) == ("refused", "its reader has released it already")
    pair.p.serve(chain, look=False)
    assert eventually(pair.balanced)
    assert pair.p_control.open_handoff("other", chain, len(chain)).state == "open"


def test_a_reader_that_comes_after_another_has_released_it_is_served(pair: Pair) -> None:
    """A proxy asks a second decoder where the first could not be reached, for the same hand-off."""
    chain = pair.p.prompt(TOKENS)
    pair.p_control.release_handoff("h")
    pair.p_control.status()  # the server has heard it
    inquiry = pair.ask("h", chain)
    assert eventually(lambda: pair.figures()["announced"] == 1)
    prefilled(pair, "h", chain)
    hit = pair.d_lookups.wait(inquiry, PATIENCE_S)
    assert hit is not None and hit.following and hit.tokens == TOKENS - 1
    pair.p_control.release_handoff("h")
    pair.d_lookups.drop_lease("D-h")
    assert eventually(pair.balanced)


def test_the_name_of_one_that_was_released_early_is_free_again_when_its_lease_would_have_ended(embed: Embed) -> None:
    pair = Pair(embed(pd__handoff_lease_s=0.1))
    chain = pair.p.prompt(TOKENS)
    pair.p_control.release_handoff("h")
    assert eventually(lambda: pair.p_control.open_handoff("h", chain, len(chain)).state == "open")
    hit = pair.d_lookups.wait(pair.ask("h", chain), PATIENCE_S)
    assert hit is not None and hit.following
    assert pair.figures()["open"] == 1
    pair.close()


def test_one_that_its_engine_gives_up_fails_and_its_reader_hears_why(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    watched = pair.d_lookups.watch_handoff("h", PATIENCE_S)
    state = pair.d_lookups.handoff(watched, PATIENCE_S)
    assert state is not None and state.state == "open"
    pair.p_control.end_handoff("h", tokens=0, reason="the request was preempted")
    assert eventually(lambda: getattr(pair.d_lookups.handoff(watched, 0.0), "state", "") == "failed")
    hit = pair.d_lookups.wait(pair.ask("h", chain), PATIENCE_S)
    assert hit is not None and (hit.tokens, hit.following) == (0, False)
    assert hit.reason == "failed: the request was preempted"
    assert eventually(pair.balanced)


def test_one_that_is_complete_is_loaded_by_its_plan_and_one_that_is_open_is_not(pair: Pair) -> None:
    chain, later = pair.p.prompt(TOKENS), pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("later", later, len(later))
    hit = pair.d_lookups.wait(pair.ask("later", later), PATIENCE_S)
    assert hit is not None and hit.following and hit.plan is None
    prefilled(pair, "h", chain)
    following = Following(pair, "h", chain)
    assert following.run.hit.plan is not None
    assert following.step.residents is not None  # type: ignore[union-attr]
    assert following.finish() == 0 and not following.run.failed
    for name in ("h", "later"):
        pair.p_control.release_handoff(name)
        pair.d_lookups.drop_lease(f"D-{name}")
    assert eventually(pair.balanced)


class Following:
    """A request of D that loads what P's step is still storing."""

    def __init__(self, pair: Pair, name: str, chain: Chain, timeout_s: float = 20.0) -> None:
        self.pair = pair
        hit = pair.d_lookups.wait(pair.ask(name, chain), PATIENCE_S)
        assert hit is not None and hit.following and hit.tokens == len(chain) - 1, hit
        run = pair.d.admit(chain, look=False)
        self.run = Run(f"D-{name}", chain, hit, run.tables)
        self.step = pair.d.agent.open_step([self.run.request(save=False)], timeout_s)

    def holds(self, layer: int) -> bool:
        """Is the layer in place? Never asked for before, so that nothing waits."""
        return self.step.is_ready(layer)

    def finish(self) -> int:
        """Wait for the rest; wrong bytes among what was loaded. Failed blocks are in the run."""
        wrong = self.pair.d.forward(self.step, [self.run])
        self.step.close()
        assert self.pair.d.agent.wait_idle(self.run.name, 20), "the step never ended"
        self.pair.d_lookups.drop_lease(self.run.name)
        self.pair.d.retire(self.run)
        return wrong


@pytest.fixture(params=[0, 24], ids=["full", "sliding"])
def windowed(request: pytest.FixtureRequest, embed: Embed) -> Iterator[Pair]:
    made = Pair(embed(), spec=small_spec(4, window=request.param))
    yield made
    made.close()


def test_layers_arrive_as_they_are_stored(windowed: Pair) -> None:
    pair, chain = windowed, windowed.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    run = pair.p.admit(chain, look=False)
    step = pair.p.agent.open_step([run.request()])
    following = Following(pair, "h", chain)
    last = pair.p.spec.num_layers - 1
    groups = [pair.p.group_of(layer) for layer in range(last + 1)]
    for layer in range(last + 1):
        assert not following.holds(layer), "before it is stored"
        pair.p.compute(run, layer, 0, len(chain))
        step.layer_done(layer)
        # The last layer of a group counts once the group's objects are published.
        assert eventually(lambda layer=layer: following.holds(layer)), f"layer {layer} of {groups}"
    step.close()
    assert following.finish() == 0 and not following.run.failed
    pair.p_control.end_handoff("h", tokens=TOKENS)
    assert pair.p_control.watch_handoff("h", PATIENCE_S).state == "complete"
    pair.p_control.release_handoff("h")
    assert eventually(pair.balanced)


def test_what_no_step_saves_yet_is_followed_when_one_does(pair: Pair) -> None:
    """P computes its prompt in three steps; D has opened its step before the first of them."""
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    following = Following(pair, "h", chain)
    run = pair.p.admit(chain, look=False)
    for start, stop in ((0, 32), (32, 64), (64, TOKENS)):
        assert not following.holds(0)
        request = replace(run.request(), save=(start, stop), tail=stop == TOKENS)
        with pair.p.agent.open_step([request]) as step:
            for layer in range(4):
                pair.p.compute(run, layer, start, stop)
                step.layer_done(layer)
        assert pair.p.agent.wait_idle(run.name, 20)
    assert following.finish() == 0 and not following.run.failed
    pair.p_control.end_handoff("h", tokens=TOKENS)
    pair.p_control.release_handoff("h")
    assert eventually(pair.balanced)
    assert pair.observer.status()["flow"]["following"] == 0


def test_a_save_that_is_given_up_fails_its_readers_blocks_at_once(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    run = pair.p.admit(chain, look=False)
    step = pair.p.agent.open_step([run.request()])
    following = Following(pair, "h", chain, timeout_s=600.0)
    for layer in range(2):
        pair.p.compute(run, layer, 0, len(chain))
        step.layer_done(layer)
        assert eventually(lambda layer=layer: following.holds(layer))
    pair.p.agent.abort(run.name)
    step.close(False)
    assert following.finish() == 0
    assert following.run.failed == {0: set(range(25))}, "every block, and no others"
    pair.p_control.end_handoff("h", tokens=TOKENS)  # and no step has saved it again
    state = pair.p_control.watch_handoff("h", PATIENCE_S)
    # By its end nothing of it is being saved, or its server hears only behind that the save was given up; and D may
    # have asked for the objects once more meanwhile.
    assert state.state == "failed" and ("did not save 7 of its objects" in state.reason or "given up" in state.reason)
    again = pair.d_lookups.wait(pair.ask("h", chain), PATIENCE_S)
    assert again is not None and not again.following and again.reason.startswith("failed")
    assert eventually(pair.balanced)


@pytest.mark.parametrize("room", ["taken", "reserved"])
def test_a_save_that_is_given_up_fails_no_hand_off_whose_engine_saves_the_same_later(pair: Pair, room: str) -> None:
    """Another request of its engine has stored the same prefix first, and is aborted."""
    chain = pair.p.prompt(TOKENS)
    other = pair.p.admit(chain, look=False)
    if room == "taken":
        assert pair.p_control.open_handoff("h", chain, len(chain))
    step = pair.p.agent.open_step([other.request()])
    if room == "reserved":
        assert pair.p_control.open_handoff("h", chain, len(chain))
    pair.p.agent.abort(other.name)
    step.close(False)
    assert pair.p.agent.wait_idle(other.name, 20)
    following = Following(pair, "h", chain)
    pair.p.serve(chain, look=False)
    pair.p_control.end_handoff("h", tokens=TOKENS)
    assert pair.p_control.watch_handoff("h", PATIENCE_S).state == "complete"
    assert following.finish() == 0 and not following.run.failed
    pair.p_control.release_handoff("h")
    assert eventually(pair.balanced)


def test_room_that_a_reader_still_reads_is_not_given_to_others(pair: Pair) -> None:
    """P's save is given up while D's copy of its first layers is under way."""
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    run = pair.p.admit(chain, look=False)
    step = pair.p.agent.open_step([run.request()])
    following = Following(pair, "h", chain, timeout_s=600.0)
    pair.p.compute(run, 0, 0, len(chain))
    step.layer_done(0)
    assert eventually(lambda: following.holds(0))
    pair.p.agent.abort(run.name)
    step.close(False)
    pair.p.agent.wait_idle(run.name, 20)
    # D's step has not ended: the loads have failed, and it was not asked yet.
    assert following.finish() == 0 and following.run.failed
    # The room is back once the server has heard that neither step touches it any more.
    assert eventually(lambda: not any(each["open_steps"] for each in pair.p_control.status(PATIENCE_S)["sessions"]))
    second = Following(pair, "h", chain)
    pair.p.serve(chain, look=False)
    pair.p_control.end_handoff("h", tokens=TOKENS)
    assert pair.p_control.watch_handoff("h", PATIENCE_S).state == "complete", "it had room again"
    assert second.finish() == 0 and not second.run.failed
    pair.p_control.release_handoff("h")
    pair.d_lookups.drop_lease("D-h")
    assert eventually(pair.balanced)


@pytest.fixture
def second_prefiller(pair: Pair) -> Iterator[KnownWorker]:
    made = KnownWorker(pair.server.endpoint, spec=pair.spec, engine="Q", context=pair.server.context)
    yield made
    made.agent.close()


@pytest.mark.parametrize("hands_over", [False, True])
def test_prefill_engines_store_a_common_prefix_once_whoever_comes_first(
    pair: Pair, second_prefiller: KnownWorker, hands_over: bool
) -> None:
    """The one that has opened its hand-off first has its prompt in a queue, perhaps for long."""
    q, chain = second_prefiller, pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("first", chain, len(chain))
    following = Following(pair, "first", chain)
    q_control = Control(pair.server.endpoint, "Q", pair.spec, context=pair.server.context)
    if hands_over:
        assert q_control.open_handoff("second", chain, len(chain))
    q.serve(chain, look=False)
    if hands_over:
        q_control.end_handoff("second", tokens=TOKENS)
        assert q_control.watch_handoff("second", PATIENCE_S).state == "complete"
    assert following.finish() == 0 and not following.run.failed, "it is all that its reader waits for"
    pair.p_control.end_handoff("first", tokens=TOKENS)
    assert pair.p_control.watch_handoff("first", PATIENCE_S).state == "complete"
    for name in ("first", "second"):
        q_control.release_handoff(name)
    q_control.close()
    assert eventually(pair.balanced)


def test_a_prefill_worker_that_is_gone_fails_what_it_was_to_save(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    run = pair.p.admit(chain, look=False)
    request = replace(run.request(), save=(0, 48), tail=False)
    step = pair.p.agent.open_step([request])
    following = Following(pair, "h", chain, timeout_s=600.0)
    pair.p.compute(run, 0, 0, 48)
    step.layer_done(0)
    pair.p.agent.close()
    assert following.finish() == 0
    assert following.run.failed == {0: set(range(25))}
    assert eventually(pair.balanced)


def test_a_reader_that_is_gone_costs_the_prefiller_nothing(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    following = Following(pair, "h", chain)
    pair.d.agent.abort(following.run.name)
    following.step.close(False)
    assert pair.d.agent.wait_idle(following.run.name, 20)
    prefilled_run = pair.p.serve(chain, look=False)
    pair.p_control.end_handoff("h", tokens=TOKENS)
    assert pair.p_control.watch_handoff("h", PATIENCE_S).state == "complete"
    second = Following(pair, "h", chain)
    assert second.finish() == 0 and not second.run.failed
    assert prefilled_run.hit.tokens == 0
    pair.p_control.release_handoff("h")
    pair.d_lookups.drop_lease("D-h")
    assert eventually(pair.balanced)


def test_several_readers_claim_one_handoff(pair: Pair) -> None:
    """As with n, lists of prompts and retries: the second comes when the first has loaded already."""
    chain = pair.p.prompt(TOKENS)
    prefilled(pair, "h", chain)
    for name in ("one", "two", "three"):
        hit = pair.d_lookups.wait(pair.d_lookups.ask(name, chain, Follow(time.monotonic() + 20, "h")), PATIENCE_S)
        assert hit is not None and hit.following and hit.tokens == TOKENS - 1
        pair.d_lookups.drop_lease(name)
    assert pair.figures()["claimed"] == 3
    pair.p_control.release_handoff("h")
    assert eventually(pair.balanced)


def test_one_that_nobody_claims_goes_when_its_lease_is_over(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain), lease_s=0.05)
    pair.p.serve(chain, look=False)
    watched = pair.d_lookups.watch_handoff("h", PATIENCE_S)
    pair.p_control.end_handoff("h", tokens=TOKENS)
    assert eventually(lambda: getattr(pair.d_lookups.handoff(watched, 0.0), "state", "") == "complete")
    assert eventually(lambda: pair.figures()["revoked"] == 1)
    late = pair.d_lookups.wait(pair.ask("h", chain), PATIENCE_S)
    assert late is not None and (late.tokens, late.following) == (TOKENS - 1, False), "it is still stored"
    assert late.reason == "revoked: nobody came for it within its lease"
    pair.d_lookups.drop_lease("D-h")
    assert eventually(pair.balanced)


def test_one_that_is_not_complete_in_time_fails(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("alone", pair.p.prompt(TOKENS), TOKENS, timeout_s=0.05)
    late = "it was not complete in time: 7 objects were not stored"
    assert pair.p_control.watch_handoff("alone", PATIENCE_S).reason == late
    assert pair.p_control.open_handoff("h", chain, len(chain))
    following = Following(pair, "h", chain, timeout_s=600.0)
    handoffs = pair.server.server.handoffs
    pair.server.call(lambda: handoffs._live.set(handoffs.get("h"), 0.0))  # not before its reader has come
    assert following.finish() == 0 and following.run.failed == {0: set(range(25))}
    state = pair.p_control.watch_handoff("h", PATIENCE_S)
    assert (state.state, state.reason) == ("failed", late)
    assert eventually(pair.balanced)


def test_objects_that_its_engine_never_saves_fail_it_soon_after_its_end(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    pair.p_control.end_handoff("h", tokens=TOKENS)
    state = pair.p_control.watch_handoff("h", PATIENCE_S)
    assert (state.state, state.reason) == ("failed", "its engine ended it and did not save 7 of its objects")
    assert eventually(pair.balanced)


def test_what_cannot_be_read_names_the_first_fact_that_differs(embed: Embed) -> None:
    pair = Pair(embed())
    other = Lookups(
        pair.server.endpoint, "E", small_spec(4, chunk_tokens=32), context=pair.server.context, timeout_s=PATIENCE_S
    )
    assert other.wait_connected(PATIENCE_S)
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    theirs = Chain(chain.parent(0), chain.tokens, 32)
    hit = other.wait(other.ask("E-h", theirs, Follow(time.monotonic() + 20, "h")), PATIENCE_S)
    assert hit is not None and not hit.following
    assert hit.reason == "cannot be read by this engine: chunk_tokens: 32 here, 16 there"
    other.close()
    pair.close()


@pytest.mark.parametrize("what", ["reset", "purge"])
def test_new_weights_and_purges_end_what_is_open(pair: Pair, what: str) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    run = pair.p.admit(chain, look=False)
    step = pair.p.agent.open_step([run.request()])
    following = Following(pair, "h", chain, timeout_s=600.0)
    if what == "reset":
        pair.p_control.reset()
    else:
        pair.observer.purge()
    step.close(False)
    assert following.finish() == 0 and following.run.failed == {0: set(range(25))}
    state = pair.p_control.watch_handoff("h", PATIENCE_S)
    assert state.state == ("failed" if what == "reset" else "revoked")
    assert eventually(pair.balanced)


def test_without_room_one_is_refused_with_the_reason(embed: Embed) -> None:
    pair = Pair(embed(pool__size="256KiB", pd__handoff_share=0.25))
    chain = pair.p.prompt(40)
    assert pair.p_control.open_handoff("first", chain, len(chain))
    large = pair.p.prompt(240)
    refused = pair.p_control.open_handoff("second", large, len(large))
    assert not refused and refused.state == "refused"
    assert "pd.handoff_share" in refused.reason
    again = pair.p_control.open_handoff("first", chain, len(chain))
    assert again.reason == "a hand-off of this name is open already"
    pair.p_control.release_handoff("first")
    assert eventually(pair.balanced)
    pair.close()


@pytest.mark.parametrize("waits", [False, True], ids=["comes-later", "waits"])
@pytest.mark.parametrize("how", ["no-room", "unattached", "impossible", "declined"])
def test_a_reader_is_told_at_once_that_its_prompt_is_not_handed_over(embed: Embed, how: str, waits: bool) -> None:
    """Not at its deadline, which is minutes away; whether it waits already or comes when that is known."""
    pair = Pair(embed(pool__size="256KiB", pd__handoff_share=0.25))
    chain = pair.p.prompt(800 if how == "no-room" else 40)
    inquiry = pair.ask("h", chain, within_s=600.0) if waits else None
    if waits:
        assert eventually(lambda: pair.figures()["announced"] == 1)
    match how:
        case "no-room":
            assert "pd.handoff_share" in (why := pair.p_control.open_handoff("h", chain, len(chain)).reason)
        case "unattached":
            with contextlib.closing(
                Control(pair.server.endpoint, "Q", pair.spec, context=pair.server.context)
            ) as other:
                assert "no worker" in (why := other.open_handoff("h", chain, len(chain)).reason)
        case "impossible":
            why = pair.p_control.open_handoff("h", chain, len(chain), timeout_s=1e6).reason
            assert "server.max_deadline_s" in why
        case _:
            pair.p_control.end_handoff("h", tokens=0, reason=(why := "nothing of so short a prompt is saved"))
    pair.p_control.status()  # the server has heard it
    hit = pair.d_lookups.wait(inquiry or pair.ask("h", chain, within_s=600.0), PATIENCE_S)
    assert hit is not None and (hit.tokens, hit.reason) == (0, f"failed: {why}")
    pair.close()


def test_an_engine_that_does_not_open_one_ends_none_that_another_has_open(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    with contextlib.closing(Control(pair.server.endpoint, "D", pair.spec, context=pair.server.context)) as other:
        other.end_handoff("h", tokens=0, reason="it has no keys")
        assert "open already" in other.open_handoff("h", chain, len(chain)).reason
    assert pair.figures()["open"] == 1


def test_who_comes_when_the_opening_was_refused_for_an_early_release_is_told(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    pair.p_control.release_handoff("h")
    assert pair.p_control.open_handoff("h", chain, len(chain)).state == "refused"
    hit = pair.d_lookups.wait(pair.ask("h", chain, within_s=600.0), PATIENCE_S)
    assert hit is not None and hit.reason == "failed: its reader has released it already"


def test_500_that_nobody_claims_take_their_share_and_no_more(embed: Embed) -> None:
    """The oldest are revoked with a reason, new ones and plain saves go on, and everything balances in the end."""
    pair = Pair(embed(pool__size="1MiB", pd__handoff_share=0.25))
    for number in range(500):
        chain = pair.p.prompt(TOKENS)
        opened = pair.p_control.open_handoff(f"h{number}", chain, len(chain), lease_s=600)
        assert opened, opened.reason
        pair.p.serve(chain, look=False)
        pair.p_control.end_handoff(f"h{number}", tokens=TOKENS)
        if number % 50 == 7:
            plain = pair.p.prompt(TOKENS)
            assert pair.p.serve(plain, look=False)
            assert pair.p.serve(plain).hit.tokens == TOKENS - 1, "a plain save found no room"
            pair.p.agent.drop_lease(f"request-{number}")
    assert eventually(lambda: pair.figures()["completed"] == 500)
    figures, pool = pair.figures(), pair.observer.status()["pool"]
    assert figures["revoked"] == 500 - figures["complete"]
    assert 0 < figures["kept_bytes"] <= 0.25 * pool["capacity_bytes"]
    assert pool["evictions"] > 0, "the arena was never full"
    for number in range(3):
        state = pair.p_control.watch_handoff(f"h{number}", PATIENCE_S)
        assert (state.state, state.reason) == ("revoked", "newer hand-offs needed its room")
    for number in range(500):
        pair.p_control.release_handoff(f"h{number}")
    assert eventually(pair.balanced)
    assert pair.figures()["kept_bytes"] == 0
    status = pair.observer.status()
    assert (status["follows"]["follows"], status["flow"]["steps"]) == (0, 0)
    pair.close()


@pytest.mark.parametrize(
    ("follow", "layer_s", "follows"), [("auto", 1e3, True), ("auto", 1e-7, False), ("asked", 1e3, False)]
)
def test_what_another_engine_is_storing_is_waited_for_where_that_is_quicker(
    embed: Embed, follow: str, layer_s: float, follows: bool
) -> None:
    pair = Pair(embed(pd__follow=follow))
    chain = pair.p.prompt(TOKENS)
    run = pair.p.admit(chain, look=False)
    step = pair.p.agent.open_step([run.request()])
    step.expedite()
    for layer in range(2):
        pair.p.compute(run, layer, 0, TOKENS)
        step.layer_done(layer)
    assert eventually(lambda: pair.observer.status()["flow"]["saved_bytes"] >= 2 * 2 * 32 * TOKENS)
    pair.d.agent._policy.adopt(None, ComputeCost(layer_s, 0.0, 0.0))
    theirs = pair.d.admit(chain)
    assert (theirs.hit.following, theirs.hit.tokens) == ((True, TOKENS - 1) if follows else (False, 0))
    if follows:
        loading = pair.d.agent.open_step([theirs.request(save=False)])
        assert eventually(lambda: loading.is_ready(1))
        assert not loading.is_ready(2)
    for layer in range(2, 4):
        pair.p.compute(run, layer, 0, TOKENS)
        step.layer_done(layer)
    step.close()
    if follows:
        assert pair.d.forward(loading, [theirs]) == 0 and not theirs.failed
        loading.close()
    pair.d.agent.drop_lease(theirs.name)
    assert eventually(pair.balanced)
    pair.close()


def test_an_engine_never_waits_for_itself(embed: Embed) -> None:
    pair = Pair(embed(pd__follow="auto"))
    chain = pair.p.prompt(TOKENS)
    run = pair.p.admit(chain, look=False)
    step = pair.p.agent.open_step([run.request()])
    step.expedite()
    pair.p.compute(run, 0, 0, TOKENS)
    step.layer_done(0)
    assert eventually(lambda: pair.observer.status()["flow"]["saved_bytes"] > 0)
    pair.p.agent._policy.adopt(None, ComputeCost(1e3, 0.0, 0.0))
    again = pair.p.admit(chain)
    assert (again.hit.following, again.hit.tokens) == (False, 0)
    step.close(False)
    pair.close()
