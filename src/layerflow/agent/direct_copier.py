"""One batch past the arena: a single call of the pool's client, which returns when the bytes are in place."""

from __future__ import annotations

import time

from layerflow.agent.direct_pool import DirectPool
from layerflow.agent.step import LOAD, SAVE, Step
from layerflow.agent.watchdog import Watchdog
from layerflow.device.base import DeviceEvent
from layerflow.errors import DeadlineExceeded
from layerflow.ops.extents import Extents
from layerflow.wire.messages import Batch

LANES = {LOAD: "load", SAVE: "save"}


class DirectCopier:
    """A :class:`~layerflow.ops.copier.Copier` for one batch of one step.

    Waits on the calling thread for what the copy comes after. The call itself cannot be called back: see
    :mod:`layerflow.agent.watchdog`.
    """

    def __init__(self, pool: DirectPool, watchdog: Watchdog, step: Step, batch: Batch) -> None:
        self._pool = pool
        self._watchdog = watchdog
        self._step = step
        self._layer = batch.layer

    def load(self, extents: Extents, after: DeviceEvent | None = None) -> None:
        """Pool to engine memory.

        :raises DeadlineExceeded: the step's deadline has passed; nothing was copied.
        :raises PoolError: the bytes are not known to be those of their objects.
        """
        step = self._step
        assert step.cargo is not None
        if after is not None:
            after.synchronize()
        if step.fenced or time.monotonic() >= step.deadline:
            raise DeadlineExceeded(f"step {step.number}: a load of layer {self._layer} came too late to be begun")
        with self._watchdog.under_way(LANES[LOAD], step.number, self._layer):
            self._pool.load(extents, step.cargo.holding(extents.arena))

    def save(self, extents: Extents, after: DeviceEvent | None = None) -> None:
        """Engine memory to the pool.

        :raises PoolError: it is not known to be where it belongs; the object is not published then.
        """
        step = self._step
        assert step.cargo is not None
        if after is not None:
            after.synchronize()
        with self._watchdog.under_way(LANES[SAVE], step.number, self._layer):
            self._pool.save(extents, step.cargo.holding(extents.arena))

    def drain(self) -> None:
        """Nothing is ever enqueued."""
