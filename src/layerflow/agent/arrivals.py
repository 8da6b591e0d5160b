"""Which layers of a step's loads are in place, and what is said of those that are not."""

from __future__ import annotations

from collections.abc import Sequence

from layerflow.agent.failures import LoadFailures
from layerflow.agent.outline import Numbered, OutlinePart
from layerflow.agent.values import ABORTED, READY, FailedBlocks, Outcome
from layerflow.device.base import DeviceEvent
from layerflow.wire.messages import Batch


class Arrivals:
    """Layers fill up batch by batch. Not thread-safe: the step's lock guards it, but for reading `ready`.

    :param loads: the step's load parts.
    :param groups: for every layer of the model: its group.
    :param block_bytes: per group: bytes of one block in one layer, all planes.

    :ivar ready: by layer: nothing to wait for, and nothing to tell. The same list all the time.
    :ivar fenced: why the loads are cut off, or about to be; "" = they are not.
    :ivar failures: what has failed. A group's batches and failures come after :meth:`number`.
    """

    def __init__(self, loads: Sequence[OutlinePart], groups: Sequence[int], block_bytes: Sequence[int]) -> None:
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
        self._outcome: Outcome | None = None

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

    def outcome(self) -> Outcome:
        """What a wait tells now."""
        self._outcome = self._outcome or self._conclude()
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
        self._settle(layer)

    def end(self, batch: Batch, failure: str, event: DeviceEvent | None) -> None:
        """The lane is done with a batch: its bytes are in place, or behind `event`, unless it failed."""
        if failure:
            self.fail(batch, failure)
        else:
            self._moved.setdefault(batch.layer, []).append(batch)
        if event is not None:
            self._enqueued.setdefault(batch.layer, []).append(event)
        self._outstanding[batch.layer] -= 1
        self._settle(batch.layer)

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

    def abort(self, request: str) -> None:
        """The engine gave the request up: its failures are told to nobody."""
        self._aborted.add(request)
        self._outcome = None

    def _conclude(self) -> Outcome:
        failed = self.failed()
        if failed:
            return Outcome(failed)
        if self._aborted and self._aborted.issuperset(self._requests):
            return ABORTED
        return READY

    def _settle(self, layer: int) -> None:
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
