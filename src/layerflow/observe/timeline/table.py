"""The timeline page's table of figures, and how it writes numbers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Literal

from layerflow.observe.trace import StepFigures, StepTrace, figures

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
