"""The windows of a verification as one page: an SVG, and nothing to be fetched."""

from __future__ import annotations

import html
import math
from pathlib import Path

from layerflow.tuning.verify import Arm, Report
from layerflow_cli.output_file import write_file

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 760, 380, 60, 50
_LINES = 5

_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}}text{{font-size:12px;fill:#555}}
.file{{fill:#8a94a0}}.tuned{{fill:#2a6fb0}}.p99{{stroke:#c0392b;stroke-width:2}}.grid{{stroke:#ddd}}</style>
<h1 style="font-size:18px">{title}</h1><p><b>{verdict}</b>: {reason}.</p><p>{changes}</p>
<p>Bars: what a step with loads made its engine wait, on average;
<span style="color:#8a94a0">the file's settings</span>,
<span style="color:#2a6fb0">the tuned ones</span>; <span style="color:#c0392b">p99</span> in red.</p>
<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{reason}">{drawn}</svg>
"""


def write_page(path: Path, name: str, report: Report) -> None:
    """Write the page.

    :raises ConfigError: the file cannot be written.
    """
    changes = ", ".join(f"{key} = {value}" for key, value in report.changes.items())
    page = _PAGE.format(
        title=html.escape(f"{name} beside the file in force"),
        verdict=html.escape(report.verdict.value),
        reason=html.escape(report.reason),
        changes=html.escape(changes),
        width=_WIDTH,
        height=_HEIGHT,
        drawn="".join(_drawn(report)),
    )
    write_file("--html", path, page)


def _drawn(report: Report) -> list[str]:
    bars = [(w.arm, w.exposed.mean_s * 1e3, w.exposed.quantile_s(0.99) * 1e3) for w in report.windows]
    top = max((each for _, *both in bars for each in both if not math.isnan(each)), default=1.0) or 1.0
    wide, high = _WIDTH - _LEFT - 20, _HEIGHT - _BOTTOM - 20
    drawn = []
    for step in range(_LINES + 1):
        y = 20 + high * (1 - step / _LINES)
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = f"{top * step / _LINES:.3g} ms"
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    place = wide / max(1, len(bars))
    for number, (arm, mean, p99) in enumerate(bars):
        x = _LEFT + place * number
        colour = "tuned" if arm is Arm.TUNED else "file"
        if not math.isnan(mean):
            tall = high * mean / top
            box = f'x="{x + place * 0.15:.1f}" y="{20 + high - tall:.1f}" width="{place * 0.7:.1f}" height="{tall:.1f}"'
            drawn.append(f'<rect class="{colour}" {box}><title>{arm.value}: {mean:.4g} ms</title></rect>')
            y = 20 + high * (1 - p99 / top)
            ends = f'x1="{x + place * 0.1:.1f}" x2="{x + place * 0.9:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            drawn.append(f'<line class="p99" {ends}/>')
        middle = x + place / 2
        drawn.append(f'<text x="{middle:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{number + 1}</text>')
    return drawn
