"""One prompt is saved, looked up and loaded again under some settings, in one of the ways an engine can wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from agent.recording import Calls, recorded
from e2e.known import KnownWorker, Run, eventually

from layerflow.agent import NoStep, Step, StepRequest
from layerflow.agent.values import LoadResult
from layerflow.flow.commands import Call
from layerflow.keys import Chain
from layerflow.server import EmbeddedServer
from layerflow.server.incoming import IncomingFetches, IncomingJob
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.wire import codec
from layerflow.wire.host_messages import Fetched
from layerflow.wire.messages import Beat, Message, Terms

LAYERS, BLOCK, CHUNK, TOKENS = 6, 4, 16, 130
PATIENCE_S = 30.0


def spec_of(shape: str) -> ModelSpec:
    """A small model of one of the cache shapes; a block of a layer has about 1 KiB."""
    if shape == "mla":
        planes = (Plane("latent", "uint8", (192,)), Plane("rope", "uint8", (64,)))
        groups = (GroupSpec("mla", BLOCK, tuple(range(LAYERS)), planes),)
    else:
        planes = (Plane("k", "uint8", (128,)), Plane("v", "uint8", (128,)))
        groups = (GroupSpec("full", BLOCK, tuple(range(LAYERS)), planes),)
    if shape == "hybrid":
        groups = (
            GroupSpec("full", BLOCK, tuple(range(0, LAYERS, 2)), planes),
            GroupSpec("sliding", BLOCK, tuple(range(1, LAYERS, 2)), planes, window=40),
        )
    if shape == "compressed":  # two layers of a window, rows and a state each
        row = (Plane("row", "uint8", (256,)),)
        groups = (
            GroupSpec("sliding", BLOCK, (0, 3), row, window=40),
            GroupSpec("mla", 4 * BLOCK, (1, 4), row, ratio=4),
            GroupSpec("sliding", BLOCK, (2, 5), (Plane("state", "uint8", (256,)),), window=8),
        )
    return ModelSpec("knobs", shape, groups, chunk_tokens=CHUNK)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Messages on the control socket, both ways, by kind; heartbeats and new terms left out."""
    seen: Counter[str] = Counter()
    encode = codec.encode

    def count(message: Message) -> bytes:
        if not isinstance(message, Beat | Terms):
            seen[type(message).__name__] += 1
        return encode(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "encode", count)
        yield seen


ATTEMPTS = 10
"""A load that the machine interrupts is reported in more pieces, and a save that it interrupts is given up: one of so
many is as on an idle machine."""


class HostCalls:
    """What the core had a host bring: the largest call of more than one layer of one object, and the most at once."""

    def __init__(self) -> None:
        self.count = 0
        self.most_bytes = 0
        self.most_at_once = 0
        self._under_way: dict[int, int] = {}

    def began(self, call: Call) -> None:
        self.count += 1
        if call.hi - call.lo > 1 or call.layer_hi - call.layer_lo > 1:
            self.most_bytes = max(self.most_bytes, call.nbytes)
        self._under_way[call.call] = call.nbytes
        if len(self._under_way) > 1:
            self.most_at_once = max(self.most_at_once, sum(self._under_way.values()))

    def ended(self, call: int) -> None:
        self._under_way.pop(call, None)


@contextmanager
def host_calls() -> Iterator[HostCalls]:
    """The calls that servers of this process give to their hosts."""
    seen, obey, call_ended = HostCalls(), IncomingFetches.obey, IncomingFetches.call_ended

    def began(self: IncomingFetches, job: IncomingJob, command: Any) -> None:
        if isinstance(command, Call):
            seen.began(command)
        obey(self, job, command)

    def ended(self: IncomingFetches, message: Fetched) -> None:
        seen.ended(message.call)
        call_ended(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IncomingFetches, "obey", began)
        patch.setattr(IncomingFetches, "call_ended", ended)
        yield seen


