"""What the connector makes of the tensors that vLLM registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerflow.connectors.common.weights import Checkpoint
from layerflow.connectors.vllm import layout as layouts
from layerflow.connectors.vllm.layout import Layout, layout_of
from layerflow.connectors.vllm.options import parse_options
from layerflow.errors import Unsupported

BLOCKS, TOKENS = 5, 16
OPTIONS = parse_options({"endpoint": "ipc:///x", "model_content": "w"}, producer=True, consumer=True)


@dataclass(frozen=True)
class FullAttentionSpec:
    """vLLM's, by name."""

    block_size: int = TOKENS
    num_kv_heads: int = 2


SPEC = FullAttentionSpec()


class Engine:
    """vLLM's objects, as far as its layout is read from them.

    :param groups: its cache groups, by layer the registered tensors. :param layers: what computes them, by name.
    """

    def __init__(
        self, *groups: Mapping[str, Any], layers: Mapping[str, Any] | None = None, device: str = "cuda", **facts: Any
    ) -> None:
        self.tensors = {name: registered for group in groups for name, registered in group.items()}
        self.cache = SimpleNamespace(
            num_blocks=BLOCKS,
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=SPEC, layer_names=list(group)) for group in groups],
        )
        self.config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="m", model="m", get_total_num_kv_heads=lambda: 2),
            load_config=None,
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, pipeline_parallel_size=1),
            compilation_config=SimpleNamespace(static_forward_context=dict(layers or {})),
            device_config=SimpleNamespace(device_type=device),
            **{"speculative_config": None, **facts},
        )

    def layout(self) -> Layout:
        return layout_of(self.config, self.cache, self.tensors, OPTIONS)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no model whose weights or code could be asked."""
    monkeypatch.setattr(layouts, "checkpoint_of", lambda *_: Checkpoint("w"))
    monkeypatch.setattr(layouts, "_arithmetic", lambda *_: "")


def cache() -> torch.Tensor:
    return torch.zeros((BLOCKS, 2, TOKENS, 8), dtype=torch.bfloat16)


def test_attention_is_looked_at_where_vllm_ascend_computes_it() -> None:
    layers = {"l.1": SimpleNamespace(impl=type("AscendC8AttentionBackendImpl", (), {})())}
    tensors = {"l.0": cache(), "l.1": cache()}
    with pytest.raises(Unsupported, match=r"layer l\.1: .*C8"):
        Engine(tensors, layers=layers, device="npu").layout()
    assert Engine(tensors, layers=layers).layout().numbers == {"l.0": 0, "l.1": 1}
