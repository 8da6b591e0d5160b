"""Outlines against a model that goes token by token, and the numbering that both ends share."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.agent import Hit, StepRequest
from layerflow.agent.descriptors import (
    Numbered,
    PartDescriptor,
    check_blocks,
    describe_loads,
    describe_saves,
    number_blocks,
    without_tails,
)
from layerflow.errors import LayerflowError, SpecError
from layerflow.keys import Chain
from layerflow.places import NOWHERE
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.wire.messages import PlanPart
from layerflow.wire.packing import pack_u32, pack_u64

ROOT = b"r" * 16
PLANE = (Plane("kv", "uint8", (1,)),)
STATE = -1  #: in place of a window: recurrent state
_KINDS = {0: "full", STATE: "state"}


def spec_of(blocks: list[int], windows: list[int], chunk: int) -> ModelSpec:
    groups = tuple(
        GroupSpec(_KINDS.get(window, "sliding"), size, (layer,), PLANE, window=max(0, window))
        for layer, (size, window) in enumerate(zip(blocks, windows, strict=True))
    )
    return ModelSpec("m", "c", groups, chunk_tokens=chunk)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    groups = draw(st.integers(1, 3))
    blocks = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=groups, max_size=groups))
    windows = draw(st.lists(st.sampled_from([0, 1, 3, 8, 13, STATE]), min_size=groups, max_size=groups))
    return spec_of(blocks, windows, draw(st.sampled_from([4, 8, 12])))


def tables(spec: ModelSpec, tokens: int) -> tuple[np.ndarray, ...]:
    return tuple(1000 * (n + 1) + np.arange(-(-tokens // group.block_size)) for n, group in enumerate(spec.groups))


def first_read(group: GroupSpec, hit: int) -> int:
    """First token whose KV or state a request with a hit of `hit` tokens reads."""
    return hit - 1 if group.kind == "state" else max(0, hit - group.window + 1) if group.window else 0


def held_tokens(spec: ModelSpec, group: GroupSpec, chunk: int, held: int) -> list[set[int]]:
    """What an object of `held` tokens stores: per block, the token positions.

    A sliding group keeps its tail, recurrent state the last block.
    """
    base = chunk * spec.chunk_tokens
    seen = 1 if group.kind == "state" else group.window
    last = range(max(0, held - seen) if seen else 0, held)
    blocks: dict[int, set[int]] = {}
    for token in last:
        blocks.setdefault((base + token) // group.block_size, set())
    for block in blocks:
        blocks[block] = {
            token for token in range(block * group.block_size, (block + 1) * group.block_size) if token < base + held
        }
    return [blocks[block] for block in sorted(blocks)]


@settings(max_examples=200, deadline=None)
@given(specs(), st.data())
def test_loads_cover_what_the_next_token_reads(spec: ModelSpec, data: st.DataObject) -> None:
    chunk = spec.chunk_tokens
    tokens = data.draw(st.integers(2, 5 * chunk))
    chain = Chain(ROOT, np.arange(tokens), chunk)
    whole = data.draw(st.integers(0, tokens // chunk))
    tail = data.draw(st.integers(0, min(chunk - 1, tokens - whole * chunk)))
    reach = whole * chunk + tail
    hit_tokens = min(reach, tokens - 1)
    hit = Hit(hit_tokens, whole, tail, chain.partial(whole, tail)) if tail else Hit(hit_tokens)
    start = data.draw(st.integers(0, hit_tokens))
    asked = [StepRequest("r", chain, tables(spec, tokens), load=(start, hit_tokens), hit=hit)]
    last = (hit_tokens - 1) // chunk
    if spec.exact and start < hit_tokens != last * chunk + (tail if tail and last == whole else chunk):
        with pytest.raises(SpecError, match="after exactly that many tokens"):
            describe_loads(spec, asked)
        return
    parts = describe_loads(spec, asked)
    assert len(parts) == len({part.group for part in parts})
    by_group = {part.group: part for part in parts}
    for number, group in enumerate(spec.groups):
        first = first_read(group, hit_tokens)
        needed = {token // group.block_size for token in range(max(start, first), hit_tokens)}
        pieces = by_group[number].pieces if number in by_group else ()
        named = [block for piece in pieces for block in piece.blocks]
        assert len(named) == len(set(named)) and set(named) == needed
        for piece in pieces:
            place = piece.blocks.start * group.block_size // chunk
            held = tail if tail and place == whole else chunk
            assert piece.tokens == held
            assert piece.digest == chain.partial(place, held)
            stored = held_tokens(spec, group, place, held)
            for offset, block in enumerate(piece.blocks):
                assert min(stored[piece.index + offset]) // group.block_size == block, "the wrong block of the object"


@settings(max_examples=200, deadline=None)
@given(specs(), st.data())
def test_saves_keep_every_completed_chunk(spec: ModelSpec, data: st.DataObject) -> None:
    chunk = spec.chunk_tokens
    tokens = data.draw(st.integers(1, 5 * chunk))
    chain = Chain(ROOT, np.arange(tokens), chunk)
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    partial, last = data.draw(st.booleans()), data.draw(st.booleans())
    request = StepRequest("r", chain, tables(spec, tokens), save=(start, stop), tail=last)
    parts = {part.group: part for part in describe_saves(spec, [request], partial)}
    wanted = [(number, chunk) for number in range(tokens // chunk) if start < (number + 1) * chunk <= stop]
    if partial and last and stop % chunk:
        wanted.append((stop // chunk, stop % chunk))
    for number, group in enumerate(spec.groups):
        part = parts.get(number)
        pieces = part.pieces if part is not None else ()
        assert [(piece.digest, piece.tokens) for piece in pieces] == [
            (chain.partial(place, held), held) for place, held in wanted
        ]
        for piece, (place, held) in zip(pieces, wanted, strict=True):
            stored = held_tokens(spec, group, place, held)
            assert piece.index == 0
            assert [min(block) // group.block_size for block in stored] == list(piece.blocks)
        if part is not None:
            ends_partial = wanted[-1][1] != chunk
            assert part.parent == (chain.parent(wanted[-1][0]) if ends_partial else b"")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_numbering(data: st.DataObject) -> None:
    """Parts one after the other, objects that are NOWHERE left out, each block with its object's place."""
    spec = spec_of([2, 4], [0, 8], 8)
    requests = []
    for name in range(data.draw(st.integers(1, 3))):
        tokens = data.draw(st.integers(9, 33))
        chain = Chain(ROOT, np.arange(tokens) + name, 8)
        hit = tokens // 8 * 8 - (tokens % 8 == 0)
        requests.append(StepRequest(str(name), chain, tables(spec, tokens), load=(0, hit), hit=Hit(hit)))
    parts = describe_loads(spec, requests)
    places = [
        [NOWHERE if data.draw(st.booleans()) else 4096 * (100 * at + piece) for piece in range(len(part.pieces))]
        for at, part in enumerate(parts)
    ]
    plans = [PlanPart(pack_u64(row), pack_u32([9] * len(row))) for row in places]
    numbered = number_blocks(parts, plans, loading=True)
    for group in range(2):
        expected = [
            (part.table[block], place, 9, piece.index + offset, block, at)
            for at, part in enumerate(parts)
            if part.group == group
            for piece, place in zip(part.pieces, places[at], strict=True)
            if place != NOWHERE
            for offset, block in enumerate(piece.blocks)
        ]
        column = numbered.get(group)
        assert (column is None) == (not expected)
        if column is not None:
            places_of = (column.engine_blocks, column.object_offsets, column.object_blocks, column.index)
            rows = zip(*places_of, column.numbers, column.part, strict=True)
            assert [tuple(map(int, row)) for row in rows] == expected


