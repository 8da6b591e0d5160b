"""Step traces as one self-contained HTML page: lanes as rows, layers as bars, all on one time scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Literal

from layerflow.observe.trace import LANES, WHOLE_STEP, Lane, Span, StepFigures, StepTrace, figures, rows

# The timeline page's table of figures, and how it writes numbers.


_HEAD = (
    ("", "step"),
    ("way", "direction"),
    ("", "layers"),
    ("", "moved <small>MiB</small>"),
    ("", "rate <small>GB/s</small>"),
    ("", "compute ends <small>ms</small>"),
    ("", "transfer <small>ms</small>"),
    ("", "exposed <small>ms</small>"),
    ("", "hidden <small>ms</small>"),
    ("", "overlap"),
    ("", "bound"),
    ("split", "hidden and exposed"),
)


def ms(value: float) -> str:
    """Milliseconds with about three significant digits, never finer than a microsecond."""
    if value == 0:
        return "0"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def mib(nbytes: int) -> str:
    """Bytes as MiB (2^20)."""
    value = nbytes / (1 << 20)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def gb_per_s(nbytes: int, seconds: float) -> str:
    """10^9 bytes a second."""
    return f"{nbytes / seconds / 1e9:.2f}"


def table(traces: Sequence[StepTrace]) -> str:
    """One row per step and direction that moved anything; a step that moved nothing has one row of its own."""
    measured = [(trace, _moved(trace)) for trace in traces]
    longest = max((one.hidden_ms + one.exposed_ms for _, ways in measured for _, one in ways), default=0.0)
    body = []
    for trace, ways in measured:
        end = trace.compute_end
        ends = "" if end is None else ms((end - trace.origin) * 1e3)
        label = f'<td class="what" rowspan="{max(1, len(ways))}">{escape(trace.label)}</td>'
        lines = [_line(direction, one, ends, longest) for direction, one in ways]
        lines = lines or [f'<td class="none" colspan="{len(_HEAD) - 1}">nothing moved</td>']
        body.append(f"<tr>{label}{'</tr><tr>'.join(lines)}</tr>")
    head = "".join(f'<th class="{name}">{text}</th>' for name, text in _HEAD)
    return (
        f'<div class="card figures"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _moved(trace: StepTrace) -> list[tuple[str, StepFigures]]:
    ways: tuple[Literal["link", "load", "save"], ...] = ("link", "load", "save")
    measured = [(direction, figures(trace, direction)) for direction in ways]
    return [(direction, one) for direction, one in measured if one.transfer_ms > 0]


def _line(direction: str, one: StepFigures, compute_ends: str, longest: float) -> str:
    """One direction's cells, in the order of the head."""
    numbers = (
        str(one.layers),
        mib(one.bytes),
        f"{one.gb_per_s:.2f}",
        compute_ends,
        ms(one.transfer_ms),
        ms(one.exposed_ms),
        ms(one.hidden_ms),
        f"<b>{one.overlap:.1%}</b>",
        f"{one.bound:.1%}",
    )
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    return f'<td class="way">{direction}</td>{cells}<td class="split">{_split(direction, one, longest)}</td>'


def _split(direction: str, one: StepFigures, longest: float) -> str:
    """Hidden and exposed as one bar, on the same scale in every row."""
    parts = ((direction, one.hidden_ms), ("wait", one.exposed_ms))
    pieces = [f'<i class="i-{name}" style="width:{part / longest * 100:.2f}%"></i>' for name, part in parts if part > 0]
    return f"<div>{''.join(pieces)}</div>"


# One step trace as an inline SVG: lanes as rows, spans as bars, times as per cent of the common time scale.


TOP = 18
"""Pixels above the first lane."""

_BAR = 22
_THIN_BAR = 10
_MAX_TALL_ROWS = 2
_LANE_PAD = 4
_AXIS = 20
_PLOT_PX = 1100
"""Width assumed for labels until the page's script has measured the real one."""
_SLACK_PX = 3.0
"""Bars that overlap by less share a row."""
_DIGIT_PX = 6.4
_LAST_LABEL = 98
"""Per cent from the left behind which an axis label ends at its line instead of being centred below it."""
_SPARSE_PX = 10
"""Narrower than its number but at least this wide: every tenth layer is labelled, a little past its bar."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn trace: the lanes from top to bottom as (name, height in pixels), and the SVG."""

    lanes: list[tuple[str, int]]
    svg: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """What every bar of a trace is drawn against; times in seconds."""

    origin: float
    scale: float
    deepest: int

    def left(self, moment: float) -> float:
        """Per cent from the left edge."""
        return (moment - self.origin) / self.scale * 100


