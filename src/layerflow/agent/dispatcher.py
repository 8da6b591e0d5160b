"""What the agent does with the server's messages; all on the link's thread, but for the lanes' reports."""

from __future__ import annotations

import functools

import structlog

from layerflow.agent.connection.arenas import KnownArena
from layerflow.agent.connection.control import Control
from layerflow.agent.connection.link import Attachment, Link
from layerflow.agent.connection.mapping import Populating, pin
from layerflow.agent.costs import LoadPolicy, Measures
from layerflow.agent.descriptors import Numbered
from layerflow.agent.direct import DirectLaneSwitch
from layerflow.agent.lanes.ends import CopyEnds
from layerflow.agent.lanes.load import LoadLane
from layerflow.agent.lanes.planned import PlannedCaps
from layerflow.agent.lanes.save import SaveLane
from layerflow.agent.lanes.stagger import Stagger
from layerflow.agent.lanes.task import CopyCaps, CopyTask, EmulatedLink
from layerflow.agent.open_steps import OpenSteps
from layerflow.agent.planned import PlannedSteps
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.agent.values import AgentCounters
from layerflow.boxes import Box
from layerflow.device.base import Device
from layerflow.device.poller import Poller
from layerflow.errors import LayerflowError
from layerflow.ops.base import Copier
from layerflow.ops.copier import copier_for
from layerflow.ops.covered import ChunkPlaces, CoveredBlocks
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.wire.messages import (
    Batch,
    Closed,
    DropLease,
    Failure,
    Fence,
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
        open_steps: OpenSteps,
        tally: AgentCounters,
        advisor: LoadPolicy,
    ) -> None:
        self.advisor = advisor
        self.measures = Measures(advisor, device)
        self.attachment: Attachment | None = None
        self.silent = False
        self.link: Link | None = None
        self.populating: Populating | None = None
        self._memory = memory
        self._device = device
        self._control = control
        self._open_steps = open_steps
        self._tally = tally
        self._copiers: tuple[Copier, Copier] | None = None
        self.terms: Terms | None = None
        self.bypass = DirectLaneSwitch(memory, device, open_steps)
        self._links = (EmulatedLink(0, 0), EmulatedLink(0, 0))
        self._poller = Poller(device.kind, prepare=device.leave_captures) if device.kind != "cpu" else None
        ends = CopyEnds(self._poller, lambda *end: self._ended_batch(*end))  # noqa: PLW0108 - tests replace the method
        self._load_lane = LoadLane(ends.copied, self._loaded_some)
        self._save_lane = SaveLane(ends.copied, self._saved_some)
        self.planned = PlannedSteps(memory, device, open_steps, self._load_lane, self)

    def close(self) -> None:
        """Stop the lanes and the poller."""
        for part in (self._load_lane, self._save_lane, self._poller, self.bypass):
            if part is not None:
                part.close()

    # -- told by the link -------------------------------------------------------------------------

    def may_bypass(self, welcome: Welcome) -> bool:
        """Will this worker move bytes past the server's arena? May take seconds, the first time."""
        return self.bypass.possible(welcome.direct)

    def connection_made(self, attachment: Attachment) -> None:
        """A server has taken this agent: copy to and from its arena from now on, or past it."""
        self._control.connect()
        if not attachment.direct:
            pin(attachment.arena, self._device)
            load, save = (copier_for(self._memory, attachment.arena, self._device) for _ in (LOAD, SAVE))
            self._copiers = (load, save)
            keep_s = attachment.welcome.lease_ms / 1e3
            arena = KnownArena(attachment.incarnation, attachment.arena, load, keep_s)
            with self._open_steps.lock:
                self.planned.arenas.add(arena)
        self._set_terms(attachment.terms)
        self._tally.attachments += 1
        self.silent = False
        with self._open_steps.lock:
            self.attachment = attachment
        if not attachment.direct:
            self.populating = Populating(attachment.arena)
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
            lost, self.attachment = self.attachment, None
            going_on = self.planned.abandoned(lost.incarnation) if lost is not None else set()
        copiers, self._copiers = self._copiers, None  # they hold the lost server's arena
        steps = self._open_steps.steps()
        log.warning("agent_detached", reason=reason, open_steps=len(steps), going_on=len(going_on))
        for step in steps:
            # Whatever one step meets, the others are cut off too: the server reuses the arena once this link hangs up.
            try:
                if step.number in going_on:
                    self.planned.orphan(step, reason)
                elif not step.orphaned:
                    self.cut(step, reason)
            except Exception:
                log.exception("cut_failed", step=step.number)
        if copiers is not None:
            copiers[SAVE].drain()

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
                self.cut(step, "not finished at its deadline")

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
                    self.cut(step, f"refused: {message.message}")
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
        assert self.link is not None
        for request, plan in self._control.plans.overdue(now):
            self.link.send(DropLease(request, plan))
        for step in self._open_steps.steps():
            if now > (step.deadline if silent or not step.announced else step.save_deadline):
                self.cut(step, "not finished at its deadline")

    def progress(self) -> list[Progress]:
        """Frontiers that moved, and computed layers."""
        moved = []
        for step in self._open_steps.steps():
            if not step.announced:
                continue
            place = step.progress
            if place != step.reported:
                step.reported = place
                moved.append(Progress(step.number, *place))
        return moved

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
        assert self.link is not None
        self.link.news.figures.extend(self.measures.work_out(until))

    # -- told by steps ----------------------------------------------------------------------------

    def cut(self, step: Step, reason: str) -> None:
        """Nothing more comes for this step: fail its loads, give its saves up, let go of its blocks."""
        step.cancel_saves(reason)
        step.fence(reason)
        step.quiet()
        for request in {part.request for part in step.saves}:
            self._open_steps.save_failed(request, reason)
        self.finish(step)
        self._save_lane.wake()

    def attend(self) -> None:
        """Take what the server has said, on this thread."""
        assert self.link is not None
        self.link.attend()

    def wake_loads(self) -> None:
        """The engine waits for a layer."""
        self._load_lane.wake()

    def hurry(self, step: Step) -> None:
        """Somebody waits for the step's saves."""
        step.hurry()
        self._save_lane.wake()

    def reclaimed(self) -> None:
        """Saves were cut off: those that wait for their layer are reported now."""
        self._save_lane.wake()

    def fenced(self, step: Step, reason: str) -> None:
        """The step's loads were cut off here."""
        self._tally.fenced_steps += 1
        self._load_lane.wake()
        self.bypass.in_order([step], lambda: self._tell_fenced(step, reason))

    def closed(self, step: Step, ok: bool) -> None:
        """The forward pass ended."""
        if step.residents is not None:
            if not ok:
                step.fence("the forward pass did not finish")
            self.planned.settle(step)
        self.bypass.in_order([step], lambda: self._tell_closed(step, ok))
        if step.saves:
            self._save_lane.wake()

    def _tell_fenced(self, step: Step, reason: str) -> None:
        assert self.link is not None
        if step.announced:
            self.link.news.fenced.append(Fence(step.number, reason))
            self.link.ring()

    def _tell_closed(self, step: Step, ok: bool) -> None:
        assert self.link is not None
        if step.announced:
            self.link.news.closed.append(Closed(step.number, ok))
            self.link.ring()

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
                self.hurry(step)
        except LayerflowError as error:
            log.error("plan_unusable", step=plan.step, error=str(error))
            self.cut(step, f"plan unusable: {error}")

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
                self._save_lane.wake()

    def _start(self, batch: Batch) -> None:
        assert self.link is not None
        step = self._open_steps.get(batch.step)
        copier = self.bypass.copier(step, batch) if step is not None else None
        if copier is None and self._copiers is not None:
            copier = self._copiers[batch.direction]
        if step is None or copier is None:
            self.link.news.failed.append(Failure(batch.batch, "cancelled: the step is over"))
            return
        job = CopyTask(batch, step, copier, self._links[batch.direction], self.link.news)
        if batch.direction == LOAD:
            step.granted(batch)
            self._load_lane.put(job)
        else:
            self._save_lane.put(job)

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
                self.bypass.in_turn(step, functools.partial(self.finish, step))

    def _set_terms(self, terms: Terms) -> None:
        caps = CopyCaps(terms.max_transfer_blocks, terms.max_transfer_bytes)
        self._load_lane.caps = self._save_lane.caps = caps
        self._load_lane.planned.caps = PlannedCaps(terms.window_bytes, terms.prefetch_layers)
        self.terms = terms
        shard = self._memory.spec.shard
        self._load_lane.stagger = Stagger(shard.tp_rank, shard.tp_size, terms.stagger_us)
        emulated = terms.link_gbps, terms.link_latency_us
        self._links = EmulatedLink(*emulated), EmulatedLink(*emulated)
        self.planned.link = self._links[LOAD]

    # -- ends -------------------------------------------------------------------------------------

    def finish(self, step: Step) -> None:
        """The step is over."""
        assert self.link is not None
        if self._open_steps.get(step.number) is not step:
            return
        attachment = self.attachment
        step.over(attachment.session if attachment is not None else 0)
        self.bypass.over(step)
        self._open_steps.finish(step, self.measures.ended)
        self.link.ring()  # to measure it

    def _ended_batch(self, job: CopyTask, failure: str) -> None:
        assert self.link is not None
        batch = job.batch
        if batch.direction == SAVE:
            job.step.reads.ended(batch)
        else:
            self.bypass.ended_load(job.step)
        if job.news is None:
            assert job.ended is not None
            self._tally.failed_batches += bool(failure)
            self._tally.loaded_bytes += 0 if failure else batch.nbytes
            job.ended(job, failure)
            self._load_lane.landed(batch.nbytes)
            return
        if failure:
            self._tally.failed_batches += 1
            job.news.failed.append(Failure(batch.batch, failure))
        else:
            if batch.direction == LOAD:
                self._tally.loaded_bytes += batch.nbytes
            else:
                self._tally.saved_bytes += batch.nbytes
            job.news.done.append(batch.batch)
        # Lanes that end their batches themselves ring when they have told some.
        if failure or (self._poller is not None and (batch.direction == SAVE or self._load_lane.has_few)):
            self._ring()

    def _loaded_some(self) -> None:
        if self._poller is None:
            self._ring()

    def _saved_some(self, idle: bool) -> None:
        assert self.link is not None
        if idle:
            self.link.tell()
        else:
            self.link.ring()

    def _ring(self) -> None:
        assert self.link is not None
        self.link.ring()
