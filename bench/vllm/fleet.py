"""The servers of one part of the benchmark, started together and stopped at its end."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from bench.vllm.asking import Server
from bench.vllm.children import BenchFailed, Child, stopped_at_the_end
from bench.vllm.contenders import (
    ENVIRONMENT,
    LAYERWISE,
    SWITCH,
    SWITCH_ENVIRONMENT,
    Contender,
    Pools,
    layerflow_command,
    lmcache_command,
)

from layerflow.agent.observer import fetch_status
from layerflow_testing.ports import held_ports

HOOK_TIMES = "LAYERFLOW_HOOK_TIMES"
SETTLE_S = 30.0
PAUSE_S = 0.4
"""Idle time between a prompt's two passages, the same for all contenders, beyond the end of its save."""
POLL_S = 0.02


class Fleet:
    """Running contenders.

    :param folder: takes logs.
    :param watched: the layer-wise vLLM times its connector's hooks.
    :param switched: all can have their connector taken out and put back.
    """

    def __init__(self, folder: Path, *, watched: bool, switched: bool) -> None:
        self.folder = folder
        self._watched = watched
        self._switched = switched
        self.servers: dict[str, Server] = {}
        self.contenders: dict[str, Contender] = {}
        self.children: list[Child] = []
        self._layerflow = ""
        self._lmcache = ""

    @property
    def endpoint(self) -> str:
        """Of layerflow's server; empty without it."""
        return self._layerflow

    def start_layerflow(self, folder: str, pool_gib: int, config: Path | None = None) -> str:
        """layerflow's server: its endpoint.

        :param folder: takes its socket.
        :param config: its configuration file.
        """
        self._layerflow = f"ipc://{folder}/control"
        http_port = held_ports(1)[0]
        command = layerflow_command(self._layerflow, http_port, pool_gib)
        command += [] if config is None else ["--config", config]
        log = self.folder / "layerflow-server.log"
        self._start(Child("layerflow's server", command, {}, log, f"http://127.0.0.1:{http_port}/healthz"))
        return self._layerflow

    def start_lmcache(self, segment: str, pool_gib: int) -> int:
        """LMCache's server: the port where it listens.

        :param segment: name of its shared memory.
        """
        port, http_port = held_ports(2)
        self._lmcache = f"http://127.0.0.1:{http_port}"
        command = lmcache_command(port, http_port, segment, pool_gib)
        log = self.folder / "lmcache-server.log"
        self._start(Child("LMCache's server", command, ENVIRONMENT, log, f"{self._lmcache}/healthcheck"))
        return port

    def start(self, contender: Contender, kv_bytes: int, pools: Pools) -> Child:
        """A contender's vLLM; it needs a while until it serves."""
        port = held_ports(1)[0]
        watch = self._watched and contender is LAYERWISE
        environment = ENVIRONMENT | ({HOOK_TIMES: str(self._hooks)} if watch else {})
        if self._switched:
            environment |= SWITCH_ENVIRONMENT
        url = f"http://127.0.0.1:{port}"
        log = self.folder / f"vllm-{contender.name}.log"
        command = [*contender.command(port, kv_bytes, pools), *(SWITCH if self._switched else ())]
        child = Child(f"vLLM ({contender.name})", command, environment, log, f"{url}/health")
        self.children.append(child)
        self.servers[contender.name] = Server(contender.name, url)
        self.contenders[contender.name] = contender
        return child

    def settle(self, name: str, pause_s: float = PAUSE_S) -> None:
        """Until the contender's saves have ended, and a moment more.

        :param pause_s: so long.
        :raises BenchFailed: they never do, or a server has died.
        """
        deadline = time.monotonic() + SETTLE_S
        while self._saving(self.contenders[name].pool):
            if time.monotonic() > deadline:
                raise BenchFailed(f"{name}: its saves have not ended after {SETTLE_S:g} s; logs are in {self.folder}")
            time.sleep(POLL_S)
        time.sleep(pause_s)
        for child in self.children:
            child.check()

    def figures(self) -> dict[str, Any]:
        """layerflow's own figures since its server started; empty without it."""
        return fetch_status(self._layerflow)["figures"] if self._layerflow else {}

    def hook_times(self) -> dict[str, dict[str, float]]:
        """What vLLM spent in each hook of the layer-wise connector; there only after it was stopped."""
        times: dict[str, dict[str, float]] = {}
        for path in self._hook_files():
            times |= json.loads(path.read_text())
        return times

    def forget_hook_times(self) -> None:
        """Those that an earlier run has left in the folder."""
        for path in self._hook_files():
            path.unlink()

    def _start(self, child: Child) -> None:
        self.children.append(child)
        child.wait_healthy()

    def _hook_files(self) -> list[Path]:
        # The connector adds its role and process to the name.
        return sorted(self.folder.glob(f"{self._hooks.name}.*"))

    @property
    def _hooks(self) -> Path:
        return self.folder / "hooks"

    def _saving(self, pool: str) -> bool:
        if pool == "layerflow":
            status = fetch_status(self._layerflow)
            return bool(status["flow"]["steps"] or status["pool"]["half_written"])
        if pool == "lmcache":
            status = httpx.get(f"{self._lmcache}/status", trust_env=False).json()
            return bool(_found(status, "staging_object_count"))
        return False


@contextlib.contextmanager
def fleet(
    folder: Path,
    contenders: Sequence[Contender],
    *,
    kv_bytes: int,
    pool_gib: int,
    watched: bool = False,
    switched: bool = False,
    config: Path | None = None,
) -> Iterator[Fleet]:
    """Contenders that serve, for the length of a with-block.

    :param folder: takes logs.
    :param kv_bytes: of each vLLM's KV cache.
    :param pool_gib: size of each pool.
    :param watched: the layer-wise vLLM times its connector's hooks.
    :param switched: all can have their connector taken out and put back.
    :param config: the configuration file of layerflow's server.
    :raises BenchFailed: a server does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = Fleet(folder, watched=watched, switched=switched)
    made.forget_hook_times()
    needed = {contender.pool for contender in contenders}
    segment = f"layerflow-bench-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        socket_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="layerflow-"))
        # Where LMCache's server has to be killed it leaves its memory behind.
        stack.callback(_forget, segment)
        stack.enter_context(stopped_at_the_end(made.children))
        pools = Pools(
            made.start_lmcache(segment, pool_gib) if "lmcache" in needed else 0,
            made.start_layerflow(socket_folder, pool_gib, config) if "layerflow" in needed else "",
        )
        for child in [made.start(contender, kv_bytes, pools) for contender in contenders]:
            child.wait_healthy()
        yield made
        for server in made.servers.values():
            server.close()


def _found(status: Any, key: str) -> int:
    """The sum of all values named `key` in nested dicts and lists."""
    if isinstance(status, dict):
        return sum(value if name == key else _found(value, key) for name, value in status.items())
    return sum(_found(item, key) for item in status) if isinstance(status, list) else 0


def _forget(segment: str) -> None:
    for path in Path("/dev/shm").glob(f"*{segment}*"):
        path.unlink(missing_ok=True)
