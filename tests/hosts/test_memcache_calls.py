"""Calls into a memcache client whose MetaService ends, without the packages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from e2e.known import eventually

from layerflow.hosts.backend import Unreachable
from layerflow.hosts.memcache.client import MAX_GIVEN_UP, MAX_THREADS, MemcacheClient

PATIENCE_S = 30.0


class Store:
    """A client whose questions hang while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.connected = False  # a call that is made now is answered, whatever became of those before
        self.closed = 0
        self.unleased: list[str] = []

    def batch_is_exist(self, names: list[str]) -> list[int]:
        if not self.connected:
            self.gate.wait(PATIENCE_S)
        return [1] * len(names)

    def batch_remove_lease(self, names: list[str]) -> int:
        self.unleased += names
        return 0

    def close(self) -> None:
        self.closed += 1


class Meta:
    """A MetaService as a test says."""

    generation, ill = 1, ""


def give_up(times: int, call: Callable[[], object]) -> None:
    """Make a call that is not answered, so many times."""
    for _ in range(times):
        with pytest.raises(Unreachable, match="did not answer in time"):
            call()


def test_what_is_given_up_is_counted_and_never_closed_under():
    meta, store = Meta(), Store()
    calls = MemcacheClient(meta)  # type: ignore[arg-type]
    calls.open(store)
    store.gate.set()
    assert calls.exists(["one"]) == [1]
    store.gate.clear()
    meta.generation = 0
    with pytest.raises(Unreachable, match="ended while it was asked"):
        calls.exists(["one"])
    assert calls.unlinked and calls.counts["failed_calls"] == 1
    assert not calls.close(0.0)
    assert not store.closed
    with pytest.raises(Unreachable, match="not connected"):
        calls.exists(["one"])
    store.gate.set()
    assert calls.close(PATIENCE_S)
    assert store.closed == 1
    assert calls.close(0.0) and store.closed == 1, "there is nothing left to close"
    calls.open(store)
    meta.generation = 2  # an answer is waited for again, however late
    assert not calls.unlinked and calls.exists(["one"]) == [1]
    assert calls.close()


def test_a_meta_service_that_hangs_is_waited_for_as_long_as_a_call_may_take():
    meta, store = Meta(), Store()
    calls = MemcacheClient(meta, 0.05)  # type: ignore[arg-type]
    calls.open(store)
    with pytest.raises(Unreachable, match="did not answer in time"):
        calls.exists(["one"])
    assert calls.unlinked
    meta.ill = "the MetaService hangs"
    with pytest.raises(Unreachable, match="the MetaService hangs"):
        calls.exists(["one"])
    assert calls.counts["metadata_calls"] == 1, "it is not asked while it is ill"
    store.gate.set()
    calls.call_s = PATIENCE_S  # what follows is answered, however late
    calls.probe()
    assert not calls.unlinked
    calls.probe()
    assert calls.counts["metadata_calls"] == 2, "there is nothing to be found out"
    meta.ill = ""
    assert calls.exists(["one"]) == [1]
    assert calls.close(PATIENCE_S)


def test_a_lookup_is_waited_for_until_its_own_deadline():
    store = Store()
    calls = MemcacheClient(Meta())  # type: ignore[arg-type]
    calls.open(store)
    with pytest.raises(Unreachable, match="did not answer in time"):
        calls.exists(["one"], time.monotonic() + 0.05)
    store.gate.set()
    assert calls.close(PATIENCE_S)


def test_calls_that_do_not_come_back_are_bounded():
    store = Store()
    calls = MemcacheClient(Meta(), 0.05)  # type: ignore[arg-type]
    calls.open(store)
    give_up(MAX_GIVEN_UP, lambda: calls.exists(["one"]))
    with pytest.raises(Unreachable, match="are still unanswered"):
        calls.exists(["one"])
    assert eventually(lambda: calls.counts["metadata_calls"] == MAX_GIVEN_UP), "a call may begin after it was given up"
    store.gate.set()
    assert calls.close(PATIENCE_S)


def test_calls_are_made_again_once_a_probe_is_answered_though_earlier_ones_never_are():
    store = Store()
    calls = MemcacheClient(Meta(), 0.05)  # type: ignore[arg-type]
    calls.open(store)
    give_up(MAX_GIVEN_UP, lambda: calls.exists(["one"]))
    give_up(1, calls.probe)
    store.connected = True
    calls.call_s = PATIENCE_S  # what follows is answered, however late
    with pytest.raises(Unreachable, match="are still unanswered"):
        calls.exists(["one"])
    calls.probe()
    assert calls.exists(["one"]) == [1] and not calls.unlinked
    store.gate.set()
    assert calls.close(PATIENCE_S)


def test_threads_of_calls_that_never_come_back_are_bounded():
    store = Store()
    calls = MemcacheClient(Meta(), 0.001)  # type: ignore[arg-type]
    calls.open(store)
    give_up(MAX_GIVEN_UP, lambda: calls.exists(["one"]))
    give_up(MAX_THREADS - MAX_GIVEN_UP, calls.probe)
    with pytest.raises(Unreachable, match=f"{MAX_THREADS} calls to memcache's MetaService are still unanswered"):
        calls.probe()
    store.gate.set()
    assert calls.close(PATIENCE_S)


def test_the_library_hears_of_leases_given_back_while_the_meta_service_was_ill():
    """What it takes for leased keeps its place in the library's table: nothing else there could be read."""
    meta, store = Meta(), Store()
    calls = MemcacheClient(meta)  # type: ignore[arg-type]
    calls.open(store)
    calls.unlease(["one"])
    meta.ill = "the MetaService hangs"
    calls.unlease(["two", "three"])
    calls.give_back()
    assert store.unleased == ["one"]
    meta.ill = ""
    calls.give_back()
    calls.give_back()
    assert store.unleased == ["one", "two", "three"]
    assert calls.close(PATIENCE_S)
