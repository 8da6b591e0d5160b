"""HTTP beside the control socket: few connections, and no patience with those that send no request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from layerflow import http_server
from layerflow.http_server import SLOWEST_BODY, UvicornServer, listen, origin_of

PATIENCE_S = 20.0
GRACE_S = 60.0
LARGE = 32 << 20  # more than the system takes for a client that reads nothing
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
BEGUN = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nb"
HEAD = BEGUN[:-1]
HERE, THERE, ELSEWHERE = "127.0.0.1", "127.0.0.2", "127.0.0.3"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class World:
    """A server whose answers wait for `may_answer`.

    :param most: connections.
    """

    def __init__(self, most: int = 2) -> None:
        self.may_answer = asyncio.Event()
        self.asked = 0
        self.received = 0  # bytes of bodies

        async def answer(request: Request) -> Response:
            self.asked += 1
            with contextlib.suppress(ClientDisconnect):
                async for piece in request.stream():
                    self.received += len(piece)
                await self.may_answer.wait()
            return Response(b"yes")

        async def large(request: Request) -> Response:
            self.asked += 1
            return Response(bytes(LARGE))

        async def break_off(scope: Scope, receive: Receive, send: Send) -> None:
            self.asked += 1
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(64 << 20), "more_body": True})

        async def begin(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"y", "more_body": True})
            await self.may_answer.wait()
            await send({"type": "http.response.body", "body": b"es"})

        self.listener = listen("127.0.0.1", 0, 8, "")
        self.server = UvicornServer(
            Starlette(
                routes=[
                    Route("/", answer, methods=["GET", "POST"]),
                    Route("/large", large),
                    Mount("/part", break_off),
                    Mount("/begun", begin),
                ]
            ),
            8,
            lambda: None,
            most,
        )

    async def connect(self, said: bytes = b"", at: str = HERE) -> Connection:
        """:param at: the client's address."""
        reader, writer = await asyncio.open_connection(*self.listener.getsockname()[:2], local_addr=(at, 0))
        writer.write(said)
        await writer.drain()
        return reader, writer


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every body that has not come yet is late."""
    monkeypatch.setattr(http_server, "BODY_GRACE_S", -1.0)


@pytest.fixture
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No body is late."""
    monkeypatch.setattr(http_server, "BODY_GRACE_S", GRACE_S)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """:param monkeypatch: whose clock, see `passes`, has to last for longer than the server."""
    async with served(World()) as made:
        yield made


@contextlib.asynccontextmanager
async def served(made: World) -> AsyncIterator[World]:
    serving = asyncio.create_task(made.server.serve_on(made.listener))
    try:
        yield made
    finally:
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


async def one_answer(reader: asyncio.StreamReader) -> None:
    """Of several."""
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b"yes")


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


@pytest.mark.usefixtures("no_grace")
async def test_one_too_many_takes_the_place_of_whose_body_has_been_dripping_for_longest(world: World) -> None:
    oldest = await world.connect(BEGUN)
    await until(world, 1)
    busy = await world.connect(GET)
    await until(world, 2)
    newer = await world.connect(BEGUN)
    assert await closed(oldest), "its body drips"
    await until(world, 3)
    newest = await world.connect(GET)
    assert await closed(newer)
    await until(world, 4)
    assert await closed(await world.connect(BEGUN)), "the others' requests are whole"
    world.may_answer.set()
    assert await answered(busy)
    assert await answered(newest)


async def upload(world: World) -> Connection:
    """A client that has sent half of its body, a minute's worth of a slow link."""
    body = bytes(1 << 20)
    coming = await world.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2 * len(body)) + body)
    async with asyncio.timeout(PATIENCE_S):
        while world.received < len(body):  # noqa: ASYNC110 - of the server's inner life
            await asyncio.sleep(0.005)
    return coming


async def ends_well(world: World, coming: Connection) -> bool:
    coming[1].write(bytes(1 << 20))
    world.may_answer.set()
    return await answered(coming)


@pytest.mark.parametrize("head_grace_s", [-1.0, 600.0])
@pytest.mark.usefixtures("no_grace")
async def test_connections_that_send_nothing_end_each_other_and_no_upload(
    world: World, monkeypatch: pytest.MonkeyPatch, head_grace_s: float
) -> None:
    monkeypatch.setattr(http_server, "HEAD_GRACE_S", head_grace_s)
    coming = await upload(world)
    silent = [await world.connect() for _ in range(8)]
    for one in silent[:-1]:
        assert await closed(one), "it makes room for the next one"
    busy = await world.connect(GET)
    await until(world, 2)
    assert await closed(silent[-1])
    assert await closed(await world.connect()), "one is being answered, and the other's body comes"
    assert await ends_well(world, coming)
    assert await answered(busy)


