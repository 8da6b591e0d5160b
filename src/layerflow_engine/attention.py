"""Attention in all shapes of the presets: grouped-query, latent with an indexer, compressed rows with a state.

An attention of one layer has two halves, because a layer's KV may leave for the pool before its
attention ends: :meth:`Attention.project` makes the query and the rows to store, and
:meth:`Attention.attend` reads the pages of the whole context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from layerflow_engine.cache import PagedCache
from layerflow_engine.config import ROW_SPAN, EngineConfig
from layerflow_engine.request import Request

# Rows of one request that are computed together: their positions, what they see, and their access to the cache.


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


# Grouped-query attention over gathered pages, causal or within a sliding window.


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
        """See :class:`Attention`."""
        query = turn(in_heads(x @ self._w["q"].T, self._dim)) * self._dim**-0.5
        key = turn(in_heads(x @ self._w["k"].T, self._dim))
        value = in_heads(x @ self._w["v"].T, self._dim)
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


# Multi-head latent attention with a sparse-attention indexer, after DeepSeek-V3.2-Exp.
#
# A token's cache is its latent, a rotary key that all heads share, and the indexer's key: int8 with one
# float16 scale. The indexer scores the context for each query and attention sees only the best part of it.


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
        """See :class:`Attention`."""
        query = (x @ self._w["q"].T).view(len(x), self._heads, -1) * (self._dim + self._rope) ** -0.5
        plain, turned = query[..., : self._dim], turn(query[..., self._dim :])
        absorbed = torch.einsum("rhd,hdl->rhl", plain, self._key_up)
        rope = turn((x @ self._w["rope"].T)[:, None])[:, 0]
        indexer, scale = quantise(x @ self._w["index_k"].T)
        rows = {"latent": x @ self._w["latent"].T, "rope": rope, "indexer": indexer, "scale": scale}
        return torch.cat((absorbed, turned), dim=-1), rows

    def attend(self, x: torch.Tensor, query: torch.Tensor, pages: Weights, mask: torch.Tensor) -> torch.Tensor:
        """See :class:`Attention`."""
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


# Attention over compressed rows, a window and a running state, after DeepSeek-V4's sparse layers.
#
# One key and value, which all heads share, is stored three ways. A window holds those of the last tokens. A compressed
# row stands for `ratio` tokens: a mean of what each of the last ``2 * ratio`` tokens offers, weighted by their scores,
# channel by channel, so that rows overlap. A token's offer and scores are the compressor's running state, which is kept
# until no row needs them. A query sees every row whose last token is not behind it, and the window.


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
        """See :class:`Attention`."""
        query = turn(in_heads(x @ self._w["q"].T, self._dim)) * self._dim**-0.5
        key = turn((x @ self._w["k"].T)[:, None])
        kv = torch.cat((key, (x @ self._w["v"].T)[:, None]), dim=1)
        state = torch.stack((x @ self._w["offer"].T, x @ self._w["score"].T), dim=1)
        return query, {"kv": kv, "state": state}

    def store(self, pages: TilePages, planes: dict[str, torch.Tensor]) -> None:
        """See :class:`Attention`: the window and the state, then the rows that have become whole."""
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
        """See :class:`Attention`: compressed rows first, then the window."""
        first, mask = pages.tile.visible(self._window)
        context = pages.gather_compressed(ROWS, self._ratio) | pages.gather(WINDOW, first)
        return context, torch.cat((pages.tile.visible_compressed(self._ratio), mask), dim=1)

    def attend(self, x: torch.Tensor, query: torch.Tensor, pages: Weights, mask: torch.Tensor) -> torch.Tensor:
        """See :class:`Attention`."""
        keys, values = torch.cat((pages["row"], pages["kv"])).float().unbind(1)
        scores = query.transpose(0, 1).flatten(0, 1) @ keys.T
        scores = scores.view(self._heads, len(x), -1).add_(mask)
        mixed = (scores.softmax(-1).flatten(0, 1) @ values).view(self._heads, len(x), -1)
        return mixed.transpose(0, 1).flatten(1) @ self._w["o"].T
