"""Bytes past the arena: the pool's client lives in the engine's process and copies from and to device memory itself.

What such a step needs besides is done here, on a thread of its own: the client's calls take up to a millisecond.
Before the server hears of the step, what it loads is leased and what it saves allocated; what it has saved is
published when the server has committed it; leases and unused room are given back. Things are done in the order in which
they were put, so that whatever is said of a step follows its opening.
"""

from __future__ import annotations

import atexit
import os
import queue
import time
from collections.abc import Callable, Collection, Sequence

import structlog

from layerflow.agent.descriptors import PartDescriptor
from layerflow.agent.direct.client import Watchdog, give_back, open_client
from layerflow.agent.direct.store import GRACE_S, LANES, DirectCopier, DirectStore
from layerflow.agent.step.leases import LeasedObject, LeasedParts, StepLeases, places_of
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus, Unreachable
from layerflow.ops.paged import PagedMemory
from layerflow.system.threads import OwnedThread
from layerflow.wire.messages import LACKING, Batch, OpenStep

STUCK_S = 1.0
"""A call of the client that takes longer makes new steps go without the pool until it returns."""
ROOM_S = 0.02
"""How long room is tried for while the pool evicts: the step's loads wait for it."""
PUBLISH_S = 5.0
CLOSE_S = 10.0
RESTART_S = 0.05

log = structlog.get_logger("layerflow.agent.direct.lane")


