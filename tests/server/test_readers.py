"""What a server that reads may ask of this one: in turns, each key once, and every answer or its Problem comes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from e2e.hostile import U32, Hostile
from e2e.known import PATIENCE_S, eventually, small_spec
from e2e.partitions import TOKENS, everyone, leave

from layerflow.agent.values import Hit
from layerflow.errors import PoolError
from layerflow.keys import object_key
from layerflow.server import EmbeddedServer
from layerflow.server.clients import ClientSession
from layerflow.server.handlers.messages import Handlers
from layerflow.server.peers import lending
from layerflow.system import numbers
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.host_messages import Lend
from layerflow.wire.packing import unpack_u32, unpack_u64
from layerflow.wire.peer_link import PRINCIPAL_BYTES
from server.raw import RawClient, RawReader
from server.support import Embed, worker_on

SPEC = small_spec(2, content="readers")
BLOCKS = SPEC.chunk_tokens // SPEC.groups[0].block_size
Readers = Callable[..., RawReader]


@pytest.fixture
def reader_of() -> Iterator[Readers]:
    made: list[RawReader] = []

    def make(server: EmbeddedServer, name: str = "reader", pid: int = 1) -> RawReader:
        made.append(RawReader(server, name, pid))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


def stored(server: EmbeddedServer, tokens: int) -> list[bytes]:
    """A prompt's objects, stored here."""
    worker = worker_on(server, spec=SPEC, engine="p")
    chain = worker.prompt(tokens)
    worker.serve(chain)
    worker.agent.close()
    return [object_key(digest, 0, SPEC.shard) for digest in chain.digests]


def pinned(server: EmbeddedServer) -> int:
    return int(server.call(lambda: server.server.pool.statistics().pinned))


def leases(server: EmbeddedServer) -> int:
    return int(server.call(lambda: server.server.peers.lending.leases))


def test_a_key_that_is_named_again_is_lent_once(embed: Embed, reader_of: Readers) -> None:
    server = embed(peers__serve=True)
    keys = stored(server, 64)
    reader = reader_of(server)
    reader.look([keys[0]] * 4000 + keys)
    found = reader.hear(wire.PeerFound)
    assert sum(found.states) == len(keys) and found.states[0] == wire.STORED
    assert found.states[4001:] == bytes([wire.STORED]) * (len(keys) - 1)
    assert pinned(server) == len(keys)
    nbytes = int(unpack_u64(found.nbytes, len(found.states), "nbytes").sum())
    assert server.call(lambda: server.server.peers.lending.counts()["lent_bytes"]) == nbytes
    reader.say(wire.PeerRelease(found.lease))
    assert eventually(lambda: pinned(server) == 0)


def test_what_the_share_has_no_room_for_takes_no_pin_of_what_is_lent(embed: Embed, reader_of: Readers) -> None:
    server = embed(peers__serve=True)
    keys = stored(server, 64)
    reader = reader_of(server)
    share_objects(server, keys[0], 2.5)
    reader.look(keys)
    found = reader.hear(wire.PeerFound)
    assert list(found.states) == [wire.STORED] * 2 + [wire.MISSING] * (len(keys) - 2)
    assert found.reason == "peers.lease_share is lent"
    assert pinned(server) == 2, "a lease is a pin"


def share_objects(server: EmbeddedServer, key: bytes, objects: float) -> None:
    """Let leases pin so many objects of the size of this one."""
    probe = RawReader(server, "probe")
    probe.look([key])
    each = int(unpack_u64(probe.hear(wire.PeerFound).nbytes, 1, "nbytes")[0])
    probe.close()
    assert eventually(lambda: pinned(server) == 0)
    settings = server.server.settings
    share = objects * each / server.call(lambda: server.server._arena.nbytes)
    peers = settings.peers.model_copy(update={"lease_share": share})
    server.call(lambda: setattr(server.server, "settings", settings.model_copy(update={"peers": peers})))


