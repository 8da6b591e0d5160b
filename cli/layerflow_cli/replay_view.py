"""A recording's replay, for people and as JSON: the line of trust, and another configuration beside its own."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from layerflow.errors import ConfigError
from layerflow.sim.rerun import MEDIAN_UNTOLD, UNTOLD

if TYPE_CHECKING:
    from layerflow.config.settings import Settings
    from layerflow.sim.replay import Replay, Trust
    from layerflow.sim.rerun import OtherLink, ReplayFigures
    from layerflow.sim.simulation import Distribution


class Other(NamedTuple):
    """Another configuration.

    :param settings: its settings; None = the recorded ones. :param link: its link; None = the fitted one.
    :param without: keys that were given and are not of the pool or of transfers: no replay shows anything of them.
    """

    settings: Settings | None
    link: OtherLink | None
    without: tuple[str, ...] = ()


def show_replay(replay: Replay, other: Other, json_file: Path | None) -> None:
    """Print what was recorded beside what is predicted of it; then, where it is believed, another configuration.

    :param other: with neither settings nor a link none was asked for.
    :raises ConfigError: another one was asked for, and the replay is not to be believed.
    """
    from layerflow_cli.output import write_json  # noqa: PLC0415

    trust = replay.trust
    asked = other.settings is not None or other.link is not None
    if asked and not trust.trusted:
        raise ConfigError(
            f"{replay.run.name}: nothing is predicted of another configuration, because its own is not: "
            f"{'; '.join(against(trust))}"
        )
    changed = replay.under(other.settings or replay.settings, link=other.link) if asked else None
    unjudged = replay.unjudged(other.settings) if other.settings is not None else {}
    told = {
        "trust": {
            "trusted": trust.trusted,
            "against": against(trust),
            "rows": [
                {
                    "name": row.name,
                    "recorded": row.recorded,
                    "predicted": row.predicted,
                    "fitted": row.fitted,
                    "alike": row.alike,
                    "fit_times_off": row.off,
                }
                for row in trust.rows
            ],
        },
        "recorded": _figures(replay.recorded),
        "own": _figures(replay.own),
        "other": _figures(changed) if changed is not None else None,
        "not_simulated": [*unjudged, *other.without],
    }
    if write_json(json_file, told):
        return
    for line in _lines(replay, changed):
        typer.echo(line)
    if unjudged or other.without:
        typer.echo()
        typer.echo("Not simulated, and so without effect here:")
        for key, (was, says) in unjudged.items():
            typer.echo(f"  {key}: {was if was != '' else 'not set'} when it was recorded, {says} now")
        for key in other.without:
            typer.echo(f"  {key}")


def _lines(replay: Replay, changed: ReplayFigures | None) -> Iterator[str]:
    trust, run = replay.trust, replay.run
    passes = [each for engine in run.engines for each in engine.passes]
    timed = sum(each.timed for each in passes)
    yield f"{run.name}: {len(run.prompts):,} prompts, {len(passes):,} steps, of which {timed:,} with their times."
    yield "Trust: what was recorded, and what is predicted of the same configuration."
    yield ""
    yield f"{'':32}{'recorded':>11}{'predicted':>11}{'differs':>11}{'fit alone':>11}"
    for row in trust.rows:
        differs = _change(row.name, row.recorded, row.predicted) + ("" if row.alike else " !")
        yield f"{row.name:32}{row.recorded:11,.2f}{row.predicted:11,.2f}{differs:>11}{row.fitted:11,.2f}"
    yield ""
    reasons = against(trust)
    if reasons:
        yield "Nothing is recommended:"
        yield from (f"  {why}" for why in reasons)
        return
    yield "Predicted: each step with its own recorded noise. Fit alone: without any."
    yield "A prefill: from its lookup's answer to the end of the last step computing it."
    if changed is None:
        yield "Give --config, --set, --ram or --link for another configuration beside it."
        return
    yield ""
    yield f"{'':32}{'own':>11}{'other':>11}{'changes':>11}"
    for name, own, now in _pairs(replay.own, changed):
        yield f"{name:32}{_value(own):>11}{_value(now):>11}{_change(name, own, now):>11}"
        off = max((row.off for row in trust.unconfirmed if _tells_of(row.name, name)), default=0)
        if off:
            yield f"    the fit alone is off by {off:.1f} x: not confirmed by measurement"
    for said in _notes(replay, changed):
        yield ""
        yield from textwrap.wrap(said, 80, break_on_hyphens=False)


def _notes(replay: Replay, changed: ReplayFigures) -> Iterator[str]:
    for which, figures in (("own", replay.own), ("other", changed)):
        if figures.guessed or figures.guessed_steps:
            yield (
                f"Prefills of {figures.guessed:,} of {len(figures.prefill_s):,} prompts, and waits of "
                f"{figures.guessed_steps:,} of {len(figures.exposed_s):,} steps with loads, rest on guesses ({which}): "
                "recorded steps tell nothing of so many or so few tokens, so long a context, or of loads. Record where "
                "prompts hit and where they miss."
            )
    if changed.failed_loads > replay.own.failed_loads and changed.exposed_s:
        yield "What waits for a load that fails is exposed until then; computing it is not, but part of the prefill."
    if (changed.full or 0) > (replay.own.full or 0):
        yield (
            f"{changed.full:,} objects find no room, and are not saved: they are larger than the arena, or it holds "
            "less than what is being saved and loaded at once."
        )


def against(trust: Trust) -> list[str]:
    """What stands against believing it."""
    return [
        *trust.reasons,
        *(
            f"{row.name} was {row.recorded:,.2f} and is predicted as {row.predicted:,.2f}"
            for row in trust.rows
            if not row.alike
        ),
    ]


def _value(figure: float) -> str:
    return "-" if math.isnan(figure) else f"{figure:,.2f}"


def _change(name: str, one: float, other: float) -> str:
    """In percent; of what is in percent itself, in points."""
    if math.isnan(one + other):
        return "-"
    if name.endswith("(%)"):
        return f"{other - one:+.1f} pts"
    return f"{(other - one) / one * 100:+.1f} %" if one else ("=" if not other else "new")


def _tells_of(row: str, name: str) -> bool:
    """Does a row of the trust tell of this figure? Of a mean the median's and p99's do."""
    what, _, which = name.partition(", ")
    return row == name.replace(", p50", ", median") or (which.startswith("mean") and row.partition(", ")[0] == what)


def _pairs(own: ReplayFigures, other: ReplayFigures) -> Iterator[tuple[str, float, float]]:
    """Each figure under both; NaN = nothing has one, or it is not known."""
    yield "hit tokens (%)", own.hit_rate * 100, other.hit_rate * 100
    for name, one, now in zip(("exposed per step", "prefill"), _times(own), _times(other), strict=True):
        for which in ("p50", "p99", "mean"):
            yield f"{name}, {which} (ms)", one[f"{which}_ms"], now[f"{which}_ms"]
    yield "evictions", own.evictions, other.evictions
    yield "shed saves", own.sheds, other.sheds
    yield "failed loads", own.failed_loads, other.failed_loads
    yield "objects without room", own.full or 0, other.full or 0


def _figures(figures: ReplayFigures) -> dict[str, Any]:
    """By names that carry their units; null = nothing has such a time, or it is not known."""
    exposed, prefill = _times(figures)
    return {
        "prompt_tokens": figures.tokens,
        "hit_tokens": figures.hits,
        "hit_share": figures.hit_rate,
        "exposed_per_step": exposed,
        "prefill": prefill,
        "loading_steps": len(figures.exposed_s),
        "evictions": figures.evictions,
        "shed_saves": figures.sheds,
        "failed_loads": figures.failed_loads,
        "objects_without_room": figures.full,
        "guessed_prompts": figures.guessed,
        "guessed_steps": figures.guessed_steps,
        "guessed_most_tokens": figures.guessed_tokens,
    }


def _times(figures: ReplayFigures) -> tuple[dict[str, float], dict[str, float]]:
    """Exposed times and prefills, without what nothing has and what rests on guesses."""
    return (
        _known(figures.exposed, figures.exposed_guesses if figures.exposed_s else 1.0),
        _known(figures.prefill, figures.prefill_guesses if figures.prefill_s else 1.0),
    )


def _known(times: Distribution, guesses: float) -> dict[str, float]:
    """:param guesses: the share of guesses among them."""
    told = times.in_ms()
    for name, most in (("mean_ms", 0.0), ("p99_ms", UNTOLD), ("p50_ms", MEDIAN_UNTOLD)):
        if guesses and guesses >= most:
            told[name] = math.nan
    return told
