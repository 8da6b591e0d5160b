"""A folder that takes long to read: the host answers, objects come and go meanwhile, and nothing is lost."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from hosts import slow_disk
from hosts.bench import PATIENCE_S, Thing
from hosts.disk_bench import DiskBench, files
from hosts.served import Served, write
from layerflow.hosts.backend import BackendError, Unreachable
from layerflow.hosts.disk import backend as disk
from layerflow.hosts.disk.backend import Disk
from layerflow.hosts.disk.folder import Folder, StoredFile
from layerflow.hosts.disk.index import DiskIndex
from layerflow.wire.host_messages import Fetch, Fetched, Indexed, Pull, Up
from layerflow_testing import ARENA, OK, load, outcomes, put, save, soon


class Gate:
    """Stops every reading of a folder after half of its shards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.go.set()
        real = os.scandir

        def scandir(path):
            if str(path).endswith("/80"):
                self.reached.set()
                assert self.go.wait(PATIENCE_S)
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)

    def shut(self) -> None:
        self.go.clear()
        self.reached.clear()

    def arrive(self) -> None:
        assert self.reached.wait(PATIENCE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "SCAN_PATIENCE_S", 0)
    gate = Gate(monkeypatch)
    yield gate
    gate.go.set()


@pytest.fixture
def bench(tmp_path: Path, gate: Gate):
    bench = DiskBench(tmp_path / "tier")
    scanned(bench.first.backend)
    yield bench
    gate.go.set()
    bench.close()


def scanned(backend: Disk) -> None:
    assert backend._scan is not None
    assert backend._scan.wait(PATIENCE_S)


def agrees(bench: DiskBench, things: list) -> None:
    """The index, the files and what the server was told are these objects, and all can be read."""
    backend = bench.first.backend
    assert isinstance(backend, Disk)
    assert {entry.key for entry in backend._index.entries()} == {thing.key for thing in things}
    assert bench.known == {thing.key: (thing.blocks, thing.tokens) for thing in things}
    assert len(files(bench.path)) == len(things)
    on_disk = sum(os.stat(name).st_blocks * 512 for name in files(bench.path))
    figures = backend.statistics()
    assert on_disk <= figures["used_bytes"] <= bench.capacity
    assert (figures["reserved_bytes"], figures["unread_folder"]) == (0, 0)
    for thing in things:
        [(outcome, data)] = load(bench, bench.first, [thing], ARENA // 2)
        assert outcome == OK
        assert np.array_equal(data, thing.bytes)
    backend._index.validate()


def reread(bench: DiskBench, gate: Gate) -> None:
    """A new process on the folder, half of which it has read."""
    gate.shut()
    bench.restart()
    gate.arrive()


def test_writes_while_the_folder_is_read(bench, gate):
    old = [bench.thing(number) for number in range(40)]
    assert save(bench, bench.first, old) == [OK] * 40
    reread(bench, gate)
    new = [bench.thing(("new", number)) for number in range(40)]
    assert save(bench, bench.first, new) == [OK] * 40
    same = old[:10]  # not known yet to be there
    others = [bench.thing(number, tokens=99) for number in range(10, 20)]  # of another name
    assert save(bench, bench.first, [*same, *others]) == [OK] * 20
    assert bench.first.backend.statistics()["unread_folder"] == 1
    gate.go.set()
    scanned(bench.first.backend)
    agrees(bench, [*same, *others, *old[20:], *new])


def test_what_goes_while_the_folder_is_read_does_not_come_back(bench, gate):
    old = [bench.thing(number) for number in range(20)]
    assert save(bench, bench.first, old) == [OK] * 20
    reread(bench, gate)
    assert save(bench, bench.first, old) == [OK] * 20
    bench.first.backend.hide([thing.key for thing in old[:10]])
    gate.go.set()
    scanned(bench.first.backend)
    agrees(bench, old[10:])


def test_a_purge_waits_until_the_folder_is_read(bench, gate):
    old = [bench.thing(number) for number in range(20)]
    assert save(bench, bench.first, old) == [OK] * 20
    reread(bench, gate)
    new = bench.thing("new")
    assert save(bench, bench.first, [new]) == [OK]
    backend = bench.first.backend
    with pytest.raises(BackendError, match="still being read; purge again"):
        backend.clear([], time.monotonic())
    removed: list[int] = []
    purge = threading.Thread(target=lambda: removed.append(backend.clear([], soon())))
    purge.start()
    gate.go.set()
    purge.join()
    assert removed == [21]
    scanned(backend)
    agrees(bench, [])


def test_a_folder_that_cannot_be_read_is_not_called_empty(bench, gate, monkeypatch):
    assert save(bench, bench.first, [bench.thing("old")]) == [OK]
    reread(bench, gate)
    monkeypatch.setattr(DiskIndex, "fill", Mock(side_effect=OSError(5, "it broke")))
    gate.go.set()
    with pytest.raises(Unreachable, match="cannot be read"):
        bench.first.backend.clear([], soon())


def test_a_file_listed_before_it_was_evicted(bench, gate):
    """Its name is among those found, its file is gone."""
    index, one = bench.first.backend._index, bench.thing("one")
    reading = index.clear()
    assert save(bench, bench.first, [one]) == [OK]
    [stored] = index._held.values()
    bench.first.backend.hide([one.key])
    assert index.fill(reading, [stored]) == []
    index.filled(reading)
    agrees(bench, [])


def test_room_is_kept_while_the_folder_is_read(bench, gate):
    """What was found counts before it is offered; and the oldest go, not what was written meanwhile."""
    old = [bench.thing(number, blocks=60) for number in range(18)]
    for at, thing in enumerate(old):
        assert save(bench, bench.first, [thing]) == [OK]
        [name] = [name for name in files(bench.path) if thing.key.hex() in name]
        os.utime(name, ns=(at, at))
    reread(bench, gate)
    new = [bench.thing(("new", number), blocks=60) for number in range(8)]
    for thing in new:
        save(bench, bench.first, [thing])
    # Where most of the old ones lie in the half that was read, the last of the new ones take the room of the first.
    written = [thing for thing in new if bench.first.backend.lookup([thing.key], soon()) == [True]]
    assert written
    gate.go.set()
    scanned(bench.first.backend)
    here = [thing for thing in old if bench.first.backend.lookup([thing.key], soon()) == [True]]
    assert bench.first.backend.lookup([thing.key for thing in written], soon()) == [True] * len(written)
    assert here == old[len(old) - len(here) :]
    agrees(bench, [*here, *written])


def test_a_reading_that_another_one_replaces(bench, gate, tmp_path):
    old, new = bench.thing("old"), bench.thing("new")
    assert save(bench, bench.first, [old]) == [OK]
    reread(bench, gate)
    first = bench.first.backend._scan
    os.rename(bench.path, tmp_path / "away")
    bench.path.mkdir()
    bench.first.backend.check()
    assert save(bench, bench.first, [new]) == [OK]
    gate.go.set()
    assert first.wait(PATIENCE_S)
    scanned(bench.first.backend)
    agrees(bench, [new])


def restart_with_a_reading_that_fails(bench, monkeypatch):
    attached = threading.Event()  # a scan that fails before is a folder that cannot be attached

    def fail(folder: Folder, progress: object) -> None:
        assert attached.wait(PATIENCE_S)
        os.stat(tmp_missing(folder))

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "scan", fail)
        bench.restart()
        attached.set()
        scanned(bench.first.backend)


