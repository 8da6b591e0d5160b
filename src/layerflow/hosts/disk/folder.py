"""The disk tier's folder: who owns it, how an object is stored in it, and whether it is still there.

::

    PATH/lock               held (flock) by the one host that uses the folder
    PATH/objects-1/new/     files being written; whatever is there at the start was torn, and is removed
    PATH/objects-1/00..ff/  complete files, by the first byte of their key

A file is renamed out of ``new`` when it is whole, so a killed process leaves no other. Nothing is synced:
after a power loss a file may have a wrong size (removed at the start) or wrong bytes (found by its checksums).
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
import xxhash

from layerflow.hosts.backend import ObjectLocation, Unreachable, Unusable
from layerflow.keys import DIGEST_BYTES
from layerflow.objects import HEADER_BYTES
from layerflow.pool.eviction import Evictable

# How the disk tier stores an object: one file, whose name says what it is and whose end says what its bytes are.
#
# A file is ``header (64 bytes) | layer 0 | layer 1 | ... | checksums``: the object as it lies in the arena, so that any
# run of layers is one read straight into it. The checksums are ``u64[1 + layers]`` (XXH3 of the header, then of each
# layer), little-endian, then the chunk's block digests (16 bytes each) where it has some, and one more checksum over
# the file's name and these, so that no other object's file passes for it.
#
# A name is ``KEY.LAYERSxLAYER_BYTES.BLOCKS.TOKENS[.PARENT][.bDIGESTS]``, keys in hex, DIGESTS the number of block
# digests: listing a folder is reading its index, but for these digests.


FORMAT = "objects-1"
"""Name of the folder that holds files of this format, and of this layout of objects."""

BLOCK_BYTES = 4096  # what file systems hand out room in
_NAME = re.compile(
    r"([0-9a-f]{48})\.(\d{1,9})x(\d{1,15})\.(\d{1,10})\.(\d{1,10})(?:\.([0-9a-f]{48}))?(?:\.b(\d{1,5}))?"
)


class StoredFile(Evictable):
    """A complete object on disk. Pins and the eviction order belong to the index that it is in."""

    __slots__ = (
        "block_digests",
        "blocks",
        "digests",
        "doubtful",
        "layer_bytes",
        "layers",
        "name",
        "parent",
        "pins",
        "tokens",
    )

    def __init__(  # noqa: PLR0917 - the fields of a file name, in their order
        self, key: bytes, layers: int, layer_bytes: int, blocks: int, tokens: int, parent: bytes, digests: int = 0
    ) -> None:
        super().__init__(key, room_of(layers, layer_bytes, digests))
        self.digests = digests  #: block digests that the file has
        self.block_digests = b""  #: these, where they were read
        self.layers, self.layer_bytes = layers, layer_bytes
        self.blocks, self.tokens, self.parent = blocks, tokens, parent
        self.pins = 0  #: fetches that have it open
        self.doubtful = False  #: the system failed to read it: a new write of its key replaces it
        tail = f".{parent.hex()}" if parent else ""
        tail += f".b{digests}" if digests else ""
        self.name = f"{key.hex()}.{layers}x{layer_bytes}.{blocks}.{tokens}{tail}"

    @classmethod
    def of(cls, place: ObjectLocation) -> StoredFile:
        """What a writer's place becomes."""
        count = len(place.block_digests) // DIGEST_BYTES
        stored = cls(place.key, place.layers, place.layer_bytes, place.blocks, place.tokens, place.parent, count)
        stored.block_digests = place.block_digests
        return stored

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return file_bytes(self.layers, self.layer_bytes, self.digests)

    @property
    def end_bytes(self) -> int:
        """Bytes of the file's end, behind the last layer."""
        return sums_bytes(self.layers) + self.digests * DIGEST_BYTES

    def fits(self, place: ObjectLocation) -> bool:
        """Whether a reader's place has this object's size."""
        return (self.layers, self.layer_bytes) == (place.layers, place.layer_bytes)


def parse_name(name: str) -> StoredFile | None:
    """None: not a name of this format."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    key, layers, layer_bytes, blocks, tokens, parent, digests = match.groups()
    sizes = (int(layers), int(layer_bytes), int(blocks), int(tokens))
    return StoredFile(bytes.fromhex(key), *sizes, bytes.fromhex(parent or ""), int(digests or 0))


def file_bytes(layers: int, layer_bytes: int, digests: int = 0) -> int:
    return HEADER_BYTES + layers * layer_bytes + sums_bytes(layers) + digests * DIGEST_BYTES


def room_of(layers: int, layer_bytes: int, digests: int = 0) -> int:
    """Bytes of the disk that such a file takes."""
    return -(-file_bytes(layers, layer_bytes, digests) // BLOCK_BYTES) * BLOCK_BYTES


def sums_bytes(layers: int) -> int:
    return 8 * (layers + 2)


def checksum(data: memoryview | bytes) -> int:
    """64 bits of XXH3. Without the GIL, at memory speed."""
    return xxhash.xxh3_64_intdigest(data)


def pack_sums(name: str, sums: Sequence[int], block_digests: bytes = b"") -> bytes:
    """A file's end. `sums`: the header's, then each layer's."""
    packed = struct.pack(f"<{len(sums)}Q", *sums) + block_digests
    return packed + struct.pack("<Q", checksum(name.encode() + packed))


