"""What the agent does with the server's messages; all on the link's thread, but for the lanes' reports."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import structlog

from layerflow.agent.control import Control
from layerflow.agent.costs import LoadPolicy, Measures
from layerflow.agent.descriptors import Numbered
from layerflow.agent.direct import DirectLaneSwitch
from layerflow.agent.ending import StepEnds
from layerflow.agent.lanes.lanes import Lanes
from layerflow.agent.lanes.task import CopyTask
from layerflow.agent.link import Attachment, Link
from layerflow.agent.mapping import ArenaAccess, KnownArena
from layerflow.agent.open_steps import OpenSteps
from layerflow.agent.planned import PlannedSteps
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.agent.values import AgentCounters
from layerflow.boxes import Box
from layerflow.device.base import Device
from layerflow.device.captures import CaptureGate
from layerflow.errors import LayerflowError
from layerflow.ops.covered import ChunkPlaces, CoveredBlocks
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.wire.messages import (
    Batch,
    DropLease,
    Failure,
    Grant,
    Notice,
    Plan,
    Problem,
    Progress,
    Terms,
    ToClient,
    Welcome,
)

log = structlog.get_logger("layerflow.agent")


class Dispatcher:
    """Turns plans into block lists, grants into jobs for the lanes, notices into finished steps."""

    def __init__(
        self,
        *,
        memory: PagedMemory,
        device: Device,
        control: Control,
        link: Link,
        open_steps: OpenSteps,
        counters: AgentCounters,
        advisor: LoadPolicy,
        gate: CaptureGate,
    ) -> None:
        self.gate = gate
        self.advisor = advisor
        self.measures = Measures(advisor, device)
        self.attachment: Attachment | None = None
        self.silent = False
        self.link = link
        self.access: ArenaAccess | None = None
        self._memory = memory
        self._device = device
        self._control = control
        self._open_steps = open_steps
        self._counters = counters
        self.terms: Terms | None = None
        self.bypass = DirectLaneSwitch(memory, device, open_steps)
        self.lanes = Lanes(device, link, counters, self.bypass.ended_load)
        self.ends = StepEnds(open_steps, link, self.lanes, self.bypass, self.measures, counters)
        self.planned = PlannedSteps(memory, device, open_steps, self.lanes.load, self.ends)

    def close(self) -> None:
        """Stop the lanes, and the way past the arena."""
        self.lanes.close()
        self.bypass.close()

    # -- told by the link -------------------------------------------------------------------------

    def may_attach(self) -> bool:
        """Not while the engine captures a graph: attaching makes streams and pins memory."""
        return not self.gate.capturing

    @property
    def pinned_bytes(self) -> int:
        """How far the arena is pinned; -1 = there is no device to pin it for."""
        return self.access.pinned_bytes if self.access is not None else -1

    def may_bypass(self, welcome: Welcome) -> bool:
        """Will this worker move bytes past the server's arena? May take seconds, the first time."""
        return self.bypass.possible(welcome.direct)

    def connection_made(self, attachment: Attachment) -> None:
        """A server has taken this agent: copy to and from its arena from now on, or past it."""
        self._control.connect()
        if not attachment.direct:
            access = self.access = ArenaAccess(self._memory, attachment.arena, self._device, self.gate)
            keep_s = attachment.welcome.lease_ms / 1e3
            arena = KnownArena(attachment.incarnation, attachment.arena, access, keep_s)
            with self._open_steps.lock:
                self.planned.arenas.add(arena)
        self._set_terms(attachment.terms)
        self._counters.attachments += 1
        self.silent = False
        with self._open_steps.lock:
            self.attachment, self.ends.session = attachment, attachment.session
        log.info(
            "agent_attached",
            session=attachment.session,
            arena_bytes=attachment.arena.nbytes,
            direct=attachment.direct,
        )

    def lost(self, reason: str) -> None:
        """The server is gone: waits fail at once, nothing is saved.

        Loads whose places are known go on until it is known whether its process has ended.
        """
        with self._open_steps.lock:
            lost, self.attachment, self.ends.session = self.attachment, None, 0
            going_on = self.planned.abandoned(lost.incarnation) if lost is not None else set()
        access, self.access = self.access, None  # steps with plans may go on to load from the lost server's arena
        steps = self._open_steps.steps()
        log.warning("agent_detached", reason=reason, open_steps=len(steps), going_on=len(going_on))
        for step in steps:
            # Whatever one step meets, the others are cut off too: the server reuses the arena once this link hangs up.
            try:
                if step.number in going_on:
                    self.planned.orphan(step, reason)
                elif not step.orphaned:
                    self.ends.cut(step, reason)
            except Exception:
                log.exception("cut_failed", step=step.number)
        if access is not None:
            try:
                access.copiers[SAVE].drain()
            except Exception:
                log.exception("copier_broken", incarnation=lost.incarnation if lost is not None else 0)

    def judged(self, dead: bool) -> None:
        """Has the lost server's process ended, for certain? If not, nothing is loaded from its arena any more."""
        self.planned.judged(dead)

    def waiting(self, now: float) -> None:
        """Time passed without a server."""
        self._control.plans.overdue(now)  # there is nobody to tell
        self.planned.sweep(now)
        self.measure(now)
        for step in self._open_steps.steps():
            if now > step.deadline:
                self.ends.cut(step, "not finished at its deadline")

    def heard(self, message: ToClient) -> None:
        """A message."""
        match message:
            case Grant():
                self._granted(message)
            case Plan():
                self._planned(message)
            case Notice():
                self._noticed(message)
            case Terms():
                if self.attachment is not None:
                    self.attachment.terms = message
                    self._set_terms(message)
            case Problem():
                log.error("server_refused", code=message.code, error=message.message, step=message.id)
                step = self._open_steps.get(message.id)
                if step is not None:
                    self.ends.cut(step, f"refused: {message.message}")
            case _:
                pass  # a heartbeat's answer: that it came is all it says

    def tick(self, now: float, silent: bool) -> None:
        """Steps that outlive their deadline are given up here too: a server that is stopped gives nothing up.

        Nor one that has not heard of them, because the pool behind it hangs.
        """
        if silent != self.silent:
            self.silent = silent
            if silent:
                log.warning("server_silent", open_steps=len(self._open_steps))
            else:
                log.info("server_heard_again")
        self.measure(now)
        self.planned.sweep(now)
        for request, plan in self._control.plans.overdue(now):
            self.link.send(DropLease(request, plan))
        for step in self._open_steps.steps():
            if now > (step.deadline if silent or not step.announced else step.save_deadline):
                self.ends.cut(step, "not finished at its deadline")

    def progress(self) -> list[Progress]:
        """Frontiers that moved, and computed layers."""
        moved = []
        for step, place in self._moved_on():
            step.reported = place
            moved.append(Progress(step.number, *place))
        return moved

    def has_moved(self) -> bool:
        """Is there any progress?"""
        return any(True for _ in self._moved_on())

    def _moved_on(self) -> Iterator[tuple[Step, tuple[int, int]]]:
        for step in self._open_steps.steps():
            if step.announced and (place := step.progress) != step.reported:
                yield step, place

    def sampling(self) -> bool:
        """While a prefetch window is set and something loads, frontiers matter. Steps that ended are to be measured."""
        attachment = self.attachment
        return self.measures.pending or (
            attachment is not None
            and attachment.terms.prefetch_layers > 0
            and any(
                step.loading and step.residents is None and not step.all_granted for step in self._open_steps.steps()
            )
        )

    def measure(self, until: float | None = None) -> None:
        """Work the figures of ended steps out, and tell the server with what is told next."""
        self.link.news.figures.extend(self.measures.work_out(until))

    # -- one message each -------------------------------------------------------------------------

    def _planned(self, plan: Plan) -> None:
        step, attachment = self._open_steps.get(plan.step), self.attachment
        if step is None or attachment is None:
            return

        covered = {
            each.offset: ChunkPlaces(tuple(Box(*box) for box in each.boxes), tuple(each.offsets))
            for each in plan.covered
        }

        def bind(group: int, blocks: Numbered) -> BlockList | CoveredBlocks:
            columns = (blocks.engine_blocks, blocks.object_offsets, blocks.object_blocks, blocks.index)
            if not covered.keys().isdisjoint(blocks.object_offsets.tolist()):
                return CoveredBlocks.of(self._memory, group, attachment.arena.nbytes, covered, columns)
            ends = leases.ends(blocks.object_offsets) if leases is not None else attachment.arena.nbytes
            return BlockList(self._memory, group, ends, *columns)

        leases = step.leases
        try:
            step.planned(plan if leases is None else leases.fill(plan), bind)
            if plan.urgent:
                self.ends.hurry(step)
        except LayerflowError as error:
            log.error("plan_unusable", step=plan.step, error=str(error))
            self.ends.cut(step, f"plan unusable: {error}")

    def _granted(self, grant: Grant) -> None:
        for failure in grant.failed:
            step = self._open_steps.get(failure.step)
            if step is not None:
                step.load_failed(failure.group, failure.lo, failure.hi, failure.reason)
        for batch in grant.batches:
            self._start(batch)
        for seal in grant.sealed:
            step = self._open_steps.get(seal.step)
            if step is not None and seal.direction == LOAD:
                step.sealed(seal.layer)
        for cancel in grant.cancelled:
            step = self._open_steps.get(cancel.step)
            if step is not None and cancel.direction == LOAD:
                step.fence(cancel.reason)
            elif step is not None:
                step.cancel_saves(cancel.reason)
                self.lanes.save.wake()

    def _start(self, batch: Batch) -> None:
        step = self._open_steps.get(batch.step)
        copier = self.bypass.copier(step, batch) if step is not None else None
        if copier is None and self.access is not None:
            copier = self.access.copiers[batch.direction]
        if step is None or copier is None:
            self.link.news.failed.append(Failure(batch.batch, "cancelled: the step is over"))
            self.link.ring()
            return
        job = CopyTask(batch, step, copier, self.lanes.links[batch.direction], self.link.news)
        if batch.direction == LOAD:
            step.granted(batch)
            self.lanes.load.put(job)
        else:
            self.lanes.save.put(job)

    def _noticed(self, notice: Notice) -> None:
        for stored in notice.stored:
            step = self._open_steps.get(stored.step)
            if step is None:
                continue
            parts = stored.parts if step.leases is None else step.leases.saves.parts_of(stored.parts)
            step.reads.settled(parts)
            if stored.committed and step.leases is not None:
                self.bypass.publish(step, stored.parts)
                continue
            for request in {step.saves[part].request for part in parts}:
                if stored.committed:
                    self._open_steps.saved(request)
                else:
                    self._open_steps.save_failed(request, stored.reason)
        for request in notice.released:
            self._open_steps.released(request)
        for number in notice.finished:
            step = self._open_steps.get(number)
            if step is not None:
                self.bypass.in_turn(step, functools.partial(self.ends.finish, step))

    def _set_terms(self, terms: Terms) -> None:
        self.terms = terms
        self.lanes.set_terms(terms, self._memory.spec.shard)
        if self.access is not None:
            self.access.set_way(terms.copy_way)
        self.planned.link = self.lanes.links[LOAD]
