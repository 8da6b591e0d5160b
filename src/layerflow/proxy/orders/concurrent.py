"""Both legs at once: they share a ``transfer_id``, and the decoder follows the prefiller's saves layer by layer."""

from __future__ import annotations

import uuid
from typing import Any

import anyio

from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.instances.instance import Instance, Role
from layerflow.proxy.orders.exchange import Exchange
from layerflow.proxy.outlet import ClientGone

_VERSION = 1  # of what stands under "layerflow"


async def concurrent(exchange: Exchange) -> None:
    """Ask both; a prefill that fails before the first token ends both, and is tried again or left to the decoder.

    :raises ProxyError: the decoder failed, one of them refused, or the prompt is too long to be recomputed.
    """
    tried: list[Instance] = []
    failure: UpstreamError | None = None
    while True:
        try:
            prefiller = exchange.pick(Role.PREFILL, tried)
        except ProxyError as none:
            return await exchange.recompute(failure or none)
        failure = await _attempt(exchange, prefiller)
        if failure is None:
            return None
        if failure.judged:
            raise failure
        tried.append(prefiller)
        if len(tried) > exchange.prefill_retries:
            return await exchange.recompute(failure)
        exchange.context.metrics.retries.labels(Role.PREFILL.value).inc()


async def _attempt(exchange: Exchange, prefiller: Instance) -> UpstreamError | None:
    """One hand-off. Returns why its prefill failed, both legs ended; None = the client has its answer.

    :raises ProxyError: the decode failed. Another decoder gets the same hand-off, which may be claimed again.
    """
    transfer_id = f"xfer-{uuid.uuid4().hex}"
    deadline_s = exchange.context.settings.prefill_timeout_s
    asked: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "layerflow": {"v": _VERSION, "deadline_s": deadline_s},
    }
    handoff: dict[str, Any] = {"v": _VERSION, "handoff": transfer_id}
    if prefiller.servers:
        handoff["servers"] = list(prefiller.servers)
    claimed = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "layerflow": handoff,
    }
    lost: UpstreamError | None = None
    ended: ProxyError | ClientGone | None = None

    async def prefill_leg() -> None:
        nonlocal lost
        try:
            await exchange.prefill(prefiller, asked, exchange.leg_id(Role.PREFILL))
        except UpstreamError as error:
            # Once the client has a token the decoder has the whole prompt, and needs no prefill any more.
            if not exchange.outlet.begun:
                lost = error
                tasks.cancel_scope.cancel()

    async def attempt(instance: Instance, request_id: str) -> None:
        await exchange.decode(instance, claimed, request_id)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prefill_leg)
        try:
            await exchange.decode_anywhere(attempt)
        except (ProxyError, ClientGone) as error:
            ended = error
        tasks.cancel_scope.cancel()
    if ended is not None:
        raise ended
    return lost
