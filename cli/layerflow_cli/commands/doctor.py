"""``layerflow doctor``: would this configuration work on this machine?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from layerflow_cli.options import ConfigFile, JsonFile, SettingItems, overrides

if TYPE_CHECKING:
    from layerflow.doctor import Finding

EXIT_PROBLEM = 1
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    config: ConfigFile = None,
    json_file: JsonFile = None,
    settings: SettingItems = None,
) -> None:
    """Check a configuration on this machine without starting the server.

    Exit code 1 if something would not work, 2 if the configuration itself is wrong.

    \b
    Examples:
      layerflow doctor --config layerflow.toml
      layerflow doctor --set pool.backend=mooncake --set pool.mooncake.master=store:50051 --json
    """
    from layerflow.config.settings import Settings  # noqa: PLC0415 - `--help` stays quick

    wanted = Settings.load(config, overrides(settings or [], {}))

    from layerflow.doctor import Severity, examine  # noqa: PLC0415 - pulls zmq in

    findings = list(examine(wanted))
    if json_file is not None:
        from layerflow_cli.output import write_json  # noqa: PLC0415

        write_json(json_file, [dataclasses.asdict(finding) for finding in findings])
    else:
        _print(findings)
    if any(finding.state is Severity.PROBLEM for finding in findings):
        raise typer.Exit(EXIT_PROBLEM)


def _print(findings: Sequence[Finding]) -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from layerflow_cli.output import console  # noqa: PLC0415

    table = Table("check", "state", "found", "what to do", title="Doctor", title_justify="left")
    for column in table.columns[:2]:
        column.no_wrap = True
    for finding in findings:
        state = Text(finding.state.value, style=_STYLES[finding.state.value])
        table.add_row(Text(finding.check), state, Text(finding.found), Text(finding.advice))
    console().print(table)
