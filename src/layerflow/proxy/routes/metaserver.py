"""``/v1/metaserver/{ticket}``: a decoder asks for the prefill of a request that it has."""

from __future__ import annotations

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from layerflow.errors import ProxyError
from layerflow.proxy.context import ProxyContext
from layerflow.proxy.metaserver import read_posted
from layerflow.proxy.routes.bodies import read_small_body, refusal


class MetaserverRoute:
    """Answers when the prefill has ended: 200, or 502 if it failed. 404: no such request; 504: not in time.

    A decoder may ask again; the prefill is done once.
    """

    def __init__(self, context: ProxyContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except ProxyError as error:
            return refusal(error)

    async def _answer(self, request: Request) -> Response:
        """:raises ProxyError: for any other status than 200."""
        decoding = self._context.metaserver.find(request.path_params.get("ticket", ""))
        if decoding is None:
            raise ProxyError("no open request has this address: it has ended, or never came through this proxy", 404)
        raw = await read_small_body(request.receive, self._context.settings)
        posted = read_posted(raw)
        name = posted["request_id"]
        child = decoding.child(name)
        if child is None:
            raise ProxyError(f"this address is not the one of request {name!r:.200}", 404)
        source = request.client.host if request.client else ""
        job, timeout_s = decoding.job(child, posted, source), self._context.settings.prefill_timeout_s
        try:
            with anyio.fail_after(timeout_s):
                await job.wait()
        except ProxyError as error:
            status = 429 if error.status == 429 else 502
            raise ProxyError(f"the prefill of {name:.200} failed: {error}", status) from None
        except TimeoutError:
            raise ProxyError(f"the prefill of {name:.200} did not end in {timeout_s:g} s", 504) from None
        return JSONResponse({"status": "ok"})
