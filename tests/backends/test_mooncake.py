"""The Mooncake backend against the real package and a real master."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from e2e.known import eventually
from mooncake_master import MooncakeMaster
from mooncake_owner import Owner

from layerflow.backends import free_ports
from layerflow.hosts.backend import Unreachable, Unusable
from layerflow.hosts.mooncake.backend import Mooncake
from layerflow.hosts.mooncake.client import load as load_library
from layerflow.system.memfd import SharedMemory
from layerflow_testing import (
    ARENA,
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
    assert_whole,
    lay_out,
    load,
    outcomes,
    put,
    save,
    soon,
)

SEGMENT = 64 << 20
TIMEOUT_MS = 5000  # as by default: a transfer that makes no progress for 3 s is given up
PATIENCE_S = 30.0
HALF = ARENA // 2


def settings(master: MooncakeMaster, **options: object) -> dict[str, object]:
    return {"master": master.address, "metrics": master.url, "segment_size": 0, "timeout_ms": TIMEOUT_MS} | options


def until(happens: Callable[[], bool], what: str) -> None:
    """Try until it does."""
    assert eventually(happens, PATIENCE_S, 0.05), f"not within {PATIENCE_S} s: {what}"


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster(default_kv_lease_ttl=3000) as master:
        yield master


@pytest.fixture(scope="module")
def arena() -> Iterator[SharedMemory]:
    with SharedMemory.create(ARENA) as arena:
        yield arena


class Joined:
    """Clients over one arena; all are closed at the end."""

    def __init__(self, arena: SharedMemory) -> None:
        self._arena = arena
        self._backends: list[Mooncake] = []

    def __call__(self, master: MooncakeMaster, **options: object) -> Client:
        backend = Mooncake(settings(master, **options))
        self._backends.append(backend)
        backend.attach(self._arena, lambda keys: None)
        return Client(backend, self._arena.address)

    def close(self) -> None:
        for backend in reversed(self._backends):
            backend.close()
        self._backends.clear()


@pytest.fixture
def join(arena) -> Iterator[Joined]:
    joined = Joined(arena)
    yield joined
    joined.close()


@pytest.fixture
def alone(arena, join) -> Iterator[Callable[..., tuple[MooncakeMaster, Bench]]]:
    """A master of a test's own with these flags, an owner of a segment and a pure client."""
    masters: list[MooncakeMaster] = []

    def start(segment: int = SEGMENT, **flags: object) -> tuple[MooncakeMaster, Bench]:
        masters.append(MooncakeMaster(**flags))
        first, second = join(masters[-1], segment_size=segment), join(masters[-1])
        return masters[-1], Bench(first, second, arena, segment)

    yield start
    join.close()  # a client waits long for a master that is gone
    for master in masters:
        master.close()


@pytest.fixture(scope="module", params=["own segment", "another process"])
def clients(request, master, arena) -> Iterator[list[Client]]:
    """Two over the memory of the first (which copies), and two over that of another process (reached by TCP)."""
    joined = Joined(arena)
    if request.param == "own segment":
        yield [joined(master, segment_size=SEGMENT), joined(master)]
    else:
        with Owner(**settings(master, segment_size=SEGMENT)):
            yield [joined(master), joined(master)]
    joined.close()


class TestContract(BackendContract):
    @pytest.fixture
    def bench(self, clients, arena) -> Bench:
        return Bench(*clients, arena, SEGMENT)


