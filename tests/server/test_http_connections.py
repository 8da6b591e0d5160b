"""HTTP beside the control socket: few connections, and no patience with those that send no request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from layerflow import http_server
from layerflow.http_server import UvicornServer, listen

PATIENCE_S = 20.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class World:
    """A server of two connections, whose answers wait for `may_answer`."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked = 0

        async def answer(_: Request) -> Response:
            self.asked += 1
            await self.may_answer.wait()
            return Response(b"yes")

        self.listener = listen("127.0.0.1", 0, 8, "")
        self.server = UvicornServer(Starlette(routes=[Route("/", answer)]), 8, lambda: None, 2)

    async def connect(self, said: bytes = b"") -> Connection:
        reader, writer = await asyncio.open_connection(*self.listener.getsockname()[:2])
        writer.write(said)
        await writer.drain()
        return reader, writer


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    serving = asyncio.create_task(made.server.serve_on(made.listener))
    yield made
    made.may_answer.set()
    made.server.should_exit = True
    await serving
    made.listener.close()


async def closed(connection: Connection) -> bool:
    """Has the server ended it?"""
    reader, writer = connection
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
    return True


async def answered(connection: Connection) -> bool:
    reader, writer = connection
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(3) == b"yes"
    writer.close()
    return head.startswith(b"HTTP/1.1 200")


async def until(world: World, asked: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while world.asked < asked:  # noqa: ASYNC110 - of the server's inner life
            await asyncio.sleep(0.005)


async def test_one_too_many_takes_the_place_of_who_waits_longest(world: World) -> None:
    busy = await world.connect(GET)
    await until(world, 1)
    idle = await world.connect(b"GET / HTTP/1.1\r\n")
    newest = await world.connect(GET)
    assert await closed(idle)
    await until(world, 2)
    assert await closed(await world.connect(GET)), "both others are being answered"
    world.may_answer.set()
    assert await answered(busy)
    assert await answered(newest)


@pytest.mark.parametrize("said", [b"", b"GET / HT"])
async def test_a_request_s_head_has_to_come(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    world = World()
    serving = asyncio.create_task(world.server.serve_on(world.listener))
    try:
        busy = await world.connect(GET)
        await until(world, 1)
        monkeypatch.setattr(http_server, "HEAD_S", 0.05)  # not before: the first one's head may be late, too
        assert await closed(await world.connect(said))
        world.may_answer.set()
        assert await answered(busy), "an answer may take longer"
    finally:
        world.server.should_exit = True
        await serving
        world.listener.close()


async def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http_server.KEEP_ALIVE_S > 60, "nginx and AWS's load balancers keep theirs for 60 s"
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 1)
    world = World()
    world.may_answer.set()
    serving = asyncio.create_task(world.server.serve_on(world.listener))
    try:
        reader, writer = await world.connect(GET)
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(3) == b"yes"
            assert await reader.read() == b"", "it ends after that time, not never"
        writer.close()
    finally:
        world.server.should_exit = True
        await serving
        world.listener.close()
