"""What reading from each peer costs, as measured: its importer's calls, which end in order, one after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from layerflow.flow.cost.estimators import LinkCost, LinkModel


class _Call(NamedTuple):
    number: int
    nbytes: int
    peer: str


class LinkCosts:
    """Latency and bandwidth by the name of the peer."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()
        self._began = 0.0
        self._models: dict[str, LinkModel] = {}

    def begun(self, call: int, nbytes: int, peer: str) -> None:
        """The importer was given a call."""
        if not self._calls:
            self._began = time.monotonic()
        self._calls.append(_Call(call, nbytes, peer))

    def ended(self, number: int, *, whole: bool) -> None:
        """It has ended a call. :param whole: all of it has come."""
        now = time.monotonic()
        while self._calls:
            call = self._calls.popleft()
            if call.number == number:
                if whole:
                    self._models.setdefault(call.peer, LinkModel()).observe(call.nbytes, now - self._began)
                break
        self._began = now

    def lost(self) -> None:
        """The importer is dead."""
        self._calls.clear()

    def forget(self, peer: str) -> None:
        """Nothing is read from it any more."""
        self._models.pop(peer, None)

    def of(self, peer: str) -> LinkCost | None:
        """What is known; None = too little."""
        model = self._models.get(peer)
        return model.estimate if model is not None else None

    def dear(self, offered: Mapping[bytes, tuple[str, int]], object_s: float) -> frozenset[bytes]:
        """What would take longer to read than to compute, peer by peer; of a peer of which nothing is known, nothing.

        :param offered: by key, the peer and the object's bytes. :param object_s: what computing one takes.
        """
        found: set[bytes] = set()
        for peer in {name for name, _ in offered.values()}:
            cost = self.of(peer)
            sizes = {key: nbytes for key, (name, nbytes) in offered.items() if name == peer}
            if cost is not None and cost.latency + sum(sizes.values()) / cost.bandwidth > object_s * len(sizes):
                found.update(sizes)
        return frozenset(found)
