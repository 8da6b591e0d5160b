"""A host as the server sees it: a real process, a real socket, the fake backend."""

import asyncio
import contextlib
import errno
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from e2e.stopping import stop

from hosts.bench import PATIENCE_S, Thing, key_of
from hosts.fake_backend import NAME
from hosts.served import Served, write
from layerflow.hosts.backend import BackendInfo, IndexEntry, ObjectStatus
from layerflow.hosts.objects import IndexReporter
from layerflow.server.tier import host as host_module
from layerflow.wire.host_messages import (
    Ask,
    Down,
    EndFetch,
    EndWrite,
    Fetch,
    Fetched,
    Indexed,
    Present,
    Pull,
    Up,
    Written,
    split_keys,
)
from layerflow.wire.packing import list_u32

pytestmark = pytest.mark.usefixtures("fake_on_path")

TWO = Thing(101, 2, 3, 4096)


async def test_a_save_and_a_load() -> None:
    async with Served() as it:
        assert await it.hear() == Up({"version": "fake"})
        state = it.host.state
        assert (state.state, state.reason, state.restarts) == ("up", "", 0) and state.pid and state.up_since
        TWO.fill(it.arena)
        for message in TWO.writing(1):
            assert it.host.send(message)
        assert [await it.hear(), await it.hear()] == [Written(1, 1), Written(1, 2)]
        TWO.wipe(it.arena)
        it.host.send(Ask(1, b"".join([*TWO.keys, key_of(9)]), 10_000))
        assert await it.hear() == Present(1, b"\1\1\0")
        for message in (Fetch(2, TWO.said()), Pull(2, 1, 0, 2, 0, 1), Pull(2, 2, 0, 2, 1, 3), EndFetch(2)):
            it.host.send(message)
        assert [await it.hear(), await it.hear()] == [Fetched(2, 1), Fetched(2, 2)]
        assert TWO.intact(it.arena) == [True, True]
        while it.host.statistics.get("calls", 0) < 9:  # attach, 3 to write, 4 to fetch, a lookup; checks
            await it.answer()
    assert it.host.state.state == "stopped" and not it.host.send(EndWrite(1))
    assert await it.lose() == "the server stops"


async def test_broken_bytes_are_hidden_by_the_host_itself() -> None:
    async with Served(spoilt=[TWO.keys[1].hex()]) as it:
        await it.hear(Up)
        TWO.fill(it.arena)
        await write(it, 1, TWO)
        it.host.send(Fetch(2, TWO.said()))
        it.host.send(Pull(2, 1, 0, 2, 0, 3))
        first = await it.hear(Fetched)
        assert [(failure.position, failure.outcome) for failure in first.failed] == [(1, ObjectStatus.BROKEN)]
        it.host.send(Ask(3, b"".join(TWO.keys), 10_000))
        assert (await it.hear(Present)).present == b"\1\0"


def test_an_index_that_was_told_is_not_kept() -> None:
    """The server has it, of millions of objects perhaps; the host needs none of it again."""
    told: list[type] = []
    shared = os.urandom(16)
    unused = sys.getrefcount(shared)
    reporter = IndexReporter(lambda message: told.append(type(message)))
    reporter.found([IndexEntry(key_of(0), 1, 16, shared)])
    reporter.attach(BackendInfo({}, [IndexEntry(key_of(number), 1, 16, shared) for number in range(1, 4)]))
    reporter.found([IndexEntry(key_of(4), 1, 16, shared)])
    reporter.again()
    assert told == [Up, Indexed, Indexed, Up]
    assert sys.getrefcount(shared) == unused


@pytest.mark.parametrize(("holds", "pieces"), [(0, [0]), (1200, [512, 512, 176])])
async def test_an_index_comes_in_pieces(holds: int, pieces: list[int]) -> None:
    async with Served(holds=holds) as it:
        up = await it.hear(Up)
        assert (up.details, up.indexed) == ({"version": "fake"}, True) and up.generation
        held = [await it.hear(Indexed) for _ in pieces]
        assert [len(split_keys(piece.keys)) for piece in held] == pieces
        assert [piece.last for piece in held] == [False] * (len(pieces) - 1) + [True]
        blocks = [count for piece in held for count in list_u32(piece.blocks)]
        assert blocks == list(range(1, holds + 1))


