"""What the proxy tells of itself and of its engines: health, metrics, models. Only operators are told addresses."""

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
from layerflow.proxy.request import request_id_of
from layerflow.proxy.routes.admin import check_operator
from layerflow.proxy.routes.bodies import path_of, refusal

_QUESTION_S = 10.0  # for an engine's list of models
_SERVER_ERROR = 500


class Info:
    """GET only."""

    def __init__(self, context: ProxyContext) -> None:
        self._context = context

    async def health(self, request: Request) -> Response:
        """200 while requests are taken and a decoder is there; else 503, so that a load balancer sends nothing new."""
        context, addresses = self._context, self._is_operator(request)
        sides = {role: context.instances.of(role) for role in Role}
        told = {
            role.value: [instance.describe(addresses=addresses) for instance in found] for role, found in sides.items()
        }
        status = "ok"
        if context.draining:
            status = "draining"
        elif not any(instance.usable or instance.last_resort for instance in sides[Role.DECODE]):
            status = "no decode instance"
        content = {
            "status": status,
            "order": context.settings.order,
            "open_requests": len(context.requests),
            **told,
            **{f"{role.value}_instances": len(found) for role, found in sides.items()},
        }
        return JSONResponse(content, 200 if status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        text = self._context.metrics.render(addresses=self._is_operator(request))
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def models(self, request: Request) -> Response:
        """What a decoder answers."""
        tried: list[Instance] = []
        headers = engine_headers(request.headers.raw, request_id_of(request.headers.raw))
        most = self._context.settings.max_request_bytes
        while True:
            try:
                instance = self._context.instances.pick(Role.DECODE, (), 0, tried)
            except ProxyError as error:
                return refusal(error)
            try:
                with anyio.fail_after(_QUESTION_S):
                    answer, content = await instance.fetch("GET", path_of(request), most, headers)
            except (httpx.LocalProtocolError, httpx.InvalidURL) as error:
                return refusal(ProxyError(f"the request cannot be passed on: {error}", 400))
            except (httpx.HTTPError, TimeoutError):
                tried.append(instance)
                continue
            if answer.status_code >= _SERVER_ERROR or len(content) > most:
                tried.append(instance)
                continue
            response = Response(content, answer.status_code, media_type="application/json")
            response.raw_headers += [(name.lower(), value) for name, value in passed_on(answer.headers.raw)]
            return response

    def _is_operator(self, request: Request) -> bool:
        try:
            check_operator(request, self._context.settings.admin_token)
        except ProxyError:
            return False
        return True
