"""The copy benchmark answers in the shape that is printed, the stagger benchmark knows slots; no figure is judged."""

from __future__ import annotations

import numpy as np
import pytest

from layerflow_cli.bench import stagger
from layerflow_cli.bench.transfer import copy


def test_copy_answers_for_each_block_size_and_for_two_lanes() -> None:
    result = copy.measure(moved_bytes=1 << 20, turns=1, block_kib=(16, 64), object_mib=(1,))
    figures = {"16KiB", "64KiB", "two_lanes", "two_contiguous", "two_cores", "native", "slots", "slots_worst"}
    assert set(result) == figures
    for size in ("16KiB", "64KiB"):
        assert set(result[size]) == {
            "save_gbps",
            "load_gbps",
            "memcpy_gbps",
            "save_ratio",
            "load_ratio",
            "extents_us",
            *copy.TWICE,
        }
        assert all(figure > 0 for figure in result[size].values())
    assert all(result[name] == result["16KiB"][name] for name in copy.TWICE), "of the smallest size"


def test_objects_lie_in_the_slots_that_an_arena_gives_them_and_arrive() -> None:
    objects = copy._Objects(16 << 10, 4 << 20, 16 << 20, seed=1)
    # A slot lies a header's bytes further than the one before, so that layers begin at few distances modulo a page.
    distances = (objects.extents["slots"].arena - objects.extents["slots"].engine) % 4096
    assert len(np.unique(distances)) <= 4
    assert len(np.unique((objects.extents["random"].arena - objects.extents["random"].engine) % 4096)) > 2
    arena = objects.arena.array
    arena[:] = 0
    objects.copier.save(objects.extents["slots"])
    assert int(arena.sum(dtype=np.int64)) == objects.moved, "each byte of the tensors is 1"


def test_what_the_benchmark_moves_arrives() -> None:
    field = copy._Field(16 << 10, 1 << 20, seed=1)
    field.engine.random_(0, 256)
    before = field.engine.clone()
    field.save(1)
    field.engine.zero_()
    field.load(1)
    moved = (field.engine == before).all(dim=(1, 2)).sum()
    assert moved == (1 << 20) // (16 << 10)


@pytest.mark.parametrize(
    ("rank", "layer", "when", "error"),
    [
        (0, 0, 8.0, 0.0),
        (1, 2, 11.25, 0.25),
        (3, 2, 9.0, 0.0),
        (3, 2, 8.75, -0.25),
        (0, 0, 11.25, 3.25),
        (0, 0, 11.75, -0.25),
    ],
)
def test_a_layers_stagger_error_is_against_its_own_slot(rank: int, layer: int, when: float, error: float) -> None:
    assert stagger.slot_error(rank, layer, when, ranks=4, spacing_s=1.0) == pytest.approx(error)


@pytest.mark.parametrize("rank", range(4))
def test_a_load_that_misses_turns_is_seen_by_its_time(rank: int) -> None:
    slots = {layer: 4.0 * layer + (rank + layer) % 4 for layer in range(10)}
    assert stagger.load_ratio(rank, slots, ranks=4, spacing_s=1.0) == pytest.approx(1.0)
    late = {layer: when + 4.0 * layer for layer, when in slots.items()}  # a turn is missed before each layer
    assert all(stagger.slot_error(rank, layer, when, 4, 1.0) == 0.0 for layer, when in late.items())
    assert stagger.load_ratio(rank, late, ranks=4, spacing_s=1.0) == pytest.approx(1.9, abs=0.08)
    assert stagger.load_ratio(rank, {0: 7.0}, ranks=4, spacing_s=1.0) == 1.0