def test_a_folder_that_fails_while_it_is_read_is_read_again(bench, gate, monkeypatch):
    one = bench.thing("one")
    assert save(bench, bench.first, [one]) == [OK]
    restart_with_a_reading_that_fails(bench, monkeypatch)
    assert bench.known == {}
    bench.first.backend.check()
    scanned(bench.first.backend)
    agrees(bench, [one])


def test_a_write_lives_through_a_folder_that_is_read_again(bench, gate, monkeypatch):
    old, new = bench.thing("old"), bench.thing("new")
    assert save(bench, bench.first, [old]) == [OK]
    restart_with_a_reading_that_fails(bench, monkeypatch)
    backend, [place] = bench.first.backend, [new.at(bench.first, 0)]
    put(bench, [new], [0])
    assert outcomes(backend.open_write([place], soon())) == outcomes(backend.write([place], 0, 1, soon())) == [OK]
    failed = backend._scan
    backend.check()
    assert backend._scan is not failed
    assert outcomes(backend.write([place], 1, new.layers, soon())) == outcomes(backend.commit([place], soon())) == [OK]
    scanned(backend)
    agrees(bench, [old, new])


def test_block_digests_are_told_also_of_files_that_are_older_than_what_went(bench, gate, monkeypatch):
    digests = bytes(range(32))
    things = [bench.thing(number, block_digests=digests) for number in range(4)]
    for number, thing in enumerate(things):
        assert save(bench, bench.first, [thing]) == [OK]
        [name] = [name for name in files(bench.path) if thing.key.hex() in name]
        os.utime(name, ns=(number, number))
    monkeypatch.setattr(disk, "DESCRIBED", 1)
    reading, go, real = threading.Event(), threading.Event(), Folder.block_digests

    def slowly(folder: Folder, stored: StoredFile) -> bytes:
        reading.set()
        assert go.wait(PATIENCE_S)
        return real(folder, stored)

    monkeypatch.setattr(Folder, "block_digests", slowly)
    bench.restart()
    assert reading.wait(PATIENCE_S)
    backend = bench.first.backend
    backend.hide([things[-1].key])
    go.set()
    scanned(backend)
    told = {entry.key: entry.block_digests for entry in backend._index.entries()}
    assert told == {thing.key: digests for thing in things[:-1]}


def tmp_missing(folder: Folder) -> Path:
    return folder.path / "missing"


@pytest.mark.usefixtures("fake_on_path")
async def test_the_host_answers_and_writes_while_the_folder_is_read(tmp_path: Path) -> None:
    path, gate = tmp_path / "tier", tmp_path / "gate"
    os.mkfifo(gate)
    old, new = Thing(101, 2, 3, 4096), Thing(201, 2, 3, 4096, at=200_000)
    async with Served(backend="disk", path=str(path), capacity=1 << 20) as it:
        await it.hear(Up)
        await it.hear(Indexed)
        await write(it, 1, old)
    async with Served(backend=slow_disk.NAME, path=str(path), capacity=1 << 20, gate=str(gate)) as it:
        await it.answer()
        assert (await it.hear(Up)).indexed
        assert (await it.hear(Indexed)) == Indexed(b"", b"", b"")
        await write(it, 1, new)
        while not it.host.statistics.get("unread_folder"):
            await it.answer()
        gate.write_bytes(b"\0")
        held = await it.hear(Indexed)
        assert {held.keys[:24], held.keys[24:]} == set(old.keys)
        for number, thing in enumerate((old, new), 2):
            thing.wipe(it.arena)
            for message in (Fetch(number, thing.said()), Pull(number, number, 0, thing.count, 0, thing.layers)):
                it.host.send(message)
            assert await it.hear(Fetched) == Fetched(number, number)
            assert thing.intact(it.arena) == [True, True]
