"""What operators change while the proxy runs: its engines, and their prefix caches."""

from __future__ import annotations

import hmac
from typing import Any

import anyio
import httpx
import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from layerflow.config.proxy import InstanceAddress, instance_addresses
from layerflow.errors import ProxyError
from layerflow.proxy.body import NOT_JSON
from layerflow.proxy.context import ProxyContext
from layerflow.proxy.instances.instance import Instance, Role
from layerflow.proxy.routes.bodies import path_of, read_small_body, refusal

_RESET_S = 60.0
_BODY_BYTES = 1 << 16  # of an engine's answer, which nobody reads
_log = structlog.get_logger("layerflow.proxy")


def check_operator(request: Request, token: str) -> None:
    """Refuse who does not show the token. Whoever has come over the admin socket needs none: its folder is private.

    Where a request comes from says nothing: what stands in front of the proxy may have passed it on.

    :param token: ``proxy.admin_token``.
    :raises ProxyError: 401; 403 where there is no token.
    """
    if request.app.state.operators:
        return
    if not token:
        raise ProxyError("this path answers on the proxy's admin socket only, until proxy.admin_token is set", 403)
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise ProxyError("this path needs the bearer token of proxy.admin_token", 401)


class Admin:
    """For operators: over the admin socket, or with ``proxy.admin_token``."""

    def __init__(self, context: ProxyContext) -> None:
        self._context = context

    async def add(self, request: Request) -> Response:
        """``{"type": "prefill", "instances": ["host:port", "http://host:port=tcp://host:port"]}``; one as text too."""
        try:
            role, addresses = await self._read(request)
            known = {instance.url for instance in self._context.instances.of(role)}
            twice = [address.url for address in addresses if address.url in known]
            if twice:
                raise ProxyError(f"{role.value} instance {twice[0]} is there already; nothing was added", 409)
        except ProxyError as error:
            return refusal(error)
        for address in addresses:
            self._context.instances.add(role, address)
            _log.info("instance_added", role=role.value, url=address.url)
        return self._listed()

    async def remove(self, request: Request) -> Response:
        """The same form. They get no new requests; what they have they finish."""
        try:
            role, addresses = await self._read(request)
            known = {instance.url for instance in self._context.instances.of(role)}
            missing = [address.url for address in addresses if address.url not in known]
            if missing:
                raise ProxyError(f"no {role.value} instance {missing[0]}; nothing was removed", 404)
        except ProxyError as error:
            return refusal(error)
        for address in addresses:
            self._context.instances.remove(role, address.url)
            _log.info("instance_removed", role=role.value, url=address.url)
        return self._listed()

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Every engine is told; 502 unless each has done it."""
        try:
            check_operator(request, self._context.settings.admin_token)
        except ProxyError as error:
            return refusal(error)
        self._context.instances.prefixes.clear()
        outcomes: dict[str, str] = {}

        async def reset(instance: Instance) -> None:
            try:
                with anyio.fail_after(_RESET_S):
                    answer, _ = await instance.fetch("POST", path_of(request), _BODY_BYTES)
                outcomes[instance.url] = "ok" if answer.is_success else f"HTTP {answer.status_code}"
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                outcomes[instance.url] = f"{type(error).__name__}: {error}".rstrip(": ")

        async with anyio.create_task_group() as tasks:
            for instance in self._context.instances.all:
                tasks.start_soon(reset, instance)
        well = all(outcome == "ok" for outcome in outcomes.values())
        return JSONResponse({"status": "ok" if well else "failed", "instances": outcomes}, 200 if well else 502)

    async def _read(self, request: Request) -> tuple[Role, list[InstanceAddress]]:
        check_operator(request, self._context.settings.admin_token)
        raw = await read_small_body(request.receive, self._context.settings)
        try:
            asked: Any = msgspec.json.decode(raw)
            role = Role(asked["type"])
            named = asked["instances"]
            addresses = instance_addresses(",".join([named] if isinstance(named, str) else named))
        except (*NOT_JSON, KeyError, TypeError, ValueError) as error:
            raise ProxyError(
                f'write {{"type": "prefill" or "decode", "instances": ["http://host:port"]}}: {error}', 400
            ) from None
        if not addresses:
            raise ProxyError("instances is empty: name at least one", 400)
        return role, addresses

    def _listed(self) -> Response:
        listed = {role.value: [instance.url for instance in self._context.instances.of(role)] for role in Role}
        return JSONResponse({"status": "ok", **listed})
