"""``hit``: time to first token of a prompt that was served before; all of it but one token is in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.vllm.asking import Answer, Prompts
from bench.vllm.figures import moved, pair_ratio, ratio, spread
from bench.vllm.fleet import Fleet

COLD = "prefix"
"""Whose first passages are the time without any cache: no connector saves anything there."""
TURNS = 4
"""So often is each prompt of a round asked again. What is compared is close in time then: the machine changes."""


@dataclass(slots=True)
class Samples:
    """One contender's.

    :param unequal: hits whose token was not the cold passage's.
    :param not_hit: repeated passages that computed more than one token; they are not in `hit_ms`.
    :param loads: seconds that layerflow's loads of the hits moved: in all, hidden, exposed.
    """

    cold_ms: list[float] = field(default_factory=list)
    hit_ms: list[float] = field(default_factory=list)
    unequal: int = 0
    not_hit: int = 0
    loads: dict[str, float] = field(default_factory=dict)


def measure(
    fleet: Fleet, names: Sequence[str], *, rounds: int, warm_ups: int, tokens: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """In every round every contender in turn gets a fresh prompt, then in some turns the same again.

    :param warm_ups: rounds before those that count; they touch all of vLLM's and the pools' memory that rounds use.
    :param tokens: of a prompt's part that can hit.
    :returns: JSON-ready figures, times in milliseconds.
    """
    prompts = Prompts(seed=1)
    samples = {name: Samples() for name in names}

    def in_turns(number: int) -> Sequence[str]:
        shift = number % len(names)
        return [*names[shift:], *names[:shift]]

    for number in range(warm_ups + rounds):
        into = samples if number >= warm_ups else {name: Samples() for name in names}
        asked = {name: prompts.fresh(tokens + 1) for name in names}
        cold: dict[str, Answer] = {}
        for name in in_turns(number):
            advance(f"hit: {name}, round {number + 1 - warm_ups}")
            cold[name] = fleet.servers[name].ask(asked[name])
            into[name].cold_ms.append(cold[name].first_ms)
            fleet.settle(name)
        for turn in range(TURNS):
            for name in in_turns(number + turn):
                advance(f"hit: {name}, round {number + 1 - warm_ups}, turn {turn + 1}")
                _hit(fleet, name, asked[name], cold[name], into[name])
    return _result(samples, tokens)


def _hit(fleet: Fleet, name: str, prompt: list[int], cold: Answer, into: Samples) -> None:
    layerflow = fleet.contenders[name].pool == "layerflow"
    before = fleet.figures() if layerflow else {}
    hit = fleet.servers[name].ask(prompt)
    fleet.settle(name)
    if hit.cached != len(prompt) - 1:
        into.not_hit += 1
        return
    into.hit_ms.append(hit.first_ms)
    into.unequal += hit.tokens != cold.tokens
    if layerflow:
        for part, seconds in moved(before, fleet.figures(), "load").items():
            into.loads[part] = into.loads.get(part, 0.0) + seconds


def _result(samples: dict[str, Samples], tokens: int) -> dict[str, Any]:
    ttft = {name: spread(mine.hit_ms).get("median") for name, mine in samples.items()}
    result: dict[str, Any] = {"tokens": tokens, "ttft_ms": ttft, "contenders": {}}
    if COLD in samples:
        result["ttft_ms"] = {"cold": spread(samples[COLD].cold_ms)["median"], **ttft}
    for name, mine in samples.items():
        result["contenders"][name] = {
            "hit_ms": spread(mine.hit_ms),
            "cold_ms": spread(mine.cold_ms),
            "unequal": mine.unequal,
            "not_hit": mine.not_hit,
            "loads": {part: round(seconds, 6) for part, seconds in mine.loads.items()},
            "overlap": ratio(mine.loads.get("hidden_s"), mine.loads.get("transfer_s")),
            "hit_samples_ms": [round(sample, 3) for sample in mine.hit_ms],
        }
    if "layerwise" not in samples:
        return result
    layerwise = samples["layerwise"].hit_ms
    for name, other in samples.items():
        if name != "layerwise":
            result[f"vs_{name}"] = ratio(ttft["layerwise"], ttft[name])
            if len(layerwise) == len(other.hit_ms):
                result[f"vs_{name}_by_turn"] = pair_ratio(layerwise, other.hit_ms)
    return result
