"""Plans: hits whose places were told. What they name stays where it is, whatever time passes and whoever is aborted.

A plan pins its objects until every worker of its engine that was attached then has opened its last step with it (the
step pins what it loads), or was refused that step and moves nothing of it, or is gone, or until whoever asked says that
it is not used. If whoever asked hangs up, what no worker has used by then becomes a lease again, which runs out.
"""

from __future__ import annotations

import functools
import itertools
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from layerflow.pool.base import Owner, Pool
from layerflow.server.account import Charge
from layerflow.server.clients import ClientSession
from layerflow.server.leases import Leases, lease_owner
from layerflow.server.mailboxes import Slices
from layerflow.system import numbers

MOST_UNUSED = 4
"""A hit that was handed to workers may be looked up again, after a preemption say, before they open a step with it."""


@dataclass(slots=True, eq=False)
class PinnedHit:
    """One hit's plan.

    :param asker: the client that it was told.
    :param workers: numbers of the sessions that may still open a step with it.
    :param charge: of the asker, for what is kept.
    :param used: a worker has opened a step with it, or was refused it.
    :param overtaken: a reset is to end it.
    :param refused: by worker, its step with this plan that was refused and whose loads it may still move.
    """

    number: int
    request: str
    asker: ClientSession
    workers: set[int]
    charge: Charge
    used: bool = False
    overtaken: bool = False
    refused: dict[int, int] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """The engine whose workers may use it."""
        return self.asker.engine

    @property
    def owner(self) -> Owner:
        """The owner of the plan's pins."""
        return plan_owner(self.engine, self.number)


def lookup_owner(engine: str, request: str, asker: int, number: int) -> tuple[str, str, str, int, int]:
    """The owner of these pins until the lookup is answered: ranks of one engine may ask for a request side by side.

    It begins as :func:`lease_owner` does: the engine's leases are dropped together.
    """
    return (*lease_owner(engine, request), asker, number)


def plan_owner(engine: str, number: int) -> tuple[str, str, int]:
    """The owner of the pins of what a plan names."""
    return ("plan", engine, number)


