"""On which memory node the arena goes."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from layerflow import Settings
from layerflow.errors import ConfigError, Unsupported
from layerflow.pool.arena import Arena
from layerflow.system.machine import device_nodes, memory_nodes, place, placement
from layerflow.system.memfd import SharedMemory

GPU, DISPLAY, NPU = ("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x19e5", "0x120000")


def machine(root: Path, nodes: str, *devices: tuple[tuple[str, str], int]) -> tuple[tuple[int, ...], list[int]]:
    """Nodes and accelerators that a fake sysfs shows."""
    (root / "node").mkdir()
    (root / "node" / "has_memory").write_text(f"{nodes}\n")
    for number, ((vendor, kind), node) in enumerate(devices):
        device = root / "pci" / f"0000:{number:02x}:00.0"
        device.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            (device / name).write_text(f"{text}\n")
    return memory_nodes(root / "node"), list(device_nodes(root / "pci"))


@pytest.mark.parametrize(
    ("nodes", "devices", "expected"),
    [
        ("0", [(GPU, 0)], ()),
        ("0-1", [(GPU, 1), (GPU, 1)], (1,)),
        ("0-1", [(GPU, 0), (NPU, 1)], (0, 1)),
        ("0-1,4", [(NPU, 4), (DISPLAY, 0)], (0, 4)),
        ("0-1", [(GPU, -1)], ()),
        ("0-1", [(("0x8086", "0x020000"), 1)], ()),
        ("0-1", [(("0x10de", "0x040300"), 1)], ()),  # the sound of a graphics card
        ("0-1", [], ()),
        ("0,2", [(GPU, 1)], ()),  # a node without memory
    ],
)
def test_auto_follows_the_accelerators(
    tmp_path: Path, nodes: str, devices: list[tuple[tuple[str, str], int]], expected: tuple[int, ...]
) -> None:
    assert placement("auto", *machine(tmp_path, nodes, *devices)).nodes == expected


def test_what_the_setting_names_holds(tmp_path: Path) -> None:
    there = machine(tmp_path, "0-1", (GPU, 0))
    assert placement("1", *there).nodes == (1,)
    assert placement("off", *there).nodes == ()
    with pytest.raises(ConfigError, match=r"pool\.numa = 7: no such node with memory; there are: 0, 1"):
        placement("7", *there)


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path) == ()
    assert placement("auto", memory_nodes(tmp_path), []).nodes == ()


@pytest.mark.parametrize("value", ["both", "-1", "1.5", "2000", ""])
def test_a_setting_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="must be auto, off, or the number of a node"):
        Settings.load(None, {"pool.numa": value})


@pytest.mark.skipif(0 not in memory_nodes(), reason="this kernel tells of no node 0")
class TestOfThisMachine:
    def test_the_kernel_takes_the_policy_and_pages_are_there(self) -> None:
        with SharedMemory.create(16 * mmap.PAGESIZE) as memory:
            try:
                place(memory.address, memory.nbytes, (0,))
            except Unsupported as error:
                pytest.skip(str(error))
            memory.populate()
            line = next(
                line
                for line in Path("/proc/self/numa_maps").read_text().splitlines()
                if line.startswith(f"{memory.address:x} ")
            )
            assert "prefer" in line
            assert "N0=" in line

    def test_a_node_that_is_not_there_is_refused(self) -> None:
        with SharedMemory.create(mmap.PAGESIZE) as memory, pytest.raises(Unsupported, match="placing 4096 bytes"):
            place(memory.address, memory.nbytes, (1000,))

    def test_an_arena_tells_where_it_is(self) -> None:
        with Arena(1 << 20, numa="0") as arena:
            assert arena.placed == "node 0: pool.numa names it" or arena.placed.startswith("not placed: ")
        with Arena(1 << 20) as arena:
            assert arena.placed == "not placed: pool.numa is off"
