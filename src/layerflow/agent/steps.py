"""The open steps of one worker: they are opened, told to the server and ended here, and their blocks taken back.

A step is opened on the engine's thread. It ends when the server says so, or is failed here: at its deadline, when its
server is lost, or when the server refuses it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import structlog

from layerflow.agent.costs import LoadPolicy, Measures, work_of
from layerflow.agent.descriptors import PartDescriptor, check_blocks, describe_loads, describe_saves, without_tails
from layerflow.agent.direct import DirectLaneSwitch
from layerflow.agent.hit_plan import UnusedPlaces
from layerflow.agent.lanes.lanes import Lanes
from layerflow.agent.lanes.load import WorkerDrivenLoads
from layerflow.agent.link import Attachment, Link, ReportBuffer
from layerflow.agent.mapping import Arenas, KnownArena
from layerflow.agent.planned import LoadLocator, LocatedLoads
from layerflow.agent.step.step import NO_STEP, NoStep, Step
from layerflow.agent.step.transfers import LOAD
from layerflow.agent.values import AgentCounters, Ended, StepRequest
from layerflow.device.base import Device, DeviceEvent
from layerflow.errors import ProtocolError, SpecError
from layerflow.keys import Chain
from layerflow.ops.paged import PagedMemory
from layerflow.spec import ModelSpec
from layerflow.system.numbers import ascending
from layerflow.wire.messages import Abort, Closed, Fence, Moved, OpenStep, Terms

MAX_TIMEOUT_S = 86_400.0
SHED = "shed"
SPOILT = "the engine has overwritten blocks that were still to be read"
NOTHING = Ended()

log = structlog.get_logger("layerflow.agent")


class OpenSteps:
    """The table of open steps, the requests that they touch, and what ended since the engine last asked.

    Any thread may call. One lock, never held while waiting for I/O, guards the table and the requests.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._idle = threading.Condition(self.lock)
        self._steps: dict[int, Step] = {}
        self._busy: Counter[str] = Counter()
        self._aborting: set[str] = set()
        # Appended to and taken from without the lock.
        self._ended: deque[tuple[str, str, str]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        """Add an open step; the caller holds the lock."""
        self._steps[step.number] = step
        self._busy.update(step.requests)

    def get(self, number: int) -> Step | None:
        """The open step of this number; None once it has ended."""
        return self._steps.get(number)

    def all(self) -> list[Step]:
        """All steps that are open now."""
        with self.lock:
            return list(self._steps.values())

    def remove(self, step: Step, ended: Callable[[Step], None]) -> None:
        """Remove a step that has ended; nothing happens if it was removed already.

        :param ended: called with the step, under the lock, before the threads that wait for its end are woken.
        """
        with self.lock:
            if self._steps.pop(step.number, None) is None:
                return
            ended(step)
            self._busy.subtract(step.requests)
            for request in step.requests:
                if not self._busy[request]:
                    del self._busy[request]
                    self._release(request)
            self._idle.notify_all()

    def busy(self, request: str) -> bool:
        """Does an open step touch this request's blocks?"""
        return request in self._busy

    def wait_untouched(self, request: str, timeout_s: float) -> bool:
        """Wait until no open step touches this request's blocks; False after `timeout_s`."""
        with self.lock:
            return self._idle.wait_for(lambda: not self._busy[request], timeout_s)

    def mark_aborted(self, request: str) -> list[Step]:
        """The engine gave a request up: the open steps that still touch its blocks.

        It is reported released when the server says so or the last of these steps has ended, whichever is first.
        """
        with self.lock:
            self._aborting.add(request)
            if not self._busy[request]:
                self._release(request)
            return [step for step in self._steps.values() if request in step.requests]

    def released(self, request: str) -> None:
        """The server says that an aborted request's blocks are free."""
        with self.lock:
            self._release(request)

    def saved(self, request: str) -> None:
        """Some of the request's chunks are published."""
        self._ended.append(("saved", request, ""))

    def save_failed(self, request: str, reason: str) -> None:
        """Some of the request's chunks were given up."""
        self._ended.append(("failed", request, reason))

    def _release(self, request: str) -> None:
        if request in self._aborting:
            self._aborting.discard(request)
            self._ended.append(("released", request, ""))

    def poll(self) -> Ended:
        """What ended since the last call."""
        if not self._ended:  # nearly always: engines ask in every step
            return NOTHING
        columns: dict[str, list[tuple[str, str]]] = {"released": [], "saved": [], "failed": []}
        while self._ended:
            kind, request, reason = self._ended.popleft()
            columns[kind].append((request, reason))
        return Ended(
            tuple(request for request, _ in columns["released"]),
            tuple(request for request, _ in columns["saved"]),
            tuple(columns["failed"]),
            tuple(request for request, reason in columns["failed"] if reason == SHED),
        )


class Steps(OpenSteps):
    """Opens, cuts off and ends the steps of one worker.

    The lock also guards `attachment` and `arenas`: a step that is opened while the server is being lost is either told
    to that server and cut off with it, or opened without a server.

    :param plans: which hits' plans may still be used.
    :param policy: learns from the figures of steps that have ended.

    :ivar attachment: to the server; None while it is away.
    :ivar terms: of the server, or of the last one while it is away; None before the first.
    :ivar silent: the server is attached but does not answer heartbeats.
    :ivar arenas: those that loads may read: the server's, and those of dead servers.
    :ivar lanes: copy batches.
    :ivar direct: the lane past the arena.
    :ivar measures: figures of the last steps that ended.
    """

    def __init__(
        self,
        memory: PagedMemory,
        device: Device,
        *,
        link: Link,
        plans: UnusedPlaces,
        policy: LoadPolicy,
        counters: AgentCounters,
    ) -> None:
        super().__init__()
        self.attachment: Attachment | None = None
        self.terms: Terms | None = None
        self.silent = False
        self.arenas = Arenas(device)
        self.direct = DirectLaneSwitch(memory, device)
        self.lanes = Lanes(device, link, counters, self.direct.ended_load)
        self.measures = Measures(policy, device)
        self._memory = memory
        self._device = device
        self._link = link
        self._plans = plans
        self._counters = counters
        self._locator = LoadLocator(memory)
        self._groups = [group for group, _ in memory.spec.layer_places()]
        self._block_bytes = [group.bytes_per_block for group in memory.spec.groups]
        self._numbers = ascending()
        # The lost server's arena, until it is known whether that server's process has ended.
        self._undecided: KnownArena | None = None

    def close(self) -> None:
        """Stop the lanes, and the way past the arena."""
        self.lanes.close()
        self.direct.close()

    # -- opening, on the engine's thread -----------------------------------------------------------

    def open_requests(
        self, spec: ModelSpec, requests: Sequence[StepRequest], timeout_s: float | None, after: DeviceEvent | None
    ) -> Step | NoStep:
        """See :meth:`layerflow.agent.Agent.open_step`.

        :param spec: as it is now: a chain of other weights loads and saves nothing.
        """
        for request in requests:
            if request.load[0] < request.load[1] and outdated(request.chain, spec):
                raise SpecError(
                    f"request {request.request!r} loads tokens {request.load} with a chain of the weights before the "
                    "last reset; make a new chain, look it up, and compute what that does not hit"
                )
        requests = [self._with_plan(request) for request in requests if not outdated(request.chain, spec)]
        loads = describe_loads(spec, requests)
        if timeout_s is None:
            timeout_s = _follow_timeout(requests)
        attachment = self.attachment
        saves: list[PartDescriptor] = []
        if attachment is not None and not self.silent:
            saves = describe_saves(spec, requests, attachment.terms.save_partial)
        return self.open(loads, saves, work_of(requests), timeout_s, after)

    def open(
        self,
        loads: Sequence[PartDescriptor],
        saves: Sequence[PartDescriptor],
        work: tuple[int, int] | None,
        timeout_s: float | None,
        after: DeviceEvent | None = None,
    ) -> Step | NoStep:
        """See :meth:`layerflow.agent.Agent.open_descriptors`."""
        check_timeout(timeout_s)
        attachment = self.attachment
        terms = attachment.terms if attachment is not None else None
        if terms is None or self.silent:
            saves = []
        elif not terms.save_partial:
            saves = without_tails(saves)
        if not loads and not saves:
            return NO_STEP
        check_blocks([*loads, *saves], self._memory.num_blocks)
        # Right before the first byte: objects that have moved since the lookup are loaded as the server plans them.
        located = self._locate_loads(loads)
        if located is not None:
            terms = self.terms
            if not _serves(self.attachment, located.arena):
                saves = []
        now = time.monotonic()
        loading_s = timeout_s if timeout_s is not None else terms.step_timeout_ms / 1e3 if terms is not None else 0.0
        saving_s = terms.save_timeout_ms / 1e3 if terms is not None else 0.0
        step = Step(
            next(self._numbers),
            groups=self._groups,
            block_bytes=self._block_bytes,
            loads=list(loads),
            saves=list(saves),
            deadline=now + loading_s,
            save_deadline=now + max(loading_s, saving_s),
            device=self._device,
            after=after,
            pump=self._link.pump,
            on_fenced=self._on_fenced,
            on_closed=self._on_closed,
        )
        step.work = work
        step.on_wait = self.lanes.load.wake
        if located is None:
            self._start(step)
        else:
            self._start_located(step, located)
        return step

    def _with_plan(self, request: StepRequest) -> StepRequest:
        """The request; without its hit's plan where that was given up, or used here before."""
        plan = request.hit.plan
        if plan is None or request.load[0] >= request.load[1]:
            return request
        if self._plans.consume(plan, request.request, id(self)):
            return request
        return replace(request, hit=replace(request.hit, plan=None))

    def _locate_loads(self, loads: Sequence[PartDescriptor]) -> LocatedLoads | None:
        """Where all of these loads' objects are, by the plans of their hits; None: the server is to be asked."""
        if not loads or self.lanes.load.planned.caps.nbytes < 1:
            return None
        first = loads[0].places
        arena = self.arenas.get(first.incarnation) if first is not None else None
        return self._locator.locate_loads(loads, arena) if arena is not None else None

    def _start(self, step: Step) -> None:
        """Add the step, and tell the server, which plans all of it."""
        unsendable = ""
        with self.lock:
            attachment = self.attachment
            if attachment is not None and attachment.direct:
                step.use_direct()
            self.add(step)
            if attachment is not None and not attachment.direct:
                unsendable = self._send_opening(step, worker_driven=False)
        if attachment is None:
            self.fail(step, "no server is attached")
        elif attachment.direct:
            self._start_direct(step, attachment)
        elif unsendable:
            self.fail(step, unsendable)

    def _start_located(self, step: Step, located: LocatedLoads) -> None:
        """Add the step, let the load lane begin, and tell the server whose arena it is, if that one is attached."""
        arena, report = located.arena, self._link.report
        over = functools.partial(self._on_loads_over, arena=arena, report=report)
        loads = self._locator.bind(step, located, self.lanes.links[LOAD], over)
        unsendable = ""
        with self.lock:
            self.add(step)
            begun = self.arenas.get(arena.incarnation) is arena
            if begun:
                arena.loading.add(step.number)
                self.lanes.load.plan(loads)
            known = step.announced = _serves(self.attachment, arena)
            if known:
                unsendable = self._send_opening(step, worker_driven=begun)
        if unsendable:
            self.fail(step, unsendable)
        if not begun:
            self.fail(step, "the arena of its plan was let go")
        elif not known:
            self._orphan(step, "its server is gone")

    def _send_opening(self, step: Step, *, worker_driven: bool) -> str:
        """Tell the server of the step. Why the message cannot be encoded; "" = it is sent. The caller holds the lock.

        :param worker_driven: the load lane cuts the loads into batches by itself.
        """
        loads, saves = [part.load_message() for part in step.loads], [part.save_message() for part in step.saves]
        return self._send(OpenStep(step.number, step.deadline, step.save_deadline, loads, saves, worker_driven))

    def _send(self, message: OpenStep) -> str:
        """Why the message cannot be encoded; "" = it is sent."""
        try:
            self._link.send(message)
        except ProtocolError as error:
            return str(error)
        return ""

    def _start_direct(self, step: Step, attachment: Attachment) -> None:
        """Past the arena the server hears of a step once it is known what of its objects the pool has."""
        if self.direct.stuck:
            self.fail(step, "the pool does not answer")
        else:
            self.direct.open(step, lambda step, message: self._announce(step, message, attachment), self.save_failed)

    def _announce(self, step: Step, message: OpenStep, attachment: Attachment) -> bool:
        """Tell the server of a step past the arena. False: the step has ended, or ends here, or the server is gone."""
        with self.lock:
            if self.get(step.number) is not step or self.attachment is not attachment:
                return False
            unsendable = self._send(message)
            step.announced = not unsendable
        if unsendable:
            self.fail(step, unsendable)
        return step.announced

    # -- what the engine waits for and takes back, on its threads ----------------------------------

    def saving(self, request: str) -> bool:
        """May a save still read this request's blocks?"""
        return self.busy(request) and any(step.reads.of(request) for step in self.all())

    def wait_idle(self, request: str, timeout_s: float) -> bool:
        """Wait until no transfer touches this request's blocks; False after `timeout_s`. Its saves leave at once."""
        for step in self.all():
            if step.saves and request in step.requests:
                self.expedite(step)
        return self.wait_untouched(request, timeout_s)

    def expedite(self, step: Step) -> None:
        """A thread waits for the step's saves: they leave now."""
        step.expedite()
        self.lanes.save.wake()

    def abort(self, request: str) -> None:
        """The engine gave the request up; :meth:`poll` reports it released."""
        steps = self.mark_aborted(request)
        for step in steps:
            step.abort(request)
        if steps and self.attachment is not None:
            self.direct.once_announced(steps, lambda: self._link.send(Abort([request])))

    def release_saves(self, step: Step, *, sound: bool) -> None:
        """Publish the saves that are held back, or give them up."""
        if not sound:
            step.cancel_saves("the step may have computed on a load that failed")
        step.release_saves()
        self.lanes.save.wake()

    def reclaim(self, blocks: Sequence[np.ndarray], timeout_s: float) -> int:
        """Wait for the saves that read any of these blocks, or fence them; of how many steps they were fenced.

        :param blocks: per group.
        """
        until, cancelled = time.monotonic() + timeout_s, 0
        for step in self.all():
            if not step.reads.any_of(blocks):
                continue
            # The caller itself ends a step that computes, or whose saves are held: waiting for it here is in vain.
            drains = step.closed and not (step.saves_cancelled or step.saves_held)
            if drains:
                self.expedite(step)
            if not (drains and step.reads.wait(blocks, until)):
                cancelled += step.fence_saves("its blocks were reclaimed")
                self.lanes.save.wake()  # saves that wait for their layer are reported now
        if cancelled:
            log.info("saves_cut", steps=cancelled, reason="the engine took their blocks back")
        return cancelled

    def doubt_reads(self) -> None:
        """The engine may overwrite blocks from now on: saves that have been read are not reported yet."""
        self.lanes.doubtful.begin()

    def overwritten(self, blocks: Sequence[np.ndarray]) -> int:
        """Give the saves up that may have read any of these after they were overwritten; of how many steps.

        :param blocks: per group.
        """
        cancelled = 0
        for step in self.all():
            if step.reads.any_of(blocks):
                step.saves_spoilt = SPOILT
                step.fence_saves(SPOILT)
                cancelled += 1
        self.lanes.doubtful.end()
        if cancelled:
            self.lanes.save.wake()
            log.info("saves_cut", steps=cancelled, reason=SPOILT)
        return cancelled

    def revoke(self, reason: str) -> int:
        """Cut all open steps off; how many there were."""
        steps = self.all()
        for step in steps:
            step.saves_spoilt = step.saves_spoilt or reason  # also those that have been read, and are not told yet
            step.fence_saves(reason)
            step.fence(reason)
            step.wait_idle()  # what is in place for the engine's stream may not have landed
        if steps:
            self.lanes.save.wake()
        return len(steps)

    # -- ending, on any thread ---------------------------------------------------------------------

    def fail(self, step: Step, reason: str) -> None:
        """Nothing more comes for this step: fail its loads, give its saves up, let go of its blocks."""
        step.cancel_saves(reason)
        step.fence(reason)
        step.wait_idle()
        self._fail_saves(step, reason)
        self.end(step)
        self.lanes.save.wake()

    def end(self, step: Step) -> None:
        """The step is over; nothing happens if it was already."""
        if self.get(step.number) is not step:
            return
        attachment = self.attachment
        step.over(attachment.session if attachment is not None else 0)
        self.remove(step, self._removed)
        self._link.wake()  # to measure it

    def _removed(self, step: Step) -> None:
        """Take the figures of a step that has left the table, and give back what the direct lane holds for it.

        The caller holds the lock, under which the direct lane announces steps: what was announced before has leases by
        now; what comes later is refused, and the lane gives its leases back itself.
        """
        self.measures.ended(step)
        self.direct.over(step)

    def measure(self, until: float | None = None) -> None:
        """Work the figures of ended steps out, and tell the server with the next report.

        :param until: as of :meth:`layerflow.agent.costs.Measures.work_out`.
        """
        self._link.report.figures.extend(self.measures.work_out(until))

    def _fail_saves(self, step: Step, reason: str) -> None:
        for request in {part.request for part in step.saves}:
            self.save_failed(request, reason)

    def _on_fenced(self, step: Step, reason: str) -> None:
        """The step's loads were cut off here."""
        self._counters.fenced_steps += 1
        self.lanes.load.wake()
        self.direct.once_announced([step], lambda: self._report_fenced(step, reason))

    def _on_closed(self, step: Step, ok: bool) -> None:
        """The forward pass ended."""
        if step.residents is not None:
            if not ok:
                step.fence("the forward pass did not finish")
            self._end_orphan(step)
        self.direct.once_announced([step], lambda: self._report_closed(step, ok))
        if step.saves:
            self.lanes.save.wake()

    def _on_loads_over(self, loads: WorkerDrivenLoads, arena: KnownArena, report: ReportBuffer) -> None:
        """Nothing of the step's worker-driven loads moves any more.

        :param report: of the attachment that the step was opened with.
        """
        step = loads.step
        assert step.residents is not None
        with self.lock:
            arena.loading.discard(step.number)
        report.moved.append(Moved(step.number, loads.moved, loads.lost + step.residents.lost()))
        self._link.wake()
        self._end_orphan(step)

    def _report_fenced(self, step: Step, reason: str) -> None:
        if step.announced:
            self._link.report.fenced.append(Fence(step.number, reason))
            self._link.wake()

    def _report_closed(self, step: Step, ok: bool) -> None:
        if step.announced:
            self._link.report.closed.append(Closed(step.number, ok))
            self._link.wake()

    # -- servers that come and go, on the link's thread --------------------------------------------

    def attach(self, attachment: Attachment, arena: KnownArena | None) -> None:
        """A server has taken this worker: steps are opened with it from now on.

        :param arena: its arena; None where bytes move past it.
        """
        with self.lock:
            if arena is not None:
                self.arenas.add(arena)
            self.silent = False
            self.attachment = attachment

    def detach(self, reason: str) -> Attachment | None:
        """The server is gone: waits fail at once and nothing is saved. Its attachment.

        Worker-driven loads go on until it is known whether the server's process has ended.
        """
        going_on: set[int] = set()
        with self.lock:
            lost, self.attachment = self.attachment, None
            if lost is not None:
                arena = self._undecided = self.arenas.abandoned(lost.incarnation)
                going_on = set(arena.loading) if arena is not None else set()
        steps = self.all()
        log.warning("agent_detached", reason=reason, open_steps=len(steps), going_on=len(going_on))
        for step in steps:
            # Whatever one step meets, the others are cut off too: the server reuses the arena once this link hangs up.
            try:
                if step.number in going_on:
                    self._orphan(step, reason)
                elif not step.detached:
                    self.fail(step, reason)
            except Exception:
                log.exception("cut_failed", step=step.number)
        return lost

    def server_exit_known(self, dead: bool) -> None:
        """Has the lost server's process ended, for certain?

        If not, nothing is loaded from its arena any more: a server that is silent may wake up and reuse the places.
        """
        arena, self._undecided = self._undecided, None
        if arena is None:
            return
        with self.lock:
            going_on = set(arena.loading)
            self.arenas.decide(arena, dead, time.monotonic())
        if dead:
            log.info("server_dead", loading_steps=len(going_on))
            return
        for step in self.all():
            if step.number in going_on:
                self.fail(step, "the server is gone")
        self.arenas.let_go(arena)

    def sweep_arenas(self, now: float) -> None:
        """Unmap arenas of dead servers that no usable plan names any more."""
        with self.lock:
            late = self.arenas.overdue(now)
        for arena in late:
            self.arenas.let_go(arena)

    def _orphan(self, step: Step, reason: str) -> None:
        """The step has no server; its loads go on without one, and nothing of it is saved."""
        step.announced, step.detached = False, True
        step.fence_saves(reason)
        self._fail_saves(step, reason)
        self.lanes.save.wake()
        self._end_orphan(step)

    def _end_orphan(self, step: Step) -> None:
        """The server normally reports that a step has ended. An orphaned step has none, so the agent ends it itself."""
        if step.detached and step.closed and not step.loading:
            self.end(step)


def check_timeout(timeout_s: float | None) -> None:
    """:raises SpecError: negative, or more than a day."""
    if timeout_s is not None and not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise SpecError(f"timeout_s {timeout_s}: must be 0 to {MAX_TIMEOUT_S:.0f} seconds")


def outdated(chain: Chain, spec: ModelSpec) -> bool:
    """Was it made by this engine, before the weights were replaced?"""
    return bool(chain.model) and chain.model != spec.fingerprint


def _serves(attachment: Attachment | None, arena: KnownArena) -> bool:
    """Is the attached server the one whose arena this is?"""
    return attachment is not None and attachment.incarnation == arena.incarnation


def _follow_timeout(requests: Sequence[StepRequest]) -> float | None:
    """How long a step may wait for objects that other engines still store; None = it loads none."""
    until = [request.hit.until for request in requests if request.load[0] < request.load[1] and request.hit.following]
    return max(0.0, min(until) - time.monotonic()) if until else None
