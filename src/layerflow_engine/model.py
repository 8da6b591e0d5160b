"""The transformer: random fixed-seed weights, and a forward pass in tiles over a paged cache."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from layerflow_engine.attention import (
    Attention,
    CompressedAttention,
    GroupedQuery,
    LatentAttention,
    Shapes,
    Tile,
    TilePages,
    Weights,
    normed,
)
from layerflow_engine.cache import PagedCache
from layerflow_engine.config import VOCABULARY, EngineConfig
from layerflow_engine.connection import StepHooks
from layerflow_engine.request import TokenSpan

_ATTENTION: dict[str, type[GroupedQuery] | type[LatentAttention] | type[CompressedAttention]] = {
    "full": GroupedQuery,
    "sliding": GroupedQuery,
    "mla": LatentAttention,
    "compressed": CompressedAttention,
}


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


class Transformer:
    """Decoder-only, pre-norm, gated MLP, byte-level.

    :ivar weights: float32 tensors by name, ``layers.<i>.<name>``, ``embed`` and ``head``.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(config.seed)
        self.weights: dict[str, torch.Tensor] = {}
        self._layers: list[tuple[Attention, dict[str, torch.Tensor]]] = []
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
            own = {name: draw(*facts) for name, facts in (attention.shapes(config, layer) | mlp).items()}
            self.weights.update({f"layers.{layer}.{name}": tensor for name, tensor in own.items()})
            self._layers.append((attention(config, layer, own), own))
        self.weights["head"] = draw((VOCABULARY, config.hidden), 1.0)

    @torch.inference_mode()
    def forward(self, cache: PagedCache, spans: Sequence[TokenSpan], step: StepHooks) -> Forward:
        """Compute `spans` layer by layer, reading and writing `cache`, telling `step`.

        A request is computed on its own, tile by tile: its bits do not depend on who else is in the step.
        """
        tiles = [tile for span in spans for tile in self._tiles(span)]
        hidden = {tile: self.weights["embed"][tile.tokens] for tile in tiles}
        out, caches = Forward(), self.config.caches
        for layer, (attention, weights) in enumerate(self._layers):
            began = time.perf_counter()
            # Loaded blocks may also take new tokens, so nothing is written before every byte has arrived.
            for number in caches[layer]:
                out.failed.update(step.wait_layer(number))
            arrived = time.perf_counter()
            tiles = [tile for tile in tiles if tile.request.id not in out.failed]
            asked = []
            for tile in tiles:
                x, pages = normed(hidden[tile]), TilePages(cache, caches[layer], tile)
                query, planes = attention.project(x, tile.turn)
                attention.store(pages, planes)
                asked.append((tile, x, query, pages))
            for number in caches[layer]:
                step.layer_done(number)
            for tile, x, query, pages in asked:
                y = hidden[tile] + attention.attend(x, query, *attention.context(pages))
                hidden[tile] = y + _mlp(weights, normed(y))
            out.waited_s.append(arrived - began)
            out.computed_s.append(time.perf_counter() - arrived)
        for tile in tiles:
            if tile.stop == len(tile.request.prompt) + len(tile.request.output):
                last = hidden[tile][tile.stop - 1 - tile.base]
                out.logits[tile.request.id] = self.weights["head"] @ normed(last)
        return out

    def _tiles(self, span: TokenSpan) -> list[Tile]:
        request, size = span.request, self.config.tile
        if span.start >= len(request.prompt):
            return [Tile(request, span.start, 1, span.start, span.stop)]
        bases = range(span.start // size * size, span.stop, size)
        return [Tile(request, base, size, max(base, span.start), min(base + size, span.stop)) for base in bases]


def _mlp(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    gated = torch.nn.functional.silu(x @ weights["gate"].T) * (x @ weights["up"].T)
    return gated @ weights["down"].T
