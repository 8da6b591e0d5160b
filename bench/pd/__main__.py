"""``python -m bench.pd --out FILE``: first tokens of prompts that one vLLM prefills and another decodes.

All contenders are up at the same time and take turns, prompt by prompt; those whose turn it is not are stopped. Each
round has prompts that nobody has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.pd.engines import Engines, Starter, has_nixl
from bench.pd.legs import SIX_KEYS, Times, at_once, single, two_phases
from bench.vllm.children import Child, stopped_at_the_end
from bench.vllm.model import VOCABULARY

TOKENS = 2049
ROUNDS = 15
SETTLED_S = 0.3

Turn = Callable[[list[int]], Awaitable[Times]]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    link = "of the part follow_two_servers: between P's and D's server; none leaves that part out"
    parser.add_argument("--link", choices=("tcp", "mooncake", "nixl", "none"), default="tcp", help=link)
    chosen = parser.parse_args()
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="bench-pd-") as folder, stopped_at_the_end(children):
        contenders = start(Starter(Path(folder), children), chosen.link)
        times = asyncio.run(measure(contenders, chosen.rounds, chosen.tokens))
    report = summary(times)
    chosen.out.write_text(json.dumps(report, indent=1))
    print(json.dumps({key: value for key, value in report.items() if key != "samples"}, indent=1))


def start(starter: Starter, link: str) -> dict[str, tuple[Engines, Turn]]:
    """Every contender with the turn of a prompt through it; started one after the other, stopped until its turn."""
    made: dict[str, tuple[Engines, Turn]] = {}

    def add(name: str, engines: Engines, turn: Callable[[Engines, list[int]], Awaitable[Times]]) -> None:
        made[name] = engines, lambda prompt: turn(engines, prompt)

    alone = starter.single()
    add("single", alone, single)
    pair = starter.over_layerflow("pair")
    add("pool", pair, lambda engines, prompt: two_phases(engines, prompt, None))
    add("follow", pair, at_once)
    if link != "none":
        add("follow_two_servers", starter.over_layerflow("far", link), at_once)
    if has_nixl():
        add("nixl", starter.over_nixl(), lambda engines, prompt: two_phases(engines, prompt, SIX_KEYS))
    for engines, _ in made.values():
        with engines.running():
            pass
    return made


async def measure(contenders: dict[str, tuple[Engines, Turn]], rounds: int, tokens: int) -> dict[str, list[Times]]:
    """Interleaved; the first round warms up and does not count."""
    source = random.Random(22)
    times: dict[str, list[Times]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, (engines, turn) in contenders.items():
            prompt = [source.randrange(10, VOCABULARY) for _ in range(tokens)]
            with engines.running():
                taken = await turn(prompt)
                await asyncio.sleep(SETTLED_S)  # what the turn has left behind is not the next one's
            if number:
                times[name].append(taken)
    return times


def summary(times: dict[str, list[Times]]) -> dict[str, object]:
    """Medians, and the ratios that are asked for."""
    ttft = {name: round(statistics.median(each.ttft for each in taken), 1) for name, taken in times.items()}
    leg = {name: round(statistics.median(each.decode_leg for each in taken), 1) for name, taken in times.items()}
    report: dict[str, object] = {"ttft_ms": ttft, "decode_leg_ms": leg}
    report["vs_single"] = {name: round(value / ttft["single"], 3) for name, value in ttft.items()}
    if "nixl" in ttft:
        report["vs_nixl"] = {name: round(value / ttft["nixl"], 3) for name, value in ttft.items()}
    report["samples"] = {name: [list(each) for each in taken] for name, taken in times.items()}
    return report


if __name__ == "__main__":
    main()
