"""What a client makes a server keep is bounded by its account and ends with it; no message leaves a pin behind."""

from __future__ import annotations

import functools
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from e2e.hostile import U32, Hostile
from e2e.known import eventually, small_spec

from layerflow.agent import handshake
from layerflow.config.settings import Settings
from layerflow.errors import ProtocolError
from layerflow.server import EmbeddedServer, spans
from layerflow.server.account import ENTRY_BYTES, OVERDRAFT, Account
from layerflow.server.handlers.handoffs import open_handoff
from layerflow.server.handlers.lookups import LookupHandler
from layerflow.server.leases import PINNED_BYTES
from layerflow.server.mailboxes import MAX_WAITING, Mailboxes, next_turn
from layerflow.server.plans import MOST_UNUSED
from layerflow.wire import codec
from layerflow.wire import messages as wire
from server.raw import RawClient
from server.support import Embed, worker_on

SPEC = small_spec(2, content="kept")
SHARE = 1 << 20
SMALL = {"server__max_client_bytes": SHARE, "server__max_message_bytes": 256 << 10}
Clients = Callable[..., RawClient]


@pytest.fixture
def client_of() -> Iterator[Clients]:
    made: list[RawClient] = []

    def make(server: EmbeddedServer, engine: str = "raw") -> RawClient:
        made.append(RawClient(server.context, server.endpoint, SPEC, engine))
        return made[-1]

    yield make
    for client in made:
        client.conversation.dealer.close()


def kept(server: EmbeddedServer, client: RawClient) -> int:
    """Bytes that the server keeps for a client."""
    found = server.call(lambda: server.server.sessions.get(client.number))
    return found.account.nbytes if found is not None else 0


def announced(server: EmbeddedServer) -> int:
    return int(server.call(lambda: server.server.handoffs.statistics().announced))


def test_watches_of_one_client_are_bounded_and_end_with_it(embed: Embed, client_of: Clients) -> None:
    server = embed(**SMALL)
    hostile, other = client_of(server), client_of(server)
    for number in range(1000):
        hostile.say(wire.WatchHandoff(number, f"h{number}", 600_000))
    refused = hostile.hear(wire.HandoffState)
    assert isinstance(refused, wire.Problem) and refused.code == "quota"
    assert "server.max_client_bytes" in refused.message
    hostile.beat()
    watched = announced(server)
    assert SHARE - ENTRY_BYTES - 16 < kept(server, hostile) <= SHARE
    assert watched <= SHARE // ENTRY_BYTES, "a watch that is refused announces nothing"
    other.say(wire.WatchHandoff(1, "another", 600_000))
    other.beat()
    assert announced(server) == watched + 1
    hostile.close()
    assert eventually(lambda: announced(server) == 1), "what a client waits for ends with the client"
    assert eventually(lambda: server.call(lambda: server.server.accounts.nbytes) == kept(server, other))