@pytest.mark.usefixtures("no_grace")
async def test_uploads_do_not_end_each_other(world: World) -> None:
    coming = await upload(world)
    busy = await world.connect(GET)
    await until(world, 2)
    for _ in range(3):
        assert await closed(await world.connect(BEGUN)), "it was there first"
    assert await ends_well(world, coming)
    assert await answered(busy)


async def test_a_body_that_has_just_begun_is_not_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_GRACE_S", 600.0)
    begun = [await world.connect(BEGUN) for _ in range(2)]
    await until(world, 2)
    assert await closed(await world.connect(GET))
    world.may_answer.set()
    for reader, writer in begun:
        writer.write(b"b" * 999)
        assert await answered((reader, writer))


def passes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """So much time, on the server's clock."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + seconds)


async def takes_all_its_grace(world: World, monkeypatch: pytest.MonkeyPatch) -> Connection:
    """A client whose first body has come late, and whose second one is to come."""
    reader, writer = slow = await world.connect(HEAD.replace(b"1000", b"1"))
    await until(world, 1)
    passes(monkeypatch, GRACE_S + 1)
    writer.write(b"b" + HEAD)
    world.may_answer.set()
    await one_answer(reader)
    await until(world, 2)
    world.may_answer.clear()
    return slow


@pytest.mark.usefixtures("long_grace")
async def test_a_connection_whose_bodies_drip_has_its_grace_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = await takes_all_its_grace(world, monkeypatch)
    decent = await world.connect(HEAD)
    await until(world, 3)
    newest = await world.connect(GET)
    assert await closed(slow)
    await until(world, 4)
    decent[1].write(b"b" * 1000)
    world.may_answer.set()
    assert await answered(decent)
    assert await answered(newest)


@pytest.mark.usefixtures("long_grace")
async def test_a_body_that_comes_faster_gives_a_connection_its_grace_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = mended = await takes_all_its_grace(world, monkeypatch)
    nbytes = int(GRACE_S / 2) * SLOWEST_BODY
    large = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % nbytes + bytes(nbytes)
    writer.write(b"b" * 1000 + large + HEAD)
    world.may_answer.set()
    for _ in range(2):
        await one_answer(reader)
    await until(world, 4)
    world.may_answer.clear()
    busy = await world.connect(GET)
    await until(world, 5)
    assert await closed(await world.connect(GET)), "the body may be late again"
    writer.write(b"b" * 1000)
    world.may_answer.set()
    assert await answered(mended)
    assert await answered(busy)


@pytest.mark.usefixtures("long_grace")
async def test_time_without_a_request_gives_a_connection_its_grace_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body comes later than its head by what the way takes, with each request again."""
    reader, writer = kept = await takes_all_its_grace(world, monkeypatch)
    writer.write(b"b" * 1000)
    world.may_answer.set()
    await one_answer(reader)
    world.may_answer.clear()
    passes(monkeypatch, GRACE_S / 2)
    writer.write(HEAD)
    busy = await world.connect(GET)
    await until(world, 4)
    passes(monkeypatch, GRACE_S / 4)
    assert await closed(await world.connect(GET)), "the body may be late again"
    writer.write(b"b" * 1000)
    world.may_answer.set()
    assert await answered(kept)
    assert await answered(busy)


@pytest.mark.usefixtures("long_grace")
async def test_a_fast_body_lets_no_later_one_drip_for_longer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = int(GRACE_S) * SLOWEST_BODY
    large = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % nbytes + bytes(nbytes)
    world.may_answer.set()
    reader, _ = slow = await world.connect(large + HEAD)
    await one_answer(reader)
    await until(world, 2)
    passes(monkeypatch, GRACE_S + 1)
    decent = await world.connect(HEAD)
    await until(world, 3)
    newest = await world.connect(GET)
    assert await closed(slow)
    assert await answered(newest)
    decent[1].write(b"b" * 1000)
    assert await answered(decent)


@pytest.mark.usefixtures("long_grace")
async def test_an_address_with_most_connections_makes_room_for_one_with_fewer(world: World) -> None:
    crowd = [await world.connect(BEGUN, THERE) for _ in range(2)]
    await until(world, 2)
    few = await world.connect(HEAD)
    assert await closed(crowd[0]), "the older one"
    await until(world, 3)
    for at in (HERE, THERE, ELSEWHERE):
        assert await closed(await world.connect(HEAD, at)), "no address has more than its own"
    world.may_answer.set()
    few[1].write(b"b" * 1000)
    assert await answered(few)
    crowd[1][1].write(b"b" * 999)
    assert await answered(crowd[1])


