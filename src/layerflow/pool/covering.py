"""A pool in which an object that was never stored can be read from others that cover its layers and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from layerflow.boxes import TO_THE_END, Box, cover
from layerflow.keys import DIGEST_BYTES, covered_by, several_key
from layerflow.pool.base import Located, Owner, StoredTail
from layerflow.pool.chunk_index import ANY_LENGTH, merged_tails, renamed
from layerflow.pool.memory import ArenaMemory, MemoryPool
from layerflow.presence import PresenceWriter
from layerflow.spec import ModelSpec, Shard

MOST_PARTITIONS = 4
"""Partitions of one model whose objects are looked for: those of workers here, then others; of both the newest."""

MOST_REMOTE = 16
"""Partitions of one model of which a tier or peers have told that are remembered: the newest."""


MOST_BOXES = 64
"""Workers of a partition of which others have told: one of more is not looked for, as nothing proves that it exists."""


class _Partitions(NamedTuple):
    """A model's: of workers that have attached here, and those of which a tier told; oldest first."""

    attached: list[Shard]
    remote: list[Shard]
    groups: int


class _OverlappingKeys(NamedTuple):
    """What may stand in for the objects of one box: boxes of other partitions that overlap it, and their keys' ends."""

    box: Box
    others: tuple[tuple[Box, bytes], ...]


