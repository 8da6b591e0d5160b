"""What a reference engine is made of: model sizes, cache groups and step sizes; and the presets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from layerflow.content import content_of_tensors
from layerflow.spec import DEFAULT_CHUNK_TOKENS, DTYPE_BYTES, GroupSpec, ModelSpec, Plane

VOCABULARY = 256  # tokens are bytes
ROW_SPAN = 2  # a compressed row is made of the tokens that it stands for, and of as many before them


class PlaneSize(NamedTuple):
    """One plane of a layer's cache: elements that one token has, and torch's dtype name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Of one token, or of one compressed row."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class CacheGroup(NamedTuple):
    """Caches of equal kind that share a block table.

    :param kind: layerflow's: ``"full"``, ``"mla"`` or ``"sliding"``.
    :param layers: their numbers among all caches of the model (:attr:`EngineConfig.caches`).
    :param window: tokens that a query sees, itself included; 0 = all.
    :param block_size: tokens of one block.
    :param ratio: tokens that one row stands for.
    """

    kind: str
    layers: tuple[int, ...]
    planes: tuple[PlaneSize, ...]
    window: int
    block_size: int
    ratio: int = 1

    @property
    def rows(self) -> int:
        """Of a block in each plane."""
        return self.block_size // self.ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """A decoder-only transformer with random weights, and the paged cache that it runs on.

    :param kinds: one attention per layer: ``"full"``, ``"mla"``, ``"sliding"``, or ``"compressed"``, which has three
        caches: a window, compressed rows, and the compressor's running state.
    :param kv_heads: heads of k and v; `heads` is a multiple of it (grouped-query attention).
    :param window: uncompressed tokens that a sliding or compressed layer's query sees, itself included.
    :param ratios: by layer: tokens of a compressed row, 0 = not compressed; () = no layer is.
    :param row_block: tokens of one block of compressed rows.
    :param state_block: tokens of one block of a compressor's state.
    :param latent_rank: width of the latent from which an MLA layer's keys and values are made.
    :param rope_dim: width of an MLA layer's shared rotary key; even.
    :param index_heads: query heads of an MLA layer's indexer, which has one key head.
    :param index_dim: width of the indexer's int8 keys.
    :param index_floor: the indexer never leaves a query fewer tokens than this to attend to.
    :param block_size: tokens of one block.
    :param num_blocks: blocks of each group's planes, or, where layers are compressed, of the one allocation that all
        groups share; block 0 is the null block.
    :param max_positions: longest prompt with its answer, in tokens.
    :param tile: tokens of one prefill tile. Tiles lie at absolute positions and always have this
        shape, so that a token's KV has the same bits whether or not its prefix was cached.
    :param step_tokens: token budget of one step; a multiple of `tile`.
    :param dtype: of the k, v, kv, row, latent and rope planes; a compressor's state is float32. Compute is float32
        throughout.
    """

    name: str
    kinds: tuple[str, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    window: int = 0
    ratios: tuple[int, ...] = ()
    row_block: int = 64
    state_block: int = 8
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
        if not self.kinds or set(self.kinds) - {"full", "mla", "sliding", "compressed"}:
            raise ValueError(
                f"{self.name}: kinds {self.kinds} must name full, mla, sliding or compressed for every layer"
            )
        if self.heads % self.kv_heads or self.head_dim % 2 or self.rope_dim % 2:
            raise ValueError(f"{self.name}: heads must be a multiple of kv_heads; head_dim and rope_dim even")
        if self.tile % self.block_size or self.step_tokens % self.tile or self.step_tokens <= 0:
            raise ValueError(
                f"{self.name}: tile {self.tile} must be a multiple of block_size {self.block_size}, and "
                f"step_tokens {self.step_tokens} a multiple of the tile"
            )
        if bool({"sliding", "compressed"} & set(self.kinds)) != (self.window > 0):
            raise ValueError(f"{self.name}: kinds {set(self.kinds)} and a window of {self.window} do not go together")
        ratios = self.ratios or (0,) * len(self.kinds)
        if [kind == "compressed" for kind in self.kinds] != [ratio > 1 for ratio in ratios]:
            raise ValueError(f"{self.name}: ratios {self.ratios} must be above 1 in compressed layers, 0 in others")
        if any(self.row_block % ratio or self.tile % ratio for ratio in self.ratios if ratio):
            raise ValueError(
                f"{self.name}: ratios {self.ratios} must divide row_block {self.row_block} and the tile {self.tile}"
            )
        if "mla" in self.kinds and not (self.latent_rank and self.rope_dim):
            raise ValueError(f"{self.name}: mla layers need latent_rank and rope_dim")

    @property
    def num_layers(self) -> int:
        """Layers of the model; all of them are cached."""
        return len(self.kinds)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups, in the order in which the layers first need them."""
        return _caches(self)[1]

    @property
    def caches(self) -> tuple[tuple[int, ...], ...]:
        """By layer, the numbers of its caches: what layerflow, which knows no model, calls layers."""
        return _caches(self)[0]

    @property
    def packed(self) -> bool:
        """All groups share one allocation, as vLLM does it for models whose layers have several caches: a block is of
        one group at a time.
        """
        return "compressed" in self.kinds

    def parts(self, layer: int) -> tuple[CacheGroup, ...]:
        """The caches of one layer, each as a group that nothing else is in yet."""
        kind = self.kinds[layer]
        if kind == "compressed":
            ratio, kv = self.ratios[layer], (2, self.head_dim)
            state = PlaneSize("state", "float32", (2, 2 * self.head_dim))
            return (
                CacheGroup("sliding", (), (PlaneSize("kv", self.dtype, kv),), self.window, self.block_size),
                CacheGroup("mla", (), (PlaneSize("row", self.dtype, kv),), 0, self.row_block, ratio),
                CacheGroup("sliding", (), (state,), ROW_SPAN * ratio, self.state_block),
            )
        if kind == "mla":
            planes: tuple[PlaneSize, ...] = (
                PlaneSize("latent", self.dtype, (self.latent_rank,)),
                PlaneSize("rope", self.dtype, (self.rope_dim,)),
                PlaneSize("indexer", "int8", (self.index_dim,)),
                PlaneSize("scale", "float16", (1,)),
            )
        else:
            planes = tuple(PlaneSize(name, self.dtype, (self.kv_heads, self.head_dim)) for name in ("k", "v"))
        return (CacheGroup(kind, (), planes, self.window if kind == "sliding" else 0, self.block_size),)


