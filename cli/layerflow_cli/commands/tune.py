"""``layerflow tune``: find better settings in a recording, and see if they are on the running server."""

from __future__ import annotations

import hashlib
import math
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerflow.endpoint import check_listened
from layerflow.errors import ConfigError
from layerflow_cli.commands.status import endpoint_of
from layerflow_cli.options import ConfigFile, Endpoint, JsonFile, RecordingsEnd, parse_duration, refuse_foreign
from layerflow_cli.output_file import checked_file, checked_settings, write_all

if TYPE_CHECKING:
    from layerflow.agent.control import Control
    from layerflow.tuning.verify import Goal, Look, Report, Window

EXIT_NOT_CONFIRMED = 1
PATIENCE_S = 15.0
"""A server that answers within this has stood still, and is not gone."""
_BAR = 30
_WIDTH = 80


def tune(
    context: typer.Context,
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="A recording: find settings that suit it better.")
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option("--verify", metavar="FILE", help="Try this file on the running server, in turn with its own."),
    ] = None,
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="Try for so long, e.g. 20m.")] = "20m",
    window: Annotated[
        str | None, typer.Option("--window", metavar="TIME", help="One window; else a 20th of the time, at most 3570s.")
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="GOAL",
            help="What is to be better: exposed_p99, exposed_p99=20ms, hit_tokens; with TRACE also ttft_p99; with "
            "--verify also exposed, the mean, which it is by default.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="With TRACE: write the changed file here.", callback=checked_settings
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="With TRACE: a key that needs a restart and may change too: pool.size."),
    ] = None,
    last: RecordingsEnd = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the windows as a page.", callback=checked_file)
    ] = None,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Find better settings by a recording, or see whether a file is better on the running server.

    With TRACE: replays it under other values of the keys that a replay can judge, and changes the fewest of them, and
    nothing within the noise. The file that is written differs from --config in those keys only. Where the recording's
    own configuration is not predicted, nothing is recommended.

    With --verify: windows under the server's own file and under another one, in turn, and a paired test.

    The watched file is not written. The server holds the other settings, and goes back to its file's when a window
    ends, when they make loads fail or p99 of exposed time rise, at Ctrl-C, and when this command dies.

    Exit code of --verify 0: the file is better. 1: it is not, or was taken back, or somebody edited the watched file.
    2: wrong input, no server, or a recording without trust; nothing is written or tried.

    \b
    Examples:
      layerflow tune monday.lfr --config layerflow.toml --goal exposed_p99=20ms -o tuned.toml
      layerflow tune --verify tuned.toml --for 20m --json report.json --html report.html
    """
    if (verify is None) == (trace is None):
        raise ConfigError("give a recording to find settings by, or --verify FILE to try a file on the running server")
    if trace is not None:
        from layerflow_cli.tuned_file import Wanted, tune_file  # noqa: PLC0415 - `--help` stays quick

        refuse_foreign(context, "belongs to --verify", "duration", "window", "html", "endpoint")
        if config is None:
            raise ConfigError("which file is to be tuned? Give it with --config")
        last_s = parse_duration("--last", last) if last is not None else math.inf
        tune_file(Wanted(trace, config, goal or "exposed_p99", tuple(also or ()), output, json_file, last_s))
        return
    assert verify is not None
    refuse_foreign(context, "belongs to a recording, and --verify writes no file", "output", "also", "last")
    seconds = parse_duration("--for", duration)
    window_s = None if window is None else parse_duration("--window", window)
    report = _verify(endpoint_of(endpoint, config), verify, goal or "exposed", seconds, window_s, html, json_file)
    if report.verdict.value != "confirmed":
        raise typer.Exit(EXIT_NOT_CONFIRMED)


class RunningServer:
    """The running server, and this machine's clock."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def hold(self, content: bytes, seconds: float) -> None:
        self._control.try_settings(content, seconds, timeout_s=PATIENCE_S)

    def end(self) -> None:
        from layerflow.errors import RemoteError  # noqa: PLC0415

        try:
            self._control.try_settings(b"", 0, timeout_s=PATIENCE_S)
        except RemoteError as error:
            if error.code != "trial":  # ours has ended, and another client's has begun
                raise

    def look(self) -> Look:
        from layerflow.tuning.verify import look_of  # noqa: PLC0415

        return look_of(self._control.status(PATIENCE_S), time.monotonic())

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def parse_goal(text: str) -> tuple[Goal, float | None]:
    """A goal, and the seconds that it is to reach.

    :raises ConfigError: there is no such goal.
    """
    from layerflow.tuning.verify import Goal  # noqa: PLC0415 - `--help` stays quick

    name, given, target = text.partition("=")
    if name == "ttft_p99":
        raise ConfigError("--goal ttft_p99: a server does not see first tokens; verify by exposed_p99")
    if name not in set(Goal) or (given and name != Goal.EXPOSED_P99):
        raise ConfigError(f"--goal {text}: use exposed, exposed_p99, exposed_p99=20ms or hit_tokens")
    return Goal(name), parse_duration("--goal exposed_p99=", target, plain=False) if given else None


