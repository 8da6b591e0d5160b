"""Windows of two settings in turn, on a server of which everything is known, under a virtual clock."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.errors import ConfigError, SessionError
from layerflow.observe.spread import GROWTH, Spread, spread_of
from layerflow.tuning.paired import LEAST_PAIRS, binomial_tail, compare
from layerflow.tuning.verify import MARGIN_S, Arm, Goal, Look, Report, Verdict, Window, look_of, timing, verify
from layerflow.wire.messages import MAX_TRIED_S
from layerflow_cli.commands.tune import _told

TUNED = b"[transfer]\nprefetch_layers = 4\n"
times = st.lists(st.floats(1e-5, 50.0), min_size=1, max_size=200)


class Known:
    """A server that exposes `file_s` or `tuned_s` per step, give or take a tenth; ten steps a second."""

    def __init__(
        self, file_s: float, tuned_s: float, *, failing: float = 0.0, seed: int = 1, tuned_hits: int = 60
    ) -> None:
        self._means = {False: file_s, True: tuned_s}
        self._hits = {False: 60, True: tuned_hits}
        self._failing = failing
        self._random = random.Random(seed)
        self._look = Look(0.0, "1", "file", "", "", 0.0, 0.0, 0.0, Spread())
        self.held = b""
        self.on = False
        self.tuned_seconds = 0.0
        self.edit_at = math.inf

    def hold(self, content: bytes, seconds: float) -> None:
        self.held, self.on = content, True
        self._look = replace(self._look, trial=hashlib.sha256(content).hexdigest())

    def end(self) -> None:
        self.held, self.on = b"", False
        self._look = replace(self._look, trial="")

    def look(self) -> Look:
        if self._look.at >= self.edit_at:
            return replace(self._look, file="edited", trial="", ended="the file was edited")
        return self._look

    def sleep(self, seconds: float) -> None:
        tuned = bool(self.held)
        exposed = self._look.exposed.plus(Spread())
        steps = max(1, round(10 * seconds))
        for _ in range(steps):
            exposed.add(self._means[tuned] * self._random.uniform(0.9, 1.1))
        failed = sum(self._random.random() < self._failing for _ in range(steps)) if tuned else 0
        self.tuned_seconds += seconds if tuned else 0.0
        self._look = replace(
            self._look,
            at=self._look.at + seconds,
            failed_loads=self._look.failed_loads + failed,
            hit_tokens=self._look.hit_tokens + self._hits[tuned] * steps,
            miss_tokens=self._look.miss_tokens + (100 - self._hits[tuned]) * steps,
            exposed=exposed,
        )


def tried(server: Known, goal: Goal = Goal.EXPOSED, target_s: float | None = None) -> Report:
    report = Report(goal, {"transfer.prefetch_layers": 4}, "file", "tuned", target_s)
    verify(server, TUNED, report, timing(200, None))
    assert not server.on, "the server was left with the tuned settings"
    return report


def test_better_settings_are_confirmed_and_never_left_in_force() -> None:
    report = tried(Known(0.010, 0.008))
    assert report.verdict is Verdict.CONFIRMED
    assert [window.arm for window in report.windows[:4]] == [Arm.FILE, Arm.TUNED, Arm.TUNED, Arm.FILE]
    told = report.plain()["figures"]["exposed_ms"]
    assert told["pairs"] == 10 and told["difference"] == pytest.approx(-2.0, abs=0.2) and told["p_better"] < 0.01
    assert told["low"] < told["difference"] < told["high"] < 0


def test_pairs_that_are_better_are_counted() -> None:
    report = Report(Goal.EXPOSED, {}, "file", "tuned")
    for number in range(10):
        for arm, mean in ((Arm.FILE, 0.010), (Arm.TUNED, 0.0105 if number < 2 else 0.005)):
            exposed = Spread()
            for _ in range(20):
                exposed.add(mean)
            report.windows.append(Window(arm, 0.0, 1.0, 0, 10, 100, exposed))
    report.judge()
    assert report.verdict is Verdict.CONFIRMED and "over 10 pairs of windows, in 8 of them (p = 0.0" in report.reason
    assert report.plain()["figures"]["exposed_ms"]["pairs_better"] == 8


@pytest.mark.parametrize(("change", "why"), [("incarnation", "started anew"), ("file", "file was edited")])
def test_nothing_is_put_in_force_on_another_server_or_over_an_edit(change: str, why: str) -> None:
    server, held = Known(0.010, 0.008), list[bytes]()

    def window_is_over(_: Window) -> None:
        server._look = replace(server._look, **{change: "another"})

    report = Report(Goal.EXPOSED, {"transfer.prefetch_layers": 4}, "file", "tuned")
    hold = server.hold
    server.hold = lambda content, seconds: (held.append(content), hold(content, seconds))  # type: ignore[method-assign]
    verify(server, TUNED, report, timing(200, None), window_is_over)
    assert report.verdict is Verdict.CUT_SHORT and why in report.reason
    assert TUNED not in held and not server.on


def test_a_goal_that_is_not_reached_is_not_confirmed() -> None:
    assert tried(Known(0.010, 0.008), Goal.EXPOSED_P99, 0.005).verdict is Verdict.NOT_CONFIRMED
    assert tried(Known(0.010, 0.004), Goal.EXPOSED_P99, 0.005).verdict is Verdict.CONFIRMED


@pytest.mark.parametrize(
    ("goal", "server", "why"),
    [
        (Goal.HIT_TOKENS, Known(0.005, 0.0059, tuned_hits=62), "exposed time rises from 5"),
        (Goal.HIT_TOKENS, Known(0.005, 0.005, tuned_hits=62), ""),
        (Goal.HIT_TOKENS, Known(0.00005, 0.000056, tuned_hits=62), ""),
        (Goal.EXPOSED, Known(0.010, 0.008, tuned_hits=58), "2.0 points less"),
    ],
    ids=["slower", "as quick", "slower by nothing", "fewer hits"],
)
def test_what_makes_another_figure_worse_is_not_confirmed(goal: Goal, server: Known, why: str) -> None:
    report = tried(server, goal)
    assert report.verdict is (Verdict.NOT_CONFIRMED if why else Verdict.CONFIRMED), report.reason
    assert why in report.reason


def test_a_better_mean_with_a_worse_tail_is_not_confirmed() -> None:
    class Tailed(Known):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.held:
                self._look.exposed.add(0.0124)  # slower than the file's slowest, and not by what is taken back

    report = tried(Tailed(0.010, 0.008))
    assert report.verdict is Verdict.NOT_CONFIRMED and report.reason.startswith("p99 of exposed time rises")
    assert report.paired(Goal.EXPOSED).p_lower < 0.01


def test_settings_that_make_no_difference_are_not_confirmed() -> None:
    verdicts = [tried(Known(0.010, 0.010, seed=seed)).verdict for seed in range(20)]
    assert verdicts.count(Verdict.CONFIRMED) <= 3 and Verdict.TAKEN_BACK not in verdicts


@pytest.mark.parametrize(("factor", "failing"), [(2.0, 0.0), (1.0, 0.5)])
def test_harm_is_taken_back_within_the_first_window(factor: float, failing: float) -> None:
    server = Known(0.010, 0.010 * factor, failing=failing)
    report = tried(server)
    assert report.verdict is Verdict.TAKEN_BACK and server.tuned_seconds <= 5
    assert not report.windows[-1].whole and len(report.windows) == 2
    assert ("loads fail" if failing else "exposed time rises") in report.reason


def test_an_edit_of_the_file_ends_it() -> None:
    server = Known(0.010, 0.008)
    server.edit_at = 100.0
    report = tried(server)
    assert report.verdict is Verdict.CUT_SHORT and "edited" in report.reason
    assert not report.as_before


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_server_that_is_gone_is_the_reports_reason(comes_back: bool) -> None:
    class Gone(Known):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.tuned_seconds > 12:
                raise SessionError("the server did not answer")

        def end(self) -> None:
            if not comes_back:
                raise SessionError("nor now")
            super().end()

    report = Report(Goal.EXPOSED, {}, "file", "tuned")
    verify(Gone(0.010, 0.008), TUNED, report, timing(200, None))
    assert report.verdict is Verdict.CUT_SHORT and report.reason == "the server did not answer" and report.windows
    assert (report.as_before, report.gone) == (comes_back, not comes_back)


def test_of_a_server_that_never_answered_nothing_was_tried() -> None:
    class Silent(Known):
        def look(self) -> Look:
            raise SessionError("the server did not answer")

    with pytest.raises(SessionError):
        verify(Silent(0.010, 0.008), TUNED, Report(Goal.EXPOSED, {}, "file", "tuned"), timing(200, None))


def test_another_clients_trial_is_not_as_before() -> None:
    class Taken(Known):
        def end(self) -> None:
            super().end()
            self._look = replace(self._look, trial="another")

    report = Report(Goal.EXPOSED, {}, "file", "tuned")
    verify(Taken(0.010, 0.008), TUNED, report, timing(200, None))
    assert report.verdict is Verdict.CONFIRMED and not report.as_before
    lines = list(_told(report, report.plain(), Path("tuned.toml")))
    assert lines[-1] == "Another client tries settings on the server now."
    report.as_before = True
    *above, last = _told(report, report.plain(), Path("tuned.toml"))
    assert above == lines[:-1] and "holds its own file's settings" in last


def test_a_server_with_the_same_pid_is_another_one_after_a_restart() -> None:
    status = {
        "pid": 1,
        "started_at": 1.7e9,
        "config": None,
        "trial": {"on": False, "sha256": "", "reason": ""},
        "figures": {"lookup_hit_tokens_total": 0, "lookup_miss_tokens_total": 0},
        "exposed_load": Spread().plain(),
    }
    here, again = (look_of(status | {"started_at": at}, 0.0).incarnation for at in (1.7e9, 1.7e9 + 60))
    assert here != again and look_of(status, 1.0).incarnation == here


def test_an_interrupt_puts_the_files_settings_back() -> None:
    class Interrupted(Known):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.tuned_seconds > 12:
                raise KeyboardInterrupt

    server = Interrupted(0.010, 0.008)
    with pytest.raises(KeyboardInterrupt):
        tried(server)
    assert not server.on


def test_without_load_nothing_is_confirmed() -> None:
    class Idle(Known):
        def look(self) -> Look:
            return replace(super().look(), exposed=Spread(), hit_tokens=0.0, miss_tokens=0.0)

    report = tried(Idle(0.010, 0.008))
    assert report.verdict is Verdict.NOT_CONFIRMED and "under load" in report.reason


def test_too_little_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 5 pairs"):
        timing(60, 10)
    assert timing(100, 10).pairs == LEAST_PAIRS


def test_no_window_is_longer_than_a_server_holds_settings() -> None:
    day = timing(86_400, None)
    assert day.window_s + MARGIN_S == MAX_TRIED_S and day.pairs == 12
    with pytest.raises(ConfigError, match="holds settings for 3570 s"):
        timing(86_400, 3571)


@given(times, times)
@settings(deadline=None)
def test_a_spreads_quantiles_are_those_of_its_values(before: list[float], after: list[float]) -> None:
    spread = Spread()
    for each in before:
        spread.add(each)
    earlier = spread_of(spread.plain())
    for each in after:
        spread.add(each)
    new = spread.since(earlier)
    assert new.count == len(after) and new.mean_s == pytest.approx(sum(after) / len(after), rel=1e-6, abs=1e-8)
    for share in (0.5, 0.99):
        exact = sorted(after)[max(1, math.ceil(share * len(after))) - 1]
        assert exact / GROWTH <= new.quantile_s(share) <= exact * GROWTH
    assert new.above(max(after)) == 0 and new.above(min(after) / GROWTH**2) == len(after)


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=10))
@settings(deadline=None, max_examples=40)
def test_turning_the_pairs_turns_the_verdict(pairs: list[tuple[float, float]]) -> None:
    there = compare([a for a, _ in pairs], [b for _, b in pairs])
    back = compare([b for _, b in pairs], [a for a, _ in pairs])
    assert there.p_lower == pytest.approx(back.p_higher) and there.difference == pytest.approx(-back.difference)
    assert there.p_lower + there.p_higher >= 1 and there.p_lower >= 0.5 ** len(pairs)


def test_binomial_tails() -> None:
    assert binomial_tail(0, 10, 0.5) == 1 and binomial_tail(11, 10, 0.5) == 0
    assert binomial_tail(10, 10, 0.5) == pytest.approx(0.5**10)
    assert binomial_tail(1, 100, 0.01) == pytest.approx(1 - 0.99**100)
