"""A recording replayed in virtual time: its own steps, in their order, under its own configuration or another one.

The core, the pool, the search for hits and the window of a load lane are the server's and the agent's own code. What
a machine takes comes from the recording: links and compute are fitted (:mod:`layerflow.sim.fit`), and each step keeps
what was its own: its layers' times as far as it computes the same tokens, how much slower than the fit its copies
were, and how long its engine took before and behind it. So configurations are compared under the same noise.

Lookups come when they were recorded, however quick an engine is then; those in the middle of a pass stay there. Where
each prompt came when the one before was computed, it does so here, as long after it as it did. What a
hit is longer or shorter than it was is computed less or more, in the pass that loads it: an engine's limit of tokens in
a pass is not known. Passes that moved nothing are part of the time between others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from layerflow.config.settings import Settings
from layerflow.config.sources import known_keys
from layerflow.sim.recorded import RecordedRun, last_pass, read_run
from layerflow.sim.rerun import Fitted, OtherLink, ReplayFigures, Rerun, Sample

CLOSE: Final = 0.15
"""A time that is predicted within this share of what was recorded is believed."""

CLOSE_HITS: Final = 0.02
"""Hit tokens, as a share of all prompt tokens."""

MEDIAN: Final = ", median"
"""In the name of a figure."""

FITTED: Final = 0.5
"""Where the fit alone is further from what was recorded, as a share of it, other batches are not confirmed: only the
recorded ones have the noise that made up the difference."""

BATCHED: Final = frozenset(
    {
        "transfer.mode",
        "transfer.prefetch_layers",
        "transfer.max_transfer_blocks",
        "transfer.max_transfer_bytes",
        "transfer.max_inflight_bytes",
    }
)
"""The keys that change which batches loads are cut into."""

INSTANT_S: Final = 0.5e-3
"""Times that differ by less than this do not differ: threads wake up that late."""

JUDGED: Final = frozenset(
    {
        "pool.size",
        "pool.lease_ms",
        "pool.lease_share",
        "pool.link_gbps",
        "pool.link_latency_us",
        "transfer.mode",
        "transfer.prefetch_layers",
        "transfer.max_transfer_blocks",
        "transfer.max_transfer_bytes",
        "transfer.max_inflight_bytes",
        "transfer.save_backlog_bytes",
        "transfer.h2d_stagger_us",
        "transfer.step_timeout_ms",
        "transfer.save_timeout_ms",
    }
)
"""The keys whose effect a replay shows. Of ``pool.link_gbps`` that of an emulated link."""

_OF_EMULATED: Final = frozenset({"pool.link_gbps", "pool.link_latency_us"})

BOUND: Final = "server.max_deadline_s"
"""The longest that recorded deadlines of transfers may be: without it they may be refused."""

REPLAYED: Final = ("pool", "transfer")
"""The sections of which a replay shows something."""

FEW: Final = 10
"""Evictions, shed saves and steps with loads that differ by no more do not differ."""

FEW_FAILED: Final = 2
"""Failed loads that differ by no more do not differ."""

LEAST_SAMPLES: Final = 40
"""Timed prompts, and steps, that tell a distribution."""


@dataclass(frozen=True, slots=True)
class TrustRow:
    """One figure of the recording, beside its prediction.

    :param name: with its unit.
    :param predicted: each step with the noise that it was recorded with. :param fitted: no step with any: what the
        fitted link and compute alone say.
    :param alike: is `predicted` near enough for another configuration to be believed?
    :param off: how many times `fitted` is off, of a time that is by more than :data:`FITTED`; else 1.
    """

    name: str
    recorded: float
    predicted: float
    fitted: float
    alike: bool
    off: float = 1.0


@dataclass(frozen=True, slots=True)
class Trust:
    """How far a recording's replay can be believed.

    :param reasons: what stands against it whatever the figures are.
    """

    rows: tuple[TrustRow, ...]
    reasons: tuple[str, ...]

    @property
    def trusted(self) -> bool:
        """May anything be recommended?"""
        return not self.reasons and all(row.alike for row in self.rows)

    @property
    def unconfirmed(self) -> tuple[TrustRow, ...]:
        """Figures that measurement does not confirm of other batches."""
        return tuple(row for row in self.rows if row.off > 1)

    @property
    def unfitted(self) -> tuple[TrustRow, ...]:
        """Those among them that are medians: there the fit has missed the rule, and not only what stands out."""
        return tuple(row for row in self.unconfirmed if MEDIAN in row.name)


class Replay:
    """A recording, and what another configuration would have done with it.

    ``Replay.read(path).under(settings)`` is one simulation, some 2 s of processor time for each MB of the file.
    :attr:`trust` says whether to believe it, :attr:`recorded` what was, :attr:`own` what is predicted of the
    recording's own configuration: compare with that, not with what was recorded.

    :param run: what was recorded.
    :raises ConfigError: no step of it can be timed.

    :ivar fitted: what the machine was found to take.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.fitted = Fitted.of(run)
        self.fitted.calibrate(run)

    @classmethod
    def read(cls, path: Path, last_s: float = math.inf) -> Replay:
        """Read a recording, or so many of its last seconds.

        :raises ConfigError: it cannot be read, nothing in it can be timed, or to replay it takes more memory than is
            free.
        """
        return cls(read_run(path, last_s))

    @property
    def settings(self) -> Settings:
        """Those that were in force."""
        return self.run.settings

    @cached_property
    def recorded(self) -> ReplayFigures:
        """What was."""
        begin = self.fitted.begin
        exposed, prefill, hits = [], [], []
        for engine in self.run.engines:
            exposed += [
                Sample(each.opened - begin, each.exposed_s)
                for each in engine.passes
                if each.timed and not each.ahead and not math.isnan(each.exposed_s)
            ]
            for prompt in engine.prompts:
                hits.append(Sample(prompt.at - begin, prompt.hit))
                last = last_pass(prompt)
                if last is not None and prompt.timed:
                    prefill.append(Sample(prompt.at - begin, max(0.0, last.ended - prompt.heard)))
        samples = self.run.samples
        return ReplayFigures(
            exposed_s=tuple(sorted(exposed)),
            prefill_s=tuple(sorted(prefill)),
            hit_tokens=tuple(sorted(hits)),
            tokens=sum(prompt.tokens for prompt in self.run.prompts),
            evictions=samples[-1].evictions - samples[0].evictions if samples else 0,
            sheds=samples[-1].shed - samples[0].shed if samples else 0,
            failed_loads=self.run.failed_loads,
            full=None,
        )

    @cached_property
    def own(self) -> ReplayFigures:
        """What is predicted of the configuration that was in force."""
        return self.under(self.run.settings)

    @cached_property
    def trust(self) -> Trust:
        """The recording beside :attr:`own`."""
        was, told = self.recorded, self.own
        alone = self.under(self.run.settings, residuals=False)
        rows = [
            TrustRow(
                "hit tokens (%)",
                was.hit_rate * 100,
                told.hit_rate * 100,
                alone.hit_rate * 100,
                _hits_alike(was, told),
            ),
        ]
        for name, few, count in _COUNTS:
            one, other, fitted = count(was), count(told), count(alone)
            rows.append(TrustRow(name, one, other, fitted, _alike(one, other, few)))
        for name, of in (("exposed per step", "exposed"), ("prefill", "prefill")):
            for which, quantile in ((MEDIAN, "p50"), (", p99", "p99")):
                one, other, fitted = (getattr(getattr(each, of), quantile) for each in (was, told, alone))
                alike = _alike(one, other, INSTANT_S)
                off = _times_off(one, fitted)
                rows.append(TrustRow(f"{name}{which} (ms)", one * 1e3, other * 1e3, fitted * 1e3, alike, off))
        return Trust(tuple(rows), tuple(self._reasons()))

    def _reasons(self) -> Iterator[str]:
        run = self.run
        if run.changed:
            yield "settings have changed while it was recorded; record each configuration by itself"
        if run.behind:
            yield "some of it came from behind the arena or from another server, which is not simulated"
        if run.dropped:
            yield f"{run.dropped:,} events are missing in it"
        timed = sum(each.timed for engine in run.engines for each in engine.passes)
        for count, what in ((timed, "steps"), (len(self.recorded.prefill_s), "prompts")):
            if count < LEAST_SAMPLES:
                yield f"{count} {what} with their times are too few to compare: record at least {LEAST_SAMPLES}"
        if run.others:
            yield "other models shared its pool, and their prompts are not replayed"

    def configured(self, file: Path | None, given: Mapping[str, Any]) -> Settings:
        """Another configuration: a file as a server would take it, or the recorded one but for what is given.

        :param given: ``{"pool.size": "4GiB"}``.
        :raises ConfigError: see :meth:`layerflow.config.settings.Settings.load`.
        """
        if file is not None:
            return Settings.load(file, given)
        recorded = {
            f"{section}.{key}": value
            for section, keys in self.run.sections.items()
            for key, value in keys.items()
            if shows(f"{section}.{key}") or f"{section}.{key}" == BOUND
        }
        return Settings.load(None, {**recorded, **given})

    def unjudged(self, settings: Settings) -> dict[str, tuple[Any, Any]]:
        """Keys of the pool and of transfers that differ from the recorded ones, and have no effect on a replay.

        By key what was recorded, and what the settings say. Without emulation the link is the machine's own, of which a
        recording with an emulated one tells nothing.
        """
        judged = JUDGED if settings.pool.link_gbps else JUDGED - _OF_EMULATED
        found = {}
        for key in sorted(known_keys(Settings)):
            was, says = (attrgetter(key)(each) for each in (self.settings, settings))
            if was != says and shows(key) and key not in judged:
                found[key] = (was, says)
        return found

    def under(
        self,
        settings: Settings,
        *,
        link: OtherLink | None = None,
        residuals: bool = True,
        validate: bool = False,
    ) -> ReplayFigures:
        """Replay it under settings. Equal arguments, equal figures.

        What is used of a hit, and how, is what was recorded, unless ``transfer.mode`` is another one or the prompt hit
        nothing then: the costs that were fitted decide.

        :param link: instead of the fitted link.
        :param residuals: each step keeps what its own layers, copies and waits took beside the fit; else all take what
            is fitted, so that it tells how good the fit is.
        :param validate: check the core's and the pool's invariants as it goes; slow.
        """
        return Rerun(
            self.run,
            self.fitted,
            settings,
            link=link,
            residuals=residuals,
            validate=validate,
        ).figures()


