"""``/v1/metaserver``: a decoder asks for the prefill of a request that it has."""

from __future__ import annotations

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from layerflow.errors import ProxyError
from layerflow.proxy.context import ProxyContext
from layerflow.proxy.routes.bodies import read_small_body, refusal


class MetaserverRoute:
    """Answers when the prefill has ended: 200, or 502 if it failed. 404: no such request; 504: not in time.

    A decoder may ask again; the prefill is done once.
    """

    def __init__(self, context: ProxyContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        try:
            posted = msgspec.json.decode(await read_small_body(request.receive, self._context.settings))
        except msgspec.DecodeError as error:
            return refusal(ProxyError(f"the body is not valid JSON: {error}", 400))
        except ProxyError as error:
            return refusal(error)
        child = posted.get("request_id") if isinstance(posted, dict) else None
        if not isinstance(child, str):
            return refusal(ProxyError("the body should be an object with request_id", 400))
        found = self._context.metaserver.find(child)
        if found is None:
            return refusal(ProxyError(f"no open request {child}: it has ended, or never came through this proxy", 404))
        decoding, prompt = found
        job = decoding.job(child, prompt, posted)
        timeout_s = self._context.settings.prefill_timeout_s
        try:
            with anyio.fail_after(timeout_s):
                await job.wait()
        except ProxyError as error:
            return refusal(ProxyError(f"the prefill of {child} failed: {error}", 502))
        except TimeoutError:
            return refusal(ProxyError(f"the prefill of {child} did not end in {timeout_s:g} s", 504))
        return JSONResponse({"status": "ok"})
