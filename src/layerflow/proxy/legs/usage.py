"""Which tokens the prefill engine found cached, told in the decode engine's usage.

A decode engine counts what it was handed over as cached, which says nothing of what the request saved.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec

from layerflow.proxy.body import NOT_JSON
from layerflow.proxy.sse import Event, make_event

# A prefill's answer and the decoder's last token may cross on their way here, where one token was asked for.
_WAIT_S = 0.25


class PrefillUsage:
    """What the prefill of a request found cached, as soon as it has answered; of a list of prompts, all of them."""

    def __init__(self) -> None:
        self._cached: int | None = None
        self._expected = 0  #: prefills that have not answered
        self._answered = anyio.Event()

    def expect(self) -> None:
        """A prefill was sent."""
        if not self._expected:
            self._answered = anyio.Event()
        self._expected += 1

    def settle(self, cached: int | None) -> None:
        """It has ended; None: it failed, or does not say (vLLM without ``--enable-prompt-tokens-details``)."""
        if cached is not None:
            self._cached = (self._cached or 0) + cached
        self._expected -= 1
        if not self._expected:
            self._answered.set()

    async def cached_tokens(self) -> int | None:
        """None = not known, or nothing was prefilled apart."""
        if self._expected:
            with anyio.move_on_after(_WAIT_S):
                await self._answered.wait()
        return self._cached


def cached_of(answer: dict[str, Any]) -> int | None:
    """``usage.prompt_tokens_details.cached_tokens`` of an answer."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


def with_cached(answer: dict[str, Any], cached: int | None) -> dict[str, Any]:
    """The answer with that number in its usage; unchanged where it has none or the number is not known."""
    usage = answer.get("usage")
    if cached is None or not isinstance(usage, dict):
        return answer
    details = usage.get("prompt_tokens_details")
    details = {**(details if isinstance(details, dict) else {}), "cached_tokens": cached}
    return {**answer, "usage": {**usage, "prompt_tokens_details": details}}


def event_with_cached(event: Event, cached: int | None) -> Event:
    """The same for an event."""
    if cached is None or event.data is None:
        return event
    try:
        answer = msgspec.json.decode(event.data)
    except NOT_JSON:
        return event  # what passes unread may hold what only its client can read
    return make_event(msgspec.json.encode(with_cached(answer, cached)))
