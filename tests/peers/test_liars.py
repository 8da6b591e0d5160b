"""A peer that says what cannot be: it costs this server its own connection at most, and no other peer's anything."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from layerflow.config.settings import Settings
from layerflow.errors import REASON_CHARS, ProtocolError
from layerflow.hosts.backend import ObjectStatus
from layerflow.pool.base import NewObject
from layerflow.server.peers.attachment import AttachmentState, PeerAttachment, PeerTarget
from layerflow.server.peers.handoffs import HandoffReading
from layerflow.server.peers.questions import Offer, Offers, PeerAnswer, PeerQuestions
from layerflow.server.peers.source import ModelCompatibility, PeerSource
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message
from layerflow.wire.packing import pack_u32, pack_u64
from layerflow.wire.peer_link import LINK_KEY_BYTES

KEYS = [bytes([number]) * 24 for number in (1, 2, 3)]
NBYTES, BLOCKS, LAYERS = 4096 + 64, 1, 2


class FakePeer:
    """An attachment that is up."""

    def __init__(self, name: str) -> None:
        self.target, self.welcome = SimpleNamespace(name=name), SimpleNamespace(incarnation=bytes(16))
        self.said: list[Message] = []
        self.up, self.reason, self.attempts, self.other_link = True, "", 1, False
        self.state = AttachmentState.UP

    def send(self, message: Message) -> bool:
        self.said.append(message)
        return True

    def endpoint(self) -> wire.PeerEndpoint:
        return wire.PeerEndpoint("tcp", "127.0.0.1:1", bytes(16), bytes(16), bytes(LINK_KEY_BYTES))


def attachment(name: str) -> PeerAttachment:
    return cast(PeerAttachment, FakePeer(name))


def found(number: int, lease: int, *, states: bytes = bytes([wire.STORED]), layers: int = 0) -> wire.PeerFound:
    """An answer; of all objects the same."""
    count = len(states)
    alike = (pack_u32([each] * count) for each in (BLOCKS, 16, layers, 0))
    nbytes = pack_u64([NBYTES] * count)
    return wire.PeerFound(
        number, lease, bytes(wire.PEER_TOKEN_BYTES), 60_000, states, nbytes, *alike, lease_key=bytes(LINK_KEY_BYTES)
    )


@pytest.mark.parametrize(
    "lie",
    [{"states": bytes([wire.OPEN + 1])}, {"token": b"short"}, {"lease_key": b""}, {"nbytes": b""}],
    ids=lambda lie: next(iter(lie)),
)
def test_a_lease_that_cannot_be_is_not_kept(lie: dict[str, Any]) -> None:
    offers = Offers()
    with pytest.raises(ProtocolError):
        offers.add(attachment("p"), KEYS[:1], msgspec.structs.replace(found(1, 7), **lie), time.monotonic(), 60.0)
    assert not len(offers) and not offers.objects


@pytest.mark.parametrize("late", [False, True], ids=["with its answer", "before it is fetched"])
def test_an_object_with_more_layers_than_its_group_is_broken_and_nothing_else_is(late: bool) -> None:
    offers, begun, failed = Offers(), [], []
    states = bytes([wire.OPEN] * 2)
    lease = offers.add(attachment("p"), KEYS[:2], found(1, 7, states=states, layers=1), time.monotonic(), 60.0)
    if late:
        lease.progressed([0], LAYERS + 1)
    else:
        lease.layers[0] = LAYERS + 1
    source: Any = SimpleNamespace(
        offered=lambda key: offers.get(key, time.monotonic()),
        _incoming=SimpleNamespace(coming={}),
        _read_failed=lambda *told: failed.append(told[:2]),
        fetches=SimpleNamespace(begin=lambda objects, *_: begun.append([new.key for new in objects])),
    )
    PeerSource.bring(source, [NewObject(key, NBYTES, BLOCKS, 16) for key in KEYS[:2]], range(LAYERS), "engine")
    assert (failed, begun) == ([(KEYS[0], ObjectStatus.BROKEN)], [[KEYS[1]]])


def test_news_of_more_objects_than_were_being_stored_is_refused_before_it_is_read() -> None:
    """A message of the largest size tells of millions."""
    offers, peer = Offers(), attachment("p")
    states = bytes([wire.STORED, wire.OPEN, wire.OPEN])
    lease = offers.add(peer, KEYS, found(1, 7, states=states), time.monotonic(), 60.0)
    source: Any = SimpleNamespace(offers=offers)
    with pytest.raises(ProtocolError, match="news of 3 objects; 2 of it"):
        PeerSource._progress(source, peer, wire.PeerProgress(7, pack_u32([1, 2, 1]), LAYERS))
    assert lease.layers == {1: 0, 2: 0}
    PeerSource._progress(source, peer, wire.PeerProgress(7, pack_u32([1, 2]), LAYERS))
    assert lease.layers == {1: LAYERS, 2: LAYERS}


class World:
    """What peers "a" and "b" are asked and have lent. :ivar told: answers to questions."""

    def __init__(self) -> None:
        self.offers = Offers()
        self.questions = PeerQuestions(self.offers, itertools.count(1))
        self.a, self.b = FakePeer("a"), FakePeer("b")
        self.told: list[PeerAnswer] = []

    def ask(self, peer: FakePeer, key: bytes, handoff: str = "") -> int:
        """Ask a peer for a key: the question's number."""
        self.questions.ask([as_peer(peer)], [key], self.told.append, timeout_s=60, lease_ms=60_000, handoff=handoff)
        return last_question(peer)

    def answer(self, peer: FakePeer, message: wire.PeerFound) -> None:
        self.questions.answered(as_peer(peer), message)

    def offered(self, key: bytes) -> Offer | None:
        return self.offers.get(key, time.monotonic())