async def test_away_at_first_and_again_later(tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.touch()
    async with Served(away=str(away), holds=1) as it:
        assert await it.hear() == Down("it is away")
        assert (it.host.state.state, it.host.state.reason) == ("down", "it is away")
        pid = it.host.state.pid
        await refused(it)
        away.unlink()
        up = await it.hear(Up)
        assert len((await it.hear(Indexed)).keys) == 24
        TWO.fill(it.arena)
        await write(it, 1, TWO)
        away.touch()
        assert await it.hear() == Down("it is away")
        await refused(it)
        away.unlink()
        # Its server knows the object of the index and the two that were written: nothing is told anew.
        assert await it.hear() == up
        it.host.send(Ask(3, b"".join(TWO.keys), 10_000))
        assert (await it.hear()) == Present(3, b"\1\1")
        assert it.host.state.pid == pid


async def refused(it: Served) -> None:
    it.host.send(Ask(7, key_of(1), 10_000))
    assert await it.hear() == Present(7, b"\0", "unreachable: it is away")
    it.host.send(Fetch(8, TWO.said()))
    it.host.send(Pull(8, 1, 0, 2, 0, 3))
    for message in TWO.writing(9)[:2]:
        it.host.send(message)
    for ended in (await it.hear(Fetched), await it.hear(Written)):
        assert [failure.reason for failure in ended.failed] == ["unreachable: it is away"] * 2
    await it.answer()


async def test_an_unusable_backend_is_tried_again_much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Recorder(monkeypatch)
    async with Served(unusable="the library is of 1970; install another") as it:
        assert await it.hear() == Down("the library is of 1970; install another", fatal=True)
        assert await it.lose() == "the library is of 1970; install another"
        assert (it.host.state.state, it.host.state.pid) == ("restarting", 0)
        assert it.host.state.reason == "the library is of 1970; install another"
        assert not it.host.send(EndWrite(1))
    assert log.fields("host_lost")[0]["again_in_s"] == 30


async def test_what_it_said_before_it_died_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_READ_BYTES", 16)  # the news of its death overtakes what it said
    async with Served(unusable="the library is of 1970") as it:
        until_dead(it.host.state.pid)
        assert (await it.hear(Down)).fatal
        assert await it.lose() == "the library is of 1970"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("floppy", "'floppy' is not installed; there are disk, memcache, mooncake"),
        ("hosts.no_such_file:Backend", "cannot be loaded: No module named"),
        ("hosts.bench:Thing", "cannot work with its options: TypeError"),
        ("builtins:dict", "is no backend"),
    ],
)
async def test_a_backend_that_cannot_be_made(name: str, reason: str) -> None:
    async with Served(backend=name) as it:
        down = await it.hear(Down)
        assert down.fatal and reason in down.reason


@pytest.mark.parametrize(
    ("dies", "why"),
    [("segfault", "killed by SIGSEGV"), ("exit", "exited with code 7"), ("gil", "hung: no answer for 1")],
)
async def test_a_death_in_a_call(dies: str, why: str) -> None:
    async with Served({"liveness_s": 1.0 if dies == "gil" else 60.0}, dies={"lookup": dies}) as it:
        await it.hear(Up)
        pid = it.host.state.pid
        it.host.send(Ask(1, key_of(1), 10_000))
        assert why in await it.lose()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        await it.hear(Up)
        assert it.host.state.pid != pid and it.host.state.restarts == 1


