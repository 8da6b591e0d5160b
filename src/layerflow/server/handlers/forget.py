"""Forgetting: what an engine has under way when its weights are replaced, and what operators want gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import structlog

from layerflow.flow.events import StepsRevoked
from layerflow.recording.format import Purged
from layerflow.server.mailboxes import Slices

if TYPE_CHECKING:
    from layerflow.server.clients import ClientSession
    from layerflow.server.handlers.context import ServerContext

REPLACED = "the engine's weights were replaced"
PURGED = "the pool was purged"
CLEAR_S = 10.0
"""How long the pool behind the arena may take to remove what it holds."""

KEYS_PER_SLICE = 512
"""Objects that a purge forgets before anything else may get its turn."""

log = structlog.get_logger("layerflow.server.handlers.forget")


def reset_engine(context: ServerContext, engine: str) -> Slices[dict[str, Any]]:
    """Nothing that `engine` has under way is loaded or published any more, and its leases are dropped.

    What is stored stays: other engines may have the weights that it was computed with, and this one asks for other keys
    from now on. When this returns the core knows of it, so no commit can follow, and lookups and hand-offs under way
    hit nothing any more; the slices that it returns end what these, and the leases, keep, and tell how much that was.
    """
    context.handoffs.lose_engine(engine, REPLACED)
    mine = [session for session in context.sessions if session.engine == engine]
    for session in mine:
        session.resets += 1
        session.hit_leases.clear()
    workers = [session.number for session in mine if session.memory]
    steps = sum(number in workers for number, _ in context.driver.steps())
    context.driver.handle(*(StepsRevoked(number, True, REPLACED) for number in workers))
    # Chosen before anything else has its turn: what the new weights hit stays.
    leases, plans = context.leases.end_all(engine), context.plans.reset(engine)

    def end() -> Slices[dict[str, Any]]:
        yield from context.handoffs.return_all()
        told = (yield from leases) + (yield from plans)
        context.driver.incoming.revoke(REPLACED, unwanted=True)
        log.info("engine_reset", engine=mine[0].name if mine else engine, steps=steps, leases=told)
        return {"steps": steps, "leases": told}

    return end()


async def purge(context: ServerContext, session: ClientSession, *, tier: bool) -> dict[str, Any]:
    """Empty the arena; with `tier`, also what lies behind it.

    Open saves and fetches under way are revoked. Objects that a load reads are hidden: it ends undisturbed, and their
    room returns then. What lies behind the arena is not offered until it is removed, or until that has failed: then
    what is left is offered again, and the answer says that some may be. Saves of steps that are opened meanwhile stay.
    """
    behind = context.sources if tier else None
    # From before the revoking: what is found behind the arena meanwhile would be fetched back into it.
    with behind.withheld() if behind is not None else contextlib.nullcontext():
        context.handoffs.purge(PURGED)
        while context.handoffs.returning:  # noqa: ASYNC110 - what returns is done in turns on this loop
            await asyncio.sleep(0)
        context.driver.handle(*(StepsRevoked(one.number, False, PURGED) for one in context.sessions if one.memory))
        revoked = context.driver.incoming.revoke(PURGED)
        if behind is not None:
            revoked += behind.revoke_writes(PURGED)
        keys = context.pool.keys()
        if context.recorder.current is not None:
            context.recorder.current.note(Purged(time.monotonic(), len(keys)))
        hidden = 0
        for start in range(0, len(keys), KEYS_PER_SLICE):
            hidden += context.pool.hide(keys[start : start + KEYS_PER_SLICE])
            await asyncio.sleep(0)
        told: dict[str, Any] = {"purged": hidden, "revoked": revoked}
        if behind is not None:
            cleared = await behind.clear(keys, CLEAR_S)
            if behind.tier is not None and cleared is not None:
                told["tier"] = {"backend": behind.tier.name, "purged": cleared.objects, "reason": cleared.reason}
    log.info("pool_purged", session=session.number, **told)
    return told
