"""A step's transfers: what may touch engine memory, what has arrived, and how both directions are cut off.

The link tells of the server's plan and grants, the lanes of each batch that begins and ends. What the engine's thread
calls is in :class:`layerflow.agent.step.step.Step`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import structlog

from layerflow.agent.descriptors import Numbered, PartDescriptor, number_blocks
from layerflow.agent.step.in_flight import CoalescedCopy, InFlight
from layerflow.agent.step.loads import REPLACED, LoadState, ObjectGuard
from layerflow.device.base import Device, DeviceEvent
from layerflow.observe.trace import Span
from layerflow.ops.copier import NO_WORDS
from layerflow.ops.covered import CoveredBlocks
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import Int64
from layerflow.wire.messages import Batch, Plan, PlanPart

# Which engine blocks a step's saves have still to read, for engines that recycle blocks while saves are in flight.


class PendingReads:
    """The bytes that are still to be read of each block. Has its own lock: lanes, the link and the engine come here.

    Until the plan is there, every block of every part counts.

    :param parts: the step's save parts.
    :param groups: for every layer of the model: its group.
    :param block_bytes: per group: bytes of one block in one layer, all planes.
    """

    def __init__(self, parts: Sequence[PartDescriptor], groups: Sequence[int], block_bytes: Sequence[int]) -> None:
        self._parts = parts
        self._groups = groups
        self._block_bytes = block_bytes
        self._numbered: Mapping[int, Numbered] | None = None
        self._owed: dict[int, Int64] = {}
        self._over = not parts
        self._condition = threading.Condition()

    def number(self, numbered: Mapping[int, Numbered]) -> None:
        """The plan is there; blocks of objects that got no room are not read."""
        with self._condition:
            self._numbered = numbered
            for group, column in numbered.items():
                whole = self._groups.count(group) * self._block_bytes[group]
                self._owed[group] = np.full(len(column.numbers), whole, dtype=np.int64)
            self._condition.notify_all()

    def placed(self, position: int) -> Int64:
        """Which blocks of a part the plan gave room, by number: int64, shape ``(n,)``; none before the plan.

        Objects of the other blocks are stored already, by another step, or there is no room for them.
        """
        with self._condition:
            column = (self._numbered or {}).get(self._parts[position].group)
            return column.numbers[column.part == position] if column is not None else np.empty(0, dtype=np.int64)

    def ended(self, batch: Batch) -> None:
        """A save batch will not touch engine memory any more, whatever became of it."""
        group = self._groups[batch.layer]
        with self._condition:
            if group in self._owed:
                part = batch.byte_hi - batch.byte_lo
                self._owed[group][batch.lo : batch.hi] -= part or self._block_bytes[group]
                self._condition.notify_all()

    def settled(self, positions: Collection[int]) -> None:
        """Note that these parts are stored or given up: no batch of them is left."""
        with self._condition:
            for group, column in (self._numbered or {}).items():
                self._owed[group][np.isin(column.part, list(positions))] = 0
            self._condition.notify_all()

    def stop(self) -> None:
        """No save of this step touches engine memory any more."""
        with self._condition:
            self._over = True
            self._condition.notify_all()

    def of(self, request: str) -> bool:
        """Is a block of this request still to be read?"""
        with self._condition:
            mine = [position for position, part in enumerate(self._parts) if part.request == request]
            if self._over or not mine or self._numbered is None:
                return bool(mine) and not self._over
            return any(
                bool((np.isin(column.part, mine) & (self._owed[group] > 0)).any())
                for group, column in self._numbered.items()
            )

    def any_of(self, group_blocks: Sequence[Int64]) -> bool:
        """Is one of these engine blocks still to be read?

        :param group_blocks: per group: engine block ids.
        """
        with self._condition:
            return self._any_of(group_blocks)

    def wait(self, group_blocks: Sequence[Int64], until: float) -> bool:
        """Wait until none of these blocks is still to be read; False at `until`, monotonic seconds."""
        with self._condition:
            left = max(0.0, until - time.monotonic())
            return self._condition.wait_for(lambda: not self._any_of(group_blocks), left)

    def _any_of(self, group_blocks: Sequence[Int64]) -> bool:
        if self._over:
            return False
        if self._numbered is None:
            return any(bool(np.isin(part.engine_blocks(), group_blocks[part.group]).any()) for part in self._parts)
        return any(
            bool(np.isin(column.engine_blocks[self._owed[group] > 0], group_blocks[group]).any())
            for group, column in self._numbered.items()
        )


# What the engine's thread did in one step, layer by layer, and when.


class LayerTimes:
    """Times of the engine's calls, monotonic seconds; 0.0 = not yet.

    The engine's thread stores into the lists itself, since a call would cost it more than the store. Others only read.

    :param layers: of the model.

    :ivar asked_at: by layer: when the engine asked whether it is ready.
    :ivar waited_at: by layer: when it was told, so that the layer could compute.
    :ivar done_at: by layer: when the layer's KV was written.
    :ivar done: by layer: None until its KV is written; then True, or the device event behind it. Stored last.
    :ivar closed_at: when the forward pass ended.
    :ivar expedited: a thread waits for the saves.
    """

    __slots__ = ("asked_at", "closed_at", "done", "done_at", "expedited", "waited_at")

    def __init__(self, layers: int) -> None:
        self.asked_at = [0.0] * layers
        self.waited_at = [0.0] * layers
        self.done_at = [0.0] * layers
        self.done: list[Any] = [None] * layers
        self.closed_at = 0.0
        self.expedited = False

    @property
    def computed_layers(self) -> int:
        """How many layers, from the first on, are marked done."""
        for layer, done in enumerate(self.done):
            if done is None:
                return layer
        return len(self.done)

    def seconds_per_layer(self, now: float) -> float:
        """Seconds per layer since the first one was done; 0.0 before. Grows while a layer is computed.

        After the forward pass: its average, or the time since its end where that is longer, so that the engine uses the
        pass's result first. Infinite when a thread waits for the saves.
        """
        if self.expedited:
            return math.inf
        done = self.computed_layers
        if not done:
            return 0.0
        if self.closed_at:
            return max((self.closed_at - self.done_at[0]) / done, now - self.closed_at)
        return (now - self.done_at[0]) / done

    def compute_spans(self) -> Iterator[Span]:
        """Each layer's computing, once the step is over.

        A layer computes until the engine asks for the next one: its attention goes on after its KV is written.
        """
        ends = [*self.asked_at[1:], self.closed_at]
        for layer, (began, ended, done) in enumerate(zip(self.waited_at, ends, self.done_at, strict=True)):
            if began > 0.0 and max(ended, done) > began:
                yield Span("compute", layer, began, ended if ended > began else done)


LOAD, SAVE = 0, 1
CANCELLED = "cancelled"
LATE_FAILURE = "the step computed on a load that turned out to have failed"
TOO_LATE = "cancelled: it was still under way when its step was cut off"

log = structlog.get_logger("layerflow.agent")


class StepTransfers:
    """Both directions of a step. Any thread may call; one condition guards what they share.

    :param groups: for every layer of the model: its group.
    :param block_bytes: per group: bytes of one block in one layer, all planes.
    :param device: of the engine's memory.
    :param after: on a device, the event that loads come after; None = all that the caller has enqueued until now, which
        may still touch the blocks.

    :ivar after: that event; None on the cpu.
    :ivar blocks: loads and saves: by group the planned blocks, bounds-checked.
    :ivar closed: the forward pass has ended.
    :ivar loads_stopped: set once the loads are cut off and no batch of them runs.
    :ivar frontier: the highest layer whose attention has begun; batches whose gate is not past it can move.
    :ivar reads: which blocks the saves have still to read.
    :ivar residents: the objects of its loads, where their places are known without the server's plan.
    :ivar saves_cancelled: why no save batch starts any more; "" = they start.
    :ivar saves_overdue: a save did not end when it was cut off. It has failed, whatever becomes of it.
    :ivar saves_spoilt: why saves that end from now on have failed, although they were read; "" = they have not.
    :ivar generation_words: what must be unchanged in the arena before and behind each load batch: offsets, and the
        words there.
    """

    # The engine's thread comes from its compute: a slot is in one cold line of memory, a dictionary's value in three.
    __slots__ = (
        "_arrivals",
        "_condition",
        "_device",
        "_flying",
        "_groups",
        "_in_flight",
        "_local",
        "_save_patience",
        "_times",
        "_until_closed",
        "_withheld",
        "after",
        "blocks",
        "closed",
        "frontier",
        "generation_words",
        "loads",
        "loads_stopped",
        "num_layers",
        "number",
        "reads",
        "residents",
        "saves",
        "saves_cancelled",
        "saves_overdue",
        "saves_spoilt",
    )

    def __init__(
        self,
        number: int,
        *,
        groups: Sequence[int],
        block_bytes: Sequence[int],
        loads: list[PartDescriptor],
        saves: list[PartDescriptor],
        device: Device,
        after: DeviceEvent | None = None,
    ) -> None:
        self.number = number
        self.loads = loads
        self.saves = saves
        self.num_layers = len(groups)
        self.blocks: tuple[dict[int, BlockList | CoveredBlocks], dict[int, BlockList | CoveredBlocks]] = ({}, {})
        self.frontier = -1
        self.closed = False
        self.reads = PendingReads(saves, groups, block_bytes)
        self.residents: ObjectGuard | None = None
        self.generation_words = (NO_WORDS, NO_WORDS)
        self.saves_cancelled = ""
        self.saves_overdue = False
        self.saves_spoilt = ""
        self.loads_stopped = threading.Event()
        self._groups = groups
        self._device = device
        self._local = device.kind == "cpu"
        self.after: DeviceEvent | None = None if self._local or not loads else after or device.record()
        self._save_patience: float | None = None
        # By layer: load batches that the device was told to copy, and has not copied as far as is known.
        self._flying: dict[int, int] = {}
        self._withheld: frozenset[int] = frozenset()
        self._until_closed: frozenset[int] = frozenset()
        self._condition = threading.Condition()
        self._times = LayerTimes(len(groups))
        self._arrivals = LoadState(loads, groups, block_bytes)
        self._in_flight = InFlight(number, self._condition)

    # -- the link: what the server has planned and granted ------------------------------------------

    def place(
        self, residents: ObjectGuard, plans: Sequence[PlanPart], bind: Callable[[int, Numbered], BlockList]
    ) -> dict[int, Numbered]:
        """The places of all loads are known: number the blocks. Call before it is an open step.

        :param bind: as of :meth:`planned`.
        """
        loads = number_blocks(self.loads, plans, loading=True)
        self.blocks = ({group: bind(group, blocks) for group, blocks in loads.items()}, {})
        self.residents, self.generation_words = residents, residents.generation_words
        self._arrivals.number(loads)
        residents.number(loads)
        return loads

    def planned(self, plan: Plan, bind: Callable[[int, Numbered], BlockList | CoveredBlocks]) -> None:
        """The server's answer: number the blocks, fail what is not there.

        :param bind: makes the group's block list, bounds-checked.
        """
        resident = self.residents is not None
        loads = number_blocks(self.loads, plan.loads, loading=True) if not resident else {}
        saves = number_blocks(self.saves, plan.saves, loading=False)
        lists = {group: bind(group, blocks) for group, blocks in loads.items()}
        self.blocks = (lists or self.blocks[0], {group: bind(group, blocks) for group, blocks in saves.items()})
        with self._condition:
            self.reads.number(saves)
            if not resident:
                self._arrivals.number(loads)
            self._condition.notify_all()

    def granted(self, batch: Batch) -> None:
        """A load batch is on its way to the lane."""
        with self._condition:
            self._arrivals.grant(batch)

    def grant(self, batches: Sequence[Batch]) -> None:
        """As :meth:`granted`, for batches that a lane has cut itself."""
        with self._condition:
            for batch in batches:
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
            # Where the server grants, it grants no more of it.
            self._arrivals.abort(request, drop=self.residents is not None)
            self._condition.notify_all()

    # -- cutting off ------------------------------------------------------------------------------

    def cancel_saves(self, reason: str) -> None:
        """No save batch starts any more."""
        self.saves_cancelled = self.saves_cancelled or reason
        self._in_flight.halt(SAVE)

    def fence_saves(self, reason: str) -> bool:
        """Cut the saves off: no batch starts any more, the running one is waited for. False if they were cut already.

        What was read before is stored; objects of which something is missing are given up by the server.
        """
        first = not self.saves_cancelled
        self.cancel_saves(reason)
        with self._condition:
            self._await_saves()
            self._release_device([SAVE])
        self.reads.stop()
        return first

    def wait_idle(self) -> None:
        """Wait until no lane and no stream touches engine memory for this step; call after cutting it off."""
        with self._condition:
            self._in_flight.wait_idle(LOAD)
            self._await_saves()
            self._release_device()
            self._after_device()

    def _fence_loads(self, reason: str) -> bool:
        """Cut the loads off: no batch starts any more, the running one is waited for, the rest has failed.

        False if there is nothing left to cut off.
        """
        with self._condition:
            arrivals = self._arrivals
            # Another thread may be at it.
            self._condition.wait_for(lambda: self.loads_stopped.is_set() or not arrivals.fenced)
            if arrivals.fenced or arrivals.all_in_place():
                return False
            arrivals.fenced = reason
            self._in_flight.halt(LOAD)
            self._in_flight.wait_idle(LOAD)
            try:
                self._release_device()
                arrivals.fail_unfinished(reason)
            finally:
                self.loads_stopped.set()
                self._condition.notify_all()
        return True

    # -- the lanes ---------------------------------------------------------------------------------

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
                if event is not None:
                    self._flying[batch.layer] = self._flying.get(batch.layer, 0) + 1
                self._arrivals.end(batch, failure, event)
            elif self.saves_overdue:
                failure = failure or TOO_LATE
            if batch.direction == SAVE or self._concerns_waits(batch):
                self._condition.notify_all()
            return failure

    def _concerns_waits(self, batch: Batch) -> bool:
        """May the end of a load batch be what somebody waits for? A wake-up for each would cost the lane as much again.

        A layer is waited for until it is whole, a beginning until the first batch, and what is cut off or has failed
        until every batch has ended.
        """
        arrivals = self._arrivals
        return arrivals.in_place(batch.layer) or arrivals.troubled or self._in_flight.has_one_ended(LOAD)

    def begin_copy(self, copy: CoalescedCopy) -> bool:
        """As :meth:`begin`, for batches that one call copies, all of their blocks. Pair with :meth:`end_copy`."""
        direction, arrivals = copy.direction, self._arrivals
        with self._condition:
            if (arrivals.fenced or arrivals.failures) if direction == LOAD else self.saves_cancelled:
                return False
            self._in_flight.begin_copy(copy)
            self._condition.notify_all()
            return True

    def end_copy(self, copy: CoalescedCopy, copied: int) -> None:
        """The first `copied` batches are copied; the others were not begun."""
        with self._condition:
            self._in_flight.end_copy(copy)
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

    def fail_replaced(self) -> bool:
        """Blocks of objects that are not where the plan said any more have failed; True: these are news."""
        replaced = self.residents.replaced() if self.residents is not None else ()
        for group, lo, hi in replaced:
            self.load_failed(group, lo, hi, REPLACED)
        return bool(replaced)

    def landed(self, batch: Batch, failure: str = "") -> None:
        """The device has copied a load batch, or cannot tell: what that shows to have failed is known from now on.

        The engine may have been told already that the layer is ready, and its device may have computed on it: nothing
        that the step saves is published then. The end of a save is held back until those of the loads that it was
        computed from are known, see :meth:`may_be_spoilt`.
        """
        with self._condition:
            if failure:
                self.load_failed(self._groups[batch.layer], batch.lo, batch.hi, failure)
            if self.fail_replaced() or failure:
                self.saves_spoilt = LATE_FAILURE
                self.cancel_saves(LATE_FAILURE)
            left = self._flying.pop(batch.layer, 0) - 1
            if left > 0:
                self._flying[batch.layer] = left
            if not self._flying or self._arrivals.troubled:
                self._condition.notify_all()

    def may_be_spoilt(self, layer: int) -> bool:
        """May a load still turn out to have failed that the layer was computed from, although it was called ready?"""
        if not self._flying:  # nearly always
            return False
        with self._condition:
            return any(loaded <= layer for loaded in self._flying)

    def group_of(self, layer: int) -> int:
        """The layer's group."""
        return self._groups[layer]

    def computed(self, layer: int) -> Any:
        """None until the layer's KV is written and may be saved; then True, or the device event behind it."""
        if layer in self._withheld or (layer in self._until_closed and not self.closed):
            return None
        return self._times.done[layer]

    @property
    def saves_expedited(self) -> bool:
        """Does a thread wait for the saves, or is no further layer of them to come?"""
        return self.closed or self._times.expedited or bool(self.saves_cancelled)

    def seconds_per_layer(self, now: float) -> float:
        """See :meth:`layerflow.agent.step.transfers.LayerTimes.seconds_per_layer`."""
        return self._times.seconds_per_layer(now)

    # -- how far it is -----------------------------------------------------------------------------

    @property
    def loading(self) -> bool:
        """Are loads of this step still under way?"""
        return bool(self.loads) and not self._arrivals.fenced and not self._arrivals.all_in_place()

    @property
    def all_landed(self) -> bool:
        """Have the loads ended on the device too, well or not? From then on no further failure of them is found."""
        return not (self.loading or self._flying)

    @property
    def all_granted(self) -> bool:
        """Does no further load batch come?"""
        return self._arrivals.all_granted()

    @property
    def fenced(self) -> bool:
        """Are its loads cut off, or about to be?"""
        return bool(self._arrivals.fenced)

    @property
    def computed_layers(self) -> int:
        """How many layers, from the first on, are marked done."""
        return self._times.computed_layers

    @property
    def saves_held(self) -> bool:
        """Do the saves wait for the engine's verdict?"""
        return bool(self._withheld)

    def release_saves(self) -> None:
        """The saves may leave, or were cancelled."""
        self._withheld = frozenset()

    # -- under the condition's lock -----------------------------------------------------------------

    def _in_place(self, layer: int) -> bool:
        copy = self._in_flight.copy(LOAD)
        return self._arrivals.in_place(layer, copy.landed(layer) if copy is not None else 0)

    def _after_device(self) -> None:
        """The device was waited for: what its copies show to have failed is known from now on."""
        if self._flying and self.fail_replaced():
            self.saves_spoilt = LATE_FAILURE
        self._flying = {}

    def _await_saves(self) -> None:
        if not self._in_flight.wait_idle(SAVE, self._save_patience):
            self.saves_overdue = True
            log.warning("save_late", step=self.number, waited_s=self._save_patience)

    def _release_device(self, directions: Collection[int] = (LOAD, SAVE)) -> None:
        for batch, reason in self._in_flight.release(directions):
            if batch.direction == LOAD:
                self._arrivals.fail(batch, reason)
