"""``layerflow status``: a running server's state, over the control socket or HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from layerflow.endpoint import check_listened, default_endpoint, local_endpoint
from layerflow.errors import ConfigError, LayerflowError, SessionError
from layerflow_cli.options import STANDARD_OUTPUT, ConfigFile, Endpoint, JsonFile, finite

TIMEOUT_S = 3.0


def status(
    endpoint: Endpoint = None,
    http: Annotated[
        str | None, typer.Option("--http", metavar="URL", help="Ask over HTTP instead, e.g. http://127.0.0.1:9464.")
    ] = None,
    config: ConfigFile = None,
    json_file: JsonFile = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also each session, the limits, and the core's and the metrics' figures.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option(min=0.1, max=86_400, callback=finite, metavar="S", help="Seconds between refreshes.")
    ] = 1.0,
) -> None:
    """Show a running server: its workers, what they load and save, its pool and what lies behind it.

    \b
    Examples:
      layerflow status --watch
      layerflow status --http http://127.0.0.1:9464 --json
    """
    if http is not None and endpoint is not None:
        raise ConfigError("--endpoint and --http are two ways to the same server; give one")
    where = http if http is not None else endpoint_of(endpoint, config)
    if watch:
        with asking(where, over_http=http is not None) as ask:
            watch_status(ask, interval_s, json_file, everything=everything)
    found = fetch_http(where) if http is not None else _fetch_control(where)
    _show(found, json_file, everything)


@contextlib.contextmanager
def asking(where: str, *, over_http: bool) -> Iterator[Callable[[], dict[str, Any]]]:
    """What asks the server again and again; on the control socket over one connection."""
    if over_http:
        yield lambda: fetch_http(where)
        return
    from layerflow.agent.observer import Observer  # noqa: PLC0415 - pulls zmq in

    check_listened(where)
    with Observer(where) as observer:
        yield lambda: observer.status(TIMEOUT_S)


def watch_status(
    ask: Callable[[], dict[str, Any]], interval_s: float, json_file: Path | None, *, everything: bool
) -> NoReturn:
    """Until Ctrl-C. A server that goes away is waited for."""
    if json_file is not None:
        if json_file != STANDARD_OUTPUT:
            raise ConfigError("--watch writes one JSON object a line to standard output; leave FILE out of --json")
        while True:
            typer.echo(json.dumps(ask()))
            time.sleep(interval_s)
    from rich.live import Live  # noqa: PLC0415 - only here
    from rich.text import Text  # noqa: PLC0415

    from layerflow_cli.output import console  # noqa: PLC0415
    from layerflow_cli.status_view import view  # noqa: PLC0415

    screen = console()
    found = ask()
    if not screen.is_terminal:
        while True:
            screen.print(view(found, screen.width, everything), "")
            time.sleep(interval_s)
            found = ask()
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        live.update(view(found, screen.width, everything, screen.height), refresh=True)
        while True:
            time.sleep(interval_s)
            try:
                shown = view(ask(), screen.width, everything, screen.height)
            except LayerflowError as error:
                shown = Text(str(error))
            live.update(shown, refresh=True)


def fetch_http(url: str) -> dict[str, Any]:
    """``/status`` of the server at `url`.

    :raises ConfigError: `url` is not an http URL.
    :raises SessionError: no layerflow answers there.
    """
    from layerflow.http_client import open_url  # noqa: PLC0415 - `--help` stays quick

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--http {url}: write it as http://host:port")
    target = url.rstrip("/").removesuffix("/status") + "/status"
    try:
        with open_url(target, TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise SessionError(f"{target}: answered {error.code} {error.reason}; is that a layerflow server?") from None
    except (OSError, ValueError, HTTPException) as error:
        why = getattr(error, "reason", error)
        raise SessionError(f"{target}: no answer ({why}); is `layerflow run` up, and its http_port this one?") from None
    if not isinstance(found, dict):
        raise SessionError(f"{target}: answered something else than a status; is that a layerflow server?")
    return found


def _fetch_control(endpoint: str) -> dict[str, Any]:
    from layerflow.agent.observer import fetch_status  # noqa: PLC0415 - pulls zmq in

    check_listened(endpoint)
    return fetch_status(endpoint, TIMEOUT_S)


def endpoint_of(endpoint: str | None, config: Any) -> str:
    """The server's control socket: as given, or of the configuration.

    :raises ConfigError: what is given is no endpoint of this machine, or the configuration is wrong.
    """
    if endpoint:
        try:
            return local_endpoint(endpoint)
        except ValueError as error:
            raise ConfigError(f"--endpoint: {error}; a server of another machine is asked with --http") from None
    if config is None and not any(name.startswith("LAYERFLOW_") for name in os.environ):
        return default_endpoint()  # nothing is configured, and settings take longer to load than a status to show
    from layerflow.config.settings import Settings  # noqa: PLC0415 - `--help` stays quick

    return Settings.load(config).server.endpoint


def _show(found: Mapping[str, Any], json_file: Path | None, everything: bool) -> None:
    from layerflow_cli.output import console, write_json  # noqa: PLC0415

    if write_json(json_file, found):
        return
    from layerflow_cli.status_view import view  # noqa: PLC0415

    screen = console()
    screen.print(view(found, screen.width, everything))
