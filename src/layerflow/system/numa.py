"""On which memory nodes (NUMA) of this machine the arena belongs, and how it gets there."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from layerflow.errors import ConfigError, Unsupported

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")
AUTO, OFF = "auto", "off"
_ACCELERATORS = {("0x10de", "0x0300"), ("0x10de", "0x0302"), ("0x19e5", "0x1200")}
"""Vendor and class of PCI devices: NVIDIA's GPUs with and without a display, Huawei's NPUs."""

_SYS_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())  # <asm/unistd.h>
_PREFERRED, _INTERLEAVE = 1, 3  # MPOL_, <linux/mempolicy.h>
_MASK_BITS = 1024

_libc = ctypes.CDLL(None, use_errno=True)


class Placement(NamedTuple):
    """Where pages come from.

    :param nodes: one: from there, and from others only once that is full. Several: in turn. None: as the kernel likes.
    :param reason: for people.
    """

    nodes: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        where = f"node {', '.join(map(str, self.nodes))}" if self.nodes else "not placed"
        return f"{where}: {self.reason}"


def placement(setting: str, nodes: Iterable[int], of_devices: Iterable[int]) -> Placement:
    """What `[pool] numa` means on a machine. Pure.

    An arena is everybody's: where devices are on several nodes, so are its pages, in turn.

    :param setting: ``"auto"``, ``"off"``, or a node's number.
    :param nodes: that have memory.
    :param of_devices: of each accelerator, its node; -1 = the machine does not say.
    :raises ConfigError: there is no such node.
    """
    there = tuple(sorted(set(nodes)))
    if setting == OFF:
        return Placement((), "pool.numa is off")
    if setting != AUTO:
        if int(setting) not in there:
            known = ", ".join(map(str, there)) or "none that this machine tells of"
            raise ConfigError(f"pool.numa = {setting}: no such node with memory; there are: {known}")
        return Placement((int(setting),), "pool.numa names it")
    if len(there) < 2:
        return Placement((), "the machine has one node")
    near = tuple(sorted({node for node in of_devices if node in there}))
    if not near:
        return Placement((), "no accelerator tells its node")
    if near == there:
        return Placement(near, "all nodes have accelerators")
    return Placement(near, "accelerators are there")


def memory_nodes(root: Path = NODES) -> tuple[int, ...]:
    """Nodes with memory, e.g. from ``0-1,4``; none where the kernel has no NUMA."""
    try:
        text = (root / "has_memory").read_text().strip()
    except OSError:
        return ()
    spans = (span.partition("-") for span in text.split(",") if span)
    return tuple(node for lo, _, hi in spans for node in range(int(lo), int(hi or lo) + 1))


def device_nodes(root: Path = PCI) -> Iterator[int]:
    """The node of each accelerator of this machine; -1 = unknown."""
    for device in sorted(root.glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if (vendor, kind[:6]) in _ACCELERATORS:
                yield int((device / "numa_node").read_text())
        except OSError:
            continue


def here(setting: str) -> Placement:
    """:func:`placement` on this machine."""
    return placement(setting, memory_nodes(), device_nodes())


def place(address: int, nbytes: int, nodes: tuple[int, ...]) -> None:
    """Let pages of a mapping come from these nodes; of shared memory, for every process. Pages it has already stay.

    :param address: of a page.
    :raises Unsupported: the kernel refuses; containers often do not permit it.
    """
    if _SYS_MBIND is None:
        raise Unsupported(f"placing memory on nodes: not known how on {platform.machine()}")
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    arguments = (address, nbytes, mode)
    if _libc.syscall(
        ctypes.c_long(_SYS_MBIND), *map(ctypes.c_ulong, arguments), mask, *map(ctypes.c_ulong, (_MASK_BITS, 0))
    ):
        code = ctypes.get_errno()
        advice = "; a container needs CAP_SYS_NICE for it" if code == errno.EPERM else ""
        raise Unsupported(f"placing {nbytes} bytes on node {nodes}: {os.strerror(code)}{advice}")
