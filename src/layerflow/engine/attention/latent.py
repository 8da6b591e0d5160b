"""Multi-head latent attention with a sparse-attention indexer, after DeepSeek-V3.2-Exp.

A token's cache is its latent, a rotary key that all heads share, and the indexer's key: int8 with one
float16 scale. The indexer scores the context for each query and attention sees only the best part of it.
"""

from __future__ import annotations

import math

import torch

from layerflow.engine.attention.base import LOUD, SHARP, Shapes, TokenRows, Weights
from layerflow.engine.attention.tile import Rotation
from layerflow.engine.config import EngineConfig

KEEP_SHARE = 0.5  # of the context, counted in whole tiles, that a query may attend to


class LatentAttention(TokenRows):
    """Queries are absorbed into the latent space, so that keys and values are never expanded."""

    def __init__(self, config: EngineConfig, layer: int, weights: Weights) -> None:
        super().__init__()
        self._w = weights
        self._heads, self._dim = config.heads, config.head_dim
        self._rank, self._rope = config.latent_rank, config.rope_dim
        self._index_dim, self._floor, self._tile = config.index_dim, config.index_floor, config.tile
        self._key_up = weights["key_up"].view(self._heads, self._dim, self._rank)
        self._value_up = weights["value_up"].view(self._heads, self._dim, self._rank)

    @staticmethod
    def shapes(config: EngineConfig, layer: int) -> Shapes:
        """Its weights, the same in every layer."""
        wide = config.heads * config.head_dim
        return {
            "q": ((config.heads * (config.head_dim + config.rope_dim), config.hidden), SHARP),
            "latent": ((config.latent_rank, config.hidden), 1.0),
            "rope": ((config.rope_dim, config.hidden), SHARP),
            "key_up": ((wide, config.latent_rank), SHARP),
            "value_up": ((wide, config.latent_rank), 1.0),
            "o": ((config.hidden, wide), LOUD),
            "index_q": ((config.index_heads * config.index_dim, config.hidden), 1.0),
            "index_k": ((config.index_dim, config.hidden), 1.0),
            "index_mix": ((config.index_heads, config.hidden), 1.0),
        }

    def project(self, x: torch.Tensor, turn: Rotation) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See :class:`.base.Attention`."""
        query = (x @ self._w["q"].T).view(len(x), self._heads, -1) * (self._dim + self._rope) ** -0.5
        plain, turned = query[..., : self._dim], turn(query[..., self._dim :])
        absorbed = torch.einsum("rhd,hdl->rhl", plain, self._key_up)
        rope = turn((x @ self._w["rope"].T)[:, None])[:, 0]
        indexer, scale = quantise(x @ self._w["index_k"].T)
        rows = {"latent": x @ self._w["latent"].T, "rope": rope, "indexer": indexer, "scale": scale}
        return torch.cat((absorbed, turned), dim=-1), rows

    def attend(self, x: torch.Tensor, query: torch.Tensor, pages: Weights, mask: torch.Tensor) -> torch.Tensor:
        """See :class:`.base.Attention`."""
        latent = pages["latent"].float()
        keys = torch.cat((latent, pages["rope"].float()), dim=-1)
        chosen = self._select(self.index_scores(x, pages), mask)
        scores = query.transpose(0, 1).flatten(0, 1) @ keys.T
        scores = scores.view(self._heads, len(x), -1).add_(chosen)
        mixed = (scores.softmax(-1).flatten(0, 1) @ latent).view(self._heads, len(x), -1)
        return torch.einsum("hrl,hdl->rhd", mixed, self._value_up).flatten(1) @ self._w["o"].T

    def index_scores(self, x: torch.Tensor, pages: Weights) -> torch.Tensor:
        """How much each row wants each token, float32 ``(R, K)``: the heads' rectified products, mixed."""
        query = (x @ self._w["index_q"].T).view(len(x), -1, self._index_dim)
        mix = x @ self._w["index_mix"].T
        keys = pages["indexer"].float() * pages["scale"].float()
        return torch.einsum("rhk,rh->rk", (query @ keys.T).relu_(), mix)

    def _select(self, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask`, with -inf also at visible tokens that are not among a row's best.

        A tie with the last chosen token is chosen too, so that the order of equal scores cannot matter.
        """
        keys = mask.shape[1]
        tiles = -(-keys // self._tile)
        chosen = max(self._floor, math.ceil(tiles * self._tile * KEEP_SHARE))
        if chosen >= keys:
            return mask
        wanted = wanted + mask
        threshold = wanted.kthvalue(keys - chosen + 1, dim=-1, keepdim=True).values
        return mask.masked_fill(wanted < threshold, -math.inf)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 ``(R, dim)`` to int8 ``(R, dim)`` and float16 scales ``(R, 1)``."""
    scale = (rows.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6).half()
    return (rows / scale.float()).round().clamp(-127, 127).to(torch.int8), scale
