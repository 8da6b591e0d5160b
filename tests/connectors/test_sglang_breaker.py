"""Loads pause while they keep failing, longer each time, and one that is in place ends that."""

from __future__ import annotations

from layerflow.connectors.sglang.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, LoadBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def open_for(breaker: LoadBreaker, clock: Clock) -> float:
    """Seconds until loads are tried again."""
    began = clock.now
    while breaker.open:
        clock.now += 0.5
    return clock.now - began


def test_single_failures_pause_nothing() -> None:
    breaker = LoadBreaker(Clock())
    for _ in range(5):
        for _ in range(FAILURES - 1):
            breaker.failed("one")
            assert not breaker.open
        breaker.succeeded()


def test_failures_in_a_row_pause_loads_longer_each_time_up_to_a_minute() -> None:
    clock = Clock()
    breaker = LoadBreaker(clock)
    for number in range(FAILURES):
        assert not breaker.open
        breaker.failed(f"reason {number}")
    assert breaker.reason == f"reason {FAILURES - 1}"
    pauses = [open_for(breaker, clock)]
    for _ in range(7):  # the one load that is tried decides
        breaker.failed("again")
        pauses.append(open_for(breaker, clock))
    assert pauses == [FIRST_PAUSE_S, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_a_load_that_is_in_place_starts_anew() -> None:
    clock = Clock()
    breaker = LoadBreaker(clock)
    for _ in range(FAILURES + 3):
        breaker.failed("dead")
        open_for(breaker, clock)
    breaker.succeeded()
    for _ in range(FAILURES - 1):
        breaker.failed("dead")
    assert not breaker.open
    breaker.failed("dead")
    assert open_for(breaker, clock) == FIRST_PAUSE_S


def test_a_batch_that_began_before_the_pause_can_end_it() -> None:
    breaker = LoadBreaker(Clock())
    for _ in range(FAILURES):
        breaker.failed("dead")
    assert breaker.open
    breaker.succeeded()
    assert not breaker.open
