"""The disk tier: the contract of every backend, and what survives a restart."""

from __future__ import annotations

import dataclasses
import os
import time

import numpy as np
import pytest
from e2e.known import open_fds

from hosts.disk_bench import DiskBench, files, torn
from layerflow.hosts.backend import IndexEntry, Unusable
from layerflow.hosts.disk.backend import Disk
from layerflow.hosts.disk.folder import Folder, StoredFile
from layerflow_testing import (
    ARENA,
    BROKEN,
    EXISTS,
    FAILED,
    FULL,
    MISSING,
    OK,
    TOO_LARGE,
    BackendContract,
    lay_out,
    load,
    outcomes,
    put,
    save,
    soon,
)


@pytest.fixture
def bench(tmp_path):
    bench = DiskBench(tmp_path / "tier")
    yield bench
    bench.close()


class TestDisk(BackendContract):
    @pytest.fixture
    def bench(self, tmp_path):
        bench = DiskBench(tmp_path / "tier")
        yield bench
        bench.close()


def test_block_digests_survive_a_restart_and_a_file_without_them_is_read_as_before(bench):
    digests = bytes(range(48))
    with_them, without = (bench.thing(name, tokens=64) for name in ("with", "without"))
    first = bench.first
    places = [with_them.at(first, 0), without.at(first, 1 << 20)]
    places[0] = dataclasses.replace(places[0], block_digests=digests)
    put(bench, [with_them, without], [0, 1 << 20])
    backend = first.backend
    assert outcomes(backend.open_write(places, soon())) == [OK, OK]
    assert outcomes(backend.write(places, 0, places[0].layers, soon())) == [OK, OK]
    assert outcomes(backend.commit(places, soon())) == [OK, OK]
    attached = bench.restart()
    found = {entry.key: entry.block_digests for entry in attached.index}
    assert found == {with_them.key: digests, without.key: b""}
    assert [outcome for outcome, _ in load(bench, bench.first, [with_them, without], ARENA // 2, (1, 2))] == [OK, OK]


def test_a_restart_finds_everything(bench):
    parent = bench.key("parent")
    things = [bench.thing(i, blocks=1 + i % 3, tokens=16 * (1 + i)) for i in range(20)]
    things.append(bench.thing("tail", tokens=100, parent=parent))
    assert save(bench, bench.first, things) == [OK] * 21
    left = bench.thing("half written")
    assert outcomes(bench.first.backend.open_write([left.at(bench.first, 0)], soon())) == [OK]
    attached = bench.restart()
    assert set(attached.index) == {IndexEntry(t.key, t.blocks, t.tokens, t.parent) for t in things}
    assert attached.details["objects"] == 21
    assert bench.first.backend.lookup([t.key for t in [*things, left]], soon()) == [True] * 21 + [False]
    for thing, (outcome, data) in zip(things, load(bench, bench.first, things, ARENA // 2, (1, 2)), strict=True):
        assert outcome == OK
        assert np.array_equal(data, thing.bytes)
    assert torn(bench.path) == []


def test_the_first_written_is_the_first_to_go_also_after_a_restart(tmp_path):
    bench = DiskBench(tmp_path / "tier", capacity=1 << 20)
    things = [bench.thing(i, blocks=8, layers=4) for i in range(7)]  # 7 of 132 KiB
    for number, thing in enumerate(things):
        assert save(bench, bench.first, [thing]) == [OK]
        [name] = [name for name in files(bench.path) if thing.key.hex() in name]
        os.utime(name, ns=(number, number))
    bench.restart()
    assert save(bench, bench.first, [bench.thing("more", blocks=8, layers=4)]) == [OK]
    assert bench.gone == [things[0].key]
    assert bench.first.backend.lookup([t.key for t in things], soon()) == [False] + [True] * 6
    bench.close()


def test_less_capacity_after_a_restart(tmp_path):
    bench = DiskBench(tmp_path / "tier")
    things = [bench.thing(i, blocks=8, layers=4) for i in range(20)]
    assert save(bench, bench.first, things) == [OK] * 20
    attached = bench.restart(capacity=1 << 20)
    assert len(attached.index) == len(files(bench.path)) == 7
    assert bench.first.backend.statistics()["used_bytes"] <= 1 << 20
    bench.close()


def test_what_leaves_is_told_and_its_file_is_gone(bench):
    blocks, count = BackendContract.filling(bench)
    things = [bench.thing(i, blocks, 4) for i in range(2 * count)]
    for thing in things:
        assert save(bench, bench.first, [thing]) == [OK]
    here = [t.key for t in things if bench.first.backend.lookup([t.key], soon()) == [True]]
    assert sorted(bench.gone + here) == sorted(t.key for t in things)
    assert {name.rpartition("/")[2].partition(".")[0] for name in files(bench.path)} == {key.hex() for key in here}
    figures = bench.first.backend.statistics()
    on_disk = sum(os.stat(name).st_blocks * 512 for name in files(bench.path))
    assert on_disk <= figures["used_bytes"] <= bench.capacity
    assert figures["evicted_objects"] == len(bench.gone)


def test_what_is_removed_while_a_call_publishes_others_is_told_in_that_order(bench, monkeypatch):
    """Another thread purges after the first file of a commit."""
    things = [bench.thing(name) for name in range(3)]
    backend, folder = bench.first.backend, Folder.publish
    told: list[tuple[str, bytes]] = []
    backend._index.tell(
        lambda keys: told.extend(("gone", key) for key in keys),
        lambda entries: told.extend(("found", entry.key) for entry in entries),
    )

    def purged(self: Folder, stored: StoredFile) -> None:
        if stored.key == things[1].key:
            assert backend.clear([], soon()) == 1
        folder(self, stored)

    monkeypatch.setattr(Folder, "publish", purged)
    assert save(bench, bench.first, things) == [OK] * 3
    first, *others = [thing.key for thing in things]
    assert told == [("found", first), ("gone", first), *(("found", key) for key in others)]
    assert backend.lookup([thing.key for thing in things], soon()) == [False, True, True]


def test_nothing_goes_while_it_is_read(bench):
    blocks, count = BackendContract.filling(bench)
    things = [bench.thing(i, blocks, 4) for i in range(count)]
    opened = []
    for number, thing in enumerate(things):
        if save(bench, bench.first, [thing]) == [OK]:
            place = thing.at(bench.first, ARENA // 2 + 64 * number, known=False)
            assert outcomes(bench.first.backend.open_fetch([place], soon())) == [OK]
            opened.append(place)
    more = bench.thing("more", blocks, 4)
    assert save(bench, bench.first, [more]) == [FULL]
    assert bench.gone == []
    bench.first.backend.close_fetch(opened[:3])
    assert save(bench, bench.first, [more]) == [OK]
    assert set(bench.gone) <= {place.key for place in opened[:3]}
    bench.first.backend.close_fetch(opened)


def test_one_key_read_to_two_places(bench):
    one = bench.thing("one")
    assert save(bench, bench.first, [one]) == [OK]
    places = [one.at(bench.first, ARENA // 2), one.at(bench.first, ARENA // 4)]
    assert outcomes(bench.first.backend.open_fetch(places, soon())) == [OK, OK]
    bench.first.backend.close_fetch(places[:1])
    assert outcomes(bench.first.backend.fetch(places, 0, one.layers, soon())) == [MISSING, OK]
    assert np.array_equal(bench.arena.array[ARENA // 4 : ARENA // 4 + one.nbytes], one.bytes)
    bench.first.backend.close_fetch(places)


def test_the_revoke_of_one_that_exists_is_not_the_writers(bench):
    one = bench.thing("one")
    put(bench, [one], [0])
    mine, other = one.at(bench.first, 0), one.at(bench.first, ARENA // 2)
    assert outcomes(bench.first.backend.open_write([mine, other], soon())) == [OK, EXISTS]
    bench.first.backend.revoke([other])
    assert outcomes(bench.first.backend.write([mine], 0, one.layers, soon())) == [OK]
    assert outcomes(bench.first.backend.commit([mine], soon())) == [OK]


def test_out_of_order_layers_are_refused(bench):
    one = bench.thing("one")
    place = one.at(bench.first, 0)
    for lo, hi in ((1, 2), (0, one.layers + 1)):
        assert outcomes(bench.first.backend.open_write([place], soon())) == [OK]
        assert outcomes(bench.first.backend.write([place], lo, hi, soon())) != [OK]
        assert outcomes(bench.first.backend.commit([place], soon())) != [OK]
    assert outcomes(bench.first.backend.open_write([place], soon())) == [OK]
    assert outcomes(bench.first.backend.write([place], 0, 2, soon())) == [OK]
    assert outcomes(bench.first.backend.commit([place], soon())) != [OK]
    assert files(bench.path) == torn(bench.path) == []


def test_late_calls_change_nothing(bench):
    one = bench.thing("one")
    place, backend, late = one.at(bench.first, 0), bench.first.backend, time.monotonic() - 1
    assert outcomes(backend.open_write([place], late)) != [OK]
    assert save(bench, bench.first, [one]) == [OK]
    assert outcomes(backend.open_fetch([place], late)) != [OK]
    assert outcomes(backend.open_fetch([place], soon())) == [OK]
    assert outcomes(backend.fetch([place], 0, 1, late)) != [OK]
    backend.close_fetch([place])


def test_a_late_commit_gives_everything_back(bench):
    """The write lane ends a job with its commit: nothing else is called for these objects."""
    things = [bench.thing(number) for number in range(2)]
    offsets = lay_out(things, 0)
    put(bench, things, offsets)
    places = [thing.at(bench.first, at) for thing, at in zip(things, offsets, strict=True)]
    backend, before = bench.first.backend, open_fds()
    assert outcomes(backend.open_write(places, soon())) == [OK, OK]
    assert outcomes(backend.write(places, 0, things[0].layers, soon())) == [OK, OK]
    assert outcomes(backend.commit(places, time.monotonic() - 1)) == [FAILED, FAILED]
    assert backend.statistics()["reserved_bytes"] == 0
    assert torn(bench.path) == []
    assert not open_fds() - before
    assert save(bench, bench.first, things) == [OK, OK]


def test_two_servers_on_one_folder(bench, tmp_path):
    other = Disk({"path": str(bench.path), "capacity": 1 << 20, "timeout_ms": 1})
    with pytest.raises(Unusable, match=f"process {os.getpid()}"):
        other.attach(bench.arena, lambda keys: None)
    one = bench.thing("one")
    assert save(bench, bench.first, [one]) == [OK]
    bench.first.backend.close()
    other.attach(bench.arena, lambda keys: None)
    assert other.lookup([one.key], soon()) == [True]
    other.close()


def test_nobody_else_may_read_it(bench):
    assert save(bench, bench.first, [bench.thing("one")]) == [OK]
    for folder, _, names in os.walk(bench.path):
        assert os.stat(folder).st_mode & 0o077 == 0
        for name in names:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o177 == 0


@pytest.mark.parametrize("options", [{"path": ""}, {"capacity": 0}])
def test_options_that_cannot_work(tmp_path, options):
    with pytest.raises(Unusable):
        Disk({"path": str(tmp_path / "tier"), "capacity": 1 << 20} | options)


def test_a_file_in_its_place(tmp_path, bench):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unusable, match="folder"):
        Disk({"path": str(tmp_path / "file"), "capacity": 1 << 20}).attach(bench.arena, lambda keys: None)


def test_larger_than_capacity(bench):
    huge = bench.thing("huge", blocks=bench.capacity // 4096, layers=2)
    assert outcomes(bench.first.backend.open_write([huge.at(bench.first, 0)], soon())) == [TOO_LARGE]


def test_a_swapped_file_is_no_other_object(bench):
    one, other = bench.thing("one"), bench.thing("other")
    assert save(bench, bench.first, [one, other]) == [OK, OK]
    first, second = (next(n for n in files(bench.path) if t.key.hex() in n) for t in (one, other))
    os.rename(first, second)
    results = load(bench, bench.first, [one, other], ARENA // 2)
    assert [outcome for outcome, _ in results] == [MISSING, BROKEN]
    assert sorted(bench.gone) == sorted([one.key, other.key])
