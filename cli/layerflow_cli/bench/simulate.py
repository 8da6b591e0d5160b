"""What ``layerflow simulate`` predicts of real runs: each under its own configuration, and one under ten others.

Other benchmarks are recorded and replayed. Then conversations about a few documents are served once as they are, which
is recorded, and once under each of the other configurations, which is measured. What is predicted of these from the
first recording alone stands beside what was measured; Kendall's tau says how well their order is predicted.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.table import Table

from layerflow.agent import MISS, StepRequest
from layerflow.agent.control import Control
from layerflow.agent.step.step import Step
from layerflow.errors import LayerflowError
from layerflow.flow.cost import Mode
from layerflow.sim.replay import Replay
from layerflow.sim.rerun import ReplayFigures
from layerflow_cli.bench import overlap, pool
from layerflow_cli.bench.harness import Worker, serving
from layerflow_cli.output import records_table

OVERLAPS: Final[Mapping[str, Mapping[str, Any]]] = {
    "overlap": {},
    "overlap, link as slow": {"transfer_ms": 800.0},
    "overlap, link slower": {"transfer_ms": 1000.0},
    "overlap, matmul": {"compute": "matmul"},
}
"""The four shapes of ``layerflow bench overlap`` that benchmarks.md tells of."""

OTHERS: Final[Mapping[str, Mapping[str, object]]] = {
    "one layer ahead": {"transfer.prefetch_layers": 1},
    "two layers ahead": {"transfer.prefetch_layers": 2},
    "batches of 64 KiB": {"transfer.max_transfer_bytes": "64KiB"},
    "batches of 512 KiB": {"transfer.max_transfer_bytes": "512KiB"},
    "1 MiB in flight": {"transfer.max_inflight_bytes": "1MiB", "transfer.max_transfer_bytes": "512KiB"},
    "bulk": {"transfer.mode": "bulk"},
    "half the link": {"pool.link_gbps": 0.25},
    "a third of the arena": {"pool.size": "48MiB"},
    "a sixth of the arena": {"pool.size": "24MiB"},
    "all of it": {
        "transfer.prefetch_layers": 1,
        "transfer.max_transfer_bytes": "64KiB",
        "transfer.max_inflight_bytes": "1MiB",
        "pool.size": "48MiB",
    },
}
"""What is tried beside the recorded configuration, :data:`BASE`."""

BASE: Final[Mapping[str, object]] = {"pool.size": "512MiB", "pool.link_gbps": 0.5, "transfer.mode": "layerwise"}

MAY_BE_ZERO = ("shapes", "configurations")

LAYERS, CHUNK, BLOCK = 16, 256, 16
TOKEN_BYTES: Final = 1024
"""Of one layer."""

LAYER_MS, TOKEN_MS = 1.0, 0.008
DOCUMENTS = (2, 3, 4, 6, 8)
"""Chunks of each."""

REPEATS: Final = 3
"""Of the recorded configuration, to know the noise: how far its means are apart."""
LEAST_NOISE: Final = 0.02
"""As a share of the mean."""

IDLE_S, WAIT_S = 0.03, 60.0
SPANS_S: Final = 2.2
"""A server asks workers once a second what took time in their steps."""


def measure(requests: int = 60, shapes: int = 4, configurations: int = 10, runs: int = 5) -> dict[str, Any]:
    """Record, replay and compare.

    :param requests: that are served under each configuration. :param shapes: of ``bench overlap``, recorded first.
    :param configurations: of :data:`OTHERS`, so many. :param runs: of each shape.
    :returns: ``own``: figures recorded and predicted under the configuration that was recorded; ``others``: measured
        and predicted under others; ``tau_exposed`` and ``tau_prefill``: Kendall's tau of their means' order, of pairs
        that differ by more than ``noise_exposed_ms`` and ``noise_prefill_ms``, which runs of one configuration do.
    """
    torch.set_num_threads(1)
    own: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="layerflow-bench-") as name:
        folder = Path(name)
        for shape, given in itertools.islice(OVERLAPS.items(), shapes):
            path = folder / f"{len(own)}.lfr"
            with _recorded(path):
                overlap.measure(runs=runs, **given)
            own += _own(shape, Replay.read(path))
        if shapes:
            path = folder / "pool.lfr"
            with _recorded(path):
                pool.measurement.measure(kind="memory", rounds=runs, depths=())
            own += _own("pool", Replay.read(path))
        base = _serve(folder / "base.lfr", requests, {})
        own += _own("conversations", base)
        again = [_serve(folder / f"again-{number}.lfr", requests, {}) for number in range(REPEATS)]
        rows = [_other("as recorded", base, again[0], {})]
        for other, changed in itertools.islice(OTHERS.items(), configurations):
            rows.append(_other(other, base, _serve(folder / "other.lfr", requests, changed), changed))
    result: dict[str, Any] = {"own": own, "others": rows}
    for of in ("exposed", "prefill"):
        means = [getattr(each.recorded, of).mean * 1e3 for each in (base, *again)]
        noise = max(max(means) - min(means), LEAST_NOISE * means[0])
        result[f"noise_{of}_ms"] = noise
        result[f"tau_{of}"] = kendall([(row[f"{of}_ms"], row[f"{of}_predicted_ms"]) for row in rows], noise)
    return result


def present(result: dict[str, Any]) -> Iterator[Table]:
    """The result as people read it."""
    if result["own"]:
        yield records_table("simulate: own configuration", [_rounded(row) for row in result["own"]])
    yield records_table("simulate: other configurations, means", [_rounded(row) for row in result["others"]])
    orders = [
        {"order of": of, "kendall's tau": result[f"tau_{of}"], "noise (ms)": result[f"noise_{of}_ms"]}
        for of in ("exposed", "prefill")
    ]
    yield records_table("simulate: order of the configurations", [_rounded(row) for row in orders])


def kendall(pairs: Sequence[tuple[float, float]], noise: float) -> float:
    """Kendall's tau: pairs in the same order less those in the other one, by all that have a measured order; nan where
    none has. Pairs that are predicted alike are in neither.

    :param pairs: measured and predicted. :param noise: measured values that differ by no more have no order.
    """
    balance = decided = 0
    for (one, told), (two, foretold) in itertools.combinations(pairs, 2):
        if abs(one - two) > noise:
            product = (one - two) * (told - foretold)
            decided += 1
            balance += (product > 0) - (product < 0)
    return balance / decided if decided else math.nan


@contextlib.contextmanager
def _recorded(path: Path) -> Iterator[None]:
    """Servers that are started meanwhile record."""
    os.environ["LAYERFLOW_RECORD__PATH"] = str(path)
    try:
        yield
    finally:
        del os.environ["LAYERFLOW_RECORD__PATH"]


def _own(name: str, replay: Replay) -> list[dict[str, Any]]:
    return [
        {
            "run": name,
            "figure": row.name,
            "recorded": row.recorded,
            "predicted": row.predicted,
            "fit alone": row.fitted,
            "alike": "yes" if row.alike else "no",
        }
        for row in replay.trust.rows
    ]


def _other(name: str, base: Replay, measured: Replay, changed: Mapping[str, object]) -> dict[str, Any]:
    was = measured.recorded
    told: ReplayFigures = base.under(base.configured(None, changed))
    return {
        "configuration": name,
        "exposed_ms": was.exposed.mean * 1e3,
        "exposed_predicted_ms": told.exposed.mean * 1e3,
        "prefill_ms": was.prefill.mean * 1e3,
        "prefill_predicted_ms": told.prefill.mean * 1e3,
        "hit_percent": was.hit_rate * 100,
        "hit_predicted_percent": told.hit_rate * 100,
    }


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}


# Conversations about documents, one behind the other.


def _serve(path: Path, requests: int, changed: Mapping[str, object]) -> Replay:
    """Serve the same prompts under a configuration, and read what was recorded of it."""
    settings = {key.replace(".", "__"): value for key, value in {**BASE, **changed}.items()}
    tokens = (max(DOCUMENTS) + 1) * CHUNK
    with serving(record__path=str(path), **settings) as server:
        worker = Worker(server.endpoint, LAYERS, tokens, TOKEN_BYTES * tokens, BLOCK, content="simulate")
        control = Control(server.endpoint, engine="bench")
        try:
            for number, prompt in enumerate(_prompts(requests)):
                _request(worker, f"request-{number}", prompt)
                time.sleep(IDLE_S)
            time.sleep(SPANS_S)
        finally:
            control.close()
            worker.close()
    return Replay.read(path)


def _prompts(count: int) -> Iterator[np.ndarray]:
    """A document, some more often than others, and a question that nobody has asked."""
    draws = np.random.default_rng(5)
    documents = [draws.integers(0, 1 << 30, chunks * CHUNK) for chunks in DOCUMENTS for _ in range(2)]
    weights = 1.0 / np.arange(1, len(documents) + 1)
    order = draws.permutation(len(documents))
    for _ in range(count):
        document = documents[order[draws.choice(len(documents), p=weights / weights.sum())]]
        yield np.concatenate([document, draws.integers(0, 1 << 30, CHUNK)])


def _request(worker: Worker, name: str, prompt: np.ndarray) -> None:
    """Serve one: look it up, load its hit as the settings say, compute and save the rest."""
    agent, chain = worker.agent, worker.agent.chain(prompt)
    hit = agent.lookup(name, chain)
    table = tuple(blocks[: len(prompt) // BLOCK] for blocks in worker.table(0))
    mode = agent.advise(hit, len(prompt))
    load, used = (0, hit.tokens), hit
    if mode is Mode.BULK:
        _load_ahead(worker, StepRequest(name, chain, table, load, hit))
        load, used = (0, 0), MISS
    elif mode is Mode.RECOMPUTE:
        agent.drop_lease(name)
        load, used = (0, 0), MISS
    have = 0 if mode is Mode.RECOMPUTE else hit.tokens
    request = StepRequest(name, chain, table, load, used, (have, len(prompt)), tail=True)
    layer_s = (LAYER_MS + TOKEN_MS * (len(prompt) - have)) / 1e3
    with agent.open_step([request]) as step:
        for layer in range(LAYERS):
            if not step.wait_layer(layer):
                raise LayerflowError(f"a load failed at layer {layer}: {step.failed}")
            time.sleep(layer_s)
            step.layer_done(layer)
    if not agent.wait_idle(name, WAIT_S):
        raise LayerflowError("a save did not end")


def _load_ahead(worker: Worker, request: StepRequest) -> None:
    with worker.agent.open_step([request]) as step:
        if isinstance(step, Step) and not step.wait_loaded(WAIT_S):
            raise LayerflowError(f"a load in bulk did not end: {step.failed}")