def as_peer(peer: FakePeer) -> PeerAttachment:
    return cast(PeerAttachment, peer)


def last_question(peer: FakePeer) -> int:
    asked = peer.said[-1]
    assert isinstance(asked, wire.PeerLookup)
    return asked.id


async def test_a_lease_that_is_told_twice_ends_the_connection_and_leaves_no_offer() -> None:
    world = World()
    world.answer(world.a, found(world.ask(world.a, KEYS[0]), 7))
    number = world.ask(world.a, KEYS[1])
    with pytest.raises(ProtocolError, match="told twice"):
        world.answer(world.a, found(number, 7))
    for lease in list(world.offers.leases(as_peer(world.a))):  # as is done where a connection ends
        world.offers.forget(lease)
    assert not world.offers.objects
    world.answer(world.b, found(world.ask(world.b, KEYS[0]), 7))
    assert (offer := world.offered(KEYS[0])) is not None and offer.lease.peer is as_peer(world.b)


async def test_an_offer_whose_time_is_over_makes_room_and_a_key_that_is_lent_twice_is_forgotten() -> None:
    world = World()
    long_ago = time.monotonic() - 1000.0
    twice = [KEYS[0], KEYS[0]]
    old = world.offers.add(as_peer(world.a), twice, found(1, 1, states=bytes([wire.STORED] * 2)), long_ago, 60.0)
    assert world.offered(KEYS[0]) is None
    lease = world.offers.add(as_peer(world.b), KEYS[:1], found(2, 1), time.monotonic(), 60.0)
    world.offers.forget(old)
    assert (offer := world.offered(KEYS[0])) is not None and offer.lease is lease
    world.offers.forget(lease)
    both = world.offers.add(as_peer(world.a), twice, found(3, 2, states=bytes([wire.STORED] * 2)), long_ago, 60.0)
    world.offers.forget(both)
    assert not world.offers.objects


async def test_what_one_peer_refuses_is_its_own_question() -> None:
    world = World()
    number = world.ask(world.b, KEYS[0])
    world.questions.refused(as_peer(world.a), number, "said by another")
    assert not world.told
    world.answer(world.b, found(number, 2))
    assert world.told[-1].found == {KEYS[0]} and not world.told[-1].failed
    forget = world.questions.ask([as_peer(world.b)], KEYS[1:2], world.told.append, timeout_s=60, lease_ms=60_000)
    forget()
    number = last_question(world.b)
    world.questions.refused(as_peer(world.a), number, "said by another")
    world.answer(world.b, found(number, 3))
    assert world.b.said[-1] == wire.PeerRelease(3), "what comes too late is given back all the same"
    world.questions.ask([as_peer(world.b)], KEYS[1:2], world.told.append, timeout_s=60, lease_ms=60_000)
    number = last_question(world.b)
    world.questions.refused(as_peer(world.b), number, "no room")
    assert world.told[-1].reason == "no room" and world.told[-1].failed