def test_a_reader_alone_has_the_whole_share_and_another_one_its_part_of_it(embed: Embed, reader_of: Readers) -> None:
    server = embed(peers__serve=True, peers__lease_ms=3_600_000, server__liveness_ms=600_000)
    keys = stored(server, 64)[:4]
    share_objects(server, keys[0], 4.5)
    first = reader_of(server)
    leases_of_first = []
    for key in keys:
        first.look([key], 3_600_000)
        leases_of_first.append(first.hear(wire.PeerFound).lease)
    assert all(leases_of_first) and pinned(server) == 4
    first.say(wire.PeerBeat(1.0, leases_of_first[:1]))
    while first.hear(wire.PeerBeat).sent != 1.0:
        pass
    second, found = reader_of(server, "second", 2), list[wire.PeerFound]()

    def has_its_part() -> bool:
        second.look(keys)
        found.append(second.hear(wire.PeerFound))
        if sum(found[-1].states) < 2 and found[-1].lease:
            second.say(wire.PeerRelease(found[-1].lease))
        return sum(found[-1].states) == 2

    assert eventually(has_its_part), "at once, unless this machine has no time for the exporter"
    assert found[-1].reason == lending.ALL_LENT
    ended = [first.hear(wire.PeerProgress) for _ in range(2)]
    assert [each.lease for each in ended] == leases_of_first[1:3], "those that are not read, oldest first, and no more"
    assert all("equal part" in each.reason for each in ended)
    first.look(keys)
    assert not first.hear(wire.PeerFound).lease, "it has its part"
    second.say(wire.PeerRelease(found[-1].lease))
    assert eventually(lambda: server.call(lambda: len(server.server.peers.lending._leases)) == 2)
    first.look(keys[:2])
    assert sum(first.hear(wire.PeerFound).states) == 2, "nobody else wants it"


