"""Which part of a model a worker holds, as the keys of its objects say it."""

from __future__ import annotations

import functools

import msgspec

from layerflow.boxes.box import Box, Replica, replica_of, worker_box
from layerflow.errors import SpecError

MAX_LAYERS = 4096
MAX_SHARDS = 1024
"""A lookup asks for every shard's objects, so this bounds what one costs."""
MAX_HEADS = 256
"""KV heads of a model that are counted in keys."""


class Shard(msgspec.Struct, frozen=True, cache_hash=True):
    """Which part of the model a worker holds.

    Where `heads` and `stages` are known, objects are named by the layers and heads that they cover, not by ranks: ranks
    that hold the same ones store them once, and workers of other sizes can read them.

    :param heads: per group, KV heads of the model (:class:`layerflow.boxes.HeadAxis`): 1 = planes without a head axis,
        0 = not to be cut, so each tensor rank has its own objects and its size is a fact of the keys. () = all 0.
    :param stages: per group, how many of its layers each pipeline stage has. () = one stage has all, or, with
        ``pp_size`` above 1, it is not known and each stage has its own objects.
    :param drafts: per group, which draft model's layers these are: all that its cached bytes depend on besides the
        model; empty = the model's own. () = there are none.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    heads: tuple[int, ...] = ()
    stages: tuple[tuple[int, ...], ...] = ()
    drafts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size <= 0xFFFF and 0 <= self.pp_rank < self.pp_size <= 0xFFFF):
            raise SpecError(
                f"shard tp {self.tp_rank}/{self.tp_size}, pp {self.pp_rank}/{self.pp_size}: "
                "every rank must be at least 0 and below its size"
            )
        if self.workers > MAX_SHARDS:
            raise SpecError(f"shard tp {self.tp_size} x pp {self.pp_size}: at most {MAX_SHARDS} shards of one model")
        if any(not 0 <= heads <= MAX_HEADS for heads in self.heads):
            raise SpecError(f"shard: heads {self.heads} of its groups must be 0 to {MAX_HEADS}")
        for layers in self.stages:
            if len(layers) != self.pp_size or min(layers) < 1 or sum(layers) > MAX_LAYERS:
                raise SpecError(
                    f"shard: a group has {layers} layers on its pipeline stages; {self.pp_size} positive numbers "
                    f"belong, at most {MAX_LAYERS} together: a stage without a layer of some group is not supported"
                )

    @property
    def workers(self) -> int:
        """Of one instance of the model."""
        return self.tp_size * self.pp_size

    def heads_of(self, group: int) -> int:
        """KV heads that boxes of a group count; 0 = it cannot be cut."""
        return self.heads[group] if self.heads else 0

    def draft_of(self, group: int) -> str:
        """Which draft model's layers a group has; empty = the model's own."""
        return self.drafts[group] if self.drafts else ""

    def span_of(self, group: int) -> tuple[int, int, int]:
        """First and end layer of this stage within a group, and the group's layers; ends of 0 = all of them."""
        if not self.stages:
            return 0, 0, 0
        before, layers = sum(self.stages[group][: self.pp_rank]), self.stages[group]
        return before, before + layers[self.pp_rank], sum(layers)

    @property
    def shareable(self) -> bool:
        """Workers of other tensor and pipeline sizes can read its objects, and it theirs."""
        return bool(self.stages) and all(self.heads) and bool(self.heads)

    def box(self, group: int) -> Box:
        """The layers and heads of a group that are here; `stages` must be known."""
        first, end, _ = self.span_of(group)
        return worker_box((first, end), self.heads_of(group) or self.tp_size, self.tp_rank, self.tp_size)

    def copy_of(self, group: int) -> Replica:
        """Which of the tensor ranks that have the same objects of a group this is."""
        heads = self.heads_of(group)
        return replica_of(heads, self.tp_rank, self.tp_size) if heads else Replica(0, 1)

    def peers(self) -> tuple[Shard, ...]:
        """The shards that make up the model, tensor ranks innermost; of those that hold the same, the first."""
        return _peers(self.tp_size, self.pp_size, self.heads, self.stages, self.drafts)


@functools.lru_cache(256)
def _peers(
    tp_size: int, pp_size: int, heads: tuple[int, ...], stages: tuple[tuple[int, ...], ...], drafts: tuple[str, ...]
) -> tuple[Shard, ...]:
    first: dict[tuple[int, ...], int] = {}
    for tp in range(tp_size):
        held = tuple(worker_box((0, 1), count or tp_size, tp, tp_size).first_head for count in heads or (0,))
        first.setdefault(held, tp)
    return tuple(
        Shard(tp, tp_size, pp, pp_size, heads, stages, drafts) for pp in range(pp_size) for tp in first.values()
    )
