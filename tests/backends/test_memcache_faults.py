"""What the memcache backend does when something ends, stops or is in the way. CANN emulated: no NPU takes part."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from e2e.known import eventually
from memcache_client import RemoteMemcache
from memcache_fixtures import MEMORY, arena, join, meta, protocol

from layerflow.hosts.backend import Unreachable, Unusable, pool_name
from layerflow_testing import (
    ARENA,
    BLOCK,
    BROKEN,
    EXISTS,
    EXPIRED,
    FAILED,
    MISSING,
    OK,
    Bench,
    Client,
    load,
    outcomes,
    put,
    save,
    seen,
    soon,
)

__all__ = ["arena", "join", "meta", "protocol"]  # fixtures

pytestmark = pytest.mark.timeout(300)  # joining after a kill may take a minute

HALF = ARENA // 2
LAYERS = 4


@pytest.fixture(scope="module")
def owner(join) -> Client:
    return join(dram_size=MEMORY)


@pytest.fixture(scope="module")
def reader(owner, join) -> Client:
    return join()


@pytest.fixture
def bench(owner, reader, arena) -> Bench:
    return Bench(owner, reader, arena, MEMORY)


def settle(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    assert eventually(condition, 30, 0.05), "it does not settle"


def right(bench: Bench, client: Client, thing) -> bool:
    """Whether it is read whole, and every byte is its own."""
    [(outcome, data)] = load(bench, client, [thing], HALF, (1, 2))
    assert outcome == OK, client.backend.said()
    return np.array_equal(data, thing.bytes)


# Joining -----------------------------------------------------------------------------------------


def test_without_a_meta_service_nothing_is_joined(meta, arena):
    client = RemoteMemcache(meta.options(metrics_url="http://127.0.0.1:9"), arena)
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9.*start a MetaService"):
        client.attach(arena, lambda keys: None)
    assert client.end() == 0


def test_without_cann_it_is_unusable(meta, arena, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    client = RemoteMemcache(meta.options(cann_emulator=""), arena)
    with pytest.raises(Unusable, match="ASCEND_HOME_PATH"):
        client.attach(arena, lambda keys: None)
    assert client.end() == 0


def test_signals_are_what_they_were(join):
    """The library takes SIGTERM over with a handler that hangs."""
    client = join()
    assert client.backend.terminate() == -signal.SIGTERM


def test_whoever_joins_keeps_its_priority(join):
    """The library raises it, where it may, and what is started later would have it too."""
    assert join().backend.nice == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_configuration_file(bench, meta, join, tmp_path, protocol):
    options = meta.options()
    path = tmp_path / "mmc-local.conf"
    path.write_text(
        f"ock.mmc.meta_service_url = {options['meta_service_url']}\n"
        "ock.mmc.log_level = error\n"
        f"ock.mmc.local_service.config_store_url = {options['config_store_url']}\n"
        f"ock.mmc.local_service.hcom_url = {options['hcom_url']}\n"
        f"ock.mmc.local_service.protocol = {protocol}\n"
        f"ock.mmc.local_service.world_size = {options['world_size']}\n"
        "ock.mmc.local_service.dram.size = 0\n"
        "ock.mmc.local_service.max.dram.size = 1GB\n"
    )
    client, one = join(config_file=str(path)), bench.thing("configured")
    client.backend.check()
    assert save(bench, client, [one]) == [OK]
    assert right(bench, bench.first, one)


def test_calls_to_the_meta_service_do_not_grow_with_layers(bench, meta):
    took = []
    for layers in (8, 64):
        things = [bench.thing(("counted", layers, i), blocks=1, layers=layers) for i in range(3)]
        offsets = [i * ARENA // 8 for i in range(3)]
        put(bench, things, offsets)
        before, mine = meta.requests(), bench.first.backend.statistics()["metadata_calls"]
        places = [thing.at(bench.first, offset) for thing, offset in zip(things, offsets, strict=True)]
        backend = bench.first.backend
        assert outcomes(backend.open_write(places, soon())) == [OK] * 3
        for layer in range(layers):
            assert outcomes(backend.write(places, layer, layer + 1, soon())) == [OK] * 3
        assert outcomes(backend.commit(places, soon())) == [OK] * 3
        assert outcomes(backend.open_fetch(places, soon())) == [OK] * 3
        for layer in range(layers):
            assert outcomes(backend.fetch(places, layer, layer + 1, soon())) == [OK] * 3
        backend.close_fetch(places)
        counted = {name: count - before.get(name, 0) for name, count in meta.requests().items()}
        took.append((counted, backend.statistics()["metadata_calls"] - mine))
    assert took[0] == took[1]
    assert took[0][0]["batch_alloc"] == took[0][0]["batch_update_state"] == 1  # leases it does not count
    assert took[0][1] == 7  # look, allocate, look, publish; lease, look, give back


# Writers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [0, 1, LAYERS, "header"])
def test_a_killed_writer_leaves_nothing_visible(bench, join, written):
    writer, one = join(), bench.thing(("killed", written), layers=LAYERS)
    put(bench, [one], [0])
    place = one.at(writer, 0)
    assert outcomes(writer.backend.open_write([place], soon())) == [OK]
    layers = LAYERS if written == "header" else written
    if layers:
        assert outcomes(writer.backend.write([place], 0, layers, soon())) == [OK]
    if written == "header":
        [info] = writer.backend.call("info", one.key)
        assert writer.backend.library("batch_copy", [info[1]], [place.address], [64], 3) == 0
    writer.backend.kill()
    for client in bench.clients:
        assert client.backend.lookup([one.key], soon()) == [False]
        assert load(bench, client, [one], HALF)[0][0] == MISSING


def test_what_a_dead_writer_left_is_removed_by_the_next(bench, join):
    dead, one = join(), bench.thing("left behind", layers=LAYERS)
    dead.backend.patch("memcache.backend", "ROOM_LEASE_S", 2.0)
    put(bench, [one], [0])
    assert outcomes(dead.backend.open_write([one.at(dead, 0)], soon())) == [OK]
    dead.backend.kill()
    heir = join(patches=[("memcache.backend", "ROOM_LEASE_S", 2.0), ("memcache.backend", "ABANDONED_S", 2.5)])
    assert save(bench, heir, [one]) == [EXISTS]
    settle(lambda: save(bench, heir, [one]) == [OK])
    assert heir.backend.statistics()["abandoned_removed"] == 1
    assert right(bench, bench.second, one)


def test_two_processes_race_for_keys(bench):
    things = [[bench.thing(("race", i), blocks=1, layers=LAYERS, variant=v) for i in range(48)] for v in (0, 1)]
    results: list[list] = [[], []]
    barrier = threading.Barrier(2)

    def run(which: int) -> None:
        for first in range(0, 48, 4):
            barrier.wait()
            results[which] += save(bench, bench.clients[which], things[which][first : first + 4], which * ARENA // 4)

    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in bench.clients:
        client.backend.check()
    for i, pair in enumerate(zip(*results, strict=True)):
        assert sorted(pair) == [OK, EXISTS], pair
        winner = things[pair.index(OK)][i]
        assert all(right(bench, client, winner) for client in bench.clients)


def test_a_writer_that_was_stopped_past_its_lease_publishes_nothing(bench, join):
    slow, one = join(), bench.thing("stopped", layers=LAYERS)
    slow.backend.patch("memcache.backend", "ROOM_LEASE_S", 2.0)
    put(bench, [one], [0])
    place = one.at(slow, 0)
    assert outcomes(slow.backend.open_write([place], soon())) == [OK]
    slow.backend.pause()
    bench.first.backend.library("remove_batch", [pool_name(one.key)])  # as an eviction after its lease
    time.sleep(2.5)  # the lease has to run out
    other = bench.thing("stopped", layers=LAYERS, variant=1)
    put(bench, [other], [ARENA // 4])
    theirs = other.at(bench.second, ARENA // 4)
    assert outcomes(bench.second.backend.open_write([theirs], soon())) == [OK]
    assert outcomes(bench.second.backend.write([theirs], 0, 2, soon())) == [OK]
    slow.backend.resume()
    assert outcomes(slow.backend.write([place], 0, LAYERS, soon())) == [FAILED]
    assert outcomes(slow.backend.commit([place], soon())) == [FAILED]
    assert seen(bench, one) == [[False], [False]]
    assert outcomes(bench.second.backend.write([theirs], 2, LAYERS, soon())) == [OK]
    assert outcomes(bench.second.backend.commit([theirs], soon())) == [OK]
    assert right(bench, bench.first, other)


def test_what_another_publishes_half_written_is_no_object(bench):
    """Even where the same object lay at the same place before, header and all."""
    one = bench.thing("half", layers=LAYERS)
    name = pool_name(one.key)
    assert save(bench, bench.first, [one]) == [OK]
    bench.first.backend.hide([one.key])
    place = one.at(bench.first, 0)
    assert outcomes(bench.first.backend.open_write([place], soon())) == [OK]
    assert outcomes(bench.first.backend.write([place], 0, 2, soon())) == [OK]
    assert bench.second.backend.library("batch_alloc", [name], [one.nbytes], 1, 1000) != [0]
    assert bench.second.backend.library("batch_write_finish", [name], [0]) == [0]
    assert bench.second.backend.lookup([one.key], soon()) == [True]
    assert load(bench, bench.second, [one], HALF)[0][0] == BROKEN
    bench.first.backend.revoke([place])
    assert seen(bench, one) == [[False], [False]]


# Readers -----------------------------------------------------------------------------------------


def fill(bench: Bench, name: object) -> None:
    """Twice what the pool holds."""
    blocks = MEMORY // 24 // (4 * BLOCK)
    for i in range(48):
        assert save(bench, bench.first, [bench.thing((name, i), blocks, 4)]) == [OK]


def test_a_lease_keeps_an_object_while_others_are_evicted(bench):
    kept, *others = (bench.thing(("old", i), blocks=20, layers=LAYERS) for i in range(9))
    assert save(bench, bench.first, [kept, *others]) == [OK] * 9
    place = kept.at(bench.second, HALF, known=False)
    assert outcomes(bench.second.backend.open_fetch([place], soon())) == [OK]
    fill(bench, "pressing")
    left = bench.second.backend.lookup([other.key for other in others], soon())
    gone = [other for other, present in zip(others, left, strict=True) if not present]
    assert gone
    assert [outcome for outcome, _ in load(bench, bench.first, gone, ARENA // 4)] == [MISSING] * len(gone)
    for layer in range(LAYERS):
        assert outcomes(bench.second.backend.fetch([place], layer, layer + 1, soon())) == [OK]
    assert np.array_equal(bench.arena.array[HALF : HALF + kept.nbytes], kept.bytes)
    bench.second.backend.close_fetch([place])


def test_a_read_that_outlasts_its_lease_has_expired(bench, join):
    lease_s = 5.0  # a busy machine reads the first layer within it
    slow, one = join(patches=[("memcache.backend", "LEASE_S", lease_s)]), bench.thing("outlasted", layers=LAYERS)
    assert save(bench, bench.first, [one]) == [OK]
    place = one.at(slow, HALF, known=False)
    assert outcomes(slow.backend.open_fetch([place], soon())) == [OK]
    assert outcomes(slow.backend.fetch([place], 0, 1, soon())) == [OK]
    slow.backend.pause()
    time.sleep(lease_s + 0.1)  # it has to run out
    slow.backend.resume()
    assert outcomes(slow.backend.fetch([place], 1, 2, soon())) == [EXPIRED]
    slow.backend.close_fetch([place])
    assert slow.backend.statistics()["expired_leases"] == 1


def test_an_address_is_good_only_for_who_leased_or_allocated_it(bench):
    """What a client in an engine's process would have to do itself before it copies."""
    one, new = bench.thing("addressed", layers=LAYERS), bench.thing("allocated", layers=LAYERS)
    assert save(bench, bench.first, [one]) == [OK]
    [(_, gva)] = bench.first.backend.call("info", one.key)
    library, at = bench.second.backend.library, bench.second.address + HALF
    assert library("batch_copy", [gva], [at], [one.nbytes], 2) == -3102
    assert library("batch_add_lease", [pool_name(one.key)], 1000) == [0]
    assert library("batch_copy", [gva], [at], [one.nbytes], 2) == 0
    assert np.array_equal(bench.arena.array[HALF : HALF + one.nbytes], one.bytes)
    assert library("batch_remove_lease", [pool_name(one.key)]) == 0
    place = new.at(bench.first, 0)
    put(bench, [new], [0])
    assert outcomes(bench.first.backend.open_write([place], soon())) == [OK]
    [(_, gva)] = bench.first.backend.call("info", new.key)
    payload = [gva + 64], [bench.second.address + 64], [new.nbytes - 64]
    assert library("batch_copy", *payload, 3) == -3102
    assert library("batch_alloc", [pool_name(new.key)], [1], 1, 5000) == [gva]  # again, by any size: the same place
    assert library("batch_copy", *payload, 3) == 0
    assert outcomes(bench.first.backend.write([place], 0, LAYERS, soon())) == [OK]
    assert outcomes(bench.first.backend.commit([place], soon())) == [OK]
    assert library("batch_write_finish", [pool_name(new.key)], [0]) == [0]
    assert all(right(bench, client, new) for client in bench.clients)


