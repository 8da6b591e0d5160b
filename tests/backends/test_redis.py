"""The Redis backend against a real server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("redis", reason="the package redis is not installed")

from e2e.known import eventually
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis_server import RedisServer, program

from layerflow.config.settings import Settings
from layerflow.hosts.backend import ObjectLocation, Unreachable, Unusable, pool_name
from layerflow.hosts.process import make
from layerflow.hosts.redis import PLUGIN, Redis, examine
from layerflow.system.memfd import SharedMemory
from layerflow_testing import (
    ARENA,
    BROKEN,
    EXISTS,
    EXPIRED,
    FAILED,
    FULL,
    MISSING,
    OK,
    TOO_LARGE,
    BackendContract,
    Bench,
    Client,
    Thing,
    assert_whole,
    lay_out,
    outcomes,
    put,
    save,
    soon,
)
from layerflow_testing.tcp_relay import TcpRelay

pytestmark = pytest.mark.skipif(program() is None, reason="there is no redis-server and no valkey-server here")
CAPACITY = 64 << 20
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def arena() -> Iterator[SharedMemory]:
    with SharedMemory.create(ARENA) as arena:
        yield arena


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer(maxmemory=str(CAPACITY), maxmemory_policy="allkeys-lru")
    yield server
    server.close()


def join(server: RedisServer, arena: SharedMemory, url: str = "") -> Client:
    backend = Redis({"url": url or server.url, "unfinished_s": 300, "timeout_ms": 5000})
    backend.attach(arena, lambda keys: None)
    return Client(backend, arena.address)


def placed(bench: Bench, client: Client, *things: Thing) -> list[ObjectLocation]:
    """These in the arena, as a job of the client has them."""
    offsets = lay_out(things)
    put(bench, things, offsets)
    return [thing.at(client, offset) for thing, offset in zip(things, offsets, strict=True)]


class Cutting(TcpRelay):
    """Between a client and a server: cuts every connection before a command, the `nth` time that it comes.

    :ivar command: which; empty = none.
    """

    def __init__(self, server: RedisServer) -> None:
        self._path = str(server.socket)
        self.command, self.nth = b"", 1
        super().__init__("127.0.0.1:0")

    def _connect(self) -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        far.connect(self._path)
        self._open.append(far)
        return far

    def _serve(self, near: socket.socket) -> None:
        with self._connect() as far:
            back = threading.Thread(target=self._pass_back, args=(far, near), daemon=True)
            back.start()
            kept = b""
            while data := near.recv(1 << 16):
                kept += data
                mark = b"\r\n" + self.command + b"\r\n"
                while self.command and mark in kept:
                    self.nth -= 1
                    before, _, kept = kept.partition(mark)
                    if self.nth == 0:
                        far.sendall(before)
                        self.hang_up()
                        return
                    far.sendall(before + mark)
                far.sendall(kept)
                kept = b""
            far.shutdown(socket.SHUT_RDWR)
            back.join()

    @staticmethod
    def _pass_back(far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                near.sendall(data)

    @contextlib.contextmanager
    def before(self, command: bytes, nth: int = 1) -> Iterator[None]:
        self.command, self.nth = command, nth
        yield
        self.command = b""


def without_retries(client: Client) -> None:
    """Of redis-py's own, which would go on with a new connection."""
    client.backend._client.connection_pool.connection_kwargs["retry"] = Retry(NoBackoff(), 0)
    client.backend._client.connection_pool.disconnect()
    client.backend._client.connection_pool.reset()


class TestRedis(BackendContract):
    @pytest.fixture
    def bench(self, server: RedisServer, arena: SharedMemory) -> Iterator[Bench]:
        server.client.flushall()
        relay = Cutting(server)
        clients = [join(server, arena, f"redis://127.0.0.1:{relay.port}/0"), join(server, arena)]
        without_retries(clients[0])
        yield Bench(clients[0], clients[1], arena, CAPACITY, outage=lambda call: relay.before(b"EXEC", 2))
        for client in clients:
            client.backend.close()
        relay.close()


@pytest.fixture
def bench(server: RedisServer, arena: SharedMemory) -> Iterator[Bench]:
    server.client.flushall()
    client = join(server, arena)
    yield Bench(client, None, arena, CAPACITY)
    client.backend.close()


def test_it_is_made_by_its_name(server: RedisServer) -> None:
    options = PLUGIN.options
    assert options is not None
    made = make("redis", options(url=server.url).model_dump() | {"timeout_ms": 1000})
    assert isinstance(made, Redis)


def test_what_a_writer_that_died_has_left_expires(bench: Bench, server: RedisServer) -> None:
    thing = bench.thing("left")
    [place] = placed(bench, bench.first, thing)
    assert outcomes(bench.first.backend.open_write([place], soon())) == [OK]
    [name] = server.client.keys("*")
    assert 0 < server.client.pttl(name) <= 300_000
    assert bench.first.backend.lookup([thing.key], soon()) == [False]


