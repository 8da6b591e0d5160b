from __future__ import annotations

import itertools
import json

from layerflow.observe import trace as trace_module
from layerflow.observe.trace import StepTrace


def trace(label: str, start: float) -> StepTrace:
    made = StepTrace(step=3, session=8, label=label)
    made.add("compute", 0, start, start + 0.010)
    made.add("load", 0, start, start + 0.004, nbytes=4096, blocks=2, emulated=True)
    made.add("load", 1, start + 0.002, start + 0.006, nbytes=4096, blocks=2)
    made.add("load", 2, start + 0.005, start + 0.007, nbytes=4096, blocks=2)
    return made


def test_every_event_has_what_the_format_asks_for() -> None:
    rendered = json.loads(json.dumps(trace_module.render([trace("a", 50.0), trace("b", 90.0)])))
    assert set(rendered) == {"traceEvents", "displayTimeUnit"}
    assert rendered["displayTimeUnit"] == "ms"
    for event in rendered["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert set(event["args"]) >= {"layer", "bytes", "blocks"}
        else:
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def test_times_are_microseconds_from_each_traces_start() -> None:
    events = trace_module.render([trace("a", 50.0), trace("b", 90.0)])["traceEvents"]
    computes = [event for event in events if event.get("cat") == "compute"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in computes] == [(1, 0.0, 10_000.0), (2, 0.0, 10_000.0)]
    load = next(event for event in events if event.get("cat") == "load" and event["args"]["layer"] == 1)
    assert (load["ts"], load["dur"], load["args"]["bytes"]) == (2000.0, 4000.0, 4096)


def test_threads_are_named_and_their_events_never_overlap() -> None:
    events = trace_module.render([trace("a", 50.0)])["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["compute", "load", "load 2"]
    for tid in names:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == tid)
        assert mine
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(mine))


def test_nothing_is_valid_too() -> None:
    assert trace_module.render([]) == {"traceEvents": [], "displayTimeUnit": "ms"}
