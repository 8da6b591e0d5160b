"""The version before, out of the repository's history, as processes of its own: servers, and engine workers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from layerflow_cli.bench.harness import ServerProcess

ROOT = Path(__file__).parents[2]
BEFORE = "86cd97984f3595e2e40d48c419135555b4e838fb"
"""The last commit that speaks protocol version 1."""

PARTS = ("src", "cli", "testing", "tests/e2e")
PATIENT = {
    "pool.size": "16MiB",
    "pool.warm": "false",
    "pool.lookup_timeout_ms": 10_000,
    "server.liveness_ms": 30_000,
    "transfer.step_timeout_ms": 60_000,
    "transfer.save_timeout_ms": 60_000,
    "peers.lookup_timeout_ms": 4500,
}
ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Version:
    """A tree of layerflow. :param name: for people. :param root: of the tree."""

    name: str
    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that runs it: its modules come before those that are installed."""
        parts = ("src", "cli", "testing", "tests")
        return {"PYTHONPATH": os.pathsep.join(str(self.root / part) for part in parts), "NO_COLOR": "1"}


NOW = Version("now", ROOT)


@pytest.fixture(scope="session")
def before(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """The version before; skips where the repository's history is not there."""
    root = tmp_path_factory.mktemp("before")
    known = subprocess.run(
        ["git", "-C", ROOT, "cat-file", "-e", f"{BEFORE}^{{commit}}"], capture_output=True, check=False
    )
    if known.returncode:
        pytest.skip(f"commit {BEFORE[:8]} is not in this clone's history: fetch all of it")
    archive = subprocess.run(["git", "-C", ROOT, "archive", BEFORE, *PARTS], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", root], input=archive.stdout, check=True)
    built, source = "src/layerflow/ops", "_copy.c"
    if (ROOT / built / source).read_bytes() != (root / built / source).read_bytes():
        pytest.fail("the copy extension has changed since: build that version's own here")
    for extension in (ROOT / built).glob("_copy.*.so"):
        shutil.copy(extension, root / built)
    return Version("before", root)


class VersionServer(ServerProcess):
    """A ``layerflow run`` of one version."""

    def __init__(self, version: Version, settings: Mapping[str, object], folder: Path | None = None) -> None:
        self.version = version
        super().__init__(PATIENT | dict(settings), folder)

    def _popen(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        return super()._popen(command, {**environment, **self.version.environment})


class VersionProcess:
    """A process of one version in which engine workers live, see :mod:`.worker`: it loads torch once."""

    def __init__(self, version: Version) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | version.environment,
        )

    def tell(self, what: str, engine: str, arguments: Mapping[str, object]) -> None:
        """Ask one of its workers for something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, engine, arguments]) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Its next answer; they come in the order in which it was asked.

        :raises AssertionError: it has ended, or says nothing.
        """
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line, "the engine workers' process has ended"
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class VersionWorker:
    """An engine worker of one version: :class:`.worker.Worker` says what it can be asked."""

    def __init__(self, process: VersionProcess, endpoint: str, engine: str) -> None:
        self._process, self._engine = process, engine
        self.ask("open", endpoint=endpoint)

    def begin(self, what: str, **arguments: object) -> None:
        """Ask; :meth:`hear` has the answer."""
        self._process.tell(what, self._engine, arguments)

    def hear(self) -> Any:
        """What it was asked for next."""
        return self._process.hear()

    def ask(self, what: str, **arguments: object) -> Any:
        """The answer."""
        self.begin(what, **arguments)
        return self.hear()


@pytest.fixture
def serve() -> Iterator[Callable[..., VersionServer]]:
    """Start servers: ``serve(version, pool__size=...)``."""
    with contextlib.ExitStack() as stack:

        def start(version: Version, **settings: object) -> VersionServer:
            server = VersionServer(version, {key.replace("__", "."): value for key, value in settings.items()})
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(scope="session")
def processes(before: Version) -> Iterator[Mapping[Version, VersionProcess]]:
    """Where the workers of each version live."""
    made = {version: VersionProcess(version) for version in (before, NOW)}
    yield made
    for process in made.values():
        process.close()


@pytest.fixture
def work(
    serve: Callable[..., VersionServer], processes: Mapping[Version, VersionProcess]
) -> Iterator[Callable[[Version, str, str], VersionWorker]]:
    """Start engine workers: ``work(version, endpoint, engine)``. They leave before their servers do."""
    with contextlib.ExitStack() as stack:

        def start(version: Version, endpoint: str, engine: str) -> VersionWorker:
            worker = VersionWorker(processes[version], endpoint, engine)
            stack.callback(worker.ask, "close")
            return worker

        yield start
