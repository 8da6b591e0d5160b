"""What prompts of a model take in the arena and on a worker's link, from the specs of its pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerflow.boxes import worker_box
from layerflow.objects import object_bytes
from layerflow.pool.slots import Slots
from layerflow.sizing.shapes import Shape, model_of
from layerflow.spec import GroupSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One cache group over all ranks and stages.

    :param layers: caches of the whole model in this group.
    :param copies: different parts that its tensor ranks store: each head once, however many ranks hold it.
    :param chunk_bytes: that a chunk takes in the arena, headers included.
    """

    group: GroupSpec
    layers: int
    copies: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a model stores.

    :param stages: what the first tensor rank of each pipeline stage registers.
    """

    shape: Shape
    stages: tuple[ModelSpec, ...]

    @property
    def chunk_tokens(self) -> int:
        """Tokens that are keyed and stored together."""
        return self.stages[0].chunk_tokens

    @property
    def workers(self) -> int:
        """Workers of one instance of the model."""
        return self.stages[0].shard.workers

    @property
    def groups(self) -> tuple[GroupSize, ...]:
        """The cache groups, in the order in which they are registered."""
        first = self.stages[0]
        return tuple(
            GroupSize(
                group,
                sum(len(stage.groups[number].layers) for stage in self.stages),
                _copies(first, number),
                self._stored(number, self.chunk_tokens),
            )
            for number, group in enumerate(first.groups)
        )

    @property
    def token_bytes(self) -> float:
        """Bytes of the arena that one token of a long prompt takes."""
        return sum(group.chunk_bytes for group in self.groups) / self.chunk_tokens

    def prompt_bytes(self, tokens: int) -> int:
        """Bytes of the arena that a prompt of so many tokens takes, its partial last chunk included."""
        whole, rest = divmod(tokens, self.chunk_tokens)
        numbers = range(len(self.stages[0].groups))
        found = whole * sum(self._stored(number, self.chunk_tokens) for number in numbers)
        return found + (sum(self._stored(number, rest) for number in numbers) if rest else 0)

    def prompt_objects(self, tokens: int) -> int:
        """Objects that a lookup of so many tokens asks for: chunks x groups x different parts."""
        chunks = -(-tokens // self.chunk_tokens)
        return chunks * sum(group.copies * len(self.stages) for group in self.groups)

    def step_objects(self, tokens: int) -> int:
        """Objects that one worker loads or saves of such a prompt."""
        return -(-tokens // self.chunk_tokens) * len(self.stages[0].groups)

    def load_bytes(self, tokens: int) -> int:
        """Bytes that one worker loads for a hit of so many tokens: of the stage that loads most.

        Of sliding windows the blocks that the next token sees, of recurrent state the last.
        """
        return max(sum(_loaded(group, tokens) for group in stage.groups) for stage in self.stages)

    def tokens_in(self, arena_bytes: int) -> int:
        """Tokens of long prompts that an arena of so many bytes holds, with what its allocator leaves unused."""
        slots = Slots(arena_bytes)
        chunk = sum(
            _copies(stage, number) * slots.footprint(self._object_bytes(stage, number, self.chunk_tokens))
            for stage in self.stages
            for number in range(len(stage.groups))
        )
        return int(slots.capacity_bytes / chunk) * self.chunk_tokens

    def prompts_in(self, arena_bytes: int, tokens: int) -> int:
        """Prompts of so many tokens that such an arena holds."""
        return self.tokens_in(arena_bytes) // (-(-tokens // self.chunk_tokens) * self.chunk_tokens)

    def _stored(self, number: int, tokens: int) -> int:
        """Bytes of the objects of one chunk with so many tokens in a group: all stages, each part once."""
        return sum(self._object_bytes(stage, number, tokens) * _copies(stage, number) for stage in self.stages)

    @staticmethod
    def _object_bytes(stage: ModelSpec, number: int, tokens: int) -> int:
        group = stage.groups[number]
        return object_bytes(group, len(group.rules.keep(tokens)))


def capacity_of(shape: Shape, *, tp: int = 1, pp: int = 1, block_tokens: int, chunk_tokens: int = 0) -> Capacity:
    """Return what a model stores when it runs on so many ranks.

    :param chunk_tokens: 0 = as the connector chooses it.
    :raises ConfigError: heads or layers cannot be spread over so many ranks.
    :raises SpecError: the chunk is no multiple of a block.
    """
    stages = tuple(
        model_of(shape, tp=tp, pp=pp, block_tokens=block_tokens, chunk_tokens=chunk_tokens, pp_rank=rank)
        for rank in range(pp)
    )
    return Capacity(shape, stages)


def _copies(spec: ModelSpec, number: int) -> int:
    """How many different parts of a group the tensor ranks hold."""
    size = spec.shard.tp_size
    heads = spec.shard.heads_of(number) or size
    return len({worker_box((0, 1), heads, rank, size) for rank in range(size)})


def _loaded(group: GroupSpec, tokens: int) -> int:
    rules, block = group.rules, group.block_size
    blocks = -(-tokens // block) - rules.first_token(tokens) // block
    return len(group.layers) * max(0, blocks) * group.bytes_per_block


def widest(stages: Sequence[ModelSpec], tokens: int) -> int:
    """Return the bytes of the largest layer that a worker loads for a hit of so many tokens."""
    return max(_loaded(group, tokens) // len(group.layers) for stage in stages for group in stage.groups)
