"""What one client may ask for is bounded; the Problem says by what."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
from e2e.hostile import DIGEST, U32, Hostile
from e2e.known import PATIENCE_S, KnownWorker, eventually, small_spec

from layerflow.agent import Control
from layerflow.agent.handshake import Handshake, dial
from layerflow.errors import DeadlineExceeded
from layerflow.server import EmbeddedServer
from layerflow.server.plans import PinnedHits
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard
from layerflow.wire import codec
from layerflow.wire import messages as wire
from server.raw import RawClient
from server.support import Embed, observe, worker_on

SPEC = small_spec(2, content="quotas")
BLOCKS = SPEC.chunk_tokens // SPEC.groups[0].block_size


class Client(Hostile):
    """A worker that asks for what it likes."""

    def __init__(self, server: EmbeddedServer) -> None:
        super().__init__(server.context, server.endpoint, SPEC)

    def ask(self, message: wire.Message, kind: type[wire.Message]) -> Any:
        """The next answer of this kind, or Problem; the message is sent as it is, whatever agents would not send."""
        self.conversation.send_raw(codec.encode(message))
        until = time.monotonic() + 20
        while True:
            answer = codec.decode_reply(self.conversation.receive(until))
            if isinstance(answer, (kind, wire.Problem)):
                return answer

    def open(self, step: int, objects: int = 1, ahead_s: float = 60.0) -> Any:
        digests = b"".join(struct.pack("<QQ", step, number) for number in range(objects))
        part = wire.SavePart("r", 0, digests, U32([BLOCKS] * objects), U32([SPEC.chunk_tokens] * objects), b"")
        until = time.monotonic() + ahead_s
        return self.ask(wire.OpenStep(step, until, until, [], [part]), wire.Plan)

    def look(self, request: str, tokens: int, lease_ms: int = 60_000) -> Any:
        digests = DIGEST * (tokens // SPEC.chunk_tokens)
        tail = DIGEST if tokens % SPEC.chunk_tokens else b""
        return self.ask(wire.Lookup(1, request, DIGEST, digests, tokens, lease_ms, tail), wire.Found)


@pytest.fixture
def client_of() -> Iterator[Any]:
    clients: list[Client] = []

    def make(server: EmbeddedServer) -> Client:
        clients.append(Client(server))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def looking(server: EmbeddedServer, worker: KnownWorker) -> Control:
    """A client whose leases are counted. A late answer would be a miss, and so are all lookups of the next second."""
    return Control(server.endpoint, "e2e", worker.spec, context=server.context, lookup_timeout_s=PATIENCE_S)


def refused(answer: Any, setting: str) -> bool:
    return isinstance(answer, wire.Problem) and answer.code in ("quota", "invalid") and setting in answer.message


def test_each_limit_of_a_step(embed: Embed, client_of: Any) -> None:
    client = client_of(embed(server__max_step_objects=3, server__max_open_steps=2, server__max_deadline_s=100))
    assert refused(client.open(1, objects=4), "max_step_objects")
    assert refused(client.open(1, ahead_s=200), "max_deadline_s")
    assert isinstance(client.open(1), wire.Plan)
    assert isinstance(client.open(2), wire.Plan)
    assert refused(client.open(3), "max_open_steps")
    moved = BLOCKS * SPEC.groups[0].bytes_per_block * 2
    fitting = (1 << 20) // moved
    other = client_of(embed(server__max_open_bytes=1 << 20))
    assert refused(other.open(1, objects=fitting + 1), "max_open_bytes")
    assert isinstance(other.open(2, objects=fitting - 1), wire.Plan)
    assert refused(other.open(3, objects=2), "max_open_bytes"), "open steps count together"
    assert isinstance(other.open(4, objects=1), wire.Plan)


def test_a_finished_step_counts_no_more(embed: Embed) -> None:
    server = embed(server__max_open_steps=1)
    with worker_on(server, spec=small_spec()) as worker:
        for saved in range(1, 4):
            worker.serve(worker.prompt(40))
            assert eventually(lambda saved=saved: server.server.pool.statistics().commits == 3 * saved)


def test_a_step_that_is_refused_ends_the_plans_of_its_hits(embed: Embed) -> None:
    server = embed(server__max_open_steps=1)
    with worker_on(server, spec=small_spec()) as worker:
        chain = worker.prompt(40)
        worker.serve(chain)
        staying = worker.admit(worker.prompt(40))
        with worker.agent.open_step([staying.request()], PATIENCE_S) as first:
            for _ in range(3):
                run = worker.admit(chain)
                assert run.hit.plan is not None
                with worker.agent.open_step([run.request(save=False)], PATIENCE_S) as step:
                    assert step.residents is not None, "its loads begin before the server has answered"  # type: ignore[union-attr]
                    assert worker.agent.wait_idle(run.name, PATIENCE_S)
                worker.agent.abort(run.name)
                worker.agent.drop_lease(run.name)
            assert eventually(lambda: not server.call(lambda: len(server.server._server_context.plans)))
            assert not [owner for owner in server.call(server.server.pool.owners) if owner[0] in ("plan", "lease")]
            assert worker.forward(first, [staying]) == 0


@pytest.mark.parametrize("last", ["moved", "gone", "opened"])
def test_loads_of_a_refused_step_that_have_begun_keep_their_objects(last: str) -> None:
    leases, asker = Mock(), Mock(engine="e", hit_leases={}, number=1)
    plans = PinnedHits(Mock(), leases, lambda: 10.0)
    for request in ("r", "other"):
        plans.keep(asker, request, [2, 3], "lookup", Mock())
    plans.refused("e", ["r"], 2, 7)
    plans.opened("e", "r", 3)
    plans.drop_told(asker, "r")
    plans.moved(2, 6)
    plans.moved(3, 7)
    assert len(plans) == 2, "worker 2 may still read them"
    if last == "moved":
        plans.moved(2, 7)
    elif last == "gone":
        plans.gone(Mock(number=2))
    else:
        plans.opened("e", "r", 2)
    assert len(plans) == 1 and leases.let_go.call_count == 1
    plans.moved(2, 7)
    assert len(plans) == 1 and not plans._refused


def test_each_limit_of_a_lookup(embed: Embed, client_of: Any) -> None:
    server = embed(server__max_lookup_objects=5, server__max_deadline_s=100)
    client = client_of(server)
    assert isinstance(client.look("r", 4 * SPEC.chunk_tokens), wire.Found)
    assert refused(client.look("r", 5 * SPEC.chunk_tokens), "max_lookup_objects")
    assert refused(client.look("r", 20, lease_ms=101_000), "max_deadline_s")


def test_a_chunk_with_too_many_objects_is_not_described(embed: Embed) -> None:
    server = embed()
    groups = tuple(GroupSpec("full", 4, (number,), (Plane("k", "uint8", (8,)),)) for number in range(5))
    wide = ModelSpec("wide", "c", groups, shard=Shard(0, 1024), chunk_tokens=16)
    client = RawClient(server.context, server.endpoint, wide)
    client.say(wire.DescribeChunks([wire.ChunkDescription(DIGEST, b"", bytes(64))]))
    assert refused(client.hear(wire.Beat), "groups x shards")
    assert server.call(lambda: server.server._journal.described) == 0
    client.close()


def test_leases_are_counted_and_come_back(embed: Embed) -> None:
    server = embed(server__max_leases=2)
    with worker_on(server, spec=small_spec()) as worker:
        chain = worker.prompt(40)
        worker.serve(chain)
        looker = looking(server, worker)
        assert [looker.lookup(name, chain).tokens for name in ("a", "b", "c", "a")] == [39, 39, 0, 39]
        looker.drop_lease("a")
        assert looker.lookup("c", chain).tokens == 39
        looker.close()


def test_a_hit_counts_as_a_lease_however_its_plan_ends(embed: Embed) -> None:
    server = embed(server__max_leases=2)
    with (
        worker_on(server, spec=small_spec()) as worker,
        closing(looking(server, worker)) as looker,
    ):
        chain = worker.prompt(40)
        worker.serve(chain)
        assert looker.lookup("a", chain).plan and looker.lookup("a", chain).plan, "the first one is given up"
        hit = looker.lookup("b", chain)
        assert hit.plan is not None
        looker._client.tell(wire.DropLease("b", hit.plan.number, 60_000))
        assert looker.lookup("c", chain).tokens == 0
        looker.drop_lease("b")
        assert looker.lookup("c", chain).tokens == 39


def test_the_idlest_client_makes_room(embed: Embed) -> None:
    server = embed(server__max_clients=2)
    clients = []
    for number in range(4):
        conversation = Handshake(dial(server.context, server.endpoint))
        conversation.introduce(f"idle-{number}", "test", time.monotonic() + 20)
        clients.append(conversation)
    assert sorted(session.engine for session in server.server.sessions) == ["idle-2", "idle-3"]
    for conversation in clients:
        conversation.dealer.close()


@pytest.mark.parametrize("frames", [2, 8, 5000])
def test_a_message_of_many_frames_is_one_problem(embed: Embed, client_of: Any, frames: int) -> None:
    client = client_of(embed())
    client.send(*[codec.encode(wire.StatusRequest(5))] * frames)
    answer = client.ask(wire.Beat(1.0), wire.Beat)
    assert isinstance(answer, wire.Problem) and "one frame" in answer.message
    assert client.alive()
    told = []
    with pytest.raises(DeadlineExceeded):
        while True:
            told.append(codec.decode_reply(client.conversation.receive(time.monotonic()), 64 << 20))
    assert not [each for each in told if isinstance(each, wire.Problem | wire.Status)], told


def test_small_kinds_have_no_long_messages(embed: Embed, client_of: Any) -> None:
    client = client_of(embed())
    answer = client.ask(wire.Abort(["x" * 100] * 1000), wire.Notice)
    assert "only Lookup, OpenStep, OpenHandoff" in answer.message
    assert "array" in client.ask(wire.Report(done=[1] * 70_000), wire.Notice).message
    assert "str" in client.ask(wire.DropLease("x" * 2000), wire.Notice).message


@pytest.mark.parametrize(
    "message", [wire.PeerLookup(7, bytes(16), bytes(24), 1000), wire.PeerRelease(1)], ids=["lookup", "release"]
)
def test_what_only_servers_say_is_refused_from_a_client(embed: Embed, client_of: Any, message: wire.ToServer) -> None:
    client = client_of(embed(peers__serve=True))
    answer = client.ask(message, wire.PeerFound)
    assert isinstance(answer, wire.Problem) and "is for servers that read here" in answer.message
    assert answer.id == getattr(message, "id", -1)
    assert client.alive()


def test_a_hang_up_is_no_death(embed: Embed) -> None:
    """A process that lives may still write where it was told to: its room is not given to others."""
    server = embed()
    control = observe(server)
    client = Client(server)
    assert isinstance(client.open(1), wire.Plan)
    assert control.status()["pool"]["half_written"] == 1
    client.connection.close()  # without a word: this process lives
    assert eventually(lambda: any(session.silent for session in server.server.sessions))
    assert control.status()["pool"]["half_written"] == 1
    client.conversation.dealer.close()
    quiet = Client(server)
    assert isinstance(quiet.open(2), wire.Plan)
    assert control.status()["pool"]["half_written"] == 2
    quiet.close()  # says that it touches the arena no more
    assert eventually(lambda: control.status()["pool"]["half_written"] == 1)
    control.close()
