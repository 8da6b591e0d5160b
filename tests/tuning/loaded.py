"""A real server that follows a file, and an engine that loads from it without end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from layerflow_cli.bench.harness import ServerProcess, Worker

LAYERS, TOKENS, LAYER_BYTES = 8, 256, 1 << 20
LAYER_S = 0.002
"""What a layer computes; one of a prompt takes 1 ms of the emulated link."""
LINK: dict[str, object] = {"pool.size": "64MiB", "pool.link_gbps": 1, "pool.link_latency_us": 300}
BAD = '# Tuned badly on purpose.\n[transfer]\nmode = "layerwise"\nprefetch_layers = 1\nmax_transfer_bytes = "64KiB"\n'
GOOD = '[transfer]\nmode = "layerwise"\nprefetch_layers = 4\nmax_transfer_bytes = "4MiB"\n'


@contextlib.contextmanager
def serving(path: Path, **settings: object) -> Iterator[ServerProcess]:
    """``layerflow run --config path`` with an emulated link."""
    server = ServerProcess(LINK | {key.replace("__", "."): value for key, value in settings.items()}, config=path)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def loading(endpoint: str) -> Iterator[Worker]:
    """An engine that asks for one stored prompt again and again, on a thread."""
    worker = Worker(endpoint, LAYERS, TOKENS, LAYER_BYTES)
    done = threading.Event()
    chain = worker.prompt()
    worker.store(chain)

    def load() -> None:
        while not done.is_set():
            hit = worker.agent.lookup("again", chain)
            request = worker.loading(chain, hit)
            with worker.agent.open_step([request]) as step:
                for layer in range(LAYERS):
                    step.wait_layer(layer)
                    time.sleep(LAYER_S)
                    step.layer_done(layer)
            worker.agent.wait_idle(request.request, 20)

    thread = threading.Thread(target=load, name="engine")
    thread.start()
    try:
        yield worker
    finally:
        done.set()
        thread.join()
        worker.close()
