"""``layerflow doctor``: would this configuration work on this machine?"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerflow_cli.options import ConfigFile, JsonFile, SettingItems, overrides

if TYPE_CHECKING:
    from layerflow.findings import Finding

EXIT_PROBLEM = 1
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_INDENT = 9
"""Columns of the state and the space behind it."""


def doctor(
    config: ConfigFile = None,
    json_file: JsonFile = None,
    settings: SettingItems = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Check this device instead, by using it: cuda, npu, cpu, or e.g. cuda:1."),
    ] = None,
) -> None:
    """Check a configuration, or a device, on this machine without starting the server.

    Exit code 1 if something would not work, 2 if the configuration itself is wrong.

    \b
    Examples:
      layerflow doctor --config layerflow.toml
      layerflow doctor --set pool.backend=mooncake --set pool.mooncake.master=store:50051 --json
      layerflow doctor --device cuda
    """
    from layerflow.findings import Severity  # noqa: PLC0415 - `--help` stays quick
    from layerflow_cli.output import write_json  # noqa: PLC0415

    findings = _of_device(device) if device is not None else _of_configuration(config, settings or [])
    if not write_json(json_file, [dataclasses.asdict(finding) for finding in findings]):
        _print(findings)
    if any(finding.state is Severity.PROBLEM for finding in findings):
        raise typer.Exit(EXIT_PROBLEM)


def _of_configuration(config: Path | None, settings: Sequence[str]) -> list[Finding]:
    from layerflow.config.settings import Settings  # noqa: PLC0415

    wanted = Settings.load(config, overrides(settings, {}))

    from layerflow.doctor import examine  # noqa: PLC0415 - pulls zmq in

    return list(examine(wanted))


def _of_device(device: str) -> list[Finding]:
    from layerflow_cli.device_check import examine_device  # noqa: PLC0415 - pulls torch in

    return list(examine_device(device))


def _print(findings: Sequence[Finding]) -> None:
    from rich.text import Text  # noqa: PLC0415

    from layerflow_cli.output import console  # noqa: PLC0415

    screen = console()
    width = screen.width if screen.is_terminal else sys.maxsize  # a program that reads along gets whole lines
    for finding in findings:
        text = Text("\n".join(finding_lines(finding, width)))
        text.stylize(_STYLES[finding.state.value], 0, len(finding.state.value))
        screen.print(text, soft_wrap=True)


def finding_lines(finding: Finding, width: int) -> list[str]:
    """The state, what was looked at and what was found; below it what to do, where there is something."""
    from layerflow_cli.output import folded  # noqa: PLC0415

    room = width - _INDENT
    lines = folded(f"{finding.check}: {finding.found}", room)
    lines += [f"  {line}" for line in folded(finding.advice, room - 2)] if finding.advice else []
    return [
        f"{finding.state.value if not number else '':{_INDENT}}{line}".rstrip() for number, line in enumerate(lines)
    ]
