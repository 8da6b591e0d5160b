"""The transformer: random fixed-seed weights, and a forward pass in tiles over a paged cache."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from layerflow.engine.attention import Attention, GroupedQuery, Rotation, Shapes, Weights, visibility
from layerflow.engine.cache import PagedCache
from layerflow.engine.config import VOCABULARY, EngineConfig
from layerflow.engine.connection import StepHooks
from layerflow.engine.mla import LatentAttention
from layerflow.engine.request import Request, TokenSpan

_ATTENTION: dict[str, type[GroupedQuery] | type[LatentAttention]] = {
    "full": GroupedQuery,
    "sliding": GroupedQuery,
    "mla": LatentAttention,
}
EPSILON = 1e-6


@dataclass(slots=True)
class Forward:
    """What one forward pass gave.

    :ivar logits: float32 ``(vocabulary,)`` of each request whose last known token was computed.
    :ivar failed: ids of requests that fell out because KV did not arrive.
    :ivar waited_s: per layer: seconds until its loaded KV was in place.
    :ivar computed_s: per layer: seconds of its own work.
    """

    logits: dict[str, torch.Tensor] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    waited_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)


class _Tile:
    """Rows of one request at fixed positions, of which ``[start, stop)`` are computed now.

    The other rows of a prefill tile only keep its shape: nothing of them is stored.
    """

    def __init__(self, config: EngineConfig, request: Request, base: int, rows: int, start: int, stop: int) -> None:
        self.request, self.base, self.start, self.stop = request, base, start, stop
        self.end = base + rows
        self.tokens = torch.from_numpy(request.tokens(base, self.end))
        self.turn = Rotation(torch.arange(base, self.end))
        self.masks: dict[int, tuple[int, torch.Tensor]] = {}
        for window in {group.window for group in config.groups}:
            first = max(0, base - window + 1) // config.block_size * config.block_size if window else 0
            self.masks[window] = (first, visibility(range(base, self.end), range(first, self.end), window))


class Transformer:
    """Decoder-only, pre-norm, gated MLP, byte-level.

    :ivar weights: float32 tensors by name, ``layers.<i>.<name>``, ``embed`` and ``head``.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(config.seed)
        self.weights: dict[str, torch.Tensor] = {}
        self._layers: list[tuple[Attention, dict[str, torch.Tensor]]] = []
        self._windows = {layer: group.window for group in config.groups for layer in group.layers}
        mlp: Shapes = {
            "gate": ((config.mlp, config.hidden), 1.0),
            "up": ((config.mlp, config.hidden), 1.0),
            "down": ((config.hidden, config.mlp), 1.0),
        }

        def draw(shape: tuple[int, int], gain: float) -> torch.Tensor:
            return torch.randn(shape, generator=generator).mul_(gain / math.sqrt(shape[1]))

        self.weights["embed"] = torch.randn((VOCABULARY, config.hidden), generator=generator)
        for layer, kind in enumerate(config.kinds):
            attention = _ATTENTION[kind]
            own = {name: draw(*facts) for name, facts in (attention.shapes(config) | mlp).items()}
            self.weights.update({f"layers.{layer}.{name}": tensor for name, tensor in own.items()})
            self._layers.append((attention(config, own), own))
        self.weights["head"] = draw((VOCABULARY, config.hidden), 1.0)

    @torch.inference_mode()
    def forward(self, cache: PagedCache, spans: Sequence[TokenSpan], step: StepHooks) -> Forward:
        """Compute `spans` layer by layer, reading and writing `cache`, telling `step`.

        A request is computed on its own, tile by tile: its bits do not depend on who else is in the step.
        """
        tiles = [tile for span in spans for tile in self._tiles(span)]
        hidden = {tile: self.weights["embed"][tile.tokens] for tile in tiles}
        out = Forward()
        for layer, (attention, weights) in enumerate(self._layers):
            began = time.perf_counter()
            # Loaded blocks may also take new tokens, so nothing is written before every byte has arrived.
            out.failed.update(step.wait_layer(layer))
            arrived = time.perf_counter()
            group, window = cache.group_of[layer], self._windows[layer]
            tiles = [tile for tile in tiles if tile.request.id not in out.failed]
            asked = []
            for tile in tiles:
                x = normed(hidden[tile])
                query, planes = attention.project(x, tile.turn)
                own = slice(tile.start - tile.base, tile.stop - tile.base)
                rows = {name: plane[own] for name, plane in planes.items()}
                cache.write(layer, tile.request.tables[group], tile.start, rows)
                asked.append((tile, x, query))
            step.layer_done(layer)
            for tile, x, query in asked:
                first, mask = tile.masks[window]
                pages = cache.gather(layer, tile.request.tables[group], first, tile.end, tile.stop)
                y = hidden[tile] + attention.attend(x, query, pages, mask)
                hidden[tile] = y + _mlp(weights, normed(y))
            out.waited_s.append(arrived - began)
            out.computed_s.append(time.perf_counter() - arrived)
        for tile in tiles:
            if tile.stop == len(tile.request.prompt) + len(tile.request.output):
                last = hidden[tile][tile.stop - 1 - tile.base]
                out.logits[tile.request.id] = self.weights["head"] @ normed(last)
        return out

    def _tiles(self, span: TokenSpan) -> list[_Tile]:
        request, size = span.request, self.config.tile
        if span.start >= len(request.prompt):
            return [_Tile(self.config, request, span.start, 1, span.start, span.stop)]
        bases = range(span.start // size * size, span.stop, size)
        return [
            _Tile(self.config, request, base, size, max(base, span.start), min(base + size, span.stop))
            for base in bases
        ]


def _mlp(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    gated = torch.nn.functional.silu(x @ weights["gate"].T) * (x @ weights["up"].T)
    return gated @ weights["down"].T


def normed(x: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalisation (Zhang and Sennrich, 2019) over the last dimension, without a gain."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
