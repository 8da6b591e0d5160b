"""Which part of a model a worker holds, as its objects' keys say it, and which caches can be cut between heads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

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
        """How many workers one instance of the model has."""
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


# Which caches can be cut between heads, and by what a group is divided where they cannot.


class PlaneInterior(NamedTuple):
    """How one plane's block lies in a worker's memory.

    :param name: the plane's.
    :param heads: KV heads along its head axis; 0 = it has none.
    :param packing: physical order of a block's axes, outermost first, those of one element left out: H heads,
        N tokens, any others. ``"HND"`` is head-major. "" = known to its attention backend only.
    """

    name: str
    heads: int
    packing: str


class HeadAxis(NamedTuple):
    """What the heads of a group's boxes are.

    :param heads: of the whole model. Where heads cannot be cut, each tensor rank's share counts as one head.
    :param refusal: why heads cannot be cut, for log, metric and doctor; "" = they can. Then any tensor size reads what
        any other stored. Layers can be cut in either case.
    """

    heads: int
    refusal: str = ""


def head_axis(kind: str, planes: Sequence[PlaneInterior], model_heads: int, tp_size: int) -> HeadAxis:
    """Apply the rule of cutting to one group, as one of its workers registered it.

    :param kind: the group's cache kind.
    :param planes: all of the group's.
    :param model_heads: KV heads of the model in this group's layers, before they are spread over ranks.
    """
    without = [plane.name for plane in planes if not plane.heads]
    if kind != "state" and len(without) == len(planes):
        return HeadAxis(1)  # every rank holds the same bytes
    refusal = _refusal(kind, planes, without, model_heads, tp_size)
    return HeadAxis(tp_size, refusal) if refusal else HeadAxis(model_heads)


def _refusal(kind: str, planes: Sequence[PlaneInterior], without: list[str], model_heads: int, tp_size: int) -> str:
    if kind == "state":
        return "recurrent state is divided inside its tensors, so it serves the tensor size that stored it"
    if without:
        return (
            f"planes {without} have no head axis and the group's others do; declare them as two groups, so that "
            "what all ranks hold alike is stored once"
        )
    wanted = {model_heads // tp_size, -(-model_heads // tp_size)}
    for plane in planes:
        if plane.heads not in wanted:
            return (
                f"plane {plane.name!r} holds {plane.heads} heads where {model_heads} heads of the model over {tp_size} "
                f"tensor ranks make {max(wanted)}, so its head axis is not the model's KV heads"
            )
        if not plane.packing:
            return f"plane {plane.name!r} is packed in a way that only its attention backend knows"
        if plane.heads > 1 and not plane.packing.startswith("H"):
            return (
                f"plane {plane.name!r} is packed {plane.packing}: tokens outside of heads; ask the engine for a "
                "head-major layout (HND)"
            )
    return ""