@pytest.mark.parametrize("share", [SHARE, 64 << 20])
def test_traces_count_for_what_workers_may_tell(
    embed: Embed, client_of: Clients, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    monkeypatch.setattr(spans, "PATIENCE_S", 600.0)
    server = embed(server__max_client_bytes=share, server__max_message_bytes=256 << 10)
    hostile, other = client_of(server), client_of(server)
    questions = server.server._server_context.span_questions
    with worker_on(server, spec=SPEC):
        monkeypatch.setattr(questions, "_send", lambda *_: None)
        for number in range(10):
            hostile.say(wire.TraceRequest(number, 60.0))
        refused = hostile.hear(wire.Status)
        assert isinstance(refused, wire.Problem) and refused.code == "quota"
        hostile.beat()
        most = spans.answer_bytes(share)
        asked = server.call(lambda: len(questions._asked))
        assert most == min(share // 4, spans.MOST_TRACE_BYTES) and asked == share // (2 * most + 2 * ENTRY_BYTES)
        assert kept(server, hostile) == asked * (2 * most + 2 * ENTRY_BYTES), "an entry, and a question, beside"
        hostile.close()
        assert eventually(lambda: server.call(lambda: len(questions._asked)) == 0), "they end with the client"
        assert eventually(lambda: server.call(lambda: server.server.accounts.nbytes) == kept(server, other))


async def test_a_question_that_a_worker_never_answers_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "PATIENCE_S", 0.0)
    numbers: list[int] = []
    questions = spans.SpanQuestions(lambda _, asked: numbers.append(asked.id))  # type: ignore[attr-defined]
    worker: Any = SimpleNamespace(number=1, name="e", spec=None)
    found = await spans.trace_workers(questions, [worker], 60.0, spans.MOST_TRACE_BYTES)
    assert found["silent"] == ["e"] and not questions._asked
    questions.answered(worker, wire.Spans(numbers[0], 0, []))
    with pytest.raises(ProtocolError, match="was not asked"):
        questions.answered(worker, wire.Spans(numbers[0] + 1, 0, []))


@pytest.mark.parametrize("waits_for", ["handoff", "servers"])
def test_lookups_that_wait_are_counted_by_what_they_keep(embed: Embed, client_of: Clients, waits_for: str) -> None:
    server = embed(**SMALL, peers__learn=True, pd__handoff_lease_s=60)
    hostile, other = client_of(server), client_of(server)
    digests = [os.urandom(16) for _ in range(4096)]
    servers = ["ipc:///nowhere/control"] if waits_for == "servers" else []
    if servers:  # its own address too: the part that this server keeps is waited for
        servers.append(server.call(lambda: server.server.settings.server.endpoint))
    for number in range(20):
        hostile.say(hostile.lookup(f"r{number}", digests, handoff="never", servers=servers, follow_ms=600_000))
    refused = hostile.hear(wire.Found)
    assert isinstance(refused, wire.Problem) and refused.code == "quota"
    hostile.beat()
    assert 0 < kept(server, hostile) <= SHARE
    other.say(other.lookup("one", digests[:4], handoff="never", follow_ms=1))
    answer = other.hear(wire.Found)
    assert isinstance(answer, wire.Found) and answer.tokens == 0
    hostile.close()
    assert eventually(lambda: announced(server) == 0)
    assert eventually(lambda: server.call(lambda: server.server.accounts.nbytes) == kept(server, other) == 0)


def test_a_request_that_is_looked_up_again_and_again_has_few_plans(embed: Embed, client_of: Clients) -> None:
    server = embed()
    worker = worker_on(server, spec=SPEC, engine="raw")
    chain = worker.prompt(64)
    worker.serve(chain)
    client = client_of(server)
    digests = list(chain.digests)
    plans = []
    for _ in range(3 * MOST_UNUSED):
        client.say(client.lookup("same", digests, tail=os.urandom(16)))
        found = client.hear(wire.Found)
        assert isinstance(found, wire.Found) and found.plan
        plans.append(found.plan)
    assert server.call(lambda: len(server.server._server_context.plans)) == MOST_UNUSED
    assert kept(server, client) >= MOST_UNUSED * ENTRY_BYTES
    client.say(wire.DropLease("same", -1))
    client.beat()
    assert kept(server, client) == 0
    assert eventually(lambda: server.call(lambda: server.server.pool.statistics().pinned) == 0)
    worker.agent.close()


@pytest.mark.parametrize("engine", ["raw", "another"], ids=["with a plan", "with a lease"])
def test_a_hit_past_the_share_is_told_and_pins_nothing(embed: Embed, client_of: Clients, engine: str) -> None:
    server = embed(**SMALL)
    worker = worker_on(server, spec=SPEC, engine=engine)
    chain = worker.prompt(64)
    worker.serve(chain)
    client = client_of(server)
    for number in range(SHARE // ENTRY_BYTES):
        client.say(wire.WatchHandoff(number, f"h{number}", 600_000))
    client.say(client.lookup("r", list(chain.digests), tail=os.urandom(16)))
    found = client.hear(wire.Found)
    while isinstance(found, wire.Problem) and "a watch" in found.message:
        found = client.hear(wire.Found)
    assert isinstance(found, wire.Found) and found.tokens == 64 and not found.plan and not leased(server)
    assert eventually(lambda: server.call(lambda: server.server.pool.statistics().pinned) == 0)
    session = server.call(lambda: server.server.sessions.get(client.number))
    assert session is not None and not session.hit_leases
    worker.agent.close()


def test_a_hit_that_is_not_leased_is_loaded_all_the_same(embed: Embed) -> None:
    server = embed(**SMALL)
    worker = worker_on(server, spec=SPEC)
    chain = worker.prompt(65)
    worker.serve(chain)

    def use_up() -> None:
        for session in server.server.sessions:
            account = session.account
            account.charge("all that it may keep", SHARE - account.nbytes - ENTRY_BYTES)

    server.call(use_up)
    for _ in range(2):
        run = worker.serve(chain)
        assert run.hit.tokens == 64 and run.hit.plan is None and not leased(server)
    worker.agent.close()


def leased(server: EmbeddedServer) -> int:
    owners = server.call(server.server.pool.owners)
    return sum(owner[0] == "lease" for owner in owners)  # type: ignore[index]


def test_leases_of_one_client_are_bounded_over_its_connections(embed: Embed, client_of: Clients) -> None:
    """Pins of what is pinned already take no room in the arena, and memory of the server."""
    server = embed(**SMALL, pool__lease_share=1.0)
    worker = worker_on(server, spec=SPEC, blocks=512)
    chain = worker.prompt(64 * SPEC.chunk_tokens)
    worker.serve(chain)
    digests, lease = list(chain.digests), ENTRY_BYTES + 64 * PINNED_BYTES
    fit, left = SHARE // lease, 0
    for connection in range(3):
        client = client_of(server)
        answers = []
        for number in range(200):
            client.say(client.lookup(f"{connection} {number}", digests))
            answers.append(client.hear(wire.Found))
        assert all(isinstance(each, wire.Found) and each.tokens == 1024 for each in answers)
        mine = leased(server) - left
        assert fit - 2 <= mine <= fit, "a lookup that takes more than a slice counts meanwhile, too"
        assert eventually(lambda mine=mine: kept(server, client) == mine * lease)  # noqa: B023
        client.say(wire.DropLease(f"{connection} 0"))
        assert eventually(lambda mine=mine: kept(server, client) == (mine - 1) * lease)  # noqa: B023
        client.close()
        left = min(left + mine - 1, fit)
        assert eventually(lambda left=left: leased(server) == left)
        assert eventually(lambda left=left: server.call(lambda: server.server.accounts.nbytes) == left * lease)
    server.call(lambda: server.server._server_context.leases.expire(1e18))
    assert eventually(lambda: leased(server) == 0)
    assert server.call(lambda: server.server.accounts.nbytes) == 0
    assert eventually(lambda: server.call(lambda: server.server.pool.statistics().pinned) == 0)
    worker.agent.close()


def test_plans_of_a_client_that_is_gone_are_counted_leases(embed: Embed, client_of: Clients) -> None:
    server = embed(**SMALL, pool__lease_ms=600_000)
    worker = worker_on(server, spec=SPEC, engine="raw")
    chain = worker.prompt(64)
    worker.serve(chain)
    client = client_of(server)
    for number in range(100):
        client.say(client.lookup(f"r{number}", list(chain.digests)))
        found = client.hear(wire.Found)
        assert isinstance(found, wire.Found) and found.plan
    counted = 100 * (ENTRY_BYTES + 4 * PINNED_BYTES)
    assert eventually(lambda: kept(server, client) == counted)
    plans = server.server._server_context.plans
    assert server.call(lambda: len(plans)) == 100
    client.close()
    assert eventually(lambda: server.call(lambda: len(plans)) == 0)
    assert leased(server) == 100
    assert eventually(lambda: server.call(lambda: server.server.accounts.nbytes) == counted)
    worker.agent.close()


def test_a_lookup_whose_client_is_lost_meanwhile_leaves_no_pin(embed: Embed, client_of: Clients) -> None:
    server = embed()
    worker = worker_on(server, spec=SPEC, blocks=512)
    chain = worker.prompt(64 * SPEC.chunk_tokens)
    worker.serve(chain)
    client = client_of(server)
    context = server.server._server_context
    session = server.call(lambda: server.server.sessions.get(client.number))
    message = client.lookup("r", list(chain.digests))

    def half() -> int:
        """Until something is pinned; then it is closed, as what a client has under way that is lost."""
        work = LookupHandler(context).look_up(session, message)
        while not (pinned := context.pool.statistics().pinned):
            work.send(None)
        work.close()
        return pinned

    assert server.call(half) > 0
    assert eventually(lambda: server.call(lambda: server.server.pool.statistics().pinned) == 0)
    assert kept(server, client) == 0 and not leased(server)
    worker.agent.close()


def test_a_load_of_more_blocks_than_an_object_has_leaves_no_pin(embed: Embed) -> None:
    server = embed()
    hostile = Hostile(server.context, server.endpoint, SPEC)
    block = SPEC.groups[0].block_size
    tails = [struct.pack("<QQ", 1, number) for number in range(5)]

    def step(number: int, loads: list[wire.LoadPart], saves: list[wire.SavePart]) -> None:
        until = time.monotonic() + 30
        hostile.conversation.send(wire.OpenStep(number, until, until, loads, saves))
        progress = [wire.Progress(number, 1, 2)] if saves else []
        hostile.conversation.send(wire.Report(progress=progress, closed=[wire.Closed(number, True)]))
        while True:
            message = codec.decode_reply(hostile.conversation.receive(until))
            assert not isinstance(message, wire.Problem), message
            if isinstance(message, wire.Grant) and message.batches:
                hostile.conversation.send(wire.Report(done=[batch.batch for batch in message.batches]))
            if isinstance(message, wire.Notice) and number in message.finished:
                return

    parent = bytes(16)
    for number, tail in enumerate(tails):
        step(number, [], [wire.SavePart("r", 0, tail, U32([1]), U32([block]), parent)])
    assert server.call(lambda: server.server.pool.statistics().objects) == len(tails)
    for number, tail in enumerate(tails):
        step(100 + number, [wire.LoadPart("r", 0, tail, U32([2]), 0, b"")], [])
        assert server.call(lambda: server.server.pool.statistics().pinned) == 0
    hostile.close()


def test_a_hand_off_of_more_than_its_share_is_refused_before_any_object_is_made(
    embed: Embed, client_of: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed()
    worker = worker_on(server, spec=SPEC, engine="raw")
    client = client_of(server)
    monkeypatch.setattr("layerflow.server.handoffs.handoff.NewObject", None)  # making one would raise
    chunks = 20_000
    tokens = chunks * SPEC.chunk_tokens
    client.say(wire.OpenHandoff(1, "h", bytes(16), os.urandom(16 * chunks), tokens, b"", 0, 60_000))
    state = client.hear(wire.HandoffState)
    assert isinstance(state, wire.HandoffState) and state.state == "refused"
    assert "pd.handoff_share" in state.reason
    worker.agent.close()


def test_a_long_hand_off_is_opened_in_slices_and_closed_with_its_client(embed: Embed, client_of: Clients) -> None:
    server = embed(pool__size="64MiB")
    worker = worker_on(server, spec=SPEC, engine="raw")
    client = client_of(server)
    context = server.server._server_context
    chunks = 2048
    tokens = chunks * SPEC.chunk_tokens
    message = wire.OpenHandoff(1, "h", bytes(16), os.urandom(16 * chunks), tokens, b"", 0, 60_000)
    session = server.call(lambda: server.server.sessions.get(client.number))

    def half() -> tuple[int, int]:
        """Open it half, and close the coroutine, as is done with what a client has under way that is lost."""
        work = open_handoff(context, session, message)
        slices = sum(1 for _, _ in zip(range(12), work.__await__(), strict=False))
        reserved = server.server.pool.statistics().half_written
        work.close()
        return slices, reserved

    slices, reserved = server.call(half)
    assert slices == 12 and reserved, "each slice is a few hundred objects"
    assert eventually(lambda: server.call(lambda: server.server.pool.statistics().half_written) == 0)
    assert eventually(lambda: kept(server, client) == 0 and announced(server) == 0)
    client.say(message)
    state = client.hear(wire.HandoffState)
    assert isinstance(state, wire.HandoffState) and state.state == "open", state
    assert kept(server, client) > ENTRY_BYTES
    client.close()
    assert eventually(lambda: server.call(lambda: server.server.pool.statistics().half_written) == 0)
    worker.agent.close()


class Busy:
    """A message of a client's that goes on until it is let go, so that what the client says next waits.

    :param fill: keep as much more for the client as it may keep: messages that wait, or bytes.
    """

    def __init__(self, server: EmbeddedServer, number: int, fill: str = "") -> None:
        self._done = False
        session = server.call(lambda: server.server.sessions.get(number))
        self.account: Account = session.account  # type: ignore[attr-defined]
        server.call(lambda: self._begin(server.server.mailboxes, fill))

    def _begin(self, mailboxes: Mailboxes, fill: str) -> None:
        mailboxes.start(self.account, self._work())
        for _ in range(MAX_WAITING - 1 if fill == "messages" else 0):
            mailboxes.start(self.account, self._nothing())
        if fill == "bytes":
            self.account.charge("all that it may keep", SHARE, always=True)

    async def _work(self) -> None:
        while not self._done:
            await next_turn()

    async def _nothing(self) -> None:
        pass

    def let_go(self) -> None:
        self._done = True


@pytest.mark.parametrize("fill", ["messages", "bytes"])
def test_a_step_ends_however_much_its_worker_keeps(embed: Embed, fill: str) -> None:
    """The worker says once that a batch has ended: refused, the step would stay open with its room."""
    server = embed(**(SMALL if fill == "bytes" else {}))
    with worker_on(server, spec=SPEC) as worker:
        run = worker.admit(worker.prompt(64))
        with worker.agent.open_step([run.request()], 30.0) as step:
            assert eventually(lambda: server.call(lambda: server.server.driver.open_steps) == 1)
            number = server.call(lambda: next(one.number for one in server.server.sessions if one.memory))
            busy = Busy(server, number, fill)
            entries = busy.account.entries
            worker.forward(step, [run])
        assert eventually(lambda: busy.account.entries > entries), "its report waits with the others"
        busy.let_go()
        assert worker.agent.wait_idle(run.name, 30.0)
        assert worker.agent.poll().saved == (run.name,)
        assert server.call(lambda: server.server.pool.statistics().half_written) == 0


def test_clients_count_for_the_process_that_the_socket_tells_and_not_for_the_one_they_claim(
    client_of: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers of their own all are process 1, and who claims others' numbers would have a share for each."""
    with EmbeddedServer(Settings(), f"ipc://{tmp_path}/control") as server:
        clients = []
        for claimed in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(handshake, "os", SimpleNamespace(getpid=lambda claimed=claimed: claimed))
                clients.append(client_of(server))
        sessions = [server.call(functools.partial(server.server.sessions.get, client.number)) for client in clients]
    assert [session.pid for session in sessions] == [1, 2]
    assert {session.principal for session in sessions} == {f"pid {os.getpid()}"}


def test_a_flood_of_what_ends_something_ends_its_client_alone(client_of: Clients, tmp_path: Path) -> None:
    limits = {name.partition("__")[2]: value for name, value in SMALL.items()}
    with EmbeddedServer(Settings(server=limits), f"ipc://{tmp_path}/control") as server:
        hostile, other = client_of(server), client_of(server)
        busy = Busy(server, hostile.number)
        flood = wire.Report(done=[1 << 40] * 20_000)
        nbytes = len(codec.encode(flood))
        for _ in range(2 * OVERDRAFT * SHARE // nbytes):
            hostile.say(flood)
        door = server.server._doors["local"]
        assert eventually(lambda: server.call(lambda: door.statistics().hung_up_on) >= 1), "and when it comes again"
        assert busy.account.nbytes <= OVERDRAFT * SHARE + nbytes + ENTRY_BYTES
        other.beat()
        assert server.call(lambda: server.server.sessions.get(hostile.number)) is not None
        busy.let_go()
        assert eventually(lambda: server.call(lambda: server.server.sessions.get(hostile.number)) is None)
        other.say(other.lookup("one", [os.urandom(16)]))
        assert isinstance(other.hear(wire.Found), wire.Found)
        other.conversation.dealer.close()
