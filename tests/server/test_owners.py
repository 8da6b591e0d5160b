"""Servers that this one reads from, and that do not do what they should: they cost it little, and hold up nobody."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from e2e.known import eventually, small_spec

from layerflow.config.peers import MAX_ATTACHED
from layerflow.server import EmbeddedServer
from layerflow.server.peers import handoffs
from layerflow.server.peers import peers as peers_module
from layerflow.server.peers.attachment import PeerAttachment
from layerflow.server.peers.source import ModelCompatibility
from layerflow.spec import ModelSpec
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.packing import pack_u32, pack_u64
from server.raw import RawClient
from server.support import Embed, worker_on

SPEC = small_spec(2, content="owners")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An importer has all the time that a busy machine needs to start it."""
    monkeypatch.setattr(handoffs, "GRACE_S", 60.0)


class Owner:
    """A server that answers heartbeats, and lookups where it is told to.

    :param link: that it lends over; empty = it has no exporter.
    """

    def __init__(self, folder: Path, link: str, heartbeat_ms: int = 100) -> None:
        self.address = f"ipc://{folder}/owner-{os.urandom(4).hex()}"
        self.asked: list[wire.PeerLookup] = []
        self.compared: list[wire.PeerCompare] = []
        self.released: list[int] = []
        self.beats: list[float] = []  #: when each was sent
        self._link, self._heartbeat_ms = link, heartbeat_ms
        self._answers: list[tuple[bytes, wire.PeerFound]] = []
        self._who = b""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(self.address)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def answer(self, lookup: wire.PeerLookup, lease: int) -> None:
        """Lend all of what was asked, late as it may be."""
        n = len(lookup.keys) // 24
        one = pack_u32([1] * n)
        zeros = pack_u32([0] * n)
        states, nbytes = bytes([wire.STORED]) * n, pack_u64([1 << 12] * n)
        found = wire.PeerFound(
            lookup.id, lease, bytes(16), 1000, states, nbytes, one, one, zeros, zeros, lease_key=bytes(32)
        )
        self._answers.append((self._who, found))

    def _run(self) -> None:
        while not self._over.is_set():
            while self._answers:
                who, found = self._answers.pop()
                self._socket.send_multipart([who, codec.encode(found)])
            if not self._socket.poll(20):
                continue
            who, frame = self._socket.recv_multipart()
            if frame[:4] == codec.MAGIC:
                self._socket.send_multipart([who, codec.greeting()])
                continue
            match codec.decode_request(frame):
                case wire.PeerHello():
                    self._who = who
                    links = (
                        [wire.PeerEndpoint(self._link, "127.0.0.1:9", bytes(16), bytes(16), bytes(32))]
                        if self._link
                        else []
                    )
                    welcome = wire.PeerWelcome("0", bytes(16), self._heartbeat_ms, 60_000, 1 << 20, links)
                    self._socket.send_multipart([who, codec.encode(welcome)])
                case wire.PeerBeat(sent=sent):
                    self.beats.append(sent)
                    self._socket.send_multipart([who, codec.encode(wire.PeerBeat(sent))])
                case wire.PeerLookup() as lookup:
                    self.asked.append(lookup)
                case wire.PeerCompare() as compared:
                    self.compared.append(compared)
                case wire.PeerRelease(lease=lease):
                    self.released.append(lease)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()
        self._context.term()


@pytest.fixture
def owner_of(tmp_path: Path) -> Iterator[Callable[..., Owner]]:
    made: list[Owner] = []

    def make(link: str = "tcp", **more: int) -> Owner:
        made.append(Owner(tmp_path, link, **more))
        return made[-1]

    yield make
    for owner in made:
        owner.close()


def ask(client: RawClient, name: str, owner: str, follow_ms: int) -> None:
    client.say(client.lookup(name, [os.urandom(16)], handoff=name, servers=[owner], follow_ms=follow_ms))


def reason(client: RawClient) -> str:
    found = client.hear(wire.Found, 60.0)
    assert isinstance(found, wire.Found), found
    return found.reason


def learned(server: EmbeddedServer) -> dict[str, PeerAttachment]:
    return dict(server.call(lambda: server.server.peers.source.peers))


