"""What a worker's step costs the server's loop, by how many requests load and save in it.

Real agents on a server process of their own; their objects are tiny. How long the loop's thread has run is read before
a step of all ranks of one engine opens and after all of it has landed and is stored; the lookups come before.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from rich.table import Table

from layerflow.agent import StepRequest
from layerflow.errors import LayerflowError
from layerflow.keys import Chain
from layerflow.spec import DEFAULT_CHUNK_TOKENS, Shard
from layerflow_cli.bench.harness import LoopClock, Worker, percentiles, serving
from layerflow_cli.output import records_table

CASES = ("2+2", "32+32", "64+0", "0+64")
TARGET_US = {"2+2": 2_250, "32+32": 6_000, "64+0": 3_750, "0+64": 6_250}
"""Microseconds of a worker's step in 0.2 on a quiet machine, by default: nothing better was asked yet."""
ENGINES, TP_SIZE, LAYERS = 8, 8, 61
"""What the targets are of."""
STEPS_PER_S = 100
PAUSE_S = 0.02  # what the loop does behind a step's last message
LANDED_S = 60.0


def measure(
    engines: int = ENGINES, tp_size: int = TP_SIZE, layers: int = LAYERS, rounds: int = 10, cases: Sequence[str] = CASES
) -> dict[str, Any]:
    """Step each engine's ranks together, one engine after the other.

    :param engines: serving engines that share the server.
    :param tp_size: workers of each.
    :param layers: of the model.
    :param rounds: steps of each case.
    :param cases: ``LOADS+SAVES``: requests of a step that load a chunk, and those that save one.
    :returns: by case ``us_per_worker_step`` of the loop's processor time, p50 and p99, ``target_us`` (None where there
        is none for it) and ``steps_per_s`` of one engine at which the loop has nothing left; ``limit_us``: of a step
        of a worker's, where one engine makes 100 moving steps a second and the loop has one core.
    """
    torch.set_num_threads(1)
    parsed = {case: _parse(case) for case in cases}
    most = max(loads + saves for loads, saves in parsed.values())
    content = secrets.token_hex(8)
    by_case: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(serving(pool__size="128MiB"))
        fleet = []
        for number, rank in itertools.product(range(engines), range(tp_size)):
            worker = Worker(
                server.endpoint,
                layers,
                DEFAULT_CHUNK_TOKENS,
                2 * DEFAULT_CHUNK_TOKENS,
                requests=most,
                shard=Shard(rank, tp_size),
                engine=f"bench-{number}",
                content=content,
            )
            stack.callback(worker.close)
            fleet.append(worker)
        groups = [fleet[at : at + tp_size] for at in range(0, len(fleet), tp_size)]
        clock = LoopClock(server.process.pid)
        prompt = fleet[0].prompt  # of one worker: another's would be the same again
        stored = [prompt() for _ in range(max(loads for loads, _ in parsed.values()))]
        _step(groups[0], [], stored)
        for case, (loads, saves) in parsed.items():
            spent = []
            for ranks in itertools.islice(itertools.cycle(groups), rounds + 1):
                fresh = [prompt() for _ in range(saves)]
                spent.append(_step(ranks, stored[:loads], fresh, clock) // tp_size)
            cost = percentiles(spent[1:])  # the first is the first of its kind
            by_case[case] = {
                "loads": loads,
                "saves": saves,
                "us_per_worker_step": cost,
                "target_us": TARGET_US.get(case) if (engines, tp_size, layers) == (ENGINES, TP_SIZE, LAYERS) else None,
                "steps_per_s": 1e6 / (statistics.median(spent[1:]) / 1e3 * tp_size),
            }
    return {
        "by_case": by_case,
        "limit_us": 1e6 / (STEPS_PER_S * tp_size),
        "engines": engines,
        "tp_size": tp_size,
        "layers": layers,
    }


def present(result: Mapping[str, Any]) -> list[Table]:
    """The cases as rows, each beside its target and the limit."""
    rows = [
        {
            "loads": figures["loads"],
            "saves": figures["saves"],
            "us_p50": figures["us_per_worker_step"]["p50"],
            "us_p99": figures["us_per_worker_step"]["p99"],
            "target_us": "" if figures["target_us"] is None else f"<= {figures['target_us']:,}",
            "limit_us": f"{result['limit_us']:,.0f}",
            "steps_per_s": figures["steps_per_s"],
        }
        for figures in result["by_case"].values()
    ]
    title = f"server: the loop per worker step, {result['engines']} engines, tp {result['tp_size']}, "
    return [records_table(f"{title}{result['layers']} layers", rows)]


def _parse(case: str) -> tuple[int, int]:
    loads, _, saves = case.partition("+")
    if not (loads.isdecimal() and saves.isdecimal() and int(loads) + int(saves)):
        raise LayerflowError(f"case {case!r}: should be the loads and the saves of a step, as 2+2")
    return int(loads), int(saves)


def _step(
    ranks: Sequence[Worker], loaded: Sequence[Chain], saved: Sequence[Chain], clock: LoopClock | None = None
) -> int:
    """One pass of all ranks: nanoseconds that the loop ran for it."""
    first, tokens = ranks[0], ranks[0].tokens
    hits = []
    for chain in loaded:
        name = f"load-{secrets.token_hex(6)}"
        hit = first.agent.lookup(name, chain)
        if not hit.tokens:
            raise LayerflowError("a stored prompt was not found again")
        hits.append((name, chain, hit))
    saves = [(f"save-{secrets.token_hex(6)}", chain) for chain in saved]
    time.sleep(PAUSE_S)
    before = clock() if clock else 0
    steps = []
    for worker in ranks:
        names = itertools.count()
        requests = [
            StepRequest(name, chain, worker.table(next(names)), load=(0, hit.tokens), hit=hit)
            for name, chain, hit in hits
        ]
        requests += [
            StepRequest(name, chain, worker.table(next(names)), save=(0, tokens), tail=True) for name, chain in saves
        ]
        steps.append(worker.agent.open_step(requests))
    for layer in range(first.spec.num_layers):
        for step in steps:
            step.wait_layer(layer)
            step.layer_done(layer)
    for step in steps:
        step.close()
    for worker in ranks:
        for name in [name for name, *_ in hits] + [name for name, _ in saves]:
            if not worker.agent.wait_idle(name, LANDED_S):
                raise LayerflowError(f"{name}: a step of the benchmark's did not end")
        if lost := {name for name, _ in saves} - set(worker.agent.poll().saved):
            raise LayerflowError(f"{len(lost)} prompts were not stored; is the pool large enough?")
    time.sleep(PAUSE_S)
    return clock() - before if clock else 0
