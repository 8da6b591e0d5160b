"""Grouped-query attention over gathered pages, causal or within a sliding window."""

from __future__ import annotations

import torch

from layerflow.engine.attention.base import LOUD, SHARP, Shapes, TokenRows, Weights, in_heads
from layerflow.engine.attention.tile import Rotation
from layerflow.engine.config import EngineConfig


class GroupedQuery(TokenRows):
    """Attention with fewer key and value heads than query heads (Ainslie et al., GQA, 2023)."""

    def __init__(self, config: EngineConfig, layer: int, weights: Weights) -> None:
        super().__init__(config.window if config.kinds[layer] == "sliding" else 0)
        self._w = weights
        self._kv_heads, self._dim = config.kv_heads, config.head_dim
        self._share = config.heads // config.kv_heads

    @staticmethod
    def shapes(config: EngineConfig, layer: int) -> Shapes:
        """Its weights, the same in every layer."""
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return {
            "q": ((wide, config.hidden), SHARP),
            "k": ((narrow, config.hidden), SHARP),
            "v": ((narrow, config.hidden), 1.0),
            "o": ((config.hidden, wide), LOUD),
        }

    def project(self, x: torch.Tensor, turn: Rotation) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See :class:`.base.Attention`."""
        query = turn(in_heads(x @ self._w["q"].T, self._dim)) * self._dim**-0.5
        key = turn(in_heads(x @ self._w["k"].T, self._dim))
        value = in_heads(x @ self._w["v"].T, self._dim)
        return query, {"k": key, "v": value}

    def attend(self, x: torch.Tensor, query: torch.Tensor, pages: Weights, mask: torch.Tensor) -> torch.Tensor:
        """See :class:`.base.Attention`."""
        rows = len(query)
        # Query heads that share a key head become rows of one product: (kv_heads, share * R, dim).
        query = query.view(rows, self._kv_heads, self._share, self._dim).permute(1, 2, 0, 3).flatten(1, 2)
        key = pages["k"].float().transpose(0, 1)
        value = pages["v"].float().transpose(0, 1)
        scores = query @ key.transpose(1, 2)
        scores = scores.view(self._kv_heads, self._share, rows, -1).add_(mask).flatten(1, 2)
        mixed = scores.softmax(-1) @ value
        mixed = mixed.view(self._kv_heads, self._share, rows, -1).permute(2, 0, 1, 3).flatten(1)
        output: torch.Tensor = mixed @ self._w["o"].T
        return output
