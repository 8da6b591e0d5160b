"""``layerflow purge``: empty a running server's arena, and what lies behind it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from layerflow.endpoint import check_listened
from layerflow.errors import ConfigError, SessionError
from layerflow_cli.commands.status import endpoint_of
from layerflow_cli.options import ConfigFile, Endpoint, JsonFile


def purge(
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    tier: Annotated[
        bool,
        typer.Option(
            "--tier", help="Also remove what lies in the pool behind the arena, for every server that uses it."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --tier removes anything.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Forget what a running server has stored, is saving and is fetching.

    Engines need not be told: they compute what they no longer find. After new weights none of this is needed, because
    engines then ask for other keys.

    \b
    Examples:
      layerflow purge
      layerflow purge --tier --yes --json
    """
    from layerflow_cli.output import write_json  # noqa: PLC0415 - `--help` stays quick

    where = endpoint_of(endpoint, config)
    if tier and not yes:
        _confirm(where)
    told = _purge(where, tier)
    if not write_json(json_file, told):
        typer.echo(describe(told, tier))
    if tier and told.get("tier", {}).get("reason"):
        raise SessionError(f"objects may be left in {told['tier']['backend']}: {told['tier']['reason']}")


def describe(told: Mapping[str, Any], tier: bool) -> str:
    """One line of what was removed."""
    parts = [f"{told['purged']} objects forgotten in the arena", f"{told['revoked']} on their way given up"]
    if "tier" in told:
        parts.append(f"{told['tier']['purged']} removed from {told['tier']['backend']}")
    elif tier:
        parts.append("no pool behind it")
    return ", ".join(parts)


def _confirm(where: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError("purge --tier asks first, and there is no terminal to answer on; give --yes")
    if not typer.confirm(f"Remove everything behind the server at {where}, for all servers that share it?", err=True):
        raise typer.Exit(1)


def _purge(endpoint: str, tier: bool) -> dict[str, Any]:
    from layerflow.agent.control import Control  # noqa: PLC0415 - pulls zmq in

    check_listened(endpoint)
    control = Control(endpoint, engine="purge")
    try:
        return control.empty(tier=tier)
    finally:
        control.close()
