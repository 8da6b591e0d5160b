"""Loads whose places the agent knows from the hit: cut into batches here, as the load lane gets to them.

The server grants nothing of them. Its caps hold all the same: a batch carries no more than one may, nothing moves
further ahead of the engine than ``prefetch_layers``, and what is on its way is within the worker's window.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from layerflow.agent.lanes.task import CopyCaps, CopyTask, EmulatedLink
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import CANCELLED, LOAD
from layerflow.ops.base import Copier
from layerflow.wire.messages import Batch, LostBlocks


class LayerShape(NamedTuple):
    """A layer: its group, and the bytes of each of its blocks."""

    layer: int
    group: int
    block_bytes: int


class PlannedCaps(NamedTuple):
    """What of planned loads may be on its way.

    :param window: bytes, all steps together.
    :param depth: layers past the one whose attention has begun; 0 = any.
    """

    window: int = 0
    depth: int = 0


class PlannedLoads:
    """One step's. The load lane cuts, any thread ends.

    :param layers: with something to load, in the order in which they are computed.
    :param blocks: how many, by group.
    :param copier: from the arena that holds the objects.
    :param over: told once nothing of the loads moves any more.

    :ivar moved: bytes in place.
    :ivar lost: what has failed but by being cut off.
    """

    def __init__(
        self,
        step: Step,
        layers: Sequence[LayerShape],
        blocks: Mapping[int, int],
        copier: Copier,
        link: EmulatedLink,
        over: Callable[[PlannedLoads], None],
    ) -> None:
        self.step = step
        self.moved = 0
        self.lost: list[LostBlocks] = []
        self._layers = layers
        self._blocks = blocks
        self._copier = copier
        self._link = link
        self._over = over
        self._number = self._index = self._at = self._byte_at = 0
        self._flying = 0
        self._ended = False
        self._lock = threading.Lock()

    @property
    def distance(self) -> tuple[int, float]:
        """The order of steps: how many layers ahead of the engine the next batch is, then the deadline."""
        return self.layer - self.step.frontier, self.step.deadline

    @property
    def layer(self) -> int:
        """Of the next batch."""
        return self._layers[self._index].layer

    @property
    def block_bytes(self) -> int:
        """Of one block of the next batch's layer."""
        return self._layers[self._index].block_bytes

    def cut(self, caps: CopyCaps, room: int, upto: int) -> list[CopyTask]:
        """The next batches; to be called while :attr:`left`.

        :param room: bytes for them, beyond which there is none but the first.
        :param upto: of layers up to this one.
        """
        layers, number = self._layers, self.step.number
        batches: list[Batch] = []
        while self._index < len(layers):
            layer, group, block_bytes = layers[self._index]
            lo, hi, byte_lo, byte_hi = self._extent(caps)
            nbytes = byte_hi - byte_lo if byte_hi else (hi - lo) * block_bytes
            if layer > upto or (batches and nbytes > room):
                break
            room -= nbytes
            if byte_hi and byte_hi < block_bytes:
                self._byte_at = byte_hi
            else:
                self._byte_at, self._at = 0, hi
            seals = self._at == self._blocks[group]
            if seals:
                self._at, self._index = 0, self._index + 1
            self._number += 1
            batches.append(Batch(number, self._number, LOAD, layer, lo, hi, byte_lo, byte_hi, nbytes, -1, seals))
        with self._lock:
            self._flying += len(batches)
        self.step.grant(batches)
        step, copier, link, ended = self.step, self._copier, self._link, self.ended
        return [CopyTask(batch, step, copier, link, None, ended=ended) for batch in batches]

    def next_bytes(self, caps: CopyCaps) -> int:
        """Of the next batch."""
        lo, hi, byte_lo, byte_hi = self._extent(caps)
        return byte_hi - byte_lo if byte_hi else (hi - lo) * self._layers[self._index].block_bytes

    @property
    def fresh(self) -> bool:
        """Is nothing cut yet?"""
        return not self._number

    @property
    def left(self) -> bool:
        """Is there a batch to cut? Of what was cut off, none."""
        return self._index < len(self._layers) and not self.step.fenced

    def settle(self) -> None:
        """Say that it is over, where it is: nothing is left and nothing moves. Once."""
        with self._lock:
            if self._ended or self._flying or self.left:
                return
            self._ended = True
        self._over(self)

    def ended(self, task: CopyTask, failure: str) -> None:
        """A batch has ended; "" = its bytes are in place."""
        batch = task.batch
        with self._lock:
            self._flying -= 1
            if not failure:
                self.moved += batch.nbytes
            elif not failure.startswith(CANCELLED):
                self.lost.append(LostBlocks(self.step.group_of(batch.layer), batch.lo, batch.hi, failure))
        self.settle()

    def _extent(self, caps: CopyCaps) -> tuple[int, int, int, int]:
        _, group, size = self._layers[self._index]
        at, blocks = self._at, self._blocks[group]
        if self._byte_at or size > caps.nbytes:
            return at, at + 1, self._byte_at, min(size, self._byte_at + caps.nbytes)
        return at, at + min(blocks - at, caps.blocks, caps.nbytes // size), 0, 0


@dataclass(slots=True)
class PlannedQueue:
    """All steps with planned loads that have something left to cut; the load lane's alone, but for :meth:`landed`.

    :ivar caps: of what is on its way.
    """

    caps: PlannedCaps = field(default_factory=PlannedCaps)
    _steps: list[PlannedLoads] = field(default_factory=list)
    _flying: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, loads: PlannedLoads) -> None:
        """A step was opened."""
        self._steps.append(loads)

    def landed(self, nbytes: int) -> bool:
        """A batch has ended, on whatever thread; does anything wait for its room?"""
        with self._lock:
            self._flying -= nbytes
        return bool(self._steps)

    def take(self, caps: CopyCaps) -> list[CopyTask]:
        """What may move now: the nearest layer first, as far as the window goes.

        :param caps: of one call.
        """
        window, depth = self.caps
        most = max(1, min(caps.nbytes, window))
        taken: list[CopyTask] = []
        while self._steps:
            for loads in [each for each in self._steps if not each.left]:
                self._steps.remove(loads)
                loads.settle()
            if not self._steps:
                break
            alone = len(self._steps) == 1
            first = self._steps[0] if alone else min(self._steps, key=lambda each: each.distance)
            # A device is given the next batches before the first has landed. A block is not cut for that.
            caps = CopyCaps(caps.blocks, min(most, max(window // FLYING, first.block_bytes)))
            with self._lock:
                room = window - self._flying
                if self._flying and first.next_bytes(caps) > room:
                    break
                # Where others wait too, it is their turn again behind this layer; and the first bytes leave at once.
                near, fresh = first.layer, first.fresh
                upto = sys.maxsize if alone and not fresh else near + FIRST_LAYERS - 1 if alone else near
                tasks = first.cut(caps, room, min(upto, first.step.frontier + depth) if depth else upto)
                self._flying += sum([task.batch.nbytes for task in tasks])
            taken += tasks
            if fresh or not tasks:  # what is nearest may not move yet, nor then may anything else
                break
        return taken


FLYING = 4
"""Batches that a window has room for at least, where blocks are that small."""

FIRST_LAYERS = 2
"""Of a step. They leave before the others are cut."""
