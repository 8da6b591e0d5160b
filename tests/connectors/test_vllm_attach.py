"""A worker that attaches late, when the digest of its weights is known: what goes wrong there ends no engine."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from layerflow import Agent, GroupSpec, ModelSpec, Plane
from layerflow.connectors.common.weights import WeightsReading
from layerflow.connectors.vllm.layout import Layout
from layerflow.connectors.vllm.plan import NOT_NAMED, StepPlan
from layerflow.errors import ServerLost, Unsupported

CONNECTOR = "layerflow.connectors.vllm.connector"


class Stand(ModuleType):
    """A module of vLLM's whose names are all there."""

    __version__ = "0.32.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "KVConnectorRole":
            return Enum(name, "SCHEDULER WORKER")
        if name == "is_forward_context_available":
            return bool
        if name == "KVConnectorFactory":
            return type(name, (), {"_registry": {"LayerflowConnector": None}})
        return type(name, (), {})


class Finder:
    """Finds them."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "vllm" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Stand:
        return Stand(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A worker's connector, whose cache is registered and whose weights are still read."""
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    before = set(sys.modules)
    module = importlib.import_module(CONNECTOR)
    made = module.LayerflowConnector.__new__(module.LayerflowConnector)
    made._obstacle, made._worker, made._told_of_reading, made._siblings = "", None, False, ()
    made._bound = None
    yield made
    for name in set(sys.modules) - before:  # nobody else sees the stand-ins
        if name.startswith(("vllm", "layerflow.connectors.vllm")):
            del sys.modules[name]


@pytest.mark.parametrize("error", [ServerLost("no server"), MemoryError("no thread")])
def test_an_error_costs_reuse_and_not_the_engine(connector: Any, error: Exception) -> None:
    def broken(_: Any) -> None:
        raise error

    connector._attach = broken
    connector._reading = WeightsReading(lambda _: object())
    assert connector._reading.wait(20)
    plan = StepPlan()
    connector.handle_preemptions(plan)
    connector.bind_connector_metadata(plan)
    assert not connector.has_connector_metadata()
    assert connector.build_connector_worker_meta().layouts == (NOT_NAMED,), "requests do not wait for its layout"
    connector.handle_preemptions(plan)
    assert connector.build_connector_worker_meta() is None


