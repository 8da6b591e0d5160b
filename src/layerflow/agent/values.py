"""What an engine hands to the agent and gets back: small values without behaviour of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from layerflow.agent.hit_plan import PinnedPlaces
from layerflow.keys import Chain
from layerflow.observe.trace import StepFigures

if TYPE_CHECKING:  # it comes with torch, which tools that only look at a server do without
    from layerflow.device.base import CopyCounts


@dataclass(frozen=True, slots=True)
class Hit:
    """How much of a prompt can be loaded.

    :param tokens: leading tokens; 0 = none. At least one token of the prompt is left to compute.
    :param tail_chunk: the chunk whose leading tokens come from another object than the prompt's own full chunk: from a
        stored tail, or from a chunk that goes on differently; -1 if the hit ends with a full chunk.
    :param tail_tokens: tokens that this object holds.
    :param tail_digest: its digest.
    :param tail_shared: so many of its leading tokens are the prompt's; 0 = all of them.
    :param shared_digest: digest of these, where they are not all.
    :param following: some of it may still have to be stored: its layers arrive as they are, in a step that loads them
        under the name of the request that was looked up.
    :param until: of a hit that follows: monotonic seconds; what is not stored by then is computed.
    :param reason: where a hand-off was asked for and is not followed: its state, and why. Then the hit is of what is
        stored, as any other.
    :param drafts: the layers of the engine's draft model can be loaded too, of a windowed group where it keeps enough
        of the chunk in which the hit ends; else their blocks stay as they are.
    :param plan: where its objects lie in the server's arena, pinned for the request; None = not all of them do, or not
        for certain: the server is to be asked when they are loaded.
    """

    tokens: int
    tail_chunk: int = -1
    tail_tokens: int = 0
    tail_digest: bytes = b""
    tail_shared: int = 0
    shared_digest: bytes = b""
    following: bool = False
    reason: str = ""
    until: float = 0.0
    drafts: bool = False
    plan: PinnedPlaces | None = field(default=None, compare=False, repr=False)

    def stored(self, chunk_tokens: int) -> int:
        """Leading tokens of the prompt that are stored: the hit's, and the one left to compute if that is too."""
        if self.tail_chunk < 0:
            return self.tokens
        return self.tail_chunk * chunk_tokens + (self.tail_shared or self.tail_tokens)


MISS = Hit(0)


@dataclass(frozen=True, slots=True)
class Follow:
    """What a lookup may wait for.

    :param deadline: monotonic seconds; what is not stored or open by then is computed.
    :param handoff: the name of a hand-off; empty = what any other engine is storing now.
    :param servers: control addresses of the servers that keep it, one per box; empty = the engine's own.
    """

    deadline: float
    handoff: str = ""
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Handoff:
    """Where a hand-off is.

    :param state: ``announced``, ``open``, ``complete``, ``failed``, ``revoked``, ``released``, ``refused``, or
        ``unknown``: the server did not answer.
    :param tokens: that a reader can load at most.
    :param reason: of ``failed``, ``revoked``, ``refused`` and ``unknown``.
    """

    name: str
    state: str
    tokens: int = 0
    reason: str = ""

    def __bool__(self) -> bool:
        """A reader may count on it."""
        return self.state in ("open", "complete")


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request's part in a step.

    :param request: the engine's id for it.
    :param chain: its tokens' digests.
    :param blocks: per group: int64 block table, engine block ids by block number; negative = no block.
    :param load: tokens ``[start, stop)`` of the hit to load in this step; equal = none.
    :param hit: the lookup's answer that `load` relies on.
    :param save: tokens ``[start, stop)`` whose KV this step computes; every chunk that becomes complete is
        saved.
    :param tail: the chunk that `save` ends in is saved too although it is partial: the prompt ends there, or a
        recurrent state that a later prompt can continue from.
    """

    request: str
    chain: Chain
    blocks: Sequence[np.ndarray]
    load: tuple[int, int] = (0, 0)
    hit: Hit = MISS
    save: tuple[int, int] = (0, 0)
    tail: bool = False


@dataclass(frozen=True, slots=True)
class FailedBlocks:
    """Blocks of a request that hold no valid bytes; nothing writes them any more.

    :param blocks: block numbers: positions in the request's block table of `group`.
    """

    request: str
    group: int
    blocks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a wait ended; true if every byte is in place.

    :param failed: what has failed in this step so far; everything else of the layer is in place.
    :param aborted: every request that this step loads for was aborted.
    """

    failed: tuple[FailedBlocks, ...] = ()
    aborted: bool = False

    @property
    def ready(self) -> bool:
        """Every byte of the layer, for every request of the step, is in place."""
        return not self.failed and not self.aborted

    def __bool__(self) -> bool:
        return self.ready


READY = LoadResult()
ABORTED = LoadResult(aborted=True)


@dataclass(frozen=True, slots=True)
class Ended:
    """What ended since the last poll.

    :param released: aborted requests that no transfer touches any more.
    :param saved: requests of which some chunks were stored and published.
    :param failed_saves: requests of which some chunks were given up, with the reason.
    :param shed: those among them that were given up to keep out of the way.
    """

    released: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    failed_saves: tuple[tuple[str, str], ...] = ()
    shed: tuple[str, ...] = ()


class Measured(NamedTuple):
    """What a finished step moved, and how much of it compute covered.

    :param step: its number.
    """

    step: int
    load: StepFigures
    save: StepFigures


@dataclass(frozen=True, slots=True)
class AgentStatistics:
    """A snapshot. Counts since the agent was made; times in seconds.

    :ivar copies: between the arena and the device: batches, calls of its driver, copies of a single range, and batches
        through a pinned buffer.
    :ivar unheard_releases: hand-offs that no server could be told to release before their leases had ended them.
    :ivar pinned_bytes: how far, from its start, the arena is pinned for the device; -1 = there is none to pin it for.
    """

    attached: bool
    attachments: int
    open_steps: int
    loaded_bytes: int
    saved_bytes: int
    failed_batches: int
    fenced_steps: int
    lookups: int
    hit_tokens: int
    copies: CopyCounts
    pinned_bytes: int = -1
    unheard_releases: int = 0


@dataclass(slots=True)
class AgentCounters:
    """The counters behind :class:`AgentStatistics`."""

    attachments: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    failed_batches: int = 0
    fenced_steps: int = 0
    lookups: int = 0
    hit_tokens: int = 0
