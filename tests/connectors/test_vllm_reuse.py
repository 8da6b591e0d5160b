"""Where vLLM cannot reuse a prompt's beginning, layerflow does not either, and says why."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from layerflow.connectors.vllm.reuse import check_attention, kind_of, obstacle
from layerflow.errors import Unsupported


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    """vLLM's."""

    block_size: int = 16
    sliding_window: int | None = None
    non_causal: bool = False
    is_draft: bool = False


def engine(**changed: Any) -> Any:
    model = {"runner_type": "generate", "pooler_config": None, "is_prefix_caching_supported": True}
    cache = SimpleNamespace(calculate_kv_scales=changed.pop("calculate_kv_scales", False))
    return SimpleNamespace(model_config=SimpleNamespace(**model | changed), cache_config=cache)


def pooling(seq: str | None, tok: str | None = None) -> Any:
    return engine(runner_type="pooling", pooler_config=SimpleNamespace(seq_pooling_type=seq, tok_pooling_type=tok))


@pytest.mark.parametrize("config", [engine(), pooling("LAST"), pooling(None, "ALL"), pooling("LAST", "ALL")])
def test_what_is_known_to_be_right_is_reused(config: Any) -> None:
    assert obstacle(config, [FullAttentionSpec()]) == ""


@pytest.mark.parametrize(
    ("config", "layer_spec", "reason"),
    [
        (pooling("MEAN"), FullAttentionSpec(), "MEAN pooling"),
        (pooling("CLS"), FullAttentionSpec(), "CLS pooling"),
        (pooling("LAST", "STEP"), FullAttentionSpec(), "STEP pooling"),
        (pooling("NEWEST"), FullAttentionSpec(), "NEWEST pooling"),
        (engine(pooler_config=SimpleNamespace(pooling="LAST")), FullAttentionSpec(), "missing pooling"),
        (engine(runner_type="draft"), FullAttentionSpec(), "runner 'draft'"),
        (engine(is_prefix_caching_supported=False), FullAttentionSpec(), "does not reuse prefixes"),
        (engine(), FullAttentionSpec(non_causal=True), "later ones"),
        (engine(calculate_kv_scales=True), FullAttentionSpec(), "first batch"),
    ],
)
def test_what_is_not_is_told_in_one_sentence(config: Any, layer_spec: Any, reason: str) -> None:
    said = obstacle(config, [FullAttentionSpec(), layer_spec])
    assert reason in said and ". " not in said


def test_one_cache_that_is_not_causal_is_enough() -> None:
    assert obstacle(engine(), [FullAttentionSpec(), FullAttentionSpec(non_causal=True)])


class TestSpecs:
    def test_fields_that_are_understood_may_have_any_value(self) -> None:
        assert kind_of(FullAttentionSpec(block_size=64, sliding_window=128, is_draft=True)) == "full"

    def test_a_field_whose_other_value_is_not_understood_is_refused(self) -> None:
        with pytest.raises(Unsupported, match="non_causal=True"):
            kind_of(FullAttentionSpec(non_causal=True))

    def test_a_new_field_is_refused_once_it_is_used(self) -> None:
        newer = make_dataclass("FullAttentionSpec", [("block_size", int), ("rotated", bool, False)])
        assert kind_of(newer(16)) == "full"
        with pytest.raises(Unsupported, match="rotated=True"):
            kind_of(newer(16, rotated=True))

    def test_a_new_class_is_refused(self) -> None:
        newer = make_dataclass("SparserAttentionSpec", [("block_size", int)])
        with pytest.raises(Unsupported, match="SparserAttentionSpec"):
            kind_of(newer(16))

    def test_the_latent_cache_of_another_platform_is_one_where_it_says_no_more(self) -> None:
        latent = make_dataclass("AscendMLAAttentionSpec", [("head_size", int, 576), ("store_on_host", bool, False)])
        assert kind_of(latent()) == "mla"
        with pytest.raises(Unsupported, match="store_on_host=True"):
            kind_of(latent(store_on_host=True))

    @pytest.mark.parametrize("more", [{"cache_sparse_li_c8": True}, {"sfa_dcp_replicated_indexer_size": 2}])
    def test_so_is_its_indexers_where_that_is_neither_quantised_nor_replicated(self, more: dict[str, int]) -> None:
        fields = [("head_size", int, 128), ("cache_sparse_li_c8", bool, False)]
        indexer = make_dataclass("AscendSFAIndexerCacheSpec", [*fields, ("sfa_dcp_replicated_indexer_size", int, 1)])
        assert kind_of(indexer()) == "mla"
        with pytest.raises(Unsupported, match=next(iter(more))):
            kind_of(indexer(**more))

    def test_states_are_kept_at_boundaries_or_not_at_all(self) -> None:
        state = make_dataclass("MambaSpec", [("block_size", int), ("mamba_cache_mode", str)])
        assert kind_of(state(16, "align")) == "state"
        with pytest.raises(Unsupported, match="mamba_cache_mode='all'"):
            kind_of(state(16, "all"))


def computed_by(impl: str, **facts: bool) -> Any:
    """A layer whose attention vLLM-Ascend computes."""
    return SimpleNamespace(impl=type(impl, (), facts)())


class TestAttentionOnNpus:
    @pytest.mark.parametrize(
        "layer",
        [
            computed_by("AscendAttentionBackendImpl"),
            computed_by("AscendFAImpl"),
            computed_by("AscendMLAImpl", fa_quant_layer=False, support_fp8_attention=False, enable_kv_nz=False),
            computed_by("AscendMLAImpl", fa_quant_layer=True, support_fp8_attention=True, enable_kv_nz=False),
            computed_by("AscendSFAImpl"),
            computed_by("AscendSFADSACPImpl"),
            SimpleNamespace(),  # an indexer's cache, recurrent state
            None,
        ],
    )
    def test_that_writes_its_cache_in_the_order_it_reads_is_moved(self, layer: Any) -> None:
        check_attention("l.0", layer)

    @pytest.mark.parametrize(
        ("layer", "reason"),
        [
            (computed_by("AscendC8AttentionBackendImpl"), "some passes only"),
            (computed_by("AscendMLAImpl", fa_quant_layer=True, support_fp8_attention=False), "--kv-cache-dtype"),
            (computed_by("AscendMLAImpl", enable_kv_nz=True), "enable_kv_nz"),
            (computed_by("AscendC8MXFPAttentionBackendImpl"), "is AscendC8MXFPAttentionBackendImpl"),
        ],
    )
    def test_other_attention_is_refused(self, layer: Any, reason: str) -> None:
        with pytest.raises(Unsupported, match=rf"layer l\.0: .*{reason}"):
            check_attention("l.0", layer)

    @pytest.mark.parametrize("child", [False, True])
    @pytest.mark.parametrize("additional", [{"enable_kv_nz": True}, {"enable_kv_nz": False}, {}, None])
    def test_where_another_connector_may_bring_prompts_in_decodes_order_nothing_is_moved(
        self, child: bool, additional: dict[str, bool] | None
    ) -> None:
        """vLLM-Ascend's Mooncake connectors convert what they load: such an engine answers rightly, and starts."""
        config = engine()
        config.additional_config = additional
        said = obstacle(config, [FullAttentionSpec()], child=child)
        assert ("MooncakeConnector" in said) is bool(child and additional and additional["enable_kv_nz"])
        assert ". " not in said
