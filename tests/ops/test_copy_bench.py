"""The copy benchmark answers in the shape that is printed, the stagger benchmark knows slots; no figure is judged."""

from __future__ import annotations

import pytest

from layerflow_cli.bench import stagger
from layerflow_cli.bench.transfer import copy


def test_copy_answers_for_each_block_size_and_for_two_lanes() -> None:
    result = copy.measure(moved_bytes=1 << 20, turns=1, block_kib=(16, 64))
    assert set(result) == {"16KiB", "64KiB", "two_lanes", "two_contiguous", "two_cores", "native"}
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
