"""``shared``: prompts with a beginning that was served before, and an end that was not; and a conversation.

As vLLM's own ``vllm bench serve --dataset-name prefix_repetition``, one request at a time: how many tokens hit, and how
soon does the first token come, beside vLLM's own prefix cache?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.vllm.asking import Prompts
from bench.vllm.figures import pair_ratio, ratio, spread
from bench.vllm.fleet import Fleet

PREFIXES = (300, 777, 1500, 3000)
SUFFIX = 64
REPEATS = 4
"""Prompts with one prefix, after the one that stored it."""
TURNS = 8
SAID = 150
"""Tokens by which each turn of the conversation is longer than the one before."""
MOST_TOKENS = max(*PREFIXES, TURNS * SAID) + SUFFIX
KINDS = (*(str(length) for length in PREFIXES), "conversation")


@dataclass(slots=True)
class Samples:
    """One contender's, of one kind of prompts.

    :param cached: tokens that were hit, of `asked` in all.
    """

    ttft_ms: list[float] = field(default_factory=list)
    cached: int = 0
    asked: int = 0


def measure(
    fleet: Fleet, names: Sequence[str], *, rounds: int, warm_ups: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Every prompt is asked of each contender in turn; those that only store a beginning are not counted.

    :returns: JSON-ready figures, times in milliseconds.
    """
    prompts = Prompts(seed=5)
    samples = {kind: {name: Samples() for name in names} for kind in KINDS}
    turn = 0
    for number in range(warm_ups + rounds):
        for kind, first, prompt in _prompts(prompts):
            turn += 1
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                advance(f"shared: {name}, {kind}, round {number + 1 - warm_ups}")
                answer = fleet.servers[name].ask(prompt)
                fleet.settle(name)
                if first or number < warm_ups:
                    continue
                into = samples[kind][name]
                into.ttft_ms.append(answer.first_ms)
                into.cached += answer.cached
                into.asked += len(prompt)
    return _result(samples, names)


def _prompts(prompts: Prompts) -> Iterator[tuple[str, bool, list[int]]]:
    """One round: kind, is it the first of its kind, and the prompt."""
    for length in PREFIXES:
        prefix = prompts.fresh(length)
        for repeat in range(1 + REPEATS):
            yield str(length), not repeat, prefix + prompts.fresh(SUFFIX)
    said: list[int] = []
    for turn in range(TURNS):
        said = said + prompts.fresh(SAID)
        yield "conversation", not turn, said


def _result(samples: dict[str, dict[str, Samples]], names: Sequence[str]) -> dict[str, Any]:
    kinds = {}
    for kind, by_name in samples.items():
        shown: dict[str, Any] = {
            name: {"ttft_ms": spread(mine.ttft_ms), "cached": mine.cached, "asked": mine.asked}
            for name, mine in by_name.items()
        }
        if {"prefix", "layerwise"} <= set(names):
            own, other = by_name["layerwise"], by_name["prefix"]
            shown["vs_prefix"] = ratio(spread(own.ttft_ms).get("median"), spread(other.ttft_ms).get("median"))
            shown["vs_prefix_by_turn"] = pair_ratio(own.ttft_ms, other.ttft_ms)
            shown["tokens_hit"] = ratio(own.cached, other.cached)
        kinds[kind] = shown
    result: dict[str, Any] = {"kinds": kinds}
    if {"prefix", "layerwise"} <= set(names):
        result["vs_prefix"] = max(kinds[kind]["vs_prefix_by_turn"]["median"] for kind in KINDS)
        result["tokens_hit"] = min(kinds[kind]["tokens_hit"] for kind in KINDS)
    return result
