"""The connection to a server that is read from, where that one says more than this one has time or room for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from layerflow.server.peers import attachment
from layerflow.server.peers.attachment import Dealer

MANY, NBYTES = 200, 256 << 10  # more than all buffers of sockets have room for
PATIENCE_S = 60.0


class Listener:
    """Reads what a peer says, each message for a second by its clock. :ivar turns: of the loop, messages of each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns: list[int] = []
        self.heard = asyncio.Event()

    def received(self, _: bytes) -> None:
        self.now += 1.0
        self.turns[-1] += 1
        self.heard.set()

    async def hear(self, count: int) -> None:
        """Until so many messages have come."""
        while sum(self.turns) < count:
            await asyncio.wait_for(self.heard.wait(), PATIENCE_S)
            self.heard.clear()


async def test_a_peer_that_says_much_is_read_in_turns_and_what_has_no_room_here_stays_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listener = Listener()
    monkeypatch.setattr(attachment, "time", SimpleNamespace(monotonic=lambda: listener.now))

    class Noting(Dealer):
        def _read(self) -> None:
            listener.turns.append(0)
            super()._read()

    endpoint = f"ipc://{tmp_path}/peer"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.SNDHWM, 1)
        peer.setsockopt(zmq.SNDTIMEO, 500)
        peer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1e3))
        peer.setsockopt(zmq.ROUTER_MANDATORY, 1)
        peer.bind(endpoint)
        dealer = Noting(context, endpoint, None, max_bytes=NBYTES, on_message=listener.received, hung_up=lambda: None)
        try:
            dealer.send(b"hello")
            who, _ = peer.recv_multipart()
            said = 0
            while said < MANY and send(peer, who):  # the loop stands still meanwhile
                said += 1
            assert said < MANY // 4, "the peer is held up"
            await listener.hear(said)
            assert max(listener.turns) == 1, "of a message that takes long the loop has others' turns before the next"
            peer.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1e3))
            assert send(peer, who), "there is room once it is read"
            await listener.hear(said + 1)
        finally:
            dealer.close()


def send(peer: zmq.Socket[bytes], who: bytes) -> bool:
    """False: the peer cannot send now."""
    try:
        peer.send_multipart([who, bytes(NBYTES)])
    except zmq.Again:
        return False
    return True
