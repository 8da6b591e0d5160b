"""Plans: hits whose places were told. What they name stays where it is, whatever time passes and whoever is aborted.

A plan pins its objects until every worker of its engine that was attached then has opened its last step with it (the
step pins what it loads), or is gone, or until whoever asked says that it is not used. Whoever asked and has hung up
cannot say so any more: what no worker has used by then is a lease again.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from layerflow.pool.base import Owner, Pool
from layerflow.server.account import Charge
from layerflow.system import numbers

MOST_UNUSED = 4
"""A hit that was handed to workers may be looked up again, after a preemption say, before they open a step with it."""


@dataclass(slots=True, eq=False)
class HeldPlan:
    """One hit's plan.

    :param asker: number of the session that it was told.
    :param workers: numbers of those that may still open a step with it.
    :param used: one of them has.
    :param charge: what whoever asked is charged for it.
    """

    number: int
    engine: str
    request: str
    asker: int
    workers: set[int]
    charge: Charge
    used: bool = False

    @property
    def owner(self) -> Owner:
        """Who pins its objects."""
        return plan_owner(self.engine, self.number)


def lease_owner(engine: str, request: str) -> tuple[str, str, str]:
    """Who pins what a lookup has leased."""
    return ("lease", engine, request)


def lookup_owner(engine: str, request: str, asker: int, number: int) -> tuple[str, str, str, int, int]:
    """Who pins what a lookup has leased until it is answered: ranks of one engine may ask for a request side by side.

    It begins as :func:`lease_owner` does: the engine's leases are dropped together.
    """
    return (*lease_owner(engine, request), asker, number)


def is_lease_of(engine: str, owner: Owner) -> bool:
    """Return whether this owner is one of an engine's lookups."""
    return isinstance(owner, tuple) and owner[:2] == ("lease", engine)


def plan_owner(engine: str, number: int) -> tuple[str, str, int]:
    """Who pins what a plan names."""
    return ("plan", engine, number)


class Plans:
    """All plans that pin something.

    :param ended: told where a session has no plan for a request any more: the session, the request, and until when
        what it named stays leased (None = it does not).
    """

    def __init__(self, pool: Pool, ended: Callable[[int, str, float | None], None]) -> None:
        self._pool = pool
        self._ended = ended
        # A number of another server must mean nothing here.
        self._numbers = itertools.count(secrets.randbits(48) + numbers.first)
        self._plans: dict[int, HeldPlan] = {}
        self._by_request: dict[tuple[str, str], set[int]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def keep(
        self, engine: str, request: str, asker: int, workers: Collection[int], owner: Owner, charge: Charge
    ) -> int:
        """What `owner` and the request's lease pin is a plan's from now on: its number.

        Of a request the asker has :data:`MOST_UNUSED` plans that no worker has used: past it the oldest is dropped.
        """
        plan = HeldPlan(next(self._numbers), engine, request, asker, set(workers), charge)
        mine = (self._plans[number] for number in self._by_request.get((engine, request), ()))
        unused = [other for other in mine if other.asker == asker and not other.used]
        if len(unused) >= MOST_UNUSED:
            self._end(min(unused, key=lambda other: other.number))
        for giver in (owner, lease_owner(engine, request)):
            self._pool.hand_over(giver, plan.owner, float("inf"))
        self._plans[plan.number] = plan
        self._by_request.setdefault((engine, request), set()).add(plan.number)
        return plan.number

    def opened(self, engine: str, request: str, worker: int) -> None:
        """A worker has opened its last step with the request's plans; what it loads, the step pins."""
        for number in list(self._by_request.get((engine, request), ())):
            self._plans[number].used = True
            self._leave(self._plans[number], worker)

    def drop(self, engine: str, number: int, until: float | None = None) -> None:
        """It is not used; with `until`, its objects stay leased for the request until then."""
        plan = self._plans.get(number)
        if plan is not None and plan.engine == engine:
            self._end(plan, until)

    def drop_told(self, engine: str, request: str, asker: int) -> None:
        """Nothing that this client was told for the request will be loaded."""
        for number in list(self._by_request.get((engine, request), ())):
            plan = self._plans[number]
            if plan.asker == asker and not plan.used:
                self._end(plan)

    def reset(self, engine: str) -> int:
        """The engine loads nothing of what it was told any more; what a worker has used already ends by itself."""
        unused = [plan for plan in self._plans.values() if plan.engine == engine and not plan.used]
        for plan in unused:
            self._end(plan)
        return len(unused)

    def gone(self, session: int, until: float) -> None:
        """A client is gone: as a worker it opens no step any more, and what it was told is a lease until `until`."""
        for plan in list(self._plans.values()):
            if plan.asker == session and not plan.used:
                self._end(plan, until)
            else:
                self._leave(plan, session)

    def _leave(self, plan: HeldPlan, worker: int) -> None:
        if worker in plan.workers:
            plan.workers.remove(worker)
            if not plan.workers:
                self._end(plan)

    def _end(self, plan: HeldPlan, until: float | None = None) -> None:
        del self._plans[plan.number]
        plan.charge.release()
        mine = self._by_request[plan.engine, plan.request]
        mine.remove(plan.number)
        last = all(self._plans[number].asker != plan.asker for number in mine)
        if not mine:
            del self._by_request[plan.engine, plan.request]
        if until is None:
            self._pool.release(plan.owner)
        else:
            self._pool.hand_over(plan.owner, lease_owner(plan.engine, plan.request), until)
        if last:
            self._ended(plan.asker, plan.request, until)
