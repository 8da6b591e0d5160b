"""What the attentions of all shapes have in common: their two halves, and the caches that they store into.

An attention of one layer has two halves, because a layer's KV may leave for the pool before its
attention ends: :meth:`Attention.project` makes the query and the rows to store, and
:meth:`Attention.attend` reads the pages of the whole context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from layerflow.engine.attention.tile import Rotation, TilePages

# Gains of the random initialisation. With scores this sharp every query looks at a few tokens instead
# of averaging over all of them, and with outputs this loud what it saw decides the next byte.
SHARP = 2.3
LOUD = 1.5
EPSILON = 1e-6
Weights = Mapping[str, torch.Tensor]
Shapes = dict[str, tuple[tuple[int, int], float]]


class Attention(Protocol):
    """One layer's attention. Shapes: R rows of the tile, K rows of the gathered context.

    A class of them has ``shapes(config, layer)``: its weights, name to (out, in) and the gain of their initialisation.
    """

    def project(self, x: torch.Tensor, turn: Rotation) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """From the normed hidden states ``(R, hidden)``: its own query, and the rows of each plane ``(R, ...)``."""
        ...

    def store(self, pages: TilePages, planes: dict[str, torch.Tensor]) -> None:
        """Write those of :meth:`project` that are computed now, and what follows from them."""
        ...

    def context(self, pages: TilePages) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """What :meth:`attend` reads: each plane's rows ``(K, *plane.shape)``, and its mask."""
        ...

    def attend(self, x: torch.Tensor, query: torch.Tensor, pages: Weights, mask: torch.Tensor) -> torch.Tensor:
        """Attention's output before the residual, ``(R, hidden)``.

        :param pages: each plane's rows.
        :param mask: float32 ``(R, K)``, 0 where a row may see a row of the context and -inf elsewhere.
        """
        ...


class TokenRows:
    """For attentions with one cache that has a row of every token.

    :param window: tokens that a query sees, itself included; 0 = all.
    """

    def __init__(self, window: int = 0) -> None:
        self._window = window

    def store(self, pages: TilePages, planes: dict[str, torch.Tensor]) -> None:
        """See :class:`Attention`."""
        pages.write(0, planes)

    def context(self, pages: TilePages) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """See :class:`Attention`."""
        first, mask = pages.tile.visible(self._window)
        return pages.gather(0, first), mask


def normed(x: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalisation (Zhang and Sennrich, 2019) over the last dimension, without a gain."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def in_heads(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``(R, heads * dim)`` as ``(R, heads, dim)``."""
    return x.view(len(x), -1, dim)
