"""What the connector makes of the tensors that vLLM registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        self,
        *groups: Mapping[str, Any],
        layers: Mapping[str, Any] | None = None,
        device: str = "cuda",
        speculative_config: Any = None,
        layout_name: str = "",
    ) -> None:
        self.tensors = {name: registered for group in groups for name, registered in group.items()}
        self.cache = SimpleNamespace(
            num_blocks=BLOCKS,
            kv_cache_layout=layout_name,
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=SPEC, layer_names=list(group)) for group in groups],
        )
        self.config = SimpleNamespace(
            model_config=SimpleNamespace(
                served_model_name="m",
                model="m",
                get_total_num_kv_heads=lambda: 2,
                get_total_num_hidden_layers=lambda: 8,
            ),
            load_config=None,
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, pipeline_parallel_size=1),
            compilation_config=SimpleNamespace(static_forward_context=dict(layers or {})),
            device_config=SimpleNamespace(device_type=device),
            speculative_config=speculative_config,
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


class TestLayersOfOneBlockTable:
    def test_may_not_share_memory(self) -> None:
        """vLLM-Ascend has layers take turns in one buffer where AscendStoreConnector asks for it."""
        once = cache()
        with pytest.raises(Unsupported, match=r"layers l\.0 and l\.2 use the same blocks and share memory"):
            Engine({"l.0": once, "l.1": cache(), "l.2": once}).layout()

    def test_may_not_share_a_part_of_it(self) -> None:
        keys, values = cache(), cache()
        with pytest.raises(Unsupported, match="share memory"):
            Engine({"l.0": (keys, values), "l.1": (cache(), values)}).layout()
        both = torch.zeros((2 * BLOCKS, 2, TOKENS, 8), dtype=torch.bfloat16)
        with pytest.raises(Unsupported, match="share memory"):
            Engine({"l.0": both[:BLOCKS], "l.1": both[BLOCKS - 1 : 2 * BLOCKS - 1]}).layout()

    def test_may_be_packed_into_one_allocation(self) -> None:
        page = torch.zeros((BLOCKS, 3, 2, TOKENS, 8), dtype=torch.bfloat16)
        layers = torch.zeros((3, BLOCKS, 2, TOKENS, 8), dtype=torch.bfloat16)
        for packed in (page.transpose(0, 1), layers):
            assert Engine({f"l.{number}": packed[number] for number in range(3)}).layout().spec.num_layers == 3

    def test_share_it_with_other_groups(self) -> None:
        """A block is one group's at a time."""
        once, other = cache(), cache()
        made = Engine({"l.0": once, "l.2": other}, {"l.1": once, "l.3": other}).layout()
        assert made.vllm_groups == (0, 1)

    def test_whose_cache_is_another_ones_are_not_vllms_to_move(self) -> None:
        """KV sharing: registered under a name that no cache group has."""
        engine = Engine({"l.0": cache()})
        engine.tensors["l.1"] = engine.tensors["l.0"]
        assert engine.layout().numbers == {"l.0": 0}


def tokens_first() -> torch.Tensor:
    return torch.zeros((BLOCKS, TOKENS, 2, 8), dtype=torch.bfloat16)


class TestOrderOfHeadsAndTokens:
    """vLLM-Ascend packs blocks in either under one name of the layout, keys and values apart."""

    def layout(self, method: str | None, **made: Callable[[], torch.Tensor]) -> Layout:
        """:param made: makes the tensors of each layer."""
        guesses = SimpleNamespace(method=method, draft_model_config=None) if method else None
        tensors = {f"l.{name[1:]}": (make(), make()) for name, make in made.items()}
        return Engine(tensors, speculative_config=guesses, layout_name="LBHNC", device="npu").layout()

    @pytest.mark.parametrize("method", [None, "medusa"], ids=["that heads tell", "of a model whose guesses are unseen"])
    @pytest.mark.parametrize("kernel_blocks", [1, 2])
    def test_is_in_the_keys(self, method: str | None, kernel_blocks: int) -> None:
        """Of a kernel's block, where one of vLLM's is several."""
        count, tokens = BLOCKS * kernel_blocks, TOKENS // kernel_blocks
        heads_first, again, others = (
            self.layout(method, l0=lambda shape=shape: torch.zeros(shape, dtype=torch.bfloat16)).spec.fingerprint
            for shape in ((count, 2, tokens, 8), (count, 2, tokens, 8), (count, tokens, 2, 8))
        )
        assert heads_first == again != others

    def test_of_a_draft_models_layers_is_in_their_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(layouts, "draft_facts", lambda *_: "")
        heads_first, others = (self.layout("eagle", l0=cache, l8=draft).spec for draft in (cache, tokens_first))
        assert heads_first.fingerprint == others.fingerprint
        assert heads_first.shard.drafts != others.shard.drafts