def _verify(
    endpoint: str,
    path: Path,
    goal_text: str,
    seconds: float,
    window_s: float | None,
    html: Path | None,
    json_file: Path | None,
) -> Report:
    from layerflow.agent.control import Control  # noqa: PLC0415 - pulls zmq in
    from layerflow.errors import RemoteError  # noqa: PLC0415
    from layerflow.tuning.verify import Report, timing, verify  # noqa: PLC0415
    from layerflow_cli.output import console, folded  # noqa: PLC0415

    goal, target_s = parse_goal(goal_text)
    content = _read(path)
    when = timing(seconds, window_s)
    check_listened(endpoint)
    control = Control(endpoint, engine="tune --verify")
    screen = console(stderr=True)
    try:
        try:
            dry = control.try_settings(content, seconds=1.0, dry=True)
        except RemoteError as error:
            raise ConfigError(f"{path}: {error.message}") from None
        changes, lost = dry["changes"], dry.get("overruled", {})
        without = f"without effect here: {_overruled(lost)}" if lost else ""
        if not changes:
            raise ConfigError(f"{path}: changes nothing of what holds on this server{without and '; ' + without}")
        file = (control.status()["config"] or {}).get("sha256", "")
        report = Report(goal, changes, file, hashlib.sha256(content).hexdigest(), target_s, overruled=lost)
        windows = f"{when.pairs} pairs of windows of {when.window_s:g} s, Ctrl-C ends it"
        for said in filter(None, (f"{path} changes {_changes(changes)}; {windows}", without)):
            for line in folded(said, _WIDTH):
                screen.print(line, soft_wrap=True, highlight=False)
        try:
            verify(
                RunningServer(control),
                content,
                report,
                when,
                lambda window: screen.print(_line(window), highlight=False),
            )
        except BaseException:  # the way in which it ended counts, and its figures are not lost
            try:
                _show(report, path, html, json_file)
            except ConfigError as error:
                typer.echo(f"layerflow: {error}", err=True)
            raise
        _show(report, path, html, json_file)
    finally:
        control.close()
    return report


