"""The proxy's paths, on its port and on its admin socket."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from layerflow.errors import ProxyError
from layerflow.proxy.context import ProxyContext
from layerflow.proxy.request import CHAT, COMPLETIONS
from layerflow.proxy.routes.admin import Admin
from layerflow.proxy.routes.bodies import refusal
from layerflow.proxy.routes.completions import Completions
from layerflow.proxy.routes.info import Info
from layerflow.proxy.routes.metaserver import MetaserverRoute


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