def test_what_nobody_waits_for_is_not_made_room_for(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is gone while it waits for leases to end leaves nothing."""
    server = embed(peers__serve=True, server__liveness_ms=600_000)
    monkeypatch.setattr(lending, "ROOM_S", 600.0)
    keys = stored(server, 64)[:2]
    share_objects(server, keys[0], 2.5)
    first, second = RawReader(server), RawReader(server, "second", 2)
    first.look(keys)
    assert first.hear(wire.PeerFound).lease
    lender = server.server.peers.lending
    with monkeypatch.context() as patched:
        patched.setattr(lender.exporting, "send", lambda _: True)
        second.look(keys[:1])
        assert eventually(lambda: server.call(lambda: len(lender._room_waited_for)) == 1)
        second.close()
        assert eventually(lambda: server.call(lambda: len(server.server.sessions.readers())) == 1)
        assert eventually(lambda: server.call(lambda: len(lender._room_waited_for)) == 0)
    first.close()
    for number in server.call(lambda: list(lender._leases)):
        server.call(lambda number=number: lender._withdrawn(number))
    assert eventually(lambda: (pinned(server), server.call(lambda: lender.counts()["lent_bytes"])) == (0, 0))


def test_a_key_that_has_all_places_of_readers_gives_one_to_another_key(embed: Embed, reader_of: Readers) -> None:
    server = embed(peers__serve=True, peers__max_readers=3, server__liveness_ms=600_000)
    keys = stored(server, 32)
    greedy = [reader_of(server, f"greedy-{number}") for number in range(3)]
    greedy[0].look(keys)
    assert greedy[0].hear(wire.PeerFound).lease
    with pytest.raises(AssertionError, match="max_readers = 3"):
        reader_of(server, "greedy-3")
    others = [reader_of(server, "other", 2)]
    told = greedy[1].hear(wire.Problem)
    assert (told.code, told.id) == ("too_many", -1) and "makes room" in told.message
    with pytest.raises(AssertionError, match="max_readers = 3"):
        reader_of(server, "other", 2)
    others[0].look(keys)
    assert others[0].hear(wire.PeerFound).lease
    assert leases(server) == 2, "who has leases goes last"


def test_no_lease_lasts_longer_unread_than_the_owner_keeps_it(embed: Embed, reader_of: Readers) -> None:
    server = embed(peers__serve=True, peers__lease_ms=60_000)
    worker = worker_on(server, spec=SPEC, engine="p")
    chain = worker.prompt(64)
    worker.serve(chain)
    p, reader = RawClient(server.context, server.endpoint, SPEC, "p"), reader_of(server)
    p.say(wire.OpenHandoff(9, "h", chain.parent(0), b"".join(chain.digests), len(chain), chain.tail, 1, 600_000))
    p.say(wire.EndHandoff("h", len(chain)))
    lender, handoffs = server.server.peers.lending, server.server.handoffs
    assert eventually(lambda: server.call(lambda: handoffs.statistics().complete) == 1)
    keys = [object_key(digest, 0, SPEC.shard) for digest in chain.digests]
    reader.look(keys, 3_600_000, "h", 60_000)
    found = reader.hear(wire.PeerFound)
    assert found.lease and found.lease_ms == 60_000
    now = time.monotonic()
    assert server.call(lambda: lender._ends.until(lender._leases[found.lease])) <= now + 60.0
    assert server.call(lambda: handoffs.due(handoffs.get("h"))) <= now + 60.0
    p.close()
    worker.agent.close()


def test_what_lies_here_in_pieces_of_another_size_is_lent_and_pinned_as_these_alone(
    embed: Embed, reader_of: Readers
) -> None:
    server = embed(peers__serve=True)
    [whole] = everyone(server.endpoint, 1, (6,), context=server.context)
    halves = everyone(server.endpoint, 2, (6,), context=server.context)
    for half in halves:
        half.run("w", half.agent.chain(range(TOKENS)), Hit(0), save=True)
    chain = whole.agent.chain(range(TOKENS))
    assert whole.agent.lookup("r", chain).tokens == TOKENS - 1, "they stand in for those of one rank"
    whole.agent.drop_lease("r")
    assert eventually(lambda: pinned(server) == 0)
    reader = reader_of(server)
    reader.look([object_key(digest, 0, whole.spec.shard) for digest in chain.digests])
    found = reader.hear(wire.PeerFound)
    assert not any(found.states) and not found.lease
    assert pinned(server) == 0, "what is not lent is not kept"
    reader.look([object_key(digest, 0, half.spec.shard) for half in halves for digest in chain.digests])
    found = reader.hear(wire.PeerFound)
    assert set(found.states) == {wire.STORED} and pinned(server) == 2 * len(chain.digests)
    reader.say(wire.PeerRelease(found.lease))
    assert eventually(lambda: pinned(server) == 0)
    leave([whole, *halves])


def test_a_lookup_that_raises_is_answered_and_keeps_nothing(
    embed: Embed, reader_of: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed(peers__serve=True)
    keys = stored(server, 64)
    reader = reader_of(server)

    def broken(*_: object, **__: object) -> None:
        raise OverflowError("a number that does not fit")

    with monkeypatch.context() as patched:
        patched.setattr(lending, "found_of", broken)
        number = reader.look(keys)
        problem = reader.hear(wire.Problem)
    assert problem.id == number and "a number that does not fit" in problem.message
    assert (leases(server), pinned(server)) == (0, 0)
    assert server.call(lambda: server.server.peers.lending.counts()["lent_bytes"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(server.server.pool, "copy_pins", lambda *_: (_ for _ in ()).throw(PoolError("a bug")))
        reader.look(keys)
        assert "a bug" in reader.hear(wire.Problem).message
    assert (leases(server), pinned(server)) == (0, 0)
    reader.look(keys)
    assert reader.hear(wire.PeerFound).lease


def test_others_have_their_turn_while_a_reader_asks(
    embed: Embed, reader_of: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order in which the server handles them, not by time: the first slice ends when the other has spoken."""
    handle, busy = Handlers.handle, list[bool]()

    def noting(self: Handlers, session: ClientSession, message: wire.ToServer, nbytes: int = 0) -> None:
        if isinstance(message, wire.Beat):
            busy.append(server.server.mailboxes.busy)
        handle(self, session, message, nbytes)

    monkeypatch.setattr(Handlers, "handle", noting)
    server = embed(peers__serve=True)
    reader, other = reader_of(server), RawClient(server.context, server.endpoint, SPEC, "other")
    begun, spoken = threading.Event(), threading.Event()
    pin = server.server.peers.lending._pin  # type: ignore[union-attr]

    def pin_once_spoken(*asked: object) -> str:
        begun.set()
        assert spoken.wait(PATIENCE_S)
        return pin(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(server.server.peers.lending, "_pin", pin_once_spoken)  # type: ignore[union-attr]
    keys = os.urandom(24 * wire.MAX_PEER_KEYS)
    asked = [reader.look([keys]) for _ in range(3)]
    assert begun.wait(PATIENCE_S)
    other.say(wire.Beat(1.0))
    spoken.set()
    assert isinstance(other.hear(wire.Beat), wire.Beat)
    assert busy == [True], "another client is answered while a reader's questions are under way"
    assert [reader.hear(wire.PeerFound).id for _ in asked] == asked
    other.conversation.dealer.close()


def test_questions_that_wait_are_bounded_and_end_with_their_reader(embed: Embed) -> None:
    server = embed(peers__serve=True, server__max_client_bytes=1 << 20, server__max_message_bytes=1 << 20)
    reader = RawReader(server)
    keys = [os.urandom(24) for _ in range(8192)]
    for _ in range(20):
        reader.look(keys, handoff="never", wait_ms=600_000)
    assert "server.max_client_bytes" in reader.hear(wire.Problem).message
    assert eventually(lambda: server.call(lambda: server.server.handoffs.statistics().announced) == 1)
    reader.close()
    assert eventually(lambda: server.call(lambda: server.server.handoffs.statistics().announced) == 0)
    assert eventually(lambda: server.call(lambda: server.server.accounts.nbytes) == 0), "it ends in slices"


def test_a_lease_ends_at_its_time_unless_it_is_renewed(embed: Embed, reader_of: Readers) -> None:
    server = embed(peers__serve=True, peers__lease_ms=60_000)
    keys = stored(server, 64)
    reader = reader_of(server)
    reader.look(keys, 60_000)
    asked = time.monotonic()
    lease = reader.hear(wire.PeerFound).lease

    def expire(now: float) -> None:
        server.call(lambda: server.server.peers.lending.expire(now))

    def expired() -> int:
        return int(server.call(lambda: server.server.peers.lending.counts()["expired_leases"]))

    expire(asked + 59.0)
    assert (expired(), pinned(server)) == (0, len(keys))
    reader.say(wire.PeerBeat(1.0, [lease, lease + 1]))
    while (beat := reader.hear(wire.PeerBeat)).sent != 1.0:
        pass
    assert list(beat.renew) == [lease], "it holds no other"
    renewed = time.monotonic()
    expire(asked + 60.0)
    assert expired() == 0
    expire(renewed + 60.0)
    assert expired() == 1 and eventually(lambda: (leases(server), pinned(server)) == (0, 0))
    reader.say(wire.PeerBeat(2.0, [lease]))
    while (beat := reader.hear(wire.PeerBeat)).sent != 2.0:
        pass
    assert not beat.renew, "what is over is not renewed"


def test_a_readers_name_on_the_link_tells_its_exporter_whose_it_is(embed: Embed, reader_of: Readers) -> None:
    server = embed(peers__serve=True)
    for name, pid in (("one", 1), ("two", 1), ("three", 2)):
        reader_of(server, name, pid)
    names = server.call(lambda: [reader.link_name for reader in server.server.sessions.readers()])
    assert len(set(names)) == 3
    one, two, three = (name[:PRINCIPAL_BYTES] for name in names)
    assert one == two != three


def test_a_lease_of_another_reader_is_not_released_or_renewed(embed: Embed, reader_of: Readers) -> None:
    server = embed(peers__serve=True)
    keys = stored(server, 64)
    reader, other = reader_of(server), RawReader(server, "other")
    reader.look(keys)
    lease = reader.hear(wire.PeerFound).lease
    other.say(wire.PeerRelease(lease))
    other.say(wire.PeerBeat(1.0, [lease]))
    while (beat := other.hear(wire.PeerBeat)).sent != 1.0:
        pass
    assert not beat.renew and leases(server) == 1
    other.close()
    assert eventually(lambda: server.call(lambda: len(server.server.sessions.readers())) == 1)
    assert leases(server) == 1 and pinned(server) == len(keys)


def test_readers_and_clients_have_numbers_of_one_kind(embed: Embed, reader_of: Readers) -> None:
    """What one has opened, such as a hand-off, is not ended with another."""
    server = embed(peers__serve=True)
    reader_of(server)
    client = RawClient(server.context, server.endpoint, SPEC, "client")
    numbers = server.call(lambda: [session.number for session in server.server.sessions.all()])
    assert len(set(numbers)) == 2 and client.number in numbers
    assert [session.number for session in server.server.sessions] == [client.number], "a reader is no client"
    client.close()


def test_pins_of_a_lease_stay_until_the_exporter_has_said_that_nothing_is_read(
    embed: Embed, reader_of: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed(peers__serve=True)
    keys = stored(server, 64)
    reader = reader_of(server)
    reader.look(keys)
    number = reader.hear(wire.PeerFound).lease
    lender = server.server.peers.lending
    lease, told = lender._leases[number], list[object]()
    monkeypatch.setattr(lender.exporting, "send", lambda message: told.append(message) or True)
    server.call(lambda: lender._withdrawn(number))
    assert lease.state is lending.PeerLeaseState.LENT, "the exporter was not asked to end it"
    server.call(lambda: lender._end(lease))
    server.call(lambda: lender._end(lease))
    assert lease.state is lending.PeerLeaseState.WITHDRAWN and len(told) == 1 and pinned(server) == len(keys)
    server.call(lambda: lender._withdrawn(number))
    assert (lease.state, leases(server), pinned(server)) == (lending.PeerLeaseState.OVER, 0, 0)
    monkeypatch.undo()


def test_what_is_asked_for_and_missing_costs_the_exporter_nothing_and_a_lease_is_its_readers(
    embed: Embed, reader_of: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed(peers__serve=True)
    [key, *_] = stored(server, 64)
    reader, lender, told = reader_of(server), server.server.peers.lending, list[Lend]()
    send = lender.exporting.send
    monkeypatch.setattr(lender.exporting, "send", lambda message: told.append(message) or send(message))
    reader.look([*(os.urandom(24) for _ in range(4000)), key])
    found = reader.hear(wire.PeerFound)
    [lend] = told
    assert (lend.keys, unpack_u32(lend.positions, 1, "positions").tolist()) == (key, [4000])
    account = server.call(lambda: server.server.sessions.readers()[0].account)
    assert account.entries == 1 and account.nbytes >= lending.LENT_BYTES
    reader.say(wire.PeerRelease(found.lease))
    assert eventually(lambda: server.call(lambda: account.entries) == 0)


def test_lookups_that_waited_together_get_no_more_leases_than_a_reader_or_client_may_have(
    embed: Embed, reader_of: Readers
) -> None:
    server = embed(peers__serve=True, peers__max_leases=2, server__max_leases=2)
    worker = worker_on(server, spec=SPEC, engine="p")
    chain = worker.prompt(64)
    worker.serve(chain)
    keys = [object_key(digest, 0, SPEC.shard) for digest in chain.digests]
    reader, client = reader_of(server), RawClient(server.context, server.endpoint, SPEC, "d")
    for number in range(4):
        reader.look(keys, handoff="h", wait_ms=20_000)
        more = {"root": chain.parent(0), "handoff": "h", "follow_ms": 20_000}
        client.say(client.lookup(f"r{number}", list(chain.digests), **more))
    client.beat()
    p = RawClient(server.context, server.endpoint, SPEC, "p")
    p.say(wire.OpenHandoff(9, "h", chain.parent(0), b"".join(chain.digests), len(chain), chain.tail, 0, 60_000))
    answers = [client.hear(wire.Found) for _ in range(4)]
    refused = [answer for answer in answers if isinstance(answer, wire.Problem)]
    assert len(refused) == 2 and all("server.max_leases = 2" in answer.message for answer in refused)
    assert eventually(lambda: leases(server) == 2)
    assert "peers.max_leases = 2" in reader.hear(wire.Problem).message
    assert "peers.max_leases = 2" in reader.hear(wire.Problem).message
    assert leases(server) == 2
    reader.say(wire.PeerBeat(1.0, [*range(9_000, 9_002), *reader_leases(server)]))
    while (beat := reader.hear(wire.PeerBeat)).sent != 1.0:
        pass
    assert not beat.renew, "numbers behind as many as a reader may have are not looked at"
    client.close()
    p.close()
    worker.agent.close()


def reader_leases(server: EmbeddedServer) -> list[int]:
    return server.call(lambda: sorted(server.server.sessions.readers()[0].leases))


@pytest.mark.parametrize("before", [1 << 16, 1 << 32, 1 << 63], ids=["2**16", "2**32", "2**63"])
@pytest.mark.parametrize("many", [6, pytest.param(1000, marks=pytest.mark.campaign)])
def test_follows_go_on_past_each_size_of_number(
    embed: Embed, reader_of: Readers, monkeypatch: pytest.MonkeyPatch, before: int, many: int
) -> None:
    """A server that runs for long: whatever only counts up does not end what it counts."""
    start = before - 3
    monkeypatch.setattr(numbers, "first", start)
    server = embed(peers__serve=True, pool__size="64MiB")
    worker = Hostile(server.context, server.endpoint, SPEC)
    scheduler = RawClient(server.context, server.endpoint, SPEC, "hostile")
    reader = reader_of(server)
    for number in range(start, start + many):
        assert hand_off(scheduler, worker, reader, number) == [wire.OPEN, wire.OPEN]
    assert leases(server) == many
    scheduler.close()
    worker.close()


def hand_off(scheduler: RawClient, worker: Hostile, reader: RawReader, number: int) -> list[int]:
    """One that is being stored when it is asked for: the states of its objects, as the reader is told."""
    digests, name = [os.urandom(16) for _ in range(2)], f"h-{number}"
    now = time.monotonic()
    scheduler.say(wire.OpenHandoff(number, name, bytes(16), b"".join(digests), 2 * SPEC.chunk_tokens, b"", 0, 60_000))
    state = scheduler.hear(wire.HandoffState)
    assert isinstance(state, wire.HandoffState) and state.state == "open", state
    save = wire.SavePart("r", 0, b"".join(digests), U32([BLOCKS] * 2), U32([SPEC.chunk_tokens] * 2), b"")
    worker.conversation.send(wire.OpenStep(number, now + 60, now + 60, [], [save]))
    while not isinstance(plan := codec.decode_reply(worker.conversation.receive(now + 20)), wire.Plan):
        assert not isinstance(plan, wire.Problem), plan
    asked = reader.look([object_key(digest, 0, SPEC.shard) for digest in digests], 60_000, name, 20_000)
    found = reader.hear(wire.PeerFound)
    assert found.id == asked and found.lease
    saves = unpack_u32(found.saves, 2, "saves").tolist()
    assert saves[0] == saves[1], "one step stores both"
    return list(found.states)