@pytest.fixture
def agents(connector: Any, monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """What the connector's attachments have made, to a server that is not there."""
    agents: list[Agent] = []

    def made(*args: Any, **named: Any) -> Agent:
        agents.append(Agent(*args, **named, wait_s=0))
        return agents[-1]

    module = sys.modules[type(connector).__module__]
    monkeypatch.setattr(module, "Agent", made)
    monkeypatch.setattr(module, "steps_in_flight", lambda *_, **__: None)
    monkeypatch.setattr(module, "_steps_overlap", lambda _: False)
    connector._vllm_config = connector._kv_transfer_config = connector._kv_cache_config = Mock()
    connector._groups, connector._name = 1, "engine"
    connector._takes_back = False
    connector.options = Mock(endpoint="ipc:///nobody/listens/here")
    return agents


def layout() -> Layout:
    spec = ModelSpec("example", content="w", groups=(GroupSpec("full", 16, (0,), (Plane("k", "uint8", (8,)),)),))
    return Layout(spec, {0: {"k": torch.zeros((4, 16, 8), dtype=torch.uint8)}}, {}, (0,), Mock())


def test_an_attachment_that_fails_leaves_no_agent(
    connector: Any, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads, and what it maps of the server's arena, would be there for as long as the engine."""

    def no_thread(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("layerflow.connectors.vllm.worker.worker.Deferred", no_thread)
    connector._reading = WeightsReading(lambda _: layout())
    assert connector._reading.wait(20)
    connector.handle_preemptions(StepPlan())
    assert len(agents) == 1 and connector._worker is None
    assert not agents[0]._link._thread.alive


def test_a_cache_that_is_made_anew_ends_the_agent_of_the_one_before(
    connector: Any, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[type(connector).__module__], "layout_of", lambda *_: layout())
    connector._weights, connector._server, connector._reading, connector._named = Mock(), None, None, layout()
    connector.register_kv_caches({})
    first = connector._worker
    connector.register_kv_caches({})
    try:
        assert connector._worker is not first and len(agents) == 2
        assert not agents[0]._link._thread.alive, "it would go on reading and writing a cache that is unmapped"
        assert agents[1]._link._thread.alive
    finally:
        connector._worker.close()


@pytest.mark.parametrize(
    ("version", "extra", "piecewise"),
    [
        ("0.32.0", {}, False),
        ("0.33.0", {"mode": "layerwise"}, False),
        ("0.27.1", {}, True),
        ("0.27.1", {"mode": "bulk"}, False),
    ],
)
def test_who_loads_in_no_step_keeps_whole_cuda_graphs(
    connector: Any, monkeypatch: pytest.MonkeyPatch, version: str, extra: dict[str, Any], piecewise: bool
) -> None:
    """Hooks do not run inside a whole graph; 0.32 tells which passes may be one, so that these wait before."""
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    endpoint = {"endpoint": "ipc:///tmp/layerflow.sock"}
    assert type(connector).requires_piecewise_for_cudagraph(endpoint | extra) is piecewise


def _kept(given: dict[str, Any]) -> dict[str, Any]:
    return {"_vllm_config": given["vllm_config"], "_kv_cache_config": given["kv_cache_config"]}


@pytest.mark.parametrize(
    ("role", "outer", "inert"),
    [
        ("WORKER", "MultiConnector", True),
        ("WORKER", "LayerflowConnector", False),  # its layers are asked about, and refuse the engine
        ("SCHEDULER", None, True),
    ],
)
def test_with_enable_kv_nz_a_multi_connectors_engine_starts_and_moves_nothing(
    connector: Any, monkeypatch: pytest.MonkeyPatch, role: str, outer: str | None, inert: bool
) -> None:
    kind, module = type(connector), sys.modules[type(connector).__module__]
    transfer = SimpleNamespace(kv_connector=outer, kv_connector_extra_config={"connectors": [LAYERFLOW]})
    current = SimpleNamespace(kv_transfer_config=transfer) if outer else None
    current_config = Mock(return_value=current)
    monkeypatch.setattr(module.vllm_configs, "get_current_vllm_config_or_none", current_config, raising=False)
    for name in ("check_call", "check_policy", "sizes_of", "SchedulerSide", "HandoffSide", "_steps_overlap"):
        monkeypatch.setattr(module, name, Mock())
    monkeypatch.setattr(kind.__mro__[1], "__init__", lambda made, **named: vars(made).update(_kept(named)))
    config = Mock(additional_config={"enable_kv_nz": True}, kv_events_config=None)
    config.model_config = SimpleNamespace(runner_type="generate", pooler_config=None, is_prefix_caching_supported=True)
    config.cache_config.calculate_kv_scales = False
    config.kv_transfer_config = SimpleNamespace(
        kv_connector="LayerflowConnector",
        kv_connector_extra_config={"endpoint": "ipc:///x", "allow_unknown_vllm": True, "name": "e"},
        is_kv_producer=False,
        is_kv_consumer=True,
        kv_role="kv_consumer",
        kv_load_failure_policy="fail",
        engine_id="e",
    )
    made = kind(config, module.KVConnectorRole[role], SimpleNamespace(kv_cache_groups=[], num_blocks=9))
    assert ("enable_kv_nz" in made._obstacle) is inert
    layout_of = Mock(side_effect=Unsupported("layer l.0"))
    monkeypatch.setattr(module, "layout_of", layout_of)
    with contextlib.nullcontext() if inert else pytest.raises(Unsupported):
        made.register_kv_caches({})
    assert layout_of.called is not inert


LAYERFLOW = {"kv_connector": "LayerflowConnector"}
PULLED, PUSHED = {"kv_connector": "NixlConnector"}, {"kv_connector": "MooncakeLayerwiseConnector"}


@pytest.mark.parametrize(
    ("outer", "siblings"),
    [
        (None, None),
        (LAYERFLOW, None),
        ([LAYERFLOW], ()),
        ([PULLED, LAYERFLOW, PUSHED], ("NixlConnector", "MooncakeLayerwiseConnector")),
    ],
)
def test_a_worker_sees_which_connectors_are_beside_it(
    connector: Any, monkeypatch: pytest.MonkeyPatch, outer: Any, siblings: tuple[str, ...] | None
) -> None:
    module = sys.modules[type(connector).__module__]
    _make_current(module, monkeypatch, outer)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["l.0"])])
    assert module._siblings(SimpleNamespace(**LAYERFLOW), cache) == siblings


def test_what_shortens_prompts_behind_it_is_refused_where_a_state_would_be_stepped_twice(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[type(connector).__module__]
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=MambaSpec(), layer_names=["l.0"])])
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.30.0")
    _make_current(module, monkeypatch, [PUSHED, LAYERFLOW, PULLED])
    assert module._siblings(SimpleNamespace(**LAYERFLOW), cache) == ("MooncakeLayerwiseConnector", "NixlConnector")
    _make_current(module, monkeypatch, [LAYERFLOW, PUSHED], producer=False)  # no prompts are handed over by it
    assert module._siblings(SimpleNamespace(**LAYERFLOW), cache) == ("MooncakeLayerwiseConnector",)
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.27.1")
    _make_current(module, monkeypatch, [LAYERFLOW, PULLED])
    with pytest.raises(Unsupported, match="NixlConnector"):
        module._siblings(SimpleNamespace(**LAYERFLOW), cache)
    _make_current(module, monkeypatch, [LAYERFLOW, PULLED, PUSHED])
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.33.0")
    with pytest.raises(Unsupported, match=r"MooncakeLayerwiseConnector .* name LayerflowConnector behind it"):
        module._siblings(SimpleNamespace(**LAYERFLOW), cache)


class FullAttentionSpec:
    """Of this name in vLLM."""


class MambaSpec:
    """The same."""


def _make_current(module: ModuleType, monkeypatch: pytest.MonkeyPatch, outer: Any, *, producer: bool = True) -> None:
    """vLLM's current configuration names a connector, or several in a MultiConnector; None = there is none."""
    several = isinstance(outer, list)
    given = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": outer}} if several else outer
    transfer = SimpleNamespace(**given, is_kv_producer=producer) if outer else None
    current = SimpleNamespace(kv_transfer_config=transfer) if outer else None
    told = Mock(return_value=current)
    monkeypatch.setattr(module.vllm_configs, "get_current_vllm_config_or_none", told, raising=False)
