"""What the agent does with the server's messages; all on the link's thread, but for the lanes' reports."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator

import structlog

from layerflow.agent.control import Control
from layerflow.agent.descriptors import Numbered
from layerflow.agent.lanes.task import CopyTask
from layerflow.agent.link import Attachment, Link
from layerflow.agent.mapping import ArenaAccess, KnownArena
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.agent.steps import Steps
from layerflow.agent.values import AgentCounters
from layerflow.boxes import Box
from layerflow.device.base import Device
from layerflow.device.captures import CaptureGate
from layerflow.errors import LayerflowError
from layerflow.observe.trace import StepTrace, pack_spans
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
    Spans,
    SpansWanted,
    StepSpans,
    Terms,
    ToClient,
    Welcome,
)

STEPS_PER_ANSWER = 4
"""Steps whose spans one message tells: packing one of 60 layers takes the engine's interpreter some 0.3 ms."""

log = structlog.get_logger("layerflow.agent")


class Dispatcher:
    """Turns plans into block lists, grants into jobs for the lanes, notices into finished steps."""

    def __init__(
        self,
        steps: Steps,
        *,
        memory: PagedMemory,
        device: Device,
        control: Control,
        link: Link,
        counters: AgentCounters,
        gate: CaptureGate,
    ) -> None:
        self.gate = gate
        self.link = link
        self.access: ArenaAccess | None = None
        self.lanes = steps.lanes
        self.direct = steps.direct
        self._steps = steps
        self._memory = memory
        self._device = device
        self._control = control
        self._counters = counters
        # Questions may come on the engine's thread, which has no time for them: the link's thread answers.
        self._spans_wanted: deque[SpansWanted] = deque()
        self._spans_due: deque[tuple[SpansWanted, int, list[StepTrace], bool]] = deque()

    # -- told by the link -------------------------------------------------------------------------

    def may_attach(self) -> bool:
        """Not while the engine captures a graph: attaching makes streams and pins memory."""
        return not self.gate.capturing

    @property
    def pinned_bytes(self) -> int:
        """How far the arena is pinned; -1 = there is no device to pin it for."""
        return self.access.pinned_bytes if self.access is not None else -1

    def supports_direct(self, welcome: Welcome) -> bool:
        """Will this worker move bytes past the server's arena? May take seconds, the first time."""
        return self.direct.possible(welcome.direct)

    def connection_made(self, attachment: Attachment) -> None:
        """A server has taken this agent: copy to and from its arena from now on, or past it."""
        self._control.connect()
        arena = None
        if not attachment.direct:
            access = self.access = ArenaAccess(self._memory, attachment.arena, self._device, self.gate)
            keep_s = attachment.welcome.lease_ms / 1e3
            arena = KnownArena(attachment.incarnation, attachment.arena, access, keep_s)
        self._set_terms(attachment.terms)
        self._counters.attachments += 1
        self._steps.attach(attachment, arena)
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
        self._spans_wanted.clear()
        self._spans_due.clear()
        access, self.access = self.access, None  # steps with plans may go on to load from the lost server's arena
        lost = self._steps.detach(reason)
        if access is not None:
            try:
                access.copiers[SAVE].drain()
            except Exception:
                log.exception("copier_broken", incarnation=lost.incarnation if lost is not None else 0)

    def server_exit_known(self, dead: bool) -> None:
        """Has the lost server's process ended, for certain? If not, nothing is loaded from its arena any more."""
        self._steps.server_exit_known(dead)

    def waiting(self, now: float) -> None:
        """Time passed without a server."""
        self._control.plans.expired(now)  # there is nobody to tell
        self._steps.sweep_arenas(now)
        self._steps.measure(now)
        for step in self._steps.all():
            if now > step.deadline:
                self._steps.fail(step, "not finished at its deadline")

    def message_received(self, message: ToClient) -> None:
        """A message."""
        match message:
            case Grant():
                self._granted(message)
            case Plan():
                self._planned(message)
            case Notice():
                self._noticed(message)
            case Terms():
                attachment = self._steps.attachment
                if attachment is not None:
                    attachment.terms = message
                    self._set_terms(message)
            case SpansWanted():
                self._spans_wanted.append(message)
                self.link.wake()
            case Problem():
                log.error("server_refused", code=message.code, error=message.message, step=message.id)
                step = self._steps.get(message.id)
                if step is not None:
                    self._steps.fail(step, f"refused: {message.message}")
            case _:
                pass  # a heartbeat's answer: that it came is all it says

    def tick(self, now: float, silent: bool) -> None:
        """Steps that outlive their deadline are given up here too: a server that is stopped gives nothing up.

        Nor one that has not heard of them, because the pool behind it hangs.
        """
        if silent != self._steps.silent:
            self._steps.silent = silent
            if silent:
                log.warning("server_silent", open_steps=len(self._steps))
            else:
                log.info("server_heard_again")
        self._steps.measure(now)
        self._steps.sweep_arenas(now)
        for request, plan in self._control.plans.expired(now):
            self.link.send(DropLease(request, plan))
        self._tell_spans()
        for step in self._steps.all():
            if now > (step.deadline if silent or not step.announced else step.save_deadline):
                self._steps.fail(step, "not finished at its deadline")

    def _tell_spans(self) -> None:
        """Send one message of what the server has asked of the last steps, and look for more soon."""
        if self._spans_wanted and not self._spans_due:
            question = self._spans_wanted.popleft()
            upto, traces = self._steps.measures.kept(question.after, question.since)
            for start in range(0, max(1, len(traces)), STEPS_PER_ANSWER):
                stop = start + STEPS_PER_ANSWER
                self._spans_due.append((question, upto, traces[start:stop], stop < len(traces)))
        if self._spans_due:
            question, upto, traces, more = self._spans_due.popleft()
            told = [StepSpans(trace.step, trace.origin, pack_spans(trace)) for trace in traces]
            self.link.send(Spans(question.id, upto, told, more))
            self.link.wake()

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
        for step in self._steps.all():
            if step.announced and (place := step.progress) != step.reported:
                yield step, place

    def sampling(self) -> bool:
        """While a prefetch window is set and something loads, frontiers matter. Steps that ended are to be measured."""
        attachment = self._steps.attachment
        return self._steps.measures.pending or (
            attachment is not None
            and attachment.terms.prefetch_layers > 0
            and any(step.loading and step.residents is None and not step.all_granted for step in self._steps.all())
        )

    # -- one message each -------------------------------------------------------------------------

    def _planned(self, plan: Plan) -> None:
        step, attachment = self._steps.get(plan.step), self._steps.attachment
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
                self._steps.expedite(step)
        except LayerflowError as error:
            log.error("plan_unusable", step=plan.step, error=str(error))
            self._steps.fail(step, f"plan unusable: {error}")

    def _granted(self, grant: Grant) -> None:
        for failure in grant.failed:
            step = self._steps.get(failure.step)
            if step is not None:
                step.load_failed(failure.group, failure.lo, failure.hi, failure.reason)
        for batch in grant.batches:
            self._start(batch)
        for seal in grant.sealed:
            step = self._steps.get(seal.step)
            if step is not None and seal.direction == LOAD:
                step.sealed(seal.layer)
        for cancel in grant.cancelled:
            step = self._steps.get(cancel.step)
            if step is not None and cancel.direction == LOAD:
                step.fence(cancel.reason)
            elif step is not None:
                step.cancel_saves(cancel.reason)
                self.lanes.save.wake()

    def _start(self, batch: Batch) -> None:
        step = self._steps.get(batch.step)
        copier = self.direct.copier(step, batch) if step is not None else None
        if copier is None and self.access is not None:
            copier = self.access.copiers[batch.direction]
        if step is None or copier is None:
            self.link.report.failed.append(Failure(batch.batch, "cancelled: the step is over"))
            self.link.wake()
            return
        job = CopyTask(batch, step, copier, self.lanes.links[batch.direction], self.link.report)
        if batch.direction == LOAD:
            step.granted(batch)
            self.lanes.load.put(job)
        else:
            self.lanes.save.put(job)

    def _noticed(self, notice: Notice) -> None:
        for stored in notice.stored:
            step = self._steps.get(stored.step)
            if step is None:
                continue
            parts = stored.parts if step.leases is None else step.leases.saves.parts_of(stored.parts)
            step.reads.settled(parts)
            if stored.committed and step.leases is not None:
                self.direct.publish(step, stored.parts, functools.partial(self._published, step))
                continue
            for request in {step.saves[part].request for part in parts}:
                if stored.committed:
                    self._steps.saved(request)
                else:
                    self._steps.save_failed(request, stored.reason)
        for request in notice.released:
            self._steps.released(request)
        for number in notice.finished:
            step = self._steps.get(number)
            if step is not None:
                self.direct.after_direct_work(step, functools.partial(self._steps.end, step))

    def _published(self, step: Step, part: int, failure: str) -> None:
        """The pool has published a save part past the arena, or could not; on the direct lane's thread."""
        request = step.saves[part].request
        if failure:
            log.warning("direct_not_published", step=step.number, request=request, error=failure)
            self._steps.save_failed(request, failure)
        else:
            self._steps.saved(request)

    def _set_terms(self, terms: Terms) -> None:
        self._steps.terms = terms
        self.lanes.set_terms(terms, self._memory.spec.shard)
        if self.access is not None:
            self.access.set_way(terms.copy_way)