@pytest.mark.parametrize("wrong", ["fewer parts", "fewer objects", "torn numbers"])
def test_a_plan_that_does_not_fit(wrong: str) -> None:
    spec = spec_of([2], [0], 8)
    chain = Chain(ROOT, np.arange(20), 8)
    parts: list[PartDescriptor] = describe_loads(
        spec, [StepRequest("r", chain, tables(spec, 20), load=(0, 16), hit=Hit(16))]
    )
    offsets = pack_u64([0, 64])
    plans = {
        "fewer parts": [],
        "fewer objects": [PlanPart(offsets[:8], pack_u32([4]))],
        "torn numbers": [PlanPart(offsets[:-1], pack_u32([4, 4]))],
    }
    with pytest.raises(LayerflowError):
        number_blocks(parts, plans[wrong], loading=True)


def test_states_are_saved_where_the_engine_has_them() -> None:
    """Only the last block of each chunk is looked at; attention is saved whether there is a state or not."""
    spec = spec_of([2, 4], [0, STATE], 8)
    chain = Chain(ROOT, np.arange(30), 8)
    states = np.full(7, -1)
    states[[0, 3, 4, 6]] = [70, 73, 74, 76]  # after 4, 16, 20 and 28 tokens
    request = StepRequest("r", chain, (np.arange(15), states), save=(0, 28), tail=True)
    attention, state = describe_saves(spec, [request], partial=True)
    assert [piece.tokens for piece in attention.pieces] == [8, 8, 8, 4]
    assert [(piece.digest, piece.blocks, piece.tokens) for piece in state.pieces] == [
        (chain.digests[1], range(3, 4), 8),
        (chain.partial(3, 4), range(6, 7), 4),
    ]
    assert state.engine_blocks().tolist() == [73, 76]
    assert attention.parent == state.parent == chain.parent(3)
    nowhere = replace(request, blocks=(np.arange(15), np.full(7, -1)))
    assert [part.group for part in describe_saves(spec, [nowhere], partial=True)] == [0]


