"""Which part of a model each worker holds, and which of equal workers stores a chunk."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from layerflow.boxes import Box, Replica, replica_of, worker_box
from layerflow.errors import SpecError

SIZES = range(1, 9)
HEADS = (1, 2, 4, 6, 8)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_ranks_hold_all_heads_once_or_in_equal_replicas(heads: int, size: int) -> None:
    boxes = [worker_box((0, 3), heads, rank, size) for rank in range(size)]
    holders = {
        head: [n for n, box in enumerate(boxes) if box.first_head <= head < box.end_head] for head in range(heads)
    }
    assert all(holders.values())
    assert all(box.layers == 3 and box.heads >= 1 for box in boxes)
    assert max(box.heads for box in boxes) - min(box.heads for box in boxes) <= 1
    for rank, box in enumerate(boxes):
        equal = [n for n, other in enumerate(boxes) if other == box]
        assert replica_of(heads, rank, size) == Replica(equal.index(rank), len(equal))
        assert all(n in equal for head in range(box.first_head, box.end_head) for n in holders[head])


@pytest.mark.parametrize(("heads", "size"), [(h, t) for h in HEADS for t in SIZES if h % t == 0 or t % h == 0])
def test_shares_are_vllms(heads: int, size: int) -> None:
    """vLLM gives rank r the heads from r * (heads / size) on, or head r // (size / heads)."""
    for rank in range(size):
        first = rank * (heads // size) if heads >= size else rank // (size // heads)
        assert worker_box((0, 1), heads, rank, size) == Box(0, 1, first, first + max(1, heads // size))


def test_three_ranks_and_two_ranks_share_six_heads() -> None:
    assert [worker_box((0, 1), 6, rank, 3)[2:] for rank in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert [worker_box((0, 1), 6, rank, 2)[2:] for rank in range(2)] == [(0, 3), (3, 6)]


@pytest.mark.parametrize(("heads", "size"), list(itertools.product(HEADS, SIZES)))
def test_each_chunk_is_stored_by_one_of_the_equal_ranks(heads: int, size: int) -> None:
    for chunk in range(20):
        key = hashlib.blake2b(bytes([chunk])).digest()
        stored = [
            worker_box((0, 1), heads, rank, size)
            for rank in range(size)
            if replica_of(heads, rank, size).is_writer(key)
        ]
        assert sorted(stored) == sorted({worker_box((0, 1), heads, rank, size) for rank in range(size)})


def test_equal_ranks_store_equally_much() -> None:
    keys = [hashlib.blake2b(bytes([n, m])).digest() for n in range(50) for m in range(8)]
    stored = [sum(replica_of(1, rank, 4).is_writer(key) for key in keys) for rank in range(4)]
    assert sum(stored) == 400 and min(stored) > 70


@pytest.mark.parametrize(
    "facts", [((0, 1), 4, 2, 2), ((0, 1), 4, -1, 2), ((0, 1), 0, 0, 1), ((2, 2), 4, 0, 1), ((-1, 2), 4, 0, 1)]
)
def test_impossible_workers_are_refused(facts: tuple[tuple[int, int], int, int, int]) -> None:
    with pytest.raises(SpecError, match="at least one layer"):
        worker_box(*facts)


def test_boxes_meet_and_enclose() -> None:
    box = Box(0, 4, 2, 6)
    assert box.overlap(Box(2, 8, 0, 3)) == Box(2, 4, 2, 3)
    assert box.overlap(Box(4, 8, 2, 6)).cells == 0
    assert box.encloses(Box(1, 2, 3, 4)) and not box.encloses(Box(1, 5, 3, 4))
    assert str(box) == "layers 0 to 3, heads 2 to 5" and str(Box(1, 2, 0, 1)) == "layers 1, heads 0"
