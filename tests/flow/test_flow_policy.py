"""Layer by layer, in bulk or recompute; and the estimators behind it."""

from __future__ import annotations

import random

import pytest

from layerflow.flow.cost import (
    ComputeCost,
    ComputeModel,
    LinkCost,
    LinkModel,
    Mode,
    ModeInputs,
    attention_pairs,
    choose,
    forecast,
)

SLOW_COMPUTE = ComputeCost(0.0, 1e-6, 1e-10)
FAST_LINK = LinkCost(10e9, 20e-6)


def inputs(**changes):
    base = dict(
        hit_tokens=8192,
        new_tokens=512,
        layers=32,
        bytes_per_token=4096.0,
        link=FAST_LINK,
        compute=SLOW_COMPUTE,
        step_seconds=1e-4,
        batch_seconds=3e-5,
    )
    return ModeInputs(**{**base, **changes})


def test_nothing_measured_prefers_layerwise():
    assert choose(inputs(link=None)) is Mode.LAYERWISE
    assert choose(inputs(compute=None)) is Mode.LAYERWISE
    assert choose(inputs(hit_tokens=0, link=None)) is Mode.RECOMPUTE


def test_a_long_prefix_is_loaded_layer_by_layer():
    assert choose(inputs()) is Mode.LAYERWISE


def test_a_dead_slow_link_recomputes():
    assert choose(inputs(link=LinkCost(1e6, 0.1))) is Mode.RECOMPUTE


def test_a_tiny_hit_behind_a_costly_batch_goes_in_bulk():
    tiny = inputs(hit_tokens=16, batch_seconds=1e-3, compute=ComputeCost(0.0, 1e-2, 0.0), new_tokens=1)
    assert choose(tiny) is Mode.BULK


def test_the_forecast_is_the_formula():
    times = forecast(inputs())
    t = 8192 * 4096 / 10e9
    c = 512 * 1e-6 + attention_pairs(512, 8192) * 1e-10
    assert times.layerwise == pytest.approx(32 * c + t + 31 * max(0, t - c) + 20e-6 + 1e-4 + 32 * 3e-5)
    assert times.bulk == pytest.approx(32 * (t + c) + 20e-6 + 1e-4 + 16 * 3e-5)
    assert times.recompute == pytest.approx(32 * (8704 * 1e-6 + 8704 * 8705 / 2 * 1e-10))


def test_link_model_finds_latency_and_bandwidth_and_follows_a_change():
    model, dice = LinkModel(), random.Random(1)
    assert model.estimate is None
    for bandwidth, latency in ((5e9, 1e-4), (1e9, 3e-4)):
        for _ in range(300):
            nbytes = dice.randrange(1 << 20, 64 << 20)
            model.observe(nbytes, latency + nbytes / bandwidth)
        assert model.estimate.bandwidth == pytest.approx(bandwidth, rel=0.02)
        assert model.estimate.latency == pytest.approx(latency, rel=0.2)


def test_link_model_with_batches_of_one_size_knows_the_rate():
    model = LinkModel()
    for _ in range(10):
        model.observe(1 << 20, 1e-3)
    assert model.estimate.bandwidth == pytest.approx((1 << 20) / 1e-3) and model.estimate.latency == 0.0


def test_compute_model_learns_the_quadratic_and_shrugs_off_an_outlier():
    truth, model, dice = ComputeCost(2e-5, 3e-7, 4e-11), ComputeModel(), random.Random(2)
    assert model.estimate is None
    for _ in range(200):
        new, context = dice.randrange(1, 4096), dice.randrange(0, 16384)
        model.observe(new, context, truth.layer_seconds(new, context) * dice.uniform(0.97, 1.03))
    model.observe(1024, 0, 30.0)  # a compilation
    for new, context in ((128, 8192), (4096, 0), (2048, 2048)):
        seconds = model.estimate.layer_seconds(new, context)
        assert seconds == pytest.approx(truth.layer_seconds(new, context), rel=0.1)


def test_compute_model_stays_sane_when_every_step_is_alike():
    model = ComputeModel()
    for _ in range(5000):
        model.observe(256, 1024, 5e-4)
    estimate = model.estimate
    assert estimate.layer_seconds(256, 1024) == pytest.approx(5e-4, rel=0.05)
    assert 0.0 <= estimate.layer_seconds(8192, 0) < 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_observations_are_ignored(seconds):
    link, compute = LinkModel(min_observations=1), ComputeModel(min_observations=1)
    link.observe(100, seconds)
    compute.observe(100, 0, seconds)
    assert link.estimate is None and compute.estimate is None
