"""How fast bytes move between engine memory and a pool, against the pool's own calls.

Save: from opening a step that computes nothing until the server says that the pool has all its objects. Load: the
arena is emptied first; from the lookup until the last layer is in engine memory. The raw calls move as many
bytes, between memory of their own and the same pool, from a process of their own. All take turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from layerflow.agent.control import Control
from layerflow.agent.step.step import Step
from layerflow.config.pool import MEMORY
from layerflow.errors import LayerflowError
from layerflow.hosts.backend import pool_name
from layerflow.keys import Chain, object_key
from layerflow.spec import DEFAULT_CHUNK_TOKENS
from layerflow_cli.bench.harness import PATIENT, ServerProcess, Worker
from layerflow_cli.bench.pool.raw.process import RawPool, check
from layerflow_cli.bench.pool.services import Behind, behind, emulated
from layerflow_cli.bench.pool.tier import Tier
from layerflow_cli.output import progress

CHUNKS, LAYERS, PIECE_BYTES = 32, 32, 64 << 10
CHUNK_TOKENS = DEFAULT_CHUNK_TOKENS
OTHER_DEPTHS = (8, 64)
WARM_UP_ROUNDS = 2
WAIT_S = 60.0


def measure(
    kind: str = "disk",
    rounds: int = 15,
    chunks: int = CHUNKS,
    layers: int = LAYERS,
    depths: tuple[int, ...] = OTHER_DEPTHS,
    config: Path | None = None,
    cann_emulator: Path | None = None,
) -> dict[str, Any]:
    """Save and load `chunks` objects of `layers` layers of 64 KiB.

    :param rounds: of each; medians are reported.
    :param depths: numbers of layers for which metadata requests are counted as well.
    :param config: settings of a running Mooncake master or MetaService; None = one is started.
    :param cann_emulator: folder of an emulated CANN, for memcache on machines without an NPU.
    :returns: ``save_ratio``, ``load_ratio``: engine ÷ raw throughput; ``save_gbps``, ``load_gbps``, ``raw_save_gbps``,
        ``raw_load_gbps``: 10^9 bytes of payload per second; ``first_byte_us``: from opening a step until its first byte
        was copied to the engine, p50; ``metadata_rpcs_per_step``: requests that a saving step
        and a loading step together made at the pool's metadata service, and the same by number of layers.
    """
    check(kind)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layerflow-bench-")))
        advance = stack.enter_context(progress(3 + WARM_UP_ROUNDS + rounds + len(depths)))
        advance(f"starting {kind}")
        nbytes = chunks * layers * PIECE_BYTES
        most = chunks * PIECE_BYTES * max(layers, *depths, 0)
        pool = stack.enter_context(behind(kind, folder, nbytes + len(depths) * most, config, emulated(cann_emulator)))
        bench = _Bench(stack, pool, max(nbytes, most))
        advance("warming up")
        bench.wait_ready()
        raw = stack.enter_context(RawPool(kind, pool.options, (chunks, layers, PIECE_BYTES)))
        with bench.worker(chunks, layers) as worker:
            seconds: dict[str, list[float]] = {}
            for number in range(WARM_UP_ROUNDS + rounds):
                advance(
                    f"round {number + 1 - WARM_UP_ROUNDS} of {rounds}" if number >= WARM_UP_ROUNDS else "warming up"
                )
                for name, taken in _round(bench, worker, raw, number).items():
                    seconds.setdefault(name, []).append(taken)
            first_byte = statistics.median(bench.first_bytes[WARM_UP_ROUNDS:])
            advance("counting metadata requests")
            requests = bench.requests_of_a_step(worker, raw)
        by_depth: dict[int, int] = {}
        for depth in depths:
            advance(f"counting metadata requests of {depth} layers")
            with bench.worker(chunks, depth) as worker:
                by_depth[depth] = bench.requests_of_a_step(worker, raw)
    median = {name: statistics.median(taken[WARM_UP_ROUNDS:]) for name, taken in seconds.items()}
    gbps = {name: nbytes / median[name] / 1e9 for name in ("save", "load", "raw_save", "raw_load")}
    return {
        "kind": kind,
        "remark": pool.remark,
        "save_ratio": gbps["save"] / gbps["raw_save"],
        "load_ratio": gbps["load"] / gbps["raw_load"],
        **{f"{name}_gbps": value for name, value in gbps.items()},
        "first_byte_us": first_byte * 1e6,
        "metadata_rpcs_per_step": requests,
        **{f"metadata_rpcs_{depth}_layers": count for depth, count in by_depth.items()},
        "chunks": chunks,
        "layers": layers,
        "step_bytes": nbytes,
        "rounds": rounds,
    }


def present(result: dict[str, Any]) -> Iterator[Table]:
    """The result as people read it."""
    remark = f", {result['remark']}" if result["remark"] else ""
    shape = f"{result['chunks']} chunks x {result['layers']} layers x {PIECE_BYTES >> 10} KiB"
    table = Table(title=f"pool: {result['kind']}{remark}: {shape}, {result['rounds']} rounds", title_justify="left")
    for name in ("", "engine (GB/s)", "raw calls (GB/s)", "ratio", "time (ms)", "raw time (ms)", "first byte (us)"):
        table.add_column(name, justify="right" if name else "left")
    for way in ("save", "load"):
        own, raw = result[f"{way}_gbps"], result[f"raw_{way}_gbps"]
        times = (f"{result['step_bytes'] / gbps / 1e6:.1f}" for gbps in (own, raw))
        first = f"{result['first_byte_us']:,.0f}" if way == "load" else ""
        table.add_row(way, f"{own:.2f}", f"{raw:.2f}", f"{result[f'{way}_ratio']:.2f}", *times, first)
    yield table
    depths = {name: count for name, count in result.items() if name.startswith("metadata_rpcs_")}
    counted = Table(title=f"pool: metadata requests of a saving and a loading step{remark}", title_justify="left")
    counted.add_column("layers", justify="right")
    counted.add_column("requests", justify="right")
    for name, count in depths.items():
        word = name.removeprefix("metadata_rpcs_").removesuffix("_layers")
        counted.add_row(str(result["layers"]) if word == "per_step" else word, f"{count:,}")
    yield counted


def _round(bench: _Bench, worker: Worker, raw: RawPool, number: int) -> dict[str, float]:
    """Save and load once each; who goes first changes from round to round."""
    chain = _prompt(worker)
    names = [secrets.token_hex(24) for _ in range(len(chain) // CHUNK_TOKENS)]
    calls: list[tuple[str, Callable[[], float]]] = [
        ("save", lambda: bench.save(worker, chain)),
        ("raw_save", lambda: raw.save(names)),
        ("load", lambda: bench.load(worker, chain)),
        ("raw_load", lambda: raw.load(names)),
    ]
    if number % 2:
        calls = [calls[1], calls[0], calls[3], calls[2]]
    seconds = {name: call() for name, call in calls}
    raw.forget([*names, *_names(worker, chain)])
    return seconds


def _prompt(worker: Worker) -> Chain:
    """Whole chunks, and one token more that a hit leaves to compute."""
    tokens = np.random.default_rng().integers(0, 1 << 30, worker.tokens + 1)
    return worker.agent.chain(tokens)


def _names(worker: Worker, chain: Chain) -> list[str]:
    """What the worker's objects of a prompt are called in a pool."""
    return [pool_name(object_key(digest, 0, worker.spec.shard)) for digest in chain.digests]


