"""``layerflow tune TRACE``: what to change in a configuration file, by a recording's replay; and the file."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from layerflow.errors import ConfigError
from layerflow_cli.output_file import write_all, write_file

if TYPE_CHECKING:
    from layerflow.tuning.search import Aim, Found, Gain

_WIDTH = 80
_ROUNDS = 3
"""About so many times all values are tried: beside the file, beside what was chosen, in pairs."""


class Wanted(NamedTuple):
    """What is asked for.

    :param goal: as it was given. :param also: sizing keys that may change. :param output: None = only say it.
    :param last_s: of the recording only so many of its last seconds.
    """

    trace: Path
    config: Path
    goal: str
    also: tuple[str, ...]
    output: Path | None
    json_file: Path | None
    last_s: float = math.inf


def tune_file(wanted: Wanted) -> None:
    """Search, write the file, and say what was found.

    :raises ConfigError: the recording or the file cannot be used, or the replay is not to be believed; nothing is
        written.
    """
    from layerflow.sim.recorded import is_recording  # noqa: PLC0415 - `--help` stays quick
    from layerflow.sim.replay import Replay  # noqa: PLC0415
    from layerflow.tuning.edit import Written, as_toml, edited  # noqa: PLC0415
    from layerflow.tuning.recorded import RecordedJudge, reason  # noqa: PLC0415
    from layerflow.tuning.search import Search  # noqa: PLC0415
    from layerflow_cli.output import progress, write_json  # noqa: PLC0415
    from layerflow_cli.replay_view import against  # noqa: PLC0415

    aim, target = parse_aim(wanted.goal)
    if wanted.output is not None:
        _check_replaced(wanted.output)
    try:
        text = wanted.config.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{wanted.config}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if not wanted.trace.is_file():
        raise ConfigError(f"{wanted.trace}: there is no such file")
    if not is_recording(wanted.trace):
        raise ConfigError(
            f"{wanted.trace}: is no recording, so nothing says whether a replay of it can be believed; make one with "
            "`layerflow record`"
        )
    replay = Replay.read(wanted.trace, wanted.last_s)
    judge = RecordedJudge(replay, wanted.config)
    notes: list[str] = []
    candidates = judge.candidates(wanted.also, notes)
    if not replay.trust.trusted:
        raise ConfigError(
            f"{wanted.trace}: nothing is recommended, because its own configuration is not predicted: "
            f"{'; '.join(against(replay.trust))}"
        )
    with progress(_ROUNDS * sum(map(len, candidates.values())), about=True) as advance:
        current = judge.current()
        search = Search(judge, aim, candidates, current, target=target, tell=lambda changes: advance(_named(changes)))
        found = search.run()
    found.notes += notes
    changes = {
        change.key: Written(
            as_toml(change.key, change.after),
            f"was {_toml(change.key, change.before)}; {reason(change.key, change.before, change.after)}; "
            f"{_gain(change.gain, aim)} (predicted; ± of this recording's windows)",
        )
        for change in found.changes
    }
    written: list[Path] = []
    tuned_text = edited(text, changes) if changes else None

    def file() -> None:
        if wanted.output is not None and tuned_text is not None:
            write_file("-o", wanted.output, tuned_text)
            written.append(wanted.output)

    def figures() -> None:
        if write_json(wanted.json_file, _plain(found, target, written)):
            return
        for line in _told(found, wanted, target, written):
            typer.echo(line)

    write_all(file, figures)


def _check_replaced(output: Path) -> None:
    """:raises ConfigError: what is there is no configuration."""
    from layerflow.config.settings import Settings  # noqa: PLC0415
    from layerflow.config.sources import read_toml  # noqa: PLC0415

    if not output.is_file():
        return
    try:
        foreign = bool(read_toml(Settings, output).problems)
    except ConfigError:
        foreign = True
    if foreign:
        raise ConfigError(f"-o {output}: there is a file that is no configuration of layerflow; give another name")


def parse_aim(text: str) -> tuple[Aim, float | None]:
    """A goal, and the figure that it is to reach: seconds.

    :raises ConfigError: there is no such goal.
    """
    from layerflow.tuning.search import Aim  # noqa: PLC0415
    from layerflow_cli.options import parse_duration  # noqa: PLC0415

    name, given, target = text.partition("=")
    if name not in set(Aim) or (given and name == Aim.HIT_TOKENS):
        raise ConfigError(f"--goal {text}: use exposed_p99, exposed_p99=20ms, ttft_p99 or hit_tokens")
    return Aim(name), parse_duration(f"--goal {name}=", target, plain=False) if given else None


def _told(found: Found, wanted: Wanted, target: float | None, written: Sequence[Path]) -> Iterator[str]:
    """What is recommended and what is not, in 80 columns."""
    aim = found.aim
    others = found.judged - 1
    yield f"{wanted.trace.name}: replayed under {wanted.config.name}, and under {others} other settings."
    yield f"{aim.value}: {_shown(found.before, aim)} as it is, {_shown(found.after, aim)} with what follows:"
    yield f"{_gain(found.gain, aim)} by prediction, ± of this recording's windows."
    if target is not None:
        yield f"The goal of {_shown(target, aim)} is {'' if _reached(found, target) else 'NOT '}reached."
    yield ""
    if not found.changes:
        yield "Nothing is changed: " + (
            "it is not needed."
            if target is not None and _reached(found, target)
            else "nothing helps that can be told from noise."
        )
    for change in found.changes:
        yield f"change {change.key}: {_toml(change.key, change.before)} -> {_toml(change.key, change.after)}"
        yield f"       {_gain(change.gain, aim)} of its own"
    if found.left_alone:
        yield ""
        yield f"{'left alone':32} {'best other':>12} {'brings':>20}"
    for left in found.left_alone:
        best = "-" if left.best is None else _toml(left.key, left.best)
        yield f"{left.key:32} {best:>12} {'-' if left.gain is None else _gain(left.gain, aim):>20}"
        yield from textwrap.wrap(left.why, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    for note in found.notes:
        yield ""
        yield from textwrap.wrap(note, _WIDTH)
    if not found.changes:
        if wanted.output is not None:
            yield ""
            yield f"{wanted.output} is not written."
        return
    yield ""
    if wanted.output is None:
        yield "Give -o FILE to have it written."
    for path in written:
        yield f"{path} is written. Is it better? layerflow tune --verify {path}"
    if not written:
        return
    if any(change.key == "pool.size" for change in found.changes):
        yield "pool.size needs a restart: it cannot be verified beside the file in force."


def _reached(found: Found, target: float) -> bool:
    """Whether the figure of what is recommended is as good as it was to be; of times, which have a target."""
    return found.after <= target


def _plain(found: Found, target: float | None, written: Sequence[Path]) -> dict[str, Any]:
    suffix, factor = ("share", 1.0) if found.aim.value == "hit_tokens" else ("ms", 1e3)

    def gain(of: Gain | None) -> dict[str, Any] | None:
        if of is None:
            return None
        return {f"gain_{suffix}": of.value * factor, f"error_{suffix}": of.error * factor, "doubt": of.doubt}

    return {
        "goal": found.aim.value,
        f"before_{suffix}": found.before * factor,
        f"after_{suffix}": found.after * factor,
        "gain": gain(found.gain),
        "target_ms": None if target is None else target * 1e3,
        "reached": None if target is None else _reached(found, target),
        "judged": found.judged,
        "notes": found.notes,
        "written": str(written[0]) if written else None,
        "changes": [
            {"key": each.key, "before": each.before, "after": each.after, "gain": gain(each.gain)}
            for each in found.changes
        ],
        "left_alone": [
            {"key": each.key, "best": each.best, "gain": gain(each.gain), "why": each.why} for each in found.left_alone
        ],
    }


def _named(changes: Any) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} = {_toml(key, value)}" for key, value in changes.items())


def _toml(key: str, value: Any) -> str:
    from layerflow.tuning.edit import as_toml  # noqa: PLC0415

    return str(as_toml(key, value))


def _shown(value: float, aim: Aim) -> str:
    return f"{value * 100:.1f} %" if aim.value == "hit_tokens" else f"{value * 1e3:.3g} ms"


def _gain(gain: Gain, aim: Aim) -> str:
    """A gain and its own error; better is always positive for hits, and negative for times."""
    if aim.value == "hit_tokens":
        return f"{gain.value * 100:+.1f} ± {gain.error * 100:.1f} points"
    return f"{-gain.value * 1e3:+.3g} ± {gain.error * 1e3:.2g} ms"
