"""One open step inside the engine's process, as the engine's thread uses it.

:meth:`Step.wait_layer` and :meth:`Step.layer_done` are local and, in the common case, a few plain stores. What the link
and the lanes tell the step is in :mod:`layerflow.agent.step.transfers`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType

from layerflow.agent.descriptors import PartDescriptor
from layerflow.agent.step.leases import StepLeases
from layerflow.agent.step.transfers import LOAD, StepTransfers
from layerflow.agent.values import READY, FailedBlocks, LoadResult
from layerflow.device.base import Device, DeviceEvent
from layerflow.errors import SpecError
from layerflow.observe.trace import Span, StepTrace

LATE_SAVE_S = 1.0
"""How long a save past the arena is waited for when it is cut off; then it has failed, whatever becomes of it."""
LANDING_POLL_S = 0.2e-3
"""How often the engine's thread looks for a layer that it waits for, while one call copies several."""


class Step(StepTransfers):
    """A forward pass with something to load or to save.

    :param groups: for every layer of the model: its group.
    :param block_bytes: per group: bytes of one block in one layer, all planes.
    :param deadline: monotonic seconds; loads not in place by then have failed.
    :param save_deadline: monotonic seconds; saves not stored by then are given up.
    :param device: of the engine's memory.
    :param after: on a device, what its loads come after; None = all that the engine has enqueued.
    :param pump: takes what the server has said, on the calling thread.
    :param on_fenced: told (step, reason) when the loads were cut off here.
    :param on_closed: told (step, ok) when the forward pass ended.

    :ivar detached: its server is gone and dead; its loads go on without one.
    :ivar announced: the server knows of it, or will before anything that is said of it from now on.
    :ivar leases: its objects in the pool, where its bytes move past the arena.
    :ivar on_wait: called on the engine's thread when it is about to wait for a layer.
    :ivar reported: what the server was last told of :attr:`progress`.
    :ivar thread: native id of the thread that opened it: the engine's.
    :ivar work: new tokens and their context, for the cost model; None = not known.
    """

    __slots__ = (
        "_done",
        "_done_at",
        "_on_closed",
        "_on_fenced",
        "_pump",
        "_ready",
        "announced",
        "deadline",
        "detached",
        "leases",
        "on_wait",
        "reported",
        "requests",
        "save_deadline",
        "thread",
        "trace",
        "work",
    )

    def __init__(
        self,
        number: int,
        *,
        groups: Sequence[int],
        block_bytes: Sequence[int],
        loads: list[PartDescriptor],
        saves: list[PartDescriptor],
        deadline: float,
        save_deadline: float,
        device: Device,
        after: DeviceEvent | None = None,
        pump: Callable[[], None],
        on_fenced: Callable[[Step, str], None],
        on_closed: Callable[[Step, bool], None],
    ) -> None:
        super().__init__(
            number, groups=groups, block_bytes=block_bytes, loads=loads, saves=saves, device=device, after=after
        )
        self.thread = threading.get_native_id()
        self.deadline = deadline
        self.save_deadline = save_deadline
        self.requests = {part.request for part in (*loads, *saves)}
        self.trace = StepTrace(number, 0, "", [])
        self.reported = (-1, 0)
        self.work: tuple[int, int] | None = None
        self.announced = True
        self.detached = False
        self.leases: StepLeases | None = None
        self.on_wait: Callable[[], None] = _nothing
        self._pump = pump
        self._on_fenced = on_fenced
        self._on_closed = on_closed
        self._done, self._done_at = self._times.done, self._times.done_at
        self._ready = self._arrivals.ready

    # -- the engine's thread ----------------------------------------------------------------------

    def wait_layer(self, layer: int) -> LoadResult:
        """Before attention of `layer`: are its loaded bytes in place?

        Returns at once if they are; else waits until they are, have failed, or the step's deadline.
        On cuda and npu the caller's current stream is made to wait, not the thread. What fails there after this has
        said *ready* is in :attr:`failed` once :attr:`all_landed`, and nothing is published that the step has saved.

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
            times = self._times
            times.asked_at[layer] = times.waited_at[layer] = monotonic()
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
        self._times.waited_at[:] = [monotonic()] * self.num_layers
        return outcome

    def wait_loaded(self, timeout_s: float) -> bool:
        """Have the loads ended, well or not? Then :meth:`wait_all` returns at once. False after `timeout_s`.

        On cuda and npu the device has ended them too: no failure of them is found later.
        """
        self.want_all()
        with self._condition:
            left = min(timeout_s, self.deadline - monotonic())
            if self._condition.wait_for(lambda: self.all_landed, left):
                return True
            if monotonic() < self.deadline:
                return False
            if not self.loading:
                self._release_device([LOAD])
                self._after_device()
            return True

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
        self._done[layer] = event or self._local or self._device.record(timed=bool(self.saves))

    def expedite(self) -> None:
        """A thread waits for the saves: they leave now, without waiting for the end of the forward pass."""
        self._times.expedited = True

    def hold_saves(self) -> None:
        """Publish nothing of this step until :meth:`layerflow.agent.Agent.release_saves`. Call before its first layer.

        For engines that may learn later that the forward pass computed on a load which had failed: on another rank, or
        in a step before it. Layers are saved as always but for the last one of each group, without which no object of
        the group is complete.
        """
        self._withheld = self._last_layers()

    def publish_when_closed(self) -> None:
        """Publish nothing of this step before :meth:`close`. Call before its first layer.

        For engines that may turn out to compute a layer twice in one forward pass: what was read behind the first time
        is given up by :meth:`cancel_saves`, and until the pass has ended no object is complete.
        """
        self._until_closed = self._last_layers()

    def close(self, ok: bool | None = None) -> None:
        """The forward pass ended; saves drain on their own.

        :param ok: False = layers not marked done never will be; None = find out.
        """
        if self.closed:
            return
        self.closed = True
        self._times.closed_at = monotonic()
        if ok is None:
            ok = not self.saves or self.computed_layers == len(self._groups)
        if not ok:
            self.cancel_saves("step closed before every layer was computed")
        self._on_closed(self, ok)

    @property
    def progress(self) -> tuple[int, int]:
        """What of this step the server still grants by: the frontier while loads are to come, and computed layers."""
        known = self.residents is not None or self._arrivals.all_granted()
        frontier = self.reported[0] if known else self.frontier
        return frontier, self.computed_layers if self.saves else 0

    @property
    def failed(self) -> tuple[FailedBlocks, ...]:
        """Everything of this step that has failed so far."""
        with self._condition:
            return self._arrivals.failed()

    def is_done(self, layer: int) -> bool:
        """Has the engine said :meth:`layer_done`?"""
        return self._times.done[layer] is not None

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if kind is None else False)

    # -- the agent --------------------------------------------------------------------------------

    def use_direct(self) -> None:
        """Let its bytes move past the arena; the server hears of it later. Call before it is an open step."""
        self.announced = False
        self._save_patience = LATE_SAVE_S

    def fence(self, reason: str) -> None:
        """Cut the loads off: no batch starts any more, the running one is waited for, the rest has failed."""
        if self._fence_loads(reason):
            self._on_fenced(self, reason)

    def over(self, session: int) -> None:
        """Nothing of it is read any more."""
        self.reads.stop()
        self.trace.session = session

    def layer_seconds_on_device(self) -> float | None:
        """Compute time of one layer, from one layer's KV to the next one's, by the device's clock; None = not known.

        Not of a step that loads: its layers wait on the device, too. Call once all its saves have ended.
        """
        last = self.num_layers - 1
        if self.loads or last < 1 or self._times.done[0] is None or self._times.done[last] is None:
            return None
        seconds = self._device.seconds_between(self._times.done[0], self._times.done[last])
        return seconds / last if seconds else None

    def finish_trace(self) -> StepTrace:
        """Add the compute spans; once, when the step is over."""
        self.trace.spans.extend(self._times.compute_spans())
        return self.trace

    # -- how a wait goes ---------------------------------------------------------------------------

    def _wait(self, layer: int) -> LoadResult:
        began = self._times.asked_at[layer] = monotonic()
        self.on_wait()
        self._take_grants()
        expired = False
        with self._condition:
            # Not `fenced`: until a running batch has ended it is not known what has failed.
            while not (self._in_place(layer) or self.loads_stopped.is_set()):
                left = self.deadline - monotonic()
                if left <= 0:
                    expired = True
                    break
                # A lane that copies several batches in one call does not notify the condition for each.
                self._condition.wait(left if self._in_flight.copy(LOAD) is None else min(left, LANDING_POLL_S))
        if expired:
            self.fence(f"not in place at the step's deadline (layer {layer})")
        with self._condition:
            outcome = self._arrivals.outcome()
            if outcome.failed:
                # What began before a failure was known may still write those blocks; later batches leave them out.
                self._in_flight.wait_begun(LOAD)
                self._release_device()
        ended = self._times.waited_at[layer] = monotonic()
        self.trace.spans.append(Span("wait", layer, began, ended))
        return outcome

    def _has_landed(self, layer: int) -> bool:
        """Are the layer's bytes in place, though the lane, still copying more of the step, has not said so yet?"""
        copy = self._in_flight.copy(LOAD)
        if copy is None:
            return False
        # Without the lock. The lane comes in before it ends its batches: while it has not, none of them counts twice.
        # A failure is noted before the layer is sealed, so it is looked for after the seal was seen.
        in_place = self._arrivals.in_place(layer, copy.landed(layer)) and self._in_flight.copy(LOAD) is copy
        return in_place and not self._arrivals.troubled

    def _take_grants(self) -> None:
        if self.loads and self.residents is None and not self._arrivals.all_granted():
            self._pump()

    def _last_layers(self) -> frozenset[int]:
        """Return each group's last layer."""
        return frozenset({group: layer for layer, group in enumerate(self._groups)}.values())

    def _no_such(self, layer: object) -> SpecError:
        last = len(self._groups) - 1
        return SpecError(f"step {self.number}: no layer {layer!r}; the model's cached layers are 0 to {last}")


