"""How much of a transfer hides behind compute: layer-wise against bulk, load and save.

The bound is this and nothing else, with t = T/L and c = measured compute per layer::

    exposed_min = t + max(0, t - c) * (L - 1)        bound = 1 - exposed_min / T
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from layerflow.device import device_for, is_emulated
from layerflow.errors import LayerflowError
from layerflow.observe.trace import overlap_bound
from layerflow_cli.bench.harness import Worker, serving

TOKENS = 2048
LAYER_BYTES = 1 << 20
WAIT_S = 60.0

Compute = Callable[[], None]


def measure(
    layers: int = 60,
    compute_ms: float = 838.0,
    transfer_ms: float = 167.0,
    compute: Literal["sleep", "matmul"] = "sleep",
    runs: int = 5,
    shape: Literal["full", "compressed"] = "full",
    device: str = "cpu",
) -> dict[str, Any]:
    """Median of `runs`, everything interleaved in one run.

    :param transfer_ms: T: what the emulated link needs for all bytes of a load. A save of compressed caches has more:
        the window at the end of every chunk. On a device there is no emulated link, and T is what a bulk load,
        or save, takes without compute.
    :param shape: of a layer's cache: K and V, or compressed rows, a window and a running state.
    :param device: of the engine's memory, and of the matrix products. Unless it is the cpu, these are enqueued layer
        after layer and waited for once, as an engine's are: what they take beside a transfer is not seen, and counts as
        what they take alone.
    :raises Unsupported: no such device here.
    :returns: per direction: bulk and layer-wise wall time (ms), overlap, bound, slowdown of compute.
    """
    target = device_for(device)
    on_host = target.kind == "cpu"
    torch.set_num_threads(1)
    work = (
        sleeping(compute_ms / layers) if compute == "sleep" else multiplying(compute_ms / layers, device, waits=on_host)
    )

    def settle() -> None:
        target.record().synchronize()

    gbps = layers * LAYER_BYTES / (transfer_ms / 1e3) / 1e9 if on_host else 0.0
    with serving(pool__size="1GiB", pool__link_gbps=gbps) as server:
        worker = Worker(server.endpoint, layers, TOKENS, LAYER_BYTES, compressed=shape == "compressed", device=device)
        try:
            walls = _interleaved(worker, work, settle, runs, transfers=not on_host)
        finally:
            worker.close()
    alone = statistics.median(walls["alone"])
    per_layer = alone / layers
    moved = {"load": layers * worker.layer_bytes, "save": layers * worker.saved_bytes}
    measured = transfer_ms / 1e3 if on_host else statistics.median(walls["load-transfer"])
    result: dict[str, Any] = {
        "layers": layers, "compute_ms": alone * 1e3, "transfer_ms": measured * 1e3, "compute": compute,
        "shape": shape, "link": "emulated" if on_host else "the device's", "bytes": moved["load"],
        "device": device, "emulated": is_emulated(device),
    }  # fmt: skip
    for direction, nbytes in moved.items():
        transfer = nbytes / gbps / 1e9 if on_host else statistics.median(walls[f"{direction}-transfer"])
        wall = statistics.median(walls[f"{direction}-layerwise"])
        inside = statistics.median(walls[f"{direction}-compute"]) if on_host else alone
        bound = overlap_bound(transfer, layers, inside / layers)
        overlap = 1 - (wall - inside) / transfer
        result[direction] = {
            "bulk_ms": statistics.median(walls[f"{direction}-bulk"]) * 1e3,
            "layerwise_ms": wall * 1e3,
            "exposed_ms": (wall - inside) * 1e3,
            "overlap": overlap,
            "bound": bound,
            "of_bound": overlap / bound if bound > 0 else None,
            "slowdown": inside / alone if on_host else None,
            "of_transfer_bound": wall / (transfer + per_layer),
        }
    return result


def _interleaved(
    worker: Worker, work: Compute, settle: Compute, runs: int, *, transfers: bool
) -> dict[str, list[float]]:
    known = worker.prompt()
    worker.store(known)
    walls: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        walls.setdefault(name, []).append(seconds)

    def compute() -> None:
        for _ in range(worker.layers):
            work()
        settle()

    for _ in range(runs):
        note("alone", _timed(compute))
        if transfers:
            note("load-transfer", _load(worker, known, _nothing, settle, True)[0])
            note("save-transfer", _save(worker, _nothing, settle, True)[0])
        for bulk in (True, False):
            wall, inside = _load(worker, known, work, settle, bulk)
            note(f"load-{'bulk' if bulk else 'layerwise'}", wall)
            wall_saved, inside_saved = _save(worker, work, settle, bulk)
            note(f"save-{'bulk' if bulk else 'layerwise'}", wall_saved)
            if not bulk:
                note("load-compute", inside)
                note("save-compute", inside_saved)
    return walls


def _load(worker: Worker, chain: Any, work: Compute, settle: Compute, bulk: bool) -> tuple[float, float]:
    """Wall time of a forward pass that loads its prefix, and the compute inside it."""
    name, hit = worker.look_up(chain)
    if hit.tokens < worker.tokens - 1:
        raise LayerflowError(f"the stored prompt was not found again: hit of {hit.tokens} tokens")
    request = worker.loading(chain, hit, name)
    spent: list[float] = []
    clock = time.perf_counter  # what the measurement itself does between two layers counts as exposed
    began = clock()
    with worker.agent.open_step([request]) as step:
        if bulk and not step.wait_all():
            raise LayerflowError(f"bulk load failed: {step.failed}")
        for layer in range(worker.layers):
            for cache in worker.caches[layer]:
                if not step.wait_layer(cache):
                    raise LayerflowError(f"layer-wise load failed at layer {layer}: {step.failed}")
            computing = clock()
            work()
            spent.append(clock() - computing)
            for cache in worker.caches[layer]:
                step.layer_done(cache)
        settle()
    wall = clock() - began
    worker.agent.wait_idle(request.request, WAIT_S)
    return wall, sum(spent)


def _save(worker: Worker, work: Compute, settle: Compute, bulk: bool) -> tuple[float, float]:
    """Wall time of a forward pass until its last byte is stored, and the compute inside it."""
    request = worker.saving(worker.prompt())
    spent: list[float] = []
    clock = time.perf_counter
    began = clock()
    with worker.agent.open_step([request]) as step:
        for layer in range(worker.layers):
            for cache in worker.caches[layer]:
                step.wait_layer(cache)
            computing = clock()
            work()
            spent.append(clock() - computing)
            for cache in () if bulk else worker.caches[layer]:
                step.layer_done(cache)
        for cache in range(worker.spec.num_layers if bulk else 0):
            step.layer_done(cache)
    if not worker.agent.wait_idle(request.request, WAIT_S):
        raise LayerflowError("a save did not end")
    settle()
    wall = clock() - began
    if request.request not in worker.agent.poll().saved:
        raise LayerflowError("a save was not stored; is the pool large enough?")
    return wall, sum(spent)


def _nothing() -> None:
    """No compute."""


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def sleeping(milliseconds: float) -> Compute:
    return lambda: time.sleep(milliseconds / 1e3)


def multiplying(milliseconds: float, device: str = "cpu", *, waits: bool = True) -> Compute:
    """Matrix products that take about so long alone; always the same work.

    :param waits: they are done, on a device too, when it returns; else enqueued there.
    """
    target = device_for(device)
    side = 512 if target.kind == "cpu" else 2048
    left, right = (torch.randn(side, side).to(device) for _ in range(2))
    out = torch.empty(side, side, device=device)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    def done(count: int) -> None:
        multiply(count)
        target.record().synchronize()

    done(1)
    one = statistics.median(_timed(lambda: done(4)) for _ in range(25)) / 4
    count = max(1, round(milliseconds / 1e3 / one))
    return lambda: (done if waits else multiply)(count)
