"""Where the KV of a prompt's beginning may stand for computing it, and where it may not.

It may where a token's KV follows from the tokens before it, and where the answer needs no more than the KV. Runners,
poolers, caches and fields of caches that are known to be so are listed; what is not listed is refused with a sentence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from layerflow.errors import Unsupported
from layerflow.kinds import KINDS

RUNNERS = ("generate", "pooling")
"""Of vLLM's ``runner_type``."""

POOLERS = {"seq_pooling_type": (None, "LAST"), "tok_pooling_type": (None, "ALL")}
"""Of vLLM's PoolerConfig: what reads the last token only, or reads all tokens and has its requests skip cached ones."""

_FIELDS = frozenset(
    {
        # how many bytes there are, of which type, and how they lie
        "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode", "page_size_padded",
        "num_head_slots", "state_content_bytes", "block_stride_alignment", "alignment", "cache_dtype_str",
        "tokens_per_state", "compress_ratio", "indexes_kv_by_block_stride", "num_heads", "max_tp_shards", "dcp_sharded",
        "tp_replicated",
        # which tokens a layer reads
        "sliding_window", "attention_chunk_size",
        # blocks that vLLM holds longer for a draft model
        "extra_retained_tokens",
        # which model's cache, and which of its caches
        "model_version", "cache_role", "is_index_group_leader", "is_draft", "topk_buffer_width",
        # recurrent state
        "shapes", "dtypes", "mamba_type", "mamba_cache_mode", "num_speculative_blocks", "num_prefill_checkpoint_blocks",
        "prefill_checkpoint_alignment",
    }
)  # fmt: skip
"""Fields of vLLM's cache specs whose values are understood, whatever they are."""

_ASCEND_ATTENTION = frozenset(
    {"AscendAttentionBackendImpl", "AscendFAImpl", "AscendMLAImpl", "AscendSFAImpl", "AscendSFADSACPImpl"}
)
"""Attention of vLLM-Ascend that writes every token of a pass, and in the one order that it is read in."""

_SPECS = {spec: kind.name for kind in KINDS.values() for spec in kind.vllm}


def kind_of(layer_spec: Any) -> str:
    """What layerflow calls the kind of cache that vLLM's spec describes.

    :raises Unsupported: a spec, or a value of one of its fields, that is not known.
    """
    name = type(layer_spec).__name__
    if name not in _SPECS:
        raise Unsupported(
            f"this model has a KV cache of kind {name}, which layerflow cannot move yet; run it without the connector"
        )
    if name == "MambaSpec" and layer_spec.mamba_cache_mode != "align":
        raise Unsupported(
            f"recurrent layers with mamba_cache_mode={layer_spec.mamba_cache_mode!r} keep no state that a later prompt "
            "could continue from; start vLLM with --enable-prefix-caching (and --mamba-cache-mode align)"
        )
    for field, value in _unusual(layer_spec):
        if field not in _FIELDS:
            raise Unsupported(
                f"this model has a KV cache of kind {name} with {field}={value!r}, and what that means for its blocks "
                "is not known here; run it without the connector"
            )
    return _SPECS[name]


def check_attention(name: str, layer: Any) -> None:
    """Refuse attention on an NPU of which it is not known that a cache's rows are what was computed for its tokens.

    Where vLLM-Ascend quantises a cache, or orders it for decoding, by `kv_role`, prompts that such an engine computes
    have wrong answers, whatever is loaded: to load and save nothing is no way out. Where another connector may bring
    all prompts in that order, :func:`obstacle` says so, and no layer is asked about.

    :param name: the layer's. :param layer: what vLLM computes it with; None = not known by this name.
    :raises Unsupported: with the layer, and what to do.
    """
    impl = getattr(layer, "impl", None)
    kind = type(impl).__name__
    if kind == "AscendC8AttentionBackendImpl":
        raise Unsupported(
            f"layer {name}: with a KV connector, vLLM-Ascend computes attention over an int8 KV cache (C8) in some "
            "passes only, and leaves out others; serve a checkpoint without C8"
        )
    if impl is not None and kind not in _ASCEND_ATTENTION:
        raise Unsupported(
            f"layer {name}: vLLM-Ascend's attention is {kind}, and how that writes its cache is not known here; run it "
            "without the connector"
        )
    quantised = getattr(impl, "fa_quant_layer", False) and not getattr(impl, "support_fp8_attention", False)
    if quantised or getattr(impl, "enable_kv_nz", False):
        reason = "with an int8 cache on this device" if quantised else "with enable_kv_nz"
        mooncake = "leave it out, or have MooncakeConnector bring all prompts, beside layerflow in a MultiConnector"
        raise Unsupported(
            f"layer {name}: {reason}, vLLM-Ascend's decode reads a latent cache in another order than its prefill "
            f"writes one; {'leave out --kv-cache-dtype' if quantised else mooncake}"
        )


def obstacle(vllm_config: Any, layer_specs: Iterable[Any], *, child: bool = False) -> str:
    """Why nothing may be loaded or saved for this engine, a sentence; "" = it may.

    :param layer_specs: vLLM's, of all caches. :param child: the connector may be one of a MultiConnector's.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.runner_type not in RUNNERS:
        return f"vLLM's runner {model.runner_type!r} is not known to compute the same answer from a prompt's cached KV"
    pooler = model.pooler_config
    for field, known in POOLERS.items() if pooler is not None else ():
        if (kind := getattr(pooler, field, "missing")) not in known:
            return f"{kind} pooling needs the hidden states of a whole prompt, and its KV alone does not give them"
    if not model.is_prefix_caching_supported:
        return "vLLM does not reuse prefixes of this model: its tokens' KV, or its answers, depend on more than those"
    if any(getattr(each, "non_causal", False) for each in layer_specs):
        return "some of this model's tokens attend to later ones: their KV does not follow from the tokens before them"
    ascend = getattr(vllm_config, "additional_config", None)
    if child and isinstance(ascend, Mapping) and ascend.get("enable_kv_nz"):
        return (
            "enable_kv_nz has vLLM-Ascend's decode read a latent cache in another order than its prefill writes one, "
            "so that all prompts have to come by MooncakeConnector"
        )
    if getattr(cache, "calculate_kv_scales", False):
        return "calculate_kv_scales takes the scales of the KV cache from each process's first batch: no other has them"
    return ""


def _unusual(layer_spec: Any) -> Iterator[tuple[str, Any]]:
    """Fields that do not have their default."""
    if dataclasses.is_dataclass(layer_spec):
        for field in dataclasses.fields(layer_spec):
            value = getattr(layer_spec, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                yield field.name, value
