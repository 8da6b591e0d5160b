"""What the benchmarks share: a server process, an engine worker's paged memory, prompts nobody has seen."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from layerflow.agent import Agent, Hit, StepRequest
from layerflow.errors import LayerflowError
from layerflow.keys import Chain
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

START_LINE = "layerflow listening on"
STOP_TIMEOUT_S = 15.0
WARM_TIMEOUT_S = 60.0


class ServerProcess:
    """A ``layerflow run`` of its own, with its socket in a private directory.

    :param settings: ``section.key`` to value, as ``--set`` takes them.
    """

    def __init__(self, settings: dict[str, object], folder: Path | None = None) -> None:
        self._own_folder = tempfile.TemporaryDirectory(prefix="layerflow-") if folder is None else None
        self.folder = folder or Path(self._own_folder.name if self._own_folder else "")
        self.endpoint = f"ipc://{self.folder}/control"
        self._settings = {"server.endpoint": self.endpoint, "server.http_port": -1, "log.level": "error"} | settings
        self._start()

    def _start(self) -> None:
        sets = list(itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in self._settings.items()))
        command = [sys.executable, "-m", "layerflow_cli", "run", *sets]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"NO_COLOR": "1"})
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                if line.startswith(START_LINE):
                    return
            raise LayerflowError(f"layerflow run ended with code {self.process.wait()} before it was listening")
        except BaseException:  # interrupted, or not listening: nobody else knows of it yet
            self.kill()
            raise

    def restart(self) -> None:
        """Start it again at the same endpoint, after :meth:`kill`."""
        self._start()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
        self._hang_up()

    def close(self) -> None:
        """SIGTERM, and wait for the drain."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._hang_up()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def _hang_up(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def serving(**settings: object) -> Iterator[ServerProcess]:
    """A server process for the length of a with-block; ``pool__size="1GiB"`` is ``pool.size``."""
    server = ServerProcess({key.replace("__", "."): value for key, value in settings.items()})
    try:
        yield server
    finally:
        server.close()


class Worker:
    """An engine worker with paged memory but no model: `layers` layers of K and V.

    :param tokens: that one request has; a multiple of the block size.
    :param layer_bytes: bytes of one layer of such a request, all planes together.
    :param planes: their names.
    :param shard: which part of the model it has.
    :param device: of the paged memory.
    :param content: names the model; workers that name the same share objects. Default: a model of its own.
    """

    def __init__(
        self,
        endpoint: str,
        layers: int,
        tokens: int,
        layer_bytes: int,
        block_size: int = 16,
        requests: int = 2,
        planes: Sequence[str] = ("k", "v"),
        shard: Shard | None = None,
        content: str = "",
        device: str = "cpu",
    ) -> None:
        self.layers, self.tokens, self.block_size = layers, tokens, block_size
        row = layer_bytes // tokens // len(planes)
        self.layer_bytes = row * tokens * len(planes)
        group = GroupSpec(
            "full", block_size, tuple(range(layers)), tuple(Plane(name, "uint8", (row,)) for name in planes)
        )
        self.spec = ModelSpec("bench", content or secrets.token_hex(8), (group,), shard=shard or Shard())
        self.blocks = tokens // block_size
        shape = (self.blocks * requests, block_size, row)
        # Written once: memory that was never touched costs the first copy a page fault per page.
        self.tensors = {
            layer: {name: _filled(shape, layer % 251, device) for name in planes} for layer in range(layers)
        }
        self.agent = Agent(endpoint, self.spec, self.tensors, "bench", lookup_timeout_s=WARM_TIMEOUT_S)
        if not self.agent.attached:
            raise LayerflowError(f"{endpoint}: the benchmark's worker could not attach")
        if not self.agent.wait_warm(WARM_TIMEOUT_S):
            raise LayerflowError("the arena was not mapped in time; is the machine out of memory?")
        self._random = np.random.default_rng(7)
        self._names = itertools.count()

    def prompt(self) -> Chain:
        """Random tokens: a prompt that nobody has seen."""
        return self.agent.chain(self._random.integers(0, 1 << 30, self.tokens))

    def table(self, place: int = 0) -> tuple[np.ndarray, ...]:
        """Block ids of request slot `place`, scattered as after long use."""
        order = np.random.default_rng(place).permutation(self.blocks)
        return (order + place * self.blocks,)

    def saving(self, chain: Chain, place: int = 0) -> StepRequest:
        """A request whose whole prompt is computed and saved."""
        return StepRequest(f"save-{next(self._names)}", chain, self.table(place), save=(0, self.tokens), tail=True)

    def loading(self, chain: Chain, hit: Hit, place: int = 1) -> StepRequest:
        """A request that loads its whole hit."""
        name = f"load-{next(self._names)}"
        return StepRequest(name, chain, self.table(place), load=(0, hit.tokens), hit=hit)

    def store(self, chain: Chain) -> None:
        """Save a prompt and wait until it is published.

        :raises LayerflowError: it was not.
        """
        request = self.saving(chain)
        with self.agent.open_step([request]) as step:
            for layer in range(self.layers):
                step.wait_layer(layer)
                step.layer_done(layer)
        if not self.agent.wait_idle(request.request, 60) or request.request not in self.agent.poll().saved:
            raise LayerflowError("the benchmark's prompt was not stored; is the pool large enough?")

    def close(self) -> None:
        """Detach."""
        self.agent.close()


def _filled(shape: tuple[int, ...], value: int, device: str) -> torch.Tensor:
    """Copied to a device, not made there: an emulated one runs no kernels."""
    host = torch.full(shape, value, dtype=torch.uint8)
    return host if device == "cpu" else torch.empty(shape, dtype=torch.uint8, device=device).copy_(host)
