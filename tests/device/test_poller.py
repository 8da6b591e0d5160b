"""The poller: callbacks on its thread, in order, whatever raises; parked when idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from layerflow.device import CpuEvent
from layerflow.device.poller import Poller
from layerflow.errors import InvalidTransition

PATIENCE = 20.0  # seconds until a test gives up


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller("test-poller")
    yield poller
    assert poller.close(PATIENCE)


class Signal:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.thread: threading.Thread | None = None
        self._called = threading.Event()

    def __call__(self, *args: object) -> None:
        self.calls.append(args)
        self.thread = threading.current_thread()
        self._called.set()

    def wait(self) -> None:
        assert self._called.wait(PATIENCE)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Broken:
    def query(self) -> bool:
        raise RuntimeError("device lost")

    def synchronize(self) -> None: ...


def test_calls_back_on_its_own_thread_once_the_event_is_done(poller: Poller) -> None:
    event, signal, later = CpuEvent(), Signal(), Signal()
    poller.watch(event, signal, 1, "two")
    poller.watch(CpuEvent(done=True), later)
    later.wait()
    assert signal.calls == []
    event.set()
    signal.wait()
    assert signal.calls == [(1, "two")]
    assert signal.thread is not None
    assert signal.thread.name == "test-poller"


def test_events_seen_done_together_are_reported_in_the_order_watched(poller: Poller) -> None:
    event, signals, order = CpuEvent(), [Signal() for _ in range(5)], []
    for number in range(5):
        poller.watch(event, order.append, number)
    poller.watch(event, signals[-1])
    event.set()
    signals[-1].wait()
    assert order == [0, 1, 2, 3, 4]


def test_a_callback_that_raises_hurts_nobody_else(poller: Poller) -> None:
    signal = Signal()
    poller.watch(CpuEvent(done=True), lambda: 1 / 0)
    poller.watch(CpuEvent(done=True), signal)
    signal.wait()
    assert poller.statistics().failed == 1
    assert poller.statistics().fired == 2


def test_an_event_that_raises_is_reported_and_dropped(poller: Poller) -> None:
    failed, callback, other = Signal(), Signal(), Signal()
    poller.watch(Broken(), callback, 7, on_error=failed)
    poller.watch(CpuEvent(done=True), other)
    other.wait()
    failed.wait()
    assert callback.calls == []
    error, argument = failed.calls[0]
    assert str(error) == "device lost"
    assert argument == 7
    assert poller.statistics().watching == 0


def test_a_callback_may_watch_the_next_event(poller: Poller) -> None:
    signal = Signal()
    poller.watch(CpuEvent(done=True), lambda: poller.watch(CpuEvent(done=True), signal))
    signal.wait()


def test_every_event_of_many_threads_is_reported(poller: Poller) -> None:
    """A watch that races with parking must not be lost."""
    remaining = threading.Semaphore(0)

    def watcher() -> None:
        for _ in range(50):
            done = threading.Event()
            poller.watch(CpuEvent(done=True), done.set)
            assert done.wait(PATIENCE)
            remaining.release()

    threads = [threading.Thread(target=watcher) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        assert remaining.acquire(timeout=PATIENCE)
    for thread in threads:
        thread.join()
    assert poller.statistics().fired == 200


def test_without_events_it_parks_and_looks_no_more_until_woken(poller: Poller) -> None:
    eventually(lambda: poller.statistics().parked)
    sweeps = poller.statistics().sweeps
    again = Signal()
    poller.watch(CpuEvent(done=True), again)
    again.wait()
    assert poller.statistics().sweeps > sweeps


def test_closed_it_takes_nothing_more() -> None:
    poller = Poller()
    signal = Signal()
    poller.watch(CpuEvent(), signal)
    assert poller.close(PATIENCE)
    assert signal.calls == []
    with pytest.raises(InvalidTransition, match="closed"):
        poller.watch(CpuEvent(), signal)