async def test_a_check_that_hangs_ends_the_host(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with Served(gates={"check": str(gate)}, timeout_ms=100) as it:
        await it.hear(Up)
        assert await it.hear(Down) == Down("a check hangs in the backend")
        assert await it.lose() == "it exited with code 1"
        await it.hear(Up)


async def test_a_lookup_that_hangs_costs_lookups_and_not_the_host(tmp_path: Path) -> None:
    """With the host would go the memory that it gives to a shared pool."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with Served(gates={"lookup": str(gate)}, timeout_ms=500) as it:
        await it.hear(Up)
        pid = it.host.state.pid
        it.host.send(Ask(1, key_of(1), 10_000))
        found: list[Present] = []
        while not found:  # those that came too early wait behind the first
            it.host.send(Ask(2, key_of(1), 10_000))
            await it.answer()
            found = [it.said.get_nowait() for _ in range(it.said.qsize())]
        assert found[0] == Present(2, b"\0", "an earlier lookup hangs in the backend")
        TWO.fill(it.arena)
        await write(it, 1, TWO)
        opened = os.open(gate, os.O_RDWR)
        os.write(opened, bytes(64))
        assert await it.hear() == Present(1, b"\0")
        os.close(opened)
        assert it.host.state.pid == pid and it.lost.empty()


@pytest.mark.parametrize(("method", "name"), [("fetch", "fetch"), ("open_fetch", "fetch"), ("write", "write")])
async def test_one_call_that_outlives_its_time_ends_the_host(tmp_path: Path, method: str, name: str) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with Served(gates={method: str(gate)}, timeout_ms=500) as it:
        await it.hear(Up)
        TWO.fill(it.arena)
        for message in TWO.writing(1):
            it.host.send(message)
        if name == "fetch":
            assert [await it.hear(), await it.hear()] == [Written(1, 1), Written(1, 2)]
            it.host.send(Fetch(2, TWO.said()))
            it.host.send(Pull(2, 1, 0, 2, 0, 3))
        assert (await it.hear(Down)).reason == f"a {name} hangs in the backend"
        assert await it.lose() == "it exited with code 1"
        await it.hear(Up)


async def test_a_machine_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr("os.pidfd_open", missing)
    async with Served() as it:
        await it.hear(Up)
        os.kill(it.host.state.pid, signal.SIGKILL)
        assert await it.lose() == "it was killed by SIGKILL"
        await it.hear(Up)
    assert await it.lose() == "the server stops"


async def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log, real, failures = Recorder(monkeypatch), subprocess.Popen, iter(["no process to spare"])

    def sometimes(*arguments: Any, **more: Any) -> Any:
        for reason in failures:
            raise OSError(errno.EAGAIN, reason)
        return real(*arguments, **more)

    async with Served() as it:
        await it.hear(Up)
        monkeypatch.setattr("subprocess.Popen", sometimes)
        it.host.kill("for a test")
        assert await it.lose() == "for a test"
        await it.hear(Up)
        assert it.lost.empty() and it.host.state.restarts == 2
    assert [("no process to spare" in fields["reason"]) for fields in log.fields("host_lost")] == [False, True]


async def test_a_listener_that_fails_is_told_the_next_message() -> None:
    async with Served() as it:
        await it.hear(Up)
        told = asyncio.Event()

        def fails(_: object) -> None:
            told.set()
            raise RuntimeError("it fails")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(it.said, "put_nowait", fails)
            it.host.send(Ask(1, key_of(1), 10_000))
            async with asyncio.timeout(PATIENCE_S):
                await told.wait()
        it.host.send(Ask(2, key_of(1), 10_000))
        assert (await it.hear(Present)).id == 2


async def test_a_stopped_host_is_killed() -> None:
    async with Served({"liveness_s": 1.0}) as it:
        await it.hear(Up)
        stop(it.host.state.pid)
        assert "hung" in await it.lose()
        await it.hear(Up)


def until_dead(pid: int) -> None:
    """The loop hears of nothing meanwhile."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def hold_up_the_loop(seconds: float) -> None:
    """As SIGSTOP would; longer than a host may be silent."""
    time.sleep(seconds)


async def test_a_server_that_was_stopped_itself_kills_nobody() -> None:
    async with Served({"liveness_s": 3.0}) as it:
        await it.hear(Up)
        pid = it.host.state.pid
        hold_up_the_loop(3.6)
        it.host.send(Ask(1, key_of(1), 10_000))
        assert (await it.hear(Present)).id == 1
        assert it.host.state.pid == pid and it.lost.empty()


async def test_a_host_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "KILL_S", 0.1)  # long before it ends by itself
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with Served(gates={"close": str(gate)}) as it:
        await it.hear(Up)
        pid = it.host.state.pid
    assert await it.lose() == "the server stops"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_host_that_sigkill_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an uninterruptible call: not lost, so what it was given stays its own; closing ends all the same."""
    monkeypatch.setattr(host_module, "DEATH_S", 0.1)
    async with Served() as it:
        await it.hear(Up)
        pid = it.host.state.pid
        stop(pid)
        with monkeypatch.context() as patch:
            patch.setattr("os.killpg", lambda group, number: None)
            it.host.kill("for a test")
            async with asyncio.timeout(PATIENCE_S):
                assert f"process {pid}" in await it.stuck.get()
            assert it.host.state.state == "down" and it.lost.empty() and not it.host.send(EndWrite(1))
            async with asyncio.timeout(PATIENCE_S):
                assert not await it.host.close()
        os.kill(pid, signal.SIGKILL)
        assert await it.lose() == "the server stops"
        assert await it.host.close()


async def test_a_host_that_reads_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "MAX_UNREAD_BYTES", 1 << 20)
    async with Served({"liveness_s": 60.0}) as it:
        await it.hear(Up)
        stop(it.host.state.pid)
        while it.host.send(Ask(1, bytes(24 << 10), 10_000)):
            pass
        assert "does not read" in await it.lose()


async def test_messages_of_any_size_arrive_in_order() -> None:
    async with Served() as it:
        await it.hear(Up)
        for number in range(8):
            it.host.send(Ask(number, bytes(24 << 16), 60_000))
        assert [(await it.hear(Present)).id for _ in range(8)] == list(range(8))


async def test_it_ends_with_its_server() -> None:
    script = (
        "import asyncio, sys\n"
        "from hosts.served import Served\n"
        "async def main():\n"
        "    async with Served() as it:\n"
        "        await it.hear()\n"
        "        print(it.host.state.pid, flush=True)\n"
        "        await it.lose()\n"
        "asyncio.run(main())\n"
    )
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert server.stdout is not None
    while not (line := await server.stdout.readline()).strip().isdigit():
        assert line, "the server has ended"
    host = os.pidfd_open(int(line))
    try:
        stop(int(line))  # not by reading the end of its socket: it runs no code any more
        server.kill()
        await server.wait()
        assert select.select([host], [], [], PATIENCE_S)[0]
    finally:
        os.close(host)


async def test_kills_are_survived_and_leave_nothing() -> None:
    await kill_and_count(6)


@pytest.mark.campaign
async def test_fifty_kills() -> None:
    assert max(await kill_and_count(50)) < 2.0


async def kill_and_count(rounds: int) -> list[float]:
    """Seconds until it is up again, for each; nothing is left behind."""
    async with Served() as it:
        await it.hear(Up)
    gc.collect()  # what other tests left must not be taken for a leak of this one, nor hide one
    before, threads = descriptors(), threading.active_count()
    took: list[float] = []
    async with Served() as it:
        await it.hear(Up)
        for count in range(1, rounds + 1):
            pid = it.host.state.pid
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            assert await it.lose() == "it was killed by SIGKILL"
            await it.hear(Up)
            took.append(time.monotonic() - began)
            assert it.host.state.restarts == count
    assert descriptors() - before == set() and threading.active_count() <= threads
    return took


def descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {name for name in found if "/proc/" not in name}


# Output ----------------------------------------------------------------------------------------


class Recorder:
    """Stands in for the log of host processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        monkeypatch.setattr("layerflow.server.tier.host.log", self)

    def __getattr__(self, level: str) -> Any:
        return lambda event, **fields: self.events.append((level, event, fields))

    def fields(self, event: str) -> list[dict[str, Any]]:
        return [fields for _, name, fields in self.events if name == event]


