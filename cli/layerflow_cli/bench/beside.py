"""What an engine that runs Python loses beside its own saves and loads: time, and how long it stands still at once.

A loop of pure Python notes the time of each of its turns, alone and while the agent of the same process moves one long
prompt through a server process. What it loses is what its turns took longer than they take alone; a turn of more than
0.1 ms is a stall, be it for the interpreter lock or for the core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from rich.table import Table

from layerflow.agent import NoStep, Step, StepRequest
from layerflow.errors import LayerflowError
from layerflow_cli.bench.harness import Worker, serving
from layerflow_cli.output import records_table

TURN = 200  # additions: some microseconds
STALL_MS = 0.1
MOVED_S = 60.0
TARGETS = {
    "save": {"lost_ms": 8.9, "largest_stall_ms": 2.7, "stalls": 20},
    "load": {"lost_ms": 1.3, "largest_stall_ms": 2.8, "stalls": 14},
}
"""Of a window of 100 ms in 0.2, by default: nothing better was asked yet."""
MOVED_MIB, LAYERS, TOKENS, WINDOW_MS = 256, 32, 4096, 100.0
"""What the targets are of."""


def measure(
    moved_mib: int = MOVED_MIB,
    layers: int = LAYERS,
    tokens: int = TOKENS,
    window_ms: float = WINDOW_MS,
    rounds: int = 9,
) -> dict[str, Any]:
    """Run the loop alone, beside a save and beside a load, in turns.

    :param moved_mib: bytes of the prompt.
    :param layers: of the model.
    :param tokens: of the prompt.
    :param window_ms: how long the loop runs each time, from when the step is open.
    :param rounds: of each; medians are told.
    :returns: ``alone``, ``save`` and ``load``: ``lost_ms`` of 100 beside what the turns take by themselves,
        ``largest_stall_ms`` of a window, ``worst_stall_ms`` of all windows, ``stalls`` of 100 ms; ``targets`` of the
        last two. The limit is what the loop loses alone.
    """
    torch.set_num_threads(1)
    each = (moved_mib << 20) // layers
    seen: dict[str, list[dict[str, float]]] = {"alone": [], "save": [], "load": []}
    with serving(pool__size=f"{moved_mib * 4}MiB") as server:
        worker = Worker(server.endpoint, layers, tokens, each)
        try:
            stored = worker.prompt()
            worker.store(stored)
            for number in range(rounds):
                turn_s = _turn_s(window_ms)  # a core's clock rate changes
                seen["alone"].append(_window(window_ms, turn_s))
                seen["save"].append(_beside(worker, worker.saving(worker.prompt()), window_ms, turn_s))
                hit = worker.agent.lookup(f"hit-{number}", stored)
                loading = StepRequest(f"hit-{number}", stored, worker.table(1), load=(0, hit.tokens), hit=hit)
                seen["load"].append(_beside(worker, loading, window_ms, turn_s))
        finally:
            worker.close()
    result: dict[str, Any] = {
        name: {
            "lost_ms": statistics.median(window["lost_ms"] for window in windows),
            "largest_stall_ms": statistics.median(window["largest_ms"] for window in windows),
            "worst_stall_ms": max(window["largest_ms"] for window in windows),
            "stalls": statistics.median(window["stalls"] for window in windows),
        }
        for name, windows in seen.items()
    }
    targets = TARGETS if (moved_mib, layers, tokens, window_ms) == (MOVED_MIB, LAYERS, TOKENS, WINDOW_MS) else {}
    return {**result, "targets": targets, "moved_mib": moved_mib, "window_ms": window_ms}


def present(result: Mapping[str, Any]) -> list[Table]:
    """A row for the loop alone, and one for each way beside its target."""
    rows = []
    for name, label in (("alone", "alone"), ("save", "beside a save"), ("load", "beside a load")):
        rows.append({"python": label, **result[name]})
        if name in result["targets"]:
            target = {figure: f"<= {value:g}" for figure, value in result["targets"][name].items()}
            rows.append({"python": "  target", "worst_stall_ms": "", **target})
    rows.append({"python": "limit", **{figure: "as alone" for figure in result["alone"]}})
    return [records_table(f"beside: pure Python, of {result['window_ms']:g} ms", rows)]


def _turn() -> None:
    total = 0
    for number in range(TURN):
        total += number


def _turn_s(window_ms: float) -> float:
    """What a turn takes that nothing interrupts: the median."""
    spent = []
    until = time.perf_counter() + window_ms / 1e3
    while (began := time.perf_counter()) < until:
        _turn()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def _window(window_ms: float, turn_s: float) -> dict[str, float]:
    """What the loop loses in a window: what its turns took beyond `turn_s`, scaled to 100 ms."""
    began = last = time.perf_counter()
    until = began + window_ms / 1e3
    turns, largest, stalls = 0, 0.0, 0
    while last < until:
        _turn()
        now = time.perf_counter()
        over = now - last - turn_s
        turns, last, largest, stalls = turns + 1, now, max(largest, over), stalls + (over > STALL_MS / 1e3)
    scale = 100 / ((last - began) * 1e3)
    return {
        "lost_ms": (last - began - turns * turn_s) * 1e3 * scale,
        "largest_ms": largest * 1e3,
        "stalls": stalls * scale,
    }


def _beside(worker: Worker, request: StepRequest, window_ms: float, turn_s: float) -> dict[str, float]:
    """The window begins once the step is open and, for a save, all of it is computed: then the bytes move."""
    loads = request.load != (0, 0)
    with worker.agent.open_step([request]) as step:
        if not loads:
            _pass(worker, step)
        lost = _window(window_ms, turn_s)
        if loads:
            _pass(worker, step)
    if not worker.agent.wait_idle(request.request, MOVED_S):
        raise LayerflowError(f"{request.request}: a step of the benchmark's did not end")
    worker.agent.poll()
    return lost


def _pass(worker: Worker, step: Step | NoStep) -> None:
    for layer in range(worker.layers):
        step.wait_layer(layer)
        step.layer_done(layer)
