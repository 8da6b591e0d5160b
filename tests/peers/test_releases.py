"""Releases that wait for a server to be attached: no loop looks for it, and there are only so many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from layerflow.server.peers import source
from layerflow.server.peers.attachment import PeerAttachment
from layerflow.server.peers.source import PeerReleases
from layerflow.wire.messages import PeerReleaseHandoff

LEASE_S = 30.0


class FakePeer:
    """An attachment. :ivar reads: how many messages it takes."""

    def __init__(self, name: str, reads: int = 1 << 30) -> None:
        self.target = SimpleNamespace(name=name)
        self.up, self.reads = False, reads
        self.told: list[str] = []

    def send(self, message: Any) -> bool:
        assert isinstance(message, PeerReleaseHandoff)
        if len(self.told) >= self.reads:
            return False
        self.told.append(message.handoff)
        return True


def tell(releases: PeerReleases, peer: FakePeer, name: str, lease_s: float = LEASE_S) -> None:
    releases.tell(cast(PeerAttachment, peer), name, time.monotonic() + lease_s)


def up(releases: PeerReleases, peer: FakePeer) -> None:
    peer.up = True
    releases.peer_up(cast(PeerAttachment, peer))


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Callable[[], None]]]:
    """What is called later, and after how long; by nobody but the test."""
    loop, noted = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def note(delay: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        noted.append((delay, call))
        return call_later(1e6, call)

    monkeypatch.setattr(loop, "call_later", note)
    return noted


async def test_a_server_is_told_as_it_attaches_and_is_not_looked_for(
    timers: list[tuple[float, Callable[[], None]]],
) -> None:
    releases, here, there = PeerReleases(), FakePeer("here"), FakePeer("there")
    here.up = True
    tell(releases, here, "a")
    tell(releases, there, "a")
    tell(releases, there, "b")
    assert (here.told, there.told, len(releases)) == (["a"], [], 2)
    assert len(timers) == 1 and timers[0][0] > LEASE_S / 2, "the one timer is that of the lease"
    up(releases, here)
    assert len(releases) == 2
    up(releases, there)
    assert (there.told, len(releases)) == (["a", "b"], 0)
    releases.close()


async def test_a_server_that_does_not_read_is_told_when_it_attaches_again() -> None:
    releases, peer = PeerReleases(), FakePeer("p", reads=1)
    peer.up = True
    for name in "abc":
        tell(releases, peer, name)
    assert (peer.told, len(releases)) == (["a"], 2)
    peer.reads = 2
    up(releases, peer)
    assert (peer.told, len(releases)) == (["a", "b"], 1)
    peer.reads = 3
    up(releases, peer)
    assert (peer.told, len(releases)) == (["a", "b", "c"], 0)
    releases.close()


async def test_when_its_time_is_up_nobody_is_told(
    timers: list[tuple[float, Callable[[], None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(source.time, "monotonic", lambda: now[0])
    releases, peer = PeerReleases(), FakePeer("p")
    tell(releases, peer, "short", 1.0)
    tell(releases, peer, "long")
    now[0] += 2.0
    timers[0][1]()
    assert len(releases) == 1 and len(timers) == 2 and timers[1][0] == pytest.approx(LEASE_S - 2.0)
    up(releases, peer)
    assert peer.told == ["long"]
    releases.close()


async def test_past_a_number_the_oldest_is_given_up() -> None:
    releases, one, other = PeerReleases(), FakePeer("one"), FakePeer("other")
    tell(releases, one, "oldest")
    for number in range(source.MAX_WAITING):
        tell(releases, other, f"h{number}")
    assert len(releases) == source.MAX_WAITING
    up(releases, one)
    up(releases, other)
    assert one.told == [] and len(other.told) == source.MAX_WAITING
    releases.close()
