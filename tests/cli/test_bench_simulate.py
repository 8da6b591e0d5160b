"""``layerflow bench simulate``: what is compared, and a short run of it."""

from __future__ import annotations

import math

import pytest

from layerflow_cli.bench import simulate


def test_tau_counts_pairs_that_differ_by_more_than_the_noise():
    rising = [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]
    assert simulate.kendall(rising, 0.1) == 1.0
    assert simulate.kendall([(one, -other) for one, other in rising], 0.1) == -1.0
    assert simulate.kendall([*rising, (3.05, 0.0)], 0.1) == pytest.approx((3 - 2) / 5)
    assert math.isnan(simulate.kendall(rising, 5.0))
    # What is predicted alike is not predicted in order.
    assert simulate.kendall([(1, 5), (2, 5), (3, 5), (4, 6)], 0) == pytest.approx(3 / 6)
    assert simulate.kendall([(one, 7.0) for one, _ in rising], 0.1) == 0.0


@pytest.mark.campaign
def test_a_short_run_predicts_hits_exactly():
    result = simulate.measure(requests=12, shapes=1, configurations=1, runs=1)
    assert [row["configuration"] for row in result["others"]] == ["as recorded", "one layer ahead"]
    for row in result["others"]:
        assert row["hit_predicted_percent"] == pytest.approx(row["hit_percent"], abs=1.0)
    assert {row["run"] for row in result["own"]} == {"overlap", "pool", "conversations"}
    assert len(list(simulate.present(result))) == 3
