"""The decode engine's end of its hand-offs: followed as they are saved, loaded into its own pages, released."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import structlog

from layerflow.agent.step.step import NoStep, Step
from layerflow.agent.values import Follow, StepRequest
from layerflow.connectors.sglang.batch_saves import DRAIN_S
from layerflow.connectors.sglang.layout import PoolLayout
from layerflow.connectors.sglang.pd.prefilling import PollPause, handoff_name

if TYPE_CHECKING:
    from layerflow.agent import Agent
    from layerflow.agent.client import Inquiry
    from layerflow.agent.lookups import Lookups
    from layerflow.device.base import DeviceEvent
    from layerflow.keys import HashedChain

STORY_S = 0.02
"""How long a failed load waits for the server to say why: SGLang's loop stands still for it."""

log = structlog.get_logger("layerflow.sglang")


class PromptProgress(enum.Enum):
    """Where a prompt's load is."""

    COMING = "it is waited for, or being loaded"
    THERE = "all of it is in place"
    LOST = "it does not come"


@dataclass(slots=True, eq=False)
class Following:
    """One prompt that another engine computes.

    :param name: of its hand-off.
    :param first: pages that this engine has itself.
    :param until: monotonic seconds; what is not there by then has failed.
    :param reason: of :attr:`PromptProgress.LOST`.
    """

    name: str
    chain: HashedChain
    first: int
    tables: Sequence[np.ndarray]
    after: DeviceEvent | None
    until: float
    inquiry: Inquiry
    step: Step | NoStep | None = None
    progress: PromptProgress = PromptProgress.COMING
    reason: str = ""

    @property
    def tokens(self) -> int:
        """Of the prompt's pages."""
        return len(self.chain) - 1


class DecodeSide:
    """Of one worker, on its scheduler's thread. Nothing here waits.

    :param after: makes an event behind the last work that may touch free slots; see :meth:`Agent.open_step`.
    :param deadline_s: how long a prompt may take, from when its pages are there.
    """

    def __init__(
        self,
        agent: Agent,
        lookups: Lookups,
        layout: PoolLayout,
        *,
        after: Callable[[], DeviceEvent | None],
        deadline_s: float,
    ) -> None:
        self._agent = agent
        self._lookups = lookups
        self._layout = layout
        self._after = after
        self._deadline_s = deadline_s
        self._pause = PollPause()

    def follow(
        self, room: int, hashes: Sequence[str], first: int, slots: Mapping[str, np.ndarray], *, attempt: int = 0
    ) -> Following:
        """Load a prompt as it is saved.

        :param hashes: of all of its pages. :param first: pages that are here already.
        :param slots: by pool: those of the pages behind them.
        :param attempt: see :func:`.prefilling.handoff_name`.
        """
        chain = self._agent.hashed_chain([each.encode() for each in hashes])
        tables = self._layout.tables(len(hashes), slots)
        until = time.monotonic() + self._deadline_s
        name = handoff_name(room, attempt)
        inquiry = self._lookups.ask(name, chain, Follow(until, name))
        return Following(name, chain, first, tables, self._after(), until, inquiry)

    def poll(self, following: Following) -> PromptProgress:
        """Where it is now."""
        self._agent.poll()  # which keeps what it has to tell until it is asked
        if following.progress is PromptProgress.COMING:
            if following.step is None:
                self._look(following)
            else:
                self._load(following)
        return following.progress

    def give_up(self, following: Following) -> None:
        """It is not wanted any more: nothing writes its pages when this returns."""
        if following.progress is not PromptProgress.COMING:
            return
        name = following.name
        if following.step is not None:
            following.step.close()
        if self._agent.busy(name):
            self._agent.abort(name)
            if not self._agent.wait_idle(name, DRAIN_S) and isinstance(following.step, Step):
                following.step.fence(f"hand-off {name} was given up, and its loads did not end")
        self._lose(following, "the request was given up")  # last: what fails before it is done again by the next call

    def release(self, following: Following) -> None:
        """SGLang has let go of a request, on each rank: the prefill's side need not keep its hand-off any more.

        Not as soon as this rank has loaded its part of it: others may be late.
        """
        if following.progress is PromptProgress.THERE:
            self._lookups.release_handoff(following.name)

    def _look(self, following: Following) -> None:
        hit = self._lookups.wait(following.inquiry, 0.0)
        if hit is None:
            if time.monotonic() > following.until:
                self._lose(following, "it was not open by its deadline")
            return
        if hit.tokens < following.tokens:
            away = "its layerflow server is away" if not self._agent.attached else "the layerflow server was lost"
            why = hit.reason or (away if not hit.tokens else "the rest was not stored")
            self._lose(following, f"{hit.tokens} of {following.tokens} tokens are there: {why}")
            return
        hit = self._lookups.take(following.inquiry, hit)
        start = following.first * following.chain.chunk_tokens
        request = StepRequest(
            following.name, following.chain, following.tables, load=(start, following.tokens), hit=hit
        )
        left = max(0.001, following.until - time.monotonic())
        following.step = self._agent.open_step([request], left, after=following.after)
        self._load(following)

    def _load(self, following: Following) -> None:
        step = following.step
        assert step is not None
        if not step.wait_loaded(self._pause.take()):
            return
        outcome = step.wait_all()
        step.close()
        if outcome.ready:
            following.progress = PromptProgress.THERE
        else:
            reason = outcome.failed[0].reason if outcome.failed else "its load was cut off"
            self._lose(following, self._with_story(following, reason))

    def _with_story(self, following: Following, reason: str) -> str:
        """The reason, with what the server knows of the hand-off: that its engine has given it up, for instance."""
        asked = self._lookups.watch_handoff(following.name, 0.0)
        state = self._lookups.handoff(asked, STORY_S)
        return (
            f"{reason} (the hand-off: {state.state}, {state.reason})" if state is not None and state.reason else reason
        )

    def _lose(self, following: Following, reason: str) -> None:
        following.progress, following.reason = PromptProgress.LOST, reason
        if following.step is not None:
            following.step.close()
        name = following.name
        self._lookups.drop_lease(name)
        self._lookups.release_handoff(name)
        log.warning("handoff_lost", handoff=name, reason=reason)
