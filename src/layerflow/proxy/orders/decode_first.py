"""The decoder is asked first; once it has blocks it asks ``/v1/metaserver`` for the prefill (vLLM-Ascend)."""

from __future__ import annotations

from typing import Any

import anyio

from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.hosts import check_hosts
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
    context, request = exchange.context, exchange.request
    url = await context.metaserver_url(decoder)
    ended: Exception | None = None
    counted: set[int] = set()  # prompts

    async def run_job(prompt: int, posted: dict[str, Any], source: str, job: PrefillJob) -> None:
        nonlocal ended
        child = exchange.child(request.prompts[prompt] if request.prompts else None, counted=prompt not in counted)
        counted.add(prompt)
        try:
            await check_hosts(posted, {*decoder.hosts, source} - {""}, decoder.resolver)
            base_id = f"{request_id}-{prompt}" if request.prompts else request_id
            await child.prefill_anywhere(posted, lambda: exchange.leg_id(Role.PREFILL, base_id))
        except ProxyError as error:
            job.end(error)
            if not exchange.outlet.begun:
                ended = _PrefillLost(error)
                tasks.cancel_scope.cancel()
        else:
            exchange.prefill_ended()
            job.end(None)

    def start(prompt: int, posted: dict[str, Any], source: str, job: PrefillJob) -> None:
        tasks.start_soon(run_job, prompt, posted, source, job)

    async with anyio.create_task_group() as tasks:
        with context.metaserver.expecting(DecodeRequest(request, request_id, start)) as ticket:
            params = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": f"{url}/{ticket}"}
            try:
                await exchange.decode(decoder, params, request_id)
            except (ProxyError, ClientGone) as error:
                ended = error
            tasks.cancel_scope.cancel()
    if ended is not None:
        raise ended
