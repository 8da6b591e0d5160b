"""Which chunks each step saves: those whose tokens are final and whose last block this step completes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from layerflow.agent.costs import work_of
from layerflow.agent.descriptors import PartDescriptor, describe_saves
from layerflow.agent.values import StepRequest
from layerflow.connectors.common.guard import attempt
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.pd.prefilling import PrefillHandoff
from layerflow.connectors.vllm.plan import LazySaves, Tables
from layerflow.connectors.vllm.scheduler.loads import NULL_BLOCK, rewritten_blocks
from layerflow.connectors.vllm.scheduler.requests import Allocation, RequestState
from layerflow.spec import ModelSpec

if TYPE_CHECKING:
    from layerflow.connectors.vllm.plan import StepPlan

LookupRequest = tuple[StepRequest, Tables, bool]
"""What a request saves, still without its block tables; these; and whether draft layers are part of it."""


class SavePlanner:
    """Follows requests from step to step.

    :param vllm_groups: for each of layerflow's groups: the vLLM cache group whose block table it shares.
    :param block_tokens: of each of vLLM's cache groups, moved or not: the tokens that a block stands for.
    :param num_blocks: of vLLM's cache.
    """

    def __init__(
        self,
        spec: ModelSpec,
        vllm_groups: Sequence[int],
        block_tokens: Sequence[int],
        options: Options,
        *,
        num_blocks: int = 0,
    ) -> None:
        self.spec = spec
        self._num_blocks = num_blocks
        self._vllm_groups = tuple(vllm_groups)
        self._block_tokens = tuple(block_tokens)
        self._options = options
        self._states = [number for number, group in enumerate(spec.groups) if group.rules.exact]
        self._open: dict[str, RequestState] = {}
        self._reading: dict[
            str, list[int]
        ] = {}  #: by request: its last plan that saves, and ranks that are done with it
        self._plans = 0

    def number(self, plan: StepPlan) -> int:
        """The plan's number; the next one where it has none yet."""
        if not plan.number:
            self._plans += 1
            plan.number = self._plans
        return plan.number

    def reading(self, request: str) -> bool:
        """May a save of this request, which may be over, still read its blocks on some rank?"""
        return request in self._reading

    @property
    def any_reading(self) -> bool:
        """May a save of any request still read, on some rank?"""
        return bool(self._reading)

    def drained(self, request: str, number: int, ranks: int, of: int) -> None:
        """Saves for the request have ended on some ranks, up to and including those of a plan.

        :param of: all ranks.
        """
        known = self._reading.get(request)
        if known is None or known[0] != number:  # an earlier plan's: a later one has saved for it since
            return
        known[1] += ranks
        if known[1] >= of:
            del self._reading[request]

    def open(self, tracked: RequestState) -> None:
        """A request whose tokens are to be saved."""
        if tracked.may_save and not tracked.outdated:
            self._open[tracked.id] = tracked

    def close(self, tracked: RequestState) -> None:
        """Forget a request that is over."""
        self._open.pop(tracked.id, None)

    def know(self, tracked: RequestState) -> None:
        """A lookup's hit is stored already."""
        hit, chunk = tracked.hit, self.spec.chunk_tokens
        held = hit.stored(chunk)
        tracked.saved = max(tracked.saved, held if held >= len(tracked.chain) else held // chunk * chunk)

    def again(self, requests: Iterable[RequestState]) -> None:
        """Loads of the last step have failed, and its saves were given up: save what is recomputed."""
        for tracked in requests:
            tracked.saved = 0
            self.open(tracked)

    def tables(self, block_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Block ids per layerflow group, int64; -1 = no block."""
        return _signed(self._of_groups(block_ids))

    def fresh(self, output: Any, allocated: Sequence[Allocation]) -> tuple[tuple[int, ...], ...]:
        """Blocks that the step, or a load that starts with it, overwrites, per layerflow group: the same for each.

        Such a load may be another connector's, so all that a request has got beyond vLLM's own hit counts.

        A save that still reads one of them is too late: vLLM recycles blocks of running requests too (sliding
        windows, preemption), and lays its groups over one memory: what one has freed is another's next block. Empty
        where no save is in flight: every rank has told that its saves have ended.
        """
        if not self._reading:
            return ()
        cached = output.scheduled_cached_reqs
        taken = rewritten_blocks(output)
        if not (taken or allocated or output.scheduled_new_reqs or any(cached.new_block_ids)):  # most that only decode
            return ()
        for new in output.scheduled_new_reqs:
            self._beyond(taken, new.block_ids, new.num_computed_tokens)
        for request, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if blocks is not None:
                self._beyond(taken, blocks, computed if request in cached.resumed_req_ids else 0)
        state = getattr(output, "kv_connector_block_state", None)
        for one in allocated:
            tables = one.blocks.get_block_ids()
            if not any(tables):  # vLLM-Ascend shows them to the connector alone that loads
                resolve = getattr(state, "resolve_block_ids", None)
                if resolve is None:
                    return self.every_block()
                tables = resolve(one.request)
            self._beyond(taken, tables, one.own_tokens)
        taken.discard(NULL_BLOCK)
        return (tuple(taken),) * len(self._vllm_groups) if taken else ()

    def every_block(self) -> tuple[tuple[int, ...], ...]:
        """As :meth:`fresh` where nobody can say which."""
        return (tuple(range(NULL_BLOCK + 1, self._num_blocks)),) * len(self._vllm_groups) if self._reading else ()

    def prepared(self, output: Any, fresh: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the fresh blocks that vLLM may overwrite while it prepares the step, as when it moves states."""
        if not fresh:
            return ()
        return fresh[0] if self._states else tuple(rewritten_blocks(output).difference((NULL_BLOCK,)))

    def step(self, output: Any, plan: StepPlan) -> None:
        """Put the step's saves into its plan."""
        if not self._open:
            return
        asked: list[LookupRequest] = []
        tables = _Tables(output)
        for request in [request for request in self._open if request in output.num_scheduled_tokens]:
            tracked = self._open[request]
            vllm = tracked.request
            # Tokens that are not known yet (speculated, or sampled by a step in flight) are not final.
            final = min(vllm.num_computed_tokens + output.num_scheduled_tokens[request], vllm.num_tokens)
            upto = final if self._options.save_decode else min(final, vllm.num_prompt_tokens)
            if tracked.ends_early:
                upto = min(upto, len(tracked.chain))
            tables.follow(tracked)
            if upto > tracked.saved:
                more = functools.partial(self._more, asked, tracked, upto, output)
                if not attempt(more, "build_connector_meta"):
                    self.close(tracked)  # nothing more of it is saved; the others' saves are
                    continue
            plan.awaited |= isinstance(tracked.handoff, PrefillHandoff)
            if upto >= min(vllm.num_prompt_tokens, len(tracked.chain)) and not self._options.save_decode:
                self.close(tracked)
        if not asked:
            return
        number = self.number(plan)
        requests = [request for request, *_ in asked]
        names = [request.request for request in requests]
        self._reading.update({name: [number, 0] for name in names})
        plan.saves = LazySaves(names, [held for _, held, _ in asked], functools.partial(self._outline, asked))
        plan.work = work_of(requests)

    def _more(self, asked: list[LookupRequest], tracked: RequestState, upto: int, output: Any) -> None:
        asked += self._ask_states(tracked, upto, output) if self._states else self._ask(tracked, upto)

    def _outline(self, asked: Sequence[LookupRequest]) -> list[PartDescriptor]:
        outlined: list[PartDescriptor] = []
        try:
            outlined = self._parts(asked)
        except Exception:  # noqa: BLE001 - told below, with the request that is to blame
            for one in asked:
                attempt(lambda one=one: outlined.extend(self._parts([one])), "build_connector_meta")  # type: ignore[misc]
        return outlined

    def _parts(self, asked: Sequence[LookupRequest]) -> list[PartDescriptor]:
        parts: list[PartDescriptor] = []
        for request, held, drafted in asked:
            whole = dataclasses.replace(request, blocks=_signed(held))
            # What a draft model computes behind rows that it does not have is nobody else's to load.
            parts += describe_saves(self.spec if drafted else self.spec.own, [whole], self._options.save_partial)
        return parts

    def _ask(self, tracked: RequestState, upto: int) -> list[LookupRequest]:
        chunk = self.spec.chunk_tokens
        whole = upto == tracked.request.num_prompt_tokens and self._options.save_partial
        if upto // chunk == tracked.saved // chunk and not (whole and upto % chunk):
            return []
        if upto > len(tracked.chain):
            tracked.know_tokens()
        asked = self._request(tracked, self._of_groups(tracked.tables), upto, tail=whole)
        tracked.saved = upto if whole else upto // chunk * chunk
        return [asked]

    def _ask_states(self, tracked: RequestState, upto: int, output: Any) -> list[LookupRequest]:
        """Recurrent state can be continued only where vLLM keeps it: a hit ends at one of these boundaries."""
        offers: dict[int, dict[int, int]] = {}
        state = output.kv_connector_block_state
        for vllm_group, block, boundary in state.boundary_state_offloads.get(tracked.id, ()) if state else ():
            if boundary <= upto:
                offers.setdefault(boundary, {})[vllm_group] = block
        if isinstance(tracked.handoff, PrefillHandoff) and upto == tracked.request.num_prompt_tokens:
            offers[upto] = self._last_states(tracked, upto)
        asked = []
        for boundary, blocks in sorted(offers.items()):
            tables = self._of_groups(tracked.tables)
            for number in self._states:
                size = self.spec.groups[number].block_size
                block = blocks.get(self._vllm_groups[number])
                if block is None or (boundary % size and boundary != tracked.request.num_prompt_tokens):
                    break
                tables[number] = [NULL_BLOCK] * ((boundary - 1) // size) + [block]
            else:
                if boundary > len(tracked.chain):
                    tracked.know_tokens()
                asked.append(self._request(tracked, tables, boundary, tail=True))
                tracked.saved = boundary // self.spec.chunk_tokens * self.spec.chunk_tokens
        return asked

    def _last_states(self, tracked: RequestState, upto: int) -> dict[int, int]:
        """Where this step leaves the states behind the prompt's last token, by vLLM group; no step continues them."""
        found = {}
        for number in self._states:
            vllm_group, position = self._vllm_groups[number], (upto - 1) // self.spec.groups[number].block_size
            table = tracked.tables[vllm_group]
            if position < len(table) and table[position] != NULL_BLOCK:
                found[vllm_group] = table[position]
        return found

    def _request(self, tracked: RequestState, tables: Tables, upto: int, *, tail: bool) -> LookupRequest:
        tracked.reads_tables = True
        request = StepRequest(tracked.id, tracked.chain, (), save=(tracked.saved, upto), tail=tail)
        return request, tables, tracked.drafted

    def _of_groups(self, block_ids: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [block_ids[group] for group in self._vllm_groups]

    def _beyond(self, taken: set[int], block_ids: Sequence[Sequence[int]], computed: int) -> None:
        # Of groups that are not moved, too, such as a left-out draft's: they lie over the same memory.
        for tokens, blocks in zip(self._block_tokens, block_ids, strict=True):
            taken.update(blocks[computed // tokens :])


def _signed(tables: Tables) -> list[np.ndarray]:
    signed = [np.array(table, dtype=np.int64) for table in tables]
    for table in signed:
        table[table == NULL_BLOCK] = -1
    return signed


class _Tables:
    """Block tables of running requests: from vLLM where it offers them, else followed from its own news."""

    def __init__(self, output: Any) -> None:
        self._state = getattr(output, "kv_connector_block_state", None)
        self._output = output
        self._news: dict[str, tuple[bool, Any]] | None = None

    def follow(self, tracked: RequestState) -> None:
        """Bring the request's tables up to date."""
        if self._state is not None:
            # vLLM 0.29 has the tables alone of requests that get blocks in the step.
            told = getattr(self._state, "get_block_ids", None) or self._state.block_ids.get
            tracked.tables = told(tracked.id) or tracked.tables
            return
        if self._news is None:
            cached = self._output.scheduled_cached_reqs
            self._news = {new.req_id: (True, new.block_ids) for new in self._output.scheduled_new_reqs}
            self._news |= {
                request: (request in cached.resumed_req_ids, blocks)
                for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
            }
        whole, blocks = self._news.get(tracked.id, (False, None))
        if whole:
            tracked.tables = tuple(list(ids) for ids in blocks)
        elif blocks is not None:
            tracked.tables = tuple([*old, *new] for old, new in zip(tracked.tables, blocks, strict=True))
