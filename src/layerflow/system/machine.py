"""What this machine has: memory, its nodes (NUMA) and limits, huge pages, file systems, devices."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from layerflow.errors import ConfigError, Unsupported

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_CAP_IPC_LOCK = 14  # <linux/capability.h>


def _text(path: Path) -> str:
    """A file of the kernel; "" where this kernel or container has none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def available_bytes(proc: Path = PROC) -> int | None:
    """Memory that could be taken without swapping; None if the kernel does not say."""
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def total_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Memory that this process may have at all: the machine's, or the tightest limit of its control groups."""
    found = [limit for limit, _ in _limits(proc, cgroups)]
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            found.append(int(line.split()[1]) << 10)
    return min(found) if found else None


def cgroup_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Memory left below the tightest limit of this process's control groups; None without a limit."""
    left = [limit - used for limit, used in _limits(proc, cgroups)]
    return max(0, min(left)) if left else None


def free_bytes() -> float:
    """Memory that this process could take now, from no other; infinite where the kernel does not say."""
    return min((found for found in (available_bytes(), cgroup_bytes()) if found is not None), default=math.inf)


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, and the root of the mount is the group itself.
        place = root / path.lstrip("/")
        for group in (place, *place.parents):
            if not group.is_relative_to(root):
                break
            limit, used = _text(group / names[0]).strip(), _text(group / names[1]).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < 1 << 60:
                yield int(limit), int(used) - _statistic(group / "memory.stat", names[2])


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def free_huge_bytes(pages: Path = HUGE_PAGES) -> int:
    """Reserved 2 MiB pages that nobody has claimed."""
    free, claimed = (_text(pages / name).strip() or "0" for name in ("free_hugepages", "resv_hugepages"))
    return max(0, int(free) - int(claimed)) << 21


def lockable_bytes(proc: Path = PROC) -> int | None:
    """What this user's processes may pin; None if there is no limit."""
    for line in _text(proc / "self" / "status").splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def file_system(path: Path, proc: Path = PROC) -> str:
    """The kind of file system that holds `path`, which exists; "" if unknown."""
    place, best, kind = path.resolve(), -1, ""
    for line in _text(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].replace("\\040", " "))
        if place.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), after.split()[0]
    return kind


def existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def devices(pattern: str, root: Path = Path("/dev")) -> list[str]:
    """Device files of a kind, e.g. ``"davinci[0-9]*"``."""
    return sorted(found.name for found in root.glob(pattern))


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Names of this machine's RDMA devices."""
    return sorted(found.name for found in root.glob("*"))


# On which memory nodes (NUMA) of this machine the arena belongs, and how it gets there.


NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")
NUMA_AUTO, NUMA_OFF = "auto", "off"
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
    if setting == NUMA_OFF:
        return Placement((), "pool.numa is off")
    if setting != NUMA_AUTO:
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
