"""What the scheduler's side remembers of a request between vLLM's hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from layerflow.agent.client import Inquiry
from layerflow.agent.values import MISS, Hit
from layerflow.connectors.vllm.pd.side import RequestHandoff
from layerflow.keys import Chain


class Allocation(NamedTuple):
    """VLLM has given a request blocks in the scheduling pass that runs.

    :param blocks: its KVCacheBlocks.
    :param own_tokens: those of its prefix cache, whose blocks nobody writes to.
    """

    request: str
    blocks: Any
    own_tokens: int


@dataclass(slots=True)
class RequestState:
    """One request.

    :param request: vLLM's Request.
    :param chain: its digests, hashed once; grows with its output where that is saved.
    :param may_load: its ``kv_transfer_params`` allow loading.
    :param may_save: and saving.
    :param outdated: it came or ran before the weights were replaced: nothing of it is loaded or saved until it starts
        anew.
    :param inquiry: the lookup under way or last answered.
    :param left_lease: an earlier lookup may have left a lease that no later answer tells of.
    :param hit: the answer that the scheduler was given.
    :param local: tokens that vLLM had itself when it asked.
    :param load: tokens ``[start, stop)`` to load once the step is built; None = nothing allocated for it.
    :param background: the load goes on while the request waits.
    :param arriving: such a load is under way; its end is what frees the request's blocks if the request ends first.
    :param reloads: how often it was looked up again because a load had failed.
    :param tables: block ids per vLLM group, as last heard.
    :param reads_tables: saves of it were planned since it got these blocks.
    :param saved: leading tokens whose chunks need no saving any more.
    :param loaded_tokens: tokens taken from the pool so far.
    :param drafted: its draft model's layers have all of its tokens, as far as is known; else it saves none of them.
    :param overlap: hidden and whole transfer time of its loads, seconds.
    :param handoff: what this engine does of one for it.
    :param described: tokens whose chunks were described as it stored them. :param announced: as it had hit them.
    """

    request: Any
    chain: Chain
    may_load: bool
    may_save: bool
    outdated: bool = False
    inquiry: Inquiry | None = None
    left_lease: bool = False
    hit: Hit = MISS
    local: int = 0
    load: tuple[int, int] | None = None
    background: bool = False
    arriving: bool = False
    reloads: int = 0
    tables: tuple[list[int], ...] = ()
    reads_tables: bool = False
    saved: int = 0
    loaded_tokens: int = 0
    drafted: bool = True
    overlap: tuple[float, float] = (0.0, 0.0)
    handoff: RequestHandoff | None = None
    described: int = 0
    announced: int = 0

    @property
    def id(self) -> str:
        """vLLM's id."""
        return str(self.request.request_id)

    @property
    def may_hold_lease(self) -> bool:
        """A lookup was asked that has found something, or may yet."""
        return self.left_lease or self.may_have_hit

    @property
    def may_have_hit(self) -> bool:
        """The last lookup has found something, or may yet."""
        return self.inquiry is not None and (self.inquiry.hit is None or self.inquiry.hit.tokens > 0)

    def restart_lookup(self) -> None:
        """The last answer is not used; its lease may still be held. The next lookup is for all known tokens."""
        self.left_lease |= self.may_have_hit
        self.inquiry = None
        self.know_tokens()

    def outdate(self) -> None:
        """The weights are being replaced."""
        self.outdated, self.inquiry, self.left_lease, self.hit = True, None, False, MISS

    def renew(self, chain: Chain) -> None:
        """Start the request anew under the present weights, which `chain` is made from."""
        self.chain, self.outdated, self.saved, self.described, self.announced = chain, False, 0, 0, 0
        self.know_tokens()

    @property
    def ends_early(self) -> bool:
        """The prompt goes on behind what has keys: with an input of unknown content."""
        return len(self.chain) < int(self.request.num_prompt_tokens)

    def know_tokens(self) -> None:
        """Hash the output that has come since: a preempted request continues from it."""
        known = self.request.num_tokens
        if known > len(self.chain) and not self.ends_early:
            self.chain.extend(self.request.all_token_ids[len(self.chain) : known])

    def summary(self) -> dict[str, Any]:
        """For the response's ``kv_transfer_params``."""
        hidden, whole = self.overlap
        told: dict[str, float] = {"hit_tokens": self.loaded_tokens}
        if whole > 0:
            told["overlap"] = round(hidden / whole, 4)
        return {"layerflow": told}


def load_save_flags(params: dict[str, Any] | None) -> tuple[bool, bool]:
    """May a request load and save? ``kv_transfer_params = {"layerflow": {"load": false, "save": false}}`` says no."""
    own = params.get("layerflow") if isinstance(params, dict) else None
    if not isinstance(own, dict):
        return True, True
    return own.get("load") is not False, own.get("save") is not False


# Requests that wait and hold blocks: a vLLM that does not let them run first may never run anything again.


class BlockHolders:
    """For vLLM before 0.31, which takes waiting requests in one order, whether they hold blocks or not.

    A request whose prompt was loaded in the background holds its blocks and waits to run. If one before it in the order
    needs more blocks than are free, vLLM looks no further. When nothing runs that could give blocks back, nothing ever
    will. So a request that does not fit is asked about again later, and vLLM goes on to those behind it.
    """

    def __init__(self) -> None:
        self._loading: set[str] = set()
        self._loaded: set[str] = set()
        self._idle = False

    def loading(self, request: str) -> None:
        """A load in the background has its blocks."""
        self._loading.add(request)

    def loaded(self, request: str) -> None:
        """Note that a load has ended: the request can run."""
        if request in self._loading:
            self._loading.discard(request)
            self._loaded.add(request)

    def planned(self, scheduled: Collection[str]) -> None:
        """A scheduling pass has ended.

        :param scheduled: requests that run.
        """
        self._idle = not scheduled
        self._loaded.difference_update(scheduled)

    def finished(self, request: str) -> None:
        """Forget a request that is over."""
        self._loading.discard(request)
        self._loaded.discard(request)

    def go_first(self, request: Any, has_blocks: Callable[[int], bool]) -> bool:
        """Must others run before this request, which holds no blocks?

        :param has_blocks: are blocks free for so many tokens?
        """
        waiting = self._idle and bool(self._loaded) and request.request_id not in self._loaded
        return waiting and not has_blocks(request.num_tokens)
