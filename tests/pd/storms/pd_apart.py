"""Reference engines that prefill and decode, each in a process of its own that tests kill and stop."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from e2e.children import PIPE

from layerflow_cli.demo.engines import spoil
from layerflow_engine import Engine
from layerflow_engine.cache import PagedCache
from layerflow_engine.config import TINY_GQA, TINY_HYBRID, TINY_MLA
from layerflow_engine.connection import StepHooks
from layerflow_engine.glue import LayerflowConnection, attach
from layerflow_engine.handoff import DecodeConnection, PrefillConnection
from layerflow_engine.model import Forward, Transformer
from layerflow_engine.request import Request, TokenSpan

CHUNK = 64
MAX_TOKENS = 8
SHAPES = {"gqa": TINY_GQA, "mla": TINY_MLA, "hybrid": TINY_HYBRID}
LAYER_S = 0.01
"""What a layer of the prefiller takes on top of its own arithmetic: there is time to fail in."""
IDLE_S = 0.002


class Told(NamedTuple):
    """An answer.

    :param kv: digest of the prompt's KV, of what is still visible, when the first token came.
    :param cached: prompt tokens that were loaded. :param restarts: loads that failed.
    """

    tokens: tuple[int, ...]
    kv: str
    cached: int
    restarts: int


class Proving(Transformer):
    """A model that keeps a digest of each prompt's KV as it was when its first token was computed."""

    def __init__(self, honest: Transformer) -> None:
        self.config, self.weights, self._layers = honest.config, honest.weights, honest._layers
        self.kv: dict[str, str] = {}

    def forward(self, cache: PagedCache, spans: Sequence[TokenSpan], step: StepHooks) -> Forward:
        out = super().forward(cache, spans, step)
        for request in (span.request for span in spans):
            if request.id in out.logits and not request.output:
                self.kv[request.id] = kv_digest(cache, request)
        return out


def kv_digest(cache: PagedCache, request: Request) -> str:
    """Of the bytes that the prompt's last token reads."""
    found, stop = hashlib.blake2b(digest_size=16), len(request.prompt)
    for layer in sorted(cache.tensors):
        group = cache.groups[cache.group_of[layer]]
        first = max(0, stop - group.window) if group.window else 0
        table = request.tables[cache.group_of[layer]]
        for _, rows in sorted(cache.gather(layer, table, first, stop, stop).items()):
            found.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def proving(shape: str) -> tuple[Engine, Proving]:
    """An engine with such a model, its cache full of rubbish: what never arrives is seen."""
    engine = Engine(SHAPES[shape])
    spoil(engine)
    engine.model = model = Proving(engine.model)
    return engine, model


def alone(shape: str) -> Callable[[str], Told]:
    """What a single engine answers, and the KV that it computes."""
    engine, model = proving(shape)

    def answer(prompt: str) -> Told:
        name = engine.submit(prompt, MAX_TOKENS)
        engine.run()
        return Told(engine.results.pop(name).tokens, model.kv.pop(name), 0, 0)

    return answer


def serve_engine(pipe: PIPE, connect: Callable[..., LayerflowConnection], endpoint: str, name: str, shape: str) -> None:
    """Say "ready"; take ``("ask", id, prompt, tokens)`` and ``("abort", id)``, tell ``("answer", id, Told)``, until
    ``("end",)``, which is answered with the blocks that were never freed."""
    torch.set_num_threads(1)
    engine, model = proving(shape)
    connection = attach(engine, endpoint, name, mode="layerwise", chunk_tokens=CHUNK, connect=connect)
    agent = connection.agent
    agent.wait_warm(20.0)
    pipe.send("ready")
    while True:
        if not engine.step():
            time.sleep(IDLE_S)
        while pipe.poll():
            match pipe.recv():
                case ("ask", str(request), str(prompt), int(tokens)):
                    engine.submit(prompt, tokens, request)
                case ("abort", str(request)):
                    engine.abort(request)
                case ("end",):
                    engine.drain()
                    pipe.send(("lost", sum(each.capacity - each.free for each in set(engine.cache.allocators))))
                    connection.close()
                    return
        for request in list(engine.results):
            result = engine.results.pop(request)
            told = Told(result.tokens, model.kv.pop(request, ""), result.cached_tokens, result.restarts)
            pipe.send(("answer", request, told))


@dataclasses.dataclass(frozen=True)
class Prefiller:
    """Makes the prefill engine's connection, in its process."""

    layer_s: float = LAYER_S

    def __call__(self, agent: Any, mode: Any) -> LayerflowConnection:
        made = Slow(agent, mode)
        made.layer_s = self.layer_s
        return made


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Makes the decode engine's."""

    patience_s: float
    servers: tuple[str, ...]

    def __call__(self, agent: Any, mode: Any) -> LayerflowConnection:
        return DecodeConnection(agent, mode, patience_s=self.patience_s, servers=self.servers)


class Slow(PrefillConnection):
    """A prefiller whose layers take their time."""

    layer_s: float

    def open_step(self, spans: Sequence[TokenSpan]) -> StepHooks:
        return _SlowStep(super().open_step(spans), self.layer_s)


class _SlowStep:
    def __init__(self, honest: StepHooks, layer_s: float) -> None:
        self._honest, self._layer_s = honest, layer_s

    def wait_layer(self, layer: int) -> Collection[str]:
        return self._honest.wait_layer(layer)

    def layer_done(self, layer: int) -> None:
        time.sleep(self._layer_s)
        self._honest.layer_done(layer)

    def __enter__(self) -> StepHooks:
        self._honest.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._honest.__exit__(*error)
