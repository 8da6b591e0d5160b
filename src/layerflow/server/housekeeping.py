"""The server's slow clock: leases that ran out, peers that fell silent, how late the loop runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from layerflow.server.server import Server

PERIOD_S = 0.25


async def housekeep(server: Server) -> None:
    """Run until cancelled. Loop lag is how much later than asked each round begins."""
    due = time.monotonic() + PERIOD_S
    while True:
        await anyio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        lag = max(0.0, now - due)
        server.metrics.loop_lag(lag)
        due = now + PERIOD_S
        server.pool.expire(now)
        # A server that was stopped for a while has not listened: it judges nobody by that time.
        limit = server.settings.server.liveness_ms / 1e3 + lag
        for session in server.sessions:
            if now - session.heard > limit:
                server.lose_silent(session)
