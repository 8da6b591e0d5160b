"""Loads of steps that are over, whose copies the device may not have ended."""

from __future__ import annotations

from collections.abc import Collection

from layerflow.agent import FailedBlocks, LoadResult, NoStep, Step


class LandingLoads:
    """What a step's loads turn out to be once the device has ended them; on the cpu that is when they are waited for.

    On a device a wait ends when the copy is enqueued, with an event that the computing stream waits for. A load that
    fails behind that is known once the event is done: until then it is not known whether what the step computed is
    right, and nobody is told that the step has run well.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[Step]] = {}
        self._told: dict[int, set[tuple[str, int, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def opened(self, plan: int, step: Step | NoStep) -> None:
        """A step of this plan loads.

        :param plan: its number.
        """
        if isinstance(step, Step) and step.loads:
            self._steps.setdefault(plan, []).append(step)

    def told(self, step: Step, outcome: LoadResult) -> None:
        """vLLM hears of these failures."""
        self._told.setdefault(step.number, set()).update(_blocks(outcome.failed))

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
                known = self._told.pop(step.number, set())
                left = [each for each in map(lambda one: _but(one, known), step.failed) if each.blocks]
                if left:
                    late.append((step, LoadResult(tuple(left))))
        return late


def _blocks(failed: Collection[FailedBlocks]) -> set[tuple[str, int, int]]:
    return {(each.request, each.group, block) for each in failed for block in each.blocks}


def _but(failed: FailedBlocks, known: set[tuple[str, int, int]]) -> FailedBlocks:
    left = tuple(block for block in failed.blocks if (failed.request, failed.group, block) not in known)
    return FailedBlocks(failed.request, failed.group, left, failed.reason)
