"""One open step inside the engine's process: what is ready, what has failed, what is computed.

The engine's thread calls :meth:`Step.wait_layer` and :meth:`Step.layer_done`; both are local and, in
the common case, a few plain stores. Lanes and the link thread tell the step what became of its batches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import structlog

from layerflow.agent.failures import LoadFailures
from layerflow.agent.outline import Numbered, OutlinePart, number_blocks
from layerflow.agent.reads import SaveReads
from layerflow.agent.values import ABORTED, READY, FailedBlocks, Outcome
from layerflow.device.base import Device, DeviceEvent
from layerflow.errors import SpecError
from layerflow.observe.trace import Span, StepTrace
from layerflow.ops.extents import BlockList
from layerflow.wire.messages import Batch, Plan

if TYPE_CHECKING:
    from layerflow.agent.direct_cargo import Cargo

LOAD, SAVE = 0, 1
LATE_SAVE_S = 1.0
"""How long a save past the arena is waited for when it is cut off; then it has failed, whatever becomes of it."""
CANCELLED = "cancelled"
TOO_LATE = "cancelled: it was still under way when its step was cut off"

log = structlog.get_logger("layerflow.agent")


class Step:
    """A forward pass with something to load or to save.

    :param groups: for every layer of the model: its group.
    :param block_bytes: per group: bytes of one block in one layer, all planes.
    :param deadline: monotonic seconds; loads not in place by then have failed.
    :param device: of the engine's memory.
    :param on_fenced: told (step, reason) when the loads were cut off here.
    :param on_closed: told (step, ok) when the forward pass ended.

    :ivar announced: the server knows of it, or will before anything that is said of it from now on.
    :ivar cargo: its objects in the pool, where its bytes move past the arena.
    :ivar saves_spoiled: a save did not end when it was cut off. It has failed, whatever becomes of it.
    """

    def __init__(
        self,
        number: int,
        groups: Sequence[int],
        block_bytes: Sequence[int],
        loads: list[OutlinePart],
        saves: list[OutlinePart],
        deadline: float,
        save_deadline: float,
        device: Device,
        on_fenced: Callable[[Step, str], None],
        on_closed: Callable[[Step, bool], None],
    ) -> None:
        self.number = number
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
        self.aborted: set[str] = set()
        self.reported = (-1, 0)
        self.work: tuple[int, int] | None = None
        self.announced = True
        self.cargo: Cargo | None = None
        self.saves_spoiled = False
        layers = len(groups)
        loading = {part.group for part in loads}
        self._groups = groups
        self._block_bytes = block_bytes
        self._device = device
        self._on_fenced = on_fenced
        self._on_closed = on_closed
        self._save_patience: float | None = None
        self._local = device.kind == "cpu"
        # On a device, blocks may still be read by what the engine enqueued before: loads come after that.
        self.after: DeviceEvent | None = None if self._local or not loads else device.record()
        self._ready = [group not in loading for group in groups]
        self._sealed = list(self._ready)
        self._outstanding = [0] * layers
        self._enqueued: list[list[DeviceEvent]] = [[] for _ in range(0 if self._local else layers)]
        self._moved: dict[int, list[Batch]] = {}
        self._done: list[Any] = [None] * layers
        self._asked_at = [0.0] * layers
        self._waited_at = [0.0] * layers
        self._done_at = [0.0] * layers
        self._closed_at = 0.0
        self._condition = threading.Condition()
        self._running = self._saves_running = self._loads_begun = self._loads_ended = 0
        self._unsettled: list[tuple[Batch, DeviceEvent]] = []
        self._fenced = ""
        self.cut_off = threading.Event()
        self._failures = LoadFailures(loads)
        self._outcome: Outcome | None = None

    # -- the engine's thread ----------------------------------------------------------------------

    def wait_layer(self, layer: int) -> Outcome:
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
        if ready:
            self._asked_at[layer] = self._waited_at[layer] = time.monotonic()
            return READY
        return self._wait(layer)

    def is_ready(self, layer: int) -> bool:
        """Would :meth:`wait_layer` return at once?"""
        return self._ready[layer]

    def wait_all(self) -> Outcome:
        """All layers at once (bulk loading)."""
        outcome = READY
        for layer in range(len(self._groups)):
            outcome = self._wait(layer) if not self._ready[layer] else outcome
        self._waited_at = [time.monotonic()] * len(self._groups)  # no layer computes before the last has arrived
        return outcome

    def wait_loaded(self, timeout_s: float) -> bool:
        """Have the loads ended, well or not? Then :meth:`wait_all` returns at once. False after `timeout_s`."""
        with self._condition:
            left = min(timeout_s, self.deadline - time.monotonic())
            return self._condition.wait_for(lambda: not self.loading, left) or time.monotonic() >= self.deadline

    def layer_done(self, layer: int, event: object = None) -> None:
        """After the new tokens' KV of `layer` was written; its saves may leave.

        :param event: on cuda and npu: the engine's event behind that write; None = one is recorded now.
        :raises SpecError: the model has no such layer.
        """
        if not 0 <= layer < len(self._done):
            raise self._no_such(layer)
        self._done_at[layer] = time.monotonic()
        self._done[layer] = event or (True if self._local else self._device.record())

    def close(self, ok: bool | None = None) -> None:
        """The forward pass ended; saves drain on their own.

        :param ok: False = layers not marked done never will be; None = find out.
        """
        if self.closed:
            return
        self.closed = True
        self._closed_at = time.monotonic()
        if ok is None:
            ok = not self.saves or all(done is not None for done in self._done)
        if not ok:
            self.cancel_saves("step closed before every layer was computed")
        self._on_closed(self, ok)

    @property
    def loading(self) -> bool:
        """Are loads of this step still under way?"""
        return bool(self.loads) and not self._fenced and not all(map(self._in_place, range(len(self._groups))))

    @property
    def failed(self) -> tuple[FailedBlocks, ...]:
        """Everything of this step that has failed so far."""
        with self._condition:
            return self._failures.blocks(but=self.aborted)

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if kind is None else False)

    def _wait(self, layer: int) -> Outcome:
        began = self._asked_at[layer] = time.monotonic()
        expired = False
        with self._condition:
            # Not `_fenced`: until a running batch has ended it is not known what has failed.
            while not (self._in_place(layer) or self.cut_off.is_set()):
                left = self.deadline - time.monotonic()
                if left <= 0:
                    expired = True
                    break
                self._condition.wait(left)
        if expired:
            self.fence(f"not in place at the step's deadline (layer {layer})")
        with self._condition:
            outcome = self._outcome = self._outcome or self._conclude()
            if outcome.failed:
                self._quiesce_failed()
        if not self._local:
            for event in self._enqueued[layer]:
                self._device.wait(event)
        ended = self._waited_at[layer] = time.monotonic()
        self.trace.spans.append(Span("wait", layer, began, ended))
        return outcome

    def _no_such(self, layer: object) -> SpecError:
        return SpecError(
            f"step {self.number}: no layer {layer!r}; the model's cached layers are 0 to {len(self._done) - 1}"
        )

    def _quiesce_failed(self) -> None:
        """Batches that began before a failure was known may still write those blocks; later ones leave them out."""
        begun = self._loads_begun
        self._condition.wait_for(lambda: self._loads_ended >= begun)
        self._settle_device()

    def _settle_device(self, directions: Sequence[int] = (LOAD, SAVE)) -> None:
        """Nothing that was enqueued so far touches either memory any more. What a broken device moved has failed."""
        unsettled, self._unsettled = self._unsettled, []
        for batch, event in unsettled:
            if batch.direction not in directions:
                self._unsettled.append((batch, event))
                continue
            try:
                event.synchronize()
            except Exception as error:
                log.exception("device_failed", step=self.number, layer=batch.layer)
                if batch.direction == LOAD:
                    reason = f"device: {error}"
                    self._failures.fail_range(self._groups[batch.layer], batch.lo, batch.hi, reason)
                    self._failed_more()

    def _conclude(self) -> Outcome:
        failed = self._failures.blocks(but=self.aborted)
        if failed:
            return Outcome(failed)
        if self.aborted and self.aborted.issuperset(part.request for part in self.loads):
            return ABORTED
        return READY

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
            self._failures.number(loads)
            self._failed_more()
            for layer, group in enumerate(self._groups):
                if group not in loads and not self._sealed[layer]:
                    self._sealed[layer] = True
                    self._settle_layer(layer)
            self._condition.notify_all()

    def granted(self, batch: Batch) -> None:
        """A load batch is on its way to the lane."""
        with self._condition:
            self._outstanding[batch.layer] += 1
            self._sealed[batch.layer] |= batch.seals

    def sealed(self, layer: int) -> None:
        """No further load batch comes for the layer."""
        with self._condition:
            self._sealed[layer] = True
            self._settle_layer(layer)
            self._condition.notify_all()

    def load_failed(self, group: int, lo: int, hi: int, reason: str) -> None:
        """Blocks `lo` to `hi` of the group's numbering will not arrive."""
        with self._condition:
            self._failures.fail_range(group, lo, hi, reason)
            self._failed_more()
            self._condition.notify_all()

    def abort(self, request: str) -> None:
        """The engine gave the request up."""
        with self._condition:
            self.aborted.add(request)
            self._outcome = None

    def fence(self, reason: str) -> None:
        """Cut the loads off: no batch starts any more, the running one is waited for, the rest has failed."""
        with self._condition:
            self._condition.wait_for(lambda: self.cut_off.is_set() or not self._fenced)  # another thread may be at it
            if self._fenced or all(self._in_place(layer) for layer in range(len(self._groups))):
                return
            self._fenced = reason
            self._condition.wait_for(lambda: self._running == self._saves_running)
            try:
                self._settle_device()
                self._fail_unfinished(reason)
            finally:
                self.cut_off.set()
                self._condition.notify_all()
        self._on_fenced(self, reason)

    def cancel_saves(self, reason: str) -> None:
        """No save batch starts any more."""
        self.saves_cancelled = self.saves_cancelled or reason

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

    def begin(self, direction: int) -> bool:
        """May a batch touch engine memory now? Pair with :meth:`end`."""
        with self._condition:
            if self._fenced if direction == LOAD else self.saves_cancelled:
                return False
            self._running += 1
            self._saves_running += direction == SAVE
            self._loads_begun += direction == LOAD
            return True

    def end(self, batch: Batch, failure: str = "", event: DeviceEvent | None = None) -> str:
        """The lane will not touch engine memory for this batch any more (or has enqueued the copy). Why it failed."""
        with self._condition:
            self._running -= 1
            self._saves_running -= batch.direction == SAVE
            if event is not None:
                self._unsettled.append((batch, event))
            if batch.direction == LOAD:
                self._loads_ended += 1
                if failure:
                    self._failures.fail_range(self._groups[batch.layer], batch.lo, batch.hi, failure)
                    self._failed_more()
                else:
                    self._moved.setdefault(batch.layer, []).append(batch)
                if event is not None:
                    self._enqueued[batch.layer].append(event)
                self._outstanding[batch.layer] -= 1
                self._settle_layer(batch.layer)
            elif self.saves_spoiled:
                failure = failure or TOO_LATE
            self._condition.notify_all()
            return failure

    def live(self, batch: Batch) -> list[tuple[int, int]]:
        """What of a load batch is still to be copied: blocks that have failed are never written again."""
        if not self._failures:
            return [(batch.lo, batch.hi)]
        with self._condition:
            return self._failures.live(self._groups[batch.layer], batch.lo, batch.hi)

    def group_of(self, layer: int) -> int:
        """The layer's group."""
        return self._groups[layer]

    def computed(self, layer: int) -> Any:
        """None until the layer's KV is written; then True, or the device event behind it."""
        return self._done[layer]

    @property
    def computed_layers(self) -> int:
        """How many layers, from the first on, are marked done."""
        for layer, done in enumerate(self._done):
            if done is None:
                return layer
        return len(self._done)

    def pace(self, now: float) -> float:
        """Seconds per layer since the first one was done; 0.0 before. Grows while a layer is computed.

        After the forward pass: once for each layer that the engine's next doings may take.
        """
        done = self.computed_layers
        if not done:
            return 0.0
        if self.closed:
            return max((self._closed_at - self._done_at[0]) / done, now - self._closed_at)
        return (now - self._done_at[0]) / done

    def quiet(self) -> None:
        """Wait until no lane and no stream touches engine memory for this step; call after cutting it off."""
        with self._condition:
            self._condition.wait_for(lambda: self._running == self._saves_running)
            self._await_saves()
            self._settle_device()

    def finish_trace(self, session: int) -> StepTrace:
        """Add the compute spans; the step is over, nothing of it is read any more.

        A layer computes until the engine asks for the next one: its attention goes on after its KV is written.
        """
        self.reads.stop()
        self.trace.session = session
        ends = [*self._asked_at[1:], self._closed_at]
        for layer, (began, ended, done) in enumerate(zip(self._waited_at, ends, self._done_at, strict=True)):
            if began > 0.0 and max(ended, done) > began:
                self.trace.spans.append(Span("compute", layer, began, ended if ended > began else done))
        return self.trace

    @property
    def fenced(self) -> bool:
        """Are its loads cut off, or about to be?"""
        return bool(self._fenced)

    # -- under the condition's lock -----------------------------------------------------------------

    def _await_saves(self) -> None:
        if not self._condition.wait_for(lambda: not self._saves_running, self._save_patience):
            self.saves_spoiled = True
            log.warning("save_late", step=self.number, waited_s=self._save_patience)

    def _in_place(self, layer: int) -> bool:
        return self._sealed[layer] and not self._outstanding[layer]

    def _settle_layer(self, layer: int) -> None:
        # Layers of a device keep taking the slow path: the caller's stream must wait for their events.
        if (
            self._in_place(layer)
            and not self._failures
            and not self._fenced
            and (self._local or not self._enqueued[layer])
        ):
            self._ready[layer] = True

    def _fail_unfinished(self, reason: str) -> None:
        if self.blocks[LOAD]:
            for group, whole in enumerate(self._block_bytes):
                layers = [at for at, own in enumerate(self._groups) if own == group and not self._in_place(at)]
                self._failures.fail_missing(group, [self._moved.get(at, ()) for at in layers], whole, reason)
        else:
            self._failures.fail_all(reason)
        self._failed_more()

    def _failed_more(self) -> None:
        """From now on every wait has something to tell."""
        self._outcome = None
        if self._failures:
            loading = {part.group for part in self.loads}
            self._ready = [
                ready and group not in loading for ready, group in zip(self._ready, self._groups, strict=True)
            ]
