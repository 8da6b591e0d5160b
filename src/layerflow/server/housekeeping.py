"""The server's slow clock: leases that ran out, peers that fell silent, how late the loop runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import structlog

if TYPE_CHECKING:
    from layerflow.server.clients.sessions import ClientSession
    from layerflow.server.handlers.context import ServerContext

PERIOD_S = 0.25

log = structlog.get_logger("layerflow.server")


MOST_BEHIND_S = 10.0
"""A lease is kept no longer than so for messages that wait to be read, in seconds: some client may never stop sending.
The control socket reads its clients in turn, so that messages of the others do not wait so long."""


class LeaseClock:
    """Until when leases have run out, so that a pause of the server costs nobody a lease.

    What clients sent while the server was stopped may use leases: none runs out before a round that began in time has
    found everything read. After a pause leases run out later by its length.

    :param lease_s: how long leases usually last, in seconds: for so long after a pause it is added.
    """

    def __init__(self, now: float, lease_s: float) -> None:
        self._lease_s = lease_s
        self._caught_up = now
        self._pause = 0.0
        self._pause_counts_until = now

    def expired(self, now: float, lag: float, caught_up: bool) -> float:
        """Leases that ended at or before this time have run out. Monotonic seconds.

        :param lag: how much later than asked this round began.
        :param caught_up: every message that has come is handled.
        """
        if now >= self._pause_counts_until:
            self._pause = 0.0
        if lag >= PERIOD_S:
            self._pause += lag
            self._pause_counts_until = now + self._lease_s
            # What came during the pause may not even have reached the inbox yet.
            self._caught_up = max(self._caught_up, now - lag - PERIOD_S)
            return min(self._caught_up, now - self._pause)
        if caught_up:
            self._caught_up = now
        return min(max(self._caught_up, now - MOST_BEHIND_S), now - self._pause)


async def housekeep(
    server: ServerContext,
    lease_s: float,
    caught_up: Callable[[], bool],
    lose_silent: Callable[[ClientSession], None],
) -> None:
    """Run until cancelled. Loop lag is how much later than asked each round begins.

    :param lease_s: how long leases usually last.
    :param caught_up: every message that has come is handled.
    :param lose_silent: told of sessions of which nothing was heard for too long.
    """
    due = time.monotonic() + PERIOD_S
    leases = LeaseClock(time.monotonic(), lease_s)
    while True:
        await anyio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        lag = max(0.0, now - due)
        server.metrics.loop_lag(lag)
        due = now + PERIOD_S
        try:
            expired = leases.expired(now, lag, caught_up())
            server.pool.expire(expired)
            server.handoffs.expire(expired)
            server.driver.follows.expire(now)
            server.sessions.accounts.return_memory()
            # A server that was stopped for a while has not listened: it judges nobody by that time.
            limit = server.settings().liveness_ms / 1e3 + lag
            if server.peers is not None:
                server.peers.look_after(lag)
            for session in server.sessions:
                if now - session.heard > limit:
                    lose_silent(session)
        except Exception:
            # What is not done in this round is done in the next one, 0.25 s later.
            server.metrics.housekeeping_failed()
            log.exception("housekeeping_failed")
