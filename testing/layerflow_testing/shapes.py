"""Objects as servers store them: of several tensor and pipeline sizes, with block digests, of compressed caches."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
import pytest

from layerflow.boxes import Box, cover
from layerflow.keys import DIGEST_BYTES, KEY_BYTES, object_key
from layerflow.spec import Shard
from layerflow_testing.objects import ARENA, EXISTS, OK, Bench, Client, Thing, assert_whole, load, save, seen

LAYERS, HEADS, BLOCKS = 6, 6, 3
HEAD_BYTES = 512  # of a block
ALL = Box(0, LAYERS, 0, HEADS)
PARTITIONS = tuple(
    Shard(0, tp, 0, len(stages), (HEADS,), (stages,))
    for tp, stages in ((1, (6,)), (2, (6,)), (4, (6,)), (1, (2, 4)), (3, (1, 3, 2)))
)


@dataclass(frozen=True)
class BoxThing(Thing):
    """Some layers and heads of a chunk; what a head's block holds does not depend on who stores it."""

    box: Box = ALL

    @property
    def payload(self) -> np.ndarray:
        """uint8: by layer, block and head."""
        chosen = whole_chunk(self.key[:DIGEST_BYTES])[self.box.first_layer : self.box.end_layer]
        return np.ascontiguousarray(chosen[:, :, self.box.first_head : self.box.end_head]).ravel()


def whole_chunk(digest: bytes) -> np.ndarray:
    """uint8, shape ``(layers, blocks, heads, HEAD_BYTES)``."""
    seed = int.from_bytes(digest[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, BLOCKS, HEADS, HEAD_BYTES), np.uint8)


def boxes_of(digest: bytes, partition: Shard) -> list[BoxThing]:
    """A chunk's objects as workers of one partition store them."""
    boxes = {object_key(digest, 0, shard): shard.box(0) for shard in partition.peers()}
    return [BoxThing(key, BLOCKS, box.layers, BLOCKS * box.heads * HEAD_BYTES, box=box) for key, box in boxes.items()]


class ShapesContract:
    """Part of :class:`.contract.BackendContract`."""

    @pytest.mark.parametrize("writing", PARTITIONS, ids=lambda shard: f"tp{shard.tp_size}-pp{shard.pp_size}")
    def test_boxes_of_other_sizes_cover_a_readers(self, bench: Bench, writing: Shard) -> None:
        """What each worker of one partition stored, a reader of any other one puts its own box together from."""
        digest = os.urandom(DIGEST_BYTES)
        things = boxes_of(digest, writing)
        for each in things:
            assert save(bench, bench.first, [each]) == [OK]
        whole = whole_chunk(digest)
        for client in bench.clients:
            assert seen(bench, *things) == [[True] * len(things)] * len(bench.clients)
            stored = {thing.box: fetched(bench, client, thing) for thing in things}
            for reader in {shard.box(0) for partition in PARTITIONS for shard in partition.peers()}:
                boxes = tuple(stored)
                pieces, missing = cover(reader, boxes)
                assert not missing
                for source, box in pieces:
                    assert np.array_equal(part(stored[boxes[source]], boxes[source], box), part(whole, ALL, box))

    def test_partitions_of_one_chunk_are_objects_of_their_own(self, bench: Bench) -> None:
        digest = os.urandom(DIGEST_BYTES)
        by_key = {thing.key: thing for partition in PARTITIONS for thing in boxes_of(digest, partition)}
        things = list(by_key.values())
        first, others = things[0], things[1:]
        assert save(bench, bench.first, [first]) == [OK]
        assert seen(bench, first, *others) == [[True] + [False] * len(others)] * len(bench.clients)
        for layers in sorted({thing.layers for thing in others}):
            same = [thing for thing in others if thing.layers == layers]
            assert save(bench, bench.clients[-1], same) == [OK] * len(same)
        bench.first.backend.hide([first.key])
        # Another client's question a moment ago may still keep it there, for that client.
        assert seen(bench, first, *others)[0] == [False] + [True] * len(others)
        for thing in others:
            assert_whole(bench, bench.first, [thing])

    def test_a_note_is_whose_who_was_first(self, bench: Bench) -> None:
        """Servers note their model's partitions under numbered keys: an object of one layer and one block."""
        key = os.urandom(DIGEST_BYTES).ljust(KEY_BYTES, b"\0")
        mine, theirs = (Thing(key, 1, 1, 4096, tokens=1, variant=variant) for variant in (0, 1))
        assert save(bench, bench.first, [mine]) == [OK]
        assert save(bench, bench.clients[-1], [theirs]) == [EXISTS]
        for client in bench.clients:
            assert_whole(bench, client, [mine])

    def test_objects_with_block_digests(self, bench: Bench) -> None:
        """They help servers to find hits that end inside a chunk, and are no part of the object."""
        things = [replace(bench.thing(number), block_digests=os.urandom(DIGEST_BYTES * 16)) for number in range(3)]
        plain = bench.thing("plain")
        assert save(bench, bench.first, [*things, plain]) == [OK] * 4
        for client in bench.clients:
            assert_whole(bench, client, [*things, plain], (2,))

    def test_objects_of_compressed_caches(self, bench: Bench) -> None:
        """DeepSeek-V4's: rows of 584 bytes, few or many in a block, windows, and states of 32 KiB."""
        sizes = ((21, 64 * 584), (20, 2 * 584), (21, 64 * 132), (43, 2 * 64 * 584), (21, 2 * 32768), (20, 16 * 32768))
        for number, (layers, layer_bytes) in enumerate(sizes):
            few = max(1, min(layers, ARENA // 8 // layer_bytes))
            one = Thing(bench.key(("compressed", number)), 2, few, layer_bytes)
            assert save(bench, bench.first, [one]) == [OK]
            for client in bench.clients:
                assert_whole(bench, client, [one], (1, few // 2))


def fetched(bench: Bench, client: Client, thing: BoxThing) -> np.ndarray:
    """A stored box's bytes, shape ``(layers, blocks, heads, HEAD_BYTES)``."""
    [(outcome, data)] = load(bench, client, [thing], ARENA // 2)
    assert outcome == OK and data is not None
    return data[-thing.layers * thing.layer_bytes :].reshape(thing.layers, BLOCKS, thing.box.heads, HEAD_BYTES)


def part(held: np.ndarray, box: Box, wanted: Box) -> np.ndarray:
    """Of what a box holds, the layers and heads of a smaller one."""
    layers = held[wanted.first_layer - box.first_layer : wanted.end_layer - box.first_layer]
    return layers[:, :, wanted.first_head - box.first_head : wanted.end_head - box.first_head]
