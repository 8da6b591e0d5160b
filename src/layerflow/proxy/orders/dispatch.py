"""Which way a request goes: the order that is set, a decoder alone, or prompt by prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from layerflow.config.proxy import Order
from layerflow.proxy.context import ProxyContext
from layerflow.proxy.orders.concurrent import concurrent
from layerflow.proxy.orders.decode_first import decode_first
from layerflow.proxy.orders.exchange import Exchange
from layerflow.proxy.orders.lists import serve_list
from layerflow.proxy.orders.prefill_first import prefill_first
from layerflow.proxy.outlet import ClientResponse, Outlet
from layerflow.proxy.request import ClientRequest, decoder_alone
from layerflow.proxy.timings import Way

_ORDERS: Mapping[Order, Callable[[Exchange], Awaitable[None]]] = {
    "concurrent": concurrent,
    "prefill-first": prefill_first,
    "decode-first": decode_first,
}


async def serve(context: ProxyContext, request: ClientRequest, response: ClientResponse) -> None:
    """Answer a request.

    A list of prompts has a hand-off for each. A decoder that asks for its prefills (decode-first) asks for each by
    itself, so that it takes the list as it is; in the other orders the proxy sends one request per prompt.

    :raises ProxyError: it cannot be answered.
    """

    async def serve_prompt(part: ClientRequest, outlet: Outlet) -> None:
        await _serve_prompt(context, part, outlet)

    apart = request.prompts and context.settings.order != "decode-first" and decoder_alone(request.body) is None
    if apart:
        await serve_list(request, response, serve_prompt)
    else:
        await serve_prompt(request, response)


async def _serve_prompt(context: ProxyContext, request: ClientRequest, outlet: Outlet) -> None:
    exchange = Exchange(context, request, outlet)
    reason = decoder_alone(request.body)
    if reason is None and context.short_prompts.choose(exchange.tokens) is Way.ALONE:
        reason = "short"
    if reason is None:
        await _ORDERS[context.settings.order](exchange)
        return
    context.metrics.skipped.labels(reason).inc()
    exchange.way = Way.ALONE.value
    await exchange.decode_alone()
