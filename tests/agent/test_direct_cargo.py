"""What is left of a step's outline once it is known what the pool has, and the server's plan filled in."""

from __future__ import annotations

import numpy as np
import pytest
from e2e.known import small_spec

from layerflow.agent.descriptors import ObjectDescriptor, PartDescriptor, number_blocks
from layerflow.agent.step.leases import LeasedObject, LeasedParts, StepLeases, places_of
from layerflow.errors import LayerflowError
from layerflow.keys import object_key
from layerflow.objects import object_bytes
from layerflow.places import NOWHERE
from layerflow.wire.messages import Plan, PlanPart
from layerflow.wire.packing import pack_u32, pack_u64, unpack_u64

SPEC = small_spec()
GROUP = SPEC.groups[0]
PARENT = bytes(range(16))


def part(request: str, first: int, chunks: int, tail: int = 0) -> PartDescriptor:
    """Whole chunks of 4 blocks, and perhaps a tail of so many tokens behind them."""
    pieces = [ObjectDescriptor(bytes([first + n]) * 16, range(4 * n, 4 * n + 4), 0, 16) for n in range(chunks)]
    if tail:
        pieces.append(ObjectDescriptor(bytes([99]) * 16, range(4 * chunks, 4 * chunks + -(-tail // 4)), 0, tail))
    return PartDescriptor(request, 0, np.arange(40), tuple(pieces), PARENT if tail else b"")


def side(parts: list[PartDescriptor], at: int, without: set[tuple[int, int]] = frozenset()) -> LeasedParts:
    """Every object at an address of its own from `at` on, but for those at (part, piece)."""
    held: list[list[LeasedObject | None]] = []
    for number, one in enumerate(parts):
        row: list[LeasedObject | None] = []
        for piece, place in enumerate(places_of(SPEC, one, 7)):
            row.append(None if (number, piece) in without else LeasedObject(place, at, 100.0))
            at += 1 << 16
        held.append(row)
    return LeasedParts(parts, held)


def answer(loads: LeasedParts, saves: LeasedParts) -> Plan:
    """As a server answers what is left."""

    def row(one: PartDescriptor) -> PlanPart:
        count = len(one.pieces)
        return PlanPart(pack_u64([0] * count), pack_u32([4] * count))

    return Plan(1, [row(one) for one in loads.left()], [row(one) for one in saves.left()])


def test_places_are_those_of_the_objects() -> None:
    whole, tail = places_of(SPEC, part("a", 1, 1, tail=6), 7)
    assert whole.key == object_key(bytes([1]) * 16, 0, SPEC.shard)
    assert (whole.blocks, whole.tokens, whole.parent) == (4, 16, b"")
    assert (tail.blocks, tail.tokens, tail.parent) == (2, 6, object_key(PARENT, 0, SPEC.shard))
    assert tail.nbytes == object_bytes(GROUP, 2)


def test_parts_of_which_nothing_is_left_are_not_told_and_positions_find_back() -> None:
    loads = side([part("a", 1, 2), part("b", 3, 1), part("c", 4, 2)], 0, {(1, 0), (2, 0)})
    assert [(one.request, len(one.pieces)) for one in loads.left()] == [("a", 2), ("c", 1)]
    assert loads.lacking == {"b", "c"}
    assert loads.parts_of([1]) == [2]
    assert [held.gva for held in loads.objects([1])] == [4 << 16]


def test_a_tail_that_is_left_out_takes_its_parent_along() -> None:
    whole = side([part("a", 1, 2, tail=6)], 0)
    cut = side([part("a", 1, 2, tail=6)], 0, {(0, 2)})
    assert whole.left()[0].load_message().tail == 6
    assert (cut.left()[0].load_message().tail, cut.left()[0].load_message().parent) == (0, b"")


def test_the_plan_gets_the_addresses_and_the_core_numbers_the_same_blocks() -> None:
    parts = [part("a", 1, 2), part("b", 3, 1), part("c", 4, 2)]
    loads, saves = side(parts, 1 << 40, {(1, 0), (2, 0)}), side([part("a", 9, 1)], 1 << 41)
    leases = StepLeases(loads, saves)
    filled = leases.fill(answer(loads, saves))
    numbered = number_blocks(parts, filled.loads, loading=True)[0]
    assert numbered.numbers.tolist() == [*range(8), *range(4, 8)]
    assert numbered.part.tolist() == [0] * 8 + [2] * 4
    assert sorted(set(numbered.object_offsets.tolist())) == [(1 << 40) + n * (1 << 16) for n in (0, 1, 4)]
    ends = leases.ends(numbered.object_offsets)
    assert set((ends - numbered.object_offsets).tolist()) == {object_bytes(GROUP, 4)}
    inside = numbered.object_offsets[[0, 9]] + 1000
    assert [held.gva for held in leases.holding(inside)] == [1 << 40, (1 << 40) + (4 << 16)]


def test_what_the_server_does_not_want_stays_out() -> None:
    loads = side([part("a", 1, 2)], 1 << 40)
    [plan] = loads.fill([PlanPart(pack_u64([0, NOWHERE]), pack_u32([4, 0]))])
    assert unpack_u64(plan.offsets, 2, "").tolist() == [1 << 40, NOWHERE]


def test_a_plan_of_other_parts_is_refused() -> None:
    with pytest.raises(LayerflowError, match="planned 1 parts where 0 were asked for"):
        side([], 0).fill([PlanPart(b"", b"")])
