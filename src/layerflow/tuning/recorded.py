"""A recording as the judge of settings, and what is worth trying on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from layerflow.config.settings import Settings, effective
from layerflow.errors import ConfigError
from layerflow.sim.replay import BATCHED, BOUND, JUDGED, Replay
from layerflow.sim.rerun import UNTOLD, ReplayFigures, Sample
from layerflow.tuning.search import Aim, Changes, Outcome, Timed

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SEARCHED: Final[Mapping[str, Sequence[Any]]] = {
    "transfer.mode": ("auto", "layerwise", "bulk"),
    "transfer.prefetch_layers": (0, 1, 2, 4, 8),
    "transfer.max_transfer_bytes": (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    "transfer.max_transfer_blocks": (0, 256, 1024, 4096),
    "transfer.max_inflight_bytes": (32 * MIB, 128 * MIB, 256 * MIB, GIB),
    "transfer.h2d_stagger_us": (0, 50, 200, 1000),
    "transfer.save_backlog_bytes": (GIB, 4 * GIB, 16 * GIB),
}
"""Keys that may change while the server runs."""

SIZING: Final = ("pool.size",)
"""Keys that need a restart, and memory: only searched where somebody names them."""

_COPIES: Final = ("fewer copies, each of which costs its latency", "urgent copies wait less")

REASONS: Final[Mapping[str, tuple[str, str]]] = {
    "transfer.mode": ("loads suit this engine's passes better so", "loads suit this engine's passes better so"),
    "transfer.prefetch_layers": ("loads run further ahead of compute", "loads disturb each other less"),
    "transfer.max_transfer_bytes": _COPIES,
    "transfer.max_transfer_blocks": _COPIES,
    "transfer.max_inflight_bytes": ("windows of loads are longer", "loads disturb each other less"),
    "transfer.h2d_stagger_us": ("ranks begin a layer one after the other", "layers begin without waiting for a slot"),
    "transfer.save_backlog_bytes": ("fewer saves are given up", "saves disturb loads less"),
    "pool.size": ("more of what comes again is still there", "as much hits in less memory"),
}
"""Why a key helps where it is raised, and where it is lowered. 0 counts as no limit, but for the stagger."""


def reason(key: str, before: Any, after: Any) -> str:
    """Why a change helps, as far as its direction says."""
    raised, lowered = REASONS[key]
    if isinstance(after, str):
        return raised
    unlimited = key != "transfer.h2d_stagger_us"
    up = (after or (float("inf") if unlimited else 0)) > (before or (float("inf") if unlimited else 0))
    return raised if up else lowered


class RecordedJudge:
    """What a recording's replay says of settings.

    :param file: the configuration that is tuned; what it leaves to defaults, and its server took from elsewhere, is as
        it was recorded.
    :raises ConfigError: it is no configuration, or changes keys of which a replay shows nothing.
    """

    def __init__(self, replay: Replay, file: Path) -> None:
        self._replay, self._file = replay, file
        unset = {row.key for row in effective(file, {}) if not row.origin}
        self._given = {key: value for key, value in _flat(replay.run.sections) if key in (JUDGED | {BOUND}) & unset}
        self.settings = replay.configured(file, self._given)
        if unjudged := replay.unjudged(self.settings):
            raise ConfigError(
                f"{file}: {', '.join(unjudged)} differ from what was recorded, and no replay shows their effect; "
                "record under this file"
            )

    def judge(self, changes: Changes) -> Outcome:
        """See :class:`layerflow.tuning.search.Judge`."""
        settings = self.settings if not changes else self._replay.configured(self._file, {**self._given, **changes})
        return outcome_of(self._replay.under(settings))

    def candidates(self, also: Iterable[str], notes: list[str]) -> dict[str, Sequence[Any]]:
        """Values to try, by key: none that makes batches or windows smaller than recorded ones, whose cost to the
        engine's interpreter no record tells, and none of other batches where the fit alone misses a median.

        :param also: sizing keys. :param notes: gets what is not tried, and why.
        :raises ConfigError: one of them is none.
        """
        found = dict(SEARCHED)
        trust = self._replay.trust
        if off := trust.unfitted:
            worst = max(off, key=lambda row: row.off)
            found = {key: values for key, values in found.items() if key not in BATCHED}
            notes.append(
                f"Not tried: {', '.join(key for key in SEARCHED if key in BATCHED)}. They change batches, and the fit "
                f"alone is off by {worst.off:.1f} x of {worst.name.partition(' (')[0]}: not confirmed by measurement."
            )
        elif off := trust.unconfirmed:
            worst = max(off, key=lambda row: row.off)
            notes.append(
                f"{worst.name.partition(' (')[0]} is of what stood out while it was recorded: the fit alone is off by "
                f"{worst.off:.1f} x. What other batches do to it is for --verify to tell."
            )
        recorded, current = self._replay.settings.transfer, self.current()
        caps = {
            "transfer.max_transfer_bytes": recorded.byte_cap,
            "transfer.max_transfer_blocks": recorded.block_cap,
            "transfer.max_inflight_bytes": recorded.max_inflight_bytes,
        }
        smaller = []
        for key in [key for key in found if key in caps]:
            values = [value for value in found[key] if not value or value >= caps[key]]
            if len(values) < len(found[key]):
                smaller.append(key)
            found[key] = values
            if not [value for value in values if value != current[key]]:
                del found[key]
        if smaller:
            notes.append(
                f"Not tried: less of {', '.join(smaller)} than was recorded: a replay does not tell what smaller "
                "batches and windows cost an engine."
            )
        ranks = max((len(engine.ranks) for engine in self._replay.run.engines), default=1)
        if ranks < 2 and not self.settings.transfer.h2d_stagger_us:
            del found["transfer.h2d_stagger_us"]
        for key in also:
            if key not in SIZING:
                raise ConfigError(f"--also {key}: the keys that are searched where they are named: {', '.join(SIZING)}")
            size = self.settings.pool.size
            found[key] = tuple(round(size * factor) for factor in (0.5, 2, 4, 8))
        return found

    def current(self) -> dict[str, Any]:
        """The file's values of all keys that can be searched."""
        return {key: _value(self.settings, key) for key in (*SEARCHED, *SIZING)}


def outcome_of(figures: ReplayFigures) -> Outcome:
    """What a replay says, as the search reads it."""
    return Outcome(
        _timed(figures.exposed_s),
        _timed(figures.prefill_s),
        _timed(figures.hit_tokens),
        figures.tokens,
        figures.failed_loads,
        guesses={
            aim: why
            for aim, share, why in (
                (
                    Aim.TTFT_P99,
                    figures.prefill_guesses,
                    f"of {figures.guessed:,} of {len(figures.prefill_s):,} prompts",
                ),
                (
                    Aim.EXPOSED_P99,
                    figures.exposed_guesses,
                    f"of {figures.guessed_steps:,} of {len(figures.exposed_s):,} steps with loads",
                ),
            )
            if share >= UNTOLD
        },
    )


def _timed(samples: Sequence[Sample]) -> Timed:
    both = np.array(samples, dtype=np.float64).reshape(-1, 2)
    return Timed(both[:, 0], both[:, 1])


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    return [(f"{section}.{key}", value) for section, keys in sections.items() for key, value in keys.items()]


def _value(settings: Settings, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)
