"""Is a tuned file better on the running server? Windows of both in turn, a paired test, and back where it harms.

The server holds the tuned settings (``TrySettings`` of the protocol), and only for as long as this client lives and a
window lasts: the watched file is never written, so nothing is left behind, however this ends.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from layerflow.errors import ConfigError, LayerflowError, SessionError
from layerflow.observe.spread import Spread, spread_of
from layerflow.tuning.paired import LEAST_PAIRS, SIGNIFICANT, Paired, binomial_tail, compare
from layerflow.wire.messages import MAX_TRIED_S

LOOK_S: Final = 1.0
"""How often a window of the tuned settings is looked at for harm."""
MARGIN_S: Final = 30.0
"""So much longer than its window the server holds settings, in case this client is slow; a dead one's end at once."""
LEAST_WINDOW_S: Final = 1.0
MOST_WINDOW_S: Final = MAX_TRIED_S - MARGIN_S
PAIRS: Final = 10
"""As many, unless the windows' length is given."""
UNLIKELY: Final = 1e-4
"""Settings are taken back where as many slow steps would come by chance this rarely: they are looked at many times."""
WORSE: Final = 1.25
SLACK_S: Final = 0.0005
"""A step is slow that holds its engine for longer than p99 under the file, a quarter and this more."""
LEAST_HARMED: Final = 3
"""Fewer slow steps, or failed loads, are no pattern."""
POINT: Final = 0.01
"""So much less of the prompts' tokens may hit, where another figure is the goal."""
SLOWER: Final = 0.02
"""So much longer, as a share, may steps hold their engines, where another figure is the goal."""
LEAST_SLOWER_S: Final = 0.0001
"""And at least so much longer."""


class Goal(enum.StrEnum):
    """The figure that is to be better."""

    EXPOSED = "exposed"  #: what a step with loads makes its engine wait, on average
    EXPOSED_P99 = "exposed_p99"  #: the 99th percentile of the same
    HIT_TOKENS = "hit_tokens"  #: the share of prompts' tokens that lookups find


class Arm(enum.StrEnum):
    """Whose settings a window has."""

    FILE = "file"
    TUNED = "tuned"


@dataclass(frozen=True, slots=True)
class Look:
    """What the server's status says at one moment; counts since it began.

    :param at: seconds of the same clock for all looks. :param incarnation: another one = another server.
    :param file: sha256 of the watched file whose settings hold outside of trials.
    :param trial: sha256 of what is tried; "" = nothing. :param ended: why the last trial has ended.
    """

    at: float
    incarnation: str
    file: str
    trial: str
    ended: str
    failed_loads: float
    hit_tokens: float
    miss_tokens: float
    exposed: Spread


def look_of(status: Mapping[str, Any], at: float) -> Look:
    """Read a status.

    :raises SessionError: it is another layerflow's, without these figures.
    """
    try:
        config, trial, figures = status["config"] or {}, status["trial"], status["figures"]
        failed = figures.get("failed_loads_total", {})
        return Look(
            at,
            # A container's server has the same number after a restart.
            f"{status['pid']} since {status['started_at']}",
            str(config.get("sha256", "")),
            trial["sha256"] if trial["on"] else "",
            trial["reason"],
            sum(failed.values()) if isinstance(failed, Mapping) else float(failed),
            float(figures["lookup_hit_tokens_total"]),
            float(figures["lookup_miss_tokens_total"]),
            spread_of(status["exposed_load"]),
        )
    except (KeyError, TypeError, ValueError):
        raise SessionError("the server's status lacks figures; run the same layerflow on both sides") from None


@dataclass(frozen=True, slots=True)
class Window:
    """What came between two looks.

    :param began: seconds since the first window. :param whole: it was not cut off.
    :param exposed: of steps with loads, how long each held its engine.
    """

    arm: Arm
    began: float
    seconds: float
    failed_loads: int
    hit_tokens: int
    tokens: int
    exposed: Spread
    whole: bool = True

    def figure(self, goal: Goal) -> float:
        """Seconds, or a share; NaN where nothing came that has one."""
        if goal is Goal.HIT_TOKENS:
            return self.hit_tokens / self.tokens if self.tokens else math.nan
        return self.exposed.mean_s if goal is Goal.EXPOSED else self.exposed.quantile_s(0.99)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "settings": self.arm.value,
            "began_s": round(self.began, 3),
            "seconds": round(self.seconds, 3),
            "whole": self.whole,
            "loading_steps": self.exposed.count,
            "exposed_ms": self.exposed.mean_s * 1e3,
            "exposed_p99_ms": self.exposed.quantile_s(0.99) * 1e3,
            "failed_loads": self.failed_loads,
            "prompt_tokens": self.tokens,
            "hit_share": self.figure(Goal.HIT_TOKENS),
        }


