"""Hand-offs that were given back, until the server has heard of it: over the next connection, if this one ends before.

A release has no answer, so that nobody waits for one. The server takes a client's messages in order: an answer to a
question that was asked later says that it has heard.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import zmq

from layerflow.agent.connection.handshake import Handshake
from layerflow.wire.messages import ReleaseHandoff

MAX_RELEASES = 4096
"""Past so many the oldest is given up."""
KEPT_S = 30.0
"""As long as servers keep a hand-off for a reader by default: its lease has ended it by then."""
LOOK_MS = 20
"""How often a full connection is looked at, while others may add to what is to be said."""

log = structlog.get_logger("layerflow.agent")


@dataclass(slots=True)
class _Release:
    """:param until: monotonic seconds. :param before: a number: an answer to a question with a larger one says that it
    was heard. :param said: over the connection that there is now."""

    message: ReleaseHandoff
    until: float
    before: int
    said: bool = False


class Releases:
    """Of one client. Any thread.

    :ivar unheard: how many were given up before they were said.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._releases: dict[str, _Release] = {}
        self.unheard = 0

    def __len__(self) -> int:
        return len(self._releases)

    def add(self, message: ReleaseHandoff, before: int) -> None:
        """Say this next.

        :param before: smaller than the number of each question that is asked from now on.
        """
        now = time.monotonic()
        with self._lock:
            self._releases.pop(message.handoff, None)
            self._releases[message.handoff] = _Release(message, now + KEPT_S, before)
            self._expire(now)
            self._give_up(len(self._releases) - MAX_RELEASES, f"{MAX_RELEASES} newer ones wait")

    def say(self, conversation: Handshake, until: float = 0.0, then: Callable[[], None] | None = None) -> None:
        """Say what was not said over this connection; where it is full, the rest next time.

        :param until: monotonic seconds: so long a full connection is waited for.
        :param then: called when nothing is left to be said, and before anything is added; or at `until`.
        :raises ServerLost: the connection has ended.
        """
        while True:
            with self._lock:
                self._expire(time.monotonic())
                full = not self._say(conversation)
                if not full or time.monotonic() >= until:
                    if then is not None:
                        then()
                    return
            conversation.dealer.poll(LOOK_MS, zmq.POLLOUT)

    def heard(self, number: int) -> None:
        """The server has answered a question of this number, which was asked over this connection."""
        with self._lock:
            while self._releases:
                name, oldest = next(iter(self._releases.items()))
                if not oldest.said or oldest.before >= number:
                    return
                del self._releases[name]

    def interrupted(self) -> None:
        """The connection has ended: who knows what the server has heard."""
        with self._lock:
            for release in self._releases.values():
                release.said = False

    def forget(self, name: str) -> None:
        """Its reader has come for it again."""
        with self._lock:
            self._releases.pop(name, None)

    def close(self) -> None:
        """Nobody connects any more."""
        with self._lock:
            self._give_up(len(self._releases), "their engine has hung up")

    def _say(self, conversation: Handshake) -> bool:
        for release in self._releases.values():
            if release.said:
                continue
            if not conversation.dealer.poll(0, zmq.POLLOUT):
                return False
            conversation.send(release.message)
            release.said = True
        return True

    def _expire(self, now: float) -> None:
        over = itertools.takewhile(lambda release: release.until <= now, self._releases.values())
        self._give_up(sum(1 for _ in over), "their leases have ended them by now")

    def _give_up(self, oldest: int, why: str) -> None:
        """So many."""
        names = list(itertools.islice(self._releases, max(0, oldest)))
        unheard = [name for name in names if not self._releases.pop(name).said]
        if unheard:
            self.unheard += len(unheard)
            log.warning("handoffs_not_released", handoffs=len(unheard), first=unheard[0], reason=why)
