"""The demo's course: an engine without layerflow, then a server, then cold, bulk and layer-wise per shape."""

from __future__ import annotations

import contextlib
import secrets
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from layerflow.config.pool import MEMORY
from layerflow.device import device_for
from layerflow.errors import ConfigError, LayerflowError
from layerflow.observe.logs import configure as configure_logs
from layerflow_cli.demo import checks
from layerflow_cli.demo.engines import Answer, KvBytes, Served, answer, answer_served, served, spoil
from layerflow_cli.demo.outcome import Outcome, differing
from layerflow_cli.demo.pool import PoolUsed, pool_of
from layerflow_cli.demo.report import Link, report
from layerflow_cli.demo.workload import Workload, chosen_shapes, suitable_link
from layerflow_cli.output import console, progress
from layerflow_engine import Engine

MIB = 1 << 20
COLD, AGAIN = 0, 1
"""The two questions of a run: the first meets an empty pool, the second only knows its passage from there."""
DEFAULT_RUNS = 3

Advance = Callable[[str], None]


def run_demo(
    *,
    json_file: Path | None = None,
    out: Path = Path("out"),
    link_gbps: float | None = None,
    link_latency_us: int | None = None,
    endpoint: str | None = None,
    shapes: Sequence[str] = (),
    runs: int | None = None,
    quick: bool = False,
    pool: str = MEMORY,
    cann_emulator: Path | None = None,
    device: str = "cpu",
) -> int:
    """Run it, show it, write it.

    :param link_gbps: emulated link in GB/s (10^9 bytes); 0 = none; None = one that suits the machine, and none where
        something is behind the arena.
    :param endpoint: a running server's; None = start one.
    :param shapes: names of :data:`SHAPES`; empty = all.
    :param runs: passages per shape; None = 3, quick 1.
    :param quick: tiny models: checks bytes and tokens, its times say nothing.
    :param pool: what is behind the arena; it is started too. Before every load the arena is emptied then.
    :param cann_emulator: folder of an emulated CANN, for memcache on machines without an NPU.
    :param device: of the engines' caches; they compute on the host.
    :returns: the exit code: 1 if a token or a byte is wrong.
    :raises ConfigError: options that do not go together, or unknown shapes.
    :raises Unsupported: no such device here.
    :raises LayerflowError: the server did not serve.
    """
    chosen = chosen_shapes(shapes)
    if endpoint is not None and (link_gbps is not None or link_latency_us is not None):
        raise ConfigError("--endpoint and --link-...: the link belongs to the server; set pool.link_gbps there")
    if endpoint is not None and pool != MEMORY:
        raise ConfigError("--endpoint and --pool: the pool belongs to the server; set pool.backend there")
    configure_logs("error", "console")
    device_for(device)
    torch.set_num_threads(1)  # the server and the copy lanes take the other core
    runs = runs or (1 if quick else DEFAULT_RUNS)
    salt = f"[{secrets.token_hex(8)}] " if endpoint is not None else ""
    loads: Literal["load", "link"] = "load" if pool == MEMORY else "link"
    outcomes = [Outcome(Workload.of(shape, quick, salt), loads) for shape in chosen]

    screen = console()
    plain = [Engine(outcome.workload.config) for outcome in outcomes]
    with progress(len(outcomes) * (runs * 4 + 3) + 1, screen) as advance:
        for outcome, engine in zip(outcomes, plain, strict=True):
            spoil(engine)
            _without(outcome, engine, 0, advance)
        if link_gbps is None and pool != MEMORY:
            link_gbps = 0.0  # the pool's own speed is the link
        elif link_gbps is None:
            link_gbps = suitable_link([(outcome.workload, _hit_seconds(outcome)) for outcome in outcomes])
        advance("starting layerflow run")
        needed = sum(outcome.workload.stored_bytes for outcome in outcomes) * runs * 9 // 8
        settings = {
            "pool.size": f"{needed // MIB + 64}MiB",
            "pool.link_gbps": link_gbps,
            "pool.link_latency_us": link_latency_us or 0,
            "transfer.discard_partial_chunks": True,
            "transfer.step_timeout_ms": 30_000,
        }
        given = contextlib.nullcontext(PoolUsed(endpoint)) if endpoint is not None else None
        with given or pool_of(pool, needed, settings, cann_emulator) as used:
            for outcome, engine in zip(outcomes, plain, strict=True):
                link = _through_the_pool(outcome, engine, runs, used, advance, device)
    return report(outcomes, link, used, runs=runs, quick=quick, json_file=json_file, out=out, screen=screen)


