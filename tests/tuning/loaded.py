"""A real server that follows a file, and an engine that loads from it without end."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from layerflow_cli.bench.harness import ServerProcess, Worker

LAYERS, TOKENS, LAYER_BYTES = 8, 256, 1 << 20
LAYER_S = 0.004
"""What every other layer computes, the others nothing: one of a prompt takes 1.3 ms of the emulated link, so that loads
have to run two layers ahead."""
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
    done, names = threading.Event(), itertools.count()
    chain = worker.prompt()
    worker.store(chain)

    def load() -> None:
        while not done.is_set():
            name = f"again-{next(names)}"
            request = replace(worker.loading(chain, worker.agent.lookup(name, chain)), request=name)
            with worker.agent.open_step([request]) as step:
                for layer in range(LAYERS):
                    step.wait_layer(layer)
                    if layer % 2 == 0:
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
