"""How close to its stagger slot each layer of each tensor-parallel rank begins: processes, a server and real copies."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import torch

from layerflow.device import device_for, is_emulated
from layerflow.errors import LayerflowError
from layerflow.spec import Shard
from layerflow_cli.bench.harness import Worker, serving

TOKENS = 256
LAYER_BYTES = 1 << 20
WAIT_S = 120.0

Begun = tuple[int, int, int, float]
"""Rank, number of the load, layer, and when its copy was submitted, monotonic seconds."""


def measure(
    ranks: int = 4, layers: int = 32, spacing_us: int = 1000, rounds: int = 5, device: str = "cpu"
) -> dict[str, Any]:
    """Every rank loads the same prompt at once, so many times.

    :param ranks: sessions of one model, each a process.
    :param spacing_us: distance of two slots, microseconds.
    :param device: of the ranks' memory: they share its link.
    :returns: ``slot_error_us``: how far behind its slot a layer was submitted, on a device how far behind it its copies
        began to move, ``p50`` and ``p95``, microseconds; ``early``: layers that were submitted before their slot;
        ``load_ratio``: of whole loads, see :func:`load_ratio`, ``p50`` and ``worst``: a layer that is turns late shows
        there alone.
    :raises Unsupported: no such device here.
    """
    device_for(device)  # says so here, not in every rank
    settings = {
        "pool__size": f"{(ranks * layers * LAYER_BYTES >> 20) + 64}MiB",
        "transfer__h2d_stagger_us": spacing_us,
    }
    with serving(**settings) as server:
        begun = _all_ranks(server.endpoint, ranks, layers, rounds, device)
    spacing_s = spacing_us * 1e-6
    errors = np.array([slot_error(rank, layer, when, ranks, spacing_s) for rank, _, layer, when in begun])
    loads: dict[tuple[int, int], dict[int, float]] = {}
    for rank, number, layer, when in begun:
        begins = loads.setdefault((rank, number), {})
        begins[layer] = min(when, begins.get(layer, when))
    whole = [load_ratio(rank, begins, ranks, spacing_s) for (rank, _), begins in loads.items()]
    p50, p95 = (np.percentile(errors[errors >= 0], (50, 95)) * 1e6).tolist()
    early = int((errors < 0).sum())
    about = {"device": device, "emulated": is_emulated(device)}
    return {
        "slot_error_us": {"p50": p50, "p95": p95},
        "load_ratio": {"p50": statistics.median(whole), "worst": max(whole)},
        "early": early,
        "submitted": len(begun),
        **about,
    }


def slot_error(rank: int, layer: int, when: float, ranks: int, spacing_s: float) -> float:
    """Seconds from the layer's slot to its submission, which belongs to the slot that began last; up to half a slot
    before the next one it is early: negative."""
    turn = ranks * spacing_s
    error = (when - (rank + layer) % ranks * spacing_s) % turn
    return error - turn if error > turn - spacing_s / 2 else error


def load_ratio(rank: int, begins: Mapping[int, float], ranks: int, spacing_s: float) -> float:
    """How long a rank's load took ÷ what it takes where each layer has the next turn: 1 = no turn was missed. Both from
    the first layer's start to a turn behind the last one's.

    :param begins: when each layer was submitted.
    """
    first, last, turn = min(begins), max(begins), ranks * spacing_s
    slots = (rank + last) % ranks - (rank + first) % ranks
    return (begins[last] - begins[first] + turn) / ((last - first + 1) * turn + slots * spacing_s)


def _all_ranks(endpoint: str, ranks: int, layers: int, rounds: int, device: str) -> Sequence[Begun]:
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(ranks)
    pipes = [spawn.Pipe(duplex=False) for _ in range(ranks)]
    children = [
        spawn.Process(target=_rank, args=(endpoint, (rank, ranks), layers, rounds, device, together, out), daemon=True)
        for rank, (_, out) in enumerate(pipes)
    ]
    for child, (_, sending) in zip(children, pipes, strict=True):
        child.start()
        sending.close()
    begun: list[Begun] = []
    try:
        for rank, (receiving, _) in enumerate(pipes):
            if not receiving.poll(WAIT_S):
                raise LayerflowError(f"rank {rank} has not answered for {WAIT_S:.0f} s")
            begun += receiving.recv()
    except EOFError:
        raise LayerflowError(f"rank {rank} ended without an answer; its message stands above") from None
    finally:
        for child in children:
            child.join(0 if len(begun) < ranks else WAIT_S)
            child.kill()
    return begun


def _rank(
    endpoint: str,
    shard: tuple[int, int],
    layers: int,
    rounds: int,
    device: str,
    together: Barrier,
    out: Connection,
) -> None:
    rank, _ = shard
    device_for(device)  # from here on torch knows the name
    torch.set_num_threads(1)
    worker = Worker(endpoint, layers, TOKENS, LAYER_BYTES, shard=Shard(*shard), content="stagger", device=device)
    chain = worker.prompt()
    try:
        worker.store(chain)
        begun: list[Begun] = []
        for number in range(rounds):
            together.wait(WAIT_S)
            hit = worker.agent.lookup("load", chain)
            request = worker.loading(chain, hit)
            with worker.agent.open_step([request]) as step:
                if not step.wait_all():
                    raise LayerflowError(f"rank {rank}: a load has failed: {step.failed}")
            worker.agent.wait_idle(request.request, WAIT_S)
            spans = worker.agent.traces[-1].spans
            begun += [(rank, number, span.layer, span.start) for span in spans if span.lane == "load"]
        out.send(begun)
    except threading.BrokenBarrierError:
        pass  # another rank has failed, and says why
    finally:
        worker.close()
