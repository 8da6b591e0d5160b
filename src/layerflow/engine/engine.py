"""The engine: submit prompts, step until they are answered."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from layerflow.engine.cache import PagedCache
from layerflow.engine.config import EngineConfig
from layerflow.engine.connection import Connection, NullConnection
from layerflow.engine.model import Transformer
from layerflow.engine.request import Request, RequestStatus, Result, TokenSpan, result_of
from layerflow.engine.scheduler import Scheduler

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
