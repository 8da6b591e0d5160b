"""One ``layerflow run`` and the SGLang servers that share it, kept from test to test."""

from __future__ import annotations

import itertools
import random
import signal
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import START_S, Answer, Engine, Prompt, Shape, close

from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import PATIENT, ServerProcess

MOST_ENGINES = 4
"""Kept without a test that uses them: each takes 2 GB."""

ANSWER_S, SETTLE_S, RECOVERY_S, POLL_S = 30.0, 120.0, 120.0, 0.005

# 2 KiB a token over 4 MB/s: a hit of 1,000 tokens takes half a second.
SLOW: dict[str, object] = {"pool__link_gbps": 0.004, "transfer__max_transfer_bytes": "16KiB"}

A, B = Shape("a"), Shape("b", watched=True)
"""The pair that most tests are about."""

_seeds = itertools.count(1000)


class Servers:
    """Starts what a test asks for, and ends all at the end.

    :param logs: a folder.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._folder = tempfile.TemporaryDirectory(prefix="layerflow-")
        self._engines: OrderedDict[Shape, Engine] = OrderedDict()
        self._numbers = itertools.count()
        self._server: ServerProcess | None = None
        self._settings: dict[str, object] = {}
        self.endpoint = f"ipc://{self._folder.name}/control"

    @property
    def server(self) -> ServerProcess:
        """The ``layerflow run`` of now."""
        assert self._server is not None
        return self._server

    def log(self, name: str) -> Path:
        """Where a server may write."""
        return self._logs / f"{name}-{next(self._numbers)}.log"

    def serve(self, **settings: object) -> ServerProcess:
        """A ``layerflow run`` with these settings; ``pool__size="1MiB"`` is ``pool.size``. The last one's goes on if it
        has the same.
        """
        if self._server is None or self._server.process.poll() is not None or self._settings != settings:
            self.stop_serving()
            named = {key.replace("__", "."): value for key, value in settings.items()}
            self._server = ServerProcess(PATIENT | {"pool.size": "256MiB"} | named, Path(self._folder.name))
            self._settings = settings
        return self._server

    def stop_serving(self) -> None:
        """No ``layerflow run`` is there any more."""
        server, self._server = self._server, None
        if server is not None:
            server.process.send_signal(signal.SIGCONT)
            server.close()

    def start(self, *shapes: Shape) -> list[Engine]:
        """SGLang servers of these shapes, missing ones started side by side.

        Their caches are empty, and they are attached if a ``layerflow run`` is there.
        """
        for shape, engine in list(self._engines.items()):
            if engine.spoiled or not engine.alive:
                self._engines.pop(shape).kill()
        missing = [shape for shape in shapes if shape not in self._engines]
        idle = [shape for shape in self._engines if shape not in shapes]
        room = MOST_ENGINES - len(shapes)
        close([self._engines.pop(shape) for shape in idle[: max(0, len(idle) - room)]] if missing else [])
        for shape in missing:
            self._engines[shape] = Engine(shape, self.endpoint, self.log(shape.name)).begin()
        began = time.monotonic()
        for shape in shapes:
            self._engines[shape].wait_started(began + START_S)
            self._engines.move_to_end(shape)
        engines = [self._engines[shape] for shape in shapes]
        for engine in engines:
            engine.flush()
        if self._server is not None:
            self.attached(*engines)
        return engines

    def attached(self, *engines: Engine) -> None:
        """Wait until all ranks of these are attached."""
        workers = {engine.shape.name: engine.shape.tp for engine in engines}
        self.until(
            lambda status: all(
                sum(bool(each["memory"]) for each in status["sessions"] if each["name"] == name) >= count
                for name, count in workers.items()
            )
        )

    def until(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the server's status says so; that status."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            status = fetch_status(self.endpoint, ANSWER_S)
            if what(status):
                return status
            assert time.monotonic() < deadline, status
            time.sleep(POLL_S)

    def settled(self) -> dict[str, Any]:
        """Wait until no step is open and no object half written: what was computed is stored."""
        return self.until(lambda status: not status["flow"]["steps"] and not status["pool"]["half_written"])

    def store(self, engine: Engine, prompt: Prompt, **body: Any) -> Answer:
        """Let a server compute a prompt that nobody has, and wait until it is stored.

        SGLang begins a save when the request has ended, a moment after its answer.
        """
        before = self.until(lambda _: True)["pool"]["objects"]
        answer = engine.generate(prompt, **body)
        assert (answer.status, answer.host) == (200, 0), answer
        self.until(lambda status: status["pool"]["objects"] >= before + len(prompt) // engine.shape.page)
        self.settled()
        return answer

    def loads_again(self, writer: Engine, reader: Engine) -> None:
        """Return once what one server stores is loaded by the other: a circuit breaker may be open until then."""
        deadline = time.monotonic() + RECOVERY_S
        while True:
            asked = prompt(400)
            wanted = self.store(writer, asked).tokens
            reader.flush()
            answer = reader.generate(asked)
            assert (answer.status, answer.tokens) == (200, wanted)
            if answer.host:
                return
            assert time.monotonic() < deadline, "nothing is loaded any more"

    def stop(self) -> None:
        """The ``layerflow run`` stands still, until :meth:`go_on`."""
        self.server.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It runs again."""
        self.server.process.send_signal(signal.SIGCONT)

    def end(self, shape: Shape) -> None:
        """No SGLang server of this shape is there any more."""
        if (engine := self._engines.pop(shape, None)) is not None:
            engine.close()

    def close(self) -> None:
        """End all."""
        close(list(self._engines.values()))
        self.stop_serving()
        self._folder.cleanup()


def prompt(tokens: int = 1000, seed: int | None = None) -> list[int]:
    """A prompt of its own, or the one of a seed."""
    return random.Random(next(_seeds) if seed is None else seed).choices(range(3, 500), k=tokens)


def pages(engine: Engine, tokens: int) -> int:
    """Tokens of a prompt of so many that can be loaded: whole pages, and not the last token, which is computed."""
    return (tokens - 1) // engine.shape.page * engine.shape.page


def is_loading(status: dict[str, Any]) -> bool:
    """Has a step begun to load, and not ended?"""
    return bool(status["flow"]["steps"] and status["pool"]["pinned"])


def writes(status: dict[str, Any]) -> bool:
    """Is the disk there? What is saved before is not written to it."""
    return bool(status["tier"]["up"])


def is_written(status: dict[str, Any]) -> bool:
    """Is all that is stored on the disk?"""
    return bool(status["tier"]["written_objects"]) and not status["tier"]["backlog_bytes"]


def assert_never_wrong(answer: Answer, wanted: tuple[int, ...]) -> None:
    """Right tokens, or an error with its reason."""
    if answer.served:
        assert answer.tokens == wanted, f"wrong tokens, served as right ones: {answer}"
    else:
        assert answer.error, f"no reason: {answer}"
