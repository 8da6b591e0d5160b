"""Which of vLLM's caches can be cut between KV heads, so that engines of other tensor sizes share them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from layerflow.boxes import HeadAxis, PlaneInterior, head_axis

HEAD_MAJOR = "LBHNC"
"""The name of vLLM's layout in which a block's heads lie one after the other (HND)."""
_LAYOUTS = "vllm.v1.kv_cache_layout"
_LATENT = ("MLAAttentionSpec", "SlidingWindowMLASpec")


def wanted_layout(vllm_config: Any) -> str | None:
    """The layout to ask vLLM for; it takes another one, with a warning, where its kernels cannot read this one."""
    model = vllm_config.model_config
    named = importlib.util.find_spec(_LAYOUTS) is not None  # before, a layer was viewed in as many ways as backends
    return HEAD_MAJOR if named and model is not None and not model.use_mla else None


def group_axis(
    vllm_config: Any,
    kind: str,
    layers: Mapping[str, tuple[Any, Sequence[torch.Tensor]]],
    num_blocks: int,
) -> HeadAxis:
    """What the heads of one group's boxes are.

    :param kind: layerflow's name of the group's kind.
    :param layers: of the group: by name its vLLM spec and its registered tensors.
    """
    size = vllm_config.parallel_config.tensor_parallel_size
    axes = {
        head_axis(
            kind,
            [_interior(layer_spec, part, tensor, num_blocks) for part, tensor in enumerate(tensors)],
            _model_heads(vllm_config.model_config, name),
            size,
        )
        for name, (layer_spec, tensors) in layers.items()
    }
    if len(axes) == 1:
        return axes.pop()
    refusals = sorted(axis.refusal for axis in axes if axis.refusal)
    return HeadAxis(size, refusals[0] if refusals else "its layers have different numbers of KV heads")


def _interior(layer_spec: Any, part: int, tensor: torch.Tensor, num_blocks: int) -> PlaneInterior:
    """vLLM's view of a layer is (blocks, heads, tokens, content), in any physical order."""
    name = f"part{part}" if part else "kv"
    if type(layer_spec).__name__ in _LATENT:
        return PlaneInterior(name, 0, "")
    heads = int(getattr(layer_spec, "num_kv_heads", 1))
    if tensor.dim() != 4 or tensor.shape[:2] != (num_blocks, heads):
        return PlaneInterior(name, heads, "")  # several kernel blocks in one, keys beside values, or no head axis
    strides = tensor.stride()
    order = sorted((axis for axis in (1, 2, 3) if tensor.shape[axis] > 1), key=lambda axis: -strides[axis])
    return PlaneInterior(name, heads, "".join("BHNC"[axis] for axis in order) or "C")


def _model_heads(model: Any, name: str) -> int:
    """KV heads of the model in one layer, over all ranks."""
    facts: Any = getattr(model, "model_arch_config", None)
    if hasattr(type(facts), "__getitem__"):  # layers that differ
        layer = next((int(part) for part in name.split(".") if part.isdecimal()), 0)
        return int(facts[layer].total_num_kv_heads)
    return int(model.get_total_num_kv_heads())
