"""What a machine takes comes back from what was recorded of it."""

from __future__ import annotations

import random

import pytest

from layerflow.flow.cost import ComputeCost, LinkCost
from layerflow.sim.fit import MovedBatch, Reach, compute_reach, emulated_link, fit_compute, fit_link, slowdowns
from layerflow.sim.worker import LinkTimes


def lane(
    times: LinkTimes, *, count: int = 60, noise: float = 0.0, seed: int = 1, beside: bool = False
) -> list[MovedBatch]:
    """Batches of many sizes, now and then with a pause between them."""
    draws = random.Random(seed)
    now, made = 0.0, []
    for _ in range(count):
        blocks = draws.randint(1, 400)
        nbytes = blocks * draws.choice([4096, 16384])
        took = times.passing(nbytes, blocks) * (times.beside if beside else 1.0) * (1 + draws.uniform(-noise, noise))
        first = not made or draws.random() < 0.5
        begin = now + (0.01 if first else 0.0)
        now = begin + took + (times.cost.latency if first else 0.0)
        made.append(MovedBatch(begin, now, nbytes, blocks, beside=beside))
    return made


@pytest.mark.parametrize(
    "times",
    [
        LinkTimes(LinkCost(10e9, 0.0)),
        LinkTimes(LinkCost(1e9, 200e-6), 50e-6),
        LinkTimes(LinkCost(2e9, 0.0), 20e-6, 1e-6),
    ],
)
def test_a_links_terms_come_back(times: LinkTimes):
    found = fit_link([lane(times), lane(times, seed=2)])
    assert found is not None
    assert found.cost.bandwidth == pytest.approx(times.cost.bandwidth, rel=1e-3)
    for name in ("batch_seconds", "block_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(times, name), rel=1e-3, abs=1e-8)
    assert found.cost.latency == pytest.approx(times.cost.latency, rel=1e-3, abs=1e-8)


def test_noise_and_a_pause_do_not_lead_astray():
    times = LinkTimes(LinkCost(1e9, 0.0))
    batches = lane(times, noise=0.1)
    found = fit_link([[*batches, MovedBatch(99.0, 104.0, 4096, 1)]])
    assert found is not None and found.passing(1 << 20, 64) == pytest.approx(times.passing(1 << 20, 64), rel=0.05)


def test_a_link_is_slower_beside_the_other_direction():
    times = LinkTimes(LinkCost(1e9, 0.0), beside=1.7)
    found = fit_link([lane(times), lane(times, beside=True)])
    assert found is not None and found.beside == pytest.approx(1.7, rel=0.01)


def test_batches_of_one_size_tell_a_rate_and_too_few_tell_nothing():
    same = [MovedBatch(at * 1e-3, at * 1e-3 + 1e-3, 1 << 20, 64) for at in range(9)]
    found = fit_link([same])
    assert found is not None and found.cost.bandwidth == pytest.approx((1 << 20) / 1e-3)
    assert fit_link([same[:2]]) is None


def test_layers_that_took_longer_than_the_fit_are_told():
    times = LinkTimes(LinkCost(1e6, 0.0))
    batches = [MovedBatch(0.0, 1.0, 1_000_000, 1, layer=0), MovedBatch(1.0, 4.0, 1_000_000, 1, layer=1)]
    assert slowdowns(times, batches) == pytest.approx({0: 1.0, 1: 3.0})


def test_a_latency_is_no_slowdown_whether_it_overlaps_or_not():
    times = LinkTimes(LinkCost(1e6, 0.5))
    passes = [(0.0, 1.5), (1.0, 2.5), (2.5, 4.0)]  # the second passes behind the first, the third once it has arrived
    batches = [MovedBatch(*moved, 1_000_000, 1, layer=layer) for layer, moved in enumerate(passes)]
    assert slowdowns(times, batches) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})


def test_an_emulated_links_thread_is_fitted_beside_what_its_settings_say():
    cost = LinkCost(1e9, 300e-6)
    batches, passed, free_at = [], 0.0, 0.0
    for _ in range(40):
        began, passed = passed, passed + 65536 / cost.bandwidth
        free_at = max(free_at, passed + cost.latency) + 20e-6
        batches.append(MovedBatch(began, free_at, 65536, 4, emulated=True))
    found = emulated_link(cost, [batches])
    assert found is not None and found.cost == cost and found.passing(65536, 4) == 65536 / cost.bandwidth
    assert found.lane_batch_seconds == pytest.approx(20e-6, rel=0.01)
    assert emulated_link(cost, [batches[:2]]) is None


def test_a_layers_compute_comes_back():
    cost = ComputeCost(1e-4, 2e-6, 3e-10)
    told = [
        (new, context, cost.layer_seconds(new, context)) for new in (16, 256, 2048) for context in (0, 1000, 30_000)
    ]
    found = fit_compute([*told, (0, 0, 1.0), (16, 0, 0.0)])
    assert found is not None
    assert found.fixed == pytest.approx(cost.fixed, rel=1e-3)
    assert found.token == pytest.approx(cost.token, rel=1e-3)
    assert found.pair == pytest.approx(cost.pair, rel=1e-3)
    assert fit_compute(told[:2]) is None


@pytest.mark.parametrize(
    ("new", "known", "unknown"),
    [
        ([64] * 10, (128, 512), (129, 512)),  # of one size: not what a token takes
        ([64] * 10, (32, 512), (31, 512)),
        ([16, 64] * 5, (1, 512), (1025, 512)),
        ([1] * 7 + [256] * 3, (4096, 900), (4097, 900)),
        ([1] * 8 + [256] * 2, (2, 512), (3, 512)),  # two may have been the first ones, and slow
        ([1, 4, 16, 64] * 4, (1024, 600), (1, 641)),  # further into a prompt than any was
        ([5, 5], None, (1, 1)),
    ],
)
def test_a_fit_is_asked_no_further_than_several_passes_reach(new, known, unknown):
    cost = ComputeCost(2e-3, 1e-5, 0.0)
    rows = [(tokens, 256, cost.layer_seconds(tokens, 256)) for tokens in new]
    reach = compute_reach(rows, cost)
    assert not reach.tells(*unknown) and (known is None or reach.tells(*known))
    assert compute_reach(rows, None) == Reach()
    strange = [(tokens, context, seconds * 9) for tokens, context, seconds in rows]
    assert compute_reach(strange, cost) == Reach(), "the fit explains none of them"
