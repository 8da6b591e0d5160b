"""vLLM-Ascend with layerflow, with its own pool and without a connector: one of each per model, for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import engines
import pytest
from ascend import BLOCK, PER_MODEL, AscendEngine, ascend_store
from comparison import Right
from engines import close, connector, multi
from scenario import Prompt

from layerflow_cli.bench.harness import ServerProcess

MODELS = ("llama", "gemma3", "mla", "deepseek32")
RECURRENT = "qwen3nextdense"
BLOCKS = {"llama": 14, "gemma3": 40, "mla": 14, "deepseek32": 14, RECURRENT: 40}
"""Of a cache for a few requests, so that several at once preempt each other."""
# 4 KiB a token over 10 MB/s: a prompt of 300 tokens takes 0.1 s, and kills hit transfers under way.
SERVER = {"pool.size": "256MiB", "pool.link_gbps": 0.01, "transfer.max_transfer_bytes": "64KiB"}
PATIENT = {"transfer.step_timeout_ms": 60_000, "pool.lease_ms": 600_000}


@dataclass
class Rig:
    """The engines of one model, started when they are first asked for."""

    model: str
    logs: Path

    @cached_property
    def server(self) -> ServerProcess:
        """``layerflow run``."""
        return ServerProcess(SERVER | PATIENT)

    @cached_property
    def ours(self) -> AscendEngine:
        """With layerflow."""
        # vLLM-Ascend refuses `recompute` where a model has recurrent state.
        policy = "fail" if self.model == RECURRENT else "recompute"
        return self._start("layerflow", connector(self.server.endpoint, policy=policy, mode="layerwise", **self.chunks))

    @cached_property
    def theirs(self) -> AscendEngine:
        """With AscendStoreConnector."""
        return self._start("ascend-store", ascend_store())

    @cached_property
    def among(self) -> AscendEngine:
        """With layerflow in vLLM-Ascend's MultiConnector, behind a connector that hands prompts over."""
        foreign = {"kv_connector": "PrefillConnector", "kv_connector_module_path": "foreign", "kv_role": "kv_both"}
        ours = connector(self.server.endpoint, mode="layerwise", **self.chunks)
        return self._start("among", multi(foreign, ours))

    @cached_property
    def plain(self) -> AscendEngine:
        """Without a connector: what tokens must be."""
        return self._start("plain", None)

    def right(self, *prompts: Prompt, max_tokens: int) -> Right:
        """What the answers to prompts must be."""
        return Right.of(self.plain, prompts, max_tokens, rounds=self.rounds)

    @property
    def chunks(self) -> dict[str, int]:
        """Recurrent states are kept at the ends of vLLM's blocks, which are chunks by themselves."""
        return {} if self.model == RECURRENT else {"chunk_tokens": BLOCK}

    @property
    def rounds(self) -> bool:
        """It computes in bfloat16."""
        given = engines.PER_MODEL[self.model] | PER_MODEL.get(self.model, {})
        return bool(given["dtype"] == "bfloat16")

    def _start(self, name: str, transfer: dict[str, object] | None) -> AscendEngine:
        given = PER_MODEL.get(self.model, {}) | ({"kv_transfer_config": transfer} if transfer else {})
        log = self.logs / f"{self.model}-{name}.log"
        return AscendEngine(self.model, log, num_gpu_blocks_override=BLOCKS[self.model], **given)

    def close(self) -> None:
        """End what runs."""
        running = vars(self)
        close([running[name] for name in ("ours", "theirs", "among", "plain") if name in running])
        if "server" in running:
            self.server.close()


class Rigs:
    """One per model, of which one runs at a time: an idle engine takes a sixteenth of a core and 0.8 GB."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._running: Rig | None = None

    def __getitem__(self, model: str) -> Rig:
        if self._running is None or self._running.model != model:
            self.close()
            self._running = Rig(model, self._folder(model))
        return self._running

    def close(self) -> None:
        """End what runs."""
        if self._running is not None:
            self._running.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of one model one behind the other, as they come when they are spread over processes."""
    group = {item: next((mark.args for mark in item.iter_markers("xdist_group")), ()) for item in items}
    items.sort(key=group.__getitem__)


@pytest.fixture(scope="session")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rigs]:
    """For all tests of this process."""
    rigs = Rigs(tmp_path_factory.mktemp)
    yield rigs
    rigs.close()


def of_each(*models: str) -> list[Any]:
    """Parameters: what is of one model runs in one process."""
    return [pytest.param(model, marks=pytest.mark.xdist_group(model)) for model in models]


@pytest.fixture(params=of_each(*MODELS, RECURRENT))
def any_rig(request: pytest.FixtureRequest, rigs: Rigs) -> Rig:
    """Each model's in turn, the recurrent one's too."""
    return rigs[request.param]


@pytest.fixture(params=of_each(*MODELS))
def rig(request: pytest.FixtureRequest, rigs: Rigs) -> Rig:
    """Each model's in turn."""
    return rigs[request.param]