@pytest.mark.parametrize("command", [b"SET", b"SETRANGE", b"PEXPIRE", b"PERSIST", b"EXEC", b"UNLINK"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_wherever_a_writer_dies_what_it_leaves_expires(
    server: RedisServer, arena: SharedMemory, command: bytes, nth: int
) -> None:
    server.client.flushall()
    relay = Cutting(server)
    client = join(server, arena, f"redis://127.0.0.1:{relay.port}/0")
    without_retries(client)
    bench = Bench(client, None, arena, CAPACITY)
    things = [bench.thing(number) for number in range(2)]
    places = placed(bench, client, *things)
    with relay.before(command, nth), contextlib.suppress(Unreachable):
        client.backend.open_write(places, soon())
        client.backend.write(places, 0, 3, soon())
        client.backend.write(places, 3, 5, soon())
        client.backend.commit(places, soon())
    published = {pool_name(thing.key).encode() for thing in things}
    for name in server.client.keys("*"):
        assert (server.client.pttl(name) == -1) == (name in published)
    client.backend.close()
    relay.close()


def test_what_left_redis_before_it_was_whole_is_lost_and_what_is_made_anew_expires(
    bench: Bench, server: RedisServer
) -> None:
    """Evicted by the very writes that are for it, say."""
    [place] = placed(bench, bench.first, bench.thing("evicted"))
    backend = bench.first.backend
    assert outcomes(backend.open_write([place], soon())) == [OK]
    server.client.flushall()
    assert outcomes(backend.write([place], 0, 5, soon())) == [FAILED]
    assert all(server.client.pttl(name) > 0 for name in server.client.keys("*"))
    backend.revoke([place])
    assert server.client.dbsize() == 0


def test_an_open_that_is_cut_in_its_second_round_keeps_no_key(arena: SharedMemory) -> None:
    server = RedisServer(maxmemory="8mb", maxmemory_policy="noeviction")
    relay = Cutting(server)
    try:
        client = join(server, arena, f"redis://127.0.0.1:{relay.port}/0")
        without_retries(client)
        bench = Bench(client, None, arena, 8 << 20, evicts=False)
        places = placed(bench, client, *(bench.thing(number, blocks=150, layers=4) for number in range(6)))
        with relay.before(b"EXEC", len(places) + 1), pytest.raises(Unreachable):
            client.backend.open_write(places, soon())
        client.backend.revoke(places)
        assert EXISTS not in outcomes(client.backend.open_write(places, soon(0.1)))
        client.backend.close()
    finally:
        relay.close()
        server.close()


def test_a_writer_whose_time_is_over_holds_no_key(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    [place] = placed(bench, bench.first, bench.thing("silent"))
    backend = bench.first.backend
    assert outcomes(backend.open_write([place], soon())) == [OK]
    assert outcomes(backend.open_write([place], soon())) == [EXISTS]
    backend._writing[place.key].expires_at = 0.0
    assert outcomes(backend.open_write([place], soon())) == [OK]


@pytest.mark.parametrize("refusal", ["READONLY", "NOPERM"])
def test_what_redis_refuses_is_no_want_of_room(arena: SharedMemory, refusal: str) -> None:
    server = RedisServer()
    try:
        client = join(server, arena)
        bench = Bench(client, None, arena, CAPACITY)
        [place] = placed(bench, client, bench.thing("refused"))
        if refusal == "READONLY":
            server.client.replicaof("127.0.0.1", "1")
        else:
            server.client.acl_setuser("default", enabled=True, nopass=True, commands=["+@all", "-setrange"])
        [(outcome, reason)] = client.backend.open_write([place], soon())
        assert outcome == FAILED
        assert {"READONLY": "read only", "NOPERM": "no permission"}[refusal] in reason.lower()
        client.backend.close()
    finally:
        server.close()


def test_a_cluster_is_refused(arena: SharedMemory) -> None:
    server = RedisServer(cluster_enabled="yes")
    try:
        backend = Redis({"url": server.url, "unfinished_s": 300, "timeout_ms": 1000})
        with pytest.raises(Unusable, match="one server of a Redis Cluster"):
            backend.attach(arena, lambda keys: None)
        assert PLUGIN.options is not None
        found = list(examine(PLUGIN.options(url=server.url), Settings().pool, running=False))
        assert [one.state.value for one in found if "Cluster" in one.found] == ["problem"]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("policy", "level"), [("volatile-lru", "problem"), ("volatile-ttl", "problem"), ("allkeys-lfu", "ok")]
)
def test_a_policy_under_which_nothing_is_evicted_is_a_problem(policy: str, level: str) -> None:
    server = RedisServer(maxmemory="64mb", maxmemory_policy=policy)
    try:
        assert PLUGIN.options is not None
        found = list(examine(PLUGIN.options(url=server.url), Settings().pool, running=False))
        assert [one.state.value for one in found if one.check == "redis memory"] == [level]
    finally:
        server.close()


def test_what_is_published_does_not_expire(bench: Bench, server: RedisServer) -> None:
    thing = bench.thing("kept")
    save(bench, bench.first, [thing])
    assert server.client.keys("*") == [pool_name(thing.key).encode()]
    assert server.client.pttl(pool_name(thing.key)) == -1


def test_a_full_store_that_evicts_nothing(arena: SharedMemory) -> None:
    server = RedisServer(maxmemory="8mb", maxmemory_policy="noeviction")
    try:
        client = join(server, arena)
        bench = Bench(client, None, arena, 8 << 20, evicts=False)
        things = [bench.thing(number, blocks=100, layers=4) for number in range(4)]  # 1.6 MB each
        places = placed(bench, client, *things, bench.thing("large", blocks=300, layers=7))
        found = outcomes(client.backend.open_write(places, soon(0.3)))
        assert FULL in found[:4] or found[:4] == [OK] * 4
        assert found[4] == TOO_LARGE
        client.backend.revoke(places)
        assert server.client.dbsize() == 0
        client.backend.close()
    finally:
        server.close()


def test_an_object_that_is_evicted_while_it_is_read(bench: Bench, server: RedisServer) -> None:
    thing = bench.thing("evicted")
    save(bench, bench.first, [thing])
    [place] = placed(bench, bench.first, thing)
    backend = bench.first.backend
    assert outcomes(backend.open_fetch([place], soon())) == [OK]
    assert outcomes(backend.fetch([place], 0, 2, soon())) == [OK]
    server.client.delete(pool_name(thing.key))
    assert outcomes(backend.fetch([place], 2, 5, soon())) == [EXPIRED]
    assert outcomes(backend.open_fetch([place], soon())) == [MISSING]


def test_other_bytes_under_its_name_are_broken(bench: Bench, server: RedisServer) -> None:
    thing = bench.thing("changed")
    save(bench, bench.first, [thing])
    [place] = placed(bench, bench.first, thing)
    backend = bench.first.backend
    backend.open_fetch([place], soon())
    assert outcomes(backend.fetch([place], 0, 2, soon())) == [OK]
    server.client.setrange(pool_name(thing.key), place.start(3), b"other")
    assert outcomes(backend.fetch([place], 2, 5, soon())) == [BROKEN]
    backend.close_fetch([place])


def test_two_writers_of_one_object(server: RedisServer, arena: SharedMemory) -> None:
    server.client.flushall()
    clients = [join(server, arena) for _ in range(2)]
    bench = Bench(*clients, arena, CAPACITY)
    thing = bench.thing("twice")
    ended = []
    for client in clients:
        [place] = placed(bench, client, thing)
        assert outcomes(client.backend.open_write([place], soon())) == [OK]
        assert outcomes(client.backend.write([place], 0, 5, soon())) == [OK]
    for client in clients:
        ended += outcomes(client.backend.commit([place], soon()))
    assert ended == [OK, EXISTS]
    assert server.client.dbsize() == 1
    for client in clients:
        client.backend.close()


def test_a_server_that_is_killed_and_back(arena: SharedMemory) -> None:
    server = RedisServer()
    try:
        client = join(server, arena)
        bench = Bench(client, None, arena, CAPACITY)
        thing = bench.thing("lost")
        save(bench, client, [thing])
        server.kill()
        with pytest.raises(Unreachable):
            client.backend.check()
        with pytest.raises(Unreachable):
            client.backend.lookup([thing.key], soon())
        server.start()
        client.backend.check()
        assert client.backend.lookup([thing.key], soon()) == [False]
        save(bench, client, [thing])
        client.backend.close()
    finally:
        server.close()


def test_a_password_is_needed(arena: SharedMemory) -> None:
    server = RedisServer()
    try:
        server.client.config_set("requirepass", "secret")
        backend = Redis({"url": server.url, "unfinished_s": 300, "timeout_ms": 1000})
        with pytest.raises(Unusable, match=r"pool\.redis\.url"):
            backend.attach(arena, lambda keys: None)
    finally:
        server.close()


def test_purging_removes_only_what_is_layerflows(bench: Bench, server: RedisServer) -> None:
    server.client.set("somebody-elses", "x")
    save(bench, bench.first, [bench.thing(number) for number in range(3)])
    assert bench.first.backend.clear([], time.monotonic() + PATIENCE_S) == 3
    assert eventually(lambda: server.client.keys("*") == [b"somebody-elses"], PATIENCE_S)


def test_a_job_whose_room_expired_does_not_touch_that_of_the_next_one(bench: Bench) -> None:
    """The checksum would vouch for the mixture of their layers."""
    backend, layers = bench.first.backend, 5
    places = placed(bench, bench.first, bench.thing("one", variant=1), bench.thing("one"))
    first, second = places[:1], places[1:]
    assert outcomes(backend.open_write(first, soon())) == [OK]
    backend._writing[first[0].key].expires_at = 0.0
    assert outcomes(backend.open_write(second, soon())) == [OK]
    assert outcomes(backend.write(first, 0, 1, soon())) == [FAILED]
    assert outcomes(backend.write(second, 0, 1, soon())) == [OK]
    assert outcomes(backend.write(first, 1, 2, soon())) == [FAILED]
    backend.revoke(first)
    assert outcomes(backend.write(second, 1, layers, soon())) == [OK]
    assert outcomes(backend.commit(second, soon())) == [OK]
    assert_whole(bench, bench.first, [bench.thing("one")])