# The MetaService ---------------------------------------------------------------------------------


def test_the_meta_service_dies_and_comes_back(bench, meta):
    first, second = bench.first.backend, bench.second.backend
    one, new = bench.thing("read across", layers=LAYERS), bench.thing("written across", layers=LAYERS)
    assert save(bench, bench.first, [one]) == [OK]
    read, write = one.at(bench.second, HALF, known=False), new.at(bench.first, 0)
    put(bench, [new], [0])
    # Another client may see what was published a little later.
    settle(lambda: outcomes(second.open_fetch([read], soon())) == [OK])
    assert outcomes(second.fetch([read], 0, 1, soon())) == [OK]
    assert outcomes(first.open_write([write], soon())) == [OK]
    assert outcomes(first.write([write], 0, 1, soon())) == [OK]
    meta.kill()
    for client in bench.clients:
        with pytest.raises(Unreachable, match="MetaService"):
            client.backend.check()
        with pytest.raises(Unreachable):
            client.backend.lookup([one.key], soon())
    assert outcomes(second.fetch([read], 1, 2, soon())) == [EXPIRED]
    assert outcomes(first.write([write], 1, 2, soon())) == [FAILED]
    meta.start()
    assert outcomes(second.fetch([read], 1, 2, soon())) == [EXPIRED]  # a new one knows of no lease
    assert outcomes(first.write([write], 1, 2, soon())) == [FAILED]
    second.close_fetch([read])
    first.revoke([write])

    def alive() -> bool:
        try:
            for client in bench.clients:
                client.backend.check()
            seen(bench, one)
        except Unreachable:
            return False
        return True

    settle(alive)
    settle(lambda: save(bench, bench.first, [new]) == [OK])
    assert all(right(bench, client, new) for client in bench.clients)
    # Who gives the memory tells the new one of what it had been told of: of this one perhaps.
    [[here], [there]] = seen(bench, one)
    assert here == there
    assert not here or all(right(bench, client, one) for client in bench.clients)
    assert first.statistics()["meta_services_lost"] >= 1


def test_a_stopped_meta_service_is_noticed(bench, meta):
    one = bench.thing("waited for")
    assert save(bench, bench.first, [one]) == [OK]
    meta.pause()
    try:
        with pytest.raises(Unreachable, match="does not answer"):
            bench.first.backend.check()
    finally:
        meta.resume()
    bench.first.backend.check()
    assert right(bench, bench.second, one)
