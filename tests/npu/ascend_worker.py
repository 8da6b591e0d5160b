"""vLLM-Ascend's worker as the connector meets it: its caches in torch_npu tensors, its hooks in its order.

What vLLM gives the connector is played: its base class, its configuration, its cache specs (by their class names, which
is what the connector goes by). The connector, the agent, the server and torch_npu are real.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from e2e.known import LOOKUP_S

from layerflow.agent import Hit, StepRequest
from layerflow.agent.descriptors import describe_loads, describe_saves
from layerflow.keys import Chain

DEVICE = "npu:0"
PACKAGE = "vllm.distributed.kv_transfer.kv_connector"
Caches = Mapping[str, tuple[torch.Tensor, ...]]
FORWARD = SimpleNamespace(available=False)
"""vLLM-Ascend's runner has a forward context from before it binds a plan until the pass is over."""


class StandIn(ModuleType):
    """A module of vLLM's: whatever is taken from it is a class of that name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class Base:
    """What the connector uses of vLLM's base class."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config


class Role(enum.Enum):
    SCHEDULER, WORKER = range(2)


class Results(NamedTuple):
    finished_sending: Any = None
    finished_recving: Any = None
    failed_recving: Any = None


def connector_class() -> Any:
    """The connector, imported without vLLM; nobody else sees the stand-ins."""
    names = [
        "vllm", "vllm.config", "vllm.distributed", "vllm.distributed.kv_events", "vllm.distributed.kv_transfer",
        PACKAGE, f"{PACKAGE}.factory", f"{PACKAGE}.v1", f"{PACKAGE}.v1.base", f"{PACKAGE}.v1.metrics",
        "vllm.v1", "vllm.v1.core", "vllm.v1.core.kv_cache_utils", "vllm.v1.kv_cache_interface",
        "vllm.forward_context", "vllm.utils", "vllm.utils.hashing",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        made = {name: StandIn(name) for name in names}
        for name, module in made.items():
            patch.setitem(sys.modules, name, module)
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(made[parent], own, module)
        made["vllm"].__version__ = "0.32.0"
        made["vllm.config"].get_current_vllm_config_or_none = lambda: None
        made["vllm.forward_context"].is_forward_context_available = lambda: FORWARD.available
        made[f"{PACKAGE}.factory"].KVConnectorFactory = SimpleNamespace(
            _registry={}, register_connector=lambda *names: None
        )
        base = made[f"{PACKAGE}.v1.base"]
        base.KVConnectorBase_V1, base.KVConnectorRole, base.KVConnectorTransferResults = Base, Role, Results
        return importlib.import_module("layerflow.connectors.vllm.connector").LayerflowConnector


class Group(NamedTuple):
    """One cache group of vLLM's.

    :param spec: the name of its spec's class, and the spec's attributes.
    :param widths: of each of a layer's tensors, bytes of a row.
    """

    spec: str
    attributes: dict[str, int]
    layers: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.attributes["block_size"] // self.attributes.get("tokens_per_state", 1)


class AscendWorker:
    """See the module.

    :param blocks: of every group.
    """

    def __init__(
        self, server: Any, groups: Sequence[Group], blocks: int, patch: pytest.MonkeyPatch, **extra: Any
    ) -> None:
        connector = connector_class()
        layout = sys.modules["layerflow.connectors.vllm.layout"]
        # There is no model whose weights or backends could be asked.
        patch.setattr(layout, "checkpoint_of", lambda *_: layout.Checkpoint("ascend"))
        patch.setattr(layout, "_arithmetic", lambda *_: "")
        patch.setattr(layout, "_packing", lambda *_: "packed")
        agent = sys.modules["layerflow.connectors.vllm.connector"].Agent
        patch.setattr("layerflow.connectors.vllm.scheduler.recovery.is_known", lambda *_, **__: False)  # needs vLLM
        patch.setattr(
            "layerflow.connectors.vllm.connector.Agent",
            lambda *args, **more: agent(*args, context=server.context, lookup_timeout_s=LOOKUP_S, **more),
        )
        self.groups, self.blocks = groups, blocks
        transfer = SimpleNamespace(
            kv_connector="LayerflowConnector",
            kv_connector_extra_config={"endpoint": server.endpoint, **extra},
            is_kv_producer=True,
            is_kv_consumer=True,
            engine_id="ascend",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        )
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            kv_events_config=None,
            parallel_config=SimpleNamespace(
                rank=0, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0
            ),
            scheduler_config=SimpleNamespace(async_scheduling=False),
            compilation_config=SimpleNamespace(static_forward_context={}),
            speculative_config=None,
            device_config=SimpleNamespace(device_type="npu"),
            load_config=None,
            cache_config=SimpleNamespace(),
            model_config=SimpleNamespace(
                served_model_name="ascend",
                model="ascend",
                use_mla=True,
                get_total_num_kv_heads=lambda: 2,
                runner_type="generate",
                pooler_config=None,
                is_prefix_caching_supported=True,
            ),
        )
        specs = [type(group.spec, (), dict(group.attributes))() for group in groups]
        cache = SimpleNamespace(
            num_blocks=blocks,
            kv_cache_groups=[
                SimpleNamespace(kv_cache_spec=spec, layer_names=list(group.layers))
                for spec, group in zip(specs, groups, strict=True)
            ],
        )
        # On the device block by block; what it should hold is kept on the host.
        self.host = {
            (name, part): np.full((blocks, group.rows * width), 0xEE, np.uint8)
            for group in groups
            for name in group.layers
            for part, width in enumerate(group.widths)
        }
        self.caches: dict[str, tuple[torch.Tensor, ...]] = {
            name: tuple(
                torch.empty((blocks, group.rows, width), dtype=torch.uint8, device=DEVICE) for width in group.widths
            )
            for group in groups
            for name in group.layers
        }
        for name in self.caches:
            self.upload(name)
        self.connector = connector(config, Role.WORKER, cache)
        self.connector.register_kv_caches(self.caches)
        self.side = self.connector._worker
        self.agent = self.side._agent
        self.spec = self.side._layout.spec

    def upload(self, name: str) -> None:
        """The layer's kernel writes its cache: enqueued on the current stream."""
        for part, tensor in enumerate(self.caches[name]):
            tensor.copy_(torch.from_numpy(self.host[name, part]).view(tensor.shape), non_blocking=False)

    def compute(self, name: str, tables: Sequence[np.ndarray], seed: int) -> None:
        """New bytes in all of a request's blocks of a layer."""
        group = next(number for number, each in enumerate(self.groups) if name in each.layers)
        own = tables[self.side._layout.vllm_groups.index(group)]
        for part, width in enumerate(self.groups[group].widths):
            draw = np.random.default_rng([seed, part, *name.encode()])
            self.host[name, part][own] = draw.integers(0, 256, (len(own), self.groups[group].rows * width), np.uint8)
        self.upload(name)

    def wrong(self) -> list[tuple[str, int, int]]:
        """Layer, tensor and block where the device's memory is not what the host's copy says."""
        torch.get_device_module(DEVICE).synchronize()
        return [
            (name, part, int(block))
            for (name, part), expected in self.host.items()
            for block in np.flatnonzero(
                (self.caches[name][part].cpu().numpy().reshape(expected.shape) != expected).any(1)
            )
        ]

    def tables(self, tokens: int, first: int) -> tuple[np.ndarray, ...]:
        """Blocks of a request, in layerflow's groups; scattered."""
        made = []
        for group in self.spec.groups:
            count = -(-tokens // group.block_size)
            made.append(first + np.random.default_rng(first).permutation(count).astype(np.int64))
        return tuple(made)

    def saves(self, name: str, chain: Chain, tables: tuple[np.ndarray, ...], tokens: int) -> Any:
        """What the scheduler's side tells of a request of which so many tokens are computed."""
        plans = (
            sys.modules["layerflow.connectors.vllm.plan"],
            sys.modules["layerflow.connectors.vllm.plan"],
        )
        asked = StepRequest(name, chain, tables, save=(0, tokens), tail=tokens == len(chain))
        parts = describe_saves(self.spec, [asked], True)
        own = [[table.tolist()] for table in tables]
        return plans[0].StepPlan(number=1, saves=plans[1].LazySaves([name], own, lambda: parts))

    def loads(self, name: str, chain: Chain, tables: tuple[np.ndarray, ...], hit: Hit, *, background: bool) -> Any:
        """The same of a request that loads its hit."""
        plan = sys.modules["layerflow.connectors.vllm.plan"].StepPlan
        parts = describe_loads(self.spec, [StepRequest(name, chain, tables, (0, hit.tokens), hit)])
        return plan(background={name: parts}) if background else plan(loads=parts)
