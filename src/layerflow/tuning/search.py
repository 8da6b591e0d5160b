"""Which keys to change: the fewest that bring what can be told from noise.

A judge says what would have happened under a change; here it is a replay of a recording, in tests a formula. Changes
are taken one by one, the best first, while each is better than what stands by more than the noise; where none is, the
best of two keys together are tried. Then each is left out again that is not missed.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from layerflow.errors import ConfigError
from layerflow.sim.replay import LEAST_SAMPLES
from layerflow.sim.simulation import p99_place

Changes = Mapping[str, Any]
"""Values by ``section.key``."""

WINDOWS: Final = 20
"""A trace is cut into so many windows of time, which noise is judged by."""
RESAMPLES: Final = 1000
SURE: Final = 0.01
"""A change is taken where at most this share of the resampled traces say that it brings nothing: many are tried."""
ERRORS: Final = 3
"""And is so many of its standard errors: resampling knows little of the tail that p99 is of."""
WORTH: Final = 0.02
"""And brings at least this share of what stands."""
HIT_SLACK: Final = 0.005
"""So much less of all prompt tokens may hit, where something else is the goal."""
SLOWER: Final = 0.02
COMPARABLE: Final = 0.9
"""An outcome with fewer values than this share of the file's is about something else: loads ahead of a pass, say."""
LEAST_OF_P99: Final = 100
"""Of fewer values p99 is the slowest one."""
_SEED: Final = 11
_CELLS: Final = 1 << 20


class Aim(enum.StrEnum):
    """What is to be better."""

    EXPOSED_P99 = "exposed_p99"
    TTFT_P99 = "ttft_p99"
    HIT_TOKENS = "hit_tokens"


@dataclass(frozen=True, slots=True)
class Timed:
    """Values by the time at which what they are of was recorded: equal times for equal things in every outcome."""

    at: NDArray[np.float64]
    value: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What would have happened under some settings.

    :param exposed_s: of each step with loads. :param ttft_s: of each prompt. :param hit_tokens: of each prompt.
    :param tokens: of all prompts. :param guesses: aims whose values rest on guesses, and of how many.
    """

    exposed_s: Timed
    ttft_s: Timed
    hit_tokens: Timed
    tokens: int
    failed_loads: int = 0
    guesses: Mapping[Aim, str] = field(default_factory=dict)

    def of(self, aim: Aim) -> Timed:
        """The values that an aim is about."""
        if aim is Aim.HIT_TOKENS:
            return self.hit_tokens
        return self.exposed_s if aim is Aim.EXPOSED_P99 else self.ttft_s


def _untold(guess: str) -> str:
    return f"it is not known what computing takes {guess}"


class Judge(Protocol):
    """What is known of a trace."""

    def judge(self, changes: Changes) -> Outcome:
        """What would have happened with the file's settings and these instead.

        :raises ConfigError: they are not permitted together.
        """


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better one outcome is than another, in the aim's unit: seconds, or a share of all prompt tokens.

    :param error: its standard error. :param doubt: the share of resampled traces in which there is none.
    """

    value: float
    error: float
    doubt: float

    def told(self, standing: float) -> bool:
        """Is it more than noise, and worth a line? `standing` is the figure that it is a gain of."""
        clear = self.doubt <= SURE and self.value >= ERRORS * self.error
        return self.value > 0 and clear and self.value >= WORTH * abs(standing)


