"""HTTP beside the control socket: ``/healthz``, ``/metrics``, ``/status``. Read-only, on the server's own loop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anyio
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from layerflow.errors import ConfigError

# The exposition format of prometheus_client.generate_latest for names without colons or UTF-8.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BACKLOG = 64
_SHUTDOWN_S = 1


def make_app(
    status: Callable[[], Mapping[str, Any]], metrics: Callable[[], bytes], health: Callable[[], Mapping[str, Any]]
) -> Starlette:
    """The three endpoints.

    :param status: what ``/status`` says, JSON-ready.
    :param metrics: what ``/metrics`` says, Prometheus text.
    :param health: what ``/healthz`` says. Its ``status`` is ``"ok"`` or, while the server starts or drains, something
        else: the answer is 503 then, so that a load balancer sends nothing new.
    """

    async def healthz(_: Request) -> Response:
        found = health()
        return _json(found, 200 if found["status"] == "ok" else 503)

    async def show_metrics(_: Request) -> Response:
        return Response(metrics(), headers={"content-type": METRICS_TYPE})

    async def show_status(_: Request) -> Response:
        return _json(status(), 200)

    return Starlette(
        routes=[Route("/healthz", healthz), Route("/metrics", show_metrics), Route("/status", show_status)]
    )


async def serve_http(
    host: str,
    port: int,
    status: Callable[[], Mapping[str, Any]],
    metrics: Callable[[], bytes],
    health: Callable[[], Mapping[str, Any]],
    started: Callable[[str], None],
    shutdown: anyio.Event,
) -> None:
    """Serve until `shutdown` is set.

    :param port: 0 = any free one.
    :param started: told the URL, with the real port, once requests are accepted.
    :raises ConfigError: the address cannot be listened on.
    """
    listener = _listen(host, port)
    with contextlib.closing(listener):
        bound = listener.getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        config = uvicorn.Config(
            make_app(status, metrics, health),
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        server = _EmbeddedHttp(config, lambda: started(f"http://{shown}:{bound[1]}"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on, shutdown, server)
            try:
                await server.serve(sockets=[listener])
            finally:
                # uvicorn closes its listeners only on the orderly way out.
                for accepting in getattr(server, "servers", ()):
                    accepting.close()
            tasks.cancel_scope.cancel()


class _EmbeddedHttp(uvicorn.Server):
    """uvicorn as a guest in somebody else's loop: the host owns the signals."""

    def __init__(self, config: uvicorn.Config, accepting: Callable[[], None]) -> None:
        super().__init__(config)
        self._accepting = accepting

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._accepting()


async def _stop_on(shutdown: anyio.Event, server: uvicorn.Server) -> None:
    await shutdown.wait()
    server.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket; binding here, not in uvicorn, which ends the process where it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refused(host, port, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error) from None
    return listener


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot serve HTTP on {host}:{port}: {error.strerror}; give server.http_port another port "
        "(0 = any free one, -1 = no HTTP) or correct server.http_host"
    )


def _json(content: Mapping[str, Any], code: int) -> Response:
    return Response(msgspec.json.encode(content), status_code=code, media_type="application/json")
