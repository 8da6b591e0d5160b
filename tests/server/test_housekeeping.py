"""Leases over pauses of the server, and upkeep that fails."""

from __future__ import annotations

from typing import cast

import pytest
from e2e.known import eventually
from hypothesis import given
from hypothesis import strategies as st

from layerflow.pool.base import Pool
from layerflow.server.incoming import ALLOWED_S, IncomingObjects, IncomingSaves
from layerflow.server.server import MOST_BEHIND_S, PERIOD_S, PausedClock
from server.support import Embed

LEASE_S = 10.0


def test_in_time_and_with_an_empty_inbox_leases_run_out_when_they_end() -> None:
    clock = PausedClock(100.0, LEASE_S)
    assert clock.expired(100.25, 0.001, True) == 100.25


def test_nothing_runs_out_over_messages_that_are_not_read() -> None:
    clock = PausedClock(100.0, LEASE_S)
    assert clock.expired(101.0, 0.0, True) == 101.0
    assert clock.expired(101.25, 0.0, False) == 101.0
    assert clock.expired(105.0, 0.0, False) == 101.0
    assert clock.expired(120.0, 0.0, False) == 120.0 - MOST_BEHIND_S, "a client that never stops sending keeps nothing"


def test_a_pause_is_added_to_leases_and_forgotten_after_one() -> None:
    clock = PausedClock(100.0, LEASE_S)
    assert clock.expired(100.0, 0.0, True) == 100.0
    assert clock.expired(160.0, 59.75, True) < 100.25, (
        "an inbox that is empty right after a pause may not have filled yet"
    )
    assert clock.expired(160.25, 0.0, True) == pytest.approx(100.5)
    assert clock.expired(169.5, 0.0, True) == pytest.approx(109.75)
    assert clock.expired(170.25, 0.0, True) == 170.25


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=30))
def test_nothing_runs_out_early_and_everything_in_the_end(rounds: list[tuple[float, bool]]) -> None:
    now, clock = 1000.0, PausedClock(1000.0, LEASE_S)
    for lag, caught_up in rounds:
        now += PERIOD_S + lag
        assert clock.expired(now, lag, caught_up) <= now - (lag if lag >= PERIOD_S else 0)
    now += 2 * LEASE_S
    assert clock.expired(now, 0.0, True) == now


def test_upkeep_that_fails_does_not_end_the_server(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    server = embed()
    failures = []

    def fail(now: float, most: int) -> int:
        failures.append(now)
        raise RuntimeError("a bug in the pool")

    with monkeypatch.context() as patch:
        patch.setattr(server.server.pool, "expire", fail)
        assert eventually(lambda: len(failures) >= 2), "one failure ended the upkeep"
    assert server.server.healthy
    assert eventually(lambda: server.server.metrics.summary()["housekeeping_failures_total"] >= 2)


def test_requests_that_may_follow_end_in_the_order_of_their_last_lookup() -> None:
    follows = IncomingSaves(IncomingObjects(cast(Pool, None), lambda _: None), lambda *_: None)
    for number in range(4):
        follows.allow("engine", f"r{number}", float(number))
    follows.allow("engine", "r0", 5.0)  # looked up again
    follows.disallow("engine", "r2")
    follows.expire(ALLOWED_S + 2.5)
    assert [follows.allowed("engine", f"r{number}") for number in range(4)] == [True, False, False, True]
    follows.expire(ALLOWED_S + 4.0)
    assert [follows.allowed("engine", f"r{number}") for number in range(4)] == [True, False, False, False]
    follows.expire(ALLOWED_S + 5.0)
    assert not follows.allowed("engine", "r0")
