"""A scheduler's lookups: asked once, waited for a moment in each pass, asked anew when a load has failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from layerflow.agent.values import Hit
from layerflow.connectors.vllm.pd.side import HandoffSide
from layerflow.connectors.vllm.scheduler.requests import RequestState

if TYPE_CHECKING:
    from layerflow.agent.client import Inquiry
    from layerflow.agent.lookups import Lookups

STALE_S = 1.0
"""A lookup's answer is used for so long; leases live longer."""

MAX_RELOADS = 1
RELOAD_SHARE = 0.5
"""After a failed load a request is looked up once more where less than this share of its blocks has failed: what is
wrong then is an object, not the link. A second failure is not followed by a third try: on a slow link it would fail for
ever. After a failed load of a hand-off what is stored is always looked up: the link was another one."""


class HitSearch:
    """For the scheduler's thread.

    :param wait_s: how long one scheduling pass may wait for answers, all of its requests together.
    :param compute_s: what computing so many tokens takes, as far as it was measured: peers are asked for no longer.
    """

    def __init__(
        self, lookups: Lookups, handoffs: HandoffSide, wait_s: float, compute_s: Callable[[int], float | None]
    ) -> None:
        self._compute_s = compute_s
        self._lookups = lookups
        self._handoffs = handoffs
        self._wait_s = wait_s
        self._waited_s = 0.0
        self._awaited: Inquiry | None = None
        self._undecided: RequestState | None = None

    def pass_over(self, *, idle: bool) -> None:
        """A scheduling pass has ended.

        :param idle: nothing is computed in it: a prefill may be waited for, which is cheaper than to ask without pause.
        """
        if idle:
            # What the last step has made leaves by another thread, which needs the interpreter.
            time.sleep(0)
            if self._awaited is not None:
                self._lookups.wait(self._awaited, self._wait_s)
            elif self._undecided is not None:
                self._handoffs.rest(self._undecided, self._wait_s)
        self._awaited = self._undecided = None
        self._waited_s = 0.0

    def undecided(self, tracked: RequestState) -> bool:
        """Is it not known yet whether, or where, there is a hand-off?"""
        if tracked.handoff is None:
            return False
        began = time.monotonic()
        waits = self._handoffs.waits(tracked, self._wait_s - self._waited_s)
        self._waited_s += time.monotonic() - began
        if waits:
            self._undecided = tracked
        return waits

    def ask(self, tracked: RequestState) -> Inquiry:
        """Start a request's lookup, of what a hand-off is to store too where it has one."""
        follow = self._handoffs.follow(tracked)
        seconds = self._compute_s(len(tracked.chain))
        tracked.inquiry = self._lookups.ask(tracked.id, tracked.chain, follow, compute_s=seconds)
        return tracked.inquiry

    def find(self, tracked: RequestState, num_computed: int) -> Hit | None:
        """What can be loaded of a request that is about to start; None = vLLM is to ask again.

        :param num_computed: tokens that vLLM has itself.
        """
        inquiry = tracked.inquiry
        if inquiry is None or (inquiry.hit is not None and self._is_stale(tracked, inquiry)):
            tracked.restart_lookup()
            inquiry = self.ask(tracked)
        hit = self._wait(inquiry)
        if hit is None:
            return None
        if not self._handoffs.accepts(tracked, hit):
            tracked.restart_lookup()
            return None
        missing = tracked.request.num_tokens - max(hit.tokens, num_computed)
        return None if self._handoffs.gives_up(tracked, missing) else hit

    def take(self, tracked: RequestState) -> None:
        """The request's hit goes to the workers now, with the plan that its answer has brought."""
        if tracked.inquiry is not None:
            tracked.hit = self._lookups.take(tracked.inquiry, tracked.hit)

    def load_failed(self, tracked: RequestState, share: float) -> None:
        """Of a load so large a share of its blocks has failed: may the rest be loaded again?"""
        if self._handoffs.load_failed(tracked):
            pass
        elif tracked.reloads < MAX_RELOADS and share < RELOAD_SHARE:
            # The objects that failed are hidden from lookups, so the new answer holds complete ones only.
            tracked.reloads += 1
        else:
            tracked.may_load = False
        tracked.restart_lookup()

    def _wait(self, inquiry: Inquiry) -> Hit | None:
        """Its answer, if there is one or soon is. All requests of one pass share one wait: a stopped server must not
        cost each of them its own. A prefill is not waited for: other requests may have something to compute."""
        waits = getattr(inquiry, "waits", False)
        began = time.monotonic()
        hit = self._lookups.wait(inquiry, 0.0 if waits else self._wait_s - self._waited_s)
        self._waited_s += time.monotonic() - began
        if hit is None and waits:
            self._awaited = inquiry
        return hit

    def _is_stale(self, tracked: RequestState, inquiry: Inquiry) -> bool:
        """A hand-off's answer comes long after its question, and is kept for its reader."""
        return time.monotonic() - inquiry.asked_at > STALE_S and not self._handoffs.follows(tracked)
