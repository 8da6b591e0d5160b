"""HTTP beside the control socket: ``/``, ``/healthz``, ``/metrics``, ``/status``. Read-only, on the server's loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from html import escape
from importlib import resources
from string import Template
from typing import Any

import anyio
import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from layerflow.http_server import UvicornServer, listen, url_of
from layerflow.observe.overview import COLUMNS, TEXTS, overview

# The page at ``/``: what ``layerflow status`` shows, in one HTML document that loads nothing else.


REFRESH_S = 5


def render(found: Mapping[str, Any]) -> str:
    """The document, which asks for itself again every :data:`REFRESH_S` seconds."""
    shown = overview(found)
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        refresh_s=REFRESH_S,
        title=escape(shown.title),
        notes="".join(f"<p class=note>{escape(note)}</p>" for note in shown.notes),
        workers=_table(shown.workers) if shown.workers else "",
        parts="".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in shown.parts.items()),
    )


def _table(workers: tuple[tuple[str, ...], ...]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = "".join(f"<tr>{''.join(_cell(index, text) for index, text in enumerate(row))}</tr>" for row in workers)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _cell(index: int, text: str) -> str:
    return f"<td{'' if index < TEXTS else ' class=figure'}>{escape(text)}</td>"


_BACKLOG = 64


def make_app(
    status: Callable[[], Mapping[str, Any]], metrics: Callable[[], bytes], health: Callable[[], Mapping[str, Any]]
) -> Starlette:
    """The endpoints; ``/`` is a page of what ``/status`` says.

    :param status: what ``/status`` says, JSON-ready.
    :param metrics: what ``/metrics`` says, Prometheus text.
    :param health: what ``/healthz`` says. Its ``status`` is ``"ok"`` or, while the server starts or drains, something
        else: the answer is 503 then, so that a load balancer sends nothing new.
    """

    async def healthz(_: Request) -> Response:
        found = health()
        return _json(found, 200 if found["status"] == "ok" else 503)

    async def show_metrics(_: Request) -> Response:
        return Response(metrics(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def show_status(_: Request) -> Response:
        return _json(status(), 200)

    async def show_page(_: Request) -> Response:
        return HTMLResponse(render(status()))

    routes = {"/": show_page, "/healthz": healthz, "/metrics": show_metrics, "/status": show_status}
    return Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])


async def serve_http(
    host: str,
    port: int,
    *,
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
    advice = "give server.http_port another port (0 = any free one, -1 = no HTTP) or correct server.http_host"
    listener = listen(host, port, _BACKLOG, advice)
    with contextlib.closing(listener):
        server = UvicornServer(make_app(status, metrics, health), _BACKLOG, lambda: started(url_of(listener)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on, shutdown, server)
            await server.serve_on(listener)
            tasks.cancel_scope.cancel()


async def _stop_on(shutdown: anyio.Event, server: UvicornServer) -> None:
    await shutdown.wait()
    server.should_exit = True


def _json(content: Mapping[str, Any], code: int) -> Response:
    return Response(msgspec.json.encode(content), status_code=code, media_type="application/json")
