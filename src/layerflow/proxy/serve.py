"""Serves the proxy until it is asked to stop, then lets open requests finish."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

import anyio
import structlog

from layerflow.config.proxy import ProxySettings
from layerflow.errors import ConfigError
from layerflow.http_server import UvicornServer, listen, url_of
from layerflow.proxy import admin_socket
from layerflow.proxy.app import make_admin_app, make_app
from layerflow.proxy.context import Cut, ProxyContext, make_context
from layerflow.proxy.instances.probes import probe_all
from layerflow.proxy.metaserver import Metaserver
from layerflow.system.descriptors import FOR_HTTP, prepare_descriptors

_BACKLOG = 2048
_log = structlog.get_logger("layerflow.proxy")


async def serve_proxy(
    settings: ProxySettings, started: Callable[[str], None], shutdown: anyio.Event, at_once: anyio.Event
) -> None:
    """Serve until `shutdown` is set and open requests have finished (``drain_timeout_s``), or `at_once` is set.

    While it drains, ``/health`` says so, ``/v1/metaserver`` goes on, and new requests are answered 503.

    :param started: told the URL, with the real port, once requests are accepted.
    :raises ConfigError: the address cannot be listened on, or an engine is missing.
    """
    for side, text in (("prefill", settings.prefill), ("decode", settings.decode)):
        if not text.strip():
            raise ConfigError(f"no {side} engine: give --{side} URL, or set proxy.{side}")
    context = make_context(settings, Metaserver())
    advice = "give proxy.port another port (0 = any free one) or correct proxy.host"
    listener = listen(settings.host, settings.port, _BACKLOG, advice)
    with contextlib.closing(listener):
        context.port = listener.getsockname()[1]
        server = UvicornServer(make_app(context), _BACKLOG, lambda: started(url_of(listener)), _most_connections())
        host = listener.getsockname()[0]
        try:
            with admin_socket.listening(settings.admin_socket, host, context.port) as operators:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(probe_all, context.instances, settings)
                    if operators is not None:
                        admin = UvicornServer(make_admin_app(context), _BACKLOG, lambda: None)
                        tasks.start_soon(admin.serve_on, operators)
                    tasks.start_soon(_stop, context, server, shutdown, at_once)
                    await server.serve_on(listener)
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await context.instances.close()


def _most_connections() -> int:
    """From clients: each request has up to three more connections, to engines."""
    return max(16, min(_BACKLOG, (prepare_descriptors() - FOR_HTTP) // 4))


async def serve_until_signal(settings: ProxySettings, started: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; a second one cuts what is open.

    :raises ConfigError: see :func:`serve_proxy`.
    """
    shutdown, at_once = anyio.Event(), anyio.Event()
    refused: ConfigError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_wait_for_signals, shutdown, at_once)
        try:
            await serve_proxy(settings, started, shutdown, at_once)
        except ConfigError as error:
            refused = error
        tasks.cancel_scope.cancel()
    if refused is not None:
        raise refused


async def _wait_for_signals(shutdown: anyio.Event, at_once: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for _ in received:
            if shutdown.is_set():
                at_once.set()
                return
            shutdown.set()


async def _stop(context: ProxyContext, server: UvicornServer, shutdown: anyio.Event, at_once: anyio.Event) -> None:
    await shutdown.wait()
    context.drain(begin=True)
    _log.info("proxy_draining", open_requests=len(context.requests))
    with anyio.move_on_after(context.settings.drain_timeout_s):
        await _first_of(context.drained, at_once)
    if context.requests:
        _log.warning("proxy_cut_requests", open_requests=len(context.requests))
    for request in list(context.requests):
        request.end(Cut.STOPPING)
    server.should_exit = True


async def _first_of(*events: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)
