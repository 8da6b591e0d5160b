"""The disk tier in its host process: killed, restarted, the folder away and back, as the server hears of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hosts.bench import Thing, key_of
from hosts.disk_bench import files, torn
from hosts.served import Served, write
from layerflow.hosts.backend import ObjectStatus
from layerflow.wire.host_messages import (
    Ask,
    Down,
    EndFetch,
    Evicted,
    Fetch,
    Fetched,
    Indexed,
    Present,
    Pull,
    Push,
    Up,
    Write,
    Written,
    split_keys,
)

DONE, HALF = Thing(101, 2, 3, 4096), Thing(201, 2, 3, 4096, at=200_000)


def served(path: Path) -> Served:
    return Served(backend="disk", path=str(path), capacity=1 << 20)


async def load(it: Served, number: int, thing: Thing) -> Fetched:
    thing.wipe(it.arena)
    for message in (Fetch(number, thing.said()), Pull(number, 1, 0, thing.count, 0, thing.layers), EndFetch(number)):
        it.host.send(message)
    return await it.hear(Fetched)


async def indexed(it: Served, count: int) -> list[bytes]:
    """What the host says that the folder holds: so many keys. It comes later where reading takes long."""
    keys: list[bytes] = []
    while True:
        keys += split_keys((await it.hear(Indexed)).keys)
        if len(keys) >= count:
            return keys


def flip(name: str) -> None:
    data = bytearray(Path(name).read_bytes())
    data[64 + 100] ^= 1
    Path(name).write_bytes(data)


async def test_a_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    async with served(path) as it:
        assert (await it.hear(Up)).indexed
        assert await indexed(it, 0) == []
        await write(it, 1, DONE)
        HALF.fill(it.arena)
        it.host.send(Write(2, HALF.said()))
        it.host.send(Push(2, 1, 0, 2, 0, 2))
        assert await it.hear() == Written(2, 1)
        it.host.send(Ask(3, key_of(201), 10_000))
        assert (await it.hear(Present)).present == b"\0"
        while len(torn(path)) < 2:
            await it.answer()
        os.kill(it.host.state.pid, signal.SIGKILL)
        assert "SIGKILL" in await it.lose()
        assert (await it.hear(Up)).indexed
        assert sorted(await indexed(it, 2)) == sorted(DONE.keys)
        assert torn(path) == []
        assert await load(it, 4, DONE) == Fetched(4, 1)
        assert DONE.intact(it.arena) == [True, True]
        await write(it, 5, HALF)
    async with served(path) as it:  # and another server finds all of it
        await it.hear(Up)
        assert len(await indexed(it, 4)) == 4
        await load(it, 1, HALF)
        assert HALF.intact(it.arena) == [True, True]


async def test_a_corrupt_object(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    async with served(path) as it:
        await it.hear(Up)
        await it.hear(Indexed)
        await write(it, 1, DONE)
        [name] = [name for name in files(path) if DONE.keys[1].hex() in name]
        flip(name)
        DONE.wipe(it.arena)
        it.host.send(Fetch(2, DONE.said()))
        it.host.send(Pull(2, 1, 0, 2, 0, DONE.layers))
        assert await it.hear() == Evicted(DONE.keys[1])
        first = await it.hear(Fetched)
        assert [(failure.position, failure.outcome) for failure in first.failed] == [(1, ObjectStatus.BROKEN)]
        assert DONE.intact(it.arena)[0]


async def test_a_folder_that_goes_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    async with served(path) as it:
        up = await it.hear(Up)
        await it.hear(Indexed)
        await write(it, 1, DONE)
        os.rename(path, tmp_path / "away")
        assert not (await it.hear(Down)).fatal
        os.rename(tmp_path / "away", path)
        assert (await it.hear()).generation == up.generation
        await load(it, 2, DONE)
        assert DONE.intact(it.arena) == [True, True]
        assert it.host.state.restarts == 0


async def test_a_second_server_hears_who_has_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    async with served(path) as it:
        await it.hear(Up)
        async with Served(backend="disk", path=str(path), capacity=1 << 20, timeout_ms=1) as other:
            down = await other.hear(Down)
            assert down.fatal
            assert f"process {it.host.state.pid}" in down.reason
