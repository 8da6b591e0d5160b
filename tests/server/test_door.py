"""The control socket's own end of ZMTP: with libzmq at the other, and with clients that keep to no rule."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire.zmtp_client import LONG, MORE, frame, hung_up, raw_client

from layerflow.server.transport import door as door_module
from layerflow.server.transport.door import Door
from layerflow.wire.zmtp import SMALL_BYTES

PATIENCE_S = 20.0
MOST = 1 << 20


class World:
    """A door whose clients all have a session, unless said otherwise."""

    def __init__(self, path: Path, hear: Callable[[bytes, bytes | None], None] | None = None) -> None:
        self.path = path
        self.heard: asyncio.Queue[tuple[bytes, bytes | None]] = asyncio.Queue()
        self.gone: list[bytes] = []
        self.strangers = False
        self.door = Door(
            hear or (lambda identity, message: self.heard.put_nowait((identity, message))),
            self.gone.append,
            lambda _: not self.strangers,
            MOST,
        )

    async def message(self) -> tuple[bytes, bytes | None]:
        async with asyncio.timeout(PATIENCE_S):
            return await self.heard.get()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - of the door's inner life, which sets no event
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def opened(made: World) -> AsyncIterator[World]:
    made.door.bind(f"ipc://{made.path}")
    made.door.start()
    yield made
    made.door.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened(World(tmp_path / "control")) as made:
        yield made


@contextlib.contextmanager
def dealer(world: World) -> Iterator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as made:
        made.setsockopt(zmq.LINGER, 0)
        made.connect(f"ipc://{world.path}")
        yield made


@contextlib.asynccontextmanager
async def raw(world: World) -> AsyncIterator[socket.socket]:
    """A client by hand, through the handshake."""
    made = raw_client(world.path)
    client = await asyncio.to_thread(made.__enter__)
    try:
        yield client
    finally:
        made.__exit__(None, None, None)


async def test_libzmq_s_messages_come_and_go_as_they_are(world: World) -> None:
    sizes = [0, 1, 255, 256, SMALL_BYTES, SMALL_BYTES + 1, MOST]
    with dealer(world) as client:
        for size in sizes:
            sent = os.urandom(size)
            await client.send(sent)
            identity, heard = await world.message()
            assert heard == sent
            assert world.door.send(identity, sent)
            async with asyncio.timeout(PATIENCE_S):
                assert await client.recv_multipart() == [sent]
        await client.send_multipart([b"a", b"b", b"c"])
        assert (await world.message())[1] is None
    await world.until(lambda: not world.door.statistics().connections)
    await asyncio.sleep(0)
    assert world.gone == [identity]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=st.lists(st.binary(max_size=2000), min_size=1, max_size=60))
def test_libzmq_is_understood_in_order(tmp_path_factory: pytest.TempPathFactory, sent: list[bytes]) -> None:
    async def run() -> list[bytes | None]:
        world = World(tmp_path_factory.mktemp("door") / "control")
        world.door.bind(f"ipc://{world.path}")
        world.door.start()
        try:
            with dealer(world) as client:
                for one in sent:
                    await client.send(one)
                return [(await world.message())[1] for _ in sent]
        finally:
            world.door.close()

    assert asyncio.run(run()) == sent


async def test_libzmq_s_heartbeat_is_answered(world: World) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.HEARTBEAT_IVL, 20)
        client.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60_000)
        client.connect(f"ipc://{world.path}")
        await client.send(b"one")
        first, _ = await world.message()
        await asyncio.sleep(0.2)
        await client.send(b"two")
        assert await world.message() == (first, b"two")


async def test_a_message_that_does_not_end_ends_its_client_alone(world: World) -> None:
    with dealer(world) as other:
        async with raw(world) as client:
            sent = await asyncio.to_thread(_send_until_hung_up, client, frame(bytes(60_000), MORE), 100 * MOST)
            assert sent < 4 * MOST
            await other.send(b"still here")
            assert (await world.message())[1] == b"still here"


def _send_until_hung_up(client: socket.socket, piece: bytes, most: int) -> int:
    sent = 0
    try:
        while sent < most:
            client.sendall(piece)
            sent += len(piece)
    except ConnectionError:
        return sent
    return sent


async def test_a_frame_that_is_too_large_is_not_waited_for(world: World) -> None:
    async with raw(world) as client:
        client.sendall(struct.pack(">BQ", LONG, MOST + 1000))
        assert await asyncio.to_thread(hung_up, client)


async def test_a_stranger_sends_small_messages_only(world: World) -> None:
    world.strangers = True
    async with raw(world) as client:
        client.sendall(frame(b"hello"))
        assert (await world.message())[1] == b"hello"
        client.sendall(struct.pack(">BQ", LONG, SMALL_BYTES + 1))
        assert await asyncio.to_thread(hung_up, client)


async def test_half_received_messages_of_all_clients_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of them gives way, so that who sends a whole one is not kept from it."""
    monkeypatch.setattr(world.door, "_most_half_received", 3 * MOST)
    async with contextlib.AsyncExitStack() as stack:
        begun = []
        for number in range(4):
            client = await stack.enter_async_context(raw(world))
            client.sendall(struct.pack(">BQ", LONG, MOST) + b"x")
            begun.append(client)
            await world.until(lambda: world.door.statistics().half_received_bytes >= 10 * min(number + 1, 2))  # noqa: B023
        assert await asyncio.to_thread(hung_up, begun[0])
        await asyncio.to_thread(begun[-1].sendall, bytes(MOST - 1))
        message = (await world.message())[1]
        assert message is not None
        assert len(message) == MOST


