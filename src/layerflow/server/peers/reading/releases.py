"""Releases of hand-offs that servers keep to which this one is not attached now: told as soon as it is."""

from __future__ import annotations

import asyncio
import itertools
import time

import structlog

from layerflow.server.peers.reading.attachment import Attachment
from layerflow.wire.messages import PeerReleaseHandoff

MAX_WAITING = 4096
"""Past so many, of all servers together, the oldest is given up; its lease ends it."""

log = structlog.get_logger("layerflow.server.peers")


class PeerReleases:
    """Of one server, on its loop."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Attachment, str], float] = {}  # until when, monotonic seconds; oldest first
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def tell(self, peer: Attachment, name: str, until: float) -> None:
        """Now, or once it is attached; past `until` (monotonic seconds) no more."""
        self._waiting.pop((peer, name), None)
        if peer.up and peer.send(PeerReleaseHandoff(name)):
            return
        self._waiting[peer, name] = until
        surplus = len(self._waiting) - MAX_WAITING
        self._give_up(list(itertools.islice(self._waiting, max(0, surplus))), f"{MAX_WAITING} newer ones wait")
        if self._timer is None:
            self._watch()

    def peer_up(self, peer: Attachment) -> None:
        """It is attached: it is told."""
        for other, name in list(self._waiting):
            if other is peer and not peer.send(PeerReleaseHandoff(name)):
                return
            if other is peer:
                del self._waiting[peer, name]

    def wait_for(self, peer: Attachment) -> bool:
        """Is there something to tell this peer once it is attached?"""
        return any(other is peer for other, _ in self._waiting)

    def forget(self, peer: Attachment) -> None:
        """This peer is told nothing any more."""
        self._give_up([each for each in self._waiting if each[0] is peer], "it was away for too long")
        self._watch()

    def close(self) -> None:
        """Tell nobody any more."""
        self._waiting.clear()
        self._watch()

    def _watch(self) -> None:
        """Wake when the first one's time is up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            delay = max(0.0, min(self._waiting.values()) - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        now = time.monotonic()
        over = [waiting for waiting, until in self._waiting.items() if until <= now]
        self._give_up(over, "its lease has ended it by now")
        self._watch()

    def _give_up(self, waiting: list[tuple[Attachment, str]], why: str) -> None:
        for each in waiting:
            del self._waiting[each]
        if waiting:
            peer, name = waiting[0]
            log.warning("handoffs_not_released", handoffs=len(waiting), first=name, server=peer.target.name, reason=why)
