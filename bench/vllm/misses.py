"""``miss``: what the connector costs where it cannot help: prompts nobody has seen, and decoding."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.vllm.asking import Answer, Prompts, Server
from bench.vllm.children import BenchFailed
from bench.vllm.figures import certain, moved, pair_ratio, spread
from bench.vllm.fleet import PAUSE_S, Fleet
from bench.vllm.switch import FIRST, PERIOD, Use, is_out, turns_of

PLAIN, WITH, OUT = "plain", "layerwise", "out"
"""vLLM without a connector, vLLM with layerflow, and the latter while its connector is taken out.

Two processes of the same vLLM differ by some percent, for as long as they live, which is more than layerflow costs. So
that is measured in one process; what two differ by is told beside it.
"""
AGAIN = "again"
"""The vLLM without a connector once more: what chance makes of equal things."""
_SERVERS: Mapping[str, tuple[str, Use]] = {
    PLAIN: (PLAIN, "in"),
    AGAIN: (PLAIN, "in"),
    WITH: (WITH, "in"),
    OUT: (WITH, "out"),
}
SHORT_TOKENS = 64
ANSWER_TOKENS = FIRST + 16
"""Of short prompts that are answered with more than one: few, so that the answers of two servers are close in time."""
WATCHED_DECODED = 128
PROMPTS_PER_ANSWER = 4
"""Of the short prompts of which the hooks are timed: one so often is answered with so many tokens."""
WARM_UPS = 1
BRIEF_PAUSE_S = 0.05
"""Between short prompts. One pair says little: it takes 400 until the median is known to 2 %, 1,600 to 1 %."""
SHORTEST_MS = 1e-3
"""A turn of an answer: tokens that were read together have one time."""


Ask = Callable[[Server], Answer]
Reserved = dict[str, list[float]]
"""Samples of each, pair by pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one launch.

    :param short: pairs of short prompts.
    :param long: of long ones.
    :param answers: of short prompts that are answered with some tokens.
    :param turns: answers in which the connector is out in turns.
    :param turns_tokens: tokens of each of these.
    :param tokens: of a long prompt.
    """

    short: int
    long: int
    answers: int
    turns: int
    turns_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Samples:
    """What one launch of the servers has given.

    :param short: first tokens of short prompts, ms.
    :param long: of long ones.
    :param decoded_first: tokens/s right behind the first token, beside the prompt's save.
    :param decoded: after those.
    :param turns: tokens/s of neighbouring turns with the connector and without.
    """

    short: Reserved
    long: Reserved
    decoded_first: Reserved
    decoded: Reserved
    turns: Reserved


def collect(fleet: Fleet, counts: Counts, *, seed: int, advance: Callable[[str], None]) -> Samples:
    """Requests in changing order: to a vLLM without a connector, to a vLLM with layerflow, and to the same without it.

    :param seed: of the prompts and of the order; each launch has its own.
    :raises BenchFailed: the connector cannot be taken out.
    """
    prompts = Prompts(seed)
    _try_switch(fleet, prompts)

    def pairs(count: int, what: str, ask: Ask, *names: str, pause_s: float = PAUSE_S) -> dict[str, list[Answer]]:
        orders = list(itertools.permutations(names))
        random.Random(seed).shuffle(orders)
        answers: dict[str, list[Answer]] = {name: [] for name in names}
        for number in range(-WARM_UPS, count):
            for name in orders[number % len(orders)]:
                advance(f"miss: {name}, {what}, pair {number + 1}")
                server, use = _SERVERS[name]
                fleet.servers[server].use_connector(use)
                time.sleep(pause_s)  # all have rested since they were last told something
                answer = ask(fleet.servers[server])
                if number >= 0:
                    answers[name].append(answer)
                fleet.settle(server, 0.0)  # what it saves must not slow the next one
        return answers

    def first_token(length: int) -> Ask:
        return lambda server: server.ask(prompts.fresh(length))

    def answer(tokens: int) -> Ask:
        return lambda server: server.stream(prompts.fresh(SHORT_TOKENS), tokens)

    # The long ones first: they touch all of vLLM's cache, and the short ones meet no page for the first time.
    long = pairs(counts.long, f"{counts.tokens} tokens", first_token(counts.tokens), PLAIN, WITH, OUT)
    short = pairs(counts.short, f"{SHORT_TOKENS} tokens", first_token(SHORT_TOKENS), *_SERVERS, pause_s=BRIEF_PAUSE_S)
    decoded = pairs(counts.answers, "decoding", answer(ANSWER_TOKENS), PLAIN, WITH, OUT, pause_s=BRIEF_PAUSE_S)
    turns: Reserved = {WITH: [], OUT: []}
    fleet.servers[WITH].use_connector("turns")
    for number in range(counts.turns):
        advance(f"miss: decoding in turns, answer {number + 1}")
        _add_turns(turns, fleet.servers[WITH].stream(prompts.fresh(SHORT_TOKENS), counts.turns_tokens))
        fleet.settle(WITH, BRIEF_PAUSE_S)
    first, last = FIRST - 1, ANSWER_TOKENS - 1
    return Samples(_first_ms(short), _first_ms(long), _per_s(decoded, 0, first), _per_s(decoded, first, last), turns)


def _try_switch(fleet: Fleet, prompts: Prompts) -> None:
    """What is compared must differ: while the connector is out nothing is saved, and something is while it is in."""
    for use in ("out", "in"):
        before = fleet.figures()
        fleet.servers[WITH].use_connector(use)
        fleet.servers[WITH].ask(prompts.fresh(SHORT_TOKENS))
        fleet.settle(WITH)
        saved = moved(before, fleet.figures(), "save")["transfer_s"] > 0
        if saved != (use == "in"):
            raise BenchFailed(f"{WITH}: its connector is to be {use}, but a prompt was {'' if saved else 'not '}saved")


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
    first_ms = {
        str(SHORT_TOKENS): [samples.short for samples in launches],
        str(tokens): [samples.long for samples in launches],
    }
    decoded_first = [samples.decoded_first for samples in launches]
    decoded = [samples.decoded for samples in launches]
    turns = [samples.turns for samples in launches]
    ratios = {length: _compared(taken, WITH, OUT) for length, taken in first_ms.items()}
    decode = _compared(turns, WITH, OUT)
    return {
        "ttft_ms": {length: _spreads(_joined(taken)) for length, taken in first_ms.items()},
        "ttft_ratio": ratios,
        "ttft_ratio_processes": {length: _compared(taken, WITH, PLAIN) for length, taken in first_ms.items()},
        "miss_ratio": max((ratio["median"] for ratio in ratios.values() if ratio), default=None),
        "decode_tokens_per_s": _spreads(_joined(decoded)),
        "decode": decode,
        "decode_ratio": decode.get("median"),
        "decode_first": _compared(decoded_first, WITH, OUT),
        "decode_processes": _compared(decoded, WITH, PLAIN),
        "control": _compared(first_ms[str(SHORT_TOKENS)], PLAIN, AGAIN),
    }


def _add_turns(turns: Reserved, answer: Answer) -> None:
    """The speed of each of the answer's turns; those of two neighbours, of which one is without, are a pair."""
    for turn in range(turns_of(len(answer.tokens))):
        begin = FIRST + turn * PERIOD
        taken_ms = max(SHORTEST_MS, answer.times_ms[begin + PERIOD - 1] - answer.times_ms[begin - 1])
        turns[OUT if is_out(begin, len(answer.tokens)) else WITH].append(PERIOD / taken_ms * 1e3)


def _first_ms(answers: Mapping[str, Sequence[Answer]]) -> Reserved:
    return {name: [answer.first_ms for answer in taken] for name, taken in answers.items()}


def _per_s(answers: Mapping[str, Sequence[Answer]], begin: int, end: int) -> Reserved:
    """Tokens/s from one token of each answer to another."""
    return {
        name: [(end - begin) / (answer.times_ms[end] - answer.times_ms[begin]) * 1e3 for answer in taken]
        for name, taken in answers.items()
    }


def _compared(launches: Sequence[Reserved], mine: str, other: str) -> dict[str, Any]:
    """The ratio of all pairs, and each launch's median.

    Pairs of one launch have their processes in common: how certain the median is, the launches say.
    """
    taken = _joined(launches)
    ratios = [pair_ratio(one[mine], one[other]) for one in launches]
    medians = [ratio["median"] for ratio in ratios if ratio]
    return pair_ratio(taken[mine], taken[other]) | certain(medians) | {"by_launch": medians} if medians else {}


def _joined(taken: Sequence[Reserved]) -> Reserved:
    return {name: [sample for one in taken for sample in one[name]] for name in taken[0]}


def _spreads(taken: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {name: spread(samples) for name, samples in taken.items()}
