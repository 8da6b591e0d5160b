"""Serves the proxy until it is asked to stop, then lets open requests finish."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import structlog

from layerflow.config.proxy import MAX_SOCKET_PATH_BYTES, ProxySettings
from layerflow.config.settings import make_private
from layerflow.endpoint import default_endpoint, socket_directory
from layerflow.errors import ConfigError
from layerflow.http_server import UvicornServer, listen, url_of
from layerflow.proxy.context import AbortReason, ProxyContext, make_context
from layerflow.proxy.instances import probe_all
from layerflow.proxy.metaserver import Metaserver
from layerflow.proxy.routes import make_admin_app, make_app
from layerflow.system.descriptors import FOR_HTTP, prepare_descriptors
from layerflow.system.unix_sockets import listen_privately

# The Unix socket of the admin paths: who can connect to it is this user, or root.


_AUTO = "auto"
_log = structlog.get_logger("layerflow.proxy")


def admin_socket_path(setting: str, host: str, port: int) -> Path:
    """Where the socket of a proxy lies that listens on `host` and `port`.

    :param setting: ``proxy.admin_socket``, not empty.
    """
    if setting != _AUTO:
        return Path(setting)
    folder = socket_directory(default_endpoint())
    assert folder is not None
    return folder / f"proxy-{host}:{port}.sock"


@contextlib.contextmanager
def listening(setting: str, host: str, port: int) -> Iterator[socket.socket | None]:
    """A socket that listens; None where the setting asks for none, or "auto" finds no place for it.

    :raises ConfigError: there can be none where the setting says.
    """
    listener = None
    path = admin_socket_path(setting, host, port) if setting else None
    if path is not None:
        try:
            listener = _listen(path)
        except ConfigError as error:
            if setting != _AUTO:
                raise
            _log.warning("no_admin_socket", reason=str(error))
    if listener is None or path is None:
        yield None
        return
    try:
        _log.info("admin_socket", path=str(path))
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_SOCKET_PATH_BYTES} bytes; give proxy.admin_socket another path")
    make_private(path.parent)
    return listen_privately(path, "give proxy.admin_socket another path")


_BACKLOG = 2048


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
            with listening(settings.admin_socket, host, context.port) as operators:
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
        request.end(AbortReason.STOPPING)
    server.should_exit = True


async def _first_of(*events: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)
