"""Disks that are full, read-only, broken or gone: outcomes, never exceptions; and everything works again afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from hosts.disk_bench import DiskBench, files, torn
from layerflow.hosts.backend import Unreachable
from layerflow.hosts.disk.backend import Disk
from layerflow.hosts.disk.folder import StoredFile
from layerflow_testing import (
    ARENA,
    EXISTS,
    FAILED,
    FULL,
    MISSING,
    OK,
    PATIENCE_S,
    TOO_LARGE,
    load,
    outcomes,
    save,
    soon,
)


@pytest.fixture
def bench(tmp_path):
    bench = DiskBench(tmp_path / "tier")
    yield bench
    bench.close()


def failing(code: int, after: int = 0):
    """A system call that fails from its `after`-th use on."""
    left = after

    def call(real):
        def wrapped(*args, **more):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(code, os.strerror(code))
            return real(*args, **more)

        return wrapped

    return call


def works(bench: DiskBench) -> None:
    one = bench.thing(("works", os.urandom(4)))
    assert save(bench, bench.first, [one]) == [OK]
    [(outcome, data)] = load(bench, bench.first, [one], ARENA // 2, (1, 2))
    assert outcome == OK
    assert np.array_equal(data, one.bytes)


WRITING = [
    ("open", errno.EROFS, 0, FAILED),
    ("open", errno.EACCES, 0, FAILED),
    ("open", errno.EMFILE, 0, FAILED),
    ("open", errno.ENOSPC, 0, FULL),
    ("pwritev", errno.ENOSPC, 0, FULL),
    ("pwritev", errno.EDQUOT, 1, FULL),
    ("pwritev", errno.EIO, 1, FAILED),
    ("pwritev", errno.EFBIG, 1, TOO_LARGE),
    ("pwritev", errno.ENOSPC, 2, FULL),
    ("pwritev", errno.EIO, 3, FAILED),
    ("rename", errno.EROFS, 0, FAILED),
    ("rename", errno.ENOSPC, 0, FULL),
    ("statvfs", errno.EIO, 0, FAILED),
]


@pytest.mark.parametrize(("name", "code", "after", "expected"), WRITING, ids=str)
def test_a_write_that_the_system_refuses(bench, monkeypatch, name, code, after, expected):
    one = bench.thing("one")
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(code, after)(getattr(os, name)))
        assert save(bench, bench.first, [one]) == [expected]
    assert bench.first.backend.lookup([one.key], soon()) == [False]
    assert files(bench.path) == torn(bench.path) == []
    assert bench.first.backend.statistics()["reserved_bytes"] == 0
    assert save(bench, bench.first, [one]) == [OK]
    works(bench)


READING = [
    ("open", errno.EIO, 0, FAILED, True),
    ("open", errno.EMFILE, 0, FAILED, True),
    ("pread", errno.EIO, 0, FAILED, True),
    ("preadv", errno.EIO, 0, FAILED, True),
    ("preadv", errno.EIO, 1, FAILED, True),
    ("preadv", errno.EUCLEAN, 0, FAILED, True),
    ("preadv", errno.EBADMSG, 0, FAILED, True),
    ("preadv", errno.ESTALE, 1, MISSING, False),
    ("preadv", errno.ENOMEM, 1, FAILED, True),
]


@pytest.mark.parametrize(("name", "code", "after", "expected", "stays"), READING, ids=str)
def test_a_read_that_the_system_refuses(bench, monkeypatch, name, code, after, expected, stays):
    one = bench.thing("one")
    assert save(bench, bench.first, [one]) == [OK]
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(code, after)(getattr(os, name)))
        assert load(bench, bench.first, [one], ARENA // 2, (1, 2))[0][0] == expected
    assert bench.first.backend.lookup([one.key], soon()) == [stays]
    assert bench.gone == ([] if stays else [one.key])
    figures = bench.first.backend.statistics()
    assert (figures["corrupt_objects"], figures["read_errors"]) == (0, expected == FAILED)
    [(outcome, data)] = load(bench, bench.first, [one], ARENA // 2, (1, 2))
    assert outcome == (OK if stays else MISSING)
    assert not stays or np.array_equal(data, one.bytes)
    works(bench)


@pytest.mark.parametrize("tokens", [16, 32], ids=["the same name", "another name"])
def test_a_write_replaces_what_could_not_be_read(bench, monkeypatch, tokens):
    """Else a bad sector's object would be offered, fail and be computed anew for ever."""
    one, again = bench.thing("one", tokens=16), bench.thing("one", tokens=tokens)
    assert save(bench, bench.first, [one]) == [OK]
    assert save(bench, bench.first, [again]) == [EXISTS]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO)(os.preadv))
        assert load(bench, bench.first, [one], ARENA // 2)[0][0] == FAILED
    [old] = map(os.stat, files(bench.path))
    assert save(bench, bench.first, [again]) == [OK]
    [new] = map(os.stat, files(bench.path))
    assert new.st_ino != old.st_ino
    assert save(bench, bench.first, [again]) == [EXISTS]
    [(outcome, data)] = load(bench, bench.first, [again], ARENA // 2)
    assert outcome == OK
    assert np.array_equal(data, again.bytes)
    figures = bench.first.backend.statistics()
    assert (figures["objects"], figures["used_bytes"]) == (1, StoredFile.of(again.at(bench.first, 0)).room)
    assert bench.gone == []


def test_a_file_that_somebody_removed(bench):
    one, other = bench.thing("one"), bench.thing("other")
    assert save(bench, bench.first, [one, other]) == [OK, OK]
    os.unlink(next(name for name in files(bench.path) if one.key.hex() in name))
    results = load(bench, bench.first, [one, other], ARENA // 2)
    assert [outcome for outcome, _ in results] == [MISSING, OK]
    assert bench.gone == [one.key]


def test_a_real_limit_on_file_sizes(bench):
    small, large = bench.thing("small", blocks=1, layers=2), bench.thing("large", blocks=64, layers=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert save(bench, bench.first, [small, large]) == [OK, TOO_LARGE]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(files(bench.path)) == 1
    assert torn(bench.path) == []
    assert save(bench, bench.first, [large]) == [OK]


def test_a_disk_that_others_fill(bench, monkeypatch):
    """Less is kept than capacity would allow, and nothing fails as long as something may go."""
    things = [bench.thing(i, blocks=16, layers=4) for i in range(10)]  # 260 KiB each
    assert save(bench, bench.first, things) == [OK] * 10
    real, room = os.statvfs, 300 << 10

    def statvfs(path):
        left = max(0, room - sum(os.stat(name).st_size for name in files(bench.path)[10 - len(bench.gone) :]))
        return SimpleNamespace(f_bavail=left // 4096, f_frsize=4096, f_flag=real(path).f_flag)

    monkeypatch.setattr(os, "statvfs", statvfs)
    more = [bench.thing(("more", i), blocks=16, layers=4) for i in range(4)]
    for thing in more:
        assert save(bench, bench.first, [thing]) == [OK]
    assert bench.gone
    room = 0
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096, f_flag=0))
    places = []
    for number, thing in enumerate([*things, *more]):  # whatever is there is being read
        place = thing.at(bench.first, ARENA // 2 + 64 * number, known=False)
        if outcomes(bench.first.backend.open_fetch([place], soon())) == [OK]:
            places.append(place)
    assert save(bench, bench.first, [bench.thing("last")]) == [FULL]
    bench.first.backend.close_fetch(places)
    assert bench.first.backend.statistics()["full_writes"] == 1


def test_a_quota_that_statvfs_does_not_show(bench, monkeypatch):
    """Each write that the disk has no room for takes as much out, so that the next ones find some."""
    things = [bench.thing(i, blocks=16, layers=4) for i in range(5)]
    assert save(bench, bench.first, things) == [OK] * 5
    real, most = os.pwritev, 6 * 280_000

    def pwritev(fd, buffers, at):
        held = sum(os.stat(name).st_size for name in [*files(bench.path), *torn(bench.path)])
        if held + sum(map(len, buffers)) > most:
            raise OSError(errno.EDQUOT, "quota")
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    told = [save(bench, bench.first, [bench.thing(("more", i), blocks=16, layers=4)])[0] for i in range(8)]
    assert set(told) == {OK, FULL}
    assert told.count(OK) >= 4
    assert bench.gone


# The whole folder --------------------------------------------------------------------------------


def test_a_folder_that_goes_and_comes_back(bench, tmp_path):
    backend = bench.first.backend
    one, other = bench.thing("one"), bench.thing("other")
    assert save(bench, bench.first, [one]) == [OK]
    backend.check()
    os.rename(bench.path, tmp_path / "away")
    with pytest.raises(Unreachable, match="mount or create it"):
        backend.check()
    with pytest.raises(Unreachable):
        backend.lookup([one.key], soon())
    assert save(bench, bench.first, [other]) == [FAILED]
    assert not bench.path.exists(), "an unmounted disk's folder was filled"
    os.rename(tmp_path / "away", bench.path)
    backend.check()
    assert backend.lookup([one.key], soon()) == [True]
    [(outcome, data)] = load(bench, bench.first, [one], ARENA // 2)
    assert outcome == OK
    assert np.array_equal(data, one.bytes)
    works(bench)


def test_reads_while_the_folder_is_gone(bench, tmp_path):
    one, other = bench.thing("one"), bench.thing("other")
    assert save(bench, bench.first, [one, other]) == [OK, OK]
    place = one.at(bench.first, ARENA // 2)
    assert outcomes(bench.first.backend.open_fetch([place], soon())) == [OK]
    os.rename(bench.path, tmp_path / "away")
    assert outcomes(bench.first.backend.fetch([place], 0, one.layers, soon())) == [OK]  # it is open
    bench.first.backend.close_fetch([place])
    assert load(bench, bench.first, [other], ARENA // 2)[0][0] == MISSING
    bench.first.backend.hide([one.key])
    os.rename(tmp_path / "away", bench.path)


@pytest.mark.parametrize("whole", [True, False], ids=["the folder", "what is in it"])
def test_a_folder_that_was_emptied(bench, whole):
    backend = bench.first.backend
    things = [bench.thing(i) for i in range(3)]
    assert save(bench, bench.first, things) == [OK] * 3
    place = things[0].at(bench.first, ARENA // 2)
    assert outcomes(backend.open_fetch([place], soon())) == [OK]
    if whole:
        shutil.rmtree(bench.path)
        with pytest.raises(Unreachable):
            backend.check()
        bench.path.mkdir()
    else:
        shutil.rmtree(bench.path / "objects-1")
    backend.check()
    assert sorted(bench.gone) == sorted(thing.key for thing in things)
    assert backend.lookup([thing.key for thing in things], soon()) == [False] * 3
    backend.close_fetch([place])
    assert backend.statistics()["used_bytes"] == 0
    assert save(bench, bench.first, things) == [OK] * 3
    works(bench)


def test_a_folder_that_another_server_took_meanwhile(bench):
    """As after `rm -r` and a second server on the new folder: this one waits until that one is gone."""
    backend = bench.first.backend
    shutil.rmtree(bench.path)
    other = Disk({"path": str(bench.path), "capacity": 1 << 20})
    other.attach(bench.arena, lambda keys: None)
    with pytest.raises(Unreachable, match="another server"):
        backend.check()
    other.close()
    backend.check()
    works(bench)


def test_a_write_that_is_open_while_the_folder_is_emptied(bench):
    backend, one = bench.first.backend, bench.thing("one")
    place = one.at(bench.first, 0)
    assert outcomes(backend.open_write([place], soon())) == [OK]
    shutil.rmtree(bench.path / "objects-1")
    backend.check()
    assert outcomes(backend.write([place], 0, one.layers, soon())) == [OK]
    assert outcomes(backend.commit([place], soon())) == [FAILED]
    assert backend.statistics()["reserved_bytes"] == 0
    works(bench)


def test_a_read_only_file_system(bench, monkeypatch):
    real = os.access
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: real(path, mode) and not mode & os.W_OK)
        with pytest.raises(Unreachable, match="written"):
            bench.first.backend.check()
    bench.first.backend.check()
    works(bench)


def test_a_folder_that_cannot_be_made(bench, tmp_path):
    disk = Disk({"path": str(tmp_path / "not mounted" / "tier"), "capacity": 1 << 20})
    for _ in range(2):
        with pytest.raises(Unreachable, match="mount or create it"):
            disk.attach(bench.arena, lambda keys: None)
    (tmp_path / "not mounted").mkdir()
    disk.attach(bench.arena, lambda keys: None)
    disk.check()
    disk.close()


def test_a_folder_that_cannot_be_read_at_the_start(bench, monkeypatch):
    disk = Disk({"path": str(bench.path) + "2", "capacity": 1 << 20})
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing(errno.EIO)(os.scandir))
        with pytest.raises(Unreachable):
            disk.attach(bench.arena, lambda keys: None)
    disk.attach(bench.arena, lambda keys: None)
    disk.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_file_whose_end_cannot_be_read_takes_no_other_away(bench, monkeypatch, code):
    """Its object is offered whole, and replaced when it is saved again."""
    digests = bytes(range(32))
    things = [bench.thing(number, block_digests=digests) for number in range(6)]
    assert save(bench, bench.first, things) == [OK] * 6
    bad, real = things[3], os.pread

    def pread(fd, nbytes, at):
        if bad.key.hex() in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(code, os.strerror(code))
        return real(fd, nbytes, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        attached = bench.restart()
        assert bench.first.backend._scan.wait(PATIENCE_S)
        told = {entry.key: entry.block_digests for entry in bench.first.backend._index.entries()}
        assert told == {thing.key: b"" if thing is bad else digests for thing in things}
        assert {entry.key for entry in attached.index} == set(told)
        scan = bench.first.backend._scan
        bench.first.backend.check()
        assert bench.first.backend._scan is scan, "nothing is wrong with the folder"
    assert bench.gone == []
    assert save(bench, bench.first, [bad, things[0]]) == [OK, EXISTS]
    works(bench)


@pytest.mark.parametrize("where", ["00", "new"])
def test_what_cannot_be_removed_is_in_the_way_of_nothing(bench, where):
    """As a folder that a file system or a person put there."""
    one = bench.thing("one")
    assert save(bench, bench.first, [one]) == [OK]
    stray = bench.path / "objects-1" / where / ".snapshot"
    stray.mkdir()
    (bench.path / "objects-1" / where / "junk").write_bytes(b"junk")
    attached = bench.restart()
    assert [entry.key for entry in attached.index] == [one.key]
    assert stray.exists() and not stray.with_name("junk").exists()
    works(bench)


def test_a_file_that_cannot_be_looked_at_takes_no_other_away(bench, monkeypatch):
    one, other = bench.thing("one"), bench.thing("other")
    assert save(bench, bench.first, [one, other]) == [OK, OK]
    real = os.scandir

    class Entry:
        def __init__(self, entry):
            self._entry, self.name, self.path = entry, entry.name, entry.path

        def stat(self, **how):
            if one.key.hex() in self.name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return self._entry.stat(**how)

    @contextlib.contextmanager
    def scandir(path):
        with real(path) as entries:
            yield map(Entry, entries)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        attached = bench.restart()
    assert [entry.key for entry in attached.index] == [other.key]
    assert save(bench, bench.first, [one]) == [OK]
    works(bench)


def test_a_file_system_that_takes_no_bytes_fails_the_write(bench, monkeypatch):
    one = bench.thing("one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, data, at: 0)
        assert save(bench, bench.first, [one]) == [FAILED]
    assert files(bench.path) == torn(bench.path) == []
    works(bench)


def test_a_limit_of_open_files_that_cannot_be_raised_is_as_it_is(bench, monkeypatch):
    """Some containers name a hard limit above what they give."""

    def refuse(which, limits):
        raise ValueError("not allowed to raise maximum limit")

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft + 1))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    bench.restart()
    works(bench)