def _read(path: Path) -> bytes:
    from layerflow.config.settings import Settings  # noqa: PLC0415 - `--help` stays quick
    from layerflow.sim.recorded import is_recording  # noqa: PLC0415
    from layerflow.wire.messages import MAX_SETTINGS_BYTES  # noqa: PLC0415

    if is_recording(path):
        raise ConfigError(
            f"{path}: is a recording; --verify tries the file that `layerflow tune {path} -o FILE` writes"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    Settings.load(path, content=content)
    if len(content) > MAX_SETTINGS_BYTES:
        raise ConfigError(f"{path}: has {len(content):,} bytes; at most {MAX_SETTINGS_BYTES:,} can be tried")
    return content


def _show(report: Report, path: Path, html: Path | None, json_file: Path | None) -> None:
    """:raises ConfigError: a file cannot be written; the figures are told all the same."""
    from layerflow_cli.output import write_json  # noqa: PLC0415
    from layerflow_cli.windows_page import write_page  # noqa: PLC0415

    told = report.plain()

    def figures() -> None:
        if write_json(json_file, told):
            return
        for line in _told(report, told, path):
            typer.echo(line)

    write_all(lambda: None if html is None else write_page(html, path.name, report), figures)


def _told(report: Report, told: dict[str, Any], path: Path) -> Iterator[str]:
    """The picture, the figures and the verdict, in 80 columns."""
    shown = [window.exposed.mean_s * 1e3 for window in report.windows]
    most = max((each for each in shown if not math.isnan(each)), default=0.0) or 1.0
    yield "  exposed ms of a step with loads, by window"
    for number, (window, mean) in enumerate(zip(report.windows, shown, strict=True), 1):
        bar = (
            ""
            if math.isnan(mean)
            else ("█" if window.arm.value == "tuned" else "░") * max(1, round(_BAR * mean / most))
        )
        yield f"{number:4} {window.arm.value:5} {bar:<{_BAR}} {_figure(mean):>9}" + (
            "" if window.whole else "  cut off"
        )
    yield ""
    if any(row["pairs"] for row in told["figures"].values()):
        yield from _table(told)
        yield ""
    end = "" if report.reason.endswith(("?", "!", ".")) else "."
    yield from textwrap.wrap(f"{path}: {report.verdict.value}: {report.reason}{end}", _WIDTH, break_on_hyphens=False)
    if report.as_before:
        yield "The server holds its own file's settings; the file is as it was."
    elif report.gone:
        yield "The server did not answer at the end: it goes back to its own file's settings"
        yield "as soon as it notices that this command has left."
    elif report.other:
        yield "Another client tries settings on the server now."
    else:
        yield "The server holds what its file says now; if it refuses that, `layerflow status`"
        yield "says why, and what it held before holds on."


def _table(told: dict[str, Any]) -> Iterator[str]:
    yield f"{'':16} {'file':>9} {'tuned':>9} {'difference':>11} {'95 % interval':>22} {'p':>6}"
    for name, label, factor in (
        ("exposed_ms", "exposed ms", 1.0),
        ("exposed_p99_ms", "exposed p99 ms", 1.0),
        ("hit_share", "hit tokens %", 100.0),
    ):
        row = told["figures"][name]
        low, high = (_figure(row[each] * factor) for each in ("low", "high"))
        yield (
            f"{label:16} {_figure(row['file'] * factor):>9} {_figure(row['tuned'] * factor):>9} "
            f"{_figure(row['difference'] * factor):>11} {low + ' ... ' + high:>22} {row['p_better']:6.3f}"
        )
    failed = told["failed_loads"]
    yield f"{'failed loads':16} {failed['file']:9} {failed['tuned']:9}"


def _changes(changes: dict[str, Any]) -> str:
    from layerflow.tuning.edit import as_toml  # noqa: PLC0415

    return ", ".join(f"{key} = {as_toml(key, value)}" for key, value in changes.items())


def _overruled(lost: Mapping[str, str]) -> str:
    """Which keys of the file the server's flags and environment win over."""
    return ", ".join(
        f"{key}, which {'a flag of the server' if by == 'a flag' else by} sets" for key, by in lost.items()
    )


def _line(window: Window) -> str:
    return (
        f"{window.arm.value:5} {window.seconds:6.1f} s {window.exposed.count:6} steps load, exposed "
        f"{_figure(window.exposed.mean_s * 1e3)} ms, p99 {_figure(window.exposed.quantile_s(0.99) * 1e3)} ms, "
        f"{window.failed_loads} fail"
    )


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
