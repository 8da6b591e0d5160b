"""What this machine has: memory and its limits, huge pages, file systems, devices."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from pathlib import Path

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