def _nothing() -> None:
    """For a step that no lane is to hear of."""


# A step with nothing to move, which must cost the engine nothing.


class NoStep:
    """A step with nothing to move: every call returns at once."""

    number = -1
    num_layers = 0
    failed: tuple[FailedBlocks, ...] = ()

    def wait_layer(self, layer: int) -> LoadResult:
        """Ready."""
        return READY

    def is_ready(self, layer: int) -> bool:
        """Always."""
        return True

    def want_all(self) -> None:
        """There is nothing to load."""

    def wait_all(self) -> LoadResult:
        """Ready."""
        return READY

    def await_layer(self, layer: int) -> LoadResult:
        """Ready."""
        return READY

    def await_all(self) -> LoadResult:
        """Ready."""
        return READY

    def order(self, layer: int) -> None:
        """Nothing was copied."""

    def wait_loaded(self, timeout_s: float) -> bool:
        """There is nothing to load."""
        return True

    def begin_loads(self, timeout_s: float) -> bool:
        """There is nothing to load."""
        return True

    def layer_done(self, layer: int, event: object = None) -> None:
        """Nothing waits for it."""

    def close(self, ok: bool | None = None) -> None:
        """Nothing is open."""

    def __enter__(self) -> NoStep:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None


NO_STEP = NoStep()
