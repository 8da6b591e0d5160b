"""Step traces as one self-contained HTML page: lanes as rows, layers as bars, all on one time scale."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from layerflow.observe.timeline.plot import TOP, draw
from layerflow.observe.timeline.table import ms, table
from layerflow.observe.trace import LANES, WHOLE_STEP, Lane, StepTrace, figures

_MEANING: dict[Lane, str] = {
    "compute": "compute of a layer",
    "wait": "engine waits (exposed)",
    "load": "load, pool to engine",
    "save": "save, engine to pool",
    "link": "link to a slower tier or another host",
}


def render(traces: Sequence[StepTrace], title: str, notes: Sequence[str] = ()) -> str:
    """A whole HTML document without any external resource.

    :param traces: drawn below each other in this order, each from its own 0, with one time scale.
    :param title: heading and window title.
    :param notes: one line each below the heading: machine, model, what was varied.
    """
    scale = max((trace.duration for trace in traces), default=0.0) * 1.015 or 1e-3
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        notes=f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else "",
        table=table(traces),
        legend=_legend(traces),
        sections="\n".join(_section(trace, scale) for trace in traces),
    )


def _legend(traces: Sequence[StepTrace]) -> str:
    spans = [span for trace in traces for span in trace.spans]
    present = {span.lane for span in spans}
    keys: list[tuple[str, str]] = [(lane, _MEANING[lane]) for lane in LANES if lane in present]
    if any(span.emulated for span in spans):
        keys.append(("hatched", "hatched: timed by an emulated link"))
    return "".join(f'<span class="key"><i class="i-{name}"></i>{meaning}</span>' for name, meaning in keys)


def _section(trace: StepTrace, scale: float) -> str:
    layers = {span.layer for span in trace.spans if span.layer != WHOLE_STEP}
    sub = f"session {trace.session} &middot; step {trace.step} &middot; {len(layers)} layers"
    badge = '<span class="badge">emulated link</span>' if any(span.emulated for span in trace.spans) else ""
    head = (
        f'<div class="head"><h2>{escape(trace.label)}</h2>{badge}'
        f'<span class="sub">{sub}</span><span class="sum">{_sum(trace)}</span></div>'
    )
    if not trace.spans:
        return f'<section class="card">{head}<p class="none">No spans were recorded.</p></section>'
    plot = draw(trace, scale)
    gutter = "".join(f'<div style="height:{height}px">{name}</div>' for name, height in plot.lanes)
    return (
        f'<section class="card">{head}<div class="chart">'
        f'<div class="names" style="padding-top:{TOP}px">{gutter}</div>'
        f'<div class="scroll">{plot.svg}</div></div></section>'
    )


def _sum(trace: StepTrace) -> str:
    """The section's one sentence: how long the step took and what its transfer cost."""
    parts = []
    end = trace.compute_end
    if end is not None:
        parts.append(f"compute ends at <b>{ms((end - trace.origin) * 1e3)} ms</b>")
    for direction in ("load", "save"):
        measured = figures(trace, direction)
        if measured.transfer_ms > 0:
            hot = "hot" if measured.exposed_ms > 0.1 * measured.transfer_ms else ""
            parts.append(
                f"{direction} <b>{ms(measured.transfer_ms)} ms</b>, "
                f'<b class="{hot}">{ms(measured.exposed_ms)} ms</b> exposed'
            )
    return " &middot; ".join(parts)
