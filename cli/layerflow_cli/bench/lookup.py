"""What a lookup that hits costs the server's loop: the search, the lease of every object, and its end.

Tensor-parallel workers have stored one long prompt; their objects are tiny. How long the loop's thread has run is read
before and after a lookup: the kernel counts it (``/proc/PID/task/TID/schedstat``), without the waiting for messages.
"""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from typing import Any

import torch

from layerflow.errors import LayerflowError
from layerflow.spec import DEFAULT_CHUNK_TOKENS, Shard
from layerflow_cli.bench.harness import LoopClock, Worker, percentiles, serving

HEARD_S = 1.0  # within which the loop has heard that a lease ends
PAUSE_S = 2e-3  # between lookups, as requests arrive: the loop has gone to sleep


def measure(tokens: int = 32_768, tp_size: int = 8, lookups: int = 300) -> dict[str, Any]:
    """Look one stored prompt up again and again, each time as another request.

    :param tokens: of the prompt.
    :param tp_size: workers, each of which has an object of every chunk.
    :returns: microseconds, p50 and p99: ``loop_cpu_us`` of the server's loop for the lookup and its lease,
        ``release_cpu_us`` for the lease's end, ``wall_us`` of the caller; ``objects`` that a hit leases.
    """
    torch.set_num_threads(1)
    content = secrets.token_hex(8)
    with ExitStack() as stack:
        server = stack.enter_context(serving(pool__size="1GiB"))
        workers = []
        for rank in range(tp_size):
            shard = Shard(rank, tp_size)
            workers.append(Worker(server.endpoint, 1, tokens, 2 * tokens, requests=1, shard=shard, content=content))
            stack.callback(workers[-1].close)
        chain = workers[0].prompt()
        for worker in workers:
            worker.store(chain)
        agent, clock = workers[0].agent, LoopClock(server.process.pid)
        looked: list[int] = []
        released: list[int] = []
        wall: list[int] = []
        for number in range(lookups):
            time.sleep(PAUSE_S)
            before, began = clock(), time.perf_counter_ns()
            hit = agent.lookup(f"lookup-{number}", chain)
            wall.append(time.perf_counter_ns() - began)
            if hit.tokens < tokens - workers[0].spec.block_tokens:
                raise LayerflowError(f"a stored prompt was not found again: hit of {hit.tokens} of {tokens} tokens")
            time.sleep(PAUSE_S)
            after = clock()
            agent.drop_lease(f"lookup-{number}")
            heard_by = time.monotonic() + HEARD_S
            while clock() == after and time.monotonic() < heard_by:
                time.sleep(PAUSE_S)
            time.sleep(PAUSE_S)
            looked.append(after - before)
            released.append(clock() - after)
    return {
        "loop_cpu_us": percentiles(looked),
        "release_cpu_us": percentiles(released),
        "wall_us": percentiles(wall),
        "objects": -(-tokens // DEFAULT_CHUNK_TOKENS) * tp_size,
        "tokens": tokens,
        "tp_size": tp_size,
    }
