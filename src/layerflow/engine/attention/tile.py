"""Rows of one request that are computed together: their positions, what they see, and their access to the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from layerflow.engine.cache import PagedCache
from layerflow.engine.request import Request

ROPE_BASE = 10_000.0


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


class Tile:
    """Rows of one request at fixed positions, of which ``[start, stop)`` are computed now.

    The other rows of a prefill tile only keep its shape: nothing of them is stored.

    :ivar base: the first row's position; `end` is behind the last one.
    :ivar turn: rotates to the rows' positions.
    """

    def __init__(self, request: Request, base: int, rows: int, start: int, stop: int) -> None:
        self.request, self.base, self.start, self.stop = request, base, start, stop
        self.end = base + rows
        self.tokens = torch.from_numpy(request.tokens(base, self.end))
        self.turn = Rotation(torch.arange(base, self.end))
        self._visible: dict[int, tuple[int, torch.Tensor]] = {}
        self._compressed: dict[int, torch.Tensor] = {}
        self._compressed_turns: dict[int, Rotation] = {}

    def visible(self, window: int) -> tuple[int, torch.Tensor]:
        """The first position that any row sees, and who sees which from there to the tile's end: float32 ``(R, K)``.

        :param window: tokens that a row sees, itself included; 0 = all.
        """
        if window not in self._visible:
            first = max(0, self.base - window + 1) if window else 0
            row = torch.arange(self.base, self.end)[:, None]
            key = torch.arange(first, self.end)
            hidden = key > row
            if window:
                hidden |= key <= row - window
            self._visible[window] = first, _mask(hidden)
        return self._visible[window]

    def visible_compressed(self, ratio: int) -> torch.Tensor:
        """Who sees which compressed rows: those whose last token is not behind it. Float32 ``(R, end // ratio)``."""
        if ratio not in self._compressed:
            last = (torch.arange(self.end // ratio) + 1) * ratio - 1
            self._compressed[ratio] = _mask(last > torch.arange(self.base, self.end)[:, None])
        return self._compressed[ratio]

    def compressed_turn(self, ratio: int) -> Rotation:
        """Rotates the compressed rows that end within this tile to their first tokens' positions."""
        if ratio not in self._compressed_turns:
            self._compressed_turns[ratio] = Rotation(torch.arange(self.base // ratio, self.end // ratio) * ratio)
        return self._compressed_turns[ratio]


def _mask(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)


class TilePages:
    """A tile's access to the caches of one layer.

    :param numbers: of these caches; methods count them from 0.
    """

    def __init__(self, cache: PagedCache, numbers: Sequence[int], tile: Tile) -> None:
        self.tile, self._cache, self._numbers = tile, cache, numbers

    def write(self, cache: int, planes: dict[str, torch.Tensor]) -> None:
        """Store what is computed now: planes of the whole tile, shape ``(R, *plane.shape)``."""
        tile, number = self.tile, self._numbers[cache]
        own = slice(tile.start - tile.base, tile.stop - tile.base)
        self._cache.write(number, self._table(number), tile.start, {name: rows[own] for name, rows in planes.items()})

    def gather(self, cache: int, first: int) -> dict[str, torch.Tensor]:
        """Rows of the positions `first` to the tile's end; zeros where they are not computed yet."""
        number = self._numbers[cache]
        return self._cache.gather(number, self._table(number), first, self.tile.end, self.tile.stop)

    def write_compressed(self, cache: int, ratio: int, planes: dict[str, torch.Tensor]) -> None:
        """As :meth:`write`: of the compressed rows that end within the tile, those that end in what is computed now."""
        tile, number = self.tile, self._numbers[cache]
        first, begin, end = (at // ratio for at in (tile.base, tile.start, tile.stop))
        if begin < end:
            own = {name: rows[begin - first : end - first] for name, rows in planes.items()}
            self._cache.write(number, self._table(number), begin, own)

    def gather_compressed(self, cache: int, ratio: int) -> dict[str, torch.Tensor]:
        """All compressed rows up to the tile's end; zeros where they are not computed yet."""
        number, tile = self._numbers[cache], self.tile
        return self._cache.gather(number, self._table(number), 0, tile.end // ratio, tile.stop // ratio)

    def _table(self, number: int) -> np.ndarray:
        return self.tile.request.tables[self._cache.group_of[number]]