class Passage:
    """See the module.

    :ivar messages: of the load's step, from its opening until nothing of it is left.
    :ivar kinds: the same by kind.
    :ivar calls: every copy of the load's lanes.
    :ivar host_calls: what its hit had brought from the tier.
    """

    def __init__(self, server: EmbeddedServer, worker: KnownWorker, source: str) -> None:
        self._server, self._worker, self._source = server, worker, source
        self.messages = 0
        self.kinds: dict[str, int] = {}
        self.calls = Calls()
        self.host_calls = HostCalls()

    @property
    def by_host(self) -> bool:
        """Whether a host brings what is loaded."""
        return self._source == "tier"

    def save(self, tokens: int = TOKENS) -> Run:
        """A prompt that nobody has seen, saved and, where loads come from a tier, written to it.

        Saves are given up rather than awaited where a pool is late, as it may be on a busy machine: another is tried.
        """

        def stored() -> Run | None:
            run = self._worker.serve(self._worker.prompt(tokens), look=False)
            return None if self._worker.agent.poll().failed_saves else run

        run = next(run for run in (stored() for _ in range(ATTEMPTS)) if run is not None)
        tier = self._server.server.tier
        if tier is not None:
            assert eventually(lambda: not self._on_loop(tier.statistics).writing_jobs, PATIENCE_S)
        return run

    def load(self, saved: Run, way: str) -> Run:
        """The same prompt again, as another request. Its hit must be whole and every byte right."""
        if self.by_host:
            self._on_loop(self._server.server.pool.clear)
        with host_calls() as self.host_calls:
            run = self._found(saved.chain)
            with counted() as messages, recorded() as self.calls:
                wrong = getattr(self, way)(run)
                assert self._worker.agent.wait_idle(run.name, PATIENCE_S), "the load's step never ended"
        self.messages = messages.total()
        self.kinds = dict(messages)
        assert wrong == 0, f"{wrong} wrong bytes in a hit of {run.hit.tokens} tokens"
        self._worker.retire(run)
        return run

    # -- the ways an engine can wait ------------------------------------------------------------------

    def wait_layer(self, run: Run) -> int:
        with self._open(run, 0, run.hit.tokens) as step:
            return self._worker.forward(step, [run])

    def wait_all(self, run: Run) -> int:
        with self._open(run, 0, run.hit.tokens) as step:
            _ready(step.wait_all())
            return self._worker.forward(step, [run])

    def background(self, run: Run) -> int:
        """No pass runs beside it: the step is looked at until its loads have ended, as vLLM's scheduler does."""
        with self._open(run, 0, run.hit.tokens) as step:
            assert eventually(lambda: step.wait_loaded(0.0), PATIENCE_S)
            _ready(step.wait_all())
        return self._wrong(run, 0, run.hit.tokens)

    def inside_block(self, run: Run) -> int:
        stop = min(run.hit.tokens, TOKENS - CHUNK - 3)
        whole = stop // BLOCK * BLOCK
        assert stop % BLOCK, "the hit ends at a block"
        with self._open(run, whole, stop) as tail:
            _ready(tail.wait_all())
        run.hit = replace(run.hit, tokens=stop)
        with self._open(run, 0, whole) as step:
            wrong = 0
            for layer in range(LAYERS):
                _ready(step.wait_layer(layer))
                wrong += self._worker.wrong_bytes(run, layer, self._worker.readable(run, layer), stop)
                step.layer_done(layer)
            return wrong

    # -- inside -----------------------------------------------------------------------------------------

    def _found(self, chain: Chain) -> Run:
        """The prompt, looked up until it is found: what the backend tells too late for a lookup is none of its hit."""
        tried: list[Run] = []

        def is_whole() -> bool:
            for run in tried:
                self._worker.agent.drop_lease(run.name)
                self._worker.retire(run)
            tried[:] = [self._worker.admit(chain)]
            return tried[0].hit.tokens >= len(chain) // CHUNK * CHUNK

        assert eventually(is_whole, PATIENCE_S), f"a hit of {tried[0].hit.tokens} tokens"
        return tried[0]

    def _open(self, run: Run, start: int, stop: int) -> Step | NoStep:
        request = StepRequest(run.name, run.chain, run.tables, (start, stop), run.hit)
        return self._worker.agent.open_step([request])

    def _wrong(self, run: Run, start: int, stop: int) -> int:
        layers = range(LAYERS)
        return sum(self._worker.wrong_bytes(run, la, max(start, self._worker.readable(run, la)), stop) for la in layers)

    def _on_loop(self, call: Callable[[], Any]) -> Any:
        return self._server.call(call)


def _ready(outcome: LoadResult) -> None:
    assert outcome, outcome.failed
