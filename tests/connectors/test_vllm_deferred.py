"""What is put off is done: in order, once, by the thread or by whoever cannot wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from layerflow.connectors.vllm.worker.deferred import Deferred

LONG_S, WAIT_S = 600.0, 20.0


@pytest.fixture
def soon() -> Iterator[Deferred]:
    made = Deferred(0.001)
    yield made
    made.close()


@pytest.fixture
def late() -> Iterator[Deferred]:
    made = Deferred(LONG_S)
    yield made
    made.close()


def test_calls_are_done_in_order_on_another_thread(soon: Deferred) -> None:
    done: list[tuple[int, int]] = []
    over = threading.Event()
    for number in range(20):
        soon.put(lambda number=number: done.append((number, threading.get_ident())))  # type: ignore[misc]
    soon.put(over.set)
    assert over.wait(WAIT_S)
    assert [number for number, _ in done] == list(range(20))
    assert threading.get_ident() not in {thread for _, thread in done}


def test_a_call_is_held_until_it_is_flushed_and_done_once(late: Deferred) -> None:
    done: list[str] = []
    late.put(lambda: done.append("first"))
    late.put(lambda: done.append("second"))
    assert not done
    late.flush()
    late.flush()
    assert done == ["first", "second"]


def test_what_is_put_after_a_flush_is_done_too(soon: Deferred) -> None:
    for _ in range(200):  # the thread may be anywhere
        soon.put(lambda: None)
        soon.flush()
        over = threading.Event()
        soon.put(over.set)
        assert over.wait(WAIT_S)


def test_a_flush_waits_for_the_call_that_is_under_way(soon: Deferred) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        done.set()

    soon.put(slow)
    assert begun.wait(WAIT_S)
    flushed = threading.Event()
    flusher = threading.Thread(target=lambda: (soon.flush(), flushed.set()))
    flusher.start()
    soon.put(lambda: None)  # does not wait
    assert not flushed.is_set()
    go_on.set()
    flusher.join(WAIT_S)
    assert flushed.is_set() and done.is_set()


def test_a_call_that_fails_is_not_the_last(soon: Deferred) -> None:
    over = threading.Event()
    soon.put(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    soon.put(over.set)
    assert over.wait(WAIT_S)


def test_closing_does_what_is_held() -> None:
    done: list[int] = []
    held = Deferred(LONG_S)
    held.put(lambda: done.append(1))
    held.close()
    assert done == [1]
    assert not held._thread.alive
