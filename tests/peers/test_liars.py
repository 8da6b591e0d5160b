"""A peer that says what cannot be: it costs this server its own connection at most, and no other peer's anything."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from layerflow.errors import ProtocolError
from layerflow.hosts.backend import ObjectStatus
from layerflow.pool.base import NewObject
from layerflow.server.peers.attachment import PeerAttachment
from layerflow.server.peers.questions import Offers
from layerflow.server.peers.source import PeerSource
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
        self.up, self.reason = True, ""

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