def shows(key: str) -> bool:
    """May ``section.key`` have an effect on a replay?"""
    return key.startswith(tuple(f"{section}." for section in REPLAYED))


_COUNTS: Final[Sequence[tuple[str, int, Callable[[ReplayFigures], int]]]] = (
    ("evictions", FEW, lambda figures: figures.evictions),
    ("shed saves", FEW, lambda figures: figures.sheds),
    ("failed loads", FEW_FAILED, lambda figures: figures.failed_loads),
    ("steps with loads", FEW, lambda figures: len(figures.exposed_s)),
    ("prompts with times", FEW, lambda figures: len(figures.prefill_s)),
)
"""Counts that a prediction has to meet: their name, how far off is the same, and where they stand."""


def _alike(one: float, other: float, instant: float) -> bool:
    return abs(one - other) <= max(CLOSE * one, instant)


def _times_off(recorded: float, fitted: float) -> float:
    if abs(recorded - fitted) <= max(FITTED * recorded, INSTANT_S):
        return 1.0
    return max(recorded, fitted) / max(min(recorded, fitted), INSTANT_S)


def _hits_alike(one: ReplayFigures, other: ReplayFigures) -> bool:
    return abs(one.hit_rate - other.hit_rate) <= min(CLOSE_HITS, CLOSE * one.hit_rate)
