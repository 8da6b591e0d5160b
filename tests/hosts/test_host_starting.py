"""What a host needs before it can start: told where it cannot be had, tried again, and never waited for on the loop."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hosts.bench import PATIENCE_S
from hosts.served import Served
from layerflow.errors import Unsupported
from layerflow.hosts.memcache import environment
from layerflow.server.tier import host
from layerflow.server.tier.host import HostState
from layerflow.wire.host_messages import EndWrite, Up

pytestmark = pytest.mark.usefixtures("fake_on_path")

THREAD = "layerflow-host-environment"


class Failures:
    """Stands in for a module's log: what became of failed starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        monkeypatch.setattr(host, "log", self)

    def info(self, event: str, **fields: Any) -> None:
        """Of no interest."""

    def warning(self, event: str, **fields: Any) -> None:
        assert event == "host_lost"
        self.lost.put_nowait(fields)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            return await self.lost.get()


@pytest.mark.parametrize("aside", [False, True])
async def test_an_environment_that_cannot_be_had_is_tried_again(monkeypatch: pytest.MonkeyPatch, aside: bool) -> None:
    failed, states = Failures(monkeypatch), []
    failures = iter([Unsupported("there is no compiler"), OSError("no file to spare")])

    def sometimes(backend: str, options: object) -> dict[str, str]:
        states.append(it.host.state)
        for failure in failures:
            raise failure
        return {}

    monkeypatch.setattr(host, "takes_long", lambda backend: aside)
    monkeypatch.setattr(host, "environment", sometimes)
    it = Served()
    async with it:
        said = await failed.next(), await failed.next()
        await it.hear(Up)
        assert it.host.state.restarts == 2 and it.lost.empty()
    reasons = ["it cannot be started: there is no compiler", "it cannot be started: no file to spare"]
    assert [fields["reason"] for fields in said] == reasons
    assert said[0]["again_in_s"] < said[1]["again_in_s"]
    assert [state.reason for state in states] == ["", *reasons]


async def test_an_emulator_that_cannot_be_built_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "build.sh").write_text("echo no compiler >&2; exit 1")
    failed = Failures(monkeypatch)
    async with Served(backend="memcache", cann_emulator=str(tmp_path)) as it:
        assert "no compiler" in (await failed.next())["reason"]
        assert (it.host.state.state, it.host.state.pid, it.host.state.restarts) == ("restarting", 0, 1)
        assert "no compiler" in it.host.state.reason
    assert it.host.state.state == "stopped"


async def test_a_build_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "BUILD_S", 30.0)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "build.sh").write_text(f"read -r reason <{gate}; echo $reason >&2; exit 1")
    failed = Failures(monkeypatch)
    async with Served(backend="memcache", cann_emulator=str(tmp_path)) as it:
        assert it.host.state == HostState("starting") and not it.host.send(EndWrite(1))
        await asyncio.to_thread(gate.write_text, "the loop has run\n")
        assert "the loop has run" in (await failed.next())["reason"]


async def test_nothing_is_started_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def build(backend: str, options: object) -> dict[str, str]:
        assert gate.wait(PATIENCE_S)
        return {}

    monkeypatch.setattr(host, "takes_long", lambda backend: True)
    monkeypatch.setattr(host, "environment", build)
    others = threading.enumerate()  # that of another test may be about to end
    async with Served() as it:
        [building] = [thread for thread in threading.enumerate() if thread.name == THREAD and thread not in others]
    gate.set()
    await asyncio.to_thread(building.join)
    assert it.host.state.state == "stopped" and it.said.empty()


async def test_a_machine_without_a_thread_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, refusals = Failures(monkeypatch), iter(["can't start new thread"])
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        for reason in refusals if thread.name == THREAD else ():
            raise RuntimeError(reason)
        real(thread)

    monkeypatch.setattr(host, "takes_long", lambda backend: True)
    monkeypatch.setattr(threading.Thread, "start", start)
    async with Served() as it:
        assert "new thread" in (await failed.next())["reason"]
        await it.hear(Up)
