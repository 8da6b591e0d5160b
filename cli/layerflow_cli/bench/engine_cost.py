"""What a ready ``wait_layer`` and a ``layer_done`` cost the engine's thread, loads and saves active."""

from __future__ import annotations

import time
from typing import Any

import torch

from layerflow.errors import LayerflowError
from layerflow_cli.bench.harness import Worker, percentiles, serving
from layerflow_cli.bench.overlap import multiplying

LAYERS = 64
TOKENS = 512
LAYER_BYTES = 512 << 10
BETWEEN_MS = 2.0
# Loads take three quarters of the compute, so that both directions move during the whole pass and every wait is ready.
LINK_GBPS = LAYER_BYTES / (0.75 * BETWEEN_MS / 1e3) / 1e9


def measure(steps: int = 12) -> dict[str, Any]:
    """Microseconds per call over `steps` passes of 64 layers with 2 ms of matmul between calls."""
    torch.set_num_threads(1)
    work = multiplying(BETWEEN_MS)
    waits: list[int] = []
    dones: list[int] = []
    not_ready = 0
    with serving(pool__size="1GiB", pool__link_gbps=LINK_GBPS) as server:
        worker = Worker(server.endpoint, LAYERS, TOKENS, LAYER_BYTES)
        try:
            known = worker.prompt()
            worker.store(known)
            for _ in range(steps):
                waited, done, late = _pass(worker, known, work)
                waits += waited
                dones += done
                not_ready += late
        finally:
            worker.close()
    return {
        "wait_ready_us": percentiles(waits),
        "layer_done_us": percentiles(dones),
        "calls": len(dones),
        "waits_not_ready": not_ready,
    }


def _pass(worker: Worker, known: Any, work: Any) -> tuple[list[int], list[int], int]:
    hit = worker.agent.lookup("cost", known)
    if hit.tokens < worker.tokens - 1:
        raise LayerflowError(f"the stored prompt was not found again: hit of {hit.tokens} tokens")
    requests = [worker.loading(known, hit), worker.saving(worker.prompt())]
    clock = time.perf_counter_ns
    waits, dones, late = [], [], 0
    with worker.agent.open_step(requests) as step:
        for _ in range(3):
            work()
        for layer in range(worker.layers):
            work()
            ready = step.is_ready(layer)
            began = clock()
            outcome = step.wait_layer(layer)
            waited = clock() - began
            if not outcome:
                raise LayerflowError(f"load failed at layer {layer}: {step.failed}")
            if ready:
                waits.append(waited)
            late += not ready
            work()
            began = clock()
            step.layer_done(layer)
            dones.append(clock() - began)
    for request in requests:
        worker.agent.wait_idle(request.request, 60)
    worker.agent.poll()
    return waits, dones, late