@settings(max_examples=100, deadline=None)
@given(specs(), st.data())
def test_without_tails_is_as_if_none_had_been_asked_for(spec: ModelSpec, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 4 * spec.chunk_tokens))
    chain = Chain(ROOT, np.arange(tokens), spec.chunk_tokens)
    request = StepRequest("r", chain, tables(spec, tokens), save=(0, tokens), tail=True)
    shorter = without_tails(describe_saves(spec, [request], partial=True))
    wanted = describe_saves(spec, [request], partial=False)
    assert [part.save_message() for part in shorter] == [part.save_message() for part in wanted]


@settings(max_examples=100, deadline=None)
@given(specs(), st.data())
def test_an_outline_survives_pickling(spec: ModelSpec, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(spec.chunk_tokens + 1, 5 * spec.chunk_tokens))
    chain = Chain(ROOT, np.arange(tokens), spec.chunk_tokens)
    hit = (tokens - 1) // spec.chunk_tokens * spec.chunk_tokens
    request = StepRequest("r", chain, tables(spec, tokens), (0, hit), Hit(hit), save=(0, tokens), tail=True)
    loads, saves = describe_loads(spec, [request]), describe_saves(spec, [request], partial=True)
    for parts, loading in ((loads, True), (saves, False)):
        copies = pickle.loads(pickle.dumps(parts))
        plans = [
            PlanPart(pack_u64([64 * at for at in range(len(part.pieces))]), pack_u32([9] * len(part.pieces)))
            for part in parts
        ]
        before, after = number_blocks(parts, plans, loading), number_blocks(copies, plans, loading)
        assert before.keys() == after.keys()
        for group, numbered in before.items():
            for name in Numbered.__slots__:
                assert (getattr(numbered, name) == getattr(after[group], name)).all()
        assert [part.save_message() for part in copies] == [part.save_message() for part in parts]
        check_blocks(copies, [10**6] * len(spec.groups))


def test_a_pickled_outline_holds_what_its_pieces_name() -> None:
    spec = spec_of([16, 16], [0, STATE], 256)
    tokens = 1 << 17
    chain = Chain(ROOT, np.arange(tokens), 256)
    request = StepRequest("r", chain, tables(spec, tokens), save=(tokens - 256, tokens))
    assert len(pickle.dumps(describe_saves(spec, [request], partial=False))) < 1000


@pytest.mark.parametrize("wrong", [{"group": 2}, {"group": -1}, {"table": np.arange(3)}])
def test_an_outline_of_another_model_is_refused(wrong: dict[str, object]) -> None:
    spec = spec_of([2, 4], [0, 8], 8)
    request = StepRequest("r", Chain(ROOT, np.arange(8), 8), tables(spec, 8), save=(0, 8))
    part = replace(describe_saves(spec, [request], partial=False)[0], **wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="request 'r'"):
        check_blocks([part], [10**6, 10**6])
