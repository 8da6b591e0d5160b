"""Every measurement runs and says what it promises; small parameters, no figure is judged."""

import math

import pytest

from layerflow.errors import LayerflowError
from layerflow_cli.bench import (
    auto,
    beside,
    directory,
    flow,
    lookup,
    miss,
    overlap,
    pd,
    pool,
    proxy,
    record,
    server,
    stagger,
)
from layerflow_cli.bench.transfer import copy, device


def test_miss():
    result = miss.measure(
        preset="tiny-gqa", prompt_tokens=96, pairs=2, decode_steps=5, decode_batch=2, lookups=3, lookup_tokens=512
    )
    assert result["ttft_ratio"] > 0
    for name in ("decode_gross_us", "decode_bare_us", "decode_agent_us", "lookup_us", "lookup_hit_us"):
        assert 0 < result[name]["p50"] <= result[name]["p99"], name
    assert result["decode_step_us"]["p50"] < result["decode_gross_us"]["p50"]


def test_auto():
    result = auto.measure(hits=(64, 128), link_gbps=(1.0,), rounds=2, case_s=0.0)
    assert [case["hit_tokens"] for case in result["cases"]] == [64, 128]
    for case in result["cases"]:
        assert set(case["ttft_ms"]) == {"auto", "layerwise", "bulk", "recompute"}
        assert sum(case["chosen"].values()) == case["rounds"] == 2
    assert result["worst_ratio"] == max(case["ratio"] for case in result["cases"])


@pytest.mark.parametrize("shape", ["full", "compressed"])
def test_overlap(shape):
    result = overlap.measure(layers=3, compute_ms=6.0, transfer_ms=3.0, runs=1, shape=shape)
    assert result["bytes"] == 3 << 20
    for direction in ("load", "save"):
        assert math.isfinite(result[direction]["overlap"]) and 0 < result[direction]["bound"] <= 1


def test_flow():
    result = flow.measure(requests=(2, 4), layers=2, sessions=(1, 40), shared_events=2000)
    assert result["us_per_event"].keys() == {"2", "4"} and result["events_per_s"] > 0
    assert max(result["commands_per_layer"].values()) <= 4
    for figures in result["by_sessions"].values():
        assert figures["us_per_event"] > 0 and figures["tries_per_event"] <= 1 and figures["events"] > 1000
    assert len(flow.present(result)) > 1


def test_directory():
    result = directory.measure(objects=2000, replaced=500)
    assert result["evictions"] > 0 and set(result["phases"]) == {"filling", "reading", "filling the rest", "evicting"}
    assert result["worst_ms"] > 0 and result["first_eviction_ms"] > 0 and result["target_ms"] == 50


def test_copy():
    result = copy.measure(moved_bytes=1 << 20, turns=1, block_kib=(16,), object_mib=(1, 2))
    assert result["16KiB"]["save_gbps"] > 0 and result["16KiB"]["load_gbps"] > 0
    assert set(result["slots"]) == {"1MiB, 16KiB", "2MiB, 16KiB"}
    assert result["slots_worst"] == min(
        min(of["save_of_random"], of["load_of_random"]) for of in result["slots"].values()
    )
    assert len(copy.present(result)) == 3


def test_device():
    result = device.measure(device="cpu", moved_mib=1, turns=1, block_kib=(16, 64), matrix=32)
    for way in ("h2d", "d2h"):
        assert set(result[way]) == {"16KiB", "64KiB"}
        assert all(figures["gbps"] > 0 and figures["ratio"] > 0 for figures in result[way].values())
    assert result["pinned_gbps"] > 0 and result["calls_per_batch"] >= 1
    assert math.isfinite(result["compute_slowdown"])
    assert 0 < result["wait_us"]["p50"] <= result["wait_us"]["p99"] and result["first_byte_us"] > 0
    assert result["register_gb_per_s"] is None and result["emulated"] is False


def test_proxy():
    result = proxy.measure(rounds=3, streams=1, prompt_chars=2048)
    for order in ("concurrent", "prefill-first"):
        assert result[order]["proxied_ms"] > 0 and math.isfinite(result[order]["added_ms"]["p50"])
        assert 0 < result[order]["cpu_ms"]["p50"] <= result[order]["cpu_ms"]["p99"]


