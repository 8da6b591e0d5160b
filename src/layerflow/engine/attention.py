"""Grouped-query attention over gathered pages, causal or within a sliding window; and shared pieces.

An attention of one layer has two halves, because a layer's KV may leave for the pool before its
attention ends: :meth:`Attention.project` makes the query and the rows to store, and
:meth:`Attention.attend` reads the pages of the whole context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch

from layerflow.engine.config import EngineConfig

ROPE_BASE = 10_000.0
# Gains of the random initialisation. With scores this sharp every query looks at a few tokens instead
# of averaging over all of them, and with outputs this loud what it saw decides the next byte.
SHARP = 2.3
LOUD = 1.5
Weights = Mapping[str, torch.Tensor]
Shapes = dict[str, tuple[tuple[int, int], float]]


class Attention(Protocol):
    """One layer's attention. Shapes: R rows of the tile, K tokens of the gathered context."""

    @staticmethod
    def shapes(config: EngineConfig) -> Shapes:
        """Its weights: name to (out, in) and the gain of their initialisation."""
        ...

    def project(self, x: torch.Tensor, turn: Rotation) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """From the normed hidden states ``(R, hidden)``: its own query, and the rows of each plane ``(R, ...)``."""
        ...

    def attend(self, x: torch.Tensor, query: torch.Tensor, pages: Weights, mask: torch.Tensor) -> torch.Tensor:
        """Attention's output before the residual, ``(R, hidden)``.

        :param pages: each plane's rows, ``(K, *plane.shape)``.
        :param mask: float32 ``(R, K)``, 0 where a row may see a token and -inf elsewhere.
        """
        ...


class Rotation:
    """Rotary position embedding (Su et al., RoFormer, 2021) of some positions.

    :param positions: int64 ``(R,)``.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions.to(torch.float32)
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn float32 ``(R, heads, dim)``."""
        half = x.shape[-1] // 2
        if half not in self._tables:
            frequencies = ROPE_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
            angles = self._positions[:, None, None] * frequencies
            self._tables[half] = (angles.cos(), angles.sin())
        cos, sin = self._tables[half]
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def visibility(rows: range, keys: range, window: int) -> torch.Tensor:
    """The mask of :meth:`Attention.attend` for positions `rows` and `keys`.

    :param window: tokens that a row sees, itself included; 0 = all.
    """
    row = torch.arange(rows.start, rows.stop)[:, None]
    key = torch.arange(keys.start, keys.stop)
    hidden = key > row
    if window:
        hidden |= key <= row - window
    return torch.zeros(len(rows), len(keys)).masked_fill_(hidden, -math.inf)


class GroupedQuery:
    """Attention with fewer key and value heads than query heads (Ainslie et al., GQA, 2023)."""

    def __init__(self, config: EngineConfig, weights: Weights) -> None:
        self._w = weights
        self._kv_heads, self._dim = config.kv_heads, config.head_dim
        self._share = config.heads // config.kv_heads

    @staticmethod
    def shapes(config: EngineConfig) -> Shapes:
        """See :class:`Attention`."""
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return {
            "q": ((wide, config.hidden), SHARP),
            "k": ((narrow, config.hidden), SHARP),
            "v": ((narrow, config.hidden), 1.0),
            "o": ((config.hidden, wide), LOUD),
        }

    def project(self, x: torch.Tensor, turn: Rotation) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See :class:`Attention`."""
        query = turn(_heads(x @ self._w["q"].T, self._dim)) * self._dim**-0.5
        key = turn(_heads(x @ self._w["k"].T, self._dim))
        value = _heads(x @ self._w["v"].T, self._dim)
        return query, {"k": key, "v": value}

    def attend(self, x: torch.Tensor, query: torch.Tensor, pages: Weights, mask: torch.Tensor) -> torch.Tensor:
        """See :class:`Attention`."""
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


def _heads(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.view(len(x), -1, dim)
