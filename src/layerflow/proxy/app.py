"""The proxy's paths."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from layerflow.proxy.context import ProxyContext
from layerflow.proxy.request import CHAT, COMPLETIONS
from layerflow.proxy.routes.admin import Admin
from layerflow.proxy.routes.completions import Completions
from layerflow.proxy.routes.info import Info
from layerflow.proxy.routes.metaserver import MetaserverRoute


def make_app(context: ProxyContext) -> Starlette:
    """An ASGI application. Who serves it also runs the probes; see :mod:`layerflow.proxy.serve`."""
    info, admin, metaserver = Info(context), Admin(context), MetaserverRoute(context)
    return Starlette(
        routes=[
            Route(COMPLETIONS, Completions(context, COMPLETIONS), methods=["POST"]),
            Route(CHAT, Completions(context, CHAT), methods=["POST"]),
            Route("/v1/models", info.models),
            Route("/v1/metaserver", metaserver.post, methods=["POST"]),
            Route("/health", info.health),
            Route("/healthcheck", info.health),
            Route("/metrics", info.metrics),
            Route("/instances/add", admin.add, methods=["POST"]),
            Route("/instances/remove", admin.remove, methods=["POST"]),
            Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
        ]
    )
