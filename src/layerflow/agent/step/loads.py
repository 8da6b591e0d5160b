"""What has come of a step's loads, what will not, and whether their objects are still where the hits found them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from layerflow.agent.descriptors import Numbered, PartDescriptor
from layerflow.agent.values import ABORTED, READY, FailedBlocks, LoadResult
from layerflow.device.base import DeviceEvent
from layerflow.errors import SessionError
from layerflow.objects import GENERATION_AT
from layerflow.ops.base import MappedArena, acquire
from layerflow.ops.paged import Int64
from layerflow.wire.messages import Batch, LostBlocks

ABANDONED = "aborted"


class LoadFailures:
    """Failed blocks by load part, as block numbers (positions in the request's table).

    :param parts: the step's load parts.
    """

    def __init__(self, parts: Sequence[PartDescriptor]) -> None:
        self._parts = parts
        self._numbered: dict[int, Numbered] = {}
        self._failed_at: dict[int, np.ndarray] = {}
        self._failed: dict[int, tuple[set[int], str]] = {}

    def __bool__(self) -> bool:
        return bool(self._failed)

    def number(self, numbered: dict[int, Numbered]) -> None:
        """The plan is there: blocks have numbers, and those of objects that are gone have failed."""
        self._numbered = numbered
        self._failed_at = {group: np.zeros(len(column.numbers), dtype=bool) for group, column in numbered.items()}
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

    def drop(self, request: str) -> None:
        """The request's blocks are written no more."""
        for position, part in enumerate(self._parts):
            column = self._numbered.get(part.group)
            if part.request == request and column is not None:
                self._fail_chosen(part.group, column, np.flatnonzero(column.part == position), ABANDONED)

    def live(self, group: int, lo: int, hi: int) -> list[tuple[int, int]]:
        """The ranges of a group's blocks `lo` to `hi` that have not failed."""
        failed = self._failed_at[group][lo:hi]
        if not failed.any():
            return [(lo, hi)]
        edges = np.flatnonzero(np.diff(np.concatenate(([True], failed, [True])).astype(np.int8))) + lo
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def blocks(self, but: set[str]) -> tuple[FailedBlocks, ...]:
        """What has failed so far, leaving out the requests in `but`."""
        return tuple(
            FailedBlocks(part.request, part.group, tuple(sorted(numbers)), reason)
            for part, (numbers, reason) in ((self._parts[at], self._failed[at]) for at in sorted(self._failed))
            if part.request not in but
        )

    def _fail_chosen(self, group: int, column: Numbered, chosen: np.ndarray, reason: str) -> None:
        self._failed_at[group][chosen] = True
        parts = column.part[chosen]
        for position in np.unique(parts).tolist():
            self._fail(position, set(column.numbers[chosen[parts == position]].tolist()), reason)

    def _fail(self, position: int, numbers: set[int], reason: str) -> None:
        if numbers:
            self._failed.setdefault(position, (set(), reason))[0].update(numbers)


def _numbers(part: PartDescriptor) -> set[int]:
    return {number for piece in part.pieces for number in piece.blocks}


class LoadState:
    """Layers fill up batch by batch. Not thread-safe: the step's lock guards it, but for reading `ready`.

    :param loads: the step's load parts.
    :param groups: for every layer of the model: its group.
    :param block_bytes: per group: bytes of one block in one layer, all planes.

    :ivar ready: by layer: nothing to wait for, and nothing to tell. The same list all the time.
    :ivar fenced: why the loads are cut off, or about to be; "" = they are not.
    :ivar failures: what has failed. A group's batches and failures come after :meth:`number`.
    """

    def __init__(self, loads: Sequence[PartDescriptor], groups: Sequence[int], block_bytes: Sequence[int]) -> None:
        self.fenced = ""
        self.failures = LoadFailures(loads)
        self._requests = {part.request for part in loads}
        self._loading = {part.group for part in loads}
        self._groups = groups
        self._block_bytes = block_bytes
        self.ready = [group not in self._loading for group in groups]
        self._sealed = list(self.ready)
        self._outstanding = [0] * len(groups)
        self._enqueued: dict[int, list[DeviceEvent]] = {}
        self._moved: dict[int, list[Batch]] = {}
        self._numbered = False
        self._aborted: set[str] = set()
        self._outcome: LoadResult | None = None

    # -- asked ------------------------------------------------------------------------------------

    def in_place(self, layer: int, landed: int = 0) -> bool:
        """Has every batch of the layer ended, well or not, and does no further one come?

        :param landed: batches whose bytes are in place although their end was not told yet.
        """
        return self._sealed[layer] and self._outstanding[layer] == landed

    @property
    def troubled(self) -> bool:
        """Is there anything to tell but that bytes are in place?"""
        return bool(self.fenced or self.failures or self._aborted)

    def all_granted(self) -> bool:
        """Does no further batch come, for any layer?"""
        return all(self._sealed)

    def all_in_place(self) -> bool:
        """The same of every layer."""
        return all(map(self.in_place, range(len(self._groups))))

    def enqueued(self, layer: int) -> Sequence[DeviceEvent]:
        """Device events behind the layer's copies, which a stream that reads the layer must wait for."""
        return self._enqueued.get(layer, ())

    def failed(self) -> tuple[FailedBlocks, ...]:
        """Everything that has failed so far, but of aborted requests."""
        return self.failures.blocks(but=self._aborted)

    def outcome(self) -> LoadResult:
        """What a wait tells now."""
        self._outcome = self._outcome or self._result()
        return self._outcome

    # -- told -------------------------------------------------------------------------------------

    def number(self, loads: dict[int, Numbered]) -> None:
        """The plan is there: blocks have numbers, and groups without any have nothing to wait for."""
        self._numbered = bool(loads)
        self.failures.number(loads)
        self._failed_more()
        for layer, group in enumerate(self._groups):
            if group not in loads and not self._sealed[layer]:
                self.seal(layer)

    def grant(self, batch: Batch) -> None:
        """A batch is on its way to the lane."""
        self._outstanding[batch.layer] += 1
        self._sealed[batch.layer] |= batch.seals

    def seal(self, layer: int) -> None:
        """No further batch comes for the layer."""
        self._sealed[layer] = True
        self._finish_layer(layer)

    def end(self, batch: Batch, failure: str, event: DeviceEvent | None) -> None:
        """The lane is done with a batch: its bytes are in place, or behind `event`, unless it failed."""
        if failure:
            self.fail(batch, failure)
        else:
            self._moved.setdefault(batch.layer, []).append(batch)
        if event is not None:
            self._enqueued.setdefault(batch.layer, []).append(event)
        self._outstanding[batch.layer] -= 1
        self._finish_layer(batch.layer)

    def fail(self, batch: Batch, reason: str) -> None:
        """The batch's blocks hold no valid bytes."""
        self.fail_range(self._groups[batch.layer], batch.lo, batch.hi, reason)

    def fail_range(self, group: int, lo: int, hi: int, reason: str) -> None:
        """Blocks `lo` to `hi` of the group's numbering will not arrive."""
        self.failures.fail_range(group, lo, hi, reason)
        self._failed_more()

    def fail_unfinished(self, reason: str) -> None:
        """Nothing arrives any more: every block that is not whole in all its layers has failed."""
        if self._numbered:
            for group, whole in enumerate(self._block_bytes):
                layers = [at for at, own in enumerate(self._groups) if own == group and not self.in_place(at)]
                self.failures.fail_missing(group, [self._moved.get(at, ()) for at in layers], whole, reason)
        else:
            self.failures.fail_all(reason)
        self._failed_more()

    def abort(self, request: str, *, drop: bool) -> None:
        """The engine gave the request up: its failures are not reported.

        :param drop: nothing but this can keep further batches from its blocks.
        """
        self._aborted.add(request)
        self._outcome = None
        if drop:
            self.failures.drop(request)
            self._failed_more()

    def _result(self) -> LoadResult:
        failed = self.failed()
        if failed:
            return LoadResult(failed)
        if self._aborted and self._aborted.issuperset(self._requests):
            return ABORTED
        return READY

    def _finish_layer(self, layer: int) -> None:
        # Layers with device events keep taking the slow path: the caller's stream must wait for those.
        if self.in_place(layer) and not self.failures and not self.fenced and layer not in self._enqueued:
            self.ready[layer] = True

    def _failed_more(self) -> None:
        """From now on every wait has something to tell."""
        self._outcome = None
        if self.failures:
            for layer, group in enumerate(self._groups):
                if group in self._loading:
                    self.ready[layer] = False


# The objects of a step's loads, whose places in the arena its hits have brought: are they still there?


REPLACED = "replaced: another object has taken its place in the arena"


class ObjectGuard:
    """Any thread may ask.

    :param arena: that holds them, as it is mapped here.
    :param places: uint64, shape ``(n, 2)``: offset and generation of each.

    :ivar generation_words: int64, shape ``(n,)`` each: offsets of the words that say that an object is still there,
        and what they must say.
    """

    def __init__(self, arena: MappedArena, places: np.ndarray) -> None:
        offsets, generations = np.ascontiguousarray(places.T).view(np.int64)
        self.generation_words = offsets + GENERATION_AT, generations
        self._memory = arena.array.view(np.int64)
        self._indices = self.generation_words[0] >> 3
        self._offsets = offsets
        self._numbered: Mapping[int, Numbered] = {}
        self._known = np.zeros(len(offsets), dtype=bool)
        self._lost: list[LostBlocks] = []
        self._lock = threading.Lock()

    @property
    def there(self) -> bool:
        """Are all of them?"""
        return bool((self._memory[self._indices] == self.generation_words[1]).all())

    def number(self, numbered: Mapping[int, Numbered]) -> None:
        """Their blocks."""
        self._numbered = numbered

    def replaced(self) -> list[tuple[int, int, int]]:
        """Blocks of those that are not any more, since the last call: group, first block, and the one behind the last.

        What was read before the call of objects that are not told was theirs.
        """
        acquire()
        if self.there:
            return []
        with self._lock:
            gone = (self._memory[self._indices] != self.generation_words[1]) & ~self._known
            self._known |= gone
            found = [
                (group, lo, hi)
                for group, column in self._numbered.items()
                for lo, hi in _ranges(np.isin(column.object_offsets, self._offsets[gone]))
            ]
            self._lost += [LostBlocks(*where, REPLACED) for where in found]
            return found

    def lost(self) -> list[LostBlocks]:
        """All that was told so far."""
        with self._lock:
            return list(self._lost)


def _ranges(chosen: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    columns: Int64 = edges.reshape(-1, 2)
    return [(int(lo), int(hi)) for lo, hi in columns]
