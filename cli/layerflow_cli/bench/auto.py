"""Whether ``mode = auto`` is as quick as the best of layerwise, bulk and recompute, whichever that is.

The reference engine answers prompts of which the first 64, 256 or 2,048 tokens are stored, over emulated
links of 0.1, 1 and 10 GB/s: time to first token (TTFT) by mode, the modes taking turns in random order. Per
link speed there is one server process, and on one engine's memory one agent for each mode: all are equally
cold when their turn comes, and the automatic one learns from nothing but its own requests.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from layerflow.agent import Hit, Mode
from layerflow.errors import LayerflowError
from layerflow_cli.bench.harness import WARM_TIMEOUT_S, serving
from layerflow_engine import Engine
from layerflow_engine.config import GQA
from layerflow_engine.glue import LayerflowConnection, attach

CHUNK_TOKENS = 64
NEW_TOKENS = 64
WAYS = ("auto", *(mode.value for mode in Mode))
WAIT_S = 60.0
CLEAR_AFTER, CLEARLY = 4, 1.5  # rounds, and times the best
WARM_UP_ROUNDS = 2
# 48 KiB per token. Over 0.1 GB/s a hit of 256 tokens is quicker to compute than to load, one of 2,048 is not, and
# one of 64 hardly matters: no fixed mode is best everywhere.
CONFIG = dataclasses.replace(
    GQA, name="bench-auto", hidden=128, heads=4, kv_heads=4, head_dim=128, mlp=256, num_blocks=160, max_positions=2304
)


def measure(
    hits: Sequence[int] = (64, 256, 2048),
    link_gbps: Sequence[float] = (0.1, 1.0, 10.0),
    rounds: int = 7,
    case_s: float = 14.0,
) -> dict[str, Any]:
    """TTFT of every mode, for every hit and link.

    :param hits: stored leading tokens, multiples of 64; each prompt has 64 more.
    :param link_gbps: emulated links, 10^9 bytes per second; a copy is never faster than this machine's memory.
    :param rounds: how often modes run in each case, at least; the far slower ones only 4 times.
    :param case_s: how long a case goes on once the far slower modes are left out, seconds.
    :returns: ``worst_ratio``: the largest of all cases' ``ratio``, TTFT of auto ÷ that of the best of the others,
        median over rounds (what the machine does meanwhile happens to a whole round); ``cases``: per link and hit:
        ``ratio``, ``chosen`` (what auto did, and in how many of its runs), ``ttft_ms`` (medians by mode), ``rounds``.
    """
    torch.set_num_threads(1)
    engine = Engine(CONFIG)
    cases: list[dict[str, Any]] = []
    for gbps in link_gbps:
        with serving(pool__size="256MiB", pool__link_gbps=gbps) as server:
            bench = _Bench(engine, server.endpoint, hits)
            try:
                bench.warm_up()
                cases += [{"link_gbps": gbps, **bench.case(hit, rounds, case_s)} for hit in hits]
            finally:
                bench.close()
    return {"worst_ratio": max(case["ratio"] for case in cases), "new_tokens": NEW_TOKENS, "cases": cases}


class _Noting(LayerflowConnection):
    """Uses hits as the agent advises, and notes the advice."""

    chosen: Mode | None = None

    def choose(self, hit: Hit, prompt_tokens: int) -> Mode:
        self.chosen = super().choose(hit, prompt_tokens)
        return self.chosen


class _Recomputing(LayerflowConnection):
    """Looks up, and computes everything."""

    def choose(self, hit: Hit, prompt_tokens: int) -> Mode:
        return Mode.RECOMPUTE


class _Bench:
    """One link speed: an engine, a connection for each mode, and a stored prefix for each hit length."""

    def __init__(self, engine: Engine, endpoint: str, hits: Sequence[int]) -> None:
        self._engine = engine
        agents = {way: attach(engine, endpoint, f"bench-{way}", chunk_tokens=CHUNK_TOKENS).agent for way in WAYS}
        self._auto = _Noting(agents["auto"], "auto")
        self._ways: dict[str, LayerflowConnection] = {
            "auto": self._auto,
            "layerwise": LayerflowConnection(agents["layerwise"], "layerwise"),
            "bulk": LayerflowConnection(agents["bulk"], "bulk"),
            "recompute": _Recomputing(agents["recompute"]),
        }
        self._random = np.random.default_rng(5)
        self._prefixes = {hit: self._bytes(hit) for hit in hits}

    def close(self) -> None:
        for connection in self._ways.values():
            connection.close()

    def warm_up(self) -> None:
        """What a server has seen after a minute: prompts that nobody knew, then hits of every length."""
        if not all(connection.agent.wait_warm(WARM_TIMEOUT_S) for connection in self._ways.values()):
            raise LayerflowError("the arena was not mapped in time; is the machine out of memory?")
        for prefix in self._prefixes.values():
            self._ttft("auto", prefix, 0)
        for _ in range(WARM_UP_ROUNDS):
            for hit in self._prefixes:
                for way in WAYS:
                    self._run(way, hit)

    def case(self, hit: int, rounds: int, case_s: float) -> dict[str, Any]:
        """All modes in turns; those far behind after a few rounds leave their time to the others."""
        rounds_taken: list[dict[str, float]] = []
        chosen: Counter[str] = Counter()
        end = math.inf
        while (number := len(rounds_taken)) < rounds or time.monotonic() < end:
            medians = _medians(rounds_taken)
            ways = [way for way in WAYS if number < CLEAR_AFTER or way == "auto" or not _hopeless(way, medians)]
            rounds_taken.append({way: self._run(way, hit) for way in self._random.permutation(ways).tolist()})
            assert self._auto.chosen is not None
            chosen[self._auto.chosen.value] += 1
            if len(rounds_taken) == max(1, min(CLEAR_AFTER, rounds)):
                end = time.monotonic() + case_s
        medians = _medians(rounds_taken)
        best = [mode.value for mode in Mode if not _hopeless(mode.value, medians)]
        return {
            "hit_tokens": hit,
            "ratio": max(
                statistics.median(taken["auto"] / taken[way] for taken in rounds_taken if way in taken) for way in best
            ),
            "chosen": dict(chosen),
            "ttft_ms": {way: seconds * 1e3 for way, seconds in medians.items()},
            "rounds": number,
        }

    def _run(self, way: str, hit: int) -> float:
        if way == "auto":
            self._auto.chosen = None
        seconds = self._ttft(way, self._prefixes[hit], {"auto": None, "recompute": 0}.get(way, hit))
        if way == "auto" and self._auto.chosen is None:
            raise LayerflowError("nobody asked how to use the hit")
        return seconds

    def _ttft(self, way: str, prefix: bytes, cached: int | None) -> float:
        """Seconds to the first token of `prefix` and some new tokens.

        :param cached: tokens that must have been loaded; None = as the connection chose.
        """
        self._engine.connect(self._ways[way])
        result = self._engine.generate([prefix + self._bytes(NEW_TOKENS)], 1)[0]
        self._engine.drain(WAIT_S)
        if cached is not None and result.cached_tokens != cached:
            raise LayerflowError(
                f"{way}: {result.cached_tokens} tokens were loaded instead of {cached}; is the pool too small?"
            )
        return result.ttft_s

    def _bytes(self, tokens: int) -> bytes:
        return self._random.integers(0, 256, tokens, dtype=np.uint8).tobytes()


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {way: statistics.median(taken[way] for taken in rounds if way in taken) for way in WAYS if rounds}


def _hopeless(way: str, medians: dict[str, float]) -> bool:
    return medians[way] > CLEARLY * min(medians[mode.value] for mode in Mode)
