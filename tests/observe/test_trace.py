from __future__ import annotations

import itertools
import json
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.errors import ProtocolError
from layerflow.observe.trace import LANES, WHOLE_STEP, Span, StepTrace, figures, overlap_bound, rows

MS = 1e-3


def layerwise(layers: int, compute_ms: float, transfer_ms: float, start: float = 1000.0) -> StepTrace:
    """The ideal layer-wise load: batches back to back, each layer computed as soon as it may."""
    trace = StepTrace(step=1, session=2, label="ideal")
    load, compute = transfer_ms * MS / layers, compute_ms * MS / layers
    now = start
    for layer in range(layers):
        landed = start + (layer + 1) * load
        trace.add("load", layer, landed - load, landed, nbytes=1000, blocks=2)
        ready = max(now, landed)
        trace.add("wait", layer, now, ready)
        trace.add("compute", layer, ready, ready + compute)
        now = ready + compute
    return trace


def test_published_case() -> None:
    """60 layers, 838 ms of compute, 167 ms of transfer: all but the first layer's load can hide."""
    assert overlap_bound(0.167, 60, 0.838 / 60) == pytest.approx(0.9833, abs=5e-5)
    measured = figures(layerwise(60, 838, 167))
    assert measured.bound == pytest.approx(0.9833, abs=5e-5)
    assert measured.overlap == pytest.approx(measured.bound, abs=1e-6)
    assert measured.transfer_ms == pytest.approx(167)
    assert measured.exposed_ms == pytest.approx(167 / 60)
    assert measured.hidden_ms == pytest.approx(167 * 59 / 60)
    assert (measured.bytes, measured.layers) == (60_000, 60)
    assert measured.gb_per_s == pytest.approx(60_000 / 0.167 / 1e9)


@settings(deadline=None)
@given(
    layers=st.integers(1, 12),
    compute=st.floats(0.5, 500),
    transfer=st.floats(0.5, 500),
)
def test_ideal_schedule_meets_the_bound(layers: int, compute: float, transfer: float) -> None:
    """The formula is what the best schedule reaches, whichever side is slower."""
    measured = figures(layerwise(layers, compute, transfer))
    assert measured.overlap == pytest.approx(measured.bound, abs=1e-6)


@st.composite
def steps(draw: st.DrawFn) -> StepTrace:
    """A step of unequal layers: loads that come in any order, at once or one by one, and an engine that waits for each
    layer, dawdles and computes it; saves that begin after their layer.
    """
    seconds = st.floats(0, 0.02)
    layers = draw(st.integers(1, 6))
    trace = StepTrace(1, 1, "any")
    landed, free = dict.fromkeys(range(layers), 0.0), 0.0
    for layer in draw(st.lists(st.integers(-1, layers - 1), min_size=1, max_size=12)):
        start = draw(st.floats(0, 0.05)) if draw(st.booleans()) else free
        free = start + draw(seconds)
        trace.add("load", layer, start, free, nbytes=draw(st.integers(0, 1 << 20)))
        for each in range(layers) if layer == WHOLE_STEP else [layer]:
            landed[each] = max(landed[each], free)
    now = draw(seconds)
    for layer in range(layers):
        ready = max(now, landed[layer] - draw(st.sampled_from([0.0, 1e-4])))  # an end is noticed a little late
        trace.add("wait", layer, now, ready)
        begun = ready + draw(seconds)
        now = begun + draw(seconds)
        trace.add("compute", layer, begun, now)
        start = now + draw(seconds)
        trace.add("save", layer, start, start + draw(seconds), nbytes=draw(st.integers(0, 1 << 20)))
    return trace


@settings(deadline=None)
@given(trace=steps(), direction=st.sampled_from(["load", "save"]))
def test_no_overlap_exceeds_its_bound(trace: StepTrace, direction: str) -> None:
    measured = figures(trace, direction)  # type: ignore[arg-type]
    assert 0 <= measured.overlap <= measured.bound + 1e-9
    assert measured.bound <= 1


def test_the_bound_follows_from_each_layers_own_size_and_time() -> None:
    """A small first layer is loaded soon, and a long first compute hides what follows: the mean layer knows neither."""
    trace = StepTrace(1, 1, "unequal")
    trace.add("load", 0, 0.000, 0.001, nbytes=1)
    trace.add("load", 1, 0.001, 0.020, nbytes=19)
    trace.add("wait", 0, 0.000, 0.001)
    trace.add("compute", 0, 0.001, 0.021)
    trace.add("compute", 1, 0.021, 0.022)
    measured = figures(trace)
    assert measured.overlap == pytest.approx(0.95)
    assert measured.bound == pytest.approx(0.95)
    assert overlap_bound(0.020, 2, 0.0105) == pytest.approx(0.5)


def test_a_link_that_stands_still_leaves_room_below_the_bound() -> None:
    trace = StepTrace(1, 1, "late")
    trace.add("load", 0, 0.000, 0.010, nbytes=10)
    trace.add("wait", 0, 0.000, 0.010)
    trace.add("compute", 0, 0.010, 0.020)
    trace.add("load", 1, 0.020, 0.030, nbytes=10)  # 10 ms after it could have begun
    trace.add("wait", 1, 0.020, 0.030)
    trace.add("compute", 1, 0.030, 0.040)
    measured = figures(trace)
    assert (measured.overlap, measured.bound) == (0.0, pytest.approx(0.5))