class TestSessions:
    def test_calls_to_the_master_do_not_grow_with_layers(self, alone):
        master, bench = alone()
        asked = []
        for layers in (8, 64):
            things = [bench.thing((layers, i), blocks=1, layers=layers) for i in range(6)]
            before = master.requests()
            assert save(bench, bench.first, things) == [OK] * 6
            assert bench.second.backend.lookup([thing.key for thing in things], soon()) == [True] * 6
            assert [outcome for outcome, _ in load(bench, bench.second, things, HALF, [1] * layers)] == [OK] * 6
            after = master.requests()
            asked.append({name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)})
        assert asked[0] == asked[1]
        assert sum(asked[0].values()) == 5  # put start, put end, exist, and two for the get session

    def test_a_lease_that_runs_out_costs_its_object_only(self, alone):
        _, bench = alone(default_kv_lease_ttl=5000)  # a busy machine reads the first layer within it
        old, fresh = bench.thing("old"), bench.thing("fresh")
        assert save(bench, bench.first, [old, fresh]) == [OK, OK]
        at, other = lay_out([old, fresh], HALF)
        place, beside = old.at(bench.second, at), fresh.at(bench.second, other)
        reader = bench.second.backend
        assert outcomes(reader.open_fetch([place], soon())) == [OK]
        assert outcomes(reader.fetch([place], 0, 1, soon())) == [OK]
        until(lambda: outcomes(reader.fetch([place], 1, 2, soon())) == [EXPIRED], "the lease runs out")
        assert outcomes(reader.open_fetch([beside], soon())) == [OK]
        assert outcomes(reader.fetch([place, beside], 0, fresh.layers, soon())) == [EXPIRED, OK]
        reader.close_fetch([place, beside])
        assert np.array_equal(bench.arena.array[other : other + fresh.nbytes], fresh.bytes)
        assert load(bench, bench.second, [old], HALF)[0][0] == OK  # a new lease
        assert reader.statistics()["expired_leases"] >= 2

    def test_two_jobs_read_one_object(self, alone):
        _, bench = alone()
        one = bench.thing("one")
        assert save(bench, bench.first, [one]) == [OK]
        places = [one.at(bench.second, at) for at in lay_out([one, one], HALF)]
        reader = bench.second.backend
        for place in places:
            assert outcomes(reader.open_fetch([place], soon())) == [OK]
        reader.close_fetch(places[:1])
        assert outcomes(reader.fetch(places[1:], 0, one.layers, soon())) == [OK]
        reader.close_fetch(places[1:])
        assert outcomes(reader.fetch(places[1:], 0, 1, soon())) == [FAILED]

    def test_what_one_node_finds_broken_is_not_taken_from_another_that_reads_it(self, alone):
        """Removed by force its memory would be given to others, under the lease."""
        _, bench = alone(16 << 20, default_kv_lease_ttl=5000)
        one = bench.thing("one", blocks=32, layers=4)
        assert save(bench, bench.first, [one]) == [OK]
        place, reader = one.at(bench.second, HALF), bench.second.backend
        assert outcomes(reader.open_fetch([place], soon())) == [OK]
        assert outcomes(reader.fetch([place], 0, 1, soon())) == [OK]
        bench.first.backend.hide([one.key])
        for i in range(40):  # more than there is room for
            assert save(bench, bench.first, [bench.thing(i, blocks=32, layers=4)], wait=0.05)[0] in (OK, FULL)
        assert outcomes(reader.fetch([place], 1, 4, soon())) == [OK]
        assert np.array_equal(bench.arena.array[HALF : HALF + one.nbytes], one.bytes)
        assert bench.first.backend.lookup([one.key], soon()) == [False]
        reader.close_fetch([place])

        def removed() -> bool:
            bench.first.backend.check()
            return one.key not in bench.first.backend._condemned

        until(removed, "the lease has run out")
        assert reader.lookup([one.key], soon()) == [False]

    @pytest.mark.parametrize("published", [True, False])
    def test_a_session_open_for_too_long_is_taken_over(self, alone, published):
        # What is to be refused before then is asked within it, on a busy machine too.
        _, bench = alone(put_start_discard_timeout_sec=5, default_kv_lease_ttl=1000)
        mine, theirs = bench.thing("one"), bench.thing("one", variant=1)
        offsets = lay_out([mine, theirs])
        put(bench, [mine, theirs], offsets)
        slow, quick = mine.at(bench.first, offsets[0]), theirs.at(bench.second, offsets[1])
        one, two = bench.first.backend, bench.second.backend
        assert outcomes(one.open_write([slow], soon())) == [OK]
        assert outcomes(one.write([slow], 0, 1, soon())) == [OK]
        assert outcomes(two.open_write([quick], soon())) == [EXISTS]
        until(lambda: outcomes(two.open_write([quick], soon())) == [OK], "the other one may have the key")
        assert outcomes(one.write([slow], 1, mine.layers, soon())) == [OK]  # into room that is nobody else's yet
        assert outcomes(two.write([quick], 0, theirs.layers, soon())) == [OK]
        if published:
            assert outcomes(two.commit([quick], soon())) == [OK]
        assert outcomes(one.commit([slow], soon())) == [FAILED]
        if not published:
            assert outcomes(two.commit([quick], soon())) == [OK]
        assert one.statistics()["sessions_taken_over"] == 1
        for client in bench.clients:
            assert_whole(bench, client, [theirs])
        assert outcomes(one.open_write([slow], soon())) == [EXISTS]
        two.hide([mine.key])

        def written_anew() -> bool:
            two.check()  # which removes it once its lease has run out
            return save(bench, bench.first, [mine]) == [OK]

        until(written_anew, "what the library kept of the lost session is not in the way")

    def test_part_of_an_object_is_never_published(self, alone):
        """The library would."""
        _, bench = alone()
        one, other = bench.thing("one"), bench.thing("other")
        places = [t.at(bench.first, at) for t, at in zip([one, other], lay_out([one, other]), strict=True)]
        backend = bench.first.backend
        assert outcomes(backend.open_write(places, soon())) == [OK, OK]
        assert outcomes(backend.write(places, 0, 2, soon())) == [OK, OK]
        assert outcomes(backend.write(places[1:], 3, 5, soon())) == [FAILED]
        assert outcomes(backend.commit(places, soon())) == [FAILED, FAILED]
        assert bench.second.backend.lookup([one.key, other.key], soon()) == [False, False]
        assert save(bench, bench.second, [one, other]) == [OK, OK]


