"""One open step inside the engine's process: what is ready, what has failed, what is computed.

The engine's thread calls :meth:`Step.wait_layer` and :meth:`Step.layer_done`; both are local and, in
the common case, a few plain stores. Lanes and the link thread tell the step what became of its batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

import structlog

from layerflow.agent.descriptors import Numbered, PartDescriptor, number_blocks
from layerflow.agent.step.in_flight import CoalescedCopy, InFlight
from layerflow.agent.step.loads import LoadState
from layerflow.agent.step.saves import SaveReads
from layerflow.agent.step.times import LayerTimes
from layerflow.agent.values import READY, FailedBlocks, LoadResult
from layerflow.device.base import Device, DeviceEvent
from layerflow.errors import SpecError
from layerflow.observe.trace import Span, StepTrace
from layerflow.ops.extents import BlockList
from layerflow.wire.messages import Batch, Plan

if TYPE_CHECKING:
    from layerflow.agent.step.leases import StepLeases

LOAD, SAVE = 0, 1
LATE_SAVE_S = 1.0
"""How long a save past the arena is waited for when it is cut off; then it has failed, whatever becomes of it."""
LANDING_POLL_S = 0.2e-3
"""How often the engine's thread looks for a layer that it waits for, while one call copies several."""
CANCELLED = "cancelled"
TOO_LATE = "cancelled: it was still under way when its step was cut off"

log = structlog.get_logger("layerflow.agent")


