"""A hit's plan: where its objects lie, so that they can be loaded without asking.

The server never ends a plan by time. Its holder does: one that is not used within the lease that was asked for is void
here, and then the server is told. So that no load can begin by a plan whose objects have been let go.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layerflow.expiring import ExpiringSet
from layerflow.keys import covered_by
from layerflow.places import NOWHERE, Places, is_placed, unpack_places
from layerflow.spec import ModelSpec
from layerflow.wire.messages import Found


class PinnedPlaces:
    """One hit's.

    :param number: the server's.
    :param incarnation: of the arena.
    :param rows: see :data:`layerflow.places.Places`.
    :param tail: the row of the object that the hit ends in, where that is not the prompt's own full chunk; else -1.

    :ivar revoked: it was given up; nothing may begin by it.
    :ivar users: who has begun a load by it, each once.
    """

    __slots__ = ("incarnation", "number", "revoked", "rows", "tail", "users")

    def __init__(self, number: int, incarnation: int, rows: Places, tail: int) -> None:
        self.number = number
        self.incarnation = incarnation
        self.rows = rows
        self.tail = tail
        self.revoked = False
        self.users: set[int] = set()

    @classmethod
    def of(cls, found: Found, tokens: int, tail: int, spec: ModelSpec) -> PinnedPlaces | None:
        """What the answer brings for this hit of those that it tells of; None where some of it is not in the arena.

        :param tail: position of the tail that the hit ends with; -1 = with none.
        """
        spec = spec if found.drafts else spec.own
        rows = unpack_places(found.places, spec) if found.plan else None
        if rows is None:
            return None
        row = len(rows) - len(found.tails) + tail if tail >= 0 else -1
        return cls(found.plan, found.incarnation, rows, row) if is_placed(spec, rows, tokens, row) else None

    def part(self, group: int, chunks: Sequence[int], tail_chunk: int) -> PartPlaces | None:
        """Places of these chunks' objects of one group; None where the plan has no such rows.

        :param chunks: consecutive.
        :param tail_chunk: the chunk whose object is the tail; -1 = none.
        """
        first, last = chunks[0], chunks[-1]
        ends_in_tail = last == tail_chunk  # no other chunk can be
        if ends_in_tail and self.tail < 0:
            return None
        whole = len(chunks) - ends_in_tail
        if first + whole > len(self.rows) or (whole and chunks[whole - 1] != first + whole - 1):
            return None
        rows = self.rows[first : first + whole, group]
        if ends_in_tail:
            rows = np.concatenate((rows, self.rows[self.tail : self.tail + 1, group]))
        return PartPlaces(self.number, self.incarnation, rows)


@dataclass(frozen=True, slots=True)
class PartPlaces:
    """Where the objects of one part lie, for whichever worker loads it.

    :param plan: number of the plan.
    :param rows: uint64, shape ``(objects, shards, 2)``.
    :param more: each worker opens another step with this plan after the one that loads this part.
    """

    plan: int
    incarnation: int
    rows: Places
    more: bool = False

    def of_worker(self, column: int) -> Places | None:
        """uint64, shape ``(objects, 2)``; None where one of them has no place.

        :param column: see :func:`columns_of`.
        """
        own = self.rows[:, column]
        return None if own[:, 0].max() == NOWHERE else own

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.plan, self.incarnation, self.rows.tobytes(), self.rows.shape, self.more)


def _unpickled(plan: int, incarnation: int, rows: bytes, shape: tuple[int, ...], more: bool) -> PartPlaces:
    return PartPlaces(plan, incarnation, np.frombuffer(rows, "<u8").reshape(shape), more)


def columns_of(spec: ModelSpec) -> tuple[int, ...]:
    """By group, which of the shards that a plan tells of holds the worker's objects."""
    peers = spec.shard.peers()
    held = [([covered_by(group, peer) for peer in peers], group) for group in range(len(spec.groups))]
    return tuple(ends.index(covered_by(group, spec.shard)) for ends, group in held)


class UnusedPlaces:
    """Plans that were told here and are not used yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: dict[int, tuple[str, PinnedPlaces, float]] = {}
        self._of: dict[str, int] = {}  #: by request, the number of its plan
        self._used: ExpiringSet[str] = ExpiringSet(MOST_USED)

    def register(self, request: str, plan: PinnedPlaces, until: float) -> int:
        """Hold a lookup's plan. Return the number of the request's earlier plan, which is void now; 0 = there is none.

        :param until: monotonic seconds; unused, it is void then.
        """
        with self._lock:
            revoked = self._revoke(request)
            self._plans[plan.number] = request, plan, until
            self._of[request] = plan.number
            return revoked

    def consume(self, plan: PinnedPlaces, request: str, user: int) -> bool:
        """May this user begin a load by it? Once."""
        with self._lock:
            if plan.revoked or user in plan.users:
                return False
            plan.users.add(user)
            held = self._plans.pop(plan.number, None)
            if held is not None:
                self._of.pop(held[0], None)
                self._used.add(request)
            return True

    def revoke(self, request: str) -> int:
        """Void the plan of a request that will not be loaded by it. Return its number; 0 = there is none."""
        with self._lock:
            return self._revoke(request)

    def drop(self, request: str) -> tuple[int, bool]:
        """As :meth:`revoke`, of a request that will not be loaded. Return also whether a plan of it was used."""
        with self._lock:
            return self._revoke(request), self._used.discard(request)

    def expired(self, now: float) -> list[tuple[str, int]]:
        """Plans that were not used in time, which are void now: their requests and numbers."""
        if not self._plans:  # nearly always
            return []
        with self._lock:
            late = [(request, number) for number, (request, _, until) in self._plans.items() if until <= now]
            for request, _ in late:
                self._revoke(request)
            return late

    def _revoke(self, request: str) -> int:
        number = self._of.pop(request, 0)
        held = self._plans.pop(number, None)
        if held is None:
            return 0
        held[1].revoked = True
        return number


MOST_USED = 4096
"""Requests of which it is remembered that their plan was used, until they are dropped."""
