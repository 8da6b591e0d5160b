"""Ending a step, from either side, and the engine's blocks: what may still read or write them, and cutting it off."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import structlog

from layerflow.agent.costs import Measures
from layerflow.agent.direct import DirectLaneSwitch
from layerflow.agent.lanes.lanes import Lanes
from layerflow.agent.link import Link
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


# The engine's blocks: what may still read or write them, waiting for that, and cutting it off.


SPOILT = "the engine has overwritten blocks that were still to be read"

log = structlog.get_logger("layerflow.agent")


class EngineBlocks:
    """Called on the engine's threads; see the methods of :class:`layerflow.agent.Agent`."""

    def __init__(self, open_steps: OpenSteps, ends: StepEnds) -> None:
        self._open_steps = open_steps
        self._ends = ends

    def saving(self, request: str) -> bool:
        """May a save still read this request's blocks?"""
        return self._open_steps.busy(request) and any(step.reads.of(request) for step in self._open_steps.steps())

    def wait_idle(self, request: str, timeout_s: float) -> bool:
        """Wait until no transfer touches this request's blocks; False after `timeout_s`. Its saves leave at once."""
        for step in self._open_steps.steps():
            if step.saves and request in step.requests:
                self._ends.hurry(step)
        return self._open_steps.wait_idle(request, timeout_s)

    def release_saves(self, step: Step, *, sound: bool) -> None:
        """Publish the saves that are held back, or give them up."""
        if not sound:
            step.cancel_saves("the step may have computed on a load that failed")
        step.release_saves()
        self._ends.reclaimed()

    def reclaim(self, blocks: Sequence[np.ndarray], timeout_s: float) -> int:
        """Wait for the saves that read any of these, or cut them off; of how many steps they were cut.

        :param blocks: per group.
        """
        until, cut = time.monotonic() + timeout_s, 0
        for step in self._open_steps.steps():
            if not step.reads.any_of(blocks):
                continue
            # The caller itself ends a step that computes, or whose saves are held: waiting for it here is in vain.
            drains = step.closed and not (step.saves_cancelled or step.saves_held)
            if drains:
                self._ends.hurry(step)
            if not (drains and step.reads.wait(blocks, until)):
                cut += step.cut_saves("its blocks were reclaimed")
                self._ends.reclaimed()
        if cut:
            log.info("saves_cut", steps=cut, reason="the engine took their blocks back")
        return cut

    def overwritten(self, blocks: Sequence[np.ndarray]) -> int:
        """Give the saves up that may have read any of these after they were overwritten; of how many steps.

        :param blocks: per group.
        """
        cut = 0
        for step in self._open_steps.steps():
            if step.reads.any_of(blocks):
                step.saves_spoilt = SPOILT
                step.cut_saves(SPOILT)
                cut += 1
        self._ends.trust_reads()
        if cut:
            self._ends.reclaimed()
            log.info("saves_cut", steps=cut, reason=SPOILT)
        return cut

    def revoke(self, reason: str) -> int:
        """Cut all open steps off; how many there were."""
        steps = self._open_steps.steps()
        for step in steps:
            step.saves_spoilt = step.saves_spoilt or reason  # also those that have been read, and are not told yet
            step.cut_saves(reason)
            step.fence(reason)
        if steps:
            self._ends.reclaimed()
        return len(steps)
