"""A box, the box that a worker holds, and which of several equal workers stores a chunk."""

from __future__ import annotations

from typing import NamedTuple

from layerflow.errors import SpecError

TO_THE_END = 1 << 12
"""The end of a box that reaches to its group's last layer, however many layers there are: more than any group has."""


class Box(NamedTuple):
    """Layers x heads of one group of a model. Ends are exclusive.

    Layers are counted within the group over the whole model: layer 3 is the group's fourth, whichever pipeline stage
    has it. Heads are the model's KV heads. A group whose planes have no head axis (latent, indexer, their scales)
    counts as one head, which every tensor rank holds.
    """

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def heads(self) -> int:
        return self.end_head - self.first_head

    @property
    def cells(self) -> int:
        """Pairs of a layer and a head; 0 = the box is empty."""
        return max(0, self.layers) * max(0, self.heads)

    def overlap(self, other: Box) -> Box:
        """What both cover; of no cells where they do not meet."""
        return Box(
            max(self.first_layer, other.first_layer),
            min(self.end_layer, other.end_layer),
            max(self.first_head, other.first_head),
            min(self.end_head, other.end_head),
        )

    def encloses(self, other: Box) -> bool:
        """Covers all of a box that is not empty."""
        return self.overlap(other) == other

    def of_layers(self, count: int) -> Box:
        """The same box of a group that has `count` layers, where it reaches to whatever end the group has."""
        return self._replace(end_layer=count) if self.end_layer == TO_THE_END else self

    def __str__(self) -> str:
        layers, heads = _span(self.first_layer, self.end_layer), _span(self.first_head, self.end_head)
        return f"layers {layers}, heads {heads}"


class Replica(NamedTuple):
    """One of `copies` workers that hold the same bytes.

    :param number: from 0, ascending with the tensor rank.
    """

    number: int
    copies: int

    def stores(self, key: bytes) -> bool:
        """Is an object this worker's to store? It is exactly one's of the equal workers, each one's equally often.

        :param key: of the object, or its digest.
        """
        return self.copies == 1 or int.from_bytes(key[:8], "little") % self.copies == self.number


def worker_box(stage: tuple[int, int], heads: int, tp_rank: int, tp_size: int) -> Box:
    """What a tensor rank holds of a group.

    Heads are spread as evenly as contiguous shares allow; where there are fewer heads than ranks, neighbouring ranks
    hold the same one, as in vLLM and SGLang.

    :param stage: first and end layer of the worker's pipeline stage, as in :class:`Box`.
    :param heads: KV heads of the model; 1 for planes without a head axis.
    :raises SpecError: for a rank outside its size, no head or no layer.
    """
    if not (0 <= tp_rank < tp_size and heads > 0 and 0 <= stage[0] < stage[1]):
        raise SpecError(
            f"tensor rank {tp_rank} of {tp_size}, {heads} heads, layers {_span(*stage)}: "
            "a worker holds at least one layer and one head, and its rank is below the tensor size"
        )
    first = tp_rank * heads // tp_size
    return Box(stage[0], stage[1], first, max(first + 1, (tp_rank + 1) * heads // tp_size))


def replica_of(heads: int, tp_rank: int, tp_size: int) -> Replica:
    """Which of the tensor ranks that hold the same heads a rank is; arguments as of :func:`worker_box`."""
    if heads >= tp_size:
        return Replica(0, 1)
    head = tp_rank * heads // tp_size
    first, end = -(-head * tp_size // heads), -(-(head + 1) * tp_size // heads)
    return Replica(tp_rank - first, end - first)


def _span(first: int, end: int) -> str:
    return f"{first}" if end == first + 1 else f"{first} to {end - 1}"
