"""The Redis backend against a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("redis", reason="the package redis is not installed")

from e2e.known import eventually
from redis_server import RedisServer, program

from layerflow.hosts.backend import ObjectLocation, Unreachable, Unusable, pool_name
from layerflow.hosts.redis import PLUGIN, Redis
from layerflow.hosts.registry import make
from layerflow.system.memfd import SharedMemory
from layerflow_testing import (
    ARENA,
    BROKEN,
    EXISTS,
    EXPIRED,
    FULL,
    MISSING,
    OK,
    TOO_LARGE,
    BackendContract,
    Bench,
    Client,
    Thing,
    lay_out,
    outcomes,
    put,
    save,
    soon,
)

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


def join(server: RedisServer, arena: SharedMemory) -> Client:
    backend = Redis({"url": server.url, "unfinished_s": 300, "timeout_ms": 5000})
    backend.attach(arena, lambda keys: None)
    return Client(backend, arena.address)


def placed(bench: Bench, client: Client, *things: Thing) -> list[ObjectLocation]:
    """These in the arena, as a job of the client has them."""
    offsets = lay_out(things)
    put(bench, things, offsets)
    return [thing.at(client, offset) for thing, offset in zip(things, offsets, strict=True)]


class TestRedis(BackendContract):
    @pytest.fixture
    def bench(self, server: RedisServer, arena: SharedMemory) -> Iterator[Bench]:
        server.client.flushall()
        clients = [join(server, arena) for _ in range(2)]
        yield Bench(clients[0], clients[1], arena, CAPACITY)
        for client in clients:
            client.backend.close()


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