class TestOffloaded:
    def test_what_only_a_clients_disk_has_is_no_hit_twice(self, join, arena, tmp_path, monkeypatch):
        for name, value in {
            "BUCKET_KEYS_LIMIT": "4",
            "BUCKET_SIZE_LIMIT_BYTES": str(4 << 20),
            "HEARTBEAT_INTERVAL_SECONDS": "1",
            "FILE_STORAGE_PATH": str(tmp_path),
        }.items():
            monkeypatch.setenv(f"MOONCAKE_OFFLOAD_{name}", value)
        with MooncakeMaster(default_kv_lease_ttl=500, enable_offload="true") as master:
            bench = Bench(join(master), None, arena, SEGMENT)
            owner = load_library()[0].MooncakeDistributedStore()
            name = f"127.0.0.1:{free_ports(1)[0]}"
            assert owner.setup(
                name, "P2PHANDSHAKE", 32 << 20, 0, "tcp", "", master.address, None, True, str(tmp_path)
            ) == 0  # fmt: skip
            things = [bench.thing(i, blocks=64, layers=4) for i in range(44)]  # of 1 MiB
            assert [save(bench, bench.first, [thing])[0] for thing in things[:24]] == [OK] * 24
            until(lambda: sum(1 for _ in tmp_path.rglob("*.bucket")) >= 6, "what is new is on disk")
            assert [save(bench, bench.first, [thing])[0] for thing in things[24:]] == [OK] * 20
            backend, keys = bench.first.backend, [thing.key for thing in things]
            first = [thing for thing, there in zip(things, backend.lookup(keys, soon()), strict=True) if there]
            loaded = [load(bench, bench.first, [thing], HALF)[0][0] for thing in first]
            assert set(loaded) == {OK, MISSING}, "nothing was evicted from memory"
            again = [thing for thing, there in zip(things, backend.lookup(keys, soon()), strict=True) if there]
            assert again == [thing for thing, outcome in zip(first, loaded, strict=True) if outcome == OK]
            owner.close()


class TestFull:
    def test_what_is_leased_stays_and_what_is_new_is_refused_in_time(self, alone):
        _, bench = alone(16 << 20)
        things = [bench.thing(i, blocks=32, layers=4) for i in range(40)]
        stored: list[bytes] = []
        for thing in things:
            outcome = save(bench, bench.first, [thing], wait=0.2)[0]
            assert outcome in (OK, FULL)
            if outcome == FULL:
                break
            stored.append(thing.key)
            assert bench.second.backend.lookup([thing.key], soon()) == [True]  # a lease
        assert outcome == FULL
        assert bench.first.backend.statistics()["full_retries"] > 0
        assert sum(bench.second.backend.lookup(stored, soon())) > len(stored) / 2

    def test_eviction_makes_room_within_the_time_given(self, alone):
        _, bench = alone(16 << 20, default_kv_lease_ttl=100)
        things = [bench.thing(i, blocks=32, layers=4) for i in range(80)]
        assert [save(bench, bench.first, [thing])[0] for thing in things] == [OK] * 80
        assert bench.first.backend.statistics()["full_retries"] > 0

    def test_larger_than_any_segment(self, alone, join):
        master, bench = alone(16 << 20)
        huge = bench.thing("huge", blocks=1024, layers=5)
        assert outcomes(bench.first.backend.open_write([huge.at(bench.first, 0)], soon(1))) == [TOO_LARGE]
        deaf = join(master, metrics="")
        assert outcomes(deaf.backend.open_write([huge.at(deaf, 0)], soon(0.2))) == [FULL]

    def test_nobody_gives_memory(self, master, join, arena):
        with MooncakeMaster() as empty:
            bench = Bench(join(empty), None, arena, SEGMENT)
            assert save(bench, bench.first, [bench.thing("one")], wait=0.2) == [FULL]


