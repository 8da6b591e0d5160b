"""Which engine blocks a step's saves have still to read, for engines that recycle blocks while saves are in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from layerflow.agent.descriptors import Numbered, PartDescriptor
from layerflow.ops.paged import Int64
from layerflow.wire.messages import Batch


class SaveReads:
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
        """These parts are stored or given up: no batch of them is left."""
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
