"""What ``layerflow run`` runs: the server, HTTP beside it, the configuration file's watch, the signals."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import structlog

from layerflow.config.settings import Settings
from layerflow.endpoint import check_free
from layerflow.errors import LayerflowError
from layerflow.observe.logs import configure as configure_logs
from layerflow.server import Server
from layerflow.server.transport.http import serve_http
from layerflow.server.watch import watch_config
from layerflow.system.descriptors import prepare_descriptors
from layerflow.system.garbage import keep_collections_short
from layerflow_cli.warming import show_warming


async def serve(
    settings: Settings, path: Path | None, overrides: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

    :param path: the configuration file to follow; None = none.
    :param overrides: the flags, which keep winning over the file.
    :param say: told one line per endpoint once everything accepts clients.
    :raises LayerflowError: an endpoint or the HTTP port cannot be used.
    """
    log = structlog.get_logger("layerflow.run")
    prepare_descriptors()
    # Before HTTP and memory are taken: two servers of one configuration differ in neither.
    check_free(settings.server.endpoint)
    server = Server(settings)
    shutdown, served, http_open = anyio.Event(), anyio.Event(), anyio.Event()
    urls: list[str] = []

    def http_started(url: str) -> None:
        urls.append(url)
        http_open.set()

    def started(endpoints: list[str]) -> None:
        keep_collections_short()
        for endpoint in [*endpoints, *urls]:
            say(f"layerflow listening on {endpoint}")

    def apply(wanted: Settings) -> None:
        server.apply(wanted)
        configure_logs(wanted.log.level, wanted.log.format)

    if path is not None:
        server.trials.watched(path, overrides, settings, apply)

    # Received before anything is said to listen: who is told so may send one at once.
    with _plain_errors(), anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_on_signals, signals, shutdown, tasks.cancel_scope)
            if settings.server.http_port >= 0:
                serve = functools.partial(
                    serve_http,
                    status=server.status,
                    metrics=server.metrics_text,
                    health=server.health,
                    started=http_started,
                    shutdown=served,
                )
                tasks.start_soon(serve, settings.server.http_host, settings.server.http_port)
                await http_open.wait()
            if path is not None:

                async def follow(file: Path) -> None:
                    says = server.trials.file_says
                    await watch_config(file, overrides, says, log, current=settings, tell=server.file_changed)

                tasks.start_soon(follow, path)
            tasks.start_soon(show_warming, server)
            await server.run(shutdown, started)
            # HTTP goes last: /healthz says "draining" until everything is drained.
            served.set()
            tasks.cancel_scope.cancel()


async def _on_signals(signals: AsyncIterator[signal.Signals], shutdown: anyio.Event, scope: anyio.CancelScope) -> None:
    async for _ in signals:
        if shutdown.is_set():
            scope.cancel()
            return
        shutdown.set()


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """A task group's group of refusals as the first of them; anything unexpected stays a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        refusals, unexpected = group.split(LayerflowError)
        if refusals is None or unexpected is not None:
            raise
        first: BaseException = refusals
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