class TestMasterFails:
    def test_killed_and_back(self, alone):
        master, bench = alone()
        one, two, three = (bench.thing(name) for name in ("one", "two", "three"))
        assert save(bench, bench.first, [one]) == [OK]
        backend, reading, writing = bench.first.backend, one.at(bench.first, HALF), two.at(bench.first, 0)
        put(bench, [two], [0])
        assert outcomes(backend.open_fetch([reading], soon())) == [OK]
        assert outcomes(backend.open_write([writing], soon())) == [OK]
        assert outcomes(backend.write([writing], 0, 1, soon())) == [OK]
        master.kill()
        for call in (
            backend.check,
            lambda: backend.lookup([one.key], soon()),
            lambda: backend.open_fetch([reading], soon()),
            lambda: backend.open_write([three.at(bench.first, 0)], soon()),
        ):
            with pytest.raises(Unreachable, match="mooncake_master"):
                call()
        master.start()
        # The new master gives the memory of all objects to new ones, whatever this process still believes.
        assert outcomes(backend.fetch([reading], 0, 1, soon())) == [EXPIRED]
        assert outcomes(backend.write([writing], 1, two.layers, soon())) == [FAILED]
        backend.close_fetch([reading])
        backend.revoke([writing])
        until(lambda: save(bench, bench.first, [three], wait=1) == [OK], "saves succeed again")
        backend.check()
        assert backend.lookup([one.key, two.key, three.key], soon()) == [False, False, True]
        until(lambda: save(bench, bench.first, [two], wait=1) == [OK], "also where a session was lost")
        assert load(bench, bench.second, [two], HALF)[0][0] == OK
        assert backend.statistics()["masters_lost"] == 1

    def test_restarted_between_two_calls(self, alone):
        master, bench = alone()
        one = bench.thing("one")
        assert save(bench, bench.first, [one]) == [OK]
        place = one.at(bench.second, HALF)
        assert outcomes(bench.second.backend.open_fetch([place], soon())) == [OK]
        master.kill()
        master.start()
        bench.second.backend.check()
        assert outcomes(bench.second.backend.fetch([place], 0, 1, soon())) == [EXPIRED]

    def test_hung_and_back(self, alone):
        master, bench = alone()
        one = bench.thing("one")
        assert save(bench, bench.first, [one]) == [OK]
        backend = bench.first.backend
        master.pause()
        try:
            for call in (backend.check, lambda: backend.lookup([one.key], soon())):
                with pytest.raises(Unreachable):
                    call()
        finally:
            master.resume()
        backend.check()
        until(lambda: backend.lookup([one.key], soon()) == [True], "it answers again")
        assert save(bench, bench.first, [bench.thing("two")]) == [OK]

    def test_without_http_a_connection_must_do(self, alone, join):
        master, _ = alone()
        backend = join(master, metrics="").backend
        backend.check()
        master.kill()
        with pytest.raises(Unreachable):
            backend.check()
        master.start()
        backend.check()

    def test_attached_once_it_is_there(self, arena):
        with MooncakeMaster() as master:
            master.kill()
            backend = Mooncake(settings(master, segment_size=SEGMENT))
            with pytest.raises(Unreachable, match="start mooncake_master"):
                backend.attach(arena, lambda keys: None)
            master.start()
            details = backend.attach(arena, lambda keys: None).details
            assert details["segment_bytes"] == SEGMENT
            assert str(details["version"]).startswith("0.3.")
            backend.close()