def test_p99_of_few_rounds_is_not_beyond_the_slowest():
    for values in ([3.0], [1.0, 3.0], [1.0, 2.0, 3.0]):
        assert 2.9 < proxy._percentiles(values)["p99"] <= 3.0


def test_stagger():
    # A layer that comes 1.5 slots late cannot be told from an early one: slots as long as they may be, far longer than
    # a busy machine makes a process wait.
    result = stagger.measure(ranks=2, layers=2, spacing_us=1_000_000, rounds=1)
    assert 0.0 <= result["slot_error_us"]["p50"] <= result["slot_error_us"]["p95"]
    assert (result["early"], result["submitted"]) == (0, 4) and result["load_ratio"]["p50"] > 0


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_pool(kind):
    result = pool.measure(kind=kind, rounds=1, chunks=2, layers=3, depths=(2, 4))
    for way in ("save", "load"):
        assert result[f"{way}_ratio"] == pytest.approx(result[f"{way}_gbps"] / result[f"raw_{way}_gbps"])
    assert 0 < result["first_byte_us"] < 60e6
    assert [result[f"metadata_rpcs_{what}"] for what in ("per_step", "2_layers", "4_layers")] == [0, 0, 0]
    speeds, requests = pool.present(result)
    assert kind in speeds.title and (speeds.row_count, requests.row_count) == (2, 3)


def test_lookup():
    result = lookup.measure(tokens=1024, tp_size=2, lookups=2)
    assert result["objects"] == 8
    for name in ("loop_cpu_us", "release_cpu_us", "wall_us"):
        assert 0 < result[name]["p50"] <= result[name]["p99"], name


def test_record():
    result = record.measure(events=4000, tokens=1024, lookups=4)
    assert result["events"] == 4000 and result["dropped"] == 0
    assert 0 < result["loop_us_per_event"] < result["cpu_us_per_event"] and result["bytes_per_event"] > 0
    assert result["recording"]["wall_us"]["p50"] > 0


def test_server():
    result = server.measure(engines=2, tp_size=2, layers=61, rounds=2, cases=("2+2", "2+0", "0+2"))
    assert set(result["by_case"]) == {"2+2", "2+0", "0+2"}
    for figures in result["by_case"].values():
        assert 0 < figures["us_per_worker_step"]["p50"] <= figures["us_per_worker_step"]["p99"]
        assert figures["steps_per_s"] > 0 and figures["target_us"] is None, "its targets are those of 8 engines"
    (table,) = server.present(result)
    assert table.row_count == 3


def test_server_refuses_a_case_that_moves_nothing():
    with pytest.raises(LayerflowError, match="as 2\\+2"):
        server.measure(cases=("0+0",))


def test_beside():
    result = beside.measure(moved_mib=4, layers=3, tokens=512, window_ms=10.0, rounds=1)
    for name in ("alone", "save", "load"):
        figures = result[name]
        assert 0 <= figures["largest_stall_ms"] <= figures["worst_stall_ms"]
        assert math.isfinite(figures["lost_ms"]) and figures["stalls"] >= 0
    (table,) = beside.present(result)
    assert table.row_count == 4 and result["targets"] == {}, "its targets are those of 256 MiB"
    (table,) = beside.present(result | {"targets": beside.TARGETS})
    assert table.row_count == 6


@pytest.mark.parametrize("servers", [1, 2])
def test_pd(servers):
    result = pd.measure(layers=6, compute_ms=12.0, transfer_ms=6.0, servers=servers, runs=1)
    for way in ("follow", "whole"):
        assert result[way]["exposed_ms"] > 0 and math.isfinite(result[way]["of_bound"])
    # Hops of 1 ms a layer, and compute that is slower than the link: only the last layer is exposed, on each of them.
    assert result["follow"]["bound"] == pytest.approx(1 - (servers + 1) / 6)
    assert pd.exposed_bound(3.0, 3, 0.5, 2) == pytest.approx(2 + 0.5 * 2)
