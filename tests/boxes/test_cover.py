"""A cover has every layer and head once, from a box that holds it, or says that it is missing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.boxes import Box, Piece, cover, worker_box


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    layers = sorted(draw(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True)))
    heads = sorted(draw(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True)))
    return Box(*layers, *heads)


def cells(box: Box) -> set[tuple[int, int]]:
    return set(itertools.product(range(box.first_layer, box.end_layer), range(box.first_head, box.end_head)))


@settings(max_examples=400, deadline=None)
@given(reader=boxes(), stored=st.lists(boxes(), max_size=7))
def test_each_cell_once_or_missing(reader: Box, stored: list[Box]) -> None:
    pieces, missing = cover(reader, tuple(stored))
    for piece in pieces:
        assert stored[piece.source].encloses(piece.box)
    got = [cell for box in [*(piece.box for piece in pieces), *missing] for cell in cells(box)]
    assert len(got) == len(set(got)) and set(got) == cells(reader)
    held = set().union(*map(cells, stored)) if stored else set()
    assert {cell for box in missing for cell in cells(box)} == cells(reader) - held


@settings(max_examples=200, deadline=None)
@given(reader=boxes(), stored=st.lists(boxes(), max_size=6, unique=True), data=st.data())
def test_the_choice_does_not_depend_on_the_order(reader: Box, stored: list[Box], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(stored))

    def named(order: list[Box]) -> list[tuple[Box, Box]]:
        return [(order[piece.source], piece.box) for piece in cover(reader, tuple(order)).pieces]

    assert named(stored) == named(shuffled)


@given(reader=boxes(), stored=st.lists(boxes(), max_size=6), data=st.data())
def test_the_readers_own_box_is_taken_whole(reader: Box, stored: list[Box], data: st.DataObject) -> None:
    stored.insert(data.draw(st.integers(0, len(stored))), reader)
    assert cover(reader, tuple(stored)) == ((Piece(stored.index(reader), reader),), ())


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8])
def test_every_tensor_size_covers_every_other_with_few_pieces(heads: int) -> None:
    for writers, readers in itertools.product(range(1, 9), repeat=2):
        stored = tuple(sorted({worker_box((0, 5), heads, rank, writers) for rank in range(writers)}))
        for rank in range(readers):
            reader = worker_box((0, 5), heads, rank, readers)
            pieces, missing = cover(reader, stored)
            assert not missing
            assert len(pieces) == sum(reader.overlap(box).cells > 0 for box in stored)


def test_stages_are_cut_at_their_borders() -> None:
    stored = (Box(0, 3, 0, 4), Box(3, 8, 0, 4))
    pieces = cover(Box(2, 6, 1, 3), stored).pieces
    assert pieces == (Piece(0, Box(2, 3, 1, 3)), Piece(1, Box(3, 6, 1, 3)))


def test_what_is_missing_is_named() -> None:
    assert cover(Box(0, 4, 0, 4), (Box(0, 2, 0, 4), Box(2, 4, 0, 1))).missing == (Box(2, 4, 1, 4),)
    assert cover(Box(0, 4, 0, 4), ()).missing == (Box(0, 4, 0, 4),)
