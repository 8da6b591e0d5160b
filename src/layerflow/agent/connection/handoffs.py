"""Hand-offs as both engines of one speak of them: the messages, and what a scheduler remembers of its questions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from layerflow.agent.values import Follow, Handoff
from layerflow.keys import Chain
from layerflow.wire.messages import HandoffState, Lookup, OpenHandoff

DEFAULT_LEASE_S = 0.0
"""How long a hand-off is kept for a reader: as long as the server's ``pd.handoff_lease_s``."""
DEFAULT_HANDOFF_TIMEOUT_S = 60.0
"""How long an engine may take from opening a hand-off until all of it is stored."""
ENDED = ("complete", "failed", "revoked", "released", "refused")
SILENT = "the server did not answer"


@dataclass(slots=True)
class HandoffInquiry:
    """A hand-off that was opened or is watched, and what was last heard of it.

    :param until: monotonic seconds: a server that has not answered by then does not.
    :param watch: there are answers until its end.
    :param state: the last answer; None while there is none.
    """

    name: str
    until: float
    watch: bool = False
    state: Handoff | None = None


def opening_of(
    number: int,
    handoff: str,
    chain: Chain,
    tokens: int,
    lease_s: float,
    timeout_s: float,
    servers: Sequence[str] = (),
) -> OpenHandoff:
    """The message that opens a hand-off of a prompt's first `tokens` tokens."""
    lease_ms, timeout_ms = max(0, round(lease_s * 1e3)), max(1, round(timeout_s * 1e3))
    full, rest = divmod(min(tokens, len(chain)), chain.chunk_tokens)
    digests = b"".join(chain.digests[:full])
    tail = chain.partial(full, rest) if rest else b""
    return OpenHandoff(number, handoff, chain.parent(0), digests, tokens, tail, lease_ms, timeout_ms, list(servers))


def following(question: Lookup, follow: Follow) -> Lookup:
    """The question, of a hit that may still be on its way."""
    left_ms = max(1, round((follow.deadline - time.monotonic()) * 1e3))
    return msgspec.structs.replace(question, handoff=follow.handoff, servers=list(follow.servers), follow_ms=left_ms)


def state_of(message: HandoffState) -> Handoff:
    """What the server has told."""
    return Handoff(message.handoff, message.state, message.tokens, message.reason)