@pytest.mark.parametrize("link", ["nixl", ""], ids=["another link", "no exporter"])
def test_an_owner_that_cannot_be_read_fails_its_hand_offs_at_once(
    embed: Embed, owner_of: Callable[..., Owner], link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the lookup's own deadline, which is an hour here. An exporter alone has a moment to start anew."""
    monkeypatch.setattr(handoffs, "GRACE_S", 3600.0 if link else 0.1)
    server, owner = embed(peers__learn=True), owner_of(link)
    client = RawClient(server.context, server.endpoint, SPEC)
    for number in range(3):
        ask(client, f"h{number}", owner.address, 3_600_000)
    why = "it lends over nixl, and peers.link here is tcp" if link else "its exporter is not up"
    assert all(why in reason(client) for _ in range(3))
    assert server.call(lambda: server.server.accounts.nbytes) == 0
    client.close()


def test_an_owner_that_is_not_there_yet_is_asked_once_it_is(embed: Embed, owner_of: Callable[..., Owner]) -> None:
    """Lookups that wait are woken by what they wait for, an owner's welcome and an importer's start."""
    server = embed(peers__learn=True)
    client = RawClient(server.context, server.endpoint, SPEC)
    owner = owner_of()
    ask(client, "h", owner.address, 60_000)
    assert eventually(lambda: len(owner.asked) == 1)
    client.close()


def test_no_two_questions_of_an_owner_have_one_number(embed: Embed, owner_of: Callable[..., Owner]) -> None:
    """It refuses by the number alone: what is refused must be no other question."""
    server, owner = embed(peers__learn=True), owner_of()
    with worker_on(server, spec=SPEC):
        client = RawClient(server.context, server.endpoint, SPEC)
        ask(client, "h", owner.address, 60_000)
        assert eventually(lambda: owner.asked and owner.compared)
        assert owner.asked[0].id != owner.compared[0].id
        client.close()


def test_a_question_ends_with_its_client_and_a_late_lease_is_given_back(
    embed: Embed, owner_of: Callable[..., Owner]
) -> None:
    server, owner = embed(peers__learn=True), owner_of()
    client = RawClient(server.context, server.endpoint, SPEC)
    ask(client, "waits", owner.address, 3_600_000)
    assert eventually(lambda: len(owner.asked) == 1)
    ask(client, "late", owner.address, 3_000)
    assert eventually(lambda: len(owner.asked) == 2)
    questions = server.server.peers.source.questions  # type: ignore[union-attr]
    assert "no answer in time" in reason(client)
    assert eventually(lambda: server.call(lambda: len(questions._asked)) == 1), (
        "its keys are forgotten with its deadline"
    )
    client.close()
    assert eventually(lambda: server.call(lambda: len(questions._asked)) == 0)
    for lease, lookup in enumerate(owner.asked, 5):
        owner.answer(lookup, lease)
    assert eventually(lambda: sorted(owner.released) == [5, 6])
    assert server.call(lambda: (len(questions._late), len(server.server.peers.source.offers))) == (0, 0)


def test_comparisons_that_an_owner_does_not_answer_do_not_pile_up() -> None:
    """Engines come and go with a model each time, and the owner beats, but says nothing of their models."""
    here: list[ModelSpec] = []
    said: list[wire.PeerCompare] = []
    mute: Any = SimpleNamespace(target=SimpleNamespace(name="mute"), send=lambda message: said.append(message) or True)
    compatibility = ModelCompatibility(lambda: here, itertools.count(1))
    for number in range(100):
        spec = msgspec.structs.replace(small_spec(2, content=f"epoch {number}"), name=f"model {number // 50}")
        here[:] = [spec]
        for _ in range(3):  # its ranks
            compatibility.compare(mute, spec)
        if number == 40:
            compatibility.answered(mute, wire.PeerCompared(said[-1].id, "another dtype"))
            assert compatibility.differences["mute"] == {"model 0": "another dtype"}
    assert len(said) == 300
    assert len(compatibility._asked) == 1
    assert not compatibility.differences["mute"], "the model that differed is not here any more"


def test_servers_that_requests_name_make_room_for_each_other(
    embed: Embed, owner_of: Callable[..., Owner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "MAX_ATTACHED", 4)
    assert MAX_ATTACHED >= 4
    server, owner = embed(peers__learn=True), owner_of()
    client = RawClient(server.context, server.endpoint, SPEC)
    ask(client, "here", owner.address, 3_600_000)
    assert eventually(lambda: len(owner.asked) == 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        ask(client, f"gone{number}", f"ipc://{tmp_path}/gone-{number}", 100)
        assert "too many" not in reason(client)
    assert len(learned(server)) == 4
    assert owner.address in learned(server), "one that is asked something stays"
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3 * 8
    client.close()


def test_a_server_that_was_away_or_unused_for_long_is_forgotten(
    embed: Embed, owner_of: Callable[..., Owner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, owner = embed(peers__learn=True), owner_of()
    client = RawClient(server.context, server.endpoint, SPEC)
    ask(client, "gone", f"ipc://{tmp_path}/gone", 100)
    reason(client)
    ask(client, "here", owner.address, 300)
    reason(client)
    assert len(learned(server)) == 2
    monkeypatch.setattr(peers_module, "AWAY_S", 0.1)
    assert eventually(lambda: set(learned(server)) == {owner.address})
    monkeypatch.setattr(peers_module, "UNUSED_S", 0.1)
    assert eventually(lambda: not learned(server))
    ask(client, "again", owner.address, 3_600_000)
    assert eventually(lambda: any(each.handoff == "again" for each in owner.asked))
    client.close()


def test_what_an_owner_says_of_time_is_bounded(embed: Embed, owner_of: Callable[..., Owner]) -> None:
    server, owner = embed(peers__learn=True), owner_of(heartbeat_ms=0)
    client = RawClient(server.context, server.endpoint, SPEC)
    ask(client, "h", owner.address, 3_600_000)
    assert eventually(lambda: len(owner.asked) == 1)
    assert eventually(lambda: len(owner.beats) >= 20)
    beats = list(owner.beats)
    # By when they were sent: they come at once where this owner's thread stood still.
    assert len(beats) <= (beats[-1] - beats[0]) / 0.01 + 5
    client.close()
