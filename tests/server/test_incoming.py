"""The book of objects on their way into the arena: of a tier, of peers and of steps that store them, as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import Mock

import pytest

from layerflow.errors import InvalidTransition
from layerflow.flow import Flow
from layerflow.flow.commands import (
    Arrived,
    Call,
    Commit,
    LayersStored,
    ObjectsLost,
    Revoke,
    RoomFreed,
    Submit,
    TransferDone,
)
from layerflow.flow.events import (
    BatchDone,
    Event,
    Hop,
    HostLost,
    IncomingFailed,
    LayersComputed,
    LayerShape,
    Limits,
    Part,
    SessionLost,
    SessionOpened,
    StepOpened,
)
from layerflow.pool.arena import Arena
from layerflow.pool.base import Owner
from layerflow.pool.memory import MemoryPool
from layerflow.server.handlers.following import view_of_handoff
from layerflow.server.incoming import AtPeer, IncomingFetches, IncomingObjects, IncomingSaves
from layerflow.wire.host_messages import Fetched, Pull, ToHost
from server.test_tier_jobs import LAYERS, NBYTES, STEP, key, new


class Server:
    """A pool, the core, a tier's host and a peers' that only listen, and a session whose steps save."""

    def __init__(self) -> None:
        self.pool = MemoryPool(Arena(16 * (NBYTES + 4096)))
        self.flow = Flow(Limits())
        self.sent: dict[Hop, list[ToHost]] = {Hop.FETCH: [], Hop.PEER: []}
        self.saved: list[bytes] = []
        self.batches: list[Submit] = []
        self.ended: list[int] = []
        self.incoming = IncomingObjects(self.pool, self.emit)
        self.tier = self._host(Hop.FETCH)
        self.peers = self._host(Hop.PEER)
        self.follows = IncomingSaves(self.incoming, lambda _, name: self.saved.index(name))
        self.emit([SessionOpened(STEP[0], (LayerShape(0, 512),) * LAYERS)])

    def _host(self, hop: Hop) -> IncomingFetches:
        def send(message: ToHost) -> bool:
            self.sent[hop].append(message)
            return True

        return IncomingFetches(self.incoming, send, lambda *_: None, hop=hop, ended=self.ended.append)

    def emit(self, events: Sequence[Event]) -> None:
        """As the driver does."""
        for event in events:
            for command in self.flow.handle(event, 0.0):
                match command:
                    case Call() | Arrived() | ObjectsLost() | RoomFreed() | LayersStored() | TransferDone():
                        self.incoming.obey(command)
                    case Submit():
                        self.batches.append(command)
                    case Commit():
                        self.pool.commit([self.saved[part] for part in command.parts], ("step", *STEP))
                    case Revoke():
                        keys = [self.saved[part] for part in command.parts]
                        self.follows.revoke_reservations(keys, ("step", *STEP), command.reason)
            self.flow.validate()

    def save(self, *names: int) -> None:
        """A step is about to save these, a request each."""
        self.saved = [key(name) for name in names]
        self.pool.reserve([new(name) for name in names], ("step", *STEP))
        parts = tuple(Part(str(name), 0, 2) for name in names)
        self.emit([StepOpened(*STEP, 9.0, 9.0, (), parts)])

    def store(self) -> None:
        """The step has computed all its layers, and they are saved."""
        self.emit([LayersComputed(*STEP, LAYERS)])
        while self.batches:
            batch = self.batches.pop(0)
            self.emit([BatchDone(batch.session, batch.batch)])

    def heard(self, source: IncomingFetches, hop: Hop) -> None:
        """A host ends the calls that it was given."""
        for message in [each for each in self.sent[hop] if isinstance(each, Pull)]:
            source.call_ended(Fetched(message.id, message.call, ()))


class Readers:
    """Is told of what is lent while it is stored."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def lent_stored(self, owner: Owner, keys: Sequence[bytes], layers: int) -> None:
        self.told.append((owner, list(keys), layers))

    def lent_whole(self, owner: Owner, keys: Sequence[bytes]) -> None:
        self.told.append((owner, list(keys), "whole"))

    def lent_lost(self, owner: Owner, keys: Sequence[bytes], reason: str) -> None:
        self.told.append((owner, list(keys), reason))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.pool.validate()


