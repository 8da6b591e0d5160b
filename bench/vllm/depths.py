"""What a small ``transfer.prefetch_layers`` costs a hit: time to first token beside that without the setting.

``python -m bench.vllm.depths --out FILE``. One vLLM, one server, whose configuration is changed while it runs; every
prompt is asked with each depth in turns, so that what is compared is close in time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from bench.vllm import report
from bench.vllm.asking import Prompts
from bench.vllm.children import BenchFailed
from bench.vllm.contenders import BLOCK_SIZE, LAYERWISE, MAX_MODEL_LEN, TOKEN_BYTES
from bench.vllm.figures import ratio, spread
from bench.vllm.fleet import Fleet, fleet

from layerflow.agent.observer import fetch_status
from layerflow_cli.output import console, records_table, write_json

DEPTHS = (0, 1, 2, 4)
"""0 = without the setting."""
LENGTHS = (300, 1000, 2048)
"""Tokens of a prompt."""
MOST_RATIO = {1: 1.5, 2: 1.3, 4: 1.3}
WARM_UPS = 1
APPLY_S = 10.0


def bench(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Takes the result as JSON.")],
    rounds: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 12,
) -> None:
    """Measure hits under small depths in a real vLLM."""
    samples: dict[int, dict[int, list[float]]] = {tokens: {depth: [] for depth in DEPTHS} for tokens in LENGTHS}
    kv_bytes = (2 * MAX_MODEL_LEN // BLOCK_SIZE + 1) * BLOCK_SIZE * TOKEN_BYTES
    with tempfile.TemporaryDirectory(prefix="layerflow-bench-") as name:
        folder, config = Path(name), Path(name) / "layerflow.toml"
        _write(config, 0)
        with fleet(folder / "logs", [LAYERWISE], kv_bytes=kv_bytes, pool_gib=4, config=config) as running:
            prompts = Prompts(seed=1)
            for number in range(WARM_UPS + rounds):
                for tokens in LENGTHS:
                    taken = _round(running, config, prompts.fresh(tokens + 1), number)
                    for depth, taken_ms in taken.items():
                        if number >= WARM_UPS:
                            samples[tokens][depth].append(taken_ms)
    result = _result(samples)
    write_json(out, result)
    console().print(records_table("hits under small depths", result["rows"]))
    if any(row["ratio"] > MOST_RATIO.get(row["depth"], row["ratio"]) for row in result["rows"]):
        sys.exit(1)


def _round(running: Fleet, config: Path, prompt: list[int], number: int) -> dict[int, float]:
    """A prompt once cold, then with each depth in an order that moves on.

    Hits answer alike. The cold prompt may not: in bfloat16 its last row, one of many, is rounded elsewhere.
    """
    server = running.servers[LAYERWISE.name]
    server.ask(prompt)
    running.settle(LAYERWISE.name)
    shift = number % len(DEPTHS)
    taken: dict[int, float] = {}
    answers: set[tuple[int, ...]] = set()
    for depth in (*DEPTHS[shift:], *DEPTHS[:shift]):
        _write(config, depth)
        _applied(running.endpoint, depth)
        hit = server.ask(prompt)
        running.settle(LAYERWISE.name)
        answers.add(tuple(hit.tokens))
        if hit.cached != len(prompt) - 1 or len(answers) > 1:
            raise BenchFailed(f"depth {depth}: {hit.cached} of {len(prompt) - 1} tokens hit, answers {answers}")
        taken[depth] = hit.first_ms
    return taken


def _write(config: Path, depth: int) -> None:
    config.write_text(f"[transfer]\nprefetch_layers = {depth}\n", encoding="utf-8")


def _applied(endpoint: str, depth: int) -> None:
    deadline = time.monotonic() + APPLY_S
    while fetch_status(endpoint)["limits"]["prefetch_layers"] != depth:
        if time.monotonic() > deadline:
            raise BenchFailed(f"the server has not taken prefetch_layers = {depth} within {APPLY_S:g} s")
        time.sleep(0.02)


def _result(samples: dict[int, dict[int, list[float]]]) -> dict[str, Any]:
    rows = []
    for tokens, by_depth in samples.items():
        for depth, taken in by_depth.items():
            pairs = [one / without for one, without in zip(taken, by_depth[0], strict=True)]
            rows.append(
                {
                    "tokens": tokens,
                    "depth": depth,
                    "ttft_ms": spread(taken)["median"],
                    "ratio": ratio(median(taken), median(by_depth[0])),
                    "by_pairs": round(median(pairs), 3),
                    "target": MOST_RATIO.get(depth),
                }
            )
    return {"rows": rows, "samples_ms": json.loads(json.dumps(samples)), "machine": report.machine()}


if __name__ == "__main__":
    typer.run(bench)
