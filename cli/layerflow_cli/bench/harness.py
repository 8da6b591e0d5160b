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
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from layerflow.agent import Agent, Hit, StepRequest
from layerflow.errors import LayerflowError
from layerflow.keys import Chain
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

START_LINE = "layerflow listening on"
STOP_TIMEOUT_S = 15.0
WARM_TIMEOUT_S = 60.0
PATIENT: dict[str, object] = {"server.liveness_ms": 60_000, "transfer.step_timeout_ms": 60_000}
"""A machine that stands still for some seconds costs a measurement its figures, but no session and no load."""
Percentiles = dict[Literal["p50", "p99"], float]


def percentiles(nanoseconds: Sequence[int]) -> Percentiles:
    """Median and 99th percentile, microseconds."""
    p50, p99 = np.percentile(nanoseconds, (50, 99)) / 1e3
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}


class ServerProcess:
    """A ``layerflow run`` of its own, with its socket in a private directory.

    :param settings: ``section.key`` to value, as ``--set`` takes them.
    :param config: the file that it follows; None = none.
    """

    def __init__(self, settings: dict[str, object], folder: Path | None = None, *, config: Path | None = None) -> None:
        self._config = [] if config is None else ["--config", str(config)]
        self._own_folder = tempfile.TemporaryDirectory(prefix="layerflow-") if folder is None else None
        self.folder = folder or Path(self._own_folder.name if self._own_folder else "")
        self.endpoint = f"ipc://{self.folder}/control"
        self._settings = {"server.endpoint": self.endpoint, "server.http_port": -1, "log.level": "error"} | settings
        self._start()

    def _start(self) -> None:
        sets = list(itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in self._settings.items()))
        command = [sys.executable, "-m", "layerflow_cli", "run", *self._config, *sets]
        environment = os.environ | {"NO_COLOR": "1"}
        with _held_back(signal.SIGTERM, signal.SIGINT) as handle_held_back:
            self.process = self._popen(command, environment)
        try:
            handle_held_back()
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if line.startswith(START_LINE):
                    return
            raise LayerflowError(f"layerflow run ended with code {self.process.wait()} before it was listening")
        except BaseException:  # interrupted, or not listening: nobody else knows of it yet
            self.kill()
            raise

    def _popen(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def restart(self, **changed: object) -> None:
        """Start it again at the same endpoint, after :meth:`kill`. ``peers__link="nixl"`` changes ``peers.link``."""
        self._settings |= {key.replace("__", "."): value for key, value in changed.items()}
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


class LoopClock:
    """Nanoseconds that a process's first thread has run."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/task/{pid}/schedstat")

    def __call__(self) -> int:
        return int(self._file.read_text().split()[0])


@contextlib.contextmanager
def _held_back(*numbers: int) -> Iterator[Callable[[], None]]:
    """Signals that come meanwhile are handled when what this yields is called, so that a process that has just been
    started has an owner by then. Of another thread than the main one nothing is held back: it handles none."""
    came: list[int] = []

    def handle() -> None:
        for number in came:
            signal.raise_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield handle
        return
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield handle
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def serving(**settings: object) -> Iterator[ServerProcess]:
    """A patient server process for the length of a with-block; ``pool__size="1GiB"`` is ``pool.size``."""
    server = ServerProcess(PATIENT | {key.replace("__", "."): value for key, value in settings.items()})
    try:
        yield server
    finally:
        server.close()


class Worker:
    """An engine worker with paged memory but no model: `layers` layers of K and V, or of compressed caches.

    :param tokens: that one request has; a multiple of the block size.
    :param layer_bytes: bytes of one layer of such a request, all planes together.
    :param planes: their names.
    :param shard: which part of the model it has.
    :param engine: names its serving engine.
    :param device: of the paged memory.
    :param content: names the model; workers that name the same share objects. Default: a model of its own.
    :param compressed: each layer has three caches, see :func:`compressed_groups`, and `planes` are not used.

    :ivar caches: by layer, the numbers of its caches, which are layers to the agent.
    :ivar saved_bytes: of one layer of a request; `layer_bytes` is what a load of it moves.
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
        compressed: bool = False,
        engine: str = "bench",
        device: str = "cpu",
    ) -> None:
        self.layers, self.tokens = layers, tokens
        if compressed:
            groups = compressed_groups(layers, tokens, layer_bytes)
        else:
            row = layer_bytes // tokens // len(planes)
            own = tuple(Plane(name, "uint8", (row,)) for name in planes)
            groups = (GroupSpec("full", block_size, tuple(range(layers)), own),)
        self.spec = ModelSpec("bench", content or secrets.token_hex(8), groups, shard=shard or Shard())
        each = len(groups)
        self.caches = [tuple(range(layer * each, (layer + 1) * each)) for layer in range(layers)]
        # Windows slide: a request has the blocks that are kept of each chunk, and the others no more.
        self._kept = [self._blocks_kept(group) for group in groups]
        loaded = [tokens // group.block_size - group.rules.first_token(tokens) // group.block_size for group in groups]
        self.layer_bytes = sum(blocks * group.bytes_per_block for blocks, group in zip(loaded, groups, strict=True))
        self.saved_bytes = sum(
            len(kept) * group.bytes_per_block for kept, group in zip(self._kept, groups, strict=True)
        )
        # Written once: memory that was never touched costs the first copy a page fault per page.
        self.tensors = {
            layer: {
                plane.name: _filled((len(kept) * requests, group.entries, *plane.shape), layer % 251, device)
                for plane in group.planes
            }
            for kept, group in zip(self._kept, groups, strict=True)
            for layer in group.layers
        }
        self.agent = Agent(endpoint, self.spec, self.tensors, engine, lookup_timeout_s=WARM_TIMEOUT_S)
        if not self.agent.attached:
            raise LayerflowError(f"{endpoint}: the benchmark's worker could not attach")
        if not self.agent.wait_warm(WARM_TIMEOUT_S):
            raise LayerflowError("the arena was not mapped in time; is the machine out of memory?")
        self._random = np.random.default_rng(7)
        self._names = itertools.count()

    def prompt(self) -> Chain:
        """A prompt that nobody has seen, one token longer than what is saved where a hit cannot be shortened by one."""
        return self.agent.chain(self._random.integers(0, 1 << 30, self.tokens + (self.spec.alignment > 1)))

    def table(self, place: int) -> tuple[np.ndarray, ...]:
        """Block ids of request slot `place`, scattered as after long use; by group."""
        tables = []
        for group, kept in zip(self.spec.groups, self._kept, strict=True):
            table = np.full(self.tokens // group.block_size, -1, dtype=np.int64)
            table[kept] = np.random.default_rng(place).permutation(len(kept)) + place * len(kept)
            tables.append(table)
        return tuple(tables)

    def _blocks_kept(self, group: GroupSpec) -> list[int]:
        chunk = self.spec.chunk_tokens
        return [
            start // group.block_size + block
            for start in range(0, self.tokens, chunk)
            for block in group.rules.keep(min(chunk, self.tokens - start))
        ]

    def saving(self, chain: Chain) -> StepRequest:
        """A request whose whole prompt is computed and saved."""
        return StepRequest(f"save-{next(self._names)}", chain, self.table(0), save=(0, self.tokens), tail=True)

    def look_up(self, chain: Chain) -> tuple[str, Hit]:
        """A request's name, and what it hits."""
        name = f"load-{next(self._names)}"
        return name, self.agent.lookup(name, chain)

    def loading(self, chain: Chain, hit: Hit, name: str = "") -> StepRequest:
        """A request that loads its whole hit; one of that name has looked it up."""
        name = name or f"load-{next(self._names)}"
        return StepRequest(name, chain, self.table(1), load=(0, hit.tokens), hit=hit)

    def store(self, chain: Chain) -> None:
        """Save a prompt and wait until it is published.

        :raises LayerflowError: it was not.
        """
        request = self.saving(chain)
        with self.agent.open_step([request]) as step:
            for layer in range(self.spec.num_layers):
                step.wait_layer(layer)
                step.layer_done(layer)
        if not self.agent.wait_idle(request.request, 60) or request.request not in self.agent.poll().saved:
            raise LayerflowError("the benchmark's prompt was not stored; is the pool large enough?")

    def close(self) -> None:
        """Detach."""
        self.agent.close()


def compressed_groups(layers: int, tokens: int, layer_bytes: int) -> tuple[GroupSpec, ...]:
    """A window, a row for every 4 tokens and a compressor's state in each layer, after DeepSeek-V4's.

    :param layer_bytes: about so many are loaded of one layer of a request: three quarters are rows.
    """
    numbers = [tuple(range(cache, 3 * layers, 3)) for cache in range(3)]
    row, state = layer_bytes * 3 // tokens, 2 * layer_bytes // tokens * 8
    return (
        GroupSpec("sliding", 16, numbers[0], (Plane("kv", "uint8", (row,)),), window=128),
        GroupSpec("mla", 64, numbers[1], (Plane("row", "uint8", (row,)),), ratio=4),
        GroupSpec("sliding", 4, numbers[2], (Plane("state", "uint8", (state,)),), window=8),
    )


def _filled(shape: tuple[int, ...], value: int, device: str) -> torch.Tensor:
    """Copied to a device, not made there: an emulated one runs no kernels."""
    host = torch.full(shape, value, dtype=torch.uint8)
    return host if device == "cpu" else torch.empty(shape, dtype=torch.uint8, device=device).copy_(host)
