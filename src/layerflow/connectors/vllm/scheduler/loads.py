"""A hit's part of a step: which objects it loads into which blocks, and where it may be loaded in the step itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from layerflow.agent.descriptors import ObjectDescriptor, PartDescriptor, describe_loads, with_more
from layerflow.agent.values import Hit, StepRequest
from layerflow.connectors.vllm.plan import LOST_AFTER, Asking, StepPlan, WorkerLayout, WorkerReport
from layerflow.connectors.vllm.scheduler.requests import RequestState
from layerflow.errors import SpecError
from layerflow.spec import ModelSpec

Tables = tuple[list[int], ...]
"""Block ids per vLLM group."""

NULL_BLOCK = 0
"""vLLM's block id for positions without a block (``BlockPool.null_block``), as behind a sliding window."""

STATE_BLOCKS = 4
"""Of a group of recurrent states, for one request at most: what vLLM's prefix cache has, what a hit loads, what a chunk
ends with, and what the step writes; what is guessed ahead is not in it."""


@dataclass(slots=True)
class PendingLoad:
    """A load of a step whose output has not come; planned, or promised to vLLM and not planned.

    :param number: of the plan.
    :param start: the first token that it loads.
    :param tables: where.
    :param last: the request's last ones, if it has ended since.
    :param moved: the request was preempted since, and has been given blocks again.
    """

    number: int
    start: int
    tables: Tables
    last: Tables = ()
    moved: bool = False

    @property
    def has_all_blocks(self) -> bool:
        """Has the request ended, and are all blocks that it has had since among these tables?"""
        same = not self.moved and len(self.last) == len(self.tables)
        return same and all(map(_only_grew, self.tables, self.last))


def _only_grew(table: Sequence[int], last: Sequence[int]) -> bool:
    """Has every block of the last table its place in this one, or was it put behind, where no place is empty?

    A place behind may be empty since its block has left a sliding window; that block may still be in vLLM's cache.
    """
    kept = all(after in {before, NULL_BLOCK} for before, after in zip(table, last, strict=False))
    return kept and len(last) >= len(table) and NULL_BLOCK not in last[len(table) :]


