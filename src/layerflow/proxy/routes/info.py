"""What the proxy tells of itself and of its engines: health, metrics, models."""

from __future__ import annotations

import anyio
import httpx
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from layerflow.errors import ProxyError
from layerflow.proxy.context import ProxyContext
from layerflow.proxy.instances.instance import Instance, Role
from layerflow.proxy.legs.call import engine_headers, passed_on
from layerflow.proxy.routes.bodies import refusal

_QUESTION_S = 10.0  # for an engine's list of models
_SERVER_ERROR = 500


class Info:
    """GET only."""

    def __init__(self, context: ProxyContext) -> None:
        self._context = context

    async def health(self, _: Request) -> Response:
        """200 while requests are taken and a decoder is there; else 503, so that a load balancer sends nothing new."""
        context = self._context
        sides = {role: context.instances.of(role) for role in Role}
        status = "ok"
        if context.draining:
            status = "draining"
        elif not any(instance.usable for instance in sides[Role.DECODE]):
            status = "no decode instance"
        content = {
            "status": status,
            "order": context.settings.order,
            "open_requests": len(context.requests),
            **{role.value: [instance.describe() for instance in found] for role, found in sides.items()},
            **{f"{role.value}_instances": len(found) for role, found in sides.items()},
        }
        return JSONResponse(content, 200 if status == "ok" else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._context.metrics.render(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def models(self, request: Request) -> Response:
        """What a decoder answers."""
        tried: list[Instance] = []
        headers = engine_headers(request.headers.items(), request.headers.get("x-request-id", "models"))
        while True:
            try:
                instance = self._context.instances.pick(Role.DECODE, (), 0, tried)
            except ProxyError as error:
                return refusal(error)
            try:
                with anyio.fail_after(_QUESTION_S):
                    answer = await instance.client.get(request.url.path, params=request.url.query, headers=headers)
            except (httpx.HTTPError, TimeoutError):
                tried.append(instance)
                continue
            if answer.status_code >= _SERVER_ERROR:
                tried.append(instance)
                continue
            kept = {**dict(passed_on(answer.headers.multi_items())), "content-type": "application/json"}
            return Response(answer.content, answer.status_code, kept)
