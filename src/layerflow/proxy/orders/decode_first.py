"""The decoder is asked first; once it has blocks it asks ``/v1/metaserver`` for the prefill (vLLM-Ascend)."""

from __future__ import annotations

import uuid
from typing import Any

import anyio

from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.instances.instance import Instance, Role
from layerflow.proxy.metaserver import DecodeRequest, PrefillJob
from layerflow.proxy.orders.exchange import Exchange
from layerflow.proxy.outlet import ClientGone


class _PrefillLost(Exception):
    """A child's prefill failed before the first token."""

    def __init__(self, reason: ProxyError) -> None:
        super().__init__(str(reason))
        self.reason = reason


async def decode_first(exchange: Exchange) -> None:
    """Ask a decoder; prefill what its children ask for.

    :raises ProxyError: the decoder failed, one of them refused, or the prompt is too long to be recomputed.
    """

    async def attempt(instance: Instance, request_id: str) -> None:
        await _attempt(exchange, instance, request_id)

    try:
        await exchange.decode_anywhere(attempt)
    except _PrefillLost as lost:
        if isinstance(lost.reason, UpstreamError) and lost.reason.judged:
            raise lost.reason from None
        await exchange.recompute(lost.reason)


async def _attempt(exchange: Exchange, decoder: Instance, request_id: str) -> None:
    """One request at one decoder, with the prefills of its children; all end together."""
    context, metaserver = exchange.context, exchange.context.metaserver
    url = await context.metaserver_url(decoder)
    if metaserver.knows(exchange.request, request_id):
        request_id = f"{request_id}-{uuid.uuid4().hex[:12]}"
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "metaserver": url,
    }
    ended: Exception | None = None

    counted: set[int] = set()  # prompts

    async def run_job(prompt: int, posted: dict[str, Any], job: PrefillJob) -> None:
        nonlocal ended
        prompts = exchange.request.prompts
        child = exchange.child(prompts[prompt] if prompts else None, counted=prompt not in counted)
        counted.add(prompt)
        try:
            base_id = f"{request_id}-{prompt}" if prompts else request_id
            await child.prefill_anywhere(posted, lambda: exchange.leg_id(Role.PREFILL, base_id))
        except ProxyError as error:
            job.end(error)
            if not exchange.outlet.begun:
                ended = _PrefillLost(error)
                tasks.cancel_scope.cancel()
        else:
            exchange.prefill_ended()
            job.end(None)

    def start(prompt: int, posted: dict[str, Any], job: PrefillJob) -> None:
        tasks.start_soon(run_job, prompt, posted, job)

    async with anyio.create_task_group() as tasks:
        with metaserver.expecting(exchange.request, request_id, DecodeRequest(start)):
            try:
                await exchange.decode(decoder, params, request_id)
            except (ProxyError, ClientGone) as error:
                ended = error
            tasks.cancel_scope.cancel()
    if ended is not None:
        raise ended