def between(arm: Arm, first: Look, last: Look, origin: float, *, whole: bool = True) -> Window:
    """The window between two looks at one server."""
    hit = round(last.hit_tokens - first.hit_tokens)
    return Window(
        arm,
        first.at - origin,
        last.at - first.at,
        round(last.failed_loads - first.failed_loads),
        hit,
        hit + round(last.miss_tokens - first.miss_tokens),
        last.exposed.since(first.exposed),
        whole,
    )


class Verdict(enum.StrEnum):
    """How it has ended."""

    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "not confirmed"
    TAKEN_BACK = "taken back"
    CUT_SHORT = "cut short"


@dataclass(slots=True)
class Report:
    """What was seen, window by window, and what it says.

    :param changes: the keys that differ from the file's, and what was tried.
    :param target_s: what :attr:`Goal.EXPOSED_P99` is to reach; None = anything better will do.
    :param as_before: when it had ended, the server held its file's settings, and the file was what it had been.
    :param gone: the server did not answer then. :param other: another client's settings were tried then.
    :param overruled: keys of the tuned file that the server's flags or environment set otherwise, and which of them.
    """

    goal: Goal
    changes: Mapping[str, Any]
    file: str
    tuned: str
    target_s: float | None = None
    windows: list[Window] = field(default_factory=list)
    verdict: Verdict = Verdict.CUT_SHORT
    reason: str = "it was interrupted"
    as_before: bool = False
    gone: bool = False
    other: bool = False
    overruled: Mapping[str, str] = field(default_factory=dict)

    def together(self, arm: Arm) -> Window:
        """All windows of one, as one."""
        own = [window for window in self.windows if window.arm is arm]
        exposed = Spread()
        for window in own:
            exposed = exposed.plus(window.exposed)
        return Window(
            arm,
            own[0].began if own else 0.0,
            sum(window.seconds for window in own),
            sum(window.failed_loads for window in own),
            sum(window.hit_tokens for window in own),
            sum(window.tokens for window in own),
            exposed,
        )

    def paired(self, goal: Goal) -> Paired:
        """A figure over the pairs of whole windows."""
        file, tuned = ([w.figure(goal) for w in self.windows if w.arm is arm and w.whole] for arm in Arm)
        pairs = min(len(file), len(tuned))
        return compare(file[:pairs], tuned[:pairs])

    def judge(self) -> None:
        """Set the verdict, by all windows."""
        self.verdict, self.reason = self._judged()

    def _judged(self) -> tuple[Verdict, str]:
        told = self.paired(self.goal)
        if told.pairs < LEAST_PAIRS:
            what = "prompts" if self.goal is Goal.HIT_TOKENS else "steps with loads"
            return (
                Verdict.NOT_CONFIRMED,
                f"{told.pairs} pairs of windows had {what}, and {LEAST_PAIRS} are needed: try it longer, or under load",
            )
        if why := failures_rise(self.together(Arm.FILE), self.together(Arm.TUNED)):
            return Verdict.NOT_CONFIRMED, why
        for goal in Goal:
            if goal is not self.goal and (why := self._worse(goal)):
                return Verdict.NOT_CONFIRMED, why
        better, worse = told.p_lower, told.p_higher
        if self.goal is Goal.HIT_TOKENS:
            better, worse = worse, better
        if worse <= SIGNIFICANT:
            return Verdict.NOT_CONFIRMED, f"it is worse (p = {worse:.3f})"
        if better > SIGNIFICANT:
            return Verdict.NOT_CONFIRMED, f"the difference is within the noise (p = {better:.2f})"
        if self.target_s is not None and told.tuned > self.target_s:
            return (
                Verdict.NOT_CONFIRMED,
                f"it is better (p = {better:.3f}), but p99 is {told.tuned * 1e3:.3g} ms of {self.target_s * 1e3:g} ms",
            )
        of_them = told.higher if self.goal is Goal.HIT_TOKENS else told.lower
        return (
            Verdict.CONFIRMED,
            f"it is better over {told.pairs} pairs of windows, in {of_them} of them (p = {better:.3f})",
        )

    def _worse(self, goal: Goal) -> str:
        """How a figure that is not the goal is worse, by more than chance and its slack; "" = it is not."""
        told = self.paired(goal)
        if goal is Goal.HIT_TOKENS:
            if told.p_lower > SIGNIFICANT or told.difference > -POINT:
                return ""
            return f"it hits {-told.difference * 100:.1f} points less of the prompts' tokens (p = {told.p_lower:.3f})"
        if told.p_higher > SIGNIFICANT or told.difference <= max(SLOWER * told.file, LEAST_SLOWER_S):
            return ""
        what = "exposed time" if goal is Goal.EXPOSED else "p99 of exposed time"
        return (
            f"{what} rises from {told.file * 1e3:.3g} ms to {told.tuned * 1e3:.3g} ms a step (p = {told.p_higher:.3f})"
        )

    def plain(self) -> dict[str, Any]:
        """For JSON; times in the units that their names say."""
        figures = {}
        for goal, name, factor in (
            (Goal.EXPOSED, "exposed_ms", 1e3),
            (Goal.EXPOSED_P99, "exposed_p99_ms", 1e3),
            (Goal.HIT_TOKENS, "hit_share", 1.0),
        ):
            told = self.paired(goal)
            better = told.p_higher if goal is Goal.HIT_TOKENS else told.p_lower
            figures[name] = {
                "pairs": told.pairs,
                "pairs_better": told.higher if goal is Goal.HIT_TOKENS else told.lower,
                "file": told.file * factor,
                "tuned": told.tuned * factor,
                "difference": told.difference * factor,
                "low": told.low * factor,
                "high": told.high * factor,
                "p_better": better,
            }
        return {
            "verdict": self.verdict.value,
            "reason": self.reason,
            "goal": self.goal.value,
            "target_ms": None if self.target_s is None else self.target_s * 1e3,
            "changes": dict(self.changes),
            "overruled": dict(self.overruled),
            "file_sha256": self.file,
            "tuned_sha256": self.tuned,
            "as_before": self.as_before,
            "figures": figures,
            "failed_loads": {arm.value: self.together(arm).failed_loads for arm in Arm},
            "windows": [window.plain() for window in self.windows],
        }


