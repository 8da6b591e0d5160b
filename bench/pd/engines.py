"""The engines: the same vLLM with the same model, by itself, in pairs over layerflow, and in a pair over NIXL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.vllm.children import Child
from bench.vllm.contenders import BLOCK_SIZE, ENVIRONMENT, LAYERFLOW, MAX_MODEL_LEN, MODEL, NAME, VLLM_VENV

from layerflow_testing.ports import held_ports

KV_BYTES = 512 << 20
POOL = "2GiB"
PYTHON = VLLM_VENV / "bin/python"


@dataclass(slots=True)
class Engines:
    """The processes of one contender. While another one is measured they are stopped: NIXL's threads spin.

    :param prefill: URL; "" = the decode engine does both.
    :param decode: URL.
    :param servers: control addresses that a decode engine is told, where it has another server than P.
    """

    prefill: str
    decode: str
    servers: list[str] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """They run in the with-block, and not before or after it."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for child in self.children:
            os.killpg(child.pid, number)


class Starter:
    """Starts processes and keeps them, so that all are stopped at the end.

    :param folder: takes their logs.
    """

    def __init__(self, folder: Path, children: list[Child]) -> None:
        self._folder = folder
        self._children = children

    def single(self) -> Engines:
        """One vLLM."""
        child, url = self._vllm("single", None)
        return Engines("", url, children=[child])

    def over_layerflow(self, name: str, link: str = "") -> Engines:
        """P and D, on one server; with a `link`, on two, of which D's reads from P's over it."""
        theirs: list[list[str]] = [[]]
        if link:
            over = [f"peers.link={link}", f"peers.trusted_network={str(link != 'tcp').lower()}"]
            theirs = [[*over, "peers.serve=true", "peers.link_address=127.0.0.1:0"], [*over, "peers.learn=true"]]
        servers = [self._layerflow(f"{name}-{number}", sets) for number, sets in enumerate(theirs)]
        endpoints = [endpoint for _, endpoint in servers]
        prefill = self._vllm(f"{name}-prefill", self._transfer(endpoints[0], "kv_producer"))
        decode = self._vllm(f"{name}-decode", self._transfer(endpoints[-1], "kv_consumer"))
        children = [prefill[0], decode[0], *(child for child, _ in servers)]
        return Engines(prefill[1], decode[1], endpoints[:1] if len(endpoints) > 1 else [], children)

    def over_nixl(self) -> Engines:
        """P and D with vLLM's NixlConnector."""
        made = []
        for role in ("prefill", "decode"):
            transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
            side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(held_ports(1)[0])}
            made.append(self._vllm(f"nixl-{role}", transfer, side))
        return Engines(made[0][1], made[1][1], children=[child for child, _ in made])

    def _transfer(self, endpoint: str, role: str) -> dict[str, Any]:
        return LAYERFLOW | {"kv_role": role, "kv_connector_extra_config": {"endpoint": endpoint}}

    def _vllm(
        self, name: str, transfer: dict[str, Any] | None, more: dict[str, str] | None = None
    ) -> tuple[Child, str]:
        url = f"http://127.0.0.1:{held_ports(1)[0]}"
        command: list[str | Path] = [
            PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--served-model-name", NAME,
            "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--dtype", "bfloat16", "--enforce-eager",
            "--distributed-executor-backend", "uni", "--block-size", str(BLOCK_SIZE),
            "--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", str(MAX_MODEL_LEN),
            "--max-num-batched-tokens", "8192", "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
            *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ()),
        ]  # fmt: skip
        child = self._start(name, command, ENVIRONMENT | (more or {}), f"{url}/health")
        return child, url

    def _layerflow(self, name: str, sets: list[str]) -> tuple[Child, str]:
        endpoint, http = f"ipc://{self._folder}/{name}", held_ports(1)[0]
        command = [sys.executable, "-m", "layerflow_cli", "run", "--endpoint", endpoint, "--http-port", str(http)]
        command += ["--pool-size", POOL, *(word for each in sets for word in ("--set", each))]
        return self._start(name, command, {}, f"http://127.0.0.1:{http}/healthz"), endpoint

    def _start(self, name: str, command: list[Any], environment: dict[str, str], health: str) -> Child:
        child = Child(name, command, environment, self._folder / f"{name}.log", health)
        self._children.append(child)
        child.wait_healthy()
        return child


def has_nixl() -> bool:
    """Is NIXL in vLLM's environment?"""
    return subprocess.run([PYTHON, "-c", "import nixl"], capture_output=True, check=False).returncode == 0
