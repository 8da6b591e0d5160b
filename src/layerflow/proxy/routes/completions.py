"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import anyio
import structlog

from layerflow.errors import ProxyError
from layerflow.proxy.context import Cut, OpenRequest, ProxyContext
from layerflow.proxy.orders.dispatch import serve
from layerflow.proxy.outlet import ClientGone, ClientResponse, Send
from layerflow.proxy.request import read_request, request_id_of
from layerflow.proxy.routes.bodies import Receive, read_body

_GONE_STATUS = "499"  # nginx's word for it, in the metrics only
_log = structlog.get_logger("layerflow.proxy")


class Completions:
    """An ASGI application: it watches its client while it answers.

    :param path: the API's path, here and at the engines.
    """

    def __init__(self, context: ProxyContext, path: str) -> None:
        self._context, self._path = context, path

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        settings = self._context.settings
        headers = scope["headers"]
        request_id = request_id_of(headers)
        response = ClientResponse(send, request_id, settings.idle_timeout_s)
        async with anyio.create_task_group() as tasks:
            failure: ProxyError | None = None
            gone = False
            with anyio.CancelScope(deadline=anyio.current_time() + settings.request_timeout_s) as working:
                with self._context.opened(working) as opened:
                    try:
                        if self._context.draining:
                            raise ProxyError("the proxy is stopping; ask another one", 503)
                        raw = await read_body(receive, settings)
                        tasks.start_soon(_watch, receive, opened)
                        request = read_request(self._path, headers, raw, request_id, settings.max_prompts)
                        await serve(self._context, request, response)
                    except ProxyError as error:
                        failure = error
                    except ClientGone:
                        gone = True
                    except Exception:  # noqa: BLE001 - one request's failure, told to its client
                        _log.exception("request_failed", request=request_id)
                        failure = ProxyError("the proxy failed; its log says how", 500)
            if working.cancelled_caught:
                gone = opened.cut is Cut.CLIENT_GONE
                failure = _cut_off(opened, settings.request_timeout_s)
            await self._end(response, failure, gone)
            tasks.cancel_scope.cancel()

    async def _end(self, response: ClientResponse, failure: ProxyError | None, gone: bool) -> None:
        metrics = self._context.metrics
        try:
            if not gone:
                if failure is not None:
                    if response.begun:
                        metrics.cut_streams.inc()
                    await response.fail(failure)
                await response.end()
        except ClientGone:
            gone = True
        if gone:
            metrics.clients_gone.inc()
        metrics.requests.labels(self._path, _GONE_STATUS if gone else str(response.status)).inc()


def _cut_off(opened: OpenRequest, timeout_s: float) -> ProxyError:
    if opened.cut is Cut.STOPPING:
        return ProxyError("the proxy stopped before the request had ended; ask another one", 503)
    return ProxyError(f"the request took longer than {timeout_s:g} s (proxy.request_timeout_s)", 504)


async def _watch(receive: Receive, opened: OpenRequest) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    opened.end(Cut.CLIENT_GONE)
