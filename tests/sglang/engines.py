"""SGLang servers as tests see them: forked in pairs, asked over HTTP, killed as a process group at the end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from e2e.fork_server import fork_server
from forked import serve

MODELS = Path(sys.prefix) / "models"
EXPECTED: dict[str, tuple[int, ...]] = {
    name: tuple(tokens) for name, tokens in json.loads((MODELS / "expected.json").read_text()).items()
}
"""By model: the tokens that transformers makes of :data:`models.PROMPT`."""

START_S, ANSWER_S, END_S, POLL_S = 400.0, 120.0, 10.0, 0.2
LOAD_TIMEOUT_S = 10.0
"""Deadline of a batch's loads, as every engine here is told."""

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # One thread: servers share two cores with others.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DO_NOT_TRACK": "1",
    # torch's own place for what it compiles is shared by all environments, each of which would compile it anew.
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "extensions"),
}
PRELOADED = (
    "sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry", "layerflow.connectors.sglang", "forked",
)  # fmt: skip
TAKEN = ("address already in use", "port is already in use", "EADDRINUSE")
"""How a start ends whose port, one that SGLang chooses itself, was taken meanwhile."""

Prompt = Sequence[int]


class EngineFailed(AssertionError):
    """A server did not start, or died; with the end of its log."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What an SGLang server is started as. Servers of one shape may differ by name.

    :param model: folder of :data:`MODELS`.
    :param page: 1 = hybrid models, which SGLang's only strategy for CPUs keeps at single tokens.
    :param overlap: SGLang prepares a batch while the one before it computes.
    :param watched: its linker writes down what it waits for and saves, see :mod:`watched`.
    :param extra: further keys and values of ``linker_extra_config``.
    :param linker: it has layerflow's linker.
    :param flags: further arguments of the command line.
    :param environment: further variables of its environment.
    :param timed: it writes down when each layer has computed, see :meth:`Engine.last_layer_at`.
    """

    name: str
    model: str = "llama"
    tp: int = 1
    page: int = 16
    overlap: bool = True
    watched: bool = False
    extra: tuple[tuple[str, Any], ...] = ()
    linker: bool = True
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    timed: bool = False

    def arguments(self) -> list[str]:
        """Of the command line, without the linker's."""
        own = ["--page-size", str(self.page), "--tp", str(self.tp)]
        if not self.overlap:
            own.append("--disable-overlap-schedule")
        if self.page == 1:
            own += ["--mamba-radix-cache-strategy", "no_buffer"]
        return [*own, *self.flags]


@dataclass(frozen=True, slots=True)
class Answer:
    """What SGLang said to one prompt.

    :param status: of HTTP.
    :param host: prompt tokens that were loaded through the linker.
    :param device: those that SGLang's own cache had.
    :param storage: those that came from HiCache's storage.
    :param reason: why it ended: ``length``, ``abort``; "" = an error.
    :param error: what SGLang said.
    :param took_s: until the whole answer was there.
    :param guesses: of speculative decoding: how many drafted tokens were right, of how many.
    """

    status: int
    tokens: tuple[int, ...] = ()
    host: int = 0
    device: int = 0
    reason: str = ""
    error: str = ""
    took_s: float = 0.0
    storage: int = 0
    guesses: tuple[int, int] = (0, 0)

    @property
    def served(self) -> bool:
        """Does the client take it for a whole answer?"""
        return self.status == 200 and self.reason != "abort"


class Noted(NamedTuple):
    """A line of a watched linker, see :mod:`watched`.

    :param step: its number. :param figure: what the kind is about: seconds, or bytes.
    :param at: of :func:`time.monotonic`.
    """

    layer: int
    step: int
    figure: float
    at: float