@functools.cache
def _caches(config: EngineConfig) -> tuple[tuple[tuple[int, ...], ...], tuple[CacheGroup, ...]]:
    members: dict[CacheGroup, list[int]] = {}
    numbers = itertools.count()
    caches: list[tuple[int, ...]] = []
    for layer in range(config.num_layers):
        own = [(part, next(numbers)) for part in config.parts(layer)]
        for part, number in own:
            members.setdefault(part, []).append(number)
        caches.append(tuple(number for _, number in own))
    return tuple(caches), tuple(part._replace(layers=tuple(layers)) for part, layers in members.items())


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
COMPRESSED = dataclasses.replace(
    GQA,
    name="compressed",
    kinds=("compressed",) * 12,
    ratios=(32, 4) * 6,
    kv_heads=1,
    heads=4,
    head_dim=512,
    window=128,
    state_block=16,
    num_blocks=512,
)

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
TINY_COMPRESSED = dataclasses.replace(
    TINY_GQA,
    name="tiny-compressed",
    kinds=("compressed",) * 4,
    ratios=(16, 4, 4, 16),
    kv_heads=1,
    window=20,
    row_block=32,
    state_block=4,
    num_blocks=400,
)

PRESETS = {
    config.name: config for config in (GQA, MLA, HYBRID, COMPRESSED, TINY_GQA, TINY_MLA, TINY_HYBRID, TINY_COMPRESSED)
}


# What the reference engine caches, precisely enough that equal keys mean equal bytes.


_BESIDE_THE_CONTENT = ("name", "num_blocks", "max_positions", "step_tokens")  # they change no cached bytes


def model_spec(
    config: EngineConfig, weights: Mapping[str, torch.Tensor], chunk_tokens: int = DEFAULT_CHUNK_TOKENS
) -> ModelSpec:
    """What this engine caches, so that any engine with the same bytes computes the same keys."""
    facts = {name: value for name, value in dataclasses.asdict(config).items() if name not in _BESIDE_THE_CONTENT}
    groups = tuple(
        GroupSpec(g.kind, g.block_size, g.layers, tuple(Plane(*plane) for plane in g.planes), g.window, ratio=g.ratio)
        for g in config.groups
    )
    return ModelSpec(
        config.name,
        content_of_tensors(facts, weights),
        groups,
        attention="layerflow-reference/1",
        chunk_tokens=chunk_tokens,
    )