def _without(outcome: Outcome, engine: Engine, run: int, advance: Advance) -> None:
    """The truth: an engine that never heard of layerflow."""
    advance(f"{outcome.workload.shape}: without layerflow, passage {run + 1}")
    made = answer(engine, outcome.workload, outcome.workload.prompt(run, AGAIN))
    made.kv = {}
    outcome.answers["without"].append(made)


def _hit_seconds(outcome: Outcome) -> float:
    """What a hit of the prefix leaves to compute: the last prefill step of an engine that computes everything.

    Counted from its median layer, which a moment's noise of the machine does not reach.
    """
    layers = outcome.answers["without"][0].prefill[-1].computed_s
    return statistics.median(layers) * len(layers)


def _through_the_pool(
    outcome: Outcome, plain: Engine, runs: int, pool: PoolUsed, advance: Advance, device: str
) -> Link:
    workload, shape, endpoint = outcome.workload, outcome.workload.shape, pool.endpoint
    stored: KvBytes = {}
    with (
        served(workload, endpoint, "cold", "layerwise", device) as cold,
        served(workload, endpoint, "bulk", "bulk", device) as bulk,
        served(workload, endpoint, "layerwise", "layerwise", device) as layerwise,
    ):
        ways = [("bulk", bulk), ("layerwise", layerwise)]
        for run in range(runs):
            if run:
                _without(outcome, plain, run, advance)
            advance(f"{shape}: cold prefill and save, passage {run + 1}")
            stored = _answer_cold(outcome, cold, run)
            # The very prompt that was saved once, then prompts that only share its passage.
            for question in (AGAIN,) if run else (COLD, AGAIN):
                for way, engine in ways:
                    advance(f"{shape}: {way} load, passage {run + 1}")
                    made = _answer_hit(outcome, engine, run, question, pool)
                    _check(outcome, run, question, made, stored)
                    outcome.answers[way].append(made)
                ways.reverse()  # so that neither always runs on the warmer caches
        advance(f"{shape}: negative control")
        layer = workload.config.caches[workload.config.num_layers // 2]
        layerwise.engine.connect(checks.Spoiling(layerwise.connection, layerwise.engine.cache, layer))
        made = _answer_hit(outcome, layerwise, runs - 1, AGAIN, pool)
        outcome.control_bytes = checks.wrong_bytes(stored, made.kv)
        outcome.control_tokens = differing(outcome.answers["without"][-1].result.tokens, made.result.tokens)
        terms = cold.agent.terms
    if terms is None:
        raise LayerflowError(f"{endpoint}: the server went away during the demo")
    return Link(terms.link_gbps, terms.link_latency_us, device)


def _answer_cold(outcome: Outcome, engine: Served, run: int) -> KvBytes:
    workload = outcome.workload
    made = answer_served(engine, workload, workload.prompt(run, COLD))
    if made.result.cached_tokens:
        raise LayerflowError(f"{workload.shape}: the cold prompt was in the pool already; nothing to compare with")
    kv, made.kv = made.kv, {}
    outcome.answers["cold"].append(made)
    return kv


def _answer_hit(outcome: Outcome, engine: Served, run: int, question: int, pool: PoolUsed) -> Answer:
    workload = outcome.workload
    with pool.loading(engine, workload.sizes.prefix):
        made = answer_served(engine, workload, workload.prompt(run, question))
        if made.result.cached_tokens != workload.sizes.prefix or made.result.restarts:
            raise LayerflowError(
                f"{workload.shape}: a prompt loaded {made.result.cached_tokens} tokens where {workload.sizes.prefix} "
                f"were saved, after {made.result.restarts} failed loads; {pool.story()}"
            )
    if outcome.loads == "link":
        for trace in made.traces:
            engine.connection.note(trace)
    return made


def _check(outcome: Outcome, run: int, question: int, made: Answer, stored: KvBytes) -> None:
    """Tokens against those of an engine that computed everything, bytes against the cache that was saved."""
    truth = outcome.answers["cold" if question == COLD else "without"][run].result.tokens
    outcome.wrong_tokens += differing(truth, made.result.tokens)
    outcome.compared_tokens += len(truth)
    outcome.wrong_bytes += checks.wrong_bytes(stored, made.kv)
    outcome.compared_bytes += sum(plane.size for plane in stored.values())
    made.kv = {}
