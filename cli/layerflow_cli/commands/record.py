"""``layerflow record``: record what happens in a running server, or say what is in a recording."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from layerflow.endpoint import check_listened
from layerflow.errors import ConfigError, SessionError
from layerflow_cli.commands.status import endpoint_of
from layerflow_cli.options import ConfigFile, Endpoint, JsonFile, parse_duration, refuse_foreign

LOOK_S = 0.5
"""How often the server is asked whether it still records."""


def record(
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="What to record in, on the server's machine.")
    ] = None,
    duration: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Record for so long, e.g. 90s, 20m or 1h; Ctrl-C ends it too.")
    ] = "10m",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the file; what is oldest in it is overwritten.")
    ] = "256MiB",
    info: Annotated[
        Path | None, typer.Option("--info", metavar="FILE", help="Say what is in a recording, and record nothing.")
    ] = None,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Record what happens in a running server: models, lookups, steps, moves, limits. No token, no digest, no prompt.

    A recording that is there already is kept as FILE.1. The engines are asked nothing that holds them.

    \b
    Examples:
      layerflow record --for 1h -o monday.lfr
      layerflow record --info monday.lfr
    """
    if (info is None) == (output is None):
        raise ConfigError("give -o FILE to record, or --info FILE to see what is in a recording")
    if info is not None:
        why = "tells how to record, and --info records nothing"
        refuse_foreign(context, why, "duration", "max_bytes", "endpoint", "config")
    else:
        assert output is not None
        from layerflow.config.fields import parse_size  # noqa: PLC0415 - pulls pydantic in

        seconds, most = parse_duration("--for", duration), parse_size(max_bytes)
        _record(endpoint_of(endpoint, config), output.absolute(), seconds, most)
    _show(info or output, json_file)


def _record(endpoint: str, path: Path, seconds: float, max_bytes: int) -> None:
    """Record until the time is up, or until Ctrl-C."""
    from layerflow.agent.control import Control  # noqa: PLC0415 - pulls zmq in
    from layerflow_cli.output import console  # noqa: PLC0415

    check_listened(endpoint)
    control = Control(endpoint, engine="record")
    screen = console(stderr=True)
    try:
        control.record(path, seconds, max_bytes)
        screen.print(f"recording in {path} for {seconds:g} s; Ctrl-C ends it", soft_wrap=True, highlight=False)
        until = time.monotonic() + seconds
        try:
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, LOOK_S))
                if not _recording(control)["on"]:
                    break
            found = _ended(control)
        except KeyboardInterrupt:
            found = control.end_recording()
        except SystemExit:
            control.end_recording()
            raise
    finally:
        control.close()
    if found["reason"] not in ("its time is up", "it was asked to"):
        raise SessionError(f"the recording in {path} has ended early: {found['reason']}")


def _recording(control: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = control.status()["recording"]
    return found


def _ended(control: Any) -> Mapping[str, Any]:
    """How the recording has ended, once it has: the server looks four times a second."""
    until = time.monotonic() + 5.0
    while (found := _recording(control))["on"] and time.monotonic() < until:
        time.sleep(LOOK_S / 5)
    return found


def _show(path: Path | None, json_file: Path | None) -> None:
    from layerflow.recording.reader import Recording  # noqa: PLC0415 - `--help` stays quick
    from layerflow.recording.summary import summary  # noqa: PLC0415
    from layerflow_cli.output import console, tables, write_json  # noqa: PLC0415

    assert path is not None
    found = summary(Recording(path))
    if write_json(json_file, found):
        return
    screen = console()
    began = datetime.fromtimestamp(found["began_unix"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    head = f"{path}: {found['seconds']:,.1f} s from {began}, by layerflow {found['layerflow']}"
    screen.print(head, soft_wrap=True, highlight=False)
    for model in found["models"]:
        screen.print(f"model {model['model']}: {model['text']}", soft_wrap=True, highlight=False)
    for name, title in (("counts", "what is in it"), ("traffic", "what was moved"), ("records", "records by kind")):
        for table in tables(title, found[name]):
            screen.print(table)
