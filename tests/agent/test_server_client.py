"""What a client of a server makes of its answers, in any order, without a server."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import numpy as np
import pytest
from e2e.known import small_spec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layerflow.agent.client import ControlConnection, HandoffInquiry, Inquiry, InquiryState, Pending, ServerClient
from layerflow.agent.hit_plan import PinnedPlaces, UnusedPlaces
from layerflow.agent.values import MISS, Handoff, Hit
from layerflow.errors import DeadlineExceeded, ServerLost, SessionUnknown
from layerflow.keys import Chain, root_digest
from layerflow.wire import messages as wire

SPEC = small_spec()
CHAIN = Chain(root_digest(SPEC.fingerprint), range(40), SPEC.chunk_tokens)
LEASE_MS = 5000
NEVER = 0.0


class FakeConversation:
    """A server that says what it is told to; :attr:`fails` once it cannot be reached any more."""

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []
        self.coming: deque[wire.ToClient | Exception] = deque()
        self.fails: Exception | None = None

    def send(self, message: wire.Message) -> None:
        if self.fails is not None:
            raise self.fails
        self.sent.append(message)

    def next(self, deadline: float) -> wire.ToClient:
        if not self.coming:
            raise DeadlineExceeded("nothing came")
        message = self.coming.popleft()
        if isinstance(message, Exception):
            raise message
        return message


class FakeConnection:
    lease_ms = LEASE_MS

    def __init__(self) -> None:
        self.conversation = FakeConversation()
        self.left = False

    def hung_up(self, *, at_once: bool = False) -> bool:
        return False

    def hang_up(self) -> None:
        self.left = True


def connected() -> tuple[ServerClient, FakeConversation]:
    client, connection = ServerClient("inproc://nowhere", "engine", SPEC), FakeConnection()
    client.connection = cast(ControlConnection, connection)
    return client, connection.conversation


def ask(client: ServerClient, request: str = "r") -> tuple[Inquiry, int]:
    inquiry, number = client.inquiry(request, CHAIN, None, 1.0), next(client.numbers)
    client.post(inquiry, wire.Lookup(number, request, bytes(16), b"", len(CHAIN), LEASE_MS, b""))
    return inquiry, number


def pump(client: ServerClient) -> None:
    while client.pump(NEVER):
        pass


def resident(number: int, plan: int) -> wire.Found:
    """An answer of one chunk, with a plan of it."""
    shards = len(SPEC.shard.peers())
    places = np.zeros((1, len(SPEC.own.groups), shards, 2), "<u8")
    return wire.Found(number, SPEC.chunk_tokens, [], plan=plan, incarnation=1, places=places.tobytes())


def test_answers_reach_their_questions_in_any_order() -> None:
    client, server = connected()
    (one, first), (two, second) = ask(client, "one"), ask(client, "two")
    status = Pending(until=1.0)
    client.post(status, wire.StatusRequest(number := next(client.numbers)))
    server.coming += [wire.Status(number, b"{}"), wire.Found(second, 16, []), wire.Found(first, 32, [])]
    pump(client)
    assert (one.hit, two.hit) == (Hit(32), Hit(16))
    assert status.answer == wire.Status(number, b"{}")
    assert one.over and two.over and status.over


def test_what_is_open_fails_with_the_connection() -> None:
    client, server = connected()
    inquiry, _ = ask(client)
    handoff, status = HandoffInquiry(until=1.0, name="h"), Pending(until=1.0)
    client.post(handoff, client.watching("h", 1.0))
    client.post(status, wire.StatusRequest(next(client.numbers)))
    server.coming.append(SessionUnknown("who is this?"))
    pump(client)
    assert client.connection is None
    assert inquiry.hit is MISS
    assert handoff.state == Handoff("h", "unknown", 0, "who is this?")
    assert isinstance(status.error, SessionUnknown)
    assert not client.pump(NEVER)


def test_a_question_without_a_connection_has_failed() -> None:
    client = ServerClient("inproc://nowhere", "engine", SPEC)
    inquiry, _ = ask(client)
    assert inquiry.hit is MISS and isinstance(inquiry.error, ServerLost)
    client.drop_lease("r")


def test_a_refused_question_fails_alone() -> None:
    client, server = connected()
    (one, first), (two, second) = ask(client, "one"), ask(client, "two")
    opened = HandoffInquiry(until=1.0, name="h")
    client.post(opened, opening := client.opening("h", CHAIN, 40, lease_s=0.0, timeout_s=1.0, servers=()))
    server.coming += [
        wire.Problem(first, "invalid", "no"),
        wire.Problem(-1, "malformed", "of something else"),
        wire.Problem(opening.id, "refused", "no room"),
        wire.Found(second, 16, []),
    ]
    pump(client)
    assert (one.hit, two.hit) == (MISS, Hit(16))
    assert opened.state == Handoff("h", "refused", 0, "no room")
    assert client.connection is not None


def test_a_question_that_failed_may_be_asked_again() -> None:
    client, server = connected()
    inquiry, number = ask(client)
    server.coming.append(SessionUnknown("started anew"))
    pump(client)
    assert inquiry.over
    connection = FakeConnection()
    client.connection = cast(ControlConnection, connection)
    client.post(inquiry, cast(wire.Lookup, server.sent[0]))
    assert not inquiry.answered
    connection.conversation.coming.append(wire.Found(number, 16, []))
    client.await_answer(inquiry, NEVER)
    assert inquiry.hit == Hit(16) and inquiry.error is None


def test_a_watched_hand_off_is_over_at_its_end() -> None:
    client, server = connected()
    watched = HandoffInquiry(until=1.0, name="h", watch=True)
    client.post(watched, message := client.watching("h", 1.0))
    for state, over in (("announced", False), ("open", False), ("complete", True)):
        server.coming.append(wire.HandoffState(message.id, "h", state, 40, ""))
        pump(client)
        assert watched.state == Handoff("h", state, 40)
        assert (watched.answered, watched.over) == (True, over)


@pytest.mark.parametrize(
    ("state", "dropped"),
    [
        (InquiryState.WANTED, []),
        (InquiryState.TAKEN, [wire.DropLease("r", 77, LEASE_MS)]),
        (InquiryState.DROPPED, [wire.DropLease("r", 77, 0)]),
    ],
)
def test_a_plan_that_nobody_will_load_by_is_given_up(state: InquiryState, dropped: list[wire.Message]) -> None:
    client, server = connected()
    inquiry, number = ask(client)
    inquiry.state = state
    server.coming.append(resident(number, 77))
    pump(client)
    assert inquiry.hit is not None and inquiry.hit.plan is not None
    assert server.sent[1:] == dropped
    assert client.plans.revoke("r") == (0 if dropped else 77)


def test_of_a_hit_that_is_not_all_here_what_is_here_stays_leased() -> None:
    client, server = connected()
    inquiry, number = ask(client)
    server.coming.append(wire.Found(number, 16, [], plan=77))
    pump(client)
    assert inquiry.hit == Hit(16)
    assert server.sent[1:] == [wire.DropLease("r", 77, LEASE_MS)]


def test_a_later_plan_of_a_request_makes_the_earlier_one_void() -> None:
    client, server = connected()
    one, first = ask(client)
    two, second = ask(client)
    server.coming += [resident(first, 77), resident(second, 78)]
    pump(client)
    assert one.hit is not None and one.hit.plan is not None and one.hit.plan.revoked
    assert two.hit is not None and two.hit.plan is not None and not two.hit.plan.revoked
    assert server.sent[2:] == [wire.DropLease("r", 77)]
    client.drop_lease("r")
    assert server.sent[3:] == [wire.DropLease("r", 78), wire.DropLease("r", -1)]


def test_tails_of_another_prompt_are_not_kept_leased() -> None:
    client, server = connected()
    inquiry, number = ask(client)
    server.coming.append(wire.Found(number, 0, [wire.TailHit(0, 8, bytes(16))]))
    pump(client)
    assert inquiry.hit == MISS
    assert server.sent[1:] == [wire.DropLease("r", -1)]


def test_an_answer_counts_although_the_connection_ends_over_it() -> None:
    client, server = connected()
    inquiry, number = ask(client)
    other, _ = ask(client, "other")
    server.coming.append(wire.Found(number, 16, [], plan=77))
    server.fails = ServerLost("full")
    pump(client)
    assert inquiry.hit == Hit(16)
    assert other.hit is MISS and client.connection is None


def test_what_was_used_is_remembered_until_its_request_is_dropped() -> None:
    plans = UnusedPlaces()
    plan = PinnedPlaces(5, 1, np.zeros((1, 1, 1, 2), np.uint64), -1)
    assert plans.register("r", plan, 10.0) == 0
    assert plans.consume(plan, "r", 1)
    assert not plans.consume(plan, "r", 1), "once each"
    assert plans.consume(plan, "r", 2)
    assert plans.drop("r") == (0, True)
    assert plans.drop("r") == (0, False)


def test_plans_that_are_not_used_in_time_are_void() -> None:
    plans = UnusedPlaces()
    one, two = (PinnedPlaces(number, 1, np.zeros((1, 1, 1, 2), np.uint64), -1) for number in (5, 6))
    plans.register("one", one, 10.0)
    plans.register("two", two, 11.0)
    assert plans.expired(10.5) == [("one", 5)]
    assert (one.revoked, two.revoked) == (True, False)
    assert not plans.consume(one, "one", 1)
    assert plans.revoke("one") == 0
    assert plans.revoke("two") == 6


class AnyAnswers(RuleBasedStateMachine):
    """Questions that are asked, answered, refused and lost in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.client, self.server = connected()
        self.open: dict[int, Pending] = {}
        self.asked: list[Pending] = []

    def _ask(self, pending: Pending, message: Any) -> None:
        self.client.post(pending, message)
        self.asked.append(pending)
        if self.client.connection is not None:
            self.open[message.id] = pending

    @rule(request=st.sampled_from("ab"))
    def look_up(self, request: str) -> None:
        inquiry, number = ask(self.client, request)
        self.asked.append(inquiry)
        if self.client.connection is not None:
            self.open[number] = inquiry

    @rule(watch=st.booleans())
    def watch(self, watch: bool) -> None:
        self._ask(HandoffInquiry(until=1.0, name="h", watch=watch), self.client.watching("h", 1.0))

    @rule()
    def status(self) -> None:
        self._ask(Pending(until=1.0), wire.StatusRequest(next(self.client.numbers)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), refused=st.booleans(), state=st.sampled_from(["open", "complete"]))
    def answer(self, data: st.DataObject, refused: bool, state: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        pending = self.open[number]
        if refused:
            self.server.coming.append(wire.Problem(number, "invalid", "no"))
        elif isinstance(pending, Inquiry):
            self.server.coming.append(resident(number, number + 1000))
        elif isinstance(pending, HandoffInquiry):
            self.server.coming.append(wire.HandoffState(number, "h", state, 40, ""))
        else:
            self.server.coming.append(wire.Status(number, b"{}"))
        assert self.client.pump(NEVER)
        assert pending.answered
        assert (pending.error is not None) == refused
        if not (isinstance(pending, HandoffInquiry) and pending.watch and state == "open" and not refused):
            del self.open[number]

    @rule(request=st.sampled_from("ab"))
    def drop(self, request: str) -> None:
        self.client.drop_lease(request)
        assert self.client.plans.revoke(request) == 0

    @rule()
    def lose(self) -> None:
        self.client.lost(ServerLost("gone"))
        assert all(pending.error is not None for pending in self.open.values())
        self.open.clear()

    @precondition(lambda self: self.client.connection is None)
    @rule()
    def connect(self) -> None:
        connection = FakeConnection()
        self.client.connection, self.server = cast(ControlConnection, connection), connection.conversation

    @invariant()
    def what_is_not_open_is_over(self) -> None:
        still = {id(pending) for pending in self.open.values()}
        assert all(pending.over != (id(pending) in still) for pending in self.asked)


TestAnyAnswers = AnyAnswers.TestCase
