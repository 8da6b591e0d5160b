"""Who computes what in the next step, and who holds which blocks."""

from __future__ import annotations

import numpy as np

from layerflow.engine.cache import NO_BLOCK, PagedCache
from layerflow.engine.config import CacheGroup, EngineConfig
from layerflow.engine.connection import Connection
from layerflow.engine.request import Request, RequestStatus, TokenSpan

MAX_LOAD_ATTEMPTS = 3  # after so many failed loads of a request its prompt is computed


class Scheduler:
    """First come, first served; one token for each running answer, then prefill tiles within the budget.

    Blocks return to their allocator only when the connection says that no transfer touches them.
    """

    def __init__(self, config: EngineConfig, cache: PagedCache, connection: Connection) -> None:
        self._config, self._cache, self._connection = config, cache, connection
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._draining: list[Request] = []

    @property
    def draining(self) -> bool:
        """Some ended request's blocks are still read or written by a transfer."""
        return bool(self._draining)

    def holds(self, request_id: str) -> bool:
        """Is an ended request of this id not quiet yet?"""
        return any(request.id == request_id for request in self._draining)

    def submit(self, request: Request) -> None:
        """Queue a request.

        :raises ValueError: it is longer than this engine can ever take.
        """
        needs = [self._blocks_needed(group, request) for group in self._cache.groups]
        capacity = min(allocator.capacity for allocator in self._cache.allocators)
        if request.positions > self._config.max_positions or max(needs) > capacity:
            raise ValueError(
                f"request {request.id!r} of {len(request.prompt)}+{request.max_tokens} tokens needs {max(needs)} "
                f"blocks; this engine has {capacity} and takes {self._config.max_positions} positions"
            )
        self._waiting.append(request)

    def plan(self) -> list[TokenSpan]:
        """Free what can be freed, admit who fits, and say what the next step computes."""
        self.reap()
        for request in self._running:
            if not self._connection.busy(request):
                self._recycle(request)
        while self._waiting and self._admit(self._waiting[0]):
            self._running.append(self._waiting.pop(0))
        spans, budget = [], self._config.step_tokens
        for request in sorted(self._running, key=lambda request: request.computed < len(request.prompt)):
            span = self._next_span(request, budget)
            if span is not None and self._allocate(span):
                spans.append(span)
                budget -= span.stop - span.start
        return spans

    def end(self, request: Request, state: RequestStatus) -> None:
        """It is finished, aborted, or (as waiting) starts over: its blocks are freed once it is quiet."""
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        request.state = state
        if request not in self._draining:
            self._draining.append(request)
        self.reap()

    def reap(self) -> None:
        """Free the blocks of ended requests that no transfer touches any more."""
        for request in [request for request in self._draining if not self._connection.busy(request)]:
            self._draining.remove(request)
            self._connection.forget(request)
            for number, table in enumerate(request.tables):
                self._cache.allocators[number].release(table)
                self._cache.allocators[number].promise(-self._blocks_needed(self._cache.groups[number], request))
            request.tables = []
            if request.state is RequestStatus.WAITING:
                request.attempt += 1
                self._waiting.insert(0, request)

    def _admit(self, request: Request) -> bool:
        needs = [self._blocks_needed(group, request) for group in self._cache.groups]
        if any(need > pool.unpromised for need, pool in zip(needs, self._cache.allocators, strict=True)):
            return False
        for need, allocator in zip(needs, self._cache.allocators, strict=True):
            allocator.promise(need)
        blocks = -(-request.positions // self._config.block_size)
        request.tables = [np.full(blocks, NO_BLOCK, dtype=np.int64) for _ in self._cache.groups]
        request.hit = self._connection.lookup(request) if request.attempt < MAX_LOAD_ATTEMPTS else 0
        request.computed = request.hit
        request.state = RequestStatus.RUNNING
        return True

    def _next_span(self, request: Request, budget: int) -> TokenSpan | None:
        start, prompt = request.computed, len(request.prompt)
        if start >= prompt:
            return TokenSpan(request, start, start + 1) if budget > 0 else None
        # Steps end where tiles end, so that how a prompt is cut into steps cannot change its bits.
        tile = self._config.tile
        stop = min(prompt, (start + budget) // tile * tile)
        if stop <= start:
            return None
        return TokenSpan(request, start, stop, load=request.hit if start == request.hit else 0)

    def _allocate(self, span: TokenSpan) -> bool:
        """Blocks for everything that the step reads or writes, in every group or in none."""
        wanted = []
        for group, table in zip(self._cache.groups, span.request.tables, strict=True):
            first, stop = self._first_block(group, span.start), -(-span.stop // self._config.block_size)
            wanted.append(first + np.flatnonzero(table[first:stop] == NO_BLOCK))
        if any(len(new) > pool.free for new, pool in zip(wanted, self._cache.allocators, strict=True)):
            return False  # saves still read recycled blocks; a later step finds them free
        for table, new, allocator in zip(span.request.tables, wanted, self._cache.allocators, strict=True):
            blocks = allocator.allocate(len(new))
            assert blocks is not None
            table[new] = blocks
        return True

    def _recycle(self, request: Request) -> None:
        """Give back the blocks that no later query can see."""
        for number, group in enumerate(self._cache.groups):
            gone = request.tables[number][: self._first_block(group, request.computed)]
            self._cache.allocators[number].release(gone)
            gone[:] = NO_BLOCK

    def _first_block(self, group: CacheGroup, computed: int) -> int:
        """The first block that the query at position `computed` still sees."""
        return max(0, computed - group.window + 1) // self._config.block_size if group.window else 0

    def _blocks_needed(self, group: CacheGroup, request: Request) -> int:
        """Blocks of a group with which the request can always go on: all, or a window and a step's tokens."""
        tokens = request.positions
        if group.window:
            tokens = min(tokens, group.window + self._config.step_tokens + 2 * self._config.block_size)
        return -(-tokens // self._config.block_size)
