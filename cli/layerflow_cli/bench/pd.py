"""Prefill and decode in engines of their own: how much of the way to the decoder's engine hides behind the prefill.

Exposed is the time from the end of the prefiller's pass to the last byte in the decoder's engine. Its bound is this and
nothing else, with t = T/L, c = the prefiller's measured compute per layer, and hops one after the other, each of which
needs t for a layer::

    exposed_min = hops * t + max(0, t - c) * (L - 1)        bound = 1 - exposed_min / T

``follow``: the decoder loads layers as they are stored. ``whole``: it begins once all of them are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from layerflow.agent import Control, Follow, Hit
from layerflow.errors import ConfigError, LayerflowError
from layerflow.observe.logs import configure as configure_logs
from layerflow_cli.bench.harness import PATIENT, ServerProcess, Worker

TOKENS = 2048
LAYER_BYTES = 1 << 20
WAIT_S = 60.0
CONTENT = "bench-pd"
HOPS = {1: 2, 2: 3}
"""By servers: from the prefiller's engine into the arena, perhaps from there into that of the decoder's server,
and into the decoder's engine; each over an emulated link of its own."""

RequestRoute = Literal["follow", "whole"]
Pipe = multiprocessing.connection.Connection


def measure(
    layers: int = 60, compute_ms: float = 838.0, transfer_ms: float = 167.0, servers: int = 1, runs: int = 5
) -> dict[str, Any]:
    """Medians of `runs`, both ways in turn.

    :param compute_ms: of the prefiller's forward pass.
    :param transfer_ms: T: what the emulated link needs for all layers, on each hop.
    :param servers: 1: prefiller and decoder share one. 2: each has its own, and a link is between their arenas.
    :returns: per way: exposed time (ms), overlap, its bound, and how much of it was reached.
    :raises ConfigError: more servers than can be measured.
    """
    if servers not in HOPS:
        raise ConfigError(f"--servers {servers}: prefill and decode are measured over one server or two")
    torch.set_num_threads(1)
    gbps = layers * LAYER_BYTES / (transfer_ms / 1e3) / 1e9
    settings = PATIENT | {"pool.size": "1GiB", "pool.link_gbps": gbps}
    exposed: dict[RequestRoute, list[float]] = {"follow": [], "whole": []}
    computed: list[float] = []
    with _servers(settings, servers, gbps) as (near, far):
        decoder = Worker(near.endpoint, layers, TOKENS, LAYER_BYTES, content=CONTENT, engine="decoder")
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        prefiller = context.Process(
            target=prefill, args=(theirs, far.endpoint, layers, compute_ms / layers / 1e3), daemon=True
        )
        prefiller.start()
        theirs.close()
        watching = Control(far.endpoint, "bench-pd")
        others = (far.endpoint,) if far is not near else ()
        try:
            _hear(pipe)
            for run in range(runs):
                for way in ("follow", "whole"):
                    took, inside = _hand_off(decoder, watching, pipe, f"{way}-{run}", way, others)
                    exposed[way].append(took)
                    computed.append(inside)
            pipe.send(None)
        finally:
            pipe.close()
            prefiller.join(WAIT_S)
            watching.close()
            decoder.close()
    inside = statistics.median(computed)
    return {
        "layers": layers, "compute_ms": inside * 1e3, "transfer_ms": transfer_ms, "servers": servers,
        "hops": HOPS[servers], "link": "emulated", "bytes": layers * decoder.layer_bytes,
        **{way: _figures(seconds, transfer_ms / 1e3, layers, inside / layers, HOPS[servers])
           for way, seconds in exposed.items()},
    }  # fmt: skip


@contextlib.contextmanager
def _servers(settings: dict[str, object], count: int, gbps: float) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """The decoder's and the prefiller's: one, or two of which the first reads from the second."""
    far = ServerProcess(settings | ({"peers.serve": "true"} if count == 2 else {}))
    near = far
    try:
        if count == 2:
            near = ServerProcess(settings | {"peers.learn": "true", "peers.link_gbps": gbps})
        yield near, far
    finally:
        if near is not far:
            near.close()
        far.close()


