"""What the disk tier could store its objects in, measured: ``python -m bench.disk_storage [--path FOLDER]``.

Objects of three sizes are written layer by layer out of an arena, and read back layer by layer into it. Nobody
syncs: all of these survive a killed process that way. Contenders take turns within each round; ``tier`` is the
disk tier as it is, with its index, checksums and eviction. Those whose library is missing are left out
(``pip install lmdb rocksdict``).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import structlog

from layerflow.hosts.backend import OK, ObjectLocation
from layerflow.hosts.disk.backend import Disk
from layerflow.objects import HEADER_BYTES
from layerflow.system.memfd import SharedMemory

SHAPES = {"100 KB": (8, 12_800), "1 MB": (24, 43_690), "10 MB": (60, 174_762)}  # layers, bytes of one
SEGMENT = 64 << 20
FIGURES = ("write", "write_cpu", "read", "read_cpu", "cold", "churn", "space")


ARENAS: dict[Path, SharedMemory] = {}  # of the run that uses a folder


class Store(Protocol):
    """One contender, opened over an empty folder, or over the one that it filled."""

    def write(self, key: bytes, layers: Sequence[memoryview]) -> None: ...
    def read(self, key: bytes, layers: Sequence[memoryview]) -> None: ...
    def delete(self, key: bytes, layers: int) -> None: ...
    def close(self) -> None: ...


class Files:
    """A file per object, renamed when it is complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        for shard in range(256):
            os.makedirs(f"{self._folder}/{shard:02x}", exist_ok=True)

    def _name(self, key: bytes) -> str:
        return f"{self._folder}/{key[0]:02x}/{key.hex()}"

    def write(self, key: bytes, layers: Sequence[memoryview]) -> None:
        name = self._name(key)
        fd = os.open(name + "~", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        at = 0
        for layer in layers:
            at += os.pwritev(fd, [layer], at)
        os.close(fd)
        os.rename(name + "~", name)

    def read(self, key: bytes, layers: Sequence[memoryview]) -> None:
        fd = os.open(self._name(key), os.O_RDONLY)
        at = 0
        for layer in layers:
            at += os.preadv(fd, [layer], at)
        os.close(fd)

    def delete(self, key: bytes, layers: int) -> None:
        os.unlink(self._name(key))

    def close(self) -> None:
        pass


class Segments:
    """Append-only files of 64 MiB and an index in memory. Without the compaction that would make room again."""

    index: dict[bytes, tuple[int, int]] = {}  # noqa: RUF012 - outlives a reopening, as a journal would

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = sorted(folder.glob("*.seg"))
        self._fds = [os.open(name, os.O_RDWR) for name in names]
        self._tail = SEGMENT

    def write(self, key: bytes, layers: Sequence[memoryview]) -> None:
        if self._tail + sum(map(len, layers)) > SEGMENT:
            name = self._folder / f"{len(self._fds):06}.seg"
            self._fds.append(os.open(name, os.O_RDWR | os.O_CREAT, 0o600))
            self._tail = 0
        start = self._tail
        for layer in layers:
            self._tail += os.pwritev(self._fds[-1], [layer], self._tail)
        self.index[key] = (len(self._fds) - 1, start)

    def read(self, key: bytes, layers: Sequence[memoryview]) -> None:
        segment, at = self.index[key]
        for layer in layers:
            at += os.preadv(self._fds[segment], [layer], at)

    def delete(self, key: bytes, layers: int) -> None:
        del self.index[key]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


class Lmdb:
    """A value per layer, a transaction per object; reads copy out of its mapping."""

    def __init__(self, folder: Path) -> None:
        import lmdb  # noqa: PLC0415 - a contender only

        self._env: Any = lmdb.open(str(folder), map_size=8 << 30, sync=False, metasync=False)

    def write(self, key: bytes, layers: Sequence[memoryview]) -> None:
        with self._env.begin(write=True) as transaction:
            for number, layer in enumerate(layers):
                transaction.put(key + number.to_bytes(2, "big"), layer)

    def read(self, key: bytes, layers: Sequence[memoryview]) -> None:
        with self._env.begin(buffers=True) as transaction:
            for number, layer in enumerate(layers):
                layer[:] = transaction.get(key + number.to_bytes(2, "big"))

    def delete(self, key: bytes, layers: int) -> None:
        with self._env.begin(write=True) as transaction:
            for number in range(layers):
                transaction.delete(key + number.to_bytes(2, "big"))

    def close(self) -> None:
        self._env.close()


class RocksDb:
    """A value per layer in blob files, a batch per object, no compression."""

    def __init__(self, folder: Path) -> None:
        import rocksdict  # noqa: PLC0415 - a contender only

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        self._batch = rocksdict.WriteBatch
        self._db: Any = rocksdict.Rdict(str(folder), options)

    def write(self, key: bytes, layers: Sequence[memoryview]) -> None:
        batch = self._batch(raw_mode=True)
        for number, layer in enumerate(layers):
            batch.put(key + number.to_bytes(2, "big"), bytes(layer))
        self._db.write(batch)

    def read(self, key: bytes, layers: Sequence[memoryview]) -> None:
        for number, layer in enumerate(layers):
            layer[:] = self._db[key + number.to_bytes(2, "big")]

    def delete(self, key: bytes, layers: int) -> None:
        batch = self._batch(raw_mode=True)
        for number in range(layers):
            batch.delete(key + number.to_bytes(2, "big"))
        self._db.write(batch)

    def close(self) -> None:
        self._db.close()


class Sqlite:
    """A blob per object, written and read in pieces."""

    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / "objects.db", isolation_level=None)
        for pragma in ("page_size=65536", "journal_mode=WAL", "synchronous=OFF"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("CREATE TABLE IF NOT EXISTS objects (key BLOB UNIQUE, data BLOB)")

    def write(self, key: bytes, layers: Sequence[memoryview]) -> None:
        self._db.execute("BEGIN")
        size = sum(map(len, layers))
        row = self._db.execute("INSERT INTO objects VALUES (?, zeroblob(?))", (key, size)).lastrowid
        assert row is not None
        with self._db.blobopen("objects", "data", row) as blob:
            for layer in layers:
                blob.write(layer)
        self._db.execute("COMMIT")

    def read(self, key: bytes, layers: Sequence[memoryview]) -> None:
        [row] = self._db.execute("SELECT rowid FROM objects WHERE key = ?", (key,)).fetchone()
        with self._db.blobopen("objects", "data", row, readonly=True) as blob:
            for layer in layers:
                layer[:] = blob.read(len(layer))

    def delete(self, key: bytes, layers: int) -> None:
        self._db.execute("DELETE FROM objects WHERE key = ?", (key,))

    def close(self) -> None:
        self._db.close()


class Tier:
    """The disk tier itself: files, each with a checksum per layer."""

    def __init__(self, folder: Path) -> None:
        self._arena = ARENAS[folder]
        self._disk = Disk({"path": str(folder), "capacity": 8 << 30})
        self._disk.attach(self._arena, lambda keys: None)

    def _place(self, key: bytes, layers: Sequence[memoryview]) -> list[ObjectLocation]:
        return [ObjectLocation(key, 0, self._arena.address, len(layers[0]), len(layers), 1, 1)]

    def write(self, key: bytes, layers: Sequence[memoryview]) -> None:
        place, until = self._place(key, layers), time.monotonic() + 60
        assert self._disk.open_write(place, until) == [OK]
        for number in range(len(layers)):
            assert self._disk.write(place, number, number + 1, until) == [OK]
        assert self._disk.commit(place, until) == [OK]

    def read(self, key: bytes, layers: Sequence[memoryview]) -> None:
        place, until = self._place(key, layers), time.monotonic() + 60
        assert self._disk.open_fetch(place, until) == [OK]
        for number in range(len(layers)):
            assert self._disk.fetch(place, number, number + 1, until) == [OK]
        self._disk.close_fetch(place)

    def delete(self, key: bytes, layers: int) -> None:
        self._disk.hide([key])

    def close(self) -> None:
        self._disk.close()


CONTENDERS: dict[str, tuple[type[Store], str]] = {
    "tier": (Tier, "xxhash"),
    "files": (Files, "os"),
    "segments": (Segments, "os"),
    "lmdb": (Lmdb, "lmdb"),
    "rocksdb": (RocksDb, "rocksdict"),
    "sqlite": (Sqlite, "sqlite3"),
}


def forget(folder: Path) -> None:
    """Out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def clocked(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds of wall time and of this process's processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def run(kind: type[Store], parent: Path, shape: tuple[int, int], nbytes: int) -> dict[str, float]:
    """MB/s, and for ``_cpu`` processor seconds per GB, of one contender."""
    layers, size = shape
    count = nbytes // (layers * size)
    keys = [os.urandom(24) for _ in range(count)]
    folder = Path(tempfile.mkdtemp(dir=parent))
    arena = ARENAS[folder] = SharedMemory.create(HEADER_BYTES + layers * size)
    whole = arena.view[HEADER_BYTES : HEADER_BYTES + layers * size]
    pieces = [whole[i * size : (i + 1) * size] for i in range(layers)]
    payload = os.urandom(layers * size)
    whole[:] = payload
    moved = count * layers * size

    def write() -> None:
        for key in keys:
            store.write(key, pieces)

    def read() -> None:
        for key in keys:
            store.read(key, pieces)

    def churn() -> None:
        for turn in range(2 * count):
            at = choice.randrange(count)
            store.delete(keys[at], sizes[at])
            keys[at], sizes[at] = os.urandom(24), layers - turn % (layers // 2)
            store.write(keys[at], pieces[: sizes[at]])

    choice, sizes = random.Random(1), [layers] * count
    try:
        store = kind(folder)
        writing = clocked(write)
        whole[:] = bytes(len(whole))
        reading = clocked(read)
        assert whole == payload
        store.close()
        forget(folder)
        store = kind(folder)
        cold = clocked(read)
        churning = clocked(churn)
        store.close()
        on_disk = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(folder)
        del ARENAS[folder]
    return {
        "write": moved / 1e6 / writing[0],
        "write_cpu": writing[1] / moved * 1e9,
        "read": moved / 1e6 / reading[0],
        "read_cpu": reading[1] / moved * 1e9,
        "cold": moved / 1e6 / cold[0],
        "churn": 2 * count / churning[0],
        "space": on_disk / sum(each * size for each in sizes),
    }


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=128, help="written per contender, size and round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    known = {name: kind for name, (kind, module) in CONTENDERS.items() if find_spec(module)}
    print(f"{'object':>8} {'store':>9} " + " ".join(f"{figure:>10}" for figure in FIGURES))
    for label, shape in SHAPES.items():
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in known}
        for turn in range(arguments.rounds):
            names = list(known)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seen[name].append(run(known[name], arguments.path, shape, arguments.mib << 20))
        for name, rounds in seen.items():
            medians = [statistics.median(each[figure] for each in rounds) for figure in FIGURES]
            print(f"{label:>8} {name:>9} " + " ".join(f"{median:10.2f}" for median in medians), flush=True)
    print(
        "write, read (page cache warm), cold: MB/s. *_cpu: processor seconds per GB. churn: objects deleted and others "
        "of 50 to 100 % of the size written, per second. space: bytes on disk by bytes stored, after it. Medians."
    )


if __name__ == "__main__":
    main()