def all_of_them(server: Server) -> None:
    """Object 1 comes from the tier, 2 from a peer, 3 from a step."""
    server.save(3)
    server.tier.begin([new(1)], range(LAYERS), "engine")
    server.peers.begin([new(2)], range(LAYERS), "engine")
    server.follows.open([key(3), key(4)], 0, range(LAYERS))


def test_one_book_tells_where_an_object_will_be_whoever_brings_it(server: Server) -> None:
    all_of_them(server)
    assert list(server.incoming.coming) == [key(1), key(2), key(3)], "nobody brings object 4"
    sources = (server.tier, server.peers, server.follows)
    assert [each.job.source for each in server.incoming.coming.values()] == list(sources)
    assert [each.job.number for each in server.incoming.coming.values()] == [1, 2, 3], "in the order of their beginning"
    for at, source in enumerate(sources):
        assert [source.coming(key(name)) is not None for name in (1, 2, 3)] == [at == 0, at == 1, at == 2]
        assert (len(source), source.coming_objects) == (1, 1)
    assert server.tier.among([key(name) for name in (1, 2, 3, 4)]) == [True, False, False, False]
    place = server.incoming.coming[key(3)]
    assert (place.offset, place.blocks, place.position) == (*server.pool.room(key(3))[:2], 0)  # type: ignore[index]


def test_what_has_come_leaves_the_book_and_no_other(server: Server) -> None:
    all_of_them(server)
    server.heard(server.peers, Hop.PEER)
    assert list(server.incoming.coming) == [key(1), key(3)] and server.ended == [2]
    server.store()
    assert list(server.incoming.coming) == [key(1)]
    server.heard(server.tier, Hop.FETCH)
    assert not server.incoming.coming and not server.incoming.jobs and server.ended == [2, 1]
    assert server.pool.lookup([key(1), key(2), key(3)]) == [True, True, True]


def test_a_host_that_is_lost_takes_what_it_brings_and_nothing_else(server: Server) -> None:
    all_of_them(server)
    assert server.incoming.positions(1) == [0]
    server.emit([HostLost("the importer is gone", (Hop.PEER,))])
    assert list(server.incoming.coming) == [key(1), key(3)]
    server.heard(server.peers, Hop.PEER)
    assert server.pool.lookup([key(2)]) == [False], "what a dead host says counts no more"


def test_a_session_that_is_lost_takes_what_follows_it(server: Server) -> None:
    all_of_them(server)
    server.emit([SessionLost(STEP[0])])
    assert list(server.incoming.coming) == [key(1), key(2)] and len(server.follows) == 0
    assert server.pool.writer(key(3)) is None, "its room is free"


def test_leases_and_revocations_are_of_what_is_fetched(server: Server) -> None:
    all_of_them(server)
    server.incoming.lease([key(name) for name in (1, 2, 3, 4)], "request", 5.0)
    assert server.incoming.lease_owners() == {"request"}
    assert server.incoming.revoke("new weights", unwanted=True) == 0, "somebody wants them"
    assert server.incoming.revoke("purged") == 2
    assert list(server.incoming.coming) == [key(3)], "a step's saves are revoked with its step"
    for source, hop in ((server.tier, Hop.FETCH), (server.peers, Hop.PEER)):
        server.heard(source, hop)
    assert server.pool.lookup([key(1), key(2)]) == [False, False]


def test_what_is_lent_while_it_is_stored_is_told_by_layer_and_pinned_for_each_reader(server: Server) -> None:
    readers = server.follows.listener = Readers()
    server.save(3)
    lent = server.follows.lend([key(3), key(4)], 0, range(LAYERS), "one")
    assert lent[0] is not None and lent[1] is None, "nobody stores object 4"
    assert server.follows.lend([key(3)], 0, range(LAYERS), "other")[0] == lent[0], "it is one follow"
    server.follows.lend([key(3)], 0, range(LAYERS), "gone")
    server.follows.stop_lending("gone")
    server.store()
    whole = [told for told in readers.told if told[2] == "whole"]
    assert whole == [("one", [key(3)], "whole"), ("other", [key(3)], "whole")]
    layers = [told[2] for told in readers.told if told[0] == "one"]
    assert layers == [*range(1, LAYERS), "whole"]
    assert [server.pool.pinned_by(owner) for owner in ("one", "other", "gone")] == [1, 1, 0]