async def test_what_it_prints_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Recorder(monkeypatch)
    async with Served(says=["hello", "", "x" * 5000, '{"event": "fake", "level": "info"}']) as it:
        await it.hear(Up)
        pid = it.host.state.pid
    lines = log.fields("host_output")
    assert lines[0] == {"backend": NAME, "pid": pid, "stream": "stdout", "line": "hello"}
    assert [len(fields["line"]) for fields in lines] == [5, 2000, 34]


async def test_its_own_log_lines_keep_their_event_and_level(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Recorder(monkeypatch)
    async with Served(raises={"lookup": "the library is upset"}) as it:
        await it.hear(Up)
        it.host.send(Ask(1, key_of(1), 10_000))
        assert (await it.hear(Present)).reason == "RuntimeError: the library is upset"
    ((level, fields),) = [(level, fields) for level, event, fields in log.events if event == "backend_call_failed"]
    assert level == "error"
    assert fields["backend"] == NAME and fields["call"] == "lookup"
    assert fields["error"] == "RuntimeError: the library is upset" and "Traceback" in fields["exception"]


async def test_last_words_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Recorder(monkeypatch)
    async with Served(dies={"lookup": "segfault"}) as it:
        await it.hear(Up)
        it.host.send(Ask(1, key_of(1), 10_000))
        await it.lose()
        lines = [fields["line"] for fields in log.fields("host_output")]
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert any("fake_backend.py" in line for line in lines)


async def test_a_flood_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "WINDOW_S", 100.0)
    log = Recorder(monkeypatch)
    async with Served(says=[f"line {number}" for number in range(1000)]) as it:
        await it.hear(Up)
    assert len(log.fields("host_output")) == host_module.WINDOW_LINES
    assert log.fields("host_output_dropped")[0]["lines"] == 1000 - host_module.WINDOW_LINES
