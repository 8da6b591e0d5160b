"""``c8``: eight requests at once, of which five hit long prompts and three are short and new."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from bench.vllm.asking import ANSWER_S, Answer, Prompts
from bench.vllm.figures import ratio, tail
from bench.vllm.fleet import Fleet

HITS, MISSES = 5, 3
MISS_TOKENS = 256
ANSWER_TOKENS = 4


@dataclass(slots=True)
class Samples:
    """One contender's; times to first token in milliseconds."""

    hit_ms: list[float] = field(default_factory=list)
    miss_ms: list[float] = field(default_factory=list)
    unequal: int = 0
    not_hit: int = 0


def measure(
    fleet: Fleet, names: Sequence[str], *, rounds: int, stored: int, tokens: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Store long prompts once, then rounds in which every contender gets the same eight requests.

    :param stored: how many long prompts hits are drawn from.
    :param tokens: of a long prompt's part that can hit.
    :returns: JSON-ready figures, times in milliseconds.
    """
    prompts, drawn = Prompts(seed=2), random.Random(2)
    known = [prompts.fresh(tokens + 1) for _ in range(stored)]
    firsts: dict[str, list[int]] = {}
    for name in names:
        firsts[name] = []
        for number, prompt in enumerate(known):
            advance(f"c8: {name} stores prompt {number + 1}")
            firsts[name].append(fleet.servers[name].ask(prompt).tokens[0])
            fleet.settle(name)
    samples = {name: Samples() for name in names}
    for number in range(rounds + 1):
        again = drawn.sample(range(stored), HITS)
        fresh = [prompts.fresh(MISS_TOKENS + 1) for _ in range(MISSES)]
        order = drawn.sample(range(HITS + MISSES), HITS + MISSES)
        for name in names if number % 2 else reversed(names):
            advance(f"c8: {name}, round {number}")
            asked = [*(known[which] for which in again), *fresh]
            answers = asyncio.run(_together(fleet, name, [asked[place] for place in order]))
            if number:  # the first one warms up
                came = dict(zip(order, answers, strict=True))
                _note(samples[name], came, [firsts[name][which] for which in again], tokens)
            fleet.settle(name)
    return _result(samples, tokens)


async def _together(fleet: Fleet, name: str, asked: list[list[int]]) -> list[Answer]:
    limits = httpx.Limits(max_connections=len(asked), max_keepalive_connections=len(asked))
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S, limits=limits) as client:
        server = fleet.servers[name]
        # Connections first: what they cost is no engine's.
        await asyncio.gather(*(client.get(f"{server.url}/health") for _ in asked))
        return await asyncio.gather(*(server.stream_beside(client, prompt, ANSWER_TOKENS) for prompt in asked))


def _note(into: Samples, came: dict[int, Answer], firsts: list[int], tokens: int) -> None:
    for place, answer in came.items():
        if place >= HITS:
            into.miss_ms.append(answer.first_ms)
            continue
        into.hit_ms.append(answer.first_ms)
        into.not_hit += answer.cached != tokens
        into.unequal += answer.tokens[0] != firsts[place]


def _result(samples: dict[str, Samples], tokens: int) -> dict[str, Any]:
    contenders: dict[str, Any] = {
        name: {
            "ttft_ms": tail([*mine.hit_ms, *mine.miss_ms]),
            "hit_ms": tail(mine.hit_ms),
            "miss_ms": tail(mine.miss_ms),
            "unequal": mine.unequal,
            "not_hit": mine.not_hit,
        }
        for name, mine in samples.items()
    }
    result: dict[str, Any] = {"tokens": tokens, "miss_tokens": MISS_TOKENS, "contenders": contenders}
    if {"layerwise", "lmcache"} <= set(contenders):
        for point in ("p50", "p90", "p99"):
            mine, other = (contenders[name]["ttft_ms"].get(point) for name in ("layerwise", "lmcache"))
            result[f"vs_lmcache_{point}"] = ratio(mine, other)
    return result
