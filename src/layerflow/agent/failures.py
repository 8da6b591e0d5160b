"""Which blocks of a step's loads hold no valid bytes. Not thread-safe: the step's lock guards it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from layerflow.agent.outline import Numbered, OutlinePart
from layerflow.agent.values import FailedBlocks
from layerflow.errors import SessionError
from layerflow.wire.messages import Batch


class LoadFailures:
    """Failed blocks by load part, as block numbers (positions in the request's table).

    :param parts: the step's load parts.
    """

    def __init__(self, parts: Sequence[OutlinePart]) -> None:
        self._parts = parts
        self._numbered: dict[int, Numbered] = {}
        self._dead: dict[int, np.ndarray] = {}
        self._failed: dict[int, tuple[set[int], str]] = {}

    def __bool__(self) -> bool:
        return bool(self._failed)

    def number(self, numbered: dict[int, Numbered]) -> None:
        """The plan is there: blocks have numbers, and those of objects that are gone have failed."""
        self._numbered = numbered
        self._dead = {group: np.zeros(len(column.numbers), dtype=bool) for group, column in numbered.items()}
        for position, part in enumerate(self._parts):
            column = numbered.get(part.group)
            there = column.numbers[column.part == position] if column is not None else np.empty(0, np.int64)
            if len(there) < sum(len(piece.blocks) for piece in part.pieces):
                self._fail(position, _numbers(part) - set(there.tolist()), "no longer in the pool")

    def fail_all(self, reason: str) -> None:
        """Nothing arrived."""
        for position, part in enumerate(self._parts):
            self._fail(position, _numbers(part), reason)

    def fail_range(self, group: int, lo: int, hi: int, reason: str) -> None:
        """Blocks `lo` to `hi` of the group's numbering.

        :raises SessionError: the group has no numbered loads.
        """
        column = self._numbered.get(group)
        if column is None:
            raise SessionError(f"a failure in group {group}, which has no planned loads in this step")
        self._fail_chosen(group, column, np.arange(lo, hi), reason)

    def fail_missing(self, group: int, layers: Iterable[Sequence[Batch]], block_bytes: int, reason: str) -> None:
        """Every block of the group that did not arrive in full in every one of some layers.

        :param layers: for each layer that is not in place: the batches of it that arrived.
        :param block_bytes: bytes of one block in one layer, all planes.
        """
        column = self._numbered.get(group)
        if column is None:
            return
        missing = np.zeros(len(column.numbers), dtype=bool)
        for batches in layers:
            arrived = np.zeros(len(missing), dtype=np.int64)
            for batch in batches:
                arrived[batch.lo : batch.hi] += batch.byte_hi - batch.byte_lo if batch.byte_hi else block_bytes
            missing |= arrived < block_bytes
        self._fail_chosen(group, column, np.flatnonzero(missing), reason)

    def live(self, group: int, lo: int, hi: int) -> list[tuple[int, int]]:
        """The ranges of a group's blocks `lo` to `hi` that have not failed."""
        dead = self._dead[group][lo:hi]
        if not dead.any():
            return [(lo, hi)]
        edges = np.flatnonzero(np.diff(np.concatenate(([True], dead, [True])).astype(np.int8))) + lo
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def blocks(self, but: set[str]) -> tuple[FailedBlocks, ...]:
        """What has failed so far, leaving out the requests in `but`."""
        return tuple(
            FailedBlocks(part.request, part.group, tuple(sorted(numbers)), reason)
            for part, (numbers, reason) in ((self._parts[at], self._failed[at]) for at in sorted(self._failed))
            if part.request not in but
        )

    def _fail_chosen(self, group: int, column: Numbered, chosen: np.ndarray, reason: str) -> None:
        self._dead[group][chosen] = True
        parts = column.part[chosen]
        for position in np.unique(parts).tolist():
            self._fail(position, set(column.numbers[chosen[parts == position]].tolist()), reason)

    def _fail(self, position: int, numbers: set[int], reason: str) -> None:
        if numbers:
            self._failed.setdefault(position, (set(), reason))[0].update(numbers)


def _numbers(part: OutlinePart) -> set[int]:
    return {number for piece in part.pieces for number in piece.blocks}