@pytest.mark.usefixtures("long_grace")
async def test_a_body_of_an_address_with_half_of_the_connections_makes_room_for_nobody() -> None:
    """A connection from elsewhere costs nothing, whether a request comes or not."""
    async with served(World(4)) as world:
        coming = [await world.connect(BEGUN, THERE) for _ in range(2)]
        await until(world, 2)
        busy = [await world.connect(GET, HERE) for _ in range(2)]
        await until(world, 4)
        assert await closed(await world.connect(b"", ELSEWHERE))
        world.may_answer.set()
        for one in busy:
            assert await answered(one)
        for one in coming:
            one[1].write(b"b" * 999)
            assert await answered(one)


async def test_who_pipelines_makes_room_for_an_address_with_fewer_connections(world: World) -> None:
    """It has a request at every instant, and need never be without one."""
    crowd = [await world.connect(GET.replace(b"/", b"/nowhere", 1) + GET, THERE) for _ in range(2)]
    await until(world, 2)
    for reader, _ in crowd:
        await reader.readuntil(b"\r\n\r\nNot Found")
    assert await closed(await world.connect(GET, THERE)), "it has no fewer"
    few = await world.connect(GET)
    assert await closed(crowd[0])
    await until(world, 3)
    world.may_answer.set()
    assert await answered(few)
    assert await answered(crowd[1])


async def test_whole_requests_make_room_for_nobody(world: World) -> None:
    crowd = [await world.connect(GET, THERE) for _ in range(2)]
    await until(world, 2)
    assert await closed(await world.connect(GET))
    world.may_answer.set()
    for one in crowd:
        assert await answered(one)