class _Bench:
    """A server over a pool, seen through an engine's eyes.

    :param stack: ends it.
    :param step_bytes: the largest step's.
    :ivar first_bytes: of each load, seconds from opening its step until a lane copied the first byte.
    """

    def __init__(self, stack: ExitStack, pool: Behind, step_bytes: int) -> None:
        self._pool = pool
        self._names = itertools.count()
        self.first_bytes: list[float] = []
        settings: dict[str, object] = {
            **PATIENT,
            **pool.settings,
            "pool.size": 3 * step_bytes,  # half of it may wait to be written
            "pool.lookup_timeout_ms": 5_000,
            "transfer.save_timeout_ms": 60_000,
        }
        self._server = ServerProcess(settings)
        stack.callback(self._server.close)
        self._control = stack.enter_context(closing(Control(self._server.endpoint, engine="bench")))
        self._tier = None if pool.kind == MEMORY else stack.enter_context(Tier(self._server.endpoint))

    @contextmanager
    def worker(self, chunks: int, layers: int) -> Iterator[Worker]:
        """An engine worker with a cache of `layers` layers; a block is a chunk's layer: the pool's pieces."""
        tokens = chunks * CHUNK_TOKENS
        endpoint = self._server.endpoint
        worker = Worker(endpoint, layers, tokens, chunks * PIECE_BYTES, CHUNK_TOKENS, planes=("kv",))
        try:
            yield worker
        finally:
            worker.close()

    def wait_ready(self) -> None:
        """Until no transfer pays for the first touch of the pool's memory."""
        if self._tier is not None:
            self._tier.wait_ready()

    def save(self, worker: Worker, chain: Chain) -> float:
        """Seconds until the pool has a new prompt's objects."""
        request = worker.saving(chain)
        wanted = self._tier.written + len(chain.digests) if self._tier is not None else 0
        began = time.monotonic()
        with worker.agent.open_step([request]) as step:
            for layer in range(worker.layers):
                step.wait_layer(layer)
                step.layer_done(layer)
        stored, ended = worker.agent.wait_idle(request.request, WAIT_S), time.monotonic()
        if self._tier is not None:
            stored, ended = self._tier.wait_written(wanted, WAIT_S), self._tier.written_at
        if not stored or request.request not in worker.agent.poll().saved:
            raise LayerflowError(f"the benchmark's prompt was not stored; {self._story()}")
        return ended - began

    def load(self, worker: Worker, chain: Chain) -> float:
        """Seconds from the lookup of a stored prompt until its last layer is there; from the pool, not the arena."""
        before = 0
        if self._tier is not None:
            self._tier.empty_arena()
            before = self._tier.fetched
        name = f"load-{next(self._names)}"
        began = time.monotonic()
        hit = worker.agent.lookup(name, chain)
        if hit.tokens != worker.tokens:
            raise LayerflowError(f"a stored prompt was not found again: {hit.tokens} tokens; {self._story()}")
        request = dataclasses.replace(worker.loading(chain, hit), request=name)  # its lease ends with the step
        opened = time.monotonic()
        with worker.agent.open_step([request]) as step:
            assert isinstance(step, Step)  # it has something to load
            outcome = step.wait_all()
            seconds = time.monotonic() - began
            if not outcome:
                raise LayerflowError(f"a stored prompt could not be loaded: {step.failed}; {self._story()}")
            for layer in range(worker.layers):
                step.layer_done(layer)
        worker.agent.wait_idle(request.request, WAIT_S)  # and the lane has noted when it copied
        self.first_bytes.append(min(span.start for span in step.trace.spans if span.lane == "load") - opened)
        if self._tier is None:
            self._control.purge()
        elif self._tier.fetched - before != len(chain.digests):
            raise LayerflowError(f"a load did not come from the pool; {self._story()}")
        return seconds

    def requests_of_a_step(self, worker: Worker, raw: RawPool) -> int:
        """What the pool's metadata service was asked for one saving and one loading step."""
        chain = _prompt(worker)
        before = self._pool.requests()
        self.save(worker, chain)
        self.load(worker, chain)
        made = self._pool.requests() - before
        raw.forget(_names(worker, chain))
        return made

    def _story(self) -> str:
        return "is the pool large enough?" if self._tier is None else self._tier.story()