class CoveringPool(MemoryPool):
    """A :class:`MemoryPool` that knows in which partitions (tensor and pipeline sizes) its models run.

    Where a key is not stored, objects of other partitions that cover its box stand in for it. A model that runs in one
    partition costs nothing.
    """

    def __init__(self, arena: ArenaMemory, presence: PresenceWriter | None = None, *, lease_share: float = 1.0) -> None:
        super().__init__(arena, presence, lease_share=lease_share)
        self._writer = presence
        self._partitions: dict[bytes, _Partitions] = {}
        self._overlapping_boxes: dict[bytes, dict[bytes, _OverlappingKeys]] = {}

    def add_partition(self, spec: ModelSpec) -> None:
        """A worker of this model has attached: its partition's objects are looked for from now on."""
        model, first = spec.fingerprint, spec.shard.peers()[0]
        known = self._partitions.setdefault(model, _Partitions([], [], len(spec.groups)))
        if not spec.shard.shareable or first in known.attached:
            return
        known.attached.append(first)
        del known.attached[:-MOST_PARTITIONS]
        self._renew(model, known)

    def add_remote_partition(self, model: bytes, shard: Shard) -> None:
        """Workers of this partition have stored behind the arena, or at a peer; those that attach here go before it."""
        known = self._partitions.get(model)
        if known is None or not known.attached or not same_model(shard, known.attached[0]):
            return
        if shard.tp_size * shard.pp_size > MOST_BOXES or shard in self._looked_for(known):
            return
        if shard in known.remote:
            known.remote.remove(shard)
        known.remote.append(shard)
        del known.remote[:-MOST_REMOTE]
        self._renew(model, known)

    def covering(self, spec: ModelSpec) -> CoveringPool | None:
        """Itself, where objects of other partitions may stand in for this model's."""
        return self if spec.fingerprint in self._overlapping_boxes else None

    def overlapping_keys(self, key: bytes) -> list[bytes]:
        """Objects of other partitions, complete or not, that have something of this one."""
        return [other for _, other in self._others(key)]

    def sources(self, key: bytes, there: Callable[[bytes], bool]) -> list[tuple[Box, bytes]]:
        """Objects that together cover the key's; none if something is missing.

        :param there: which objects can be had.
        """
        digest = key[:DIGEST_BYTES]
        for box, others in self._boxes_of(key):
            found = [(other, name) for other, end in others if there(name := digest + end)]
            if found:
                pieces, missing = cover(box, tuple(other for other, _ in found))
                if not missing:
                    return [found[source] for source in dict.fromkeys(piece.source for piece in pieces)]
        return []

    def _renew(self, model: bytes, known: _Partitions) -> None:
        looked_for = self._looked_for(known)
        self._overlapping_boxes.pop(model, None)
        if len(looked_for) > 1:
            self._overlapping_boxes[model] = _overlapping_keys(looked_for, known.groups)
            if self._writer is not None and not self._writer.may_hold(several_key(model)):
                self._writer.add(several_key(model))

    def _looked_for(self, known: _Partitions) -> list[Shard]:
        remote = [shard for shard in reversed(known.remote) if shard not in known.attached]
        return [*reversed(known.attached), *remote][:MOST_PARTITIONS]

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects are complete, or covered by complete ones."""
        found = super().lookup(keys)
        if self._overlapping_boxes:
            return [there or bool(self._sources(key)) for key, there in zip(keys, found, strict=True)]
        return found

    def tails(self, parent: bytes, most: int = ANY_LENGTH, *, undigested: bool = False) -> Iterator[StoredTail]:
        """As the base class; those that another partition has stored too."""
        tails = super().tails(parent, most, undigested=undigested)
        if not self._overlapping_boxes:
            return tails
        others = [
            super(CoveringPool, self).tails(other, most, undigested=undigested) for _, other in self._others(parent)
        ]
        return merged_tails(tails, *(renamed(of_other, parent) for of_other in others))

    def acquire(
        self,
        keys: Sequence[bytes],
        owner: Owner,
        until: float,
        *,
        lease: bool = False,
        counts: Sequence[int] | None = None,
    ) -> list[Located | None]:
        """As the base class; of an object that is covered, the pieces are told and pinned."""
        places = super().acquire(keys, owner, until, lease=lease, counts=counts)
        if self._overlapping_boxes and None in places:
            for at, place in enumerate(places):
                if place is None:
                    count = counts[at] if counts is not None else 0
                    places[at] = self._acquire_pieces(keys[at], owner, until, lease, count)
        return places

    def lease(self, keys: Sequence[bytes], owner: Owner, until: float) -> bytes:
        """As the base class; what covers an object is pinned, and has no place in a plan."""
        places = super().lease(keys, owner, until)
        if self._overlapping_boxes:
            for key, there in zip(keys, super().lookup(keys), strict=True):
                if not there:
                    self._acquire_pieces(key, owner, until, lease=True)
        return places

    def hide(self, keys: Sequence[bytes]) -> int:
        """As the base class; of an object that is covered, what covers it."""
        if self._overlapping_boxes:
            there = super().lookup(keys)
            keys = [
                part
                for key, whole in zip(keys, there, strict=True)
                for part in ([key] if whole else [source for _, source in self._sources(key)])
            ]
        return super().hide(keys)

    def _acquire_pieces(self, key: bytes, owner: Owner, until: float, lease: bool, count: int = 0) -> Located | None:
        """Pin what covers an object: all of it, alike and of at least `count` blocks, or nothing."""
        sources = self._sources(key)
        if not sources:
            return None
        # Pinned by the key until all of it is there: the owner may have pinned some of these for another object.
        names = [source for _, source in sources]
        found = super().acquire(names, ("pieces", key), until, lease=lease, counts=[count] * len(names))
        whole = [place for place in found if place is not None]
        if len(whole) < len(found) or len({place[1:3] for place in whole}) > 1:
            self.release(("pieces", key))
            return None
        self.transfer_pins(("pieces", key), owner, until)
        pieces = tuple((box, place.offset) for (box, _), place in zip(sources, whole, strict=True))
        return whole[0]._replace(pieces=pieces)

    def _sources(self, key: bytes) -> list[tuple[Box, bytes]]:
        """Return the sources that are in the arena."""
        return self.sources(key, self._directory.ready.__contains__)

    def _others(self, key: bytes) -> list[tuple[Box, bytes]]:
        return [(other, key[:DIGEST_BYTES] + suffix) for _, others in self._boxes_of(key) for other, suffix in others]

    def _boxes_of(self, key: bytes) -> list[_OverlappingKeys]:
        suffix = key[DIGEST_BYTES:]
        return [boxes[suffix] for boxes in self._overlapping_boxes.values() if suffix in boxes]


def same_model(shard: Shard, other: Shard) -> bool:
    """Return whether these divide the same model: into as many heads and layers, and so that others can read them."""
    return (
        shard.shareable
        and shard.heads == other.heads
        and [sum(layers) for layers in shard.stages] == [sum(layers) for layers in other.stages]
    )


def _overlapping_keys(partitions: Sequence[Shard], groups: int) -> dict[bytes, _OverlappingKeys]:
    """By the end of its keys, each box of a model's partitions.

    A key says that its object reaches to the group's last layer, and not which that is: keys of models of other depths
    end alike. So boxes have ends of that kind too, and those of one model are right for the keys of every other.
    """
    found: dict[bytes, _OverlappingKeys] = {}
    for group in range(groups):
        by_suffix = {covered_by(group, peer): _open_box(peer, group) for first in partitions for peer in first.peers()}
        overlapping: dict[bytes, list[tuple[Box, bytes]]] = {suffix: [] for suffix in by_suffix}
        for suffix, other in _overlapping(by_suffix):
            overlapping[suffix].append((by_suffix[other], other))
            overlapping[other].append((by_suffix[suffix], suffix))
        order = {suffix: at for at, suffix in enumerate(by_suffix)}  # of partitions: those that are looked for first
        for suffix, box in by_suffix.items():
            found[suffix] = _OverlappingKeys(box, tuple(sorted(overlapping[suffix], key=lambda other: order[other[1]])))
    return found


def _open_box(shard: Shard, group: int) -> Box:
    box = shard.box(group)
    return box._replace(end_layer=TO_THE_END) if box.end_layer == shard.span_of(group)[2] else box


def _overlapping(boxes: Mapping[bytes, Box]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of boxes that have something in common: a sweep over the layers, with those that begin there sorted."""
    ordered = sorted(boxes, key=lambda suffix: boxes[suffix].first_layer)
    reaching: list[bytes] = []
    for suffix in ordered:
        box = boxes[suffix]
        reaching = [other for other in reaching if boxes[other].end_layer > box.first_layer]
        yield from ((other, suffix) for other in reaching if box.overlap(boxes[other]).cells)
        reaching.append(suffix)
