"""What layerflow costs where it cannot help: prompts nobody has seen, and steps with nothing to move.

Time to first token (TTFT): one reference engine, every prompt new, with and without a server (a process of
its own), in the order A B B A A B B A, so that drift of the machine cancels. ``ttft_ratio`` is the median of
the ratios of neighbours: a slow moment of the machine spoils the pairs that it hits, not the medians of
both sides. It holds everything: the lookup, the step, the saves that leave while the prompt is computed.

Decode steps and lookups: the time inside layerflow's calls on the engine's thread, the caller's own work
and the stopwatch not counted.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from layerflow.agent import StepRequest
from layerflow.errors import ConfigError, LayerflowError
from layerflow_cli.bench.harness import WARM_TIMEOUT_S, Percentiles, percentiles, serving
from layerflow_cli.bench.overlap import multiplying
from layerflow_engine import Engine, NullConnection
from layerflow_engine.config import PRESETS
from layerflow_engine.connection import Connection, StepHooks
from layerflow_engine.glue import LayerflowConnection, attach
from layerflow_engine.request import Request, TokenSpan

WAIT_S = 60.0
BETWEEN_MS = 1.0
DECODE_PROMPT = 300
T = TypeVar("T")


def measure(
    preset: str = "gqa",
    prompt_tokens: int = 1024,
    pairs: int = 25,
    decode_steps: int = 250,
    decode_batch: int = 8,
    lookups: int = 600,
    lookup_tokens: int = 2048,
) -> dict[str, Any]:
    """Three measurements against one server.

    :param prompt_tokens: of the prompts whose TTFT is taken.
    :param pairs: prompts with layerflow, and as many without.
    :param decode_batch: requests that every decode step answers.
    :param lookups: of each kind; 1 ms of matrix products before each, as an engine's caches are cold too.
    :returns: ``ttft_ratio`` and ``ttft_ms`` (medians ``with`` and ``without``); in microseconds, p50 and p99:
        ``decode_step_us`` (what layerflow's calls in one step take: poll, busy, open_step, wait_layer and
        layer_done of every layer, close; ``decode_gross_us`` by the stopwatch, less the median of
        ``decode_bare_us``, the same calls to a connection that does nothing, in turns: after a layer's
        compute the clock alone comes from cold caches and takes longer than what it times),
        ``decode_agent_us`` (the agent's share for an engine that tells it of its decoding requests too, caches
        warm), ``lookup_us`` (digests of a new prompt and the lookup that misses) and ``lookup_hit_us`` (the same
        for a hit, with the choice of how to use it).
    """
    torch.set_num_threads(1)
    longest = max(prompt_tokens, DECODE_PROMPT + 2 * (decode_steps + decode_batch)) + 64
    if preset not in PRESETS:
        raise ConfigError(f"preset {preset}: use one of {', '.join(PRESETS)}")
    config = PRESETS[preset]
    blocks = decode_batch * longest // config.block_size + 64
    engine = Engine(dataclasses.replace(config, max_positions=longest, num_blocks=blocks))
    with serving(pool__size="1GiB", log__level="error") as server:
        connection = attach(engine, server.endpoint, "bench-miss")
        try:
            if not connection.agent.wait_warm(WARM_TIMEOUT_S):
                raise LayerflowError("the arena was not mapped in time; is the machine out of memory?")
            prompts = _Prompts()
            ttft = _first_tokens(engine, connection, prompts, prompt_tokens, pairs)
            gross, bare = _decode_steps(engine, connection, prompts, decode_batch, decode_steps)
            told = _told_decode_steps(connection, decode_batch, decode_steps)
            missed, hit = _lookups(connection, prompts, lookup_tokens, lookups)
        finally:
            connection.close()
    return ttft | {
        "decode_step_us": {name: round(gross[name] - bare["p50"], 2) for name in gross},
        "decode_gross_us": gross,
        "decode_bare_us": bare,
        "decode_agent_us": told,
        "lookup_us": missed,
        "lookup_hit_us": hit,
        "layers": config.num_layers,
        "decode_batch": decode_batch,
    }


class _Prompts:
    """Random bytes: prompts that nobody has seen."""

    def __init__(self) -> None:
        self._random = np.random.default_rng()

    def __call__(self, tokens: int) -> bytes:
        return self._random.integers(0, 256, tokens, dtype=np.uint8).tobytes()


class Stopwatch:
    """Adds up the time inside calls, nanoseconds."""

    def __init__(self) -> None:
        self.spent = 0

    def __call__(self, call: Callable[..., T], *arguments: Any) -> T:
        began = time.perf_counter_ns()
        result = call(*arguments)
        self.spent += time.perf_counter_ns() - began
        return result

    def take(self) -> int:
        """Read and start again from zero."""
        spent, self.spent = self.spent, 0
        return spent


class TimedConnection:
    """A connection that adds up the time the engine spends in it.

    :ivar inner: the one that answers; may be exchanged between steps in which nothing moves.
    """

    def __init__(self, inner: Connection, watch: Stopwatch) -> None:
        self.inner, self._watch = inner, watch

    def lookup(self, request: Request) -> int:
        return self._watch(self.inner.lookup, request)

    def open_step(self, spans: Sequence[TokenSpan]) -> StepHooks:
        return _TimedStep(self._watch(self.inner.open_step, spans), self._watch)

    def poll(self) -> None:
        self._watch(self.inner.poll)

    def busy(self, request: Request) -> bool:
        return self._watch(self.inner.busy, request)

    def abort(self, request: Request) -> None:
        self._watch(self.inner.abort, request)

    def forget(self, request: Request) -> None:
        self._watch(self.inner.forget, request)

    def reset(self, model_content: str = "") -> None:
        self.inner.reset(model_content)


class _TimedStep:
    def __init__(self, inner: StepHooks, watch: Stopwatch) -> None:
        self._inner, self._watch = inner, watch
        self._wait, self._done, self._clock = inner.wait_layer, inner.layer_done, time.perf_counter_ns

    def wait_layer(self, layer: int) -> Collection[str]:
        began = self._clock()
        failed = self._wait(layer)
        self._watch.spent += self._clock() - began
        return failed

    def layer_done(self, layer: int) -> None:
        began = self._clock()
        self._done(layer)
        self._watch.spent += self._clock() - began

    def __enter__(self) -> _TimedStep:
        self._watch(self._inner.__enter__)
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch(self._inner.__exit__, *error)


def _first_tokens(
    engine: Engine, connection: LayerflowConnection, prompts: _Prompts, tokens: int, pairs: int
) -> dict[str, Any]:
    def ttft(through: Connection) -> float:
        engine.connect(through)
        result = engine.generate([prompts(tokens)], 1)[0]
        engine.drain(WAIT_S)
        if result.cached_tokens:
            raise LayerflowError(f"a prompt that nobody has seen had a hit of {result.cached_tokens} tokens")
        return result.ttft_s

    alone = NullConnection()
    ttft(connection), ttft(alone)
    with_, without = [], []
    for pair in range(pairs):
        if pair % 2:
            without.append(ttft(alone))
        with_.append(ttft(connection))
        if not pair % 2:
            without.append(ttft(alone))
    ratios = [mine / other for mine, other in zip(with_, without, strict=True)]
    return {
        "ttft_ratio": statistics.median(ratios),
        "ttft_of_medians": statistics.median(with_) / statistics.median(without),
        "ttft_ms": {"with": statistics.median(with_) * 1e3, "without": statistics.median(without) * 1e3},
    }


def _decode_steps(
    engine: Engine, connection: LayerflowConnection, prompts: _Prompts, batch: int, steps: int
) -> tuple[Percentiles, Percentiles]:
    """Time inside the connection in decode steps of the whole batch; and in one that does nothing, in turns."""
    watch = Stopwatch()
    timed = TimedConnection(connection, watch)
    engine.connect(timed)
    names = [engine.submit(prompts(DECODE_PROMPT), 2 * steps + 2 * batch) for _ in range(batch)]
    taken: list[int] = []
    while len(taken) < 2 * steps and engine.step():
        spent = watch.take()
        assert engine.last_step is not None
        spans = engine.last_step.spans
        if len(spans) == batch and all(span.stop > len(span.request.prompt) for span in spans):
            if not taken and not all(connection.agent.wait_idle(name, WAIT_S) for name in names):
                raise LayerflowError(f"the prompts' saves did not end within {WAIT_S} s")
            taken.append(spent)
            timed.inner = connection if len(taken) % 2 else NullConnection()
    timed.inner = connection
    engine.run()
    engine.drain(WAIT_S)
    engine.results.clear()
    return percentiles(taken[3::2]), percentiles(taken[2::2])


def _told_decode_steps(connection: LayerflowConnection, batch: int, steps: int) -> Percentiles:
    """The agent's own calls when it is told of decoding requests: one token each, no chunk complete."""
    agent, watch = connection.agent, Stopwatch()
    chain = agent.chain(range(DECODE_PROMPT))
    table = tuple(np.arange(1, DECODE_PROMPT, dtype=np.int64) for _ in agent.spec.groups)
    taken: list[int] = []
    for number in range(steps):
        at = DECODE_PROMPT + number
        asked = [StepRequest(f"told-{name}", chain, table, save=(at, at + 1)) for name in range(batch)]
        watch(agent.poll)
        for request in asked:
            watch(agent.busy, request.request)
        step = watch(agent.open_step, asked)
        for layer in range(agent.spec.num_layers):
            watch(step.wait_layer, layer)
            watch(step.layer_done, layer)
        watch(step.close)
        taken.append(watch.take())
    return percentiles(taken)


