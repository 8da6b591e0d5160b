"""The engine's blocks: what may still read or write them, waiting for that, and cutting it off."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import structlog

from layerflow.agent.ending import StepEnds
from layerflow.agent.open_steps import OpenSteps
from layerflow.agent.step.step import Step

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