def exposed_bound(transfer: float, layers: int, per_layer: float, hops: int) -> float:
    """The least time that can be exposed, in seconds: see the module."""
    one = transfer / layers
    return hops * one + max(0.0, one - per_layer) * (layers - 1)


def _figures(seconds: list[float], transfer: float, layers: int, per_layer: float, hops: int) -> dict[str, Any]:
    exposed = statistics.median(seconds)
    overlap, bound = 1 - exposed / transfer, 1 - exposed_bound(transfer, layers, per_layer, hops) / transfer
    return {
        "exposed_ms": exposed * 1e3,
        "overlap": overlap,
        "bound": bound,
        "of_bound": overlap / bound if bound > 0 else None,
        "runs_ms": [each * 1e3 for each in seconds],
    }


def _hand_off(
    decoder: Worker, watching: Control, pipe: Pipe, name: str, way: RequestRoute, servers: tuple[str, ...]
) -> tuple[float, float]:
    """Seconds that were exposed, and of the prefiller's compute.

    :param watching: at the prefiller's server. :param servers: its address, where the decoder's is another one.
    """
    chain = decoder.prompt()
    pipe.send((name, chain.tokens.tolist()))
    if way == "whole":
        ended = watching.watch_handoff(name, WAIT_S)
        if ended.state != "complete":
            raise LayerflowError(f"hand-off {name!r} is {ended.state}: {ended.reason}")
    hit = decoder.agent.lookup(name, chain, Follow(time.monotonic() + WAIT_S, name, servers))
    if hit.reason or hit.tokens != decoder.tokens - 1:
        raise LayerflowError(f"hand-off {name!r}: a hit of {hit.tokens} tokens; {hit.reason or 'is the pool full?'}")
    last = _load(decoder, chain, hit, name)
    ended_at, inside = _hear(pipe)
    decoder.agent.control.release_handoff(name, servers)
    return last - ended_at, inside


def _load(decoder: Worker, chain: Any, hit: Hit, name: str) -> float:
    """Load the hit in the background; monotonic seconds at which its last byte was in place."""
    # Under the lookup's name: what is not stored yet is loaded by the request that has hit it.
    request = replace(decoder.loading(chain, hit), request=name)
    with decoder.agent.open_step([request], WAIT_S) as step:
        outcome = step.wait_all()
        last = time.monotonic()
        if not outcome:
            raise LayerflowError(f"hand-off {name!r}: loading failed: {step.failed[0].reason}")
    decoder.agent.wait_idle(request.request, WAIT_S)
    return last


def _hear(pipe: Pipe) -> Any:
    if not pipe.poll(WAIT_S):
        raise LayerflowError("the prefiller's process does not answer")
    return pipe.recv()


def prefill(pipe: Pipe, endpoint: str, layers: int, layer_s: float) -> None:
    """The prefiller's process: prompts come as (hand-off, tokens); answers go as (end of the pass, its compute)."""
    torch.set_num_threads(1)
    configure_logs("error", "console")
    worker = Worker(endpoint, layers, TOKENS, LAYER_BYTES, content=CONTENT, engine="prefiller")
    control = worker.agent.control
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        name, tokens = job
        chain = worker.agent.chain(tokens)
        opened = control.open_handoff(name, chain, len(chain))
        if not opened:
            raise LayerflowError(f"hand-off {name!r} was {opened.state}: {opened.reason}")
        request = worker.saving(chain)
        inside = 0.0
        with worker.agent.open_step([request]) as step:
            for layer in range(layers):
                began = time.monotonic()
                time.sleep(layer_s)
                inside += time.monotonic() - began
                step.layer_done(layer)
            ended_at = time.monotonic()
        control.end_handoff(name, tokens=len(chain))
        worker.agent.wait_idle(request.request, WAIT_S)
        pipe.send((ended_at, inside))
    worker.close()
