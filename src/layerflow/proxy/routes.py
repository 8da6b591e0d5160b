"""The proxy's paths, on its port and on its admin socket, and what each of them answers."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

import anyio
import httpx
import msgspec
import structlog
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from layerflow.config.proxy import InstanceAddress, ProxySettings, instance_addresses
from layerflow.errors import ProxyError
from layerflow.http_server import SLOWEST_BODY
from layerflow.proxy.answers import ClientGone, ClientResponse, Send, error_body
from layerflow.proxy.context import AbortReason, BodyShare, OpenRequest, ProxyContext
from layerflow.proxy.instances import Instance, InstanceRole
from layerflow.proxy.legs import engine_headers
from layerflow.proxy.metaserver import read_posted
from layerflow.proxy.orders import serve
from layerflow.proxy.request import (
    CHAT,
    COMPLETIONS,
    NOT_JSON,
    header,
    headers_for_engines,
    passed_on,
    read_request,
    request_id_of,
)

# Bodies of requests, bounded in size and time, and of refusals.


_SMALL_BYTES = 4 << 20
_QUERY = "!$&'()*+,;=:@/?%"  # RFC 3986, and what is quoted already
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(receive: Receive, settings: ProxySettings, share: BodyShare, most: int | None = None) -> bytes:
    """The request's body.

    :param share: its share of what all bodies may have; it goes on after this.
    :param most: bytes that it may have, if not ``max_request_bytes``.
    :raises ProxyError: it is too large, does not come or comes too slowly, or there is no room for it.
    :raises ClientGone: the client left.
    """
    most = min(most or settings.max_request_bytes, settings.max_request_bytes)
    content = bytearray()
    began = heard = anyio.current_time()
    while True:
        silent_at = heard + settings.idle_timeout_s
        slow_at = began + settings.idle_timeout_s + len(content) / SLOWEST_BODY
        with anyio.CancelScope(deadline=min(silent_at, slow_at)) as share.waiting:
            message = await receive()
        if share.waiting.cancelled_caught and not share.given_up:
            if slow_at < silent_at:
                raise ProxyError(f"the request's body came at less than {SLOWEST_BODY} bytes/s", 408)
            raise ProxyError(f"the request's body did not come in {settings.idle_timeout_s:g} s", 408)
        if share.given_up:
            raise ProxyError(
                "the request's body was coming for longer than others when the proxy had no room left", 503
            )
        if message["type"] == "http.disconnect":
            raise ClientGone("while it sent its request")
        heard = anyio.current_time()
        piece = message.get("body", b"")
        share.add(len(piece))
        content += piece
        if len(content) > most:
            which = " (proxy.max_request_bytes)" if most == settings.max_request_bytes else ""
            raise ProxyError(f"the request is larger than {most} bytes{which}", 413)
        if not message.get("more_body"):
            share.complete()
            return bytes(content)


async def read_small_body(receive: Receive, context: ProxyContext) -> bytes:
    """The same for a path that has no stream to end: at most 4 MiB, and all of it within ``idle_timeout_s``.

    :raises ProxyError: also where the client left.
    """
    settings = context.settings
    try:
        with anyio.fail_after(settings.idle_timeout_s), context.bodies.share() as share:
            return await read_body(receive, settings, share, _SMALL_BYTES)
    except TimeoutError:
        raise ProxyError(f"the request's body did not come in {settings.idle_timeout_s:g} s", 408) from None
    except ClientGone as gone:
        raise ProxyError(f"the client left {gone}", 400) from None


def path_of(request: Request) -> str:
    """The request's path and query, for an engine."""
    query = request.scope["query_string"].decode("latin-1")
    return f"{request.scope['path']}?{quote(query, safe=_QUERY)}" if query else str(request.scope["path"])


def refusal(error: ProxyError) -> Response:
    """The error as every path tells it."""
    headers = {"retry-after": "1"} if error.status == 503 else None
    return Response(error_body(error), error.status, headers, media_type="application/json")


# What operators change while the proxy runs: its engines, and their prefix caches.


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
    given = (header(request.headers.raw, b"authorization") or "").removeprefix("Bearer ")
    # The bytes that came: what is not ASCII in a token has no encoding in HTTP, and clients send UTF-8.
    if not hmac.compare_digest(given.encode("latin-1"), token.encode()):
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

    async def _read(self, request: Request) -> tuple[InstanceRole, list[InstanceAddress]]:
        check_operator(request, self._context.settings.admin_token)
        raw = await read_small_body(request.receive, self._context)
        try:
            asked: Any = msgspec.json.decode(raw)
            role = InstanceRole(asked["type"])
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
        listed = {role.value: [instance.url for instance in self._context.instances.of(role)] for role in InstanceRole}
        return JSONResponse({"status": "ok", **listed})