class Noise:
    """Resampled traces: the same windows drawn for every outcome, so that differences are paired.

    :param begin, end: of the trace.
    """

    def __init__(self, begin: float, end: float) -> None:
        self._edges = np.linspace(begin, end, WINDOWS + 1)[1:-1]
        drawn = np.random.default_rng(_SEED).integers(0, WINDOWS, (RESAMPLES, WINDOWS))
        self._counts = np.stack([(drawn == window).sum(axis=1) for window in range(WINDOWS)], axis=1)

    def figures(self, outcome: Outcome, aim: Aim) -> NDArray[np.float64]:
        """The aim's figure of each resampled trace."""
        timed = outcome.of(aim)
        windows = np.searchsorted(self._edges, timed.at, side="right")
        if aim is Aim.HIT_TOKENS:
            sums = np.bincount(windows, timed.value, WINDOWS)
            return np.asarray(self._counts @ sums / max(1, outcome.tokens), dtype=np.float64)
        order = np.argsort(timed.value, kind="stable")
        values, windows = timed.value[order], windows[order]
        if not len(values):
            return np.zeros(RESAMPLES)
        found = np.empty(RESAMPLES)
        rows = max(1, _CELLS // len(values))
        for first in range(0, RESAMPLES, rows):
            seen = np.cumsum(self._counts[first : first + rows, windows], axis=1)
            # The first value that 99 % reach at most; a resampled trace without any has none.
            place = (seen < np.ceil(0.99 * seen[:, -1:])).sum(axis=1)
            found[first : first + rows] = np.where(seen[:, -1] > 0, values[np.minimum(place, len(values) - 1)], 0.0)
        return found

    def gain(self, before: Outcome, after: Outcome, aim: Aim) -> Gain:
        """What `after` is better by."""
        sign = 1.0 if aim is Aim.HIT_TOKENS else -1.0
        differences = sign * (self.figures(after, aim) - self.figures(before, aim))
        value = sign * (figure(after, aim) - figure(before, aim))
        return Gain(value, float(differences.std(ddof=1)), float((differences <= 0).mean()))


def figure(outcome: Outcome, aim: Aim) -> float:
    """p99 in seconds, or the share of the prompts' tokens that hit."""
    values = outcome.of(aim).value
    if aim is Aim.HIT_TOKENS:
        return float(values.sum()) / max(1, outcome.tokens)
    return float(np.sort(values)[p99_place(len(values))]) if len(values) else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A key that is to be changed.

    :param gain: what is lost without it, the others being changed.
    """

    key: str
    before: Any
    after: Any
    gain: Gain


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A key that was looked at and stays.

    :param best: the value that came out best; None = none was permitted. :param gain: of it.
    """

    key: str
    best: Any
    gain: Gain | None
    why: str


@dataclass(slots=True)
class Found:
    """What a search says.

    :param before: the aim's figure under the file. :param after: under the changes; :param gain: their difference.
    :param judged: how many settings were judged.
    """

    aim: Aim
    before: float
    after: float
    gain: Gain
    changes: list[Change]
    left_alone: list[LeftAlone]
    judged: int
    notes: list[str] = field(default_factory=list)


class Search:
    """One search.

    :param candidates: values to try, by key. :param current: the file's values of these keys.
    :param target: no more keys are changed once the aim's figure is this good; None = as good as it gets.
    :param tell: told of each setting that is judged.
    """

    def __init__(
        self,
        judge: Judge,
        aim: Aim,
        candidates: Mapping[str, Sequence[Any]],
        current: Changes,
        *,
        target: float | None = None,
        tell: Callable[[Changes], None] = lambda _: None,
    ) -> None:
        self._judge, self._aim, self._target, self._tell = judge, aim, target, tell
        self._candidates = {
            key: [each for each in values if each != current[key]] for key, values in candidates.items()
        }
        self._current = current
        self._known: dict[tuple[tuple[str, str], ...], Outcome | str] = {}
        self._base = judge.judge({})
        few = len(self._base.of(aim).value)
        least = LEAST_SAMPLES if aim is Aim.HIT_TOKENS else LEAST_OF_P99
        if few < least:
            what = {Aim.EXPOSED_P99: "steps with loads", Aim.TTFT_P99: "timed prompts", Aim.HIT_TOKENS: "prompts"}[aim]
            raise ConfigError(f"{few} {what} are too few to tell {aim.value} from noise; record at least {least}")
        if guess := self._base.guesses.get(aim):
            raise ConfigError(f"under the file as it is {_untold(guess)}; record under this file")
        times = self._base.of(aim).at
        self._noise = Noise(float(times.min()), float(times.max()))

    def run(self) -> Found:
        """Search."""
        chosen: dict[str, Any] = {}
        refused: dict[str, str] = {}
        while not self._reached(chosen) and (step := self._best(chosen, refused)):
            chosen.update(step)
        self._prune(chosen)
        base, final = figure(self._base, self._aim), self._outcome(chosen)
        assert isinstance(final, Outcome)
        changes = []
        for key, value in chosen.items():
            without = self._outcome({other: each for other, each in chosen.items() if other != key})
            gain = self._noise.gain(without, final, self._aim) if isinstance(without, Outcome) else Gain(0.0, 0.0, 1.0)
            changes.append(Change(key, self._current[key], value, gain))
        gain = self._noise.gain(self._base, final, self._aim)
        left = [self._left(key, chosen, final, refused) for key in self._candidates if key not in chosen]
        notes = [f"As it is {_untold(guess)}." for guess in self._base.guesses.values()]
        if self._base.failed_loads:
            notes.insert(0, f"As it is, {self._base.failed_loads:,} loads fail.")
        return Found(self._aim, base, figure(final, self._aim), gain, changes, left, len(self._known) + 1, notes)

    def _outcome(self, changes: Changes) -> Outcome | str:
        """What would have happened, or why it is not permitted."""
        if not changes:
            return self._base
        key = tuple(sorted((name, repr(value)) for name, value in changes.items()))
        if key not in self._known:
            self._tell(changes)
            try:
                self._known[key] = self._judge.judge(changes)
            except ConfigError as error:
                self._known[key] = str(error).splitlines()[0]
        return self._known[key]

    def _reached(self, chosen: Changes) -> bool:
        if self._target is None:
            return False
        outcome = self._outcome(chosen)
        assert isinstance(outcome, Outcome)
        told = figure(outcome, self._aim)
        return told >= self._target if self._aim is Aim.HIT_TOKENS else told <= self._target

    def _better(self, chosen: Changes, more: Changes) -> tuple[Gain | None, str]:
        """What `more` brings beside `chosen`, and why it is not to be taken; "" = it may be."""
        before, after = self._outcome(chosen), self._outcome({**chosen, **more})
        if isinstance(after, str) or isinstance(before, str):
            return None, after if isinstance(after, str) else str(before)
        if guess := after.guesses.get(self._aim):
            return None, _untold(guess)
        gain = self._noise.gain(before, after, self._aim)
        if not gain.told(figure(before, self._aim)):
            return gain, "within the noise, or too little"
        return gain, self._harm(after)

    def _harm(self, after: Outcome) -> str:
        """What it would spoil, beside the file's settings."""
        base = self._base
        if len(after.of(self._aim).value) < COMPARABLE * len(base.of(self._aim).value):
            return "fewer steps load inside their pass then, so that their waits do not compare"
        if after.failed_loads > base.failed_loads:
            return f"{after.failed_loads} loads would fail, and {base.failed_loads} do"
        if figure(after, Aim.HIT_TOKENS) < figure(base, Aim.HIT_TOKENS) - HIT_SLACK:
            return "fewer tokens would hit"
        for other, what in ((Aim.TTFT_P99, "first tokens"), (Aim.EXPOSED_P99, "waits for loads")):
            if other is self._aim or other in base.guesses:
                continue
            if guess := after.guesses.get(other):
                return _untold(guess)
            if len(base.of(other).value) >= LEAST_OF_P99:
                loss = self._noise.gain(after, base, other)
                if loss.told(figure(base, other)) and loss.value > SLOWER * figure(base, other):
                    return f"p99 of {what} would rise"
        return ""

    def _best(self, chosen: Changes, refused: dict[str, str]) -> Changes:
        """The best of one more key; where none is told from noise, of two. Empty = none is."""
        ranked: dict[str, Any] = {}
        best: tuple[float, dict[str, Any]] = (0.0, {})
        for key, values in self._candidates.items():
            if key in chosen:
                continue
            tried: list[tuple[float, Any]] = []
            for value in values:
                gain, why = self._better(chosen, {key: value})
                if gain is None:
                    continue
                tried.append((gain.value, value))
                if why:
                    refused.setdefault(key, why)
                elif gain.value > best[0]:
                    best = (gain.value, {key: value})
            if tried:
                ranked[key] = max(tried, key=lambda each: each[0])[1]
        if best[1]:
            return best[1]
        for (one, first), (other, second) in itertools.combinations(ranked.items(), 2):
            both = {one: first, other: second}
            gain, why = self._better(chosen, both)
            if gain is not None and not why and gain.value > best[0]:
                best = (gain.value, both)
        return best[1]

    def _prune(self, chosen: dict[str, Any]) -> None:
        """Leave out what is not missed, the least first."""
        while len(chosen) > 1:
            least: tuple[float, str] | None = None
            for key, value in chosen.items():
                rest = {other: each for other, each in chosen.items() if other != key}
                gain, _ = self._better(rest, {key: value})
                before = self._outcome(rest)
                missed = gain is not None and isinstance(before, Outcome) and gain.told(figure(before, self._aim))
                if isinstance(before, Outcome) and not missed and gain is not None and not self._harm(before):
                    least = min(least or (math.inf, ""), (gain.value, key))
            if least is None:
                return
            del chosen[least[1]]

    def _left(self, key: str, chosen: Changes, final: Outcome, refused: Mapping[str, str]) -> LeftAlone:
        best: tuple[Any, Gain, str] | None = None
        why = ""
        for value in self._candidates[key]:
            after = self._known.get(tuple(sorted((name, repr(each)) for name, each in {**chosen, key: value}.items())))
            if isinstance(after, str):
                why = why or after
            elif after is not None and (guess := after.guesses.get(self._aim)):
                why = why or _untold(guess)
            elif after is not None:
                gain = self._noise.gain(final, after, self._aim)
                if best is None or gain.value > best[1].value:
                    told = gain.told(figure(final, self._aim))
                    harm = self._harm(after) if told else "within the noise, or too little"
                    best = (value, gain, harm or "the goal is reached without it")
        if best is None:
            not_needed = "the goal is reached without it"
            return LeftAlone(
                key, None, None, why or (not_needed if self._reached(chosen) else refused.get(key, not_needed))
            )
        return LeftAlone(key, *best)
