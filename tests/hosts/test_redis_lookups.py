"""What a lookup asks of Redis at a time. The server is a stand-in; real ones are in tests/backends."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import pytest

from layerflow.hosts import redis
from layerflow.hosts.backend import pool_name


class Pipeline:
    """One round trip to a server that has the strings of these names."""

    def __init__(self, names: set[str], trips: list[int]) -> None:
        self._names, self._trips, self._answers = names, trips, list[int]()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def execute_command(self, command: str, name: str) -> None:
        assert command == "STRLEN"
        self._answers.append(len(name) if name in self._names else 0)

    def execute(self) -> list[int]:
        self._trips.append(len(self._answers))
        return self._answers


@pytest.mark.parametrize("trips_in_time", [3, 1])
def test_a_long_lookup_is_some_round_trips_and_ends_when_its_time_is_over(
    trips_in_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [number.to_bytes(24) for number in range(2 * redis.LOOKUP_KEYS + 1)]
    names, trips = {pool_name(key) for key in keys[::2]}, list[int]()

    class Client:
        def pipeline(self, **more: Any) -> Pipeline:
            return Pipeline(names, trips)

    backend = redis.Redis({"url": "", "timeout_ms": 1000, "unfinished_s": 10})
    backend._client = Client()
    monkeypatch.setattr(redis.time, "monotonic", lambda: 0.0 if len(trips) < trips_in_time else 1.0)
    there = backend.lookup(keys, until=0.5)
    assert trips == [redis.LOOKUP_KEYS, redis.LOOKUP_KEYS, 1][:trips_in_time]
    assert there == [number % 2 == 0 and number < sum(trips) for number in range(len(keys))]
    assert backend.lookup([], until=math.inf) == []