class Step:
    """A forward pass with something to load or to save.

    :param groups: for every layer of the model: its group.
    :param block_bytes: per group: bytes of one block in one layer, all planes.
    :param deadline: monotonic seconds; loads not in place by then have failed.
    :param device: of the engine's memory.
    :param attend: takes what the server has said, on the calling thread.
    :param on_fenced: told (step, reason) when the loads were cut off here.
    :param on_closed: told (step, ok) when the forward pass ended.

    :ivar announced: the server knows of it, or will before anything that is said of it from now on.
    :ivar cargo: its objects in the pool, where its bytes move past the arena.
    :ivar frontier: the highest layer whose attention has begun; batches whose gate is not past it can move.
    :ivar on_wait: called on the engine's thread when it is about to wait for a layer.
    :ivar thread: native id of the thread that opened it: the engine's.
    :ivar saves_spoiled: a save did not end when it was cut off. It has failed, whatever becomes of it.
    """

    # The engine's thread comes from its compute: a slot is in one cold line of memory, a dictionary's value in three.
    __slots__ = (
        "_arrivals",
        "_attend",
        "_condition",
        "_course",
        "_device",
        "_done",
        "_done_at",
        "_groups",
        "_in_flight",
        "_local",
        "_on_closed",
        "_on_fenced",
        "_ready",
        "_save_patience",
        "_withheld",
        "after",
        "announced",
        "blocks",
        "closed",
        "cut_off",
        "deadline",
        "frontier",
        "leases",
        "loads",
        "num_layers",
        "number",
        "on_wait",
        "reads",
        "reported",
        "requests",
        "save_deadline",
        "saves",
        "saves_cancelled",
        "saves_spoiled",
        "thread",
        "trace",
        "work",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        groups: Sequence[int],
        block_bytes: Sequence[int],
        loads: list[PartDescriptor],
        saves: list[PartDescriptor],
        deadline: float,
        save_deadline: float,
        device: Device,
        attend: Callable[[], None],
        on_fenced: Callable[[Step, str], None],
        on_closed: Callable[[Step, bool], None],
    ) -> None:
        self.number = number
        self.thread = threading.get_native_id()
        self.loads = loads
        self.saves = saves
        self.deadline = deadline
        self.save_deadline = save_deadline
        self.requests = {part.request for part in (*loads, *saves)}
        self.trace = StepTrace(number, 0, "", [])
        self.frontier = -1
        self.closed = False
        self.saves_cancelled = ""
        self.reads = SaveReads(saves, groups, block_bytes)
        self.blocks: tuple[dict[int, BlockList], dict[int, BlockList]] = ({}, {})
        self.reported = (-1, 0)
        self.work: tuple[int, int] | None = None
        self.announced = True
        self.leases: StepLeases | None = None
        self.saves_spoiled = False
        self.num_layers = len(groups)
        self.on_wait: Callable[[], None] = _nothing
        self._withheld: frozenset[int] = frozenset()
        self._groups = groups
        self._device = device
        self._attend = attend
        self._on_fenced = on_fenced
        self._on_closed = on_closed
        self._save_patience: float | None = None
        self._local = device.kind == "cpu"
        # On a device, blocks may still be read by what the engine enqueued before: loads come after that.
        self.after: DeviceEvent | None = None if self._local or not loads else device.record()
        self.cut_off = threading.Event()
        self._condition = threading.Condition()
        self._course = LayerTimes(len(groups))
        self._done, self._done_at = self._course.done, self._course.done_at
        self._arrivals = LoadState(loads, groups, block_bytes)
        self._ready = self._arrivals.ready
        self._in_flight = InFlight(number, self._condition)

    # -- the engine's thread ----------------------------------------------------------------------

    def wait_layer(self, layer: int) -> LoadResult:
        """Before attention of `layer`: are its loaded bytes in place?

        Returns at once if they are; else waits until they are, have failed, or the step's deadline.
        On cuda and npu the caller's current stream is made to wait, not the thread.

        :raises SpecError: the model has no such layer.
        """
        try:
            ready = self._ready[layer]
        except (IndexError, TypeError):
            raise self._no_such(layer) from None
        if layer < 0:
            raise self._no_such(layer)
        self.frontier = layer
        if ready or self._has_landed(layer):
            course = self._course
            course.asked_at[layer] = course.waited_at[layer] = monotonic()
            return READY
        outcome = self._wait(layer)
        self.order(layer)
        return outcome

    def await_layer(self, layer: int) -> LoadResult:
        """As :meth:`wait_layer`, on a thread that is not the engine's: that one calls :meth:`order` afterwards."""
        self.frontier = layer
        return self._wait(layer)

    def order(self, layer: int) -> None:
        """On cuda and npu: make the caller's current stream wait for the layer's copies, which have been waited for."""
        if not self._local:
            for event in self._arrivals.enqueued(layer):
                self._device.wait(event)

    def is_ready(self, layer: int) -> bool:
        """Would :meth:`wait_layer` return at once?"""
        return self._ready[layer] or self._has_landed(layer)

    def want_all(self) -> None:
        """All layers are wanted now, however few are to be prefetched: the forward pass begins behind the last one."""
        if self.frontier < self.num_layers - 1:
            self.frontier = self.num_layers - 1
            self.on_wait()
            self._take_grants()

    def wait_all(self) -> LoadResult:
        """All layers at once (bulk loading)."""
        outcome = self.await_all()
        for layer in range(self.num_layers):
            self.order(layer)
        return outcome

    def await_all(self) -> LoadResult:
        """As :meth:`wait_all`, on a thread that is not the engine's: that one calls :meth:`order` for each layer."""
        self.want_all()
        outcome = READY
        for layer in range(self.num_layers):
            outcome = self._wait(layer) if not self._ready[layer] else outcome
        # No layer computes before the last has arrived.
        self._course.waited_at[:] = [monotonic()] * self.num_layers
        return outcome

    def wait_loaded(self, timeout_s: float) -> bool:
        """Have the loads ended, well or not? Then :meth:`wait_all` returns at once. False after `timeout_s`."""
        self.want_all()
        with self._condition:
            left = min(timeout_s, self.deadline - monotonic())
            return self._condition.wait_for(lambda: not self.loading, left) or monotonic() >= self.deadline

    def begin_loads(self, timeout_s: float) -> bool:
        """Before a forward pass: let the loads begin now. False if none has after `timeout_s`.

        For engines whose thread hardly lets go of the interpreter while they prepare the pass: the link and the lane
        need it for a moment.
        """
        if not self.loading:
            return True
        self._take_grants()
        with self._condition:
            return self._condition.wait_for(lambda: self._in_flight.has_begun(LOAD) or not self.loading, timeout_s)

    def layer_done(self, layer: int, event: object = None) -> None:
        """After the new tokens' KV of `layer` was written; its saves may leave.

        :param event: on cuda and npu: the engine's event behind that write; None = one is recorded now.
        :raises SpecError: the model has no such layer.
        """
        if layer < 0:
            raise self._no_such(layer)
        try:
            self._done_at[layer] = monotonic()
        except IndexError:
            raise self._no_such(layer) from None
        self._done[layer] = event or self._local or self._device.record()

    def hurry(self) -> None:
        """Somebody waits for the saves: they do not keep behind the forward pass any more."""
        self._course.hurried = True

    def hold_saves(self) -> None:
        """Publish nothing of this step until :meth:`layerflow.agent.Agent.release_saves`. Call before its first layer.

        For engines that may learn later that the forward pass computed on a load which had failed: on another rank, or
        in a step before it. Layers are saved as always but for the last one of each group, without which no object of
        the group is complete.
        """
        self._withheld = frozenset({group: layer for layer, group in enumerate(self._groups)}.values())

    def close(self, ok: bool | None = None) -> None:
        """The forward pass ended; saves drain on their own.

        :param ok: False = layers not marked done never will be; None = find out.
        """
        if self.closed:
            return
        self.closed = True
        self._course.closed_at = monotonic()
        if ok is None:
            ok = not self.saves or self.computed_layers == len(self._groups)
        if not ok:
            self.cancel_saves("step closed before every layer was computed")
        self._on_closed(self, ok)

    @property
    def loading(self) -> bool:
        """Are loads of this step still under way?"""
        return bool(self.loads) and not self._arrivals.fenced and not self._arrivals.all_in_place()

    @property
    def all_granted(self) -> bool:
        """Does no further load batch come?"""
        return self._arrivals.all_granted()

    @property
    def progress(self) -> tuple[int, int]:
        """What of this step the server still grants by: the frontier while loads are to come, and computed layers."""
        frontier = self.reported[0] if self._arrivals.all_granted() else self.frontier
        return frontier, self.computed_layers if self.saves else 0

    @property
    def failed(self) -> tuple[FailedBlocks, ...]:
        """Everything of this step that has failed so far."""
        with self._condition:
            return self._arrivals.failed()

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if kind is None else False)

    def _wait(self, layer: int) -> LoadResult:
        began = self._course.asked_at[layer] = monotonic()
        self.on_wait()
        self._take_grants()
        expired = False
        with self._condition:
            # Not `fenced`: until a running batch has ended it is not known what has failed.
            while not (self._in_place(layer) or self.cut_off.is_set()):
                left = self.deadline - monotonic()
                if left <= 0:
                    expired = True
                    break
                # A lane that copies several batches in one call tells nobody of each.
                self._condition.wait(left if self._in_flight.copy(LOAD) is None else min(left, LANDING_POLL_S))
        if expired:
            self.fence(f"not in place at the step's deadline (layer {layer})")
        with self._condition:
            outcome = self._arrivals.outcome()
            if outcome.failed:
                # What began before a failure was known may still write those blocks; later batches leave them out.
                self._in_flight.wait_begun(LOAD)
                self._settle_device()
        ended = self._course.waited_at[layer] = monotonic()
        self.trace.spans.append(Span("wait", layer, began, ended))
        return outcome

    def _has_landed(self, layer: int) -> bool:
        """Are the layer's bytes in place, though the lane that copies more of the step has told nobody yet?"""
        copy = self._in_flight.copy(LOAD)
        if copy is None:
            return False
        # Without the lock. The lane comes in before it ends its batches: while it has not, none of them counts twice.
        # A failure is noted before the layer is sealed, so it is looked for after the seal was seen.
        in_place = self._arrivals.in_place(layer, copy.landed(layer)) and self._in_flight.copy(LOAD) is copy
        return in_place and not self._arrivals.troubled

    def _take_grants(self) -> None:
        if self.loads and not self._arrivals.all_granted():
            self._attend()

    def _no_such(self, layer: object) -> SpecError:
        last = len(self._groups) - 1
        return SpecError(f"step {self.number}: no layer {layer!r}; the model's cached layers are 0 to {last}")

    def bypass(self) -> None:
        """Its bytes will move past the arena, and the server hears of it later. Call before anybody else knows it."""
        self.announced = False
        self._save_patience = LATE_SAVE_S

    # -- the link thread --------------------------------------------------------------------------

    def planned(self, plan: Plan, bind: Callable[[int, Numbered], BlockList]) -> None:
        """The server's answer: number the blocks, fail what is not there.

        :param bind: makes the group's block list, bounds-checked.
        """
        loads = number_blocks(self.loads, plan.loads, loading=True)
        saves = number_blocks(self.saves, plan.saves, loading=False)
        lists = {group: bind(group, blocks) for group, blocks in loads.items()}
        self.blocks = (lists, {group: bind(group, blocks) for group, blocks in saves.items()})
        with self._condition:
            self.reads.number(saves)
            self._arrivals.number(loads)
            self._condition.notify_all()

    def granted(self, batch: Batch) -> None:
        """A load batch is on its way to the lane."""
        with self._condition:
            self._arrivals.grant(batch)

    def sealed(self, layer: int) -> None:
        """No further load batch comes for the layer."""
        with self._condition:
            self._arrivals.seal(layer)
            self._condition.notify_all()

    def load_failed(self, group: int, lo: int, hi: int, reason: str) -> None:
        """Blocks `lo` to `hi` of the group's numbering will not arrive."""
        with self._condition:
            self._arrivals.fail_range(group, lo, hi, reason)
            self._in_flight.halt(LOAD)
            self._condition.notify_all()

    def abort(self, request: str) -> None:
        """The engine gave the request up."""
        with self._condition:
            self._arrivals.abort(request)

    def fence(self, reason: str) -> None:
        """Cut the loads off: no batch starts any more, the running one is waited for, the rest has failed."""
        with self._condition:
            arrivals = self._arrivals
            # Another thread may be at it.
            self._condition.wait_for(lambda: self.cut_off.is_set() or not arrivals.fenced)
            if arrivals.fenced or arrivals.all_in_place():
                return
            arrivals.fenced = reason
            self._in_flight.halt(LOAD)
            self._in_flight.wait_idle(LOAD)
            try:
                self._settle_device()
                arrivals.fail_unfinished(reason)
            finally:
                self.cut_off.set()
                self._condition.notify_all()
        self._on_fenced(self, reason)

    def cancel_saves(self, reason: str) -> None:
        """No save batch starts any more."""
        self.saves_cancelled = self.saves_cancelled or reason
        self._in_flight.halt(SAVE)

    def cut_saves(self, reason: str) -> bool:
        """Cut the saves off: no batch starts any more, the running one is waited for. False if they were cut already.

        What was read before is stored; objects of which something is missing are given up by the server.
        """
        first = not self.saves_cancelled
        self.cancel_saves(reason)
        with self._condition:
            self._await_saves()
            self._settle_device([SAVE])
        self.reads.stop()
        return first

    # -- lanes ------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> bool:
        """May the batch touch engine memory now? Pair with :meth:`end`."""
        with self._condition:
            if self._arrivals.fenced if batch.direction == LOAD else self.saves_cancelled:
                return False
            self._in_flight.begin(batch.direction)
            return True

    def end(self, batch: Batch, failure: str = "", event: DeviceEvent | None = None) -> str:
        """The lane will not touch engine memory for this batch any more (or has enqueued the copy). Why it failed."""
        with self._condition:
            self._in_flight.end(batch, event)
            if batch.direction == LOAD:
                self._arrivals.end(batch, failure, event)
            elif self.saves_spoiled:
                failure = failure or TOO_LATE
            self._condition.notify_all()
            return failure

    def set_out(self, copy: CoalescedCopy) -> bool:
        """As :meth:`begin`, for batches that one call copies, all of their blocks. Pair with :meth:`came_in`."""
        direction, arrivals = copy.direction, self._arrivals
        with self._condition:
            if (arrivals.fenced or arrivals.failures) if direction == LOAD else self.saves_cancelled:
                return False
            self._in_flight.set_out(copy)
            self._condition.notify_all()
            return True

    def came_in(self, copy: CoalescedCopy, copied: int) -> None:
        """The first `copied` batches are copied; the others were not begun."""
        with self._condition:
            self._in_flight.come_in(copy)
            if copy.direction == LOAD:
                for batch in copy.batches[:copied]:
                    self._arrivals.end(batch, "", None)
            self._condition.notify_all()

    def live(self, batch: Batch) -> list[tuple[int, int]]:
        """What of a load batch is still to be copied: blocks that have failed are never written again."""
        failures = self._arrivals.failures
        if not failures:
            return [(batch.lo, batch.hi)]
        with self._condition:
            return failures.live(self._groups[batch.layer], batch.lo, batch.hi)

    def group_of(self, layer: int) -> int:
        """The layer's group."""
        return self._groups[layer]

    def computed(self, layer: int) -> Any:
        """None until the layer's KV is written and may be saved; then True, or the device event behind it."""
        return self._course.done[layer] if layer not in self._withheld else None

    def is_done(self, layer: int) -> bool:
        """Has the engine said :meth:`layer_done`?"""
        return self._course.done[layer] is not None

    @property
    def saves_held(self) -> bool:
        """Do the saves wait for the engine's verdict?"""
        return bool(self._withheld)

    def release_saves(self) -> None:
        """The saves may leave, or were cancelled."""
        self._withheld = frozenset()

    @property
    def computed_layers(self) -> int:
        """How many layers, from the first on, are marked done."""
        return self._course.computed_layers

    @property
    def saves_pressed(self) -> bool:
        """Does somebody wait for the saves, or does nothing more come to join them?"""
        return self.closed or self._course.hurried or bool(self.saves_cancelled)

    def pace(self, now: float) -> float:
        """See :meth:`layerflow.agent.step.times.LayerTimes.pace`."""
        return self._course.pace(now)

    def quiet(self) -> None:
        """Wait until no lane and no stream touches engine memory for this step; call after cutting it off."""
        with self._condition:
            self._in_flight.wait_idle(LOAD)
            self._await_saves()
            self._settle_device()

    def over(self, session: int) -> None:
        """Nothing of it is read any more."""
        self.reads.stop()
        self.trace.session = session

    def finish_trace(self) -> StepTrace:
        """Add the compute spans; once, when the step is over."""
        self.trace.spans.extend(self._course.compute_spans())
        return self.trace

    @property
    def fenced(self) -> bool:
        """Are its loads cut off, or about to be?"""
        return bool(self._arrivals.fenced)

    # -- under the condition's lock -----------------------------------------------------------------

    def _in_place(self, layer: int) -> bool:
        copy = self._in_flight.copy(LOAD)
        return self._arrivals.in_place(layer, copy.landed(layer) if copy is not None else 0)

    def _await_saves(self) -> None:
        if not self._in_flight.wait_idle(SAVE, self._save_patience):
            self.saves_spoiled = True
            log.warning("save_late", step=self.number, waited_s=self._save_patience)

    def _settle_device(self, directions: Collection[int] = (LOAD, SAVE)) -> None:
        for batch, reason in self._in_flight.settle(directions):
            if batch.direction == LOAD:
                self._arrivals.fail(batch, reason)


def _nothing() -> None:
    """Nobody is to be told."""
