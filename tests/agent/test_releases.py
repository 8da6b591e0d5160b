"""Hand-offs that are released while the server is away, or dies with what it was told."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from e2e.known import eventually, small_spec

from layerflow.agent import Control, Follow, client
from layerflow.agent.client import Releases
from layerflow.agent.handshake import Handshake
from layerflow.agent.lookups import Lookups
from layerflow.config.settings import Settings
from layerflow.keys import Chain, root_digest
from layerflow.server import EmbeddedServer
from layerflow.server.handlers import messages
from layerflow.wire.messages import ReleaseHandoff

SPEC = small_spec()
PATIENCE_S = 20.0
SETTINGS = Settings(pool={"size": "4MiB"}, server={"drain_timeout_s": 0.1})
PROMPT = Chain(root_digest(SPEC.fingerprint), range(40), SPEC.chunk_tokens)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="layerflow-") as folder:
        yield f"ipc://{Path(folder)}/control"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What servers hear of releases."""
    heard: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(messages, "release_handoff", lambda _, said: heard.append((said.handoff, list(said.servers))))
    return heard


def lookups_at(endpoint: str) -> Lookups:
    return Lookups(endpoint, "D", SPEC, timeout_s=PATIENCE_S)


def test_a_scheduler_that_calls_nothing_more_is_heard_by_the_next_server(
    endpoint: str, told: list[tuple[str, list[str]]]
) -> None:
    with EmbeddedServer(SETTINGS, endpoint):
        lookups = lookups_at(endpoint)
        assert lookups.wait_connected(PATIENCE_S)
    lookups.release_handoff("a", ["ipc:///elsewhere"])
    lookups.release_handoff("b")
    assert not told
    with EmbeddedServer(SETTINGS, endpoint):
        assert eventually(lambda: told == [("a", ["ipc:///elsewhere"]), ("b", [])]), told
        lookups.close()
    assert lookups.unheard_releases == 0


def test_a_server_that_dies_before_it_answers_leaves_the_release_to_the_next(
    endpoint: str, told: list[tuple[str, list[str]]]
) -> None:
    """It was sent, and nobody knows whether it was read."""
    with EmbeddedServer(SETTINGS, endpoint):
        lookups = lookups_at(endpoint)
        assert lookups.wait_connected(PATIENCE_S)
        lookups.release_handoff("h")
        assert eventually(lambda: told == [("h", [])])
    with EmbeddedServer(SETTINGS, endpoint):
        assert eventually(lambda: lookups.ask("r", PROMPT) and told == [("h", []), ("h", [])]), told
        lookups.close()


def test_what_a_server_has_answered_after_is_not_said_again(endpoint: str, told: list[tuple[str, list[str]]]) -> None:
    with EmbeddedServer(SETTINGS, endpoint):
        control = Control(endpoint, "D", SPEC)
        assert control.connect(PATIENCE_S)  # a release waits for that no longer than a lookup
        control.release_handoff("heard")
        control.status(PATIENCE_S)
    control.release_handoff("unheard")
    with EmbeddedServer(SETTINGS, endpoint):
        control.status(PATIENCE_S)
        assert told == [("heard", []), ("unheard", [])]
        control.close()
    assert control.unheard_releases == 0


def test_one_that_is_asked_for_again_is_not_released(endpoint: str, told: list[tuple[str, list[str]]]) -> None:
    lookups = lookups_at(endpoint)
    lookups.release_handoff("again")
    lookups.release_handoff("over")
    lookups.ask("r", PROMPT, Follow(0.0, "again"))
    with EmbeddedServer(SETTINGS, endpoint):
        assert lookups.wait_connected(PATIENCE_S)
        assert eventually(lambda: told == [("over", [])]), told
        lookups.close()


def test_a_client_that_leaves_says_what_nobody_has_heard(endpoint: str) -> None:
    control = Control(endpoint, "D", SPEC)
    control.release_handoff("h")
    assert control.unheard_releases == 0
    control.close()
    assert control.unheard_releases == 1


def test_so_many_are_kept_and_each_until_its_lease_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    kept = Releases()
    for number in range(client.MAX_RELEASES + 3):
        kept.add(ReleaseHandoff(f"h{number}"), number)
    assert (len(kept), kept.unheard) == (client.MAX_RELEASES, 3)
    now[0] += client.KEPT_S
    kept.add(ReleaseHandoff("late"), 10_000)
    assert (len(kept), kept.unheard) == (1, client.MAX_RELEASES + 3)


def test_a_full_connection_takes_the_rest_when_it_is_read() -> None:
    """More than a socket's queues hold, to a server that reads only later."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    reader.setsockopt(zmq.RCVHWM, 10)
    dealer.setsockopt(zmq.SNDHWM, 10)
    reader.bind("inproc://here")
    dealer.connect("inproc://here")
    try:
        kept, conversation, over = Releases(), Handshake(dealer), []
        for number in range(100):
            kept.add(ReleaseHandoff(f"h{number}"), number)
        kept.say(conversation, on_done=lambda: over.append("at once"))
        assert over == ["at once"]
        frames = []
        while len(frames) < 100:
            assert reader.poll(PATIENCE_S * 1e3)
            while reader.poll(0):
                frames.append(reader.recv_multipart()[1])
            kept.say(conversation)
        assert len(set(frames)) == 100
        kept.acknowledged(50)
        assert len(kept) == 50
        kept.interrupted()
        kept.acknowledged(1000)
        assert len(kept) == 50, "what is not said over this connection cannot have been heard"
    finally:
        dealer.close(0)
        reader.close(0)
        context.term()
