"""The server's own end of CURVE: libzmq's clients are the oracle, and those who are not on the allow-list."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from wire.zmtp_client import COMMAND, frame, greeting, hung_up
from zmq.utils import z85

from layerflow.errors import ProtocolError
from layerflow.server.transport import door as door_module
from layerflow.server.transport.curve import CurveServer
from layerflow.server.transport.door import Door
from layerflow.server.transport.security import Curve
from layerflow.wire.rights import HERE

PATIENCE_S = 20.0
MOST = 1 << 20
Keys = tuple[bytes, bytes]


class World:
    """A door on tcp that one key opens."""

    def __init__(self) -> None:
        self.server, self.friend, self.stranger = (zmq.curve_keypair() for _ in range(3))
        self.heard: asyncio.Queue[tuple[bytes, bytes | None]] = asyncio.Queue()
        curve = Curve(self.server[1], {self.friend[0]: HERE})
        self.door = Door(
            lambda identity, message: self.heard.put_nowait((identity, message)),
            lambda _: None,
            lambda _: True,
            MOST,
            curve.mechanism,
        )
        self.endpoint = self.door.bind("tcp://127.0.0.1:*")

    @contextlib.contextmanager
    def client(self, keys: Keys, server: bytes = b"") -> Iterator[zmq.asyncio.Socket]:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as made:
            made.setsockopt(zmq.LINGER, 0)
            made.curve_serverkey = server or self.server[0]
            made.curve_publickey, made.curve_secretkey = keys
            made.connect(self.endpoint)
            yield made

    async def message(self) -> tuple[bytes, bytes | None]:
        async with asyncio.timeout(PATIENCE_S):
            return await self.heard.get()

    async def refused(self, most: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.door.statistics().hung_up_on < most:  # noqa: ASYNC110 - of the door's inner life
                await asyncio.sleep(0.005)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    made.door.start()
    yield made
    made.door.close()


async def test_libzmq_s_messages_come_and_go_as_they_are(world: World) -> None:
    with world.client(world.friend) as client:
        for size in (0, 1, 222, 223, 256, 65_536, MOST):
            sent = os.urandom(size)
            await client.send(sent)
            identity, heard = await world.message()
            assert heard == sent
            assert world.door.send(identity, sent)
            async with asyncio.timeout(PATIENCE_S):
                assert await client.recv_multipart() == [sent]
        await client.send_multipart([b"a", b"b"])
        assert await world.message() == (identity, None)
        assert world.door.key_of(identity) == world.friend[0]


async def test_libzmq_s_heartbeat_is_answered(world: World) -> None:
    with world.client(world.friend) as client:
        client.setsockopt(zmq.HEARTBEAT_IVL, 20)
        client.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60_000)
        client.disconnect(world.endpoint)
        client.connect(world.endpoint)
        await client.send(b"one")
        first, _ = await world.message()
        await asyncio.sleep(0.2)
        await client.send(b"two")
        assert await world.message() == (first, b"two")


async def test_who_is_not_on_the_list_says_nothing(world: World) -> None:
    with world.client(world.stranger) as client, world.client(world.friend) as friend:
        await client.send(b"let me in")
        await world.refused()
        await friend.send(b"hello")
        assert (await world.message())[1] == b"hello"
    assert world.heard.empty()


async def test_who_does_not_know_the_server_s_key_says_nothing(world: World) -> None:
    with world.client(world.friend, world.stranger[0]) as client:
        await client.send(b"hello")
        await world.refused()
    assert world.heard.empty()


async def test_refusals_that_cannot_be_logged_keep_nobody_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full log disk is enough for that, and whoever connects with a wrong key can fill it."""

    class Full:
        def warning(self, *_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(door_module, "log", Full())
    with world.client(world.stranger) as client, world.client(world.friend) as friend:
        await client.send(b"let me in")
        await world.refused()
        await friend.send(b"hello")
        assert (await world.message())[1] == b"hello"


async def test_refusals_of_one_address_are_one_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []

    class Log:
        def warning(self, event: str, **more: str) -> None:
            said.append((event, more["reason"]))

    monkeypatch.setattr(door_module, "log", Log())
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(world.client(world.stranger))
            await client.send(b"let me in")
        await world.refused(10)
    assert said == [("curve_key_refused", f"the key {world.stranger[0].decode()} is not on the allow-list")]


async def test_a_large_message_is_opened_beside_the_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are heard meanwhile; what its client has not sealed ends that client alone."""
    large, entered, go_on = MOST // 2, threading.Event(), threading.Event()
    opened = CurveServer.open

    def slow(self: CurveServer, payload: bytes) -> tuple[int, bytes]:
        if len(payload) > large:
            entered.set()
            assert go_on.wait(PATIENCE_S)
            payload = payload[:-1] + bytes((payload[-1] ^ broken,))
        return opened(self, payload)

    monkeypatch.setattr(CurveServer, "open", slow)
    for broken in (0, 1):
        entered.clear()
        go_on.clear()
        with world.client(world.friend) as client, world.client(world.friend) as other:
            await client.send(bytes(MOST))
            await client.send(b"behind it")
            assert await asyncio.to_thread(entered.wait, PATIENCE_S)
            assert world.door.pending()
            await other.send(b"meanwhile")
            assert (await world.message())[1] == b"meanwhile"
            go_on.set()
            if broken:
                await world.refused()
            else:
                assert (await world.message())[1] == bytes(MOST)
                assert (await world.message())[1] == b"behind it"
    assert world.heard.empty()


async def test_messages_that_are_being_opened_leave_no_room_for_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread has them: the newcomer is refused, and they are told."""
    entered, go_on = threading.Semaphore(0), threading.Event()
    opened = CurveServer.open

    def slow(self: CurveServer, payload: bytes) -> tuple[int, bytes]:
        if len(payload) > MOST // 2:
            entered.release()
            assert go_on.wait(PATIENCE_S)
        return opened(self, payload)

    monkeypatch.setattr(CurveServer, "open", slow)
    monkeypatch.setattr(world.door, "_most_half_received", 5 * MOST // 2)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            await stack.enter_context(world.client(world.friend)).send(bytes(MOST))
            assert await asyncio.to_thread(entered.acquire, timeout=PATIENCE_S)
        assert world.door.statistics().half_received_bytes >= 2 * MOST
        await stack.enter_context(world.client(world.friend)).send(bytes(MOST))
        await world.refused()
        go_on.set()
        assert [len((await world.message())[1] or b"") for _ in range(2)] == [MOST, MOST]


async def test_a_client_without_curve_is_hung_up_on(world: World) -> None:
    host, port = world.endpoint.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), PATIENCE_S) as client:
        client.sendall(greeting())
        assert await asyncio.to_thread(hung_up, client)


@pytest.mark.parametrize(
    "said",
    [b"", b"\x05READY", b"\x05HELLO" + bytes(194), b"\x05HELLO\x01\0" + bytes(192), b"\x08INITIATE" + bytes(500)],
)
async def test_a_handshake_that_is_none_is_hung_up_on(world: World, said: bytes) -> None:
    host, port = world.endpoint.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), PATIENCE_S) as client:
        client.sendall(greeting(b"CURVE") + frame(said, COMMAND))
        assert await asyncio.to_thread(hung_up, client)


@given(st.binary(max_size=600), st.sampled_from([b"HELLO", b"INITIATE", b"READY"]))
def test_no_handshake_does_more_than_end_the_connection(body: bytes, name: bytes) -> None:
    server = CurveServer(z85.decode(zmq.curve_keypair()[1]), lambda _: True)
    with pytest.raises(ProtocolError):
        server.command(name, body)
    assert not server.ready
    with pytest.raises(ProtocolError):
        server.open(b"\x07MESSAGE" + body)
