"""What the demo runs: models, prompts of real text, and an emulated link that suits this machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from layerflow.errors import ConfigError
from layerflow.kinds import KINDS, Kind
from layerflow_engine import PRESETS, EngineConfig
from layerflow_engine.config import CacheGroup
from layerflow_engine.texts import QUESTIONS, passage

SHAPES = {
    "gqa": "grouped-query attention",
    "mla": "latent attention with a sparse indexer",
    "hybrid": "sliding window + full attention",
    "compressed": "compressed rows, a window and a running state in every layer, packed into one allocation",
}
MAX_NEW_TOKENS = 8
TRANSFER_SHARE = 0.4
"""The default link takes so much of a hit's own compute: visible, and possible to hide."""


def chosen_shapes(names: Iterable[str]) -> list[str]:
    """Of :data:`SHAPES`, in their order; all where none is named.

    :raises ConfigError: there is no such shape.
    """
    wanted = set(names)
    if unknown := sorted(wanted - set(SHAPES)):
        raise ConfigError(f"--shape {unknown[0]}: no such shape; there are: {', '.join(SHAPES)}")
    return [shape for shape in SHAPES if not wanted or shape in wanted]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens; a token is a byte.

    :param prefix: shared by all prompts of a run; whole chunks and whole steps.
    :param suffix: what differs. Shorter than a chunk, and partial chunks are not stored, so that every
        hit is exactly the prefix and the suffix is always left to compute.
    """

    prefix: int
    suffix: int
    chunk: int


FULL = Sizes(prefix=1536, suffix=256, chunk=512)
QUICK = Sizes(prefix=384, suffix=96, chunk=128)


@dataclass(frozen=True, slots=True)
class Workload:
    """One cache shape's model and prompts.

    :param salt: put before every text, so that a pool in use has not seen it.
    """

    shape: str
    config: EngineConfig
    sizes: Sizes
    salt: str = ""

    @classmethod
    def of(cls, shape: str, quick: bool, salt: str = "") -> Workload:
        """The demo's model for a shape, with a cache for one prompt at a time."""
        sizes = QUICK if quick else FULL
        config = PRESETS[f"tiny-{shape}" if quick else shape]
        tokens = sizes.prefix + sizes.suffix + MAX_NEW_TOKENS
        # All of a prompt, since saves may still read what has left a window; groups that share memory share its blocks.
        needs = [-(-tokens // group.block_size) for group in config.groups]
        blocks = sum(needs) * 9 // 8 if config.packed else max(needs) * 3 // 2
        return cls(shape, dataclasses.replace(config, num_blocks=blocks), sizes, salt)

    @property
    def prompt_tokens(self) -> int:
        """Of every prompt."""
        return self.sizes.prefix + self.sizes.suffix

    @property
    def handed_tokens(self) -> int:
        """Of a prompt, that another engine can load: all but the last, or as many as end with a compressed row."""
        left = self.prompt_tokens - 1
        return left - left % math.lcm(*(group.ratio for group in self.config.groups))

    def prompt(self, run: int, question: int) -> str:
        """A passage that belongs to the run, then a question about it.

        :param question: 0 or 1; the prompts of a run share the passage and nothing else.
        """
        prefix = (self.salt + passage(self.sizes.prefix, run * self.sizes.prefix))[: self.sizes.prefix]
        asked = QUESTIONS[(2 * run + question) % len(QUESTIONS)]
        other = passage(self.sizes.suffix, 20_000 + (2 * run + question) * self.sizes.suffix)
        return (
            prefix + (f"\n\n[{question + 1}] Compare it with this: {other}")[: self.sizes.suffix - len(asked)] + asked
        )

    def loaded_blocks(self, layer: int, tokens: int = 0) -> range:
        """Block numbers that a hit of so many tokens loads of a cache (:attr:`EngineConfig.caches`), whole ones.

        :param tokens: 0 = the prefix.
        """
        group, hit = self._group_of(layer), tokens or self.sizes.prefix
        return range(rules_of(group).first_token(hit) // group.block_size, hit // group.block_size)

    @property
    def prefix_bytes(self) -> int:
        """What a hit loads, all layers."""
        return sum(
            len(self.loaded_blocks(layer)) * _block_bytes(group)
            for group in self.config.groups
            for layer in group.layers
        )

    @property
    def stored_bytes(self) -> int:
        """What one run stores: of each chunk all blocks, or those that a window before its end touches."""
        chunks, size = self.sizes.prefix // self.sizes.chunk, self.sizes.chunk
        return sum(
            chunks * len(rules_of(group).keep(size)) * _block_bytes(group) * len(group.layers)
            for group in self.config.groups
        )

    def _group_of(self, layer: int) -> CacheGroup:
        return next(group for group in self.config.groups if layer in group.layers)


def rules_of(group: CacheGroup) -> Kind:
    """What of a group's blocks a hit needs, and what is kept of a chunk."""
    return KINDS[group.kind](group.block_size, group.window, group.ratio)


def _block_bytes(group: CacheGroup) -> int:
    return group.rows * sum(plane.row_bytes for plane in group.planes)


def suitable_link(hits: Iterable[tuple[Workload, float]]) -> float:
    """GB/s (10^9 bytes) at which no shape's transfer takes more than :data:`TRANSFER_SHARE` of a hit's compute.

    :param hits: per shape: seconds of compute that a hit leaves.
    """
    needed = max(workload.prefix_bytes / (TRANSFER_SHARE * seconds) / 1e9 for workload, seconds in hits)
    return float(f"{needed:.2g}")
