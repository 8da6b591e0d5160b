"""The agent: a library inside the engine's process, and the only writer of engine memory."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import TracebackType

import structlog
import torch
import zmq

from layerflow.agent.control import DEFAULT_LOOKUP_TIMEOUT_S, Control
from layerflow.agent.emulated import EmulatedLink
from layerflow.agent.lanes import Job, LoadLane, SaveLane
from layerflow.agent.link import Attachment, Link
from layerflow.agent.outline import Numbered, outline_loads, outline_saves
from layerflow.agent.step import LOAD, NO_STEP, NoStep, Step
from layerflow.agent.values import MISS, AgentStatistics, Ended, Hit, StepRequest, Tally
from layerflow.device.base import DeviceEvent, device_for
from layerflow.device.poller import Poller
from layerflow.errors import LayerflowError
from layerflow.keys import Chain, Media, root_digest
from layerflow.observe.trace import StepTrace, figures
from layerflow.ops.copier import Copier, copier_for
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.spec import ModelSpec
from layerflow.wire.messages import (
    Abort,
    Batch,
    Closed,
    Failure,
    Fence,
    Figures,
    Grant,
    Notice,
    OpenStep,
    Plan,
    Problem,
    Progress,
    Terms,
    ToClient,
)

DEFAULT_ATTACH_TIMEOUT_S = 5.0
KEPT_TRACES = 64
SHED = "shed"

log = structlog.get_logger("layerflow.agent")


class Agent:
    """Attaches one engine worker to a layerflow server, and attaches again whenever the server was away.

    :param endpoint: ``ipc://`` of a server on this machine, or an :class:`~layerflow.server.EmbeddedServer`'s
        ``inproc://`` with its `context`.
    :param spec: what this worker caches.
    :param tensors: per layer and plane: the paged tensor, shape ``(num_blocks, block_size, *plane.shape)``,
        any strides, all on one device.
    :param engine_id: shared by all ranks and the scheduler of one serving engine.
    :param wait_s: how long to wait for the first attachment; without one the agent still works, every
        lookup misses until a server appears.
    :raises SpecError: the tensors do not fit the spec.
    """

    def __init__(
        self,
        endpoint: str,
        spec: ModelSpec,
        tensors: Mapping[int, Mapping[str, torch.Tensor]],
        engine_id: str = "engine",
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        wait_s: float = DEFAULT_ATTACH_TIMEOUT_S,
        lookup_timeout_s: float = DEFAULT_LOOKUP_TIMEOUT_S,
    ) -> None:
        self.spec = spec
        self.memory = PagedMemory(spec, tensors)
        self.device = device_for(self.memory.device)
        self.traces: deque[StepTrace] = deque(maxlen=KEPT_TRACES)
        self._groups = [group for group, _ in spec.layer_places()]
        self._block_bytes = [group.bytes_per_block for group in spec.groups]
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._steps: dict[int, Step] = {}
        self._busy: Counter[str] = Counter()
        self._ended: deque[tuple[str, str, str]] = deque()
        self._tally = Tally()
        self._attachment: Attachment | None = None
        self._copiers: tuple[Copier, Copier] | None = None
        self._links = (EmulatedLink(0, 0), EmulatedLink(0, 0))
        self._poller = Poller(self.device.kind) if self.device.kind != "cpu" else None
        self._load_lane = LoadLane(self._ended_copy)
        self._save_lane = SaveLane(self._ended_copy)
        context = context or zmq.Context.instance()
        self._control = Control(endpoint, engine_id, spec, context=context, lookup_timeout_s=lookup_timeout_s)
        self._link = Link(context, endpoint, engine_id, spec, self)
        self._link.start()
        if wait_s > 0 and not self._link.ready.wait(wait_s):
            log.warning("agent_not_attached", endpoint=endpoint, waited_s=wait_s)

    # -- the engine -------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Is there a server now?"""
        return self._attachment is not None

    @property
    def terms(self) -> Terms | None:
        """The server's current terms; None while it is away."""
        attachment = self._attachment
        return attachment.terms if attachment is not None else None

    def chain(self, tokens: Sequence[int], *, adapter: str = "", salt: str = "", media: Sequence[Media] = ()) -> Chain:
        """A prompt's digests; compute once per request."""
        root = root_digest(self.spec.fingerprint, adapter=adapter, salt=salt)
        return Chain(root, tokens, self.spec.chunk_tokens, media)

    def lookup(self, request: str, chain: Chain) -> Hit:
        """How much of the prompt can be loaded; leased until loaded or expired. Away or slow is a miss."""
        self._tally.lookups += 1
        if self._attachment is None:
            return MISS
        hit = self._control.lookup(request, chain)
        self._tally.hit_tokens += hit.tokens
        return hit

    def open_step(self, requests: Sequence[StepRequest], timeout_s: float | None = None) -> Step | NoStep:
        """A forward pass begins, or is about to: loads start now, saves get their places.

        Returns at once. While the server is away, loads have failed and nothing is saved.

        :param timeout_s: the step's loads must be in place so soon; None = the server's ``step_timeout_ms``.
        :raises SpecError: a request's load or block table does not fit the spec.
        """
        attachment = self._attachment
        loads = outline_loads(self.spec, requests)
        terms = attachment.terms if attachment is not None else None
        saves = outline_saves(self.spec, requests, terms.save_partial) if terms is not None else []
        if not loads and not saves:
            return NO_STEP
        now = time.monotonic()
        timeout = timeout_s if timeout_s is not None else (terms.step_timeout_ms / 1e3 if terms is not None else 0.0)
        deadline = now + timeout
        save_deadline = max(deadline, now + (terms.save_timeout_ms / 1e3 if terms is not None else 0.0))
        step = Step(
            next(self._numbers), self._groups, self._block_bytes, loads, saves, deadline, save_deadline, self.device,
            self._fenced, self._closed,
        )  # fmt: skip
        with self._lock:
            self._steps[step.number] = step
            self._busy.update(step.requests)
            # Decided under the lock that losing the server takes: the step is told of it one way or the other.
            attachment = self._attachment
        if attachment is None:
            self._cut(step, "no server is attached")
            return step
        messages = ([part.load_message() for part in loads], [part.save_message() for part in saves])
        self._link.send(OpenStep(step.number, deadline, save_deadline, *messages))
        return step

    def abort(self, request: str) -> None:
        """The request is over. :meth:`poll` reports it released once no transfer touches its blocks."""
        with self._lock:
            steps = [step for step in self._steps.values() if request in step.requests]
            attached = self._attachment is not None
        for step in steps:
            step.abort(request)
        if steps and attached:
            self._link.send(Abort([request]))
        else:
            self._ended.append(("released", request, ""))

    def drop_lease(self, request: str) -> None:
        """The request's hit will not be loaded."""
        self._control.drop_lease(request)

    def busy(self, request: str) -> bool:
        """May a transfer still touch this request's blocks?"""
        return self._busy[request] > 0

    def poll(self) -> Ended:
        """What ended since the last call. Never blocks."""
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

    def statistics(self) -> AgentStatistics:
        """A snapshot."""
        tally = self._tally
        return AgentStatistics(
            self.attached, tally.attachments, len(self._steps), tally.loaded_bytes, tally.saved_bytes,
            tally.failed_batches, tally.fenced_steps, tally.lookups, tally.hit_tokens,
        )  # fmt: skip

    def close(self) -> None:
        """Cut off what is open, stop the threads and hang up."""
        self._link.close()
        self._load_lane.close()
        self._save_lane.close()
        if self._poller is not None:
            self._poller.close()
        self._control.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the link's thread ------------------------------------------------------------------------

    def attached_to(self, attachment: Attachment) -> None:
        """See :meth:`layerflow.agent.link.Owner.attached`."""
        self._copiers = (copier_for(self.memory, attachment.arena), copier_for(self.memory, attachment.arena))
        self._set_links(attachment.terms)
        self._tally.attachments += 1
        with self._lock:
            self._attachment = attachment
        threading.Thread(target=_populate, args=(attachment,), name="layerflow-populate", daemon=True).start()
        log.info("agent_attached", session=attachment.session, arena_bytes=attachment.arena.nbytes)

    def lost(self, reason: str) -> None:
        """See :meth:`layerflow.agent.link.Owner.lost`: waits fail at once, nothing is saved."""
        with self._lock:
            self._attachment = None
            steps = list(self._steps.values())
        log.warning("agent_detached", reason=reason, open_steps=len(steps))
        for step in steps:
            self._cut(step, reason)

    def heard(self, message: ToClient) -> None:
        """See :meth:`layerflow.agent.link.Owner.heard`."""
        match message:
            case Grant():
                self._granted(message)
            case Plan():
                self._planned(message)
            case Notice():
                self._noticed(message)
            case Terms():
                if self._attachment is not None:
                    self._attachment.terms = message
                    self._set_links(message)
            case Problem():
                log.error("server_refused", code=message.code, error=message.message, step=message.id)
                step = self._steps.get(message.id)
                if step is not None:
                    self._cut(step, f"refused: {message.message}")
            case _:
                pass  # heartbeats are answered; that they came is all they say

    def progress(self) -> list[Progress]:
        """Frontiers that moved, and computed layers."""
        moved = []
        for step in list(self._steps.values()):
            place = (step.frontier, step.computed_layers if step.saves else 0)
            if place != step.reported:
                step.reported = place
                moved.append(Progress(step.number, *place))
        return moved

    def sampling(self) -> bool:
        """Frontiers matter while a prefetch window is set and something loads."""
        attachment = self._attachment
        return (
            attachment is not None
            and attachment.terms.prefetch_layers > 0
            and any(step.loading for step in list(self._steps.values()))
        )

    def _planned(self, plan: Plan) -> None:
        step, attachment = self._steps.get(plan.step), self._attachment
        if step is None or attachment is None:
            return

        def bind(group: int, blocks: Numbered) -> BlockList:
            columns = (blocks.engine_blocks, blocks.object_offsets, blocks.object_blocks, blocks.index)
            return BlockList(self.memory, group, attachment.arena.nbytes, *columns)

        try:
            step.planned(plan, bind)
        except LayerflowError as error:
            log.error("plan_unusable", step=plan.step, error=str(error))
            self._cut(step, f"plan unusable: {error}")

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
                self._save_lane.poke()

    def _start(self, batch: Batch) -> None:
        step = self._steps.get(batch.step)
        if step is None or self._copiers is None:
            self._link.news.failed.append(Failure(batch.batch, "cancelled: the step is over"))
            return
        if batch.direction == LOAD:
            step.granted(batch)
        job = Job(batch, step, self._copiers[batch.direction], self._links[batch.direction])
        if batch.direction == LOAD:
            self._load_lane.put(job)
        else:
            self._save_lane.put(job)

    def _noticed(self, notice: Notice) -> None:
        for stored in notice.stored:
            step = self._steps.get(stored.step)
            if step is not None:
                for request in {step.saves[position].request for position in stored.parts}:
                    kind = "saved" if stored.committed else "failed"
                    self._ended.append((kind, request, stored.reason))
        self._ended.extend(("released", request, "") for request in notice.released)
        for number in notice.finished:
            step = self._steps.get(number)
            if step is not None:
                self._finish(step)

    def _set_links(self, terms: Terms) -> None:
        self._links = (
            EmulatedLink(terms.link_gbps, terms.link_latency_us),
            EmulatedLink(terms.link_gbps, terms.link_latency_us),
        )

    # -- any thread -------------------------------------------------------------------------------

    def _cut(self, step: Step, reason: str) -> None:
        """Nothing more comes for this step: fail its loads, give its saves up, let go of its blocks."""
        step.cancel_saves(reason)
        step.fence(reason)
        step.quiet()
        self._ended.extend(("failed", request, reason) for request in {part.request for part in step.saves})
        self._ended.extend(("released", request, "") for request in step.aborted)
        self._finish(step)
        self._save_lane.poke()

    def _finish(self, step: Step) -> None:
        with self._lock:
            if self._steps.pop(step.number, None) is None:
                return
            self._busy.subtract(step.requests)
            for request in step.requests:
                if not self._busy[request]:
                    del self._busy[request]
        trace = step.finish_trace(self._attachment.session if self._attachment is not None else 0)
        self.traces.append(trace)
        self._link.news.figures.append(_measured(step, trace))
        self._link.ring()

    def _fenced(self, step: Step, reason: str) -> None:
        self._tally.fenced_steps += 1
        self._link.news.fenced.append(Fence(step.number, reason))
        self._link.ring()

    def _closed(self, step: Step, ok: bool) -> None:
        self._link.news.closed.append(Closed(step.number, ok))
        self._link.ring()
        if step.saves:
            self._save_lane.poke()

    # -- lanes ------------------------------------------------------------------------------------

    def _ended_copy(self, job: Job, failure: str, event: DeviceEvent | None) -> None:
        """A lane is done with a batch; on a device the poller says when its bytes are in place."""
        if event is None or self._poller is None:
            self._ended_batch(job, failure)
        else:
            self._poller.watch(event, self._ended_batch, job, failure)

    def _ended_batch(self, job: Job, failure: str) -> None:
        batch = job.batch
        if failure:
            self._tally.failed_batches += 1
            self._link.news.failed.append(Failure(batch.batch, failure))
        else:
            if batch.direction == LOAD:
                self._tally.loaded_bytes += batch.nbytes
            else:
                self._tally.saved_bytes += batch.nbytes
            self._link.news.done.append(batch.batch)
        self._link.ring()


def _populate(attachment: Attachment) -> None:
    """Map the arena's pages into this process too, so that no copy pays for it."""
    attachment.arena.populate(0, attachment.arena.nbytes)


def _measured(step: Step, trace: StepTrace) -> Figures:
    load, save = figures(trace, "load"), figures(trace, "save")
    return Figures(
        step.number,
        load.bytes,
        load.transfer_ms / 1e3,
        load.exposed_ms / 1e3,
        save.bytes,
        save.transfer_ms / 1e3,
        save.exposed_ms / 1e3,
    )