class TestOwnerFails:
    def test_killed_and_another_one_comes(self, join, arena):
        with MooncakeMaster(client_ttl=2) as master:
            bench = Bench(join(master), None, arena, SEGMENT)
            one, two = bench.thing("one"), bench.thing("two")
            with Owner(**settings(master, segment_size=SEGMENT)) as owner:
                assert save(bench, bench.first, [one]) == [OK]
                place = one.at(bench.first, HALF)
                assert outcomes(bench.first.backend.open_fetch([place], soon())) == [OK]
                owner.kill()
                assert outcomes(bench.first.backend.fetch([place], 0, 1, soon())) == [FAILED]
                bench.first.backend.close_fetch([place])
                assert bench.first.backend.statistics()["failed_calls"] == 1
            with Owner(**settings(master, segment_size=SEGMENT)):
                until(lambda: save(bench, bench.first, [bench.thing(time.monotonic())]) == [OK], "saves succeed")
                until(lambda: not any(bench.first.backend.lookup([one.key], soon())), "the lost object is missed")
                assert load(bench, bench.first, [one], HALF)[0][0] == MISSING
                assert save(bench, bench.first, [two]) == [OK]

    def test_what_hangs_does_not_land_later(self, join, arena):
        with MooncakeMaster() as master, Owner(**settings(master, segment_size=SEGMENT)) as owner:
            bench = Bench(join(master), None, arena, SEGMENT)
            one, two = (bench.thing(name, blocks=400, layers=4) for name in ("one", "two"))
            backend, reading, writing = bench.first.backend, one.at(bench.first, HALF), two.at(bench.first, 0)
            assert save(bench, bench.first, [one]) == [OK]
            put(bench, [two], [0])
            assert outcomes(backend.open_fetch([reading], soon())) == [OK]
            assert outcomes(backend.open_write([writing], soon())) == [OK]
            arena.array[HALF:] = 0xEE
            owner.pause()
            assert outcomes(backend.fetch([reading], 0, 4, soon())) == [FAILED]
            arena.array[HALF:] = 0xEE
            assert outcomes(backend.write([writing], 0, 4, soon())) == [FAILED]
            backend.close_fetch([reading])
            backend.revoke([writing])
            owner.resume()
            until(lambda: load(bench, bench.first, [one], 0)[0][0] == OK, "the owner serves again")
            assert (arena.array[HALF:] == 0xEE).all()
            # What was sent to it may have been written by now; its room is not given to anybody yet.
            assert outcomes(backend.open_write([writing], soon())) == [FAILED]
            assert save(bench, bench.first, [bench.thing("three")]) == [OK]


class TestSetup:
    def test_calls_outside_setup_and_close_are_refused(self, master, arena):
        """The library's would end the process."""
        backend = Mooncake(settings(master))
        bench = Bench(Client(backend, arena.address), None, arena, SEGMENT)
        place = bench.thing("one").at(bench.first, 0)
        for _ in range(2):
            for call in (
                lambda: backend.lookup([place.key], soon()),
                lambda: backend.open_fetch([place], soon()),
                lambda: backend.open_write([place], soon()),
            ):
                with pytest.raises(Unreachable):
                    call()
            assert outcomes(backend.write([place], 0, 1, soon())) == [FAILED]
            assert outcomes(backend.fetch([place], 0, 1, soon())) == [FAILED]
            backend.revoke([place])
            backend.close_fetch([place])
            backend.attach(arena, lambda keys: None)
            assert outcomes(backend.open_write([place], soon(0))) == [FAILED]
            backend.close()

    def test_it_joins_again(self, master, arena):
        backend = Mooncake(settings(master, segment_size=SEGMENT))
        bench = Bench(Client(backend, arena.address), None, arena, SEGMENT)
        for turn in range(2):
            backend.attach(arena, lambda keys: None)
            assert save(bench, bench.first, [bench.thing(turn)]) == [OK]
        backend.close()

    def test_the_segment_is_warmed_around_what_is_in_it(self, alone):
        _, bench = alone(256 << 20)
        things = [bench.thing(i, blocks=16) for i in range(12)]
        assert save(bench, bench.first, things) == [OK] * 12
        backend = bench.first.backend
        until(lambda: backend.statistics()["segment_warm_bytes"] == 256 << 20, "it is warm")
        assert backend.statistics()["segment_bytes"] == 256 << 20
        assert_whole(bench, bench.second, things)

    def test_objects_go_where_they_are_wanted(self, alone, join):
        master, bench = alone()
        with Owner(**settings(master, segment_size=SEGMENT)) as owner:
            picky = join(master, preferred_segment=owner.name, soft_pin=True)
            things = [bench.thing(i) for i in range(8)]
            assert save(bench, picky, things) == [OK] * 8
            assert master.allocated() == {owner.name: sum(thing.nbytes for thing in things)}

    def test_copies_on_different_segments(self, alone, join):
        master, bench = alone()
        with Owner(**settings(master, segment_size=SEGMENT)):
            twice = join(master, replicas=2)
            one = bench.thing("one")
            assert save(bench, twice, [one]) == [OK]
            assert sorted(master.allocated().values()) == [one.nbytes] * 2
            assert_whole(bench, bench.second, [one])

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"segment_size": 1 << 20}, "0 or at least 16MiB"),
            ({"segment_size": 1 << 50}, "this machine has"),
            ({"protocol": "smoke_signals"}, "check protocol = 'smoke_signals'"),
        ],
        ids=["too small", "too large", "no such protocol"],
    )
    def test_refused(self, master, arena, options, words):
        with pytest.raises(Unusable, match=words):
            Mooncake(settings(master, **options)).attach(arena, lambda keys: None)