def harm(file: Window, tuned: Window) -> str:
    """Why the tuned settings are to be taken back at once; "" = they are not.

    :param file: everything seen under the file. :param tuned: everything seen under them.
    """
    return failures_rise(file, tuned) or _slower(file.exposed, tuned.exposed)


def failures_rise(file: Window, tuned: Window) -> str:
    """Were so many of all failed loads in the tuned windows by chance? By the time that each had."""
    both, seconds = file.failed_loads + tuned.failed_loads, file.seconds + tuned.seconds
    if tuned.failed_loads < LEAST_HARMED or seconds <= 0:
        return ""
    if binomial_tail(tuned.failed_loads, both, tuned.seconds / seconds) > UNLIKELY:
        return ""
    return (
        f"loads fail: {tuned.failed_loads} in {tuned.seconds:.0f} s, and {file.failed_loads} in {file.seconds:.0f} s "
        "under the file"
    )


def _slower(file: Spread, tuned: Spread) -> str:
    if not file.count:
        return ""
    p99 = file.quantile_s(0.99)
    limit = p99 * WORSE + SLACK_S
    slow = tuned.above(limit)
    # One in a hundred is slower than p99, where p99 is known; of few steps the slowest one is known.
    chance = max(0.01, 1 / (file.count + 1))
    if slow < LEAST_HARMED or binomial_tail(slow, tuned.count, chance) > UNLIKELY:
        return ""
    return (
        f"exposed time rises: {slow} of {tuned.count} steps held their engine for over {limit * 1e3:.3g} ms, where the "
        f"file's p99 is {p99 * 1e3:.3g} ms"
    )


class Tried(Protocol):
    """The server, and the time."""

    def hold(self, content: bytes, seconds: float) -> None:
        """Put settings in force for so long; empty = the file's. Returns when they are."""

    def end(self) -> None:
        """Put the file's settings in force."""

    def look(self) -> Look:
        """Look at the server's figures."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long.

    :param window_s: one window, its settling included.
    :param settle_s: of its beginning is not measured: steps are under way that began under the other settings, and
        clients tell of lookups that they answer themselves once a second.
    """

    pairs: int
    window_s: float
    settle_s: float