async def test_what_one_peer_says_of_models_answers_no_other() -> None:
    spec = ModelSpec("m", "c", (GroupSpec("full", 4, (0,), (Plane("k", "uint8", (8,)),)),), chunk_tokens=16)
    models, a, b = ModelCompatibility(lambda: [spec], itertools.count(1)), FakePeer("a"), FakePeer("b")
    models.compare(as_peer(b), spec)
    models.answered(as_peer(a), wire.PeerCompared(1, "said by another"))
    models.answered(as_peer(b), wire.PeerCompared(1, "the dtype differs"))
    assert models.differences.get("a", {}) == {} and models.differences["b"] == {"m": "the dtype differs"}


LONG = "x" * (64 << 10)
CUT = f"{'x' * (REASON_CHARS - 3)}..."


async def test_what_a_peer_answers_has_a_short_reason() -> None:
    world = World()
    world.answer(world.a, msgspec.structs.replace(found(world.ask(world.a, KEYS[0]), 7), reason=LONG))
    assert world.told[-1].reason == CUT
    spec = ModelSpec("m", "c", (GroupSpec("full", 4, (0,), (Plane("k", "uint8", (8,)),)),), chunk_tokens=16)
    models = ModelCompatibility(lambda: [spec], itertools.count(1))
    models.compare(as_peer(world.a), spec)
    models.answered(as_peer(world.a), wire.PeerCompared(1, LONG))
    assert models.differences == {"a": {"m": CUT}}


def test_each_block_of_a_lease_that_a_peer_ends_has_a_short_reason() -> None:
    offers, peer, told = Offers(), attachment("p"), []
    lease = offers.add(peer, KEYS[:1], found(1, 7), time.monotonic(), 60.0)
    source: Any = SimpleNamespace(offers=offers, _give_up=lambda *given: told.append(given))
    PeerSource._progress(source, peer, wire.PeerProgress(7, b"", 0, reason=LONG))
    assert told == [(lease, f"peer p: {CUT}")] and not len(offers)


async def test_what_a_peer_refuses_and_why_it_is_lost_is_told_shortly() -> None:
    listener, target = Mock(), PeerTarget(name="p", address="ipc:///nowhere", link="tcp")
    peer = PeerAttachment(target, Mock(), bytes(16), name="here", max_bytes=1 << 20, listener=listener)
    peer._handle(wire.Problem(3, "no", LONG))
    listener.peer_refused.assert_called_once_with(peer, 3, CUT)
    peer.welcome = Mock()
    peer._fail(f"it refuses: {LONG}")
    listener.peer_lost.assert_called_once_with(peer, peer.reason)
    assert len(peer.reason) == REASON_CHARS
    peer.close()


async def test_a_lookup_of_a_hand_off_that_is_refused_gives_back_what_it_was_lent_itself() -> None:
    world = World()
    source: Any = SimpleNamespace(
        offers=world.offers,
        questions=world.questions,
        able=lambda *_: True,
        watch_leases=lambda: None,
        release=lambda lease: (world.offers.forget(lease), lease.peer.send(wire.PeerRelease(lease.number))),
        releases=SimpleNamespace(tell=lambda *_: None),
    )
    reading = HandoffReading(Settings, source)
    servers = [as_peer(world.a), as_peer(world.b)]
    until = time.monotonic() + 60
    reading.ask(servers, KEYS[:1], "h", world.told.append, until)
    world.answer(world.a, found(last_question(world.a), 1))
    world.answer(world.b, found(last_question(world.b), 1))
    assert not world.told[-1].failed and len(world.offers) == 2
    reading.ask(servers, KEYS[1:2], "h", world.told.append, until)
    late = last_question(world.b)
    world.answer(world.a, found(last_question(world.a), 2))
    world.questions.refused(as_peer(world.b), late, "peers.max_leases = 1024 leases are held")
    assert world.told[-1].failed and not world.told[-1].found
    assert [(lease.peer.target.name, lease.number) for lease in world.offers.leases()] == [("a", 1), ("b", 1)]
    assert world.a.said[-1] == wire.PeerRelease(2)
    reading.release("h", servers)
    assert not len(world.offers) and world.b.said[-1] == wire.PeerRelease(1)
