"""``layerflow trace``: what took time in the last steps of a running server's engines, as a page and for Perfetto."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerflow.endpoint import check_listened
from layerflow.errors import ConfigError, SessionError
from layerflow_cli.commands.status import endpoint_of
from layerflow_cli.options import ConfigFile, Endpoint, JsonFile, parse_duration, refuse_foreign
from layerflow_cli.output_file import checked_folder, write_all, write_folder

if TYPE_CHECKING:
    from layerflow.observe.trace import StepTrace

MOST_SHOWN = 200
"""Steps of one page: a browser draws more of them slowly."""
_WHAT = ("timeline, for a browser", "trace, for ui.perfetto.dev")


def trace(
    context: typer.Context,
    recording: Annotated[
        Path | None, typer.Argument(metavar="[RECORDING]", help="Of a recording; without it, of the running server.")
    ] = None,
    last: Annotated[
        str, typer.Option("--last", metavar="TIME", help="Steps that ended in the last so long, e.g. 60s or 5m.")
    ] = "60s",
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="Of this engine only.")] = "",
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Where timeline.html and trace.json are written.", callback=checked_folder
        ),
    ] = Path("layerflow-trace"),
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Write a timeline of the last steps: compute, waits, loads and saves by layer.

    Each worker of a running server keeps its last 64 steps. The page opens in a browser, the trace in ui.perfetto.dev.

    \b
    Examples:
      layerflow trace --last 60s
      layerflow trace monday.lfr --last 5m --engine vllm-0 --out monday
    """
    seconds = parse_duration("--last", last)
    notes: list[str] = []
    if recording is None:
        traces = _of_server(endpoint_of(endpoint, config), seconds, engine, notes)
    else:
        refuse_foreign(context, "a recording asks no server", "endpoint", "config")
        traces = _of_recording(recording, seconds, engine, notes)
    if not traces:
        raise SessionError(
            f"no step that moved anything ended in the last {seconds:g} s; give a longer --last, or look while one does"
        )
    if len(traces) > MOST_SHOWN:
        notes.append(f"The newest {MOST_SHOWN} of {len(traces):,} steps are shown; trace.json has all.")
    paths: list[Path] = []
    write_all(
        lambda: paths.extend(_write(traces, notes, out)),
        lambda: _show(traces, notes, paths, json_file),
    )


def _of_server(endpoint: str, seconds: float, engine: str, notes: list[str]) -> list[StepTrace]:
    from layerflow.agent.control import Control  # noqa: PLC0415 - pulls zmq in

    check_listened(endpoint)
    control = Control(endpoint, engine="trace")
    try:
        found = control.trace(seconds, engine)
    finally:
        control.close()
    if found["silent"]:
        notes.append(f"Without {', '.join(found['silent'])}: no answer within 2 s.")
    if found["left_out"]:
        notes.append(f"{found['left_out']:,} older steps did not fit into the server's answer; give a shorter --last.")
    return [
        _step(step, f"{step['engine']}, rank {step['rank']}", base64.b64decode(step["spans"]))
        for step in found["steps"]
    ]


def _of_recording(path: Path, seconds: float, engine: str, notes: list[str]) -> list[StepTrace]:
    from layerflow.recording.format import ModelSeen, SessionSeen, StepSpans  # noqa: PLC0415 - `--help` stays quick
    from layerflow.recording.reader import Recording  # noqa: PLC0415

    recording = Recording(path)
    since = (recording.segments[-1].last if recording.segments else 0.0) - seconds
    names: dict[int, tuple[str, int]] = {}
    ranks: dict[int, int] = {}
    traces: list[StepTrace] = []
    for record in recording.records():
        match record:
            case ModelSeen():
                ranks[record.model] = record.spec.shard.tp_rank
            case SessionSeen():
                names[record.session] = record.name, ranks.get(record.model, 0)
            case StepSpans():
                name, rank = names.get(record.session, ("", 0))
                if engine in ("", name) and record.at >= since:
                    step = {"step": record.step, "session": record.session, "origin": record.at}
                    traces.append(_step(step, f"{name}, rank {rank}", record.spans))
    if recording.damaged:
        notes.append(f"Without {recording.damaged:,} damaged blocks of the recording.")
    if engine and engine not in {name for name, _ in names.values()}:
        there = ", ".join(sorted({name for name, _ in names.values()})) or "none"
        raise ConfigError(f"{path}: has no engine {engine!r}; there are {there}")
    return sorted(traces, key=lambda trace: trace.origin)


def _step(told: Mapping[str, Any], who: str, spans: bytes) -> StepTrace:
    from layerflow.observe.trace import StepTrace, unpack_spans  # noqa: PLC0415

    return StepTrace(told["step"], told["session"], f"{who}, step {told['step']}", unpack_spans(spans, told["origin"]))


def _write(traces: Sequence[StepTrace], notes: Sequence[str], out: Path) -> list[Path]:
    from layerflow.observe.timeline import render as render_page  # noqa: PLC0415
    from layerflow.observe.trace import render as render_perfetto  # noqa: PLC0415

    page = render_page(traces[-MOST_SHOWN:], "layerflow: the last steps", notes)
    return write_folder("--out", out, page, json.dumps(render_perfetto(traces)))


def _show(traces: Sequence[StepTrace], notes: Sequence[str], paths: Sequence[Path], json_file: Path | None) -> None:
    """:param paths: of the page and of the trace; empty = they could not be written."""
    from layerflow_cli.output import console, write_json  # noqa: PLC0415

    found: dict[str, Any] = {"steps": len(traces), "timeline": None, "perfetto": None, "notes": list(notes)}
    found |= dict(zip(("timeline", "perfetto"), map(str, paths), strict=False)) | dict(_figures(traces))
    if write_json(json_file, found):
        return
    screen = console()
    lines = [
        f"{len(traces):,} steps: loads {found['load_ms']:,.1f} ms, {found['load_exposed_ms']:,.1f} of it exposed; "
        f"saves {found['save_ms']:,.1f} ms, {found['save_exposed_ms']:,.1f} of it",
        *notes,
        *(f"{path}  ({what})" for path, what in zip(paths, _WHAT, strict=False)),
    ]
    for line in lines:
        screen.print(line, soft_wrap=True, highlight=False)


def _figures(traces: Sequence[StepTrace]) -> Iterator[tuple[str, float]]:
    from layerflow.observe.trace import figures  # noqa: PLC0415

    for direction in ("load", "save"):
        measured = [figures(trace, direction) for trace in traces]
        yield f"{direction}_ms", round(sum(one.transfer_ms for one in measured), 3)
        yield f"{direction}_exposed_ms", round(sum(one.exposed_ms for one in measured), 3)
