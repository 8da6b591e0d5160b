"""Who computes what in the next step, and who holds which blocks."""

from __future__ import annotations

from collections import Counter

import numpy as np

from layerflow.engine.cache import NO_BLOCK, BlockAllocator, PagedCache
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
        needs = self._needs(request)
        if request.positions > self._config.max_positions or any(need > pool.capacity for pool, need in needs.items()):
            raise ValueError(
                f"request {request.id!r} of {len(request.prompt)}+{request.max_tokens} tokens needs "
                f"{max(needs.values())} blocks; this engine has {min(pool.capacity for pool in needs)} and takes "
                f"{self._config.max_positions} positions"
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
            if request.tables:
                for number, table in enumerate(request.tables):
                    self._cache.allocators[number].release(table)
                for allocator, need in self._needs(request).items():
                    allocator.promise(-need)
            request.tables = []
            if request.state is RequestStatus.WAITING:
                request.attempt += 1
                self._waiting.insert(0, request)

    def _admit(self, request: Request) -> bool:
        needs = self._needs(request)
        if any(need > allocator.unpromised for allocator, need in needs.items()):
            return False
        for allocator, need in needs.items():
            allocator.promise(need)
        request.tables = [
            np.full(-(-request.positions // group.block_size), NO_BLOCK, dtype=np.int64) for group in self._cache.groups
        ]
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
        wanted, needs = [], Counter[BlockAllocator]()
        for group, table, allocator in zip(
            self._cache.groups, span.request.tables, self._cache.allocators, strict=True
        ):
            first, stop = self._first_block(group, span.start), -(-span.stop // group.block_size)
            wanted.append(first + np.flatnonzero(table[first:stop] == NO_BLOCK))
            needs[allocator] += len(wanted[-1])
        if any(need > allocator.free for allocator, need in needs.items()):
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
        return max(0, computed - group.window + 1) // group.block_size if group.window else 0

    def _needs(self, request: Request) -> Counter[BlockAllocator]:
        """Blocks with which the request can always go on: per group all, or a window and a step's tokens."""
        needs = Counter[BlockAllocator]()
        for group, allocator in zip(self._cache.groups, self._cache.allocators, strict=True):
            tokens = request.positions
            if group.window:
                tokens = min(tokens, group.window + self._config.step_tokens + 2 * group.block_size)
            needs[allocator] += -(-tokens // group.block_size)
        return needs
