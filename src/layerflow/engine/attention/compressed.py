"""Attention over compressed rows, a window and a running state, after DeepSeek-V4's sparse layers.

One key and value, which all heads share, is stored three ways. A window holds those of the last tokens. A compressed
row stands for `ratio` tokens: a mean of what each of the last ``2 * ratio`` tokens offers, weighted by their scores,
channel by channel, so that rows overlap. A token's offer and scores are the compressor's running state, which is kept
until no row needs them. A query sees every row whose last token is not behind it, and the window.
"""

from __future__ import annotations

import math

import torch

from layerflow.engine.attention.base import LOUD, SHARP, Shapes, Weights, in_heads, normed
from layerflow.engine.attention.tile import Rotation, TilePages
from layerflow.engine.config import ROW_SPAN, EngineConfig

WINDOW, ROWS, STATE = range(3)  # the caches of a layer, as EngineConfig.caches lists them
SCORES = 1.5  # gain: a row is made of a few of its tokens, and not the mean of all
BIAS = 0.7  # how much the place within a row decides


class CompressedAttention:
    """See the module. Layers of one model may have different ratios."""

    def __init__(self, config: EngineConfig, layer: int, weights: Weights) -> None:
        self._w = weights
        self._heads, self._dim = config.heads, config.head_dim
        self._window, self._ratio = config.window, config.ratios[layer]

    @staticmethod
    def shapes(config: EngineConfig, layer: int) -> Shapes:
        """Its weights; those of the compressor depend on the layer's ratio."""
        wide, hidden, both = config.heads * config.head_dim, config.hidden, 2 * config.head_dim
        return {
            "q": ((wide, hidden), SHARP),
            "k": ((config.head_dim, hidden), SHARP),
            "v": ((config.head_dim, hidden), 1.0),
            "o": ((hidden, wide), LOUD),
            "offer": ((both, hidden), 1.0),
            "score": ((both, hidden), SCORES),
            "bias": ((ROW_SPAN * config.ratios[layer], both), BIAS * math.sqrt(both)),
        }

    def project(self, x: torch.Tensor, turn: Rotation) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See :class:`.base.Attention`."""
        query = turn(in_heads(x @ self._w["q"].T, self._dim)) * self._dim**-0.5
        key = turn((x @ self._w["k"].T)[:, None])
        kv = torch.cat((key, (x @ self._w["v"].T)[:, None]), dim=1)
        state = torch.stack((x @ self._w["offer"].T, x @ self._w["score"].T), dim=1)
        return query, {"kv": kv, "state": state}

    def store(self, pages: TilePages, planes: dict[str, torch.Tensor]) -> None:
        """See :class:`.base.Attention`: the window and the state, then the rows that have become whole."""
        pages.write(WINDOW, {"kv": planes["kv"]})
        pages.write(STATE, {"state": planes["state"]})
        tile, ratio = pages.tile, self._ratio
        first = tile.base // ratio
        count = tile.end // ratio - first
        if count:
            begin = (first + 1 - ROW_SPAN) * ratio
            states = pages.gather(STATE, max(0, begin))["state"]
            rows = self._compress(states, count, missing=max(0, -begin))
            rows[:, :1] = tile.compressed_turn(ratio)(rows[:, :1])
            pages.write_compressed(ROWS, ratio, {"row": rows})

    def _compress(self, states: torch.Tensor, count: int, missing: int) -> torch.Tensor:
        """The next `count` rows, ``(count, 2, dim)``: keys, not yet rotated, and values.

        :param states: float32 ``(tokens, 2, 2 * dim)``: offers and scores from the first row's first token on.
        :param missing: tokens of the first row that are before the prompt.
        """
        ratio, span = self._ratio, ROW_SPAN * self._ratio
        if missing:
            nothing = states.new_zeros(missing, *states.shape[1:])
            nothing[:, 1] = -math.inf
            states = torch.cat((nothing, states))
        tokens = states[: (count - 1) * ratio + span].unfold(0, span, ratio).permute(0, 3, 1, 2)
        weights = (tokens[:, :, 1] + self._w["bias"]).softmax(1)
        mixed = (weights * tokens[:, :, 0]).sum(1).view(count, 2, self._dim)
        rows = normed(mixed)
        rows[:, 0] *= SHARP
        return rows

    def context(self, pages: TilePages) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """See :class:`.base.Attention`: compressed rows first, then the window."""
        first, mask = pages.tile.visible(self._window)
        context = pages.gather_compressed(ROWS, self._ratio) | pages.gather(WINDOW, first)
        return context, torch.cat((pages.tile.visible_compressed(self._ratio), mask), dim=1)

    def attend(self, x: torch.Tensor, query: torch.Tensor, pages: Weights, mask: torch.Tensor) -> torch.Tensor:
        """See :class:`.base.Attention`."""
        keys, values = torch.cat((pages["row"], pages["kv"])).float().unbind(1)
        scores = query.transpose(0, 1).flatten(0, 1) @ keys.T
        scores = scores.view(self._heads, len(x), -1).add_(mask)
        mixed = (scores.softmax(-1).flatten(0, 1) @ values).view(self._heads, len(x), -1)
        return mixed.transpose(0, 1).flatten(1) @ self._w["o"].T
