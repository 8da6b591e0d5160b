"""Calls into a memcache client whose MetaService ends, without the packages."""

from __future__ import annotations

import threading

import pytest

from layerflow.hosts.backend import Unreachable
from layerflow.hosts.memcache.client import MemcacheClient

PATIENCE_S = 30.0


class Store:
    """A client whose questions hang while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.closed = 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self.gate.wait(PATIENCE_S)
        return [1] * len(names)

    def close(self) -> None:
        self.closed += 1


def test_what_is_given_up_is_counted_and_never_closed_under():
    terms, store = [1], Store()
    calls = MemcacheClient(lambda: terms[-1])
    calls.open(store)
    store.gate.set()
    assert calls.exists(["one"]) == [1]
    store.gate.clear()
    terms.append(0)
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
    assert not calls.unlinked and calls.exists(["one"]) == [1]
    assert calls.close()
