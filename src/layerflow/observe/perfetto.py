"""Step traces as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format" (Google, 2016): complete events (``"ph": "X"``) with `ts` and `dur` in
microseconds, names through metadata events (``"ph": "M"``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerflow.observe.trace import LANES, WHOLE_STEP, Span, StepTrace, rows


def render(traces: Sequence[StepTrace]) -> dict[str, Any]:
    """The JSON object to dump: one process per trace, one thread per row of a lane.

    Every trace starts at 0, so that steps measured at different times lie below each other. A lane
    whose spans overlap (two copy threads) becomes several threads: complete events of one thread must nest.
    """
    events: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces, start=1):
        events.append(_name(pid, 0, "process_name", name=trace.label))
        events.append(_name(pid, 0, "process_sort_index", sort_index=pid))
        origin, tid = trace.origin, 0
        for lane in LANES:
            for number, row in enumerate(rows(trace.lane(lane)), start=1):
                tid += 1
                events.append(_name(pid, tid, "thread_name", name=lane if number == 1 else f"{lane} {number}"))
                events.append(_name(pid, tid, "thread_sort_index", sort_index=tid))
                events.extend(_complete(pid, tid, span, origin, trace) for span in row)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(pid: int, tid: int, what: str, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _complete(pid: int, tid: int, span: Span, origin: float, trace: StepTrace) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": span.lane,
        "name": "all layers" if span.layer == WHOLE_STEP else f"layer {span.layer}",
        "ts": round((span.start - origin) * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "args": {
            "layer": span.layer,
            "bytes": span.nbytes,
            "blocks": span.blocks,
            "emulated": span.emulated,
            "session": trace.session,
            "step": trace.step,
        },
    }
