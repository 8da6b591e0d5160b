"""The prefill engine's end of a hand-off: opened before the prompt's first step, ended with its last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from layerflow.connectors.vllm.pd.conventions import twophase
from layerflow.connectors.vllm.pd.conventions.parts import (
    Convention,
    HandoffTerms,
    PrefillPart,
    Sizes,
    layout_mismatch,
)
from layerflow.keys import Chain

if TYPE_CHECKING:
    from layerflow.agent.client import HandoffInquiry
    from layerflow.agent.lookups import Lookups

ENDED_WELL = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""How a request ends whose prompt was computed as planned, by the names of vLLM's RequestStatus."""

log = structlog.get_logger("layerflow.vllm.pd")


@dataclass(slots=True)
class PrefillHandoff:
    """One request's hand-off, as its prefiller sees it.

    :param tokens: of its prompt that are handed over.
    :param inquiry: the server's answer to its opening; None = it was never opened.
    :param over: the server knows its end, or never knew it.
    """

    part: PrefillPart
    tokens: int
    inquiry: HandoffInquiry | None = None
    over: bool = False


class Prefilling:
    """One per scheduler's side, for its thread.

    :param layout: this engine's, see :func:`layerflow.spec.model_facts`.
    :param servers: where others find what this engine stores.
    :param others: servers of workers of this engine that are not attached to its scheduler's.
    :param incarnation: of this engine.
    """

    def __init__(
        self,
        lookups: Lookups,
        *,
        layout: dict[str, str],
        sizes: Sizes,
        servers: tuple[str, ...],
        others: tuple[str, ...],
        incarnation: str,
    ) -> None:
        self._lookups = lookups
        self._layout = layout
        self._sizes = sizes
        self._servers = servers
        self._others = others
        self._incarnation = incarnation

    def begin(self, part: PrefillPart, chain: Chain, tokens: int) -> PrefillHandoff:
        """Open it; returns at once.

        :param tokens: leading tokens of the prompt that will be saved.
        """
        handoff = PrefillHandoff(part, tokens)
        if part.decoder is not None and (why := layout_mismatch(self._layout, part.decoder.layout)):
            log.warning("handoff_cannot_be_read", handoff=part.handoff, difference=why)
        if not tokens:
            handoff.over = True
            self.decline(part, "nothing of so short a prompt is saved")
            return handoff
        handoff.inquiry = self._lookups.open_handoff(
            part.handoff,
            chain,
            tokens,
            lease_s=part.lease_s,
            timeout_s=max(1.0, part.deadline_s),
            servers=self._others,
        )
        return handoff

    def decline(self, part: PrefillPart, reason: str) -> None:
        """Nothing of its prompt is saved: a decoder that waits is told so at once, and one that comes later."""
        log.info("handoff_not_opened", handoff=part.handoff, reason=reason)
        self._lookups.end_handoff(part.handoff, tokens=0, reason=reason)

    def waits(self, handoff: PrefillHandoff, budget_s: float) -> bool:
        """Has the server not answered yet? The prompt's steps begin behind its answer, which it owes within 0.2 s.

        :param budget_s: how long this call may wait.
        """
        if handoff.over or handoff.inquiry is None:
            return False
        state = self._lookups.handoff(handoff.inquiry, budget_s)
        if state is None:
            return True
        if not state and state.state in ("refused", "unknown"):
            if state.state == "unknown":  # the server may open it yet, and nobody would complete it
                self.fail(handoff, f"the prefill engine's server has not opened it in time: {state.reason}")
            handoff.over = True
            log.warning("handoff_not_opened", handoff=handoff.part.handoff, reason=f"{state.state}: {state.reason}")
        return False

    def finished(self, handoff: PrefillHandoff, request: Any, blocks: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The request is over.

        :param request: vLLM's.
        :param blocks: its block ids per cache group.
        :returns: what its response says to the decode engine; None = nothing.
        """
        if handoff.over:
            return None
        status = getattr(request.status, "name", "")
        if status not in ENDED_WELL or request.num_computed_tokens < handoff.tokens:
            self.fail(handoff, f"the prefill ended as {status.removeprefix('FINISHED_').lower() or 'unknown'}")
            return None
        handoff.over = True
        self._lookups.end_handoff(handoff.part.handoff, tokens=handoff.tokens)
        if handoff.part.convention is not Convention.TWO_PHASE:
            return None
        return twophase.response(self._terms(handoff), self._sizes, blocks)

    def fail(self, handoff: PrefillHandoff, reason: str) -> None:
        """Fail the hand-off: nobody will complete it."""
        if not handoff.over:
            handoff.over = True
            self._lookups.end_handoff(handoff.part.handoff, tokens=0, reason=reason)

    def _terms(self, handoff: PrefillHandoff) -> HandoffTerms:
        return HandoffTerms(
            handoff=handoff.part.handoff,
            servers=self._servers,
            incarnation=self._incarnation,
            layout=self._layout,
            prompt=handoff.part.prompt,
            tokens=handoff.tokens,
            lease_s=handoff.part.lease_s,
        )