class DirectLane:
    """One worker's way past the arena.

    :param options: JSON, in the server's Welcome.
    :raises BackendError: there is no client to be had.
    """

    def __init__(self, options: str, memory: PagedMemory) -> None:
        self.options = options
        self._spec = memory.spec
        client = open_client(options, memory.device.index or 0)
        try:
            self._pool = DirectStore(client, memory)
        except BaseException:
            client.store.close()  # without it the process ends in an abort
            give_back(client)
            raise
        self._watchdog = Watchdog()
        self._pid = os.getpid()
        self._away = False
        self._busy_since = 0.0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = OwnedThread("layerflow-direct", self._run, restart_s=RESTART_S).start()
        atexit.register(self.close)

    @property
    def stuck(self) -> bool:
        """Does the pool not answer?"""
        since = self._busy_since
        return since > 0.0 and time.monotonic() - since > STUCK_S

    def put(self, work: Callable[[], None]) -> None:
        """Do this behind everything that was put before."""
        self._work.put(work)

    def open(self, step: Step, send: Callable[[Step, OpenStep], bool], save_failed: Callable[[str, str], None]) -> None:
        """Lease what the step loads, allocate what it saves, and tell the server of what is left.

        :param send: sends the message, unless the step is over or its server gone: then False.
        :param save_failed: told of each request of which something is not saved, and why: the pool has no room for it,
            or lacks what it loads.
        """
        self.put(lambda: self._open(step, send, save_failed))

    def copier(self, step: Step, batch: Batch) -> DirectCopier:
        """For one batch of the step."""
        return DirectCopier(self._pool, self._watchdog, step, batch)

    def loads_over(self, step: Step) -> None:
        """The step loads nothing any more."""
        self.put(lambda: self._unlease(step))

    def publish(self, step: Step, positions: Sequence[int], told: Callable[[int, str], None]) -> None:
        """The server has committed these save parts.

        :param positions: as the server knows them.
        :param told: for each part its position in the outline, and why it could not be published ("" = it is).
        """
        self.put(lambda: self._publish(step, positions, told))

    def over(self, step: Step) -> None:
        """No copy of the step is under way, and none will be: give back what it still has."""
        self.put(lambda: self._let_go(step))

    def close(self) -> None:
        """Do what is left to be done and close the client; takes seconds. In a forked copy nothing. Idempotent."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        self._pid = -1
        self._work.put(None)
        until = time.monotonic() + CLOSE_S
        if self._thread.join(CLOSE_S):
            self._watchdog.close()
            if self._pool.close(max(0.0, until - time.monotonic())):
                return
        log.error("direct_close_failed", error=f"the pool's client has not answered for {CLOSE_S:.0f} s")

    # -- its thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._busy_since = time.monotonic()
            try:
                work()
            except Exception:
                log.exception("direct_work_failed")
            self._busy_since = 0.0

    def _open(
        self, step: Step, send: Callable[[Step, OpenStep], bool], save_failed: Callable[[str, str], None]
    ) -> None:
        loads = self._side(step.loads, step.number, self._pool.lease)
        lacking = loads.lacking
        # What a request computes on top of a load that is not there would be wrong: it is not stored.
        saves = self._side(step.saves, step.number, self._pool.allocate, lacking, once=True)
        step.leases = leases = StepLeases(loads, saves)
        for request, reason in saves.refused.items():
            save_failed(request, reason)
        for request in lacking & {part.request for part in step.saves}:
            save_failed(request, LACKING)
        if lacking:
            log.info("direct_loads_missing", step=step.number, requests=len(lacking))
        if leases.loads.objects():
            self._watchdog.expect(LANES[LOAD], step.number, step.deadline + GRACE_S)
        if leases.saves.objects():
            self._watchdog.expect(LANES[SAVE], step.number, leases.room_until)
        if not send(step, OpenStep(step.number, step.deadline, step.save_deadline, *leases.messages())):
            self._let_go(step)

    def _side(
        self,
        parts: Sequence[PartDescriptor],
        owner: int,
        take: Callable[[Sequence[ObjectLocation], float], Sequence[LeasedObject | ObjectResult | None]],
        without: Collection[str] = (),
        *,
        once: bool = False,
    ) -> LeasedParts:
        """What of these parts can be had.

        :param without: requests to be left out.
        :param once: an object belongs to the first part that names it only.
        """
        places = [[] if part.request in without else places_of(self._spec, part, owner) for part in parts]
        wanted = {place.key: place for row in places for place in row}
        held: dict[bytes, LeasedObject | ObjectResult | None] = {}
        try:
            if wanted:
                found = take(list(wanted.values()), time.monotonic() + ROOM_S)
                held = dict(zip(wanted, found, strict=True))
                self._reached("")
        except Unreachable as error:
            self._reached(str(error))
            held = dict.fromkeys(wanted, ObjectResult(ObjectStatus.FAILED, str(error)))
        except Exception as error:
            log.exception("direct_work_failed")
            held = dict.fromkeys(wanted, ObjectResult(ObjectStatus.FAILED, f"{type(error).__name__}: {error}"))
        rows: list[list[LeasedObject | None]] = []
        refused: dict[str, str] = {}
        for part, row in zip(parts, places, strict=True):
            get = held.pop if once else held.get
            found = [get(place.key, None) for place in row] or [None] * len(part.pieces)
            rows.append([each if isinstance(each, LeasedObject) else None for each in found])
            for each in found:
                if isinstance(each, ObjectResult) and each.outcome is not ObjectStatus.EXISTS:
                    refused.setdefault(part.request, each.reason)
        return LeasedParts(parts, rows, refused)

    def _publish(self, step: Step, positions: Sequence[int], told: Callable[[int, str], None]) -> None:
        leases = step.leases
        if leases is None or leases.over:
            return
        objects = leases.saves.objects(positions)
        failed: dict[bytes, str] = {}
        try:
            results = self._pool.publish([held.place for held in objects], time.monotonic() + PUBLISH_S)
            failed = {
                held.place.key: result.reason for held, result in zip(objects, results, strict=True) if result is not OK
            }
        except Exception as error:
            failed = dict.fromkeys((held.place.key for held in objects), f"{type(error).__name__}: {error}")
            if not isinstance(error, Unreachable):
                log.exception("direct_work_failed")
            self._pool.revoke([held.place for held in objects])
        leases.published.update(held.place.key for held in objects)
        for position, part in zip(positions, leases.saves.parts_of(positions), strict=True):
            keys = [held.place.key for held in leases.saves.objects([position])]
            told(part, next((failed[key] for key in keys if key in failed), ""))

    def _unlease(self, step: Step) -> None:
        leases = step.leases
        if leases is not None and leases.leased:
            leases.leased = False
            self._pool.unlease([held.place for held in leases.loads.objects()])

    def _let_go(self, step: Step) -> None:
        leases = step.leases
        if leases is None or leases.over:
            return
        leases.over = True
        self._unlease(step)
        if step.saves_overdue:
            return  # the copy that is under way keeps its room until its lease has run out
        left = [held.place for held in leases.saves.objects() if held.place.key not in leases.published]
        self._pool.revoke(left)

    def _reached(self, failure: str) -> None:
        if failure and not self._away:
            log.warning("direct_pool_away", error=failure)
        elif self._away and not failure:
            log.info("direct_pool_back")
        self._away = bool(failure)