# ``/v1/completions`` and ``/v1/chat/completions``.


_GONE_STATUS = "499"  # nginx's word for it, in the metrics only


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
        async with anyio.create_task_group() as tasks:
            with self._context.bodies.share() as share:
                response = ClientResponse(send, request_id, settings.idle_timeout_s, share)
                failure: ProxyError | None = None
                gone = False
                with anyio.CancelScope(deadline=anyio.current_time() + settings.request_timeout_s) as working:
                    with self._context.opened(working) as opened:
                        try:
                            if self._context.draining:
                                raise ProxyError("the proxy is stopping; ask another one", 503)
                            raw = await read_body(receive, settings, share)
                            tasks.start_soon(_watch, receive, opened, response)
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
                    gone = opened.cut is AbortReason.CLIENT_GONE
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
    if opened.cut is AbortReason.STOPPING:
        return ProxyError("the proxy stopped before the request had ended; ask another one", 503)
    return ProxyError(f"the request took longer than {timeout_s:g} s (proxy.request_timeout_s)", 504)


async def _watch(receive: Receive, opened: OpenRequest, response: ClientResponse) -> None:
    """End the request when its client leaves. A server says the same of a complete response: that ends nothing."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not response.complete:
        opened.end(AbortReason.CLIENT_GONE)


# What the proxy tells of itself and of its engines: health, metrics, models. Only operators are told addresses.


_QUESTION_S = 10.0  # for an engine's list of models
_SERVER_ERROR = 500


class Info:
    """GET only."""

    def __init__(self, context: ProxyContext) -> None:
        self._context = context

    async def health(self, request: Request) -> Response:
        """200 while requests are taken and a decoder is there; else 503, so that a load balancer sends nothing new."""
        context, addresses = self._context, self._is_operator(request)
        sides = {role: context.instances.of(role) for role in InstanceRole}
        told = {
            role.value: [instance.describe(addresses=addresses) for instance in found] for role, found in sides.items()
        }
        status = "ok"
        if context.draining:
            status = "draining"
        elif not any(instance.usable or instance.last_resort for instance in sides[InstanceRole.DECODE]):
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
        came = request.headers.raw
        try:
            headers = engine_headers(headers_for_engines(came), request_id_of(came))
        except ProxyError as error:
            return refusal(error)
        most = self._context.settings.max_request_bytes
        while True:
            try:
                instance = self._context.instances.pick(InstanceRole.DECODE, (), 0, tried)
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


# ``/v1/metaserver/{ticket}``: a decoder asks for the prefill of a request that it has.


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
        raw = await read_small_body(request.receive, self._context)
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


def make_app(context: ProxyContext) -> Starlette:
    """An ASGI application for clients. Who serves it also runs the probes; see :mod:`layerflow.proxy.serve`."""
    metaserver = MetaserverRoute(context)
    routes = [
        Route(COMPLETIONS, Completions(context, COMPLETIONS), methods=["POST"]),
        Route(CHAT, Completions(context, CHAT), methods=["POST"]),
        Route("/v1/models", Info(context).models),
        Route("/v1/metaserver/{ticket}", metaserver.post, methods=["POST"]),
    ]
    origins = context.settings.origins
    return _application([*routes, *_operating(context)], origins=origins, operators=False)


def make_admin_app(context: ProxyContext) -> Starlette:
    """An ASGI application for a socket that only operators can connect to."""
    return _application(_operating(context), origins=(), operators=True)


def _operating(context: ProxyContext) -> list[Route]:
    info, admin = Info(context), Admin(context)
    return [
        Route("/health", info.health),
        Route("/healthcheck", info.health),
        Route("/metrics", info.metrics),
        Route("/instances/add", admin.add, methods=["POST"]),
        Route("/instances/remove", admin.remove, methods=["POST"]),
        Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
    ]


def _application(routes: list[Route], *, origins: tuple[str, ...], operators: bool) -> Starlette:
    middleware = []
    if origins:
        middleware = [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _refused})
    app.state.operators = operators
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """What no path of the proxy answers, in the API's form."""
    assert isinstance(error, HTTPException)
    told = {404: "the proxy has no path", 405: f"{request.method} is no method of"}.get(error.status_code, error.detail)
    response = refusal(ProxyError(f"{told} {request.url.path[:200]}", error.status_code))
    response.headers.update(error.headers or {})
    return response