def test_slow_transfer_exposes_what_compute_cannot_cover() -> None:
    # t = 10, c = 4: exposed 10 + 6 * 3 = 28 of 40.
    measured = figures(layerwise(4, 16, 40))
    assert measured.exposed_ms == pytest.approx(28)
    assert measured.bound == pytest.approx(1 - 28 / 40)


def test_concurrent_batches_count_once() -> None:
    trace = StepTrace(1, 1, "two lanes")
    trace.add("load", 0, 0.0, 0.010, nbytes=10)
    trace.add("load", 0, 0.005, 0.008, nbytes=10)
    trace.add("load", 1, 0.009, 0.020, nbytes=10)
    trace.add("load", 2, 0.030, 0.031, nbytes=10)
    measured = figures(trace)
    assert measured.transfer_ms == pytest.approx(21)
    assert (measured.layers, measured.bytes) == (3, 40)


def test_bulk_load_hides_nothing() -> None:
    trace = StepTrace(1, 1, "bulk")
    trace.add("load", WHOLE_STEP, 0.0, 0.040, nbytes=1 << 20)
    trace.add("wait", 0, 0.0, 0.041)
    for layer in range(4):
        trace.add("compute", layer, 0.041 + layer * 0.02, 0.061 + layer * 0.02)
    measured = figures(trace)
    assert (measured.hidden_ms, measured.overlap) == (0.0, 0.0)
    assert measured.layers == 4, "one span for all layers counts the layers that were computed"
    assert measured.bound == pytest.approx(0.75)


def test_saves_are_exposed_past_the_end_of_compute() -> None:
    trace = StepTrace(1, 1, "save")
    for layer in range(4):
        trace.add("compute", layer, layer * 0.010, (layer + 1) * 0.010)
        trace.add("save", layer, (layer + 1) * 0.010, (layer + 1) * 0.010 + 0.006, nbytes=5)
    trace.add("wait", 0, 0.0, 0.001)
    measured = figures(trace, "save")
    assert measured.transfer_ms == pytest.approx(24)
    assert measured.exposed_ms == pytest.approx(6)
    assert measured.overlap == pytest.approx(0.75)
    assert measured.bound == pytest.approx(0.75)


def test_saves_done_before_the_end_of_compute_are_hidden() -> None:
    trace = StepTrace(1, 1, "save")
    trace.add("compute", 0, 0.0, 1.0)
    trace.add("save", 0, 0.5, 0.6)
    assert figures(trace, "save").exposed_ms == 0.0
    assert figures(trace, "save").overlap == 1.0


def test_saves_without_compute_are_all_exposed() -> None:
    trace = StepTrace(1, 1, "drain")
    trace.add("save", 0, 70.0, 70.5)
    assert figures(trace, "save").overlap == 0.0


@pytest.mark.parametrize("direction", ["load", "save"])
def test_nothing_moved_is_all_zero(direction: str) -> None:
    trace = StepTrace(1, 1, "idle")
    assert set(figures(trace, direction)) == {0}  # type: ignore[arg-type]
    assert figures(trace).gb_per_s == 0.0
    assert (trace.origin, trace.duration, trace.compute_end) == (0.0, 0.0, None)


def test_dict_round_trip_through_json_and_msgpack() -> None:
    trace = layerwise(3, 10, 5)
    trace.add("link", 0, 1.0, 2.0, nbytes=7, blocks=1, emulated=True)
    assert StepTrace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace
    assert StepTrace.from_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(trace.to_dict()))) == trace


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"step": 1, "session": 1}, "label"),
        ({"step": "x", "session": 1, "label": ""}, "step"),
        ({"step": 1, "session": 1, "label": "", "spans": [{"lane": "gpu"}]}, "lane"),
    ],
)
def test_from_dict_names_the_bad_field(bad: dict[str, object], named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        StepTrace.from_dict(bad)


def test_traces_do_not_share_spans() -> None:
    one, other = StepTrace(1, 1, "a"), StepTrace(2, 1, "b")
    one.add("load", 0, 0.0, 1.0)
    assert other.spans == []


def test_threads_add_without_losing_spans() -> None:
    trace = StepTrace(1, 1, "threads")

    def add(lane_number: int) -> None:
        for layer in range(500):
            trace.add(LANES[lane_number], layer, layer, layer + 1)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(span.lane, span.layer) for span in trace.spans} == {
        (lane, layer) for lane in LANES[:4] for layer in range(500)
    }


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), max_size=30))
def test_rows_never_overlap_and_keep_every_span(places: list[tuple[float, float]]) -> None:
    spans = [Span("load", number, start, start + length) for number, (start, length) in enumerate(places)]
    shared = rows(spans)
    assert sorted(span.layer for row in shared for span in row) == list(range(len(spans)))
    for row in shared:
        assert all(before.stop <= after.start for before, after in itertools.pairwise(row))


def test_clock_noise_does_not_make_negative_time() -> None:
    assert Span("wait", 0, 2.0, 1.0).seconds == 0.0


def test_spans_that_overlap_within_the_slack_share_a_row() -> None:
    first, second = Span("load", 0, 0.0, 1.001), Span("load", 1, 1.0, 2.0)
    assert rows([first, second]) == [[first], [second]]
    assert rows([first, second], slack=0.002) == [[first, second]]
