"""Ending a step, from either side: its pass is over, its loads or saves are cut off, nothing more comes for it."""

from __future__ import annotations

from layerflow.agent.connection.link import Link
from layerflow.agent.costs import Measures
from layerflow.agent.direct import DirectLaneSwitch
from layerflow.agent.lanes.lanes import Lanes
from layerflow.agent.open_steps import OpenSteps
from layerflow.agent.step.step import Step
from layerflow.agent.values import AgentCounters
from layerflow.wire.messages import Closed, Fence


class StepEnds:
    """What steps tell when they end, and what ends them; on any thread.

    :ivar link: the server hears of it there.
    :ivar session: of the server that is attached; 0 = none is.
    """

    def __init__(
        self,
        open_steps: OpenSteps,
        link: Link,
        lanes: Lanes,
        bypass: DirectLaneSwitch,
        measures: Measures,
        counters: AgentCounters,
    ) -> None:
        self.link = link
        self.session = 0
        self._open_steps = open_steps
        self._lanes = lanes
        self._bypass = bypass
        self._measures = measures
        self._counters = counters

    def cut(self, step: Step, reason: str) -> None:
        """Nothing more comes for this step: fail its loads, give its saves up, let go of its blocks."""
        step.cancel_saves(reason)
        step.fence(reason)
        step.quiet()
        for request in {part.request for part in step.saves}:
            self._open_steps.save_failed(request, reason)
        self.finish(step)
        self._lanes.save.wake()

    def attend(self) -> None:
        """Take what the server has said, on this thread."""
        self.link.attend()

    def wake_loads(self) -> None:
        """The engine waits for a layer."""
        self._lanes.load.wake()

    def hurry(self, step: Step) -> None:
        """Somebody waits for the step's saves."""
        step.hurry()
        self._lanes.save.wake()

    def doubt_reads(self) -> None:
        """The engine may overwrite blocks from now on: saves that have read are not told yet."""
        self._lanes.doubtful.begin()

    def trust_reads(self) -> None:
        """The engine has said which blocks it has overwritten, and the steps that read these are spoilt."""
        self._lanes.doubtful.end()

    def reclaimed(self) -> None:
        """Saves were cut off: those that wait for their layer are reported now."""
        self._lanes.save.wake()

    def fenced(self, step: Step, reason: str) -> None:
        """The step's loads were cut off here."""
        self._counters.fenced_steps += 1
        self._lanes.load.wake()
        self._bypass.in_order([step], lambda: self._tell_fenced(step, reason))

    def closed(self, step: Step, ok: bool) -> None:
        """The forward pass ended."""
        if step.residents is not None:
            if not ok:
                step.fence("the forward pass did not finish")
            self.settle(step)
        self._bypass.in_order([step], lambda: self._tell_closed(step, ok))
        if step.saves:
            self._lanes.save.wake()

    def _tell_fenced(self, step: Step, reason: str) -> None:
        if step.announced:
            self.link.news.fenced.append(Fence(step.number, reason))
            self.link.ring()

    def _tell_closed(self, step: Step, ok: bool) -> None:
        if step.announced:
            self.link.news.closed.append(Closed(step.number, ok))
            self.link.ring()

    def finish(self, step: Step) -> None:
        """The step is over."""
        if self._open_steps.get(step.number) is not step:
            return
        step.over(self.session)
        self._bypass.over(step)
        self._open_steps.finish(step, self._measures.ended)
        self.link.ring()  # to measure it

    def settle(self, step: Step) -> None:
        """Nobody else says when a step without a server has ended."""
        if step.orphaned and step.closed and not step.loading:
            self.finish(step)