def _lookups(
    connection: LayerflowConnection, prompts: _Prompts, tokens: int, lookups: int
) -> tuple[Percentiles, Percentiles]:
    """Times of lookups that miss and of lookups that hit, taking turns."""
    known = prompts(tokens)
    _store(connection, known)
    work, watch = multiplying(BETWEEN_MS), Stopwatch()
    missed: list[int] = []
    hit: list[int] = []
    for number in range(lookups):
        for prompt, taken in ((prompts(tokens), missed), (known, hit)):
            ids = np.frombuffer(prompt, dtype=np.uint8).astype(np.int64)
            request = Request(f"lookup-{number}", ids, 1, 0.0)
            work()
            found = watch(connection.lookup, request)
            taken.append(watch.take())
            if bool(found) != (prompt is known):
                raise LayerflowError(
                    f"a lookup found {found} tokens of a {'stored' if prompt is known else 'new'} prompt"
                )
            connection.forget(request)
            connection.agent.drop_lease(request.transfer_id)
    return percentiles(missed), percentiles(hit)


def _store(connection: LayerflowConnection, prompt: bytes) -> None:
    """Publish a prompt's chunks, whatever bytes lie in the engine's blocks."""
    agent = connection.agent
    chain = agent.chain(list(prompt))
    blocks = -(-len(prompt) // agent.spec.groups[0].block_size)
    table = tuple(np.ones(blocks, dtype=np.int64) for _ in agent.spec.groups)
    with agent.open_step([StepRequest("store", chain, table, save=(0, len(prompt)), tail=True)]) as step:
        for layer in range(agent.spec.num_layers):
            step.wait_layer(layer)
            step.layer_done(layer)
    if not agent.wait_idle("store", WAIT_S) or "store" not in agent.poll().saved:
        raise LayerflowError("the benchmark's prompt was not stored; is the pool large enough?")
