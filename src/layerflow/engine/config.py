"""What a reference engine is made of: model sizes, cache groups and step sizes; and the presets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

VOCABULARY = 256  # tokens are bytes


class PlaneSize(NamedTuple):
    """One plane of a layer's cache: elements that one token has, and torch's dtype name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class CacheGroup(NamedTuple):
    """Layers that share a block table.

    :param kind: ``"full"``, ``"mla"`` or ``"sliding"``.
    :param window: tokens that a query sees, itself included; 0 = all.
    """

    kind: str
    layers: tuple[int, ...]
    planes: tuple[PlaneSize, ...]
    window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """A decoder-only transformer with random weights, and the paged cache that it runs on.

    :param kinds: one cache kind per layer: ``"full"``, ``"mla"`` or ``"sliding"``.
    :param kv_heads: heads of k and v; `heads` is a multiple of it (grouped-query attention).
    :param window: tokens that a sliding layer's query sees, itself included.
    :param latent_rank: width of the latent from which an MLA layer's keys and values are made.
    :param rope_dim: width of an MLA layer's shared rotary key; even.
    :param index_heads: query heads of an MLA layer's indexer, which has one key head.
    :param index_dim: width of the indexer's int8 keys.
    :param index_floor: the indexer never leaves a query fewer tokens than this to attend to.
    :param block_size: tokens of one block.
    :param num_blocks: blocks of each group's planes; block 0 is the null block.
    :param max_positions: longest prompt with its answer, in tokens.
    :param tile: tokens of one prefill tile. Tiles lie at absolute positions and always have this
        shape, so that a token's KV has the same bits whether or not its prefix was cached.
    :param step_tokens: token budget of one step; a multiple of `tile`.
    :param dtype: of the k, v, latent and rope planes. Compute is float32 throughout.
    """

    name: str
    kinds: tuple[str, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    window: int = 0
    latent_rank: int = 0
    rope_dim: int = 0
    index_heads: int = 4
    index_dim: int = 64
    index_floor: int = 64
    block_size: int = 16
    num_blocks: int = 512
    max_positions: int = 4096
    tile: int = 64
    step_tokens: int = 512
    dtype: str = "float32"
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.kinds or set(self.kinds) - {"full", "mla", "sliding"}:
            raise ValueError(f"{self.name}: kinds {self.kinds} must name full, mla or sliding for every layer")
        if self.heads % self.kv_heads or self.head_dim % 2 or self.rope_dim % 2:
            raise ValueError(f"{self.name}: heads must be a multiple of kv_heads; head_dim and rope_dim even")
        if self.tile % self.block_size or self.step_tokens % self.tile or self.step_tokens <= 0:
            raise ValueError(
                f"{self.name}: tile {self.tile} must be a multiple of block_size {self.block_size}, and "
                f"step_tokens {self.step_tokens} a multiple of the tile"
            )
        if ("sliding" in self.kinds) != (self.window > 0):
            raise ValueError(f"{self.name}: sliding layers and a window of {self.window} tokens do not go together")
        if "mla" in self.kinds and not (self.latent_rank and self.rope_dim):
            raise ValueError(f"{self.name}: mla layers need latent_rank and rope_dim")

    @property
    def num_layers(self) -> int:
        """Layers of the model; all of them are cached."""
        return len(self.kinds)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups: one per kind, in the order in which the kinds first appear."""
        return tuple(
            CacheGroup(
                kind,
                tuple(layer for layer, other in enumerate(self.kinds) if other == kind),
                self._planes(kind),
                self.window if kind == "sliding" else 0,
            )
            for kind in dict.fromkeys(self.kinds)
        )

    def _planes(self, kind: str) -> tuple[PlaneSize, ...]:
        if kind == "mla":
            return (
                PlaneSize("latent", self.dtype, (self.latent_rank,)),
                PlaneSize("rope", self.dtype, (self.rope_dim,)),
                PlaneSize("indexer", "int8", (self.index_dim,)),
                PlaneSize("scale", "float16", (1,)),
            )
        return tuple(PlaneSize(name, self.dtype, (self.kv_heads, self.head_dim)) for name in ("k", "v"))


# Sized for one torch thread: a prompt of 1,500 tokens takes one to two seconds, and its KV is 40 to 70 MiB.
GQA = EngineConfig(name="gqa", kinds=("full",) * 12, hidden=256, heads=8, kv_heads=4, head_dim=128, mlp=512)
MLA = EngineConfig(
    name="mla",
    kinds=("mla",) * 12,
    hidden=256,
    heads=2,
    kv_heads=1,
    head_dim=128,
    mlp=512,
    latent_rank=512,
    rope_dim=64,
    index_heads=2,
)
HYBRID = dataclasses.replace(GQA, name="hybrid", kinds=("sliding", "sliding", "full") * 4, window=200)

TINY_GQA = EngineConfig(
    name="tiny-gqa",
    kinds=("full",) * 4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=96,
    block_size=8,
    num_blocks=96,
    max_positions=1024,
    tile=32,
    step_tokens=128,
)
TINY_MLA = dataclasses.replace(
    TINY_GQA,
    name="tiny-mla",
    kinds=("mla",) * 4,
    kv_heads=1,
    latent_rank=32,
    rope_dim=16,
    index_dim=16,
    index_floor=16,
)
TINY_HYBRID = dataclasses.replace(
    TINY_GQA, name="tiny-hybrid", kinds=("sliding", "sliding", "full", "sliding", "full"), window=44
)

PRESETS = {config.name: config for config in (GQA, MLA, HYBRID, TINY_GQA, TINY_MLA, TINY_HYBRID)}
