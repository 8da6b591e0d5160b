"""What a crash leaves is never seen: a write cut at any system call, a file at any byte, a process killed anywhere."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import layerflow_testing
from hosts.disk_bench import DiskBench, files, torn
from hosts.disk_writer import CAPACITY, SIGNS_BYTES
from layerflow_testing import ARENA, BROKEN, OK, load, outcomes, put, save, soon

CHILD = Path(__file__).with_name("disk_writer.py")


@pytest.fixture
def bench(tmp_path):
    bench = DiskBench(tmp_path / "tier")
    yield bench
    bench.close()


def positions(thing) -> list[int]:
    """Where a file may end early: around every boundary in it, and at some other bytes."""
    edges = [0, 64, *(64 + layer * thing.layer_bytes for layer in range(1, thing.layers + 1))]
    whole = thing.nbytes + 8 * (thing.layers + 2)
    near = {edge + by for edge in [*edges, whole] for by in (-9, -8, -1, 0, 1)}
    near |= {random.Random(1).randrange(low, high) for low, high in pairwise([*edges, whole])}
    return sorted(at for at in near if 0 <= at < whole)


def test_a_file_cut_anywhere_is_removed_at_the_start(bench):
    good = bench.thing("good")
    assert save(bench, bench.first, [good]) == [OK]
    things = [bench.thing(("cut", at)) for at in positions(good)]
    assert len(things) > 30
    for thing, at in zip(things, positions(good), strict=True):
        assert save(bench, bench.first, [thing]) == [OK]
        [name] = [name for name in files(bench.path) if thing.key.hex() in name]
        os.truncate(name, at)
    attached = bench.restart()
    assert [entry.key for entry in attached.index] == [good.key]
    assert len(files(bench.path)) == 1
    assert save(bench, bench.first, things[:3]) == [OK] * 3


def test_a_file_whose_end_never_reached_the_disk_is_found_when_it_is_read(bench):
    """After a power loss: the size is right, the last blocks are zeros."""
    good = bench.thing("good")
    things = [bench.thing(("lost", at)) for at in positions(good)]
    assert save(bench, bench.first, [good]) == [OK]
    for thing, at in zip(things, positions(good), strict=True):
        assert save(bench, bench.first, [thing]) == [OK]
        [name] = [name for name in files(bench.path) if thing.key.hex() in name]
        whole = Path(name).read_bytes()
        last = len(whole.rstrip(b"\0")) - 1  # zeros in place of zeros would be the same file
        os.truncate(name, min(at, last))
        os.truncate(name, len(whole))
    bench.restart()
    for thing in things:
        results = load(bench, bench.first, [thing, good], ARENA // 2, (1, 1))
        assert [outcome for outcome, _ in results] == [BROKEN, OK]
        assert np.array_equal(results[1][1], good.bytes)
    assert bench.first.backend.statistics()["corrupt_objects"] == len(things)
    assert bench.gone == [thing.key for thing in things]
    assert len(files(bench.path)) == 1


class Cut(BaseException):
    """The process ends here. Nothing of the tier may catch it."""


@pytest.mark.parametrize("half", [False, True], ids=["before the call", "half way through a write"])
def test_a_write_cut_at_any_system_call(tmp_path, monkeypatch, half):
    calls = ("open", "pwritev", "rename", "close", "unlink")
    real = {name: getattr(os, name) for name in calls}
    left = 0

    def counted(name):
        def call(*args, **more):
            nonlocal left
            left -= 1
            if left < 0:
                if half and name == "pwritev":
                    fd, [data], at = args
                    real["pwritev"](fd, [data[: len(data) // 2]], at)
                raise Cut
            return real[name](*args, **more)

        return call

    cuts = 0
    for number in range(100):
        bench = DiskBench(tmp_path / str(number))
        old, one = bench.thing("old"), bench.thing("one")
        assert save(bench, bench.first, [old]) == [OK]
        left = number
        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, counted(name))
            gc.disable()  # what it closes is not the tier's
            try:
                assert save(bench, bench.first, [one]) == [OK]
                done = True
            except Cut:
                done = False
            finally:
                gc.enable()
        cuts += not done
        bench.restart()
        there = bench.first.backend.lookup([old.key, one.key], soon())
        assert there[0]
        assert there[1] or not done
        assert torn(bench.path) == []
        assert len(files(bench.path)) == sum(there)
        present = [thing for thing, yes in zip([old, one], there, strict=True) if yes]
        for thing, (outcome, data) in zip(present, load(bench, bench.first, present, ARENA // 2), strict=True):
            assert outcome == OK
            assert np.array_equal(data, thing.bytes)
        bench.close()
        if done:
            break
    assert done
    assert cuts >= 7  # open, two writes of layers, header, checksums, close, rename


@pytest.mark.parametrize("part", ["header", "first layer", "layer 3", "checksums", "their checksum"])
def test_a_flipped_byte(bench, part):
    things = [bench.thing(i) for i in range(3)]
    bad = things[1]
    assert save(bench, bench.first, things) == [OK] * 3
    [name] = [name for name in files(bench.path) if bad.key.hex() in name]
    at = {
        "header": 20,
        "first layer": 64,
        "layer 3": 64 + 4 * bad.layer_bytes - 1,
        "checksums": bad.nbytes + 9,
        "their checksum": os.stat(name).st_size - 1,
    }[part]
    data = bytearray(Path(name).read_bytes())
    data[at] ^= 0x10
    Path(name).write_bytes(data)
    backend, start = bench.first.backend, ARENA // 2
    place = bad.at(bench.first, start, known=False)
    told = outcomes(backend.open_fetch([place], soon()))
    for layer in range(bad.layers):
        if told[-1] == OK:
            told += outcomes(backend.fetch([place], layer, layer + 1, soon()))
    backend.close_fetch([place])
    assert told == {
        "header": [OK, BROKEN],
        "first layer": [OK, BROKEN],
        "layer 3": [OK, OK, OK, OK, BROKEN],
    }.get(part, [BROKEN])
    assert backend.lookup([thing.key for thing in things], soon()) == [True, False, True]
    assert backend.statistics()["corrupt_objects"] == 1
    assert bench.gone == [bad.key]
    assert name not in files(bench.path)
    results = load(bench, bench.first, [things[0], things[2]], start)
    assert [outcome for outcome, _ in results] == [OK, OK]
    assert save(bench, bench.first, [bad]) == [OK]
    assert load(bench, bench.first, [bad], start)[0][0] == OK


def test_corruption_between_two_layers_of_one_fetch(bench):
    one = bench.thing("one")
    assert save(bench, bench.first, [one]) == [OK]
    place = one.at(bench.first, ARENA // 2)
    assert outcomes(bench.first.backend.open_fetch([place], soon())) == [OK]
    assert outcomes(bench.first.backend.fetch([place], 0, 2, soon())) == [OK]
    os.truncate(files(bench.path)[0], 64 + 3 * one.layer_bytes)
    assert outcomes(bench.first.backend.fetch([place], 2, 3, soon())) == [OK]
    assert outcomes(bench.first.backend.fetch([place], 3, 4, soon())) == [BROKEN]
    bench.first.backend.close_fetch([place])


def test_other_files_in_the_folder(bench):
    """Not ours, or of no use: removed where they cannot be told from torn ones, and never served."""
    one = bench.thing("one")
    assert save(bench, bench.first, [one]) == [OK]
    [name] = files(bench.path)
    shard = Path(name).parent
    (shard / "note.txt").write_text("x")
    other = bench.path / "objects-1" / f"{one.key[0] ^ 1:02x}" / Path(name).name
    other.write_bytes(Path(name).read_bytes())  # of another shard
    for tokens in (254, 255, 257, 258):  # the newest of one key stays
        twin = Path(name.replace(".256", f".{tokens}"))
        twin.write_bytes(Path(name).read_bytes())
        os.utime(twin, ns=(tokens, tokens))
    attached = bench.restart()
    assert [entry.key for entry in attached.index] == [one.key]
    assert files(bench.path) == [name]
    [(outcome, data)] = load(bench, bench.first, [one], ARENA // 2)
    assert outcome == OK
    assert np.array_equal(data, one.bytes)


# A real process, really killed -----------------------------------------------------------------------


def kill_a_writer(bench: DiskBench, seed: int) -> int:
    """One process that writes objects until it is killed; how many it said were complete."""
    bench.first.backend.close()
    dice = random.Random(seed)
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(bench.path), bench.nonce.hex(), str(seed)],
        stdout=subprocess.PIPE,
        pipesize=SIGNS_BYTES,
        env=os.environ | {"PYTHONPATH": f"{CHILD.parents[1]}:{Path(layerflow_testing.__file__).parents[1]}"},
    )
    assert child.stdout is not None
    said = b""
    wanted = dice.randrange(1, 200)
    while len(said) < wanted:
        piece = os.read(child.stdout.fileno(), wanted - len(said))
        assert piece, f"the writer ended by itself: {child.wait()}"
        said += piece
    child.kill()
    said += child.stdout.read()
    child.wait()
    child.stdout.close()
    return said.count(b"c")


@pytest.mark.parametrize(
    "kills", [pytest.param(2, id="short"), pytest.param(100, id="long", marks=pytest.mark.campaign)]
)
def test_a_killed_writer(bench, kills):
    for seed in range(kills):
        done = kill_a_writer(bench, seed)
        bench.restart(capacity=CAPACITY)
        assert torn(bench.path) == []
        things = [bench.thing((seed, i), blocks=1 + i % 5, layers=6) for i in range(done + 4)]
        there = bench.first.backend.lookup([thing.key for thing in things], soon())
        assert all(there[:done]), "what was said to be complete is lost"
        assert sum(there) <= done + 1
        present = [thing for thing, yes in zip(things, there, strict=True) if yes]
        for thing in present:
            [(outcome, data)] = load(bench, bench.first, [thing], ARENA // 2, (1,))
            assert outcome == OK
            assert np.array_equal(data, thing.bytes)
        bench.first.backend.hide([thing.key for thing in present])


def test_a_write_that_goes_on_over_a_torn_one(bench):
    one = bench.thing("one")
    put(bench, [one], [0])
    place = one.at(bench.first, 0)
    assert outcomes(bench.first.backend.open_write([place], soon())) == [OK]
    assert outcomes(bench.first.backend.write([place], 0, 2, soon())) == [OK]
    assert len(torn(bench.path)) == 1
    bench.restart()
    assert torn(bench.path) == []
    assert save(bench, bench.first, [one]) == [OK]