class StepLoads:
    """Which hits may be loaded in the step, and what loads are under way there.

    Only in models whose layers have been seen, on every rank, to ask for their loaded blocks, and not where another
    connector stores what a step computes at once: what was computed on a load that fails would be its for good. With
    several groups vLLM cannot be told that such a load has failed; :mod:`.recovery` makes up for that, but what it
    costs should be rare: only what lies in the server's arena, pinned, is loaded there.

    :param block_tokens: of each of vLLM's cache groups, moved or not: the tokens that a block stands for.
    :param recovers: vLLM's scheduler takes back what was computed on such a load.
    :param keeps_reports: what a worker reports of its step reaches vLLM's scheduler, or the engine ends.
    """

    def __init__(self, block_tokens: Sequence[int], *, recovers: bool, keeps_reports: bool = True) -> None:
        self._one_group = len(block_tokens) == 1
        self._block_tokens = tuple(block_tokens)
        self._allowed = (self._one_group or recovers) and keeps_reports
        self._free_blocks: Callable[[], float] = lambda: math.inf
        self._ahead = 0
        self._states: frozenset[int] = frozenset()  # vLLM's groups that keep one state of a request
        self._workers = 0
        self._asking: dict[int, tuple[Asking, ...]] = {}
        self._arrivals: dict[str, list[PendingLoad]] = {}
        self._dropped: set[str] = set()

    @property
    def needs_answer(self) -> bool:
        """Is a hit loaded in the step only with the server's word that it is pinned?"""
        return self._allowed and not self._one_group

    def meet_workers(self, layouts: Collection[WorkerLayout]) -> None:
        """The workers have told their layouts."""
        self._allowed &= not any(layout.shares_steps for layout in layouts)
        self._workers = max(layout.model_spec.shard.workers for layout in layouts)
        self._states = frozenset(
            number for each in layouts for number, group in each.groups.items() if group.rules.exact
        )

    def meet_blocks(self, free: Callable[[], int], ahead: int) -> None:
        """vLLM has its blocks.

        :param free: how many it could give to a request now.
        :param ahead: tokens beyond a request's own for which it takes room: a draft model's guesses.
        """
        self._free_blocks, self._ahead = free, ahead

    def seen(self, asking: Mapping[int, tuple[Asking, ...]]) -> None:
        """Workers have seen when their layers ask for loaded blocks.

        :param asking: by rank, per layerflow group.
        """
        self._asking.update(asking)

    @property
    def early_groups(self) -> frozenset[int]:
        """Groups whose loads must be in place before the forward pass."""
        asking = self._asking.values()
        return frozenset(group for each in asking for group, when in enumerate(each) if when is Asking.BEFORE)

    @property
    def _watched(self) -> bool:
        """Has every layer been seen, on every rank?"""
        known = self._asking.values()
        return len(known) >= self._workers > 0 and not any(Asking.UNSEEN in each for each in known)

    def may(self, hit: Hit, tokens: int) -> bool:
        """May this hit be loaded in the step?

        :param tokens: of the request.
        """
        resident = self._one_group or hit.plan is not None
        return self._allowed and self._watched and resident and self._has_room(tokens)

    def has_blocks(self, tokens: int) -> bool:
        """Are blocks free for so many tokens of a request, whatever it takes of them?"""
        return self._free_blocks() >= len(self._states) + self._by_length(tokens + self._ahead)

    def _by_length(self, tokens: int) -> int:
        """Blocks that so many tokens take of the groups that keep them."""
        return sum(-(-tokens // size) for group, size in enumerate(self._block_tokens) if group not in self._states)

    def _has_room(self, tokens: int) -> bool:
        """Are blocks free for all that vLLM will take, recurrent states included?

        Of a group of such states vLLM takes two new blocks for a hit that is loaded in the step, one for the state that
        comes and one for that in which the step goes on, and looks before whether one is free (0.32; its pull request
        46892). Where there are just too few, its engine ends. In the background it takes the first alone.
        With a draft model it takes room for its guesses too, and a state for each of them.
        """
        states = len(self._states)
        return not states or (
            self._free_blocks() >= self._by_length(tokens + self._ahead) + states * (STATE_BLOCKS + self._ahead)
        )

    def planned(self, number: int, request: str, start: int, tables: Tables) -> None:
        """The step of this plan computes on a load: one that the plan has, or one that was promised and it has not.

        :param number: of the plan.
        :param start: the first token of the load.
        """
        self._arrivals.setdefault(request, []).append(PendingLoad(number, start, tables))

    def allocated(self, request: str) -> None:
        """vLLM gives blocks to a request that has none: one whose load is under way was preempted."""
        for arrival in self._arrivals.get(request, ()):
            arrival.moved = True

    def failed(self, output: Any) -> dict[str, Sequence[PendingLoad]]:
        """By request whose load in the step has failed: all its loads under way.

        :param output: vLLM's KVConnectorOutput, of all ranks; None = nothing was told.
        """
        report = output.kv_connector_worker_meta if output is not None else None
        reports = [each for each in getattr(report, "metadata", (report,)) if isinstance(each, WorkerReport)]
        return {request: self._arrivals.get(request, ()) for report in reports for request in report.lost}

    def finished(self, request: str, tables: Tables) -> bool:
        """The request is over. Must its lease stay until its load is?

        Its blocks are in vLLM's own prefix cache since they were allocated: others may go on from them.

        :param tables: its last ones.
        """
        for arrival in self._arrivals.get(request, ()):
            arrival.last = tables
        if request in self._arrivals:
            self._dropped.add(request)
        return request in self._arrivals

    def ended(self, ran: Collection[int]) -> list[str]:
        """Every rank has run these plans, and said what has failed: whose leases can go now?"""
        if not self._arrivals:
            return []
        lost = max(ran, default=0) - LOST_AFTER
        for request, arrivals in list(self._arrivals.items()):
            left = [arrival for arrival in arrivals if arrival.number not in ran and arrival.number >= lost]
            if left:
                self._arrivals[request] = left
            else:
                del self._arrivals[request]
        free = [request for request in self._dropped if request not in self._arrivals]
        self._dropped.difference_update(free)
        return free


def rewritten_blocks(output: Any) -> set[int]:
    """What vLLM zeroes and copies into while it prepares a step.

    :param output: vLLM's SchedulerOutput.
    """
    blocks = set(getattr(output, "new_block_ids_to_zero", None) or ())
    return blocks.union(copy.dst_block_id for copy in getattr(output, "kv_cache_block_copies", None) or ())


def are_rewritten(spec: ModelSpec, output: Any, loading: Sequence[RequestState]) -> bool:
    """Does vLLM write to blocks of these loads while it prepares the step: zero them, copy into them?

    :param output: vLLM's SchedulerOutput.
    """
    if not loading:
        return False
    if any(group.rules.exact for group in spec.groups) and not all(tracked.background for tracked in loading):
        return True  # it copies the state of every request of the step
    written = rewritten_blocks(output)
    return any(not written.isdisjoint(table) for tracked in loading for table in tracked.tables)


def plan_load(
    spec: ModelSpec,
    tracked: RequestState,
    tables: Sequence[np.ndarray],
    tokens: int,
    *,
    plan: StepPlan,
    early: Collection[int] = (),
) -> int:
    """Put a hit's load into the plan.

    In the step some blocks cannot wait for their layer's turn. The step writes to the block that the hit ends in, if
    tokens of it are left, before it asks for the layer. Nothing asks for recurrent state, nor for caches that are read
    before their layer asks. vLLM has copied the state block to the one that the step writes before it lets loads begin,
    so both get it.

    :param tables: int64 block ids per layerflow group; negative = no block.
    :param tokens: what the step computes of the request.
    :param early: see :attr:`StepLoads.early_groups`.
    :returns: how many tokens it loads.
    """
    assert tracked.load is not None
    start, stop = tracked.load
    parts = describe_loads(spec, [StepRequest(tracked.id, tracked.chain, tables, (start, stop), tracked.hit)])
    if tracked.background:
        tracked.arriving = True
        plan.background[tracked.id] = parts
        return stop - start
    loads: list[PartDescriptor] = []
    tails: list[PartDescriptor] = []
    for part in parts:
        group = spec.groups[part.group]
        if group.rules.exact:
            current = -(-(stop + tokens) // group.block_size) - 1
            tails += [part, _copy_to(part, current, tables[part.group])]
        elif part.group in early:
            tails.append(part)
        else:
            whole, rest = _split(part, stop // group.block_size, spec.chunk_tokens)
            loads += whole
            tails += rest
    plan.loads += loads
    plan.tails += with_more(tails) if loads else tails  # which the workers open first
    return stop - start


def _copy_to(part: PartDescriptor, block: int, table: np.ndarray) -> PartDescriptor:
    """The part's one state, to another position of the block table."""
    (piece,) = part.pieces
    if block >= len(table) or table[block] < 0:
        raise SpecError(f"request {part.request!r}, group {part.group}: no block {block} for the state to continue in")
    return replace(
        part, table=np.array(table), pieces=(msgspec.structs.replace(piece, blocks=range(block, block + 1)),)
    )


def _split(part: PartDescriptor, block: int, chunk: int) -> tuple[list[PartDescriptor], list[PartDescriptor]]:
    """Before a position of the block table, and from it on."""
    before: dict[int, ObjectDescriptor] = {}
    after: dict[int, ObjectDescriptor] = {}
    for number, piece in enumerate(part.pieces):
        cut = min(max(block, piece.blocks.start), piece.blocks.stop)
        if cut > piece.blocks.start:
            before[number] = msgspec.structs.replace(piece, blocks=range(piece.blocks.start, cut))
        if cut < piece.blocks.stop:
            index = piece.index + cut - piece.blocks.start
            after[number] = msgspec.structs.replace(piece, blocks=range(cut, piece.blocks.stop), index=index)
    return _only(part, before, chunk), _only(part, after, chunk)


def _only(part: PartDescriptor, pieces: dict[int, ObjectDescriptor], chunk: int) -> list[PartDescriptor]:
    """Return these of a part's pieces, or leading and last blocks of them, by their position."""
    if not pieces:
        return []
    last = pieces[max(pieces)]
    parent = part.parent if last.tokens != chunk else b""
    places = part.places and replace(part.places, rows=part.places.rows[list(pieces)])
    return [replace(part, pieces=tuple(pieces.values()), parent=parent, places=places)]
