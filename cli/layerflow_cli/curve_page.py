"""A curve of hit tokens by pool size as one page: an SVG, and nothing to be fetched."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from layerflow.config.fields import format_size
from layerflow.sim.curve import CurvePoint
from layerflow_cli.output_file import write_file

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 760, 380, 60, 50

_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}}text{{font-size:12px;fill:#555}}
.line{{fill:none;stroke:#2a6fb0;stroke-width:2}}.dot{{fill:#2a6fb0}}.knee{{fill:#c0392b}}.grid{{stroke:#ddd}}</style>
<h1 style="font-size:18px">{title}</h1><p>{told}</p>
<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{told}">{drawn}</svg>
"""


def write_page(path: Path, name: str, points: Sequence[CurvePoint], knee: CurvePoint | None, everything: float) -> None:
    """Write the page.

    :param everything: what a pool that holds everything hits, as a share.
    :raises ConfigError: the file cannot be written.
    """
    told = "No size is recommended."
    if knee is not None:
        told = f"pool.size {format_size(knee.arena_bytes)} hits {knee.hit_rate:.1%} of all prompt tokens (in red)."
        told += f" A pool that holds everything would hit {everything:.1%}."
    page = _PAGE.format(
        title=html.escape(f"Hit tokens by pool.size: {name}"),
        told=html.escape(told),
        width=_WIDTH,
        height=_HEIGHT,
        drawn="".join(_drawn(points, knee)),
    )
    write_file("--html", path, page)


def _drawn(points: Sequence[CurvePoint], knee: CurvePoint | None) -> list[str]:
    top = max(0.1, -(-max(point.hit_rate for point in points) // 0.1) * 0.1)
    wide, high = _WIDTH - _LEFT - 20, _HEIGHT - _BOTTOM - 20
    places = [
        (_LEFT + wide * at / max(1, len(points) - 1), 20 + high * (1 - point.hit_rate / top))
        for at, point in enumerate(points)
    ]
    drawn = []
    for step in range(round(top * 10) + 1):
        y = 20 + high * (1 - step / 10 / top)
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{step * 10} %</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn.append(f'<polyline class="line" points="{line}"/>')
    for (x, y), point in zip(places, points, strict=True):
        drawn.append(f'<circle class="{"knee" if point is knee else "dot"}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        label = html.escape(format_size(point.arena_bytes))
        drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{label}</text>')
    return drawn
