"""Layers of a draft model (EAGLE, MTP, a small model): which of vLLM's they are, and what their bytes depend on.

vLLM 0.32 gives them no cache group of their own where their caches look like the model's. To layerflow they are one, so
that engines with another draft model, or with none, share everything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from typing import Any

import structlog

from layerflow.connectors.vllm.identity.computation import computation_of
from layerflow.connectors.vllm.identity.identity import quantization_of
from layerflow.spec import GroupSpec

BOUND = "a draft model may spread its KV heads over ranks in another way than the model"
_NAMED = {"draft_model", "mtp"}
_NO_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Methods that guess without a cache."""

log = structlog.get_logger("layerflow.vllm")


def draft_layers(vllm_config: Any, names: Iterable[str]) -> frozenset[str]:
    """Those of a draft model: named so, or numbered behind the model's last layer, as EAGLE's and most MTPs' are."""
    if getattr(vllm_config, "speculative_config", None) is None:
        return frozenset()
    count = vllm_config.model_config.get_total_num_hidden_layers()

    def is_draft(parts: list[str]) -> bool:
        return not _NAMED.isdisjoint(parts) or next((int(part) for part in parts if part.isdecimal()), 0) >= count

    return frozenset(name for name in names if is_draft(name.split(".")))


def guesses_unseen(vllm_config: Any, drafts: frozenset[str]) -> bool:
    """Is there a draft model of which no layer can be told from the model's?"""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and not drafts and speculative.method not in _NO_LAYERS


def draft_facts(vllm_config: Any, layers: Collection[str]) -> str:
    """What the draft model computes with, its weights and its cache's layout apart."""
    speculative = vllm_config.speculative_config
    model = speculative.draft_model_config
    facts = {"method": speculative.method, "dtype": str(model.dtype), "quantization": quantization_of(model)}
    return json.dumps([facts, sorted(computation_of(vllm_config, model, layers))], sort_keys=True)


def left_out(reason: str) -> None:
    """Say that the draft model's layers are neither stored nor loaded."""
    log.info("draft_layers_left_out", reason=reason)


def draft_name(facts: str, packing: str, group: GroupSpec) -> str:
    """For :attr:`layerflow.spec.Shard.drafts`, before the draft model's weights are known.

    :param facts: of :func:`draft_facts`. :param packing: as of :attr:`layerflow.spec.ModelSpec.attention`.
    """
    cached = [facts, packing, group.kind, group.block_size, len(group.layers), group.window]
    cached += [[plane.name, plane.dtype, plane.shape] for plane in group.planes]
    return hashlib.blake2b(json.dumps(cached).encode(), digest_size=16).hexdigest()