@dataclass(slots=True)
class Engine:
    """One ``sglang.launch_server`` with layerflow's linker, in a process group of its own. It is forked from a process
    that has SGLang's modules loaded, which takes it 15 s of a core in each of its processes.

    :param log: what it writes goes there.
    :param endpoint: of the ``layerflow run`` that it shares.
    """

    shape: Shape
    endpoint: str
    log: Path
    port: int = 0
    spoiled: bool = False  #: other weights, for instance: no further test uses it
    _process: ForkServerProcess | None = None
    _reservation: socket.socket | None = None
    _again: bool = True
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def begin(self) -> Engine:
        """Start it, and go on."""
        self._reserve()
        module, linker = "layerflow.connectors.sglang", "LayerflowLinker"
        if self.shape.watched:
            module, linker = "watched", "WatchedLinker"
        extra = {
            "endpoint": self.endpoint, "name": self.shape.name, "load_timeout_ms": 1e3 * LOAD_TIMEOUT_S,
            "lookup_timeout_ms": 1000,  # a busy machine is no miss
        } | dict(self.shape.extra)  # fmt: skip
        config = {"linker": linker, "linker_module_path": module, "linker_extra_config": extra}
        arguments = [
            "--model-path", str(MODELS / self.shape.model),
            "--load-format", "safetensors", "--device", "cpu", "--attention-backend", "torch_native",
            "--skip-tokenizer-init", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port),
            "--sleep-on-idle", "--max-total-tokens", "8192", "--context-length", "4096", "--random-seed", "5",
            *self.shape.arguments(),
        ]  # fmt: skip
        if self.shape.linker:
            arguments += [
                "--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic",
                "--unified-cache-external-linker-config", json.dumps(config),
            ]  # fmt: skip
        environment = {"WATCHED_LOG": str(self.watch), "LAYERFLOW_SGLANG_OPTIONS": json.dumps(extra)}
        environment |= dict(self.shape.environment)
        if self.shape.timed:
            environment["LAYERS_LOG"] = str(self._layers)
        if self.shape.tp > 1:  # without it SGLang counts NUMA nodes
            cores = sorted(os.sched_getaffinity(0))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in range(self.shape.tp)
            )
        context = fork_server(PRELOADED, ENVIRONMENT)
        self._process = context.Process(target=serve, args=(arguments, environment, self.log))
        self._process.start()
        return self

    def wait_started(self, deadline: float) -> None:
        """Return once it serves. Where a port was taken from it, it is started once more.

        :raises EngineFailed: it does not.
        """
        while not self._healthy():
            if not self.alive:
                if self._again and any(each.lower() in self.output().lower() for each in TAKEN):
                    self._again = False
                    self.kill()
                    self.begin()
                    continue
                raise EngineFailed(f"{self.shape.name} died before it served\n{self._tail()}")
            if time.monotonic() > deadline:
                raise EngineFailed(f"{self.shape.name} does not serve yet\n{self._tail()}")
            time.sleep(POLL_S)

    @property
    def watch(self) -> Path:
        """Where a watched linker writes."""
        return self.log.with_suffix(".watched")

    def noted(self, kind: str) -> list[Noted]:
        """What a watched linker has written down of a kind."""
        lines = (json.loads(line) for line in self.watch.read_text().splitlines())
        return [Noted(*line[1:]) for line in lines if line[0] == kind]

    @property
    def _layers(self) -> Path:
        return self.log.with_suffix(".layers")

    @property
    def alive(self) -> bool:
        """Does its parent process run?"""
        return self._process is not None and self._process.is_alive()

    def generate(self, prompt: Prompt, n: int = 8, **body: Any) -> Answer:
        """Serve one prompt.

        :param n: tokens to make. :param body: further fields of the request.
        :raises EngineFailed: it died, or says nothing.
        """
        sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        began = time.monotonic()
        status, said = self._post("/generate", {"input_ids": list(prompt), "sampling_params": sampling, **body})
        took_s = time.monotonic() - began
        if status != 200:
            return Answer(status, error=said.decode(errors="replace"), took_s=took_s)
        return _answer(json.loads(said), took_s)

    def stream(self, prompt: Prompt, n: int = 8, **body: Any) -> tuple[Answer, float]:
        """Serve one prompt token by token: its answer, and when the first one came, of :func:`time.monotonic`.

        :raises EngineFailed: it says nothing, or an error.
        """
        sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        asked = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True, **body}
        began, first, tokens, last = time.monotonic(), 0.0, list[int](), dict[str, Any]()
        connection = self._connect()
        try:
            connection.request("POST", "/generate", json.dumps(asked), {"Content-Type": "application/json"})
            response = connection.getresponse()
            for line in response:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic()
                    last = json.loads(line.removeprefix(b"data: "))
                    made = last.get("output_ids") or []
                    tokens = made if len(made) > 1 and made[: len(tokens)] == tokens else tokens + made
        except OSError as error:
            raise EngineFailed(f"{self.shape.name}: {error!r}\n{self._tail()}") from error
        finally:
            connection.close()
        if not first or "meta_info" not in last:
            raise EngineFailed(f"{self.shape.name}: HTTP {response.status}, {last}\n{self._tail()}")
        return _answer(last | {"output_ids": tokens}, time.monotonic() - began), first

    def last_layer_at(self) -> float:
        """When a timed server's last layer had computed its attention, of :func:`time.monotonic`."""
        times = dict[int, float]()
        for line in self._layers.read_text().splitlines():
            layer, at = line.split()
            times[int(layer)] = float(at)
        return times[max(times)]

    def begin_generate(self, prompt: Prompt, n: int = 8, **body: Any) -> Future[Answer]:
        """Serve one prompt, and go on meanwhile."""
        return self._pool.submit(self.generate, prompt, n, **body)

    def generate_all(self, prompts: Sequence[Prompt], n: int = 8) -> list[Answer]:
        """Serve prompts that arrive together."""
        return [each.result() for each in [self.begin_generate(prompt, n) for prompt in prompts]]

    def flush(self) -> None:
        """Empty SGLang's own cache, once no request runs any more."""
        status, said = self._post(f"/flush_cache?timeout={ANSWER_S / 2:g}")
        assert status == 200, said

    def update_weights_from_disk(self, model: str, **body: Any) -> None:
        """Load another model's weights in place.

        :param body: further fields of the request.
        """
        status, said = self._post("/update_weights_from_disk", {"model_path": str(MODELS / model), **body})
        assert status == 200, said

    def abort(self, request: str) -> None:
        """The client of this request (its ``rid``) has left."""
        status, said = self._post("/abort_request", {"rid": request})
        assert status == 200, said

    def pause(self, mode: str) -> None:
        """Stop generating: ``in_place``, or ``retract``, which lets go of what running requests have cached."""
        status, said = self._post("/pause_generation", {"mode": mode})
        assert status == 200, said

    def resume(self) -> None:
        """Generate again."""
        status, said = self._post("/continue_generation")
        assert status == 200, said

    def output(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL for all its processes."""
        if self._process is not None and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # it may not have made its process group yet
            self._process.join()
        if self._reservation is not None:
            self._reservation.close()

    def close(self) -> None:
        """Let it end by itself; then make it."""
        self.dismiss()
        if self._process is not None:
            self._process.join(END_S)
        self.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def dismiss(self) -> None:
        """Tell it to end."""
        if self.alive and self._process is not None:
            self._process.terminate()

    def _reserve(self) -> None:
        # A bound socket that does not listen keeps the port from everybody but the server, which sets SO_REUSEADDR too.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self.port = self._reservation.getsockname()[1]

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except OSError as error:
            raise EngineFailed(f"{self.shape.name}: {path}: {error!r}\n{self._tail()}") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)

    def _tail(self) -> str:
        return "\n".join(line[:600] for line in self.output().splitlines()[-25:])


def _answer(said: Mapping[str, Any], took_s: float) -> Answer:
    meta = said["meta_info"]
    cached = meta.get("cached_tokens_details") or {}
    ended = meta.get("finish_reason") or {}
    return Answer(
        200, tuple(said.get("output_ids") or ()), cached.get("host", 0), cached.get("device", 0),
        ended.get("type", ""), str(ended.get("message") or ""), took_s, cached.get("storage", 0),
        (meta.get("spec_num_correct_drafts", 0), meta.get("spec_num_proposed_drafts", 0)),
    )  # fmt: skip


def close(engines: Sequence[Engine]) -> None:
    """End them, all at once."""
    for engine in engines:
        engine.dismiss()
    for engine in engines:
        engine.close()