def one_decent_and_greedy_ones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the next five connections the first is one process's, and the others are another one's."""
    names = iter(["decent", *["greedy"] * 4])
    monkeypatch.setattr(world.door, "_who", lambda _: next(names))


async def test_who_holds_most_half_received_messages_gives_way_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not who has been sending for longest: one client with several connections takes nobody else's room."""
    monkeypatch.setattr(world.door, "_most_half_received", 3 * (MOST + 9))
    one_decent_and_greedy_ones(world, monkeypatch)
    async with contextlib.AsyncExitStack() as stack:
        begun = []
        for number in range(5):
            client = await stack.enter_async_context(raw(world))
            await world.until(lambda: world.door.statistics().connections >= min(number + 1, 3))  # noqa: B023
            client.sendall(struct.pack(">BQ", LONG, MOST) + b"x")
            await world.until(lambda: world.door.statistics().half_received_bytes >= 10 * min(number + 1, 3))  # noqa: B023
            begun.append(client)
        assert await asyncio.to_thread(hung_up, begun[1])
        assert await asyncio.to_thread(hung_up, begun[2])
        await asyncio.to_thread(begun[0].sendall, bytes(MOST - 1))
        message = (await world.message())[1]
        assert message is not None
        assert len(message) == MOST


async def test_a_message_has_its_time_from_its_own_first_byte(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends without a pause is always amid some message."""
    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr(door_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    whole = frame(bytes(1000))
    async with raw(world) as client:
        client.sendall(whole[:-1])
        for _ in range(3):
            await world.until(lambda: world.door.statistics().half_received_bytes == len(whole) - 1)
            clock.now += 0.7 * door_module.MESSAGE_S
            world.door._sweep()
            assert world.door.statistics().connections == 1
            client.sendall(whole[-1:] + whole[:-1])
            await world.message()
        await world.until(lambda: world.door.statistics().half_received_bytes == len(whole) - 1)
        clock.now += 1.1 * door_module.MESSAGE_S
        world.door._sweep()
        assert await asyncio.to_thread(hung_up, client)


async def test_who_does_not_read_is_not_listened_to_and_then_hung_up_on(world: World) -> None:
    answer = bytes(MOST)
    async with raw(world) as client:
        client.sendall(frame(b"ask"))
        identity, _ = await world.message()
        for _ in range(3):
            assert world.door.send(identity, answer)
        client.sendall(frame(b"ask again"))
        await asyncio.sleep(0.05)
        assert world.heard.empty()
        assert not world.door.pending(), "it waits for its client, not for the server"
        sent = 3
        while world.door.send(identity, answer):
            sent += 1
        assert sent <= door_module.UNREAD_BYTES // MOST + 1
        assert world.door.statistics().unread_bytes == 0
        await world.until(lambda: world.gone == [identity])


async def test_who_leaves_most_unread_over_all_its_connections_is_hung_up_on_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not who waits for the largest answer: one client with several connections ends nobody else's."""
    answer = bytes(8 * MOST)
    monkeypatch.setattr(door_module, "ALL_UNREAD_BYTES", 30 * MOST)
    one_decent_and_greedy_ones(world, monkeypatch)
    async with contextlib.AsyncExitStack() as stack:
        identities = []
        for _ in range(5):
            client = await stack.enter_async_context(raw(world))
            client.sendall(frame(b"ask"))
            identities.append((await world.message())[0])
        decent, *greedy = identities
        assert world.door.send(decent, bytes(12 * MOST))
        for identity in greedy:
            world.door.send(identity, answer)
        assert world.door.statistics().connections == 3
        assert world.door.send(decent, b"more"), "those that were hung up on are of the other one"


async def test_who_reads_at_last_is_listened_to_again(world: World) -> None:
    async with raw(world) as client:
        client.sendall(frame(b"ask"))
        identity, _ = await world.message()
        for _ in range(3):
            world.door.send(identity, bytes(MOST))
        client.sendall(frame(b"ask again"))
        await asyncio.to_thread(_read, client, 3 * (MOST + 9))
        assert await world.message() == (identity, b"ask again")
        assert world.door.statistics().unread_bytes == 0


def _read(client: socket.socket, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(client.recv(min(nbytes, 1 << 18)))


async def test_one_client_s_flood_lets_the_others_in_between(world: World) -> None:
    async with raw(world) as flood, raw(world) as other:
        flood.sendall(frame(b"f") * 50_000)
        other.sendall(frame(b"o"))
        before = 0
        while (await world.message())[1] != b"o":
            before += 1
        assert before < 50_000


async def test_messages_that_take_long_come_in_turn(tmp_path: Path) -> None:
    """Two clients that have much to say: few of one are handled between two of the other, however slow they are."""
    heard: list[bytes] = []

    def slowly(_: bytes, message: bytes | None) -> None:
        heard.append(message or b"")
        until = time.monotonic() + 0.0003
        while time.monotonic() < until:
            pass

    async with opened(World(tmp_path / "control", slowly)) as world, raw(world) as flood, raw(world) as other:
        await world.until(lambda: world.door.statistics().connections == 2)
        flood.sendall(frame(b"f") * 3000)
        other.sendall(frame(b"o") * 200)
        await world.until(lambda: heard.count(b"o") == 200)
        between = [len(each) for each in b"".join(heard).strip(b"f").split(b"o")]
        assert max(between) <= 3, "a turn is half a millisecond"


async def test_connections_without_a_session_are_few(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_STRANGERS", 4)
    world.strangers = True
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(raw(world)) for _ in range(6)]
        assert await asyncio.to_thread(hung_up, clients[0])
        await world.until(lambda: world.door.statistics().connections == 4)


@pytest.mark.parametrize("said", [b"", b"\xff\0\0", None])
async def test_who_takes_too_long_is_hung_up_on(
    world: World, monkeypatch: pytest.MonkeyPatch, said: bytes | None
) -> None:
    """Before the handshake, amid it, and behind it without a session."""
    world.strangers = True
    if said is None:
        async with raw(world) as client:
            monkeypatch.setattr(door_module, "STRANGER_S", 0.0)  # its handshake had time
            assert await asyncio.to_thread(hung_up, client)
        return
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 0.0)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(str(world.path))
        client.sendall(said)
        assert await asyncio.to_thread(hung_up, client)


async def test_without_descriptors_who_comes_waits_and_who_is_there_goes_on(world: World) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with dealer(world) as here:
        await here.send(b"here")
        await world.message()
        with contextlib.ExitStack() as stack:
            # Several: garbage of earlier tests may be closed meanwhile, and make room for one.
            late = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(8)]
            top = os.dup(0)
            os.close(top)
            resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
            try:
                for one in late:
                    one.connect(str(world.path))
                await world.until(lambda: world.door.statistics().turned_away > 0)
                await here.send(b"still here")
                assert (await world.message())[1] == b"still here"
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            async with raw(world) as client:
                client.sendall(frame(b"in"))
                assert (await world.message())[1] == b"in"
