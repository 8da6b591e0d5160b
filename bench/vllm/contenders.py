"""The contenders: the same vLLM with the same model, each with another way to keep a prompt's KV cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.vllm.model import HEAD, KV_HEADS, LAYERS, NAME

ROOT = Path(__file__).resolve().parents[2]
VLLM_VENV = ROOT / ".venv-vllm"
LMCACHE_VENV = ROOT / ".venv-lmcache"
MODEL = VLLM_VENV / "bench-models" / NAME

BLOCK_SIZE = 32
"""Tokens of a block."""
CHUNK_TOKENS = 256
"""LMCache's default, and what layerflow comes to with this block size."""
MAX_MODEL_LEN = 3200
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD * 2

ENVIRONMENT = {
    # One thread computes: the machine's other cores are for the servers. Engine core and worker are one process.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
}
SWITCH_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}
SWITCH = ("--worker-extension-cls", "bench.vllm.switch.Switch")
"""For a vLLM whose connector is taken out and put back while it runs."""
LMCACHE = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
LAYERFLOW = {
    "kv_connector": "LayerflowConnector",
    "kv_connector_module_path": "layerflow.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of serving.

    :param prefix_caching: vLLM's own.
    :param pool: the server that keeps its KV: "", "lmcache" or "layerflow".
    :param mode: of layerflow's loads.
    """

    name: str
    prefix_caching: bool = False
    pool: str = ""
    mode: str = ""

    @property
    def venv(self) -> Path:
        """The environment that it runs in."""
        return LMCACHE_VENV if self.pool == "lmcache" else VLLM_VENV

    def command(self, port: int, kv_bytes: int, pools: Pools) -> list[str | Path]:
        """The API server's command line.

        :param kv_bytes: of vLLM's KV cache.
        """
        transfer = self._transfer(pools)
        return [
            self.venv / "bin/python", "-m", "vllm.entrypoints.openai.api_server",
            "--model", MODEL, "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "bfloat16", "--enforce-eager", "--distributed-executor-backend", "uni",
            "--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(kv_bytes),
            "--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "8192", "--max-num-seqs", "16",
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
            "--enable-prompt-tokens-details", "--no-enable-log-requests", "--disable-uvicorn-access-log",
            # Without it the engine is killed before its connector has shut down.
            "--shutdown-timeout", "10",
            *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ()),
        ]  # fmt: skip

    def _transfer(self, pools: Pools) -> Mapping[str, Any] | None:
        if self.pool == "lmcache":
            extra = {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": pools.lmcache_port,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
            }
            return LMCACHE | {"kv_connector_extra_config": extra}
        if self.pool == "layerflow":
            return LAYERFLOW | {"kv_connector_extra_config": {"endpoint": pools.layerflow, "mode": self.mode}}
        return None


@dataclass(frozen=True, slots=True)
class Pools:
    """Where the pools' servers are.

    :param layerflow: endpoint.
    """

    lmcache_port: int
    layerflow: str


PLAIN = Contender(name="plain")
PREFIX = Contender(name="prefix", prefix_caching=True)
LMCACHE_MP = Contender(name="lmcache", pool="lmcache")
LAYERWISE = Contender(name="layerwise", pool="layerflow", mode="layerwise")
BULK = Contender(name="bulk", pool="layerflow", mode="bulk")


def layerflow_command(endpoint: str, http_port: int, gibibytes: int) -> list[str | Path]:
    """layerflow's server, with the settings that it has by itself."""
    return [
        sys.executable, "-m", "layerflow_cli", "run", "--endpoint", endpoint, "--http-port", str(http_port),
        "--pool-size", f"{gibibytes}GiB",
    ]  # fmt: skip


def lmcache_command(port: int, http_port: int, segment: str, gibibytes: int) -> list[str | Path]:
    """LMCache's server: all its memory taken at the start, shared with vLLM's process, which copies by itself.

    :param segment: name of the shared memory.
    """
    return [
        LMCACHE_VENV / "bin/lmcache", "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http_port), "--disable-observability",
        "--l1-size-gb", str(gibibytes), "--l1-init-size-gb", str(gibibytes), "--no-l1-use-lazy",
        "--shm-name", segment, "--supported-transfer-mode", "auto",
        "--chunk-size", str(CHUNK_TOKENS), "--eviction-policy", "LRU",
    ]  # fmt: skip


def installed(contenders: Sequence[Contender]) -> list[Contender]:
    """Those whose environment there is."""
    return [contender for contender in contenders if (contender.venv / ".ready").exists()]