def unpack_sums(name: str, raw: bytes, layers: int) -> tuple[tuple[int, ...], bytes] | None:
    """The checksums of the header and of each layer, and the block digests; None: not the end of this file."""
    packed, own, sums = raw[:-8], raw[-8:], 8 * (1 + layers)
    if len(packed) < sums or struct.pack("<Q", checksum(name.encode() + packed)) != own:
        return None
    return struct.unpack(f"<{1 + layers}Q", packed[:sums]), packed[sums:]


log = structlog.get_logger(__name__)

SHARDS = 256
_LOCK_RETRY_S = 0.05
_USABLE = "mount or create it, and let this user write to it"


class Obstacle(NamedTuple):
    """Why a folder cannot be used as it is.

    :param lasting: it will not be mended by a mount or a right.
    """

    what: str
    advice: str
    lasting: bool = False


def obstacle(path: Path, *, create: bool = True) -> Obstacle | None:
    """What keeps the disk tier from using `path`, found without changing anything; None = nothing does.

    :param create: the last part of `path` may be missing. What it lies in must exist: it may be a mount.
    """
    try:
        return _obstacle(path, create=create)
    except OSError as error:
        return Obstacle(f"{path} cannot be used: {error.strerror}", _USABLE)


def _obstacle(path: Path, *, create: bool) -> Obstacle | None:
    there = path.exists()
    if not there and not (create and path.parent.exists()):
        missing = path.parent if create else path
        return Obstacle(f"{path} cannot be used: {missing} does not exist", _USABLE)
    for folder in (path, path / FORMAT, path / FORMAT / "new") if there else (path.parent,):
        if not folder.exists():
            continue
        if not folder.is_dir():
            return Obstacle(f"{folder} is no folder", "choose another pool.disk.path", lasting=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return Obstacle(f"{path} cannot be used: {folder} is not writable for this user", _USABLE)
    lock = path / "lock"
    if lock.exists() and not os.access(lock, os.R_OK | os.W_OK):
        return Obstacle(f"{path} cannot be used: {lock} belongs to another user", _USABLE)
    tempfile.TemporaryFile(dir=path if there else path.parent).close()
    return None


def holder_of(path: Path) -> str:
    """The process that holds this folder, as it wrote it; "" = none does."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(lock)
    finally:
        os.close(lock)
    return ""


class Folder:
    """Made by :meth:`open`. Its methods raise OSError where nothing else is said."""

    def __init__(self, path: Path, lock: int) -> None:
        self._lock = lock
        self.path = path
        self._root = path / FORMAT
        self._new = f"{self._root}/new"
        for name in ("", "new", *(f"{shard:02x}" for shard in range(SHARDS))):
            os.makedirs(self._root / name, mode=0o700, exist_ok=True)
        self._identity = _identity(self._root)
        self.reopened = False  #: it was this process's all the while: what is half written may be this process's own

    @classmethod
    def open(cls, path: Path, until: float, *, create: bool, before: Folder | None = None) -> Folder:
        """Take it, waiting until then for another process to leave it.

        :param before: the one that this process had at this path. Its lock passes to this one where it is the same.
        :param create: make the last part of `path` if it is missing. What it lies in must exist: it may be a mount.
        :raises Unreachable: it is not there, or nothing can be written to it.
        :raises Unusable: another server uses it, or it is no folder.
        """
        if found := obstacle(path, create=create):
            raise (Unusable if found.lasting else Unreachable)(f"{found.what}; {found.advice}")
        lock, kept = -1, False
        try:
            if create and not path.exists():
                path.mkdir(mode=0o700)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if before is not None and before.holds(lock):
                os.close(lock)
                lock, before._lock, kept = before._lock, -1, True
            else:
                _take(lock, path, until)
            folder, lock = cls(path, lock), -1
            folder.reopened = kept and before is not None and folder._identity == before._identity
            return folder
        except OSError as error:
            raise Unreachable(f"{path} cannot be used: {error.strerror}; {_USABLE}") from error
        finally:
            if lock >= 0:
                os.close(lock)

    def holds(self, lock: int) -> bool:
        """Whether this descriptor is of the file by which the folder is held."""
        return self._lock >= 0 and os.path.sameopenfile(lock, self._lock)

    def close(self) -> None:
        """Let others have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # Looking -------------------------------------------------------------------------------------

    def clear_torn(self) -> None:
        """Remove what a crash left half written, as far as it can be. Before the first :meth:`create`."""
        with os.scandir(self._new) as entries:
            for entry in entries:
                _unlink(entry.path)

    def scan(self, progress: Callable[[int, int], None]) -> list[StoredFile]:
        """Every complete object, oldest first. No payload is read, but each file's size is: minutes on a cold disk.

        Files may be created, published and removed meanwhile. A file of a wrong size is removed, and the older of two
        files of one key. What cannot be looked at or removed counts as no object.

        :param progress: told the objects and their bytes of the disk that a shard had, after each; may raise.
        """
        found: dict[bytes, tuple[int, StoredFile]] = {}
        for shard in range(SHARDS):
            before, nbytes = len(found), 0
            with os.scandir(f"{self._root}/{shard:02x}") as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed since its shard was listed
                        continue
                    except OSError as error:
                        log.warning("disk_file_unreadable", file=entry.path, error=error.strerror)
                        continue
                    stored = parse_name(entry.name)
                    if stored is None or stored.key[0] != shard or status.st_size != stored.nbytes:
                        if _unlink(entry.path):
                            log.warning("disk_file_removed", file=entry.path, bytes=status.st_size, reason="not whole")
                        continue
                    age, other = (status.st_mtime_ns, stored), found.get(stored.key)
                    if other is not None:  # another size or token count; whole, but one key has one object
                        age, other = max(age, other, key=_moment), min(age, other, key=_moment)
                        log.warning("disk_file_removed", file=other[1].name, reason="a newer one has its key")
                        self.remove(other[1])
                    found[stored.key] = age
                    nbytes += stored.room
            progress(len(found) - before, nbytes)
        return [stored for _, stored in sorted(found.values(), key=_moment)]

    def block_digests(self, stored: StoredFile) -> bytes:
        """Read those of a complete file; empty: it is gone, or its end is not its own, which a read will tell.

        :raises OSError: the system would not open or read it.
        """
        try:
            fd = self.open_whole(stored)
        except FileNotFoundError:
            return b""
        try:
            said = unpack_sums(
                stored.name, os.pread(fd, stored.end_bytes, stored.nbytes - stored.end_bytes), stored.layers
            )
        finally:
            os.close(fd)
        return said[1] if said is not None else b""

    def same(self) -> bool:
        """Whether this is still the folder that was opened and is held, and not an empty mount point or a new one.

        :raises Unreachable: there is none, or nothing can be written to it.
        """
        try:
            same = self._lock >= 0 and _identity(self._root) == self._identity
        except FileNotFoundError:
            return False
        except OSError as error:
            raise Unreachable(f"{self._root} does not answer: {error.strerror}; see the system's log") from error
        if not os.access(self._new, os.W_OK | os.X_OK):
            raise Unreachable(f"{self._root} cannot be written to: remount it, or give this user the right")
        return same

    def free_bytes(self) -> int:
        """What this user may still write to its file system."""
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    # Files ---------------------------------------------------------------------------------------

    def create(self, stored: StoredFile) -> int:
        """A descriptor of a new file that nobody sees."""
        return os.open(self._torn(stored), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def publish(self, stored: StoredFile) -> None:
        """What was created is whole."""
        os.rename(self._torn(stored), self._whole(stored))

    def open_whole(self, stored: StoredFile) -> int:
        """A descriptor of a complete file."""
        return os.open(self._whole(stored), os.O_RDONLY | os.O_CLOEXEC)

    def remove(self, stored: StoredFile, *, torn: bool = False) -> None:
        """Never raises: what cannot be removed now is in the way of nothing."""
        _unlink(self._torn(stored) if torn else self._whole(stored))

    def _torn(self, stored: StoredFile) -> str:
        return f"{self._new}/{stored.name}"

    def _whole(self, stored: StoredFile) -> str:
        return f"{self._root}/{stored.key[0]:02x}/{stored.name}"


def _unlink(path: str) -> bool:
    """Whether it was there and has gone. What cannot be removed is left: it is in the way of nothing."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("disk_file_not_removed", file=path, error=error.strerror)
        return False
    return True


def _moment(found: tuple[int, StoredFile]) -> int:
    return found[0]


def _identity(root: Path) -> tuple[int, int]:
    status = os.stat(root)
    return status.st_dev, status.st_ino


def _owner(lock: int) -> str:
    return os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"


def _take(lock: int, path: Path, until: float) -> None:
    """A server that was killed may take a moment to die, and its host with it."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise Unusable(
                    f"{path} is in use by another server (process {_owner(lock)}): give each its own pool.disk.path"
                ) from None
            time.sleep(_LOCK_RETRY_S)
        else:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            return
