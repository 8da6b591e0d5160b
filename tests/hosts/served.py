"""A host process with the fake backend, and what it says, for tests on an asyncio loop."""

from __future__ import annotations

import asyncio
from typing import Any

from hosts.bench import PATIENCE_S, Thing
from hosts.fake_backend import NAME
from layerflow.server.tier.host import HostProcess
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Indexed, Pong, ToServer, Written


class Served:
    """Use with ``async with``: the host is up to nothing yet, and dead afterwards.

    :param limits: of :class:`HostProcess`; unless a test says less, a host may be silent for a minute.
    :param options: of the fake backend.
    """

    def __init__(self, limits: dict[str, float] | None = None, backend: str = NAME, **options: Any) -> None:
        self.arena = SharedMemory.create(1 << 20)
        self.said: asyncio.Queue[ToServer] = asyncio.Queue()
        self.stuck: asyncio.Queue[str] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.pong = asyncio.Event()
        patient = {"liveness_s": 60.0} | (limits or {})
        self.host = HostProcess(backend, options, self.arena.fd, self.arena.nbytes, self, **patient)

    def host_said(self, message: ToServer) -> None:
        if isinstance(message, Pong):
            self.pong.set()
        else:
            self.said.put_nowait(message)

    def host_stuck(self, why: str) -> None:
        self.stuck.put_nowait(why)

    def host_lost(self, why: str) -> None:
        self.lost.put_nowait(why)

    async def hear(self, kind: Any = object) -> Any:
        """The next message, which is a `kind`."""
        async with asyncio.timeout(PATIENCE_S):
            message = await self.said.get()
        assert isinstance(message, kind), message
        return message

    async def lose(self) -> str:
        """Why it was lost."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.lost.get()

    async def answer(self) -> None:
        """Its main thread has answered once more."""
        self.pong.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self.pong.wait()

    async def __aenter__(self) -> Served:
        self.host.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.host.close()
        self.arena.close()


async def write(it: Served, number: int, thing: Thing) -> None:
    """Write and publish all of it, as a job of this number. What an index tells of it is heard too."""
    thing.fill(it.arena)
    for message in thing.writing(number):
        it.host.send(message)
    assert await it.hear(Written) == Written(number, 1)
    while isinstance(last := await it.hear(Written | Indexed), Indexed):
        pass
    assert last == Written(number, 2)
