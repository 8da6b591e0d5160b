"""The engine: submit prompts, step until they are answered."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from layerflow_engine.cache import NO_BLOCK, BlockAllocator, PagedCache
from layerflow_engine.config import CacheGroup, EngineConfig
from layerflow_engine.connection import Connection, NullConnection
from layerflow_engine.model import Transformer
from layerflow_engine.request import Request, RequestStatus, Result, TokenSpan, result_of

# Who computes what in the next step, and who holds which blocks.


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


DEFAULT_DRAIN_S = 30.0
POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class StepReport:
    """One forward pass, for whoever draws it.

    :param spans: what was computed.
    :param waited_s: per layer: seconds until its loaded KV was in place.
    :param computed_s: per layer: seconds of its own work.
    :param failed: ids of the requests that start over because KV did not arrive.
    """

    spans: tuple[TokenSpan, ...]
    waited_s: tuple[float, ...]
    computed_s: tuple[float, ...]
    failed: tuple[str, ...]


class Engine:
    """Greedy decoding of byte-level prompts on a paged cache.

    :param connection: moves KV; None = the engine computes everything itself. It usually needs the
        engine's own tensors and weights: see :meth:`connect`.
    :param device: of the cache; see :class:`PagedCache`.
    """

    def __init__(self, config: EngineConfig, connection: Connection | None = None, device: str = "cpu") -> None:
        self.config = config
        self.model = Transformer(config)
        self.cache = PagedCache(config, device)
        self.results: dict[str, Result] = {}
        self.last_step: StepReport | None = None
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self.connect(connection or NullConnection())

    def connect(self, connection: Connection) -> None:
        """Use `connection` from now on.

        :raises RuntimeError: requests are on their way.
        """
        if self._requests:
            raise RuntimeError(f"{len(self._requests)} requests are unfinished; connect before or after them")
        self._connection = connection
        self._scheduler = Scheduler(self.config, self.cache, connection)

    def reset(self, model_content: str = "") -> None:
        """Call it before the weights change: nothing computed with the old ones is loaded again.

        :param model_content: the new weights' name, for engines that share what they store.
        :raises RuntimeError: requests are on their way.
        """
        if self._requests:
            raise RuntimeError(
                f"{len(self._requests)} requests are unfinished; replace the weights before or after them"
            )
        self._connection.reset(model_content)

    def submit(self, prompt: str | bytes, max_tokens: int, request_id: str = "") -> str:
        """Queue a prompt; returns its id.

        :raises ValueError: it is empty, too long for this engine, or its id is taken.
        """
        raw = prompt.encode() if isinstance(prompt, str) else prompt
        name = request_id or f"request-{next(self._numbers)}"
        if not raw or max_tokens < 1:
            raise ValueError(f"request {name!r}: an empty prompt or max_tokens {max_tokens} below 1 has no answer")
        if name in self._requests or self._scheduler.holds(name) or "~" in name:
            raise ValueError(f"request {name!r} is still on its way, or its id has a ~; use another id")
        tokens = np.frombuffer(raw, dtype=np.uint8).astype(np.int64)
        request = Request(name, tokens, max_tokens, time.perf_counter())
        self._scheduler.submit(request)
        self._requests[name] = request
        return name

    def step(self) -> bool:
        """One forward pass; False if nothing could be computed now."""
        self._connection.poll()
        spans = self._scheduler.plan()
        if not spans:
            return False
        with self._connection.open_step(spans) as hooks:
            out = self.model.forward(self.cache, spans, hooks)
        for span in spans:
            request = span.request
            if span.load:
                request.waited_s += sum(out.waited_s)
            if request.id in out.failed:
                self._scheduler.end(request, RequestStatus.WAITING)
                continue
            request.computed = span.stop
            if request.id in out.logits:
                self._append(request, int(out.logits[request.id].argmax()))
        self.last_step = StepReport(tuple(spans), tuple(out.waited_s), tuple(out.computed_s), tuple(sorted(out.failed)))
        return True

    def abort(self, request_id: str) -> None:
        """Give a request up; unknown and ended ones are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._connection.abort(request)
            request.finished_s = time.perf_counter()
            self._scheduler.end(request, RequestStatus.ABORTED)
            self.results[request_id] = result_of(request)

    def run(self, timeout_s: float = DEFAULT_DRAIN_S) -> None:
        """Step until every request has ended.

        :param timeout_s: longest time without progress, while transfers hold the blocks that are needed.
        :raises TimeoutError: that time passed.
        """
        while self._requests:
            if not self.step():
                self._until(self.step, timeout_s)

    def drain(self, timeout_s: float = DEFAULT_DRAIN_S) -> None:
        """Wait until no transfer touches an ended request's blocks: its saves are published or given up.

        :raises TimeoutError: `timeout_s` passed.
        """

        def quiet() -> bool:
            self._connection.poll()
            self._scheduler.reap()
            return not self._scheduler.draining

        self._until(quiet, timeout_s)

    def generate(self, prompts: Sequence[str | bytes], max_tokens: int) -> list[Result]:
        """Answer all prompts in shared steps; results in the prompts' order."""
        names = [self.submit(prompt, max_tokens) for prompt in prompts]
        self.run()
        return [self.results.pop(name) for name in names]

    def _append(self, request: Request, token: int) -> None:
        request.output.append(token)
        now = time.perf_counter()
        if len(request.output) == 1:
            request.first_token_s = now
        if len(request.output) == request.max_tokens:
            request.finished_s = now
            self._scheduler.end(request, RequestStatus.FINISHED)
            self.results[request.id] = result_of(self._requests.pop(request.id))

    def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.perf_counter() + timeout_s
        while not done():
            if time.perf_counter() > deadline:
                raise TimeoutError(f"transfers still hold blocks after {timeout_s} s; is the server alive?")
            time.sleep(POLL_S)