def draw(trace: StepTrace, scale: float) -> Plot:
    """Draw a trace so that the whole width is `scale` seconds."""
    frame = _Frame(trace.origin, scale, max((span.layer for span in trace.spans), default=0))
    lanes: list[tuple[str, int]] = []
    stripes: list[str] = []
    bars: list[str] = []
    numbers: list[str] = []
    y = TOP
    for lane in LANES:
        shared = rows(trace.lane(lane), slack=_SLACK_PX / _PLOT_PX * scale)
        if not shared:
            continue
        bar = _BAR if len(shared) <= _MAX_TALL_ROWS else _THIN_BAR
        height = len(shared) * bar + 2 * _LANE_PAD
        stripes.append(f'<rect class="stripe" x="0" y="{y + 1}" width="100%" height="{height - 2}" rx="3"></rect>')
        for number, row in enumerate(shared):
            top = y + _LANE_PAD + number * bar + 1
            bars.extend(_bar(span, frame, top, bar - 2) for span in row)
            if bar == _BAR:
                numbers.extend(_number(span, frame, top + bar / 2 + 3) for span in row)
        lanes.append((lane, height))
        y += height
    parts = (*stripes, _grid(scale, y), *bars, *numbers, _end_mark(trace, frame, y))
    label = escape(trace.label)
    svg = f'<svg class="plot" height="{y + _AXIS}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return Plot(lanes, svg)


def _bar(span: Span, frame: _Frame, top: int, height: int) -> str:
    width = span.seconds / frame.scale * 100
    pixels = width / 100 * _PLOT_PX
    # SVG does not render a width of 0; a hairline stroke keeps what is below a pixel visible at every zoom.
    place = f'x="{frame.left(span.start):.4f}%" y="{top}" width="{max(width, 0.001):.4f}%" height="{height}"'
    size = "wide" if pixels > 4 else "tiny" if pixels < 1 else ""
    whole = span.layer == WHOLE_STEP
    tone = 1.0 if whole or frame.deepest <= 0 else 0.82 + 0.18 * span.layer / frame.deepest
    data = {
        "layer": str(span.layer),
        "name": f"{span.lane}, {'all layers' if whole else f'layer {span.layer}'}",
        "start": f"{ms((span.start - frame.origin) * 1e3)} ms",
        "duration": f"{ms(span.seconds * 1e3)} ms",
        "bytes": f"{mib(span.nbytes)} MiB in {span.blocks:,} blocks" if span.nbytes else "",
        "rate": f"{gb_per_s(span.nbytes, span.seconds)} GB/s" if span.nbytes and span.seconds > 0 else "",
        "link": "emulated" if span.emulated else "",
    }
    fields = " ".join(f'data-{name}="{value}"' for name, value in data.items() if value)
    rect = f'<rect class="bar {span.lane} {size}" {place} rx="2" fill-opacity="{tone:.2f}" {fields}></rect>'
    return f'{rect}<rect class="hatch" {place} rx="2"></rect>' if span.emulated else rect


def _number(span: Span, frame: _Frame, baseline: float) -> str:
    """The layer's number on its bar, hidden where it does not fit; the page's script looks again after a zoom."""
    text = "all layers" if span.layer == WHOLE_STEP else str(span.layer)
    needs = len(text if span.layer == WHOLE_STEP else str(frame.deepest)) * _DIGIT_PX + 4
    width = span.seconds / frame.scale * 100
    pixels = width / 100 * _PLOT_PX
    fits = pixels >= needs or (pixels >= _SPARSE_PX and span.layer % 10 == 0)
    middle = frame.left(span.start) + width / 2
    return (
        f'<text class="num{"" if fits else " off"}" x="{middle:.4f}%" y="{baseline:.0f}" '
        f'data-w="{width:.4f}" data-needs="{needs:.0f}" data-layer="{span.layer}">{text}</text>'
    )


def _grid(scale: float, bottom: int) -> str:
    """Vertical lines at round milliseconds, labelled; every fifth of a step besides, shown when zoomed in."""
    step = _round_step(scale * 1e3)
    lines, numbers = [], []
    for fifth in range(math.floor(scale * 1e3 / step * 5) + 1):
        at = fifth * step / 5
        share = at / (scale * 1e3) * 100
        x = f"{share:.4f}%"
        name = "first" if fifth == 0 else "fine" if fifth % 5 else "last" if share > _LAST_LABEL else ""
        lines.append(f'<line class="{name}" x1="{x}" x2="{x}" y1="{TOP - 2}" y2="{bottom + 3}"></line>')
        numbers.append(f'<text class="{name}" x="{x}" y="{bottom + 16}">{at:g}{"" if fifth else " ms"}</text>')
    return f'<g class="grid">{"".join(lines)}</g><g class="axis">{"".join(numbers)}</g>'


def _round_step(span_ms: float) -> float:
    """1, 2 or 5 times a power of ten, such that `span_ms` has 6 to 15 steps."""
    power = 10.0 ** math.floor(math.log10(span_ms / 10))
    return next(power * factor for factor in (1, 2, 5, 10) if span_ms / (power * factor) <= 15)


def _end_mark(trace: StepTrace, frame: _Frame, bottom: int) -> str:
    end = trace.compute_end
    if end is None:
        return ""
    share = frame.left(end)
    anchor, shift = ("end", -5) if share > 85 else ("start", 5)
    return (
        f'<g class="end"><line x1="{share:.4f}%" x2="{share:.4f}%" y1="2" y2="{bottom + 3}"></line>'
        f'<text x="{share:.4f}%" dx="{shift}" y="12" text-anchor="{anchor}">compute ends</text></g>'
    )


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
    template = Template(resources.files(__package__).joinpath("timeline.html").read_text(encoding="utf-8"))
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
