"""What the reference engine caches, precisely enough that equal keys mean equal bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from layerflow.content import content_of_tensors
from layerflow.engine.config import EngineConfig
from layerflow.spec import DEFAULT_CHUNK_TOKENS, GroupSpec, ModelSpec, Plane

_BESIDE_THE_CONTENT = ("name", "num_blocks", "max_positions", "step_tokens")  # they change no cached bytes


def model_spec(
    config: EngineConfig, weights: Mapping[str, torch.Tensor], chunk_tokens: int = DEFAULT_CHUNK_TOKENS
) -> ModelSpec:
    """What this engine caches, so that any engine with the same bytes computes the same keys."""
    facts = {name: value for name, value in dataclasses.asdict(config).items() if name not in _BESIDE_THE_CONTENT}
    groups = tuple(
        GroupSpec(each.kind, config.block_size, each.layers, tuple(Plane(*plane) for plane in each.planes), each.window)
        for each in config.groups
    )
    return ModelSpec(
        config.name,
        content_of_tensors(facts, weights),
        groups,
        attention="layerflow-reference/1",
        chunk_tokens=chunk_tokens,
    )