def timing(seconds: float, window_s: float | None) -> Timing:
    """Divide the time into pairs of windows.

    :param window_s: None = so that there are :data:`PAIRS` pairs, or more or fewer where windows were too long or too
        short then.
    :raises ConfigError: there are too few of them, or they are longer than a server holds settings.
    """
    window = window_s if window_s is not None else min(max(LEAST_WINDOW_S, seconds / (2 * PAIRS)), MOST_WINDOW_S)
    if window > MOST_WINDOW_S:
        raise ConfigError(f"windows of {window:g} s are too long: a server holds settings for {MOST_WINDOW_S:g} s")
    pairs = int(seconds / (2 * window) + 1e-9)
    if window < LEAST_WINDOW_S or pairs < LEAST_PAIRS:
        raise ConfigError(
            f"{seconds:g} s are {pairs} pairs of windows of {window:g} s: at least {LEAST_PAIRS} pairs, of at least "
            f"{LEAST_WINDOW_S:g} s, are needed to tell a difference; try it longer"
        )
    return Timing(pairs, window, min(max(0.1 * window, min(1.0, 0.25 * window)), 0.5 * window))


@dataclass(frozen=True, slots=True)
class _Run:
    report: Report
    when: Timing
    origin: Look


class _CutShort(Exception):
    """Something else has changed the server's settings."""


def verify(
    server: Tried, content: bytes, report: Report, when: Timing, tell: Callable[[Window], None] = lambda _: None
) -> None:
    """Try the settings, window by window, and fill in the report.

    In every second pair the tuned settings come first, so that a load that grows favours neither. The file's come
    first of all, so that there is something to compare with.

    A server that goes away, or refuses to go on, cuts it short; where it does not answer, it puts the file's settings
    in force by itself.

    :param content: of the tuned file.
    :param tell: told of each window that is over.
    :raises LayerflowError: the server does not answer at all, and nothing was tried.
    """
    run = _Run(report, when, server.look())
    try:
        for pair in range(when.pairs):
            for arm in (Arm.FILE, Arm.TUNED) if pair % 2 == 0 else (Arm.TUNED, Arm.FILE):
                window, why = _window(server, arm, content if arm is Arm.TUNED else b"", run)
                report.windows.append(window)
                tell(window)
                if why:
                    report.verdict, report.reason = Verdict.TAKEN_BACK, why
                    return
        report.judge()
    except _CutShort as cut:
        report.verdict, report.reason = Verdict.CUT_SHORT, str(cut)
    except LayerflowError as error:
        report.verdict, report.reason = Verdict.CUT_SHORT, str(error)
    finally:
        _end(server, report)


def _end(server: Tried, report: Report) -> None:
    try:
        server.end()
        last = server.look()
    except LayerflowError:
        report.gone = True
    else:
        report.other = bool(last.trial)
        report.as_before = not last.trial and last.file == report.file


def _window(server: Tried, arm: Arm, content: bytes, run: _Run) -> tuple[Window, str]:
    """One window, and why its settings are to be taken back."""
    report, when, origin = run.report, run.when, run.origin
    expected = hashlib.sha256(content).hexdigest()
    # Connections are made anew by themselves: of another server, or over an edit, nothing is put in force.
    _check_unchanged(server.look(), report, origin)
    server.hold(content, when.window_s + MARGIN_S)
    held = _checked(server.look(), expected, report, origin)
    earlier = report.together(arm)
    file = report.together(Arm.FILE)
    start: Look | None = None
    while True:
        now = _checked(server.look(), expected, report, origin)
        passed = now.at - held.at
        if start is None and passed >= when.settle_s:
            start = now
        if passed >= when.window_s and start is not None and now is not start:
            return between(arm, start, now, origin.at), ""
        if arm is Arm.TUNED:
            # Harm is harm while they settle, too.
            so_far = between(arm, held, now, origin.at, whole=False)
            both = Report(report.goal, {}, "", "", windows=[earlier, so_far]).together(arm)
            if why := harm(file, both):
                return so_far, why
        left = (when.settle_s if start is None else when.window_s) - passed
        server.sleep(max(0.01, min(left, LOOK_S)))


def _check_unchanged(look: Look, report: Report, origin: Look) -> None:
    if look.incarnation != origin.incarnation:
        raise _CutShort("the server was started anew")
    if look.file != report.file:
        raise _CutShort("the watched file was edited")


def _checked(look: Look, expected: str, report: Report, origin: Look) -> Look:
    _check_unchanged(look, report, origin)
    if look.trial != expected:
        raise _CutShort(look.ended or "the server holds other settings")
    return look
