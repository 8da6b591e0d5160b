"""Small machines and traces."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from layerflow.config.settings import Settings
from layerflow.flow.cost import ComputeCost, LinkCost
from layerflow.sim.machine import Machine
from layerflow.sim.simulation import Outcome, one_group_spec, simulate
from layerflow.sim.trace import RequestTrace, parse_trace

CHUNK = 64
LAYERS = 4
TOKEN_BYTES = 256
OBJECT_BYTES = LAYERS * CHUNK * TOKEN_BYTES
LAYER_S = 1e-3


def trace_of(prompts: Sequence[tuple[float, int, int, Sequence[int]]]) -> RequestTrace:
    """Requests of (seconds, tokens, output, ids of their blocks)."""
    lines = [
        json.dumps({"timestamp": at * 1e3, "input_length": tokens, "output_length": output, "hash_ids": list(ids)})
        for at, tokens, output, ids in prompts
    ]
    return parse_trace(lines, name="test", block_tokens=CHUNK)


def conversations(seed: int, count: int = 40, turns: int = 4, every_s: float = 0.01) -> RequestTrace:
    """Conversations whose turns continue the one before, mixed with each other; all share their first block."""
    draws = random.Random(seed)
    begun: list[list[int]] = []
    fresh = iter(range(1, 1_000_000))
    prompts = []
    for number in range(count):
        if begun and draws.random() < 1 - 1 / turns:
            blocks = draws.choice(begun)
        else:
            blocks = [0]
            begun.append(blocks)
        blocks += [next(fresh) for _ in range(draws.randint(1, 6))]
        rest = draws.randint(0, CHUNK - 1)
        ids = [*blocks, *([next(fresh)] if rest else [])]
        prompts.append((number * every_s, len(blocks) * CHUNK + rest, draws.randint(1, 20), ids))
    return trace_of(prompts)


def machine(**values: Any) -> Machine:
    """One engine whose layers take a millisecond for a prompt of any length, and a link without latency."""
    tp = values.pop("tp", 1)
    spec = one_group_spec(layers=LAYERS, bytes_per_token=TOKEN_BYTES, chunk_tokens=CHUNK, block_size=16, tp=tp)
    standard: dict[str, Any] = {
        "spec": spec,
        "arena_bytes": 256 << 20,
        "load": LinkCost(1e9, 0.0),
        "save": LinkCost(1e9, 0.0),
        "compute": ComputeCost(LAYER_S, 0.0, 0.0),
    }
    return Machine(**standard | values)


def run(
    trace: RequestTrace, made: Machine | None = None, *, seed: int = 0, validate: bool = True, **transfer: Any
) -> Outcome:
    """Simulate, with `transfer` settings."""
    return simulate(made or machine(), Settings(transfer=transfer), trace, seed=seed, validate=validate)
