"""What is behind the arena of a bench or demo: a service of its own, or the one of a configuration."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from layerflow.backends import Trial, installed, named
from layerflow.config.pool import MEMORY
from layerflow.config.settings import Settings
from layerflow.errors import ConfigError, LayerflowError
from layerflow.findings import http_get
from layerflow.hosts.environment import environment

READY_S, STOP_S = 60.0, 10.0
HTTP_S = 5.0
_SAID_BYTES = 1500  # of what a service printed, in an error


@dataclass(frozen=True)
class Behind:
    """A pool that is ready.

    :param settings: ``section.key`` to value, for the server.
    :param options: of the backend, for another client of the same pool.
    :param requests: how many metadata requests the pool has served; always 0 where there is no such thing.
    :param remark: for every table: what is emulated; ``""`` = nothing.
    """

    kind: str
    settings: Mapping[str, object]
    options: Mapping[str, Any]
    requests: Callable[[], int]
    remark: str = ""


def emulated(cann_emulator: Path | None) -> dict[str, object]:
    """The key of ``--cann-emulator``, where it is given."""
    return {} if cann_emulator is None else {"cann_emulator": str(cann_emulator.resolve())}


@contextlib.contextmanager
def behind(
    kind: str, folder: Path, room: int, config: Path | None = None, given: Mapping[str, object] | None = None
) -> Iterator[Behind]:
    """A pool of `kind` for the length of a with-block.

    :param kind: a backend; ``memory`` = none.
    :param folder: of the caller, emptied by it: for logs and what the pool keeps.
    :param room: bytes of objects that it shall hold.
    :param config: settings that name a running one; None = start one.
    :param given: further keys of the backend's section.
    :raises LayerflowError: it does not start.
    """
    if kind == MEMORY:
        unset = {f"pool.{name}.{plugin.chosen_by}": "" for name, plugin in installed().items() if plugin.chosen_by}
        yield Behind(kind, {"pool.backend": MEMORY, **unset}, {}, lambda: 0)
        return
    trial = _trial(kind, folder, room, config, dict(given or {}))
    settings = Settings.load(config, {"pool.backend": kind, **_keys(kind, {**(given or {}), **trial.options})})
    options = settings.pool.for_host()
    with contextlib.ExitStack() as stack:
        if trial.made is not None:
            stack.callback(shutil.rmtree, trial.made, ignore_errors=True)
        if trial.command:
            stack.enter_context(_service(kind, trial, environment(kind, options), folder))
        told = settings.pool.section(kind).model_dump(mode="json")
        yield Behind(
            kind,
            {"pool.backend": kind, **_keys(kind, told)},
            {**options, **trial.other},
            lambda: _count(trial) if trial.requests else 0,
            trial.remark,
        )


def _trial(kind: str, folder: Path, room: int, config: Path | None, given: Mapping[str, object]) -> Trial:
    plugin = installed().get(kind)
    if plugin is None or not plugin.trial:
        known = ", ".join([MEMORY, *(name for name, other in installed().items() if other.trial)])
        raise ConfigError(f"no pool of the kind {kind!r} can be started here; there are {known}")
    asked = Settings.load(config, _keys(kind, given)).pool.section(kind)
    found: Trial = named(plugin.trial)(asked, folder, room, config is not None)
    return found


def _keys(kind: str, section: Mapping[str, object]) -> dict[str, object]:
    return {f"pool.{kind}.{key}": value for key, value in section.items()}


def _count(trial: Trial) -> int:
    if not urlsplit(trial.page).hostname:
        raise ConfigError(f"{trial.page!r}: the bench counts metadata requests there; give the service's HTTP address")
    why, body = http_get(trial.page, HTTP_S, most_bytes=None)
    if why:
        raise LayerflowError(f"{trial.page}: {why}; the bench counts metadata requests there")
    return sum(int(count) for count in re.findall(trial.requests, body.decode()))


# Processes ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _service(kind: str, trial: Trial, variables: Mapping[str, str], folder: Path) -> Iterator[None]:
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            trial.command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=os.environ | variables, cwd=folder
        )
        try:
            until = time.monotonic() + READY_S
            while not _answers(trial.ready):
                if process.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    printed = said.read()[-_SAID_BYTES:].decode(errors="replace").strip()
                    raise LayerflowError(f"the service of {kind} did not start; it printed:\n{printed}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    if url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            return not probe.connect_ex(url.removeprefix("unix://"))
    return not http_get(url, HTTP_S)[0]