@pytest.mark.usefixtures("long_grace")
@pytest.mark.parametrize("at", [HERE, THERE])
async def test_a_head_that_may_be_coming_makes_room_before_a_body_of_the_same_address(
    world: World, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(http_server, "HEAD_GRACE_S", GRACE_S)
    coming = await world.connect(BEGUN, THERE)
    await until(world, 1)
    silent = await world.connect(b"", THERE)
    newest = await world.connect(GET, at)
    assert await closed(silent)
    await until(world, 2)
    world.may_answer.set()
    coming[1].write(b"b" * 999)
    assert await answered(coming)
    assert await answered(newest)


@pytest.mark.usefixtures("long_grace")
async def test_a_crowd_s_next_connections_take_no_other_address_s_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_GRACE_S", GRACE_S)
    world.may_answer.set()
    crowd = [await world.connect(BEGUN, THERE)]
    await until(world, 1)
    few = await world.connect()
    for _ in range(3):
        assert await closed(await world.connect(GET, THERE)), "the other's head may be coming"
    few[1].write(GET)
    assert await answered(few)
    crowd[0][1].write(b"b" * 999)
    assert await answered(crowd[0])


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::2:0:0:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
def test_connections_of_one_ipv4_address_or_ipv6_network_count_together(one: str, other: str, alike: bool) -> None:
    assert (origin_of((one, 1)) == origin_of((other, 2))) is alike
    assert origin_of(None) != origin_of((one, 1))


@pytest.mark.parametrize("head_grace_s", [-1.0, 600.0])
@pytest.mark.usefixtures("no_grace")
async def test_a_head_that_does_not_come_makes_room_before_a_body_that_drips(
    world: World, monkeypatch: pytest.MonkeyPatch, head_grace_s: float
) -> None:
    monkeypatch.setattr(http_server, "HEAD_GRACE_S", head_grace_s)
    monkeypatch.setattr(http_server, "HEAD_S", 600.0)
    dripping = await world.connect(BEGUN)
    await until(world, 1)
    silent = await world.connect(b"GET / HT")
    newest = await world.connect(GET)
    late, left = (silent, dripping) if head_grace_s < 0 else (dripping, silent)
    assert await closed(late)
    await until(world, 2)
    world.may_answer.set()
    assert await answered(newest)
    left[1].write(b"b" * 999 if left is dripping else b"TP/1.1\r\nHost: x\r\n\r\n")
    assert await answered(left)


async def test_who_waits_without_a_request_makes_room_before_a_body_that_comes(world: World) -> None:
    coming = await world.connect(BEGUN)
    await until(world, 1)
    world.may_answer.set()
    reader, writer = idle = await world.connect(GET)
    await reader.readuntil(b"yes")
    newest = await world.connect(GET)
    assert await closed(idle)
    assert await answered(newest)
    coming[1].write(b"b" * 999)
    assert await answered(coming)
    writer.close()


async def test_an_answer_that_broke_off_holds_no_connection_for_who_does_not_read_it(world: World) -> None:
    unread = await world.connect(GET.replace(b"/", b"/part/", 1))
    await until(world, 1)
    busy = await world.connect(GET)
    await until(world, 2)
    newest = await world.connect(GET)
    await until(world, 3)
    world.may_answer.set()
    assert await answered(busy)
    assert await answered(newest)
    unread[1].close()


async def waits(world: World, asked: int) -> Connection:
    """A client that does not read the answer before the one to its request that is whole.

    :param asked: requests to the server, with its two.
    """
    unread = await world.connect(GET.replace(b"/", b"/large", 1) * 2)
    await until(world, asked)
    return unread


def untaken(world: World) -> int:
    """Bytes of answers that the server keeps."""
    return sum(one.transport.get_write_buffer_size() for one in world.server.server_state.connections)  # type: ignore[union-attr]


async def test_answers_that_nobody_reads_hold_no_places(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.may_answer.set()
    crowd = [await waits(world, 2 * number) for number in (1, 2)]
    assert await closed(await world.connect(GET)), "they may be read yet"
    passes(monkeypatch, http_server.HEAD_S + 1)
    for _ in crowd:
        assert await answered(await world.connect(GET))
    for _, writer in crowd:
        writer.close()


async def test_an_answer_that_is_read_keeps_its_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await waits(world, 2)
    kept = untaken(world)
    async with asyncio.timeout(PATIENCE_S):
        while untaken(world) > kept - LARGE // 4:
            await reader.readexactly(1 << 16)
    busy = await world.connect(GET)
    await until(world, 3)
    passes(monkeypatch, LARGE / 4 / SLOWEST_BODY)
    assert await closed(await world.connect(GET))
    world.may_answer.set()
    assert await answered(busy)
    writer.close()


@pytest.mark.usefixtures("no_grace")
async def test_many_at_once_take_a_place_each(world: World) -> None:
    slow = [await world.connect(BEGUN) for _ in range(2)]
    await until(world, 2)
    decent = await asyncio.gather(*(world.connect(GET) for _ in range(2)))
    for one in slow:
        assert await closed(one)
    await until(world, 4)
    world.may_answer.set()
    for one in decent:
        assert await answered(one)
    assert len(world.server.server_state.connections) <= 2


@pytest.mark.parametrize(("path", "early"), [(b"/nowhere", True), (b"/nowhere", False), (b"/begun/", False)])
async def test_a_body_that_is_no_http_is_one_line_of_the_log(
    world: World, caplog: pytest.LogCaptureFixture, path: bytes, early: bool
) -> None:
    """Whether its request is still to be answered by then, has been, or is being answered."""
    said = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await world.connect(said + b"no number\r\n" * early)
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            assert early == head.startswith(b"HTTP/1.1 400")
            writer.write(b"no number\r\n")
            await reader.read()
    writer.close()
    world.may_answer.set()
    assert await answered(await world.connect(GET))
    assert warnings(caplog) == ["Invalid HTTP request received."]


async def test_a_body_that_is_no_http_ends_a_request_whose_answer_has_none(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    said = b"HEAD / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n"
    assert await closed(await world.connect(said))
    world.may_answer.set()
    assert await answered(await world.connect(GET))
    assert warnings(caplog) == ["Invalid HTTP request received."]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "begun", [b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n"]
)
async def test_headers_and_trailers_have_a_size(world: World, begun: bytes) -> None:
    reader, writer = await world.connect(begun)
    line = b"X: " + b"x" * 1021 + b"\r\n"
    lines, kept = 0, 0
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            while not reader.at_eof() and lines < 1 << 14:
                writer.write(line)
                await writer.drain()
                lines += 1
                for one in world.server.server_state.connections:
                    assert isinstance(one, H11Protocol)
                    kept = max(kept, len(one.conn._receive_buffer), sum(len(value) for _, value in one.headers or ()))
            assert (await reader.read()).startswith(b"HTTP/1.1 4")
    writer.close()
    assert lines < 1 << 14, "the server lets go"
    assert kept < 1 << 20


async def test_a_head_of_40_kib_may_come_in_pieces(world: World) -> None:
    world.may_answer.set()
    begun = b"GET / HTTP/1.1\r\nHost: x\r\n" + (b"X: " + b"x" * 1019 + b"\r\n") * 40
    coming = await world.connect(begun)
    async with asyncio.timeout(PATIENCE_S):
        while not any(len(buffer) == len(begun) for buffer in _buffers(world)):  # noqa: ASYNC110 - of its inner life
            await asyncio.sleep(0.005)
    coming[1].write(b"\r\n")
    assert await answered(coming)


def _buffers(world: World) -> list[bytes]:
    """What the server has read of each connection's head."""
    connections = [one for one in world.server.server_state.connections if isinstance(one, H11Protocol)]
    return [bytes(one.conn._receive_buffer) for one in connections]


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