def test_what_is_lent_of_a_hand_off_comes_from_the_step_that_saves_it_or_is_told_to_be_lost(server: Server) -> None:
    readers = server.follows.listener = Readers()
    handoff = ("handoff", "h", 1)
    server.pool.reserve([new(5), new(6)], handoff)
    server.follows.lend([key(5), key(6)], 0, range(LAYERS), "reader")
    promised = server.incoming.coming[key(5)].job
    assert server.pool.take_reservation(new(5), handoff, ("step", *STEP)) is not None
    server.saved = [key(5)]
    opened = StepOpened(*STEP, 9.0, 9.0, (), (Part("5", 0, 2, awaited=True),))
    server.emit([opened, *server.follows.reservations_taken(STEP, 0, {key(5): 0})])
    assert server.incoming.coming[key(5)].job is not promised is server.incoming.coming[key(6)].job
    server.store()
    assert readers.told[-1] == ("reader", [key(5)], "whole")
    server.follows.revoke_reservations([key(6)], handoff, "its engine has ended it")
    assert readers.told[-1] == ("reader", [key(6)], "its engine has ended it")
    # Another hand-off may still wait for it: while the reader has its room, no lookup may promise it.
    other = Mock(pending={key(6), key(7)})
    promises = view_of_handoff(server.pool, other, server.follows.given_up)
    assert promises.lookup([key(5), key(6), key(7)]) == [True, False, True]
    server.follows.stop_lending("reader")
    assert promises.lookup([key(6)]) == [True], "a step may save it again"
    assert not server.incoming.jobs and server.pool.writer(key(6)) is None
    assert server.pool.pinned_by("reader") == 1, "until it is released"


async def test_who_waits_hears_of_the_end_of_all_of_them(server: Server) -> None:
    all_of_them(server)
    heard: list[str] = []
    server.incoming.when_come([key(4)], lambda: heard.append("unknown"))
    assert heard == ["unknown"], "it is not on its way"
    server.incoming.when_come([key(1), key(2)], lambda: heard.append("both"))
    server.heard(server.tier, Hop.FETCH)
    assert heard == ["unknown"]
    server.emit([HostLost("the importer is gone", (Hop.PEER,))])
    assert heard == ["unknown", "both"], "whatever became of it"


async def test_who_waits_no_longer_is_not_kept_until_the_objects_have_come(server: Server) -> None:
    server.tier.begin([new(1), new(2)], range(LAYERS), "engine")
    heard: list[int] = []
    forgets = [server.incoming.when_come([key(1), key(2)], lambda n=n: heard.append(n)) for n in range(100)]
    for forget in forgets:
        forget()
    assert not server.incoming._waiters
    server.heard(server.tier, Hop.FETCH)
    assert heard == []


async def test_who_has_waited_may_go_on_to_what_ends_the_rest(server: Server) -> None:
    """While the book is still at the command that has ended the wait."""
    server.tier.begin([new(1), new(2)], range(LAYERS), "engine")
    server.incoming.when_come([key(1)], lambda: server.emit([HostLost("it is gone")]))
    server.emit([IncomingFailed(1, ((0, "it is broken"),))])
    assert not server.incoming.coming and not server.incoming.jobs and server.ended == [1]
    assert server.pool.statistics().half_written == 0


def test_what_the_core_would_refuse_is_neither_begun_nor_kept(server: Server) -> None:
    lie = AtPeer(b"", {key(1): 0}, available=LAYERS + 1)
    with pytest.raises(InvalidTransition, match=f"{LAYERS + 1} layers are available of {LAYERS}"):
        server.peers.begin([new(1)], range(LAYERS), "engine", lie)
    assert not server.incoming.jobs and not server.incoming.coming and not server.sent[Hop.PEER]
    assert server.pool.statistics().half_written == 0
    assert server.peers.begin([new(1)], range(LAYERS), "engine") and key(1) in server.incoming.coming
