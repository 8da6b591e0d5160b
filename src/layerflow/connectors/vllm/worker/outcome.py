"""What became of a worker's transfers, as others are told: failed loads, stored chunks, copies that end late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import structlog

from layerflow.agent import FailedBlocks, LoadResult, NoStep, Step
from layerflow.agent.descriptors import PartDescriptor
from layerflow.connectors.vllm.plan import UnkeptLoad

log = structlog.get_logger("layerflow.vllm")


class FailedLoads:
    """Since each was last taken.

    With one cache group vLLM is told blocks, unless steps overlap and its scheduler can take back what they compute on
    a failed load. Else it is told the requests whose background loads have failed, and :mod:`..scheduler.recovery`
    those whose step's loads have: with several groups block ids do not tell which request is meant.

    :ivar restarts: a background load that fails is told as a whole with one group too: its request starts over.
    :ivar shares: requests of which a load has failed, with the share of its blocks that has.
    """

    def __init__(self, *, several_groups: bool, taken_back: bool) -> None:
        self._several_groups = several_groups
        self._taken_back = taken_back
        self._blocks: set[int] = set()
        self._waiting: set[str] = set()
        self._lost: set[str] = set()
        self.restarts = False
        self.shares: dict[str, float] = {}

    @property
    def in_step(self) -> bool:
        """Has a load of a running step failed, that was not told yet?"""
        return bool(self._blocks or self._lost)

    def add(self, parts: Iterable[PartDescriptor], outcome: LoadResult, *, background: bool) -> None:
        """Loads that ended so.

        :param parts: all of them, those that are well too.
        :param background: its request waits for it, and computes nothing meanwhile.
        """
        block_ids = {
            (part.request, part.group, number): int(part.table[number])
            for part in parts
            for piece in part.pieces
            for number in piece.blocks
        }
        blocks_of = Counter(request for request, _, _ in block_ids)
        for failed in outcome.failed:
            log.warning("load_failed", request=failed.request, blocks=len(failed.blocks), reason=failed.reason)
            share = len(failed.blocks) / blocks_of[failed.request]
            self.shares[failed.request] = max(share, self.shares.get(failed.request, 0.0))
            if self._tells_blocks(background=background):
                self._blocks.update(block_ids[failed.request, failed.group, block] for block in failed.blocks)
            elif background:
                self._waiting.add(failed.request)
            else:
                self._lost.add(failed.request)

    def unkept(self, request: str, load: UnkeptLoad) -> None:
        """A load that vLLM was promised, and that could not be planned."""
        log.warning("load_failed", request=request, blocks=len(load.blocks), reason="it could not be planned")
        self.shares[request] = 1.0
        if self._tells_blocks(background=load.background):
            self._blocks.update(load.blocks)
        else:
            (self._waiting if load.background else self._lost).add(request)

    def _tells_blocks(self, *, background: bool) -> bool:
        return not (self._several_groups or (self.restarts if background else self._taken_back))

    def take_blocks(self) -> set[int]:
        """Block ids that hold no valid bytes."""
        taken, self._blocks = self._blocks, set()
        return taken

    def take_waiting(self) -> set[str]:
        """Requests whose background loads have failed."""
        taken, self._waiting = self._waiting, set()
        return taken

    def take_lost(self) -> frozenset[str]:
        """Requests whose loads in the step have failed."""
        taken, self._lost = frozenset(self._lost), set()
        return taken

    def take_shares(self) -> dict[str, float]:
        """See :attr:`shares`."""
        taken, self.shares = self.shares, {}
        return taken


def all_failed(parts: Iterable[PartDescriptor], reason: str) -> LoadResult:
    """Nothing of these loads is of use."""
    lost: dict[tuple[str, int], list[int]] = {}
    for part in parts:
        lost.setdefault((part.request, part.group), []).extend(block for piece in part.pieces for block in piece.blocks)
    return LoadResult(tuple(FailedBlocks(*of, tuple(blocks), reason) for of, blocks in lost.items()))


# Loads of steps that are over, whose copies the device may not have ended.


class LandingLoads:
    """What a step's loads turn out to be once the device has ended them; on the cpu that is when they are waited for.

    On a device a wait ends when the copy is enqueued, with an event that the computing stream waits for. A load that
    fails behind that is known once the event is done: until then it is not known whether what the step computed is
    right, and nobody is told that the step has run well.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[Step]] = {}
        self._reported: dict[int, set[tuple[str, int, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def opened(self, plan: int, step: Step | NoStep) -> None:
        """A step of this plan loads.

        :param plan: its number.
        """
        if isinstance(step, Step) and step.loads:
            self._steps.setdefault(plan, []).append(step)

    def reported(self, step: Step, outcome: LoadResult) -> None:
        """vLLM hears of these failures."""
        self._reported.setdefault(step.number, set()).update(_blocks(outcome.failed))

    def waits(self, plan: int) -> bool:
        """May a load of this plan still turn out to have failed?"""
        return plan in self._steps

    def take(self) -> list[tuple[Step, LoadResult]]:
        """Failures that nobody was told of, of plans whose loads have all ended since the last call."""
        late = []
        for plan, steps in list(self._steps.items()):
            if not all(step.closed and step.all_landed for step in steps):
                continue
            del self._steps[plan]
            for step in steps:
                known = self._reported.pop(step.number, set())
                left = [each for each in map(lambda one: _but(one, known), step.failed) if each.blocks]
                if left:
                    late.append((step, LoadResult(tuple(left))))
        return late


def _blocks(failed: Collection[FailedBlocks]) -> set[tuple[str, int, int]]:
    return {(each.request, each.group, block) for each in failed for block in each.blocks}


def _but(failed: FailedBlocks, known: set[tuple[str, int, int]]) -> FailedBlocks:
    left = tuple(block for block in failed.blocks if (failed.request, failed.group, block) not in known)
    return FailedBlocks(failed.request, failed.group, left, failed.reason)