class PinnedHits:
    """All plans that pin something.

    :param lease_s: how long what a client was told that has gone stays leased.
    """

    def __init__(self, pool: Pool, leases: Leases, lease_s: Callable[[], float]) -> None:
        self._pool = pool
        self._leases = leases
        self._lease_s = lease_s
        # A number of another server must mean nothing here.
        self._numbers = itertools.count(secrets.randbits(48) + numbers.first)
        self._plans: dict[int, PinnedHit] = {}
        self._by_request: dict[tuple[str, str], set[int]] = {}
        self._refused: dict[tuple[int, int], set[int]] = {}  # plans by worker and step

    def __len__(self) -> int:
        return len(self._plans)

    def keep(self, asker: ClientSession, request: str, workers: Collection[int], owner: Owner, charge: Charge) -> int:
        """Make what `owner` and the request's lease pin a plan's, and return its number.

        A client may have :data:`MOST_UNUSED` plans of a request that no worker has used: the oldest makes room.
        """
        plan = PinnedHit(next(self._numbers), request, asker, set(workers), charge)
        mine = (self._plans[number] for number in self._by_request.get((plan.engine, request), ()))
        unused = [other for other in mine if other.asker is asker and not other.used]
        if len(unused) >= MOST_UNUSED:
            self._end(min(unused, key=lambda other: other.number))
        for giver in (owner, lease_owner(plan.engine, request)):
            self._pool.transfer_pins(giver, plan.owner, math.inf)
        self._leases.plan_kept(plan.owner, asker)
        asker.hit_leases[request] = math.inf
        self._plans[plan.number] = plan
        charge.on_end(functools.partial(self._asker_gone, plan))
        self._by_request.setdefault((plan.engine, request), set()).add(plan.number)
        return plan.number

    def opened(self, engine: str, request: str, worker: int) -> None:
        """A worker has opened its last step with the request's plans; what it loads, the step pins."""
        for number in list(self._by_request.get((engine, request), ())):
            self._plans[number].used = True
            self._leave(self._plans[number], worker)

    def refused(self, engine: str, requests: Iterable[str], worker: int, step: int) -> None:
        """A worker may not open its last step with these requests' plans, by which it has begun to load.

        Until it says that this has ended, the plans pin. It finds out by the generations in the arena where an object
        is replaced, but on a device only behind the copy, which the engine may have been told is ready by then.
        """
        for request in requests:
            for number in self._by_request.get((engine, request), ()):
                plan = self._plans[number]
                plan.used = True
                if worker in plan.workers:
                    self._forget_refused(plan, worker)
                    plan.refused[worker] = step
                    self._refused.setdefault((worker, step), set()).add(number)

    def moved(self, worker: int, step: int) -> None:
        """A worker's loads by plans have ended; where the step was refused, nothing else ends its plans."""
        for number in list(self._refused.get((worker, step), ())):
            self._leave(self._plans[number], worker)

    def drop(self, engine: str, number: int, until: float | None = None) -> None:
        """End a plan that is not used; with `until`, its objects stay leased for the request until then."""
        plan = self._plans.get(number)
        if plan is not None and plan.engine == engine:
            self._end(plan, until)

    def drop_told(self, asker: ClientSession, request: str) -> None:
        """Nothing that this client was told for the request will be loaded."""
        for number in list(self._by_request.get((asker.engine, request), ())):
            plan = self._plans[number]
            if plan.asker is asker and not plan.used:
                self._end(plan)

    def reset(self, engine: str) -> Slices[int]:
        """The engine loads nothing of what it was told any more, in slices; how many plans end.

        What a worker has used already ends by itself, and what is told from now on stays.
        """
        unused = [plan for plan in self._plans.values() if plan.engine == engine and not plan.used]
        for plan in unused:
            plan.overtaken = True

        def end() -> Slices[int]:
            ended = 0
            for plan in unused:
                if plan.number in self._plans and not plan.used:
                    self._end(plan)
                    ended += 1
                yield
            return ended

        return end()

    def gone(self, client: ClientSession) -> None:
        """A client is gone: as a worker it opens no step any more. What it was told ends with its charge."""
        for plan in list(self._plans.values()):
            if plan.asker is not client or plan.used:
                self._leave(plan, client.number)

    def _asker_gone(self, plan: PinnedHit) -> None:
        """What no worker has used is a lease again; the rest is counted with what else its client has left behind."""
        if plan.used:
            plan.charge = self._leases.charge_left(plan.asker, self._pool.pinned_by(plan.owner))
        else:
            self._end(plan, time.monotonic() + self._lease_s())

    def _leave(self, plan: PinnedHit, worker: int) -> None:
        if worker in plan.workers:
            self._forget_refused(plan, worker)
            plan.workers.remove(worker)
            if not plan.workers:
                self._end(plan)

    def _forget_refused(self, plan: PinnedHit, worker: int) -> None:
        step = plan.refused.pop(worker, None)
        if step is not None:
            mine = self._refused[worker, step]
            mine.remove(plan.number)
            if not mine:
                del self._refused[worker, step]

    def _end(self, plan: PinnedHit, until: float | None = None) -> None:
        """End a plan; with `until`, what it pins stays leased until then, unless a reset ends it."""
        if plan.overtaken:
            until = None
        for worker in list(plan.refused):
            self._forget_refused(plan, worker)
        del self._plans[plan.number]
        mine = self._by_request[plan.engine, plan.request]
        mine.remove(plan.number)
        leases = plan.asker.hit_leases
        # A plan that the client still has for the request, or a lookup since, counts as its lease.
        if leases.get(plan.request) == math.inf and all(self._plans[number].asker is not plan.asker for number in mine):
            if until is None:
                del leases[plan.request]
            else:
                leases[plan.request] = until
        if not mine:
            del self._by_request[plan.engine, plan.request]
        if until is None:
            plan.charge.release()
            self._leases.let_go(plan.owner)
        else:
            self._leases.from_plan(plan.owner, plan.charge, plan.asker, plan.request, until)
