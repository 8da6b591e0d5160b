"""Prefill and decode in engines of their own, as an example: what each side adds to its connection.

Both engines get the same prompt under the same request id, which names the hand-off. The prefill engine opens it before
the prompt's first step and ends it when the prompt is computed; the decode engine looks it up by name, and loads each
layer as the other one stores it. What fails is looked up once more, as any prompt, and computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import structlog

from layerflow.agent import Agent, Follow, Hit, Mode, StepRequest
from layerflow.keys import Chain
from layerflow_engine.glue import LayerflowConnection, ModeSetting
from layerflow_engine.request import Request, RequestStatus, TokenSpan

log = structlog.get_logger("layerflow_engine")


class PrefillConnection(LayerflowConnection):
    """Of an engine that computes prompts for another one; each is asked for a single token."""

    def lookup(self, request: Request) -> int:
        """As the base class; then room is kept for the prompt. Without room it is computed all the same."""
        hit = super().lookup(request)
        tokens = self._handed_over(request)
        opened = self.agent.control.open_handoff(request.id, self.chain_of(request), tokens)
        if not opened:
            log.info("handoff_not_opened", request=request.id, state=opened.state, reason=opened.reason)
        return hit

    def forget(self, request: Request) -> None:
        """All that it saves has ended."""
        done = request.state is RequestStatus.FINISHED
        tokens = self._handed_over(request) if done else request.computed
        self.agent.control.end_handoff(
            request.id, tokens=tokens, reason="" if done else f"it was {request.state.value}"
        )
        super().forget(request)

    def _ask(self, span: TokenSpan) -> StepRequest:
        """As the base class; what is saved ends where what is handed over does."""
        asked, end = super()._ask(span), self._handed_over(span.request)
        if span.stop < end or end == len(span.request.prompt):
            return asked
        return replace(asked, save=(span.start, end) if span.start < end else (0, 0), tail=span.start < end)

    def _handed_over(self, request: Request) -> int:
        """Tokens of its prompt: all of them, or what the other engine can load where rows stand for several tokens.

        In the middle of such a row it cannot go on. The window and the running state of the last whole row are there
        only where something stored ends with it.
        """
        tokens, spec = len(request.prompt), self.agent.spec
        return tokens if spec.alignment == 1 else spec.usable(tokens, tokens) or tokens


class DecodeConnection(LayerflowConnection):
    """Of an engine that goes on where another one's prompt ends.

    :param patience_s: so long it waits for a hand-off to be opened, and for its layers; then it computes the prompt.
    :param servers: control addresses of the servers at which the prefill engine stores; none = the engine's own.
    """

    def __init__(
        self, agent: Agent, mode: ModeSetting = "layerwise", *, patience_s: float = 30.0, servers: Sequence[str] = ()
    ) -> None:
        super().__init__(agent, mode)
        self._patience_s, self._servers = patience_s, tuple(servers)
        self._handed_off: set[str] = set()

    def find(self, request: Request, chain: Chain) -> Hit:
        """The first time what is handed off, then what is stored."""
        if request.attempt:
            return super().find(request, chain)
        self._handed_off.add(request.id)
        follow = Follow(time.monotonic() + self._patience_s, request.id, self._servers)
        hit = self.agent.lookup(request.transfer_id, chain, follow)
        if hit.reason:
            log.info("handoff_not_followed", request=request.id, reason=hit.reason)
        return hit

    def choose(self, hit: Hit, prompt_tokens: int) -> Mode:
        """What is handed off is loaded layer by layer: it comes no faster at once."""
        return Mode.LAYERWISE if hit.following else super().choose(hit, prompt_tokens)

    def forget(self, request: Request) -> None:
        """Nothing of it is kept any longer, here or for it."""
        self.agent.drop_lease(request.transfer_id)
        if request.id in self._handed_off and request.state is not RequestStatus.WAITING:
            self._handed_off.discard(request.id)
            self.agent.control.release_handoff(request.id)
        super().forget(request)
