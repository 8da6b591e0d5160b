"""Which steps' saves may be published: those whose forward pass surely computed on loaded bytes that had arrived.

A load of the running step can fail after vLLM has scheduled the next step already (asynchronous scheduling), on another
rank (whose garbage reaches this rank's later layers through tensor parallelism), or in another connector of a
MultiConnector. In each case this worker computes and saves garbage without knowing. Only the scheduler learns of every
failure, with the step's output, and takes the computed tokens back before it plans again. So a plan that may compute on
garbage is *unsure*: workers hold its saves back until a later plan brings the scheduler's verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

LOST_AFTER = 64
"""Numbered plans: the output of one whose step ran so many plans before another has not come and never will."""

Verdict = tuple[int, bool]
"""A plan's number, and whether its saves may be published."""


class RanPlans:
    """Which unsure plans every rank has run; ranks tell it in any order, and one that fails in its step never does."""

    def __init__(self) -> None:
        self._ranks: Counter[int] = Counter()  #: by plan, while some rank has not told

    def told(self, ran: Mapping[int, int], *, of: int) -> set[int]:
        """Some ranks have run these plans; which of them every rank has.

        :param ran: by plan: how many ranks tell it.
        :param of: all ranks.
        """
        if not ran:  # nearly always
            return set()
        self._ranks.update(ran)
        every = {number for number in ran if self._ranks[number] >= of}
        lost = max(ran) - LOST_AFTER
        for number in [number for number in self._ranks if number in every or number < lost]:
            del self._ranks[number]
        return every


class Verdicts:
    """The scheduler's side; plans come in order, and so do the outputs of their steps."""

    def __init__(self) -> None:
        self._running: list[int] = []  #: plans that load in their step and whose output has not come
        self._unsure: list[int] = []  #: plans without a verdict
        self._untold: list[Verdict] = []

    def concerns(self, *, loads: bool, saves: bool) -> bool:
        """Is a plan unsure?

        :param loads: some connector loads in this plan's own step.
        :param saves: the plan saves something.
        """
        return loads or (saves and bool(self._running))

    def planned(self, number: int, *, loads: bool, saves: bool) -> None:
        """An unsure plan; parameters as of :meth:`concerns`."""
        if loads:
            self._running.append(number)
        if saves:
            self._unsure.append(number)

    def heard(self, ran: Collection[int], *, failed: bool) -> None:
        """The output of a step has come.

        :param ran: numbers of unsure plans that every rank has run by now. Far earlier ones that were not have failed.
        :param failed: a load of a running step has failed: everything planned until now may build on it.
        """
        lost = max(ran, default=0) - LOST_AFTER
        failed |= any(number < lost for number in self._running)
        self._running = [number for number in self._running if number not in ran and number >= lost]
        if failed:
            judged = self._unsure
        else:
            judged = [number for number in self._unsure if not self._running or number < self._running[0]]
        self._untold += [(number, not failed) for number in judged]
        self._unsure = self._unsure[len(judged) :]

    def take(self) -> tuple[Verdict, ...]:
        """Verdicts since the last call, for the next plan."""
        if not self._untold:  # nearly always
            return ()
        taken, self._untold = tuple(self._untold), []
        return taken
