"""``miss``: what the connector costs where it cannot help: prompts nobody has seen, and decoding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.vllm.asking import Answer, Params, Prompts, Server
from bench.vllm.figures import certain, pair_ratio, spread
from bench.vllm.fleet import PAUSE_S, Fleet

WITHOUT, WITH = "plain", "layerwise"
SPARED, AGAIN = "spared", "again"
"""Each of the two once more: the vLLM with layerflow, told neither to look up nor to save, and the one without. Two
processes of the same vLLM differ by more, for as long as they live, than layerflow costs: in one, less is measured."""
_SERVERS: Mapping[str, tuple[str, Params]] = {
    WITHOUT: (WITHOUT, None),
    AGAIN: (WITHOUT, None),
    WITH: (WITH, None),
    SPARED: (WITH, {"layerflow": {"load": False, "save": False}}),
}
SHORT_TOKENS = 64
FIRST_DECODED, DECODED = 8, 16
"""Tokens of an answer behind its first one: those that the prompt's save is beside, and those whose speed is taken.

Few, so that the two of a pair are close in time: the machine's speed changes within tenths of a second.
"""
WATCHED_DECODED = 128
PROMPTS_PER_ANSWER = 4
"""Of the short prompts of which the hooks are timed: one so often is answered with so many tokens."""
WARM_UPS = 1
BRIEF_PAUSE_S = 0.05
"""Between short prompts. One pair says little: it takes 400 until the median is known to 2 %, 1,600 to 1 %."""


Ask = Callable[[Server, Params], Answer]
Taken = dict[str, list[float]]
"""Samples of each, pair by pair."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What one launch of the servers has given.

    :param short: first tokens of short prompts, ms.
    :param long: of long ones.
    :param decoded_first: tokens/s right behind the first token.
    :param decoded: after those.
    """

    short: Taken
    long: Taken
    decoded_first: Taken
    decoded: Taken


def collect(
    fleet: Fleet,
    *,
    seed: int,
    short_pairs: int,
    decoding_pairs: int,
    long_pairs: int,
    tokens: int,
    advance: Callable[[str], None],
) -> Samples:
    """Pairs of requests, one to a vLLM without a connector and one to a vLLM with layerflow, in changing order.

    Short ones are pairs of pairs: each server is asked twice, so that neither is the one that rested longer.

    :param seed: of the prompts and of the order; each launch has its own.
    :param decoding_pairs: short prompts that are answered with many tokens.
    :param tokens: of a long prompt.
    """
    prompts = Prompts(seed)

    def pairs(count: int, what: str, ask: Ask, *names: str, pause_s: float = PAUSE_S) -> dict[str, list[Answer]]:
        orders = list(itertools.permutations(names))
        random.Random(seed).shuffle(orders)
        answers: dict[str, list[Answer]] = {name: [] for name in names}
        for number in range(-WARM_UPS, count):
            for name in orders[number % len(orders)]:
                advance(f"miss: {name}, {what}, pair {number + 1}")
                server, params = _SERVERS[name]
                answer = ask(fleet.servers[server], params)
                if number >= 0:
                    answers[name].append(answer)
                fleet.settle(server, pause_s)  # what it saves must not slow the other one
        return answers

    def prefill(length: int) -> Ask:
        return lambda server, params: server.ask(prompts.fresh(length), params)

    def decode(server: Server, params: Params) -> Answer:
        return server.stream(prompts.fresh(SHORT_TOKENS), 1 + FIRST_DECODED + DECODED, params)

    # The long ones first: they touch all of vLLM's cache, and the short ones meet no page for the first time.
    long = pairs(long_pairs, f"{tokens} tokens", prefill(tokens), WITHOUT, WITH)
    short = pairs(short_pairs, f"{SHORT_TOKENS} tokens", prefill(SHORT_TOKENS), *_SERVERS, pause_s=BRIEF_PAUSE_S)
    decoded = pairs(decoding_pairs, "decoding", decode, WITHOUT, WITH, pause_s=BRIEF_PAUSE_S)
    first, last = FIRST_DECODED, FIRST_DECODED + DECODED
    return Samples(_first_ms(short), _first_ms(long), _per_s(decoded, 0, first), _per_s(decoded, first, last))


def watch(fleet: Fleet, *, seed: int, prompts: int, tokens: int, advance: Callable[[str], None]) -> None:
    """Short prompts nobody has seen, some of them answered with many tokens, to the vLLM with layerflow alone.

    :param tokens: of a long prompt, which is asked first, as in the other launches.
    """
    fresh, server = Prompts(seed), fleet.servers[WITH]
    server.ask(fresh.fresh(tokens))
    for number in range(prompts):
        advance(f"miss: {WITH}, hooks timed, prompt {number + 1}")
        if number % PROMPTS_PER_ANSWER:
            server.ask(fresh.fresh(SHORT_TOKENS))
        else:
            server.stream(fresh.fresh(SHORT_TOKENS), WATCHED_DECODED + 1)
        fleet.settle(WITH, BRIEF_PAUSE_S)


def figures(launches: Sequence[Samples], tokens: int) -> dict[str, Any]:
    """JSON-ready figures of all launches together, times in milliseconds.

    :param tokens: of a long prompt.
    """
    speed = _joined([samples.decoded for samples in launches])
    first_speed = _joined([samples.decoded_first for samples in launches])
    by_length = {
        str(SHORT_TOKENS): _joined([samples.short for samples in launches]),
        str(tokens): _joined([samples.long for samples in launches]),
    }
    short = by_length[str(SHORT_TOKENS)]
    by_launch = {
        str(SHORT_TOKENS): _by_launch([samples.short for samples in launches]),
        str(tokens): _by_launch([samples.long for samples in launches]),
    }
    decode_by_launch = _by_launch([samples.decoded for samples in launches])
    # Pairs of one launch have their processes in common: how certain a median is, the launches say.
    ratios = {
        length: pair_ratio(taken[WITH], taken[WITHOUT]) | certain(by_launch[length])
        for length, taken in by_length.items()
    }
    decode = pair_ratio(speed[WITH], speed[WITHOUT]) | certain(decode_by_launch)
    return {
        "ttft_ms": {length: _spreads(taken) for length, taken in by_length.items()},
        "ttft_ratio": ratios,
        "ttft_ratio_by_launch": by_launch,
        "miss_ratio": max((spread["median"] for spread in ratios.values() if spread), default=None),
        "decode_tokens_per_s": _spreads(speed),
        "decode": decode,
        "decode_by_launch": decode_by_launch,
        "decode_ratio": decode.get("median"),
        "decode_first": pair_ratio(first_speed[WITH], first_speed[WITHOUT]),
        "same_server": pair_ratio(short[WITH], short[SPARED]),
        "control": pair_ratio(short[WITHOUT], short[AGAIN]),
    }


def _first_ms(answers: Mapping[str, Sequence[Answer]]) -> Taken:
    return {name: [answer.first_ms for answer in taken] for name, taken in answers.items()}


def _per_s(answers: Mapping[str, Sequence[Answer]], begin: int, end: int) -> Taken:
    """Tokens/s from one token of each answer to another."""
    return {
        name: [(end - begin) / (answer.times_ms[end] - answer.times_ms[begin]) * 1e3 for answer in taken]
        for name, taken in answers.items()
    }


def _by_launch(taken: Sequence[Taken]) -> list[float]:
    ratios = [pair_ratio(one[WITH], one[WITHOUT]) for one in taken]
    return [ratio["median"] for ratio in ratios if ratio]


def _joined(taken: Sequence[Taken]) -> Taken:
    return {name: [sample for one in taken for sample in one[name]] for name in taken[0]}


def _spreads(taken: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {name: spread(samples) for name, samples in taken.items()}
