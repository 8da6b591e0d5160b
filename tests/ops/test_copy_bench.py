"""The copy and stagger benchmarks run and answer in the shape that is printed; no figure is judged here."""

from __future__ import annotations

from layerflow_cli.bench import copy, stagger


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


def test_stagger_answers_in_microseconds() -> None:
    result = stagger.measure(slots=5, rounds=1)
    assert set(result["error_us"]) == {"p50", "p95", "max"}
    assert 0 <= result["error_us"]["p50"] <= result["error_us"]["max"]
