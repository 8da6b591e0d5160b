"""The disk tier's directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from layerflow.config.settings import PoolSettings
from layerflow.findings import Finding, ok, problem, size_text, warning
from layerflow.hosts.disk.folder import holder_of, obstacle
from layerflow.hosts.disk.plugin import DiskSettings
from layerflow.system import machine

_LOST = {
    "tmpfs": "is in memory: it ends with the machine's uptime, and takes what the arena could have",
    "ramfs": "is in memory: it ends with the machine's uptime, and takes what the arena could have",
    "overlay": "is the container's own layer: it ends with the container",
}
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p")


def examine(settings: DiskSettings, pool: PoolSettings, running: bool) -> Iterator[Finding]:
    """Can it be written, is there room, will it stay."""
    path = Path(os.path.abspath(settings.path))
    if found := obstacle(path):
        yield problem("disk path", found.what, found.advice)
        return
    above = machine.existing(path)
    if not running and (holder := holder_of(path)):
        yield problem(
            "disk path", f"{path} is in use by another server (process {holder})", "give each its own pool.disk.path"
        )
    elif above != path:
        yield ok("disk path", f"{path} will be made")
    elif path.stat().st_mode & 0o077:
        yield warning("disk path", f"other users may enter {path}, where prompts' KV lies", f"chmod 700 {path}")
    else:
        yield ok("disk path", f"{path} is writable")
    yield _room(path, above, settings.capacity)
    yield _kind(path, machine.file_system(above))


def _room(path: Path, above: Path, capacity: int) -> Finding:
    volume = os.statvfs(above)
    free, held = volume.f_bavail * volume.f_frsize, _held(path)
    found = (
        f"{size_text(free)} free"
        + (f" and {size_text(held)} held already" if held else "")
        + f"; capacity {size_text(capacity)}"
    )
    if free + held < capacity:
        return problem("disk room", found, "set a smaller pool.disk.capacity, or free the difference")
    return ok("disk room", found)


def _held(path: Path) -> int:
    """Bytes that files below `path` take."""
    found = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                found += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # a running server has evicted it
    return found


def _kind(path: Path, kind: str) -> Finding:
    if kind in _LOST:
        return warning("disk kind", f"{path} {_LOST[kind]} ({kind})", "set pool.disk.path to a directory on a disk")
    if kind in _REMOTE:
        return warning("disk kind", f"{path} is on another machine ({kind})", "a local disk is faster and cannot hang")
    return ok("disk kind", kind or "unknown file system")
