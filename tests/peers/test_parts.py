"""The parts of hand-offs that peers keep: whose word ends them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from layerflow.errors import REASON_CHARS
from layerflow.server.handoffs.handoff import HandoffRecord, HandoffStatus
from layerflow.server.handoffs.registry import Handoffs
from layerflow.server.peers.attachment import PeerAttachment
from layerflow.server.peers.handoff_parts import HandoffParts
from layerflow.wire import messages as wire
from peers.test_liars import LONG, FakePeer


class World:
    """A hand-off of engine "p" that peer "a" keeps a part of; and peer "b"."""

    def __init__(self) -> None:
        self.given_up: list[str] = []
        kept = SimpleNamespace(watch=lambda *_: None, give_up=lambda _, why: self.given_up.append(why))
        self.parts = HandoffParts(cast(Handoffs, kept), itertools.count(1))
        self.a, self.b = FakePeer("a"), FakePeer("b")
        self.told: list[str] = []
        record: Any = SimpleNamespace(name="h", engine="p", parts=0, status=HandoffStatus.OPEN)
        opening = wire.OpenHandoff(9, "h", bytes(16), bytes(16), 16, b"", 0, 60_000)
        servers = [cast(PeerAttachment, self.a)]
        self.parts.open(cast(HandoffRecord, record), opening, servers, self.told.append)
        [opened] = self.a.said
        assert isinstance(opened, wire.PeerOpenHandoff)
        self.number = opened.id


@pytest.fixture
async def world() -> World:
    return World()


async def test_only_its_own_engine_ends_a_hand_off_at_its_peers(world: World) -> None:
    world.parts.ended(wire.EndHandoff("h", 0, "because I can"), "another engine")
    assert len(world.a.said) == 1
    world.parts.ended(wire.EndHandoff("h", 16, ""), "p")
    assert world.a.said[1:] == [wire.PeerEndHandoff("p", "h", 16, "")]


async def test_what_another_peer_refuses_fails_no_part(world: World) -> None:
    world.parts.refused(cast(PeerAttachment, world.b), world.number, "said by another")
    assert not world.told and not world.given_up
    world.parts.refused(cast(PeerAttachment, world.a), world.number, "no room")
    assert world.told == ["its part at a is refused: no room"] == world.given_up


async def test_a_part_that_fails_has_a_short_reason(world: World) -> None:
    state = wire.PeerHandoffState(world.number, "h", HandoffStatus.FAILED.value, LONG)
    world.parts.part_answered(cast(PeerAttachment, world.a), state)
    [why] = world.told
    assert world.given_up == [why] and len(why) < 2 * REASON_CHARS
