"""``layerflow status``: a running server's state, over the control socket or HTTP."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from layerflow.errors import ConfigError, SessionError
from layerflow.http_client import open_url
from layerflow_cli.options import STANDARD_OUTPUT, ConfigFile, Endpoint, JsonFile

TIMEOUT_S = 3.0


def status(
    endpoint: Endpoint = None,
    http: Annotated[
        str | None, typer.Option("--http", metavar="URL", help="Ask over HTTP instead, e.g. http://127.0.0.1:9464.")
    ] = None,
    config: ConfigFile = None,
    json_file: JsonFile = None,
    everything: Annotated[bool, typer.Option("--all", help="Also the core's and the metrics' figures.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds between refreshes.")] = 1.0,
) -> None:
    """Show sessions, pool, limits, hit rates and overlap of a running server.

    \b
    Examples:
      layerflow status --watch
      layerflow status --http http://127.0.0.1:9464 --json
    """
    if http is not None and endpoint is not None:
        raise ConfigError("--endpoint and --http are two ways to the same server; give one")
    where = http if http is not None else endpoint_of(endpoint, config)
    ask = fetch_http if http is not None else _fetch_control
    if not watch:
        _show(ask(where), json_file, everything)
        return
    if json_file is not None:
        if json_file != STANDARD_OUTPUT:
            raise ConfigError("--watch writes one JSON object a line to standard output; leave FILE out of --json")
        while True:
            typer.echo(json.dumps(ask(where)))
            time.sleep(interval_s)
    from rich.live import Live  # noqa: PLC0415 - only here

    from layerflow_cli.output import console  # noqa: PLC0415
    from layerflow_cli.status_view import view  # noqa: PLC0415

    with Live(view(ask(where), everything), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(view(ask(where), everything), refresh=True)


def fetch_http(url: str) -> dict[str, Any]:
    """``/status`` of the server at `url`.

    :raises ConfigError: `url` is not an http URL.
    :raises SessionError: no layerflow answers there.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--http {url}: write it as http://host:port")
    target = url.rstrip("/").removesuffix("/status") + "/status"
    try:
        with open_url(target, TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise SessionError(f"{target}: answered {error.code} {error.reason}; is that a layerflow server?") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise SessionError(f"{target}: no answer ({why}); is `layerflow run` up, and its http_port this one?") from None
    if not isinstance(found, dict):
        raise SessionError(f"{target}: answered something else than a status; is that a layerflow server?")
    return found


def _fetch_control(endpoint: str) -> dict[str, Any]:
    from layerflow.agent.connection.control import fetch_status  # noqa: PLC0415 - pulls zmq in
    from layerflow.endpoint import check_listened  # noqa: PLC0415

    check_listened(endpoint)
    return fetch_status(endpoint, TIMEOUT_S)


def endpoint_of(endpoint: str | None, config: Any) -> str:
    """The server's control socket: as given, or of the configuration."""
    from layerflow.config.settings import Settings  # noqa: PLC0415

    return Settings.load(config, {"server.endpoint": endpoint} if endpoint else {}).server.endpoint


def _show(found: Mapping[str, Any], json_file: Path | None, everything: bool) -> None:
    from layerflow_cli.output import console, write_json  # noqa: PLC0415

    if json_file is not None:
        write_json(json_file, found)
        return
    from layerflow_cli.status_view import view  # noqa: PLC0415

    console().print(view(found, everything))
