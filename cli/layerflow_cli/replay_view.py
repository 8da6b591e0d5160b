"""A recording's replay, for people and as JSON: the line of trust, and another configuration beside its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from layerflow.errors import ConfigError

if TYPE_CHECKING:
    from layerflow.config.settings import Settings
    from layerflow.sim.replay import Replay, Trust
    from layerflow.sim.rerun import OtherLink, ReplayFigures


def show_replay(replay: Replay, other: Settings | None, link: OtherLink | None, json_file: Path | None) -> None:
    """Print what was recorded beside what is predicted of it; then, where it is believed, another configuration.

    :param other: the other configuration's settings; None = none was asked for.
    :param link: its link; None = the fitted one.
    :raises ConfigError: another one was asked for, and the replay is not to be believed.
    """
    from layerflow_cli.output import write_json  # noqa: PLC0415

    trust = replay.trust
    asked = other is not None or link is not None
    if asked and not trust.trusted:
        raise ConfigError(
            f"{replay.run.name}: nothing is predicted of another configuration, because its own is not: "
            f"{'; '.join(against(trust))}"
        )
    changed = replay.under(other or replay.settings, link=link) if asked else None
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
        "not_simulated": list(replay.unjudged(other)) if other is not None else [],
    }
    if write_json(json_file, told):
        return
    for line in _lines(replay, other, changed):
        typer.echo(line)


def _lines(replay: Replay, other: Settings | None, changed: ReplayFigures | None) -> Iterator[str]:
    trust, run = replay.trust, replay.run
    passes = [each for engine in run.engines for each in engine.passes]
    timed = sum(each.timed for each in passes)
    yield f"{run.name}: {len(run.prompts):,} prompts, {len(passes):,} steps, of which {timed:,} with their times."
    yield "Trust: what was recorded, and what is predicted of the same configuration."
    yield ""
    yield f"{'':32}{'recorded':>11}{'predicted':>11}{'differs':>11}{'fit alone':>11}"
    for row in trust.rows:
        differs = _change(row.recorded, row.predicted) + ("" if row.alike else " !")
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
        yield f"{name:32}{own:11,.2f}{now:11,.2f}{_change(own, now):>11}"
        off = max((row.off for row in trust.unconfirmed if _tells_of(row.name, name)), default=0)
        if off:
            yield f"    the fit alone is off by {off:.1f} x: not confirmed by measurement"
    unjudged = replay.unjudged(other) if other is not None else {}
    if unjudged:
        yield ""
        yield "Not simulated, and so without effect here:"
        yield from (f"  {key}: {was} when it was recorded, {says} now" for key, (was, says) in unjudged.items())


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


def _change(one: float, other: float) -> str:
    return f"{(other - one) / one * 100:+.1f} %" if one else ("=" if not other else "new")


def _tells_of(row: str, name: str) -> bool:
    """Does a row of the trust tell of this figure? Of a mean the median's and p99's do."""
    what, _, which = name.partition(", ")
    return row == name.replace(", p50", ", median") or (which.startswith("mean") and row.partition(", ")[0] == what)


def _pairs(own: ReplayFigures, other: ReplayFigures) -> Iterator[tuple[str, float, float]]:
    yield "hit tokens (%)", own.hit_rate * 100, other.hit_rate * 100
    for name, one, now in (("exposed per step", own.exposed, other.exposed), ("prefill", own.prefill, other.prefill)):
        for which in ("p50", "p99", "mean"):
            yield f"{name}, {which} (ms)", getattr(one, which) * 1e3, getattr(now, which) * 1e3
    yield "evictions", own.evictions, other.evictions
    yield "shed saves", own.sheds, other.sheds
    yield "failed loads", own.failed_loads, other.failed_loads


def _figures(figures: ReplayFigures) -> dict[str, Any]:
    """By names that carry their units."""
    return {
        "prompt_tokens": figures.tokens,
        "hit_tokens": figures.hits,
        "hit_share": figures.hit_rate,
        "exposed_per_step": figures.exposed.in_ms(),
        "prefill": figures.prefill.in_ms(),
        "loading_steps": len(figures.exposed_s),
        "evictions": figures.evictions,
        "shed_saves": figures.sheds,
        "failed_loads": figures.failed_loads,
    }
