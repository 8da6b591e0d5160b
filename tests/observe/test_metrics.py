from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

import layerflow
from layerflow.flow import Flow
from layerflow.flow.events import LayerShape, Limits, Part, SessionOpened, StepOpened, Tick
from layerflow.observe.metrics import MAX_GONE, MAX_LABEL_CHARS, MAX_PAIRS, MAX_REASON_CHARS, MAX_REASONS, Metrics
from layerflow.observe.slow_steps import SlowSteps
from layerflow.pool.base import PoolStatistics
from layerflow.wire.messages import Figures

ONE, OTHER_ENGINE = ("e0", "llama"), ("e1", "llama")
POOL = PoolStatistics(
    capacity_bytes=1000,
    warm_bytes=600,
    used_bytes=400,
    objects=4,
    half_written=1,
    pinned=2,
    hits=9,
    misses=1,
    commits=5,
    evictions=1,
    evicted_bytes=100,
    full=0,
    revoked=2,
    hidden=0,
)


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """The exposition, parsed: (name, label values) -> value."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_names_carry_the_prefix_and_a_unit() -> None:
    metrics = Metrics()
    metrics.load_failed("deadline")
    metrics.save_failed("session_lost")
    metrics.protocol_error("bad_message")
    names = {name for name, _ in samples(metrics)}
    assert all(name.startswith("layerflow_") for name in names)
    assert not [name for name in names if name.endswith("_created")]
    counted = "steps|batches|bytes|objects|layers|blocks|sessions|handoffs|leases|servers"
    plain = rf"_(total|up|info|{counted}|seconds|seconds_(bucket|sum|count))$"
    assert not [name for name in names if not re.search(plain, name)]


def test_a_fresh_server_shows_zeros_and_its_version() -> None:
    seen = samples(Metrics())
    assert seen["layerflow_build_info", layerflow.__version__] == 1
    assert seen["layerflow_commits_total", ""] == 0
    assert seen["layerflow_open_steps", ""] == 0


def test_steps_and_sessions() -> None:
    metrics = Metrics()
    metrics.sessions(3, {"state": 1, "full": 2})
    metrics.sessions(2, {"state": 2})
    metrics.step_opened(ONE, full=4, missing=2)
    metrics.step_opened(ONE)
    metrics.step_done(ONE, 1000, 50)
    metrics.saves_shed(3)
    seen = samples(metrics)
    assert seen["layerflow_sessions", ""] == 2
    assert seen["layerflow_bound_groups", "state"] == 2 and ("layerflow_bound_groups", "full") not in seen
    assert seen["layerflow_steps_opened_total", "e0,llama"] == 2
    assert seen["layerflow_full_saves_total", ""] == 4
    assert seen["layerflow_failed_loads_total", "missing"] == 2
    assert seen["layerflow_steps_total", "e0,llama"] == 1
    assert seen["layerflow_loaded_bytes_total", "e0,llama"] == 1000
    assert seen["layerflow_saved_bytes_total", "e0,llama"] == 50
    assert seen["layerflow_shed_saves_total", ""] == 3


def test_measured_steps_split_into_hidden_and_exposed() -> None:
    metrics = Metrics()
    metrics.step_measured(ONE, Figures(1, 10, 0.2, 0.05, 0, 0.0, 0.0))
    metrics.step_measured(ONE, Figures(2, 10, 0.1, 0.4, 5, 0.3, 0.1))
    seen = samples(metrics)
    assert seen["layerflow_transfer_seconds_total", "load,e0,llama"] == pytest.approx(0.3)
    assert seen["layerflow_exposed_seconds_total", "load,e0,llama"] == pytest.approx(0.45)
    assert seen["layerflow_hidden_seconds_total", "load,e0,llama"] == pytest.approx(0.15)
    assert seen["layerflow_hidden_seconds_total", "save,e0,llama"] == pytest.approx(0.2)
    assert seen["layerflow_step_exposed_load_seconds_count", ""] == 2
    assert metrics.summary()["overlap"] == pytest.approx({"load": 0.5, "save": 2 / 3})


def test_a_step_without_loads_does_not_flatter_the_exposure_histogram() -> None:
    metrics = Metrics()
    metrics.step_measured(ONE, Figures(1, 0, 0.0, 0.0, 5, 0.3, 0.1))
    assert samples(metrics)["layerflow_step_exposed_load_seconds_count", ""] == 0


def test_lookups() -> None:
    metrics = Metrics()
    metrics.lookup(ONE, 768, 256, 0.002)
    metrics.lookup(OTHER_ENGINE, 0, 1024, 0.2)
    seen = samples(metrics)
    assert seen["layerflow_lookups_total", "e0,llama"] == seen["layerflow_lookups_total", "e1,llama"] == 1
    assert seen["layerflow_lookup_hit_tokens_total", "e0,llama"] == 768
    assert seen["layerflow_lookup_miss_tokens_total", "e0,llama"] == 256
    assert seen["layerflow_lookup_miss_tokens_total", "e1,llama"] == 1024
    assert seen["layerflow_lookup_seconds_count", ""] == 2
    assert seen["layerflow_lookup_seconds_bucket", "0.002"] == 1
    assert metrics.summary()["lookups_total"] == 2
    assert metrics.summary()["lookup_hit_ratio"] == pytest.approx(0.375)


def test_of_engines_that_have_gone_few_series_stay_and_sums_never_fall() -> None:
    metrics = Metrics()
    metrics.step_done(ONE, 1, 0)
    for number in range(100):
        pair = f"engine-{number}", "llama"
        metrics.step_done(pair, 10, 0)
        metrics.step_measured(pair, Figures(1, 10, 0.5, 0.25, 0, 0.0, 0.0))
        metrics.engine_gone(pair[0])
    shown = {labels for name, labels in samples(metrics) if name == "layerflow_loaded_bytes_total"}
    assert shown == {"e0,llama", *(f"engine-{number},llama" for number in range(100 - MAX_GONE, 100))}
    figures = metrics.summary()
    assert figures["loaded_bytes_total"] == 1001
    assert figures["exposed_seconds_total"] == {"load": 25.0, "save": 0.0}
    metrics.step_done(("engine-99", "llama"), 10, 0)
    assert samples(metrics)["layerflow_loaded_bytes_total", "engine-99,llama"] == 20, "it is back by its name"


def test_engines_are_bounded_and_the_busy_ones_stay() -> None:
    metrics = Metrics()
    for number in range(3 * MAX_PAIRS):
        metrics.step_done(ONE, 1, 0)
        metrics.step_done((f"engine-{number}", "m" * 1000), 1, 0)
    seen = samples(metrics)
    engines = {labels for name, labels in seen if name == "layerflow_loaded_bytes_total"}
    assert len(engines) == MAX_PAIRS
    assert seen["layerflow_loaded_bytes_total", "e0,llama"] == 3 * MAX_PAIRS
    assert f"engine-{3 * MAX_PAIRS - 1},{'m' * MAX_LABEL_CHARS}" in engines


def test_the_core_is_shown_as_it_is_now() -> None:
    metrics, flow = Metrics(), Flow(Limits())
    flow.handle(SessionOpened(1, (LayerShape(0, 1000),)), 0.0)
    flow.handle(StepOpened(1, 1, 5.0, 5.0, loads=(Part("r", 0, 3),), saves=(Part("r", 0, 2),)), 0.0)
    metrics.flow(flow.statistics())
    seen = samples(metrics)
    assert seen["layerflow_open_steps", ""] == 1
    assert seen["layerflow_inflight_bytes", "load"] == 3000
    assert seen["layerflow_inflight_batches", "load"] == 1
    assert seen["layerflow_unsaved_bytes", ""] == 2000
    flow.handle(Tick(), 6.0)
    for _ in range(2):
        metrics.flow(flow.statistics())
    assert samples(metrics)["layerflow_expired_total", ""] == 2


def test_a_slow_step_is_told_once_a_while_with_where_its_time_went() -> None:
    now, limit = [0.0], [0.1]
    steps = SlowSteps(lambda: limit[0], lambda: now[0])
    worker = SimpleNamespace(number=3, name="e0")
    with capture_logs() as lines:
        steps.see(worker, Figures(1, 500_000_000, 1.0, 0.25, 7, 0.5, 0.0))
        steps.see(worker, Figures(2, 10, 1.0, 0.05, 0, 0.0, 0.0))
        steps.see(worker, Figures(3, 10, 1.0, 0.9, 0, 0.0, 0.0))
        now[0] = 2.0
        steps.see(worker, Figures(4, 10, 1.0, 0.9, 0, 0.0, 0.0))
        limit[0] = 0.0
        now[0] = 9.0
        steps.see(worker, Figures(5, 10, 1.0, 0.9, 0, 0.0, 0.0))
    told = [(line["event"], line["step"], line["unsaid"]) for line in lines]
    assert told == [("slow_step", 1, 0), ("slow_step", 4, 1)]
    first = lines[0]
    assert (first["load_exposed_ms"], first["load_hidden_ms"], first["load_gbps"]) == (250.0, 750.0, 0.5)


def test_pool_counts_become_counters_and_survive_a_new_pool() -> None:
    metrics = Metrics()
    metrics.pool(POOL)
    metrics.pool(replace(POOL, commits=8, used_bytes=300))
    metrics.pool(replace(POOL, commits=1, evictions=0, evicted_bytes=0, revoked=0))
    seen = samples(metrics)
    assert seen["layerflow_commits_total", ""] == 9
    assert seen["layerflow_evictions_total", ""] == 1
    assert seen["layerflow_revokes_total", ""] == 2
    assert seen["layerflow_pool_used_bytes", ""] == 400
    assert seen["layerflow_pool_capacity_bytes", ""] == 1000
    assert seen["layerflow_pool_warm_bytes", ""] == 600
    assert seen["layerflow_pool_objects", ""] == 4


def test_loop_lag_keeps_its_maximum() -> None:
    metrics = Metrics()
    for lag in (0.001, 0.2, 0.003, -0.1):
        metrics.loop_lag(lag)
    seen = samples(metrics)
    assert seen["layerflow_loop_lag_max_seconds", ""] == 0.2
    assert seen["layerflow_loop_lag_seconds_count", ""] == 4


def test_limits_are_shown_in_base_units() -> None:
    metrics = Metrics()
    metrics.limits(Limits(prefetch_layers=3, max_transfer_bytes=1 << 20, stagger_us=250))
    seen = samples(metrics)
    assert seen["layerflow_limit_prefetch_layers", ""] == 3
    assert seen["layerflow_limit_batch_bytes", ""] == 1 << 20
    assert seen["layerflow_limit_stagger_seconds", ""] == pytest.approx(250e-6)


def test_reasons_from_outside_are_bounded_and_escaped() -> None:
    metrics = Metrics()
    metrics.load_failed('a"b\\c\nd')
    metrics.load_failed("x" * 1000)
    for number in range(MAX_REASONS * 2):
        metrics.load_failed(f"reason {number}")
    metrics.load_failed("reason 0", parts=4)
    reasons = {
        label: value for (name, label), value in samples(metrics).items() if name == "layerflow_failed_loads_total"
    }
    assert len(reasons) == MAX_REASONS + 1
    assert reasons['a"b\\c\nd'] == 1
    assert reasons["x" * MAX_REASON_CHARS] == 1
    assert reasons["reason 0"] == 5
    assert sum(reasons.values()) == 2 + MAX_REASONS * 2 + 4


def test_two_servers_and_the_global_registry_stay_apart() -> None:
    one, other = Metrics(), Metrics()
    one.step_done(ONE, 1, 1)
    assert ("layerflow_steps_total", "e0,llama") not in samples(other)
    assert b"layerflow_" not in prometheus_client.generate_latest(prometheus_client.REGISTRY)


def test_summary_is_plain_numbers() -> None:
    metrics = Metrics()
    metrics.protocol_error("too_large")
    metrics.sessions(1)
    summary = metrics.summary()
    assert summary["protocol_errors_total"] == {"too_large": 1.0}
    assert summary["sessions"] == 1.0
    assert summary["overlap"] == {}
    for value in summary.values():
        assert isinstance(value, (float, dict))
