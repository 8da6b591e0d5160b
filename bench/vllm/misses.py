"""``miss``: what the connector costs where it cannot help: prompts nobody has seen, and decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.vllm.asking import Prompts, Server
from bench.vllm.figures import pair_ratio, spread
from bench.vllm.fleet import PAUSE_S, Fleet

WITHOUT, WITH = "plain", "layerwise"
SHORT_TOKENS = 64
DECODED = 128
WARM_UPS = 2
BRIEF_PAUSE_S = 0.05
"""Between the many short prompts. One pair says little: it takes some 400 until the median is known to 2 %."""


def measure(
    fleet: Fleet, *, short_pairs: int, decoding_pairs: int, long_pairs: int, tokens: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Pairs of requests, one to a vLLM without a connector and one to a vLLM with layerflow, in changing order.

    :param decoding_pairs: short prompts that are answered with many tokens.
    :param tokens: of a long prompt.
    :returns: JSON-ready figures, times in milliseconds.
    """
    prompts = Prompts(seed=3)

    def pairs(
        count: int, what: str, ask: Callable[[Server], float], pause_s: float = PAUSE_S
    ) -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {WITHOUT: [], WITH: []}
        for number in range(-WARM_UPS, count):
            for name in _order(number):
                advance(f"miss: {name}, {what}, pair {number + 1}")
                figure = ask(fleet.servers[name])
                if number >= 0:
                    taken[name].append(figure)
                fleet.settle(name, pause_s)  # what it saves must not slow the other one
        return taken

    def first_ms(length: int) -> Callable[[Server], float]:
        return lambda server: server.ask(prompts.fresh(length)).first_ms

    def decoded_per_s(server: Server) -> float:
        answer = server.stream(prompts.fresh(SHORT_TOKENS), DECODED + 1)
        return DECODED / (answer.last_ms - answer.first_ms) * 1e3

    # The long ones first: they touch all of vLLM's cache, and the short ones meet no page for the first time.
    long = pairs(long_pairs, f"{tokens} tokens", first_ms(tokens))
    ttft = pairs(short_pairs, f"{SHORT_TOKENS} tokens", first_ms(SHORT_TOKENS), BRIEF_PAUSE_S)
    speed = pairs(decoding_pairs, f"{DECODED} tokens more", decoded_per_s)
    by_length = {str(SHORT_TOKENS): ttft, str(tokens): long}
    ratios = {length: pair_ratio(taken[WITH], taken[WITHOUT]) for length, taken in by_length.items()}
    decode = pair_ratio(speed[WITH], speed[WITHOUT])
    return {
        "ttft_ms": {length: _spreads(taken) for length, taken in by_length.items()},
        "ttft_ratio": ratios,
        "miss_ratio": max((figures["median"] for figures in ratios.values() if figures), default=None),
        "decode_tokens_per_s": _spreads(speed),
        "decode": decode,
        "decode_ratio": decode.get("median"),
    }


def _order(number: int) -> tuple[str, str]:
    return (WITHOUT, WITH) if number % 2 else (WITH, WITHOUT)


def _spreads(taken: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {name: spread(samples) for name, samples in taken.items()}
