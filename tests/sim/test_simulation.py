"""The core, the pool and the windows under a virtual clock: invariants, closed forms, and what settings do."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.worlds import CHUNK, LAYER_S, LAYERS, OBJECT_BYTES, TOKEN_BYTES, conversations, machine, run, trace_of

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.flow.cost import ComputeCost, LinkCost, ModeInputs, forecast
from layerflow.sim.simulation import MOST_WORKERS, EngineLoads, simulate

PROMPT = [*range(20)]


def again(seconds: float = 1.0, new: int = 1) -> Any:
    """A prompt, and later the same with one more block."""
    return trace_of([(0.0, 20 * CHUNK, 1, PROMPT), (seconds, (20 + new) * CHUNK, 1, [*PROMPT, *range(100, 100 + new)])])


def test_engines_that_have_nothing_to_do_cost_nothing() -> None:
    trace = conversations(3)
    figures = run(trace, machine(engines=MOST_WORKERS)).figures
    assert figures.requests == len(trace.requests)
    passed_s = figures.link_busy[1] * MOST_WORKERS * figures.seconds
    assert passed_s == pytest.approx(run(trace, machine()).figures.link_busy[1] * figures.seconds, rel=0.3)


def test_more_workers_than_a_server_takes_are_refused() -> None:
    with pytest.raises(ConfigError, match="4,098 workers are more than a server takes, 4,096"):
        run(again(), machine(engines=MOST_WORKERS // 2 + 1, tp=2))


def test_requests_go_to_engines_that_have_least_to_do_and_progress_is_told() -> None:
    loads, draws, counts = EngineLoads(5, random.Random(4)), random.Random(4), [0] * 5
    busy: list[int] = []
    for turn in range(400):
        if busy and turn % 3 == 2:
            number = busy.pop(turn % len(busy))
            loads.give_back(number)
            counts[number] -= 1
            continue
        busy.append(loads.take())
        assert busy[-1] == draws.choice([each for each in range(5) if counts[each] == min(counts)])
        counts[busy[-1]] += 1
    trace, told = conversations(3), []
    simulate(machine(), Settings(), trace, tell=lambda: told.append(None))
    assert len(told) == len(trace.requests)


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    engines=st.integers(1, 3),
    tp=st.sampled_from([1, 2]),
    mode=st.sampled_from(["auto", "layerwise", "bulk"]),
    depth=st.integers(0, 3),
    batch=st.sampled_from([16 << 10, 64 << 10, 1 << 20]),
    arena=st.sampled_from([2 << 20, 8 << 20, 256 << 20]),
    own=st.sampled_from([0, 400, 4000]),
    stagger=st.sampled_from([0, 100]),
    rate=st.sampled_from([1e6, 1e8, 1e10]),
    timeout_ms=st.sampled_from([1, 30, 5000]),
)
def test_every_request_ends_whatever_the_settings(
    seed, engines, tp, mode, depth, batch, arena, own, stagger, rate, timeout_ms
):
    made = machine(
        engines=engines, tp=tp, arena_bytes=arena, load=LinkCost(rate, 1e-5), save=LinkCost(rate, 0.0),
        cache_tokens=own, max_batched_tokens=512, max_running=8,
    )  # fmt: skip
    transfer = {
        "mode": mode, "prefetch_layers": depth, "max_transfer_bytes": batch, "max_inflight_bytes": 2 * batch,
        "h2d_stagger_us": stagger, "step_timeout_ms": timeout_ms,
    }  # fmt: skip
    trace = conversations(seed, count=15)
    one, two = (run(trace, made, seed=seed, validate=validate, **transfer) for validate in (True, False))
    assert one.figures == two.figures, "equal arguments, equal figures"
    assert one.figures.requests == len(trace.requests)
    for each in one.requests:
        assert each.generated == each.request.output
        assert each.first_token_at >= each.request.at
        assert 0 <= each.local < each.request.tokens and 0 <= each.hit < each.request.tokens
    assert one.figures.hit_tokens + one.figures.local_tokens <= one.figures.tokens


@pytest.mark.parametrize("rate", [2e8, 2e7], ids=["compute-bound", "link-bound"])
@pytest.mark.parametrize("mode", ["layerwise", "bulk"])
def test_a_lone_hit_takes_what_the_cost_model_forecasts(mode: str, rate: float):
    hit = 20 * CHUNK
    link, compute = LinkCost(rate, 1e-4), ComputeCost(LAYER_S, 0.0, 0.0)
    outcome = run(again(), machine(load=link), mode=mode)
    [_, second] = outcome.requests
    assert second.hit == hit
    times = forecast(
        ModeInputs(
            hit_tokens=hit, new_tokens=CHUNK, layers=LAYERS, bytes_per_token=TOKEN_BYTES, link=link, compute=compute
        )
    )
    assert times is not None
    assert second.first_token_at - second.request.at == pytest.approx(getattr(times, mode), rel=0.02)


def test_layers_wait_only_for_what_compute_does_not_hide():
    layer_bytes = 20 * CHUNK * TOKEN_BYTES
    quick = run(again(), machine(load=LinkCost(layer_bytes / LAYER_S * 4, 0.0)), mode="layerwise").requests[1]
    assert quick.exposed_s == pytest.approx(LAYER_S / 4), "the first layer, and nothing after it"
    slow = run(again(), machine(load=LinkCost(layer_bytes / LAYER_S / 4, 0.0)), mode="layerwise").requests[1]
    assert slow.exposed_s == pytest.approx(4 * LAYER_S * LAYERS - (LAYERS - 1) * LAYER_S)


def test_one_layer_ahead_exposes_more_where_compute_is_uneven_with_the_link():
    layer_bytes = 20 * CHUNK * TOKEN_BYTES
    made = machine(load=LinkCost(layer_bytes / LAYER_S, 0.5 * LAYER_S))
    exposed = [run(again(), made, mode="layerwise", prefetch_layers=depth).figures.exposed_total_s for depth in (0, 1)]
    assert exposed[0] < exposed[1]


def test_a_load_past_its_deadline_is_computed():
    outcome = run(again(), machine(load=LinkCost(1e5, 0.0)), mode="layerwise", step_timeout_ms=20)
    first, second = outcome.requests
    assert outcome.figures.failed_loads == 1 and second.hit == 0
    assert second.generated == 1 and second.first_token_at < 2.0
    assert first.generated == 1


@pytest.mark.parametrize("mode", ["layerwise", "bulk"])
def test_what_is_never_stored_in_time_is_not_hit(mode: str):
    late = run(again(0.001), machine(save=LinkCost(1e3, 0.0)), mode=mode, save_timeout_ms=100)
    assert late.figures.pool_tokens == 0 and late.requests[1].hit == 0


def test_a_pool_that_is_too_small_evicts():
    trace = trace_of([(float(turn), 20 * CHUNK, 1, PROMPT) for turn in range(4)])
    roomy, tight = run(trace), run(trace, machine(arena_bytes=10 * OBJECT_BYTES))
    assert roomy.figures.pool_tokens == 3 * (20 * CHUNK - 1)
    assert tight.figures.pool_tokens < roomy.figures.pool_tokens
    assert tight.figures.evictions > 0 == roomy.figures.evictions


def test_an_engines_own_cache_comes_first():
    trace = trace_of([(float(turn), 20 * CHUNK, 1, PROMPT) for turn in range(3)])
    figures = run(trace, machine(cache_tokens=40 * CHUNK), mode="layerwise").figures
    assert figures.local_tokens == 2 * 19 * CHUNK, "whole blocks, one token left to compute"
    assert figures.hit_tokens == 2 * (CHUNK - 1), "the pool adds what its last block has"


def test_two_engines_share_one_pool():
    trace = trace_of([(0.0, 20 * CHUNK, 2000, PROMPT), (1.0, 20 * CHUNK, 1, PROMPT)])
    figures = run(trace, machine(engines=2), mode="layerwise").figures
    assert figures.hit_tokens == 20 * CHUNK - 1


def test_partial_chunks_are_stored_unless_told_otherwise():
    ids = [*PROMPT, 77]
    trace = trace_of([(float(turn), 20 * CHUNK + 30, 1, ids) for turn in range(2)])
    assert run(trace, mode="layerwise").requests[1].hit == 20 * CHUNK + 29
    assert run(trace, mode="layerwise", discard_partial_chunks=True).requests[1].hit == 20 * CHUNK


def test_a_prompt_shorter_than_a_chunk_is_stored_too():
    trace = trace_of([(float(turn), 40, 1, [5]) for turn in range(2)])
    assert run(trace, mode="layerwise").requests[1].hit == 39
