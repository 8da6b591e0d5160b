"""What every backend behind the arena must do. A backend's tests subclass :class:`BackendContract`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from layerflow.objects import GENERATION_AT, HEADER_BYTES
from layerflow_testing.objects import (
    ARENA,
    BLOCK,
    BROKEN,
    EXISTS,
    EXPIRED,
    FAILED,
    FULL,
    MISSING,
    OK,
    PATIENCE_S,
    TOO_LARGE,
    Bench,
    Thing,
    any_of,
    assert_whole,
    lay_out,
    load,
    outcomes,
    put,
    save,
    seen,
    soon,
)
from layerflow_testing.shapes import ShapesContract


class BackendContract(ShapesContract):
    """Subclass as ``TestX`` and override the fixture ``bench``. The pool may hold objects of former tests."""

    @pytest.fixture
    def bench(self) -> Bench:
        raise NotImplementedError

    # Publish last --------------------------------------------------------------------------------

    def test_present_only_after_commit(self, bench):
        one, backend = bench.thing("one"), bench.first.backend
        nobody, everybody = [[False]] * len(bench.clients), [[True]] * len(bench.clients)
        put(bench, [one], [0])
        place = one.at(bench.first, 0)
        assert seen(bench, one) == nobody
        assert outcomes(backend.open_write([place], soon())) == [OK]
        assert seen(bench, one) == nobody
        for layer in range(one.layers):
            assert outcomes(backend.write([place], layer, layer + 1, soon())) == [OK]
            assert seen(bench, one) == nobody
            for client in bench.clients:
                assert load(bench, client, [one], ARENA // 2)[0][0] == MISSING
        assert outcomes(backend.commit([place], soon())) == [OK]
        assert seen(bench, one) == everybody
        for client in bench.clients:
            assert_whole(bench, client, [one])

    def test_the_header_may_come_last(self, bench):
        one = bench.thing("one")
        place = one.at(bench.first, 0)
        put(bench, [one], [0])
        bench.arena.array[:HEADER_BYTES] = 0
        assert outcomes(bench.first.backend.open_write([place], soon())) == [OK]
        assert outcomes(bench.first.backend.write([place], 0, one.layers, soon())) == [OK]
        bench.arena.array[:HEADER_BYTES] = np.frombuffer(one.header, np.uint8)
        assert outcomes(bench.first.backend.commit([place], soon())) == [OK]
        assert_whole(bench, bench.clients[-1], [one])

    def test_the_generation_word_stays_in_the_arena(self, bench):
        """It is the server's alone: an object that is fetched to where it was before does not look complete by it."""
        one, word = bench.thing("one"), (0x1234567 << 32 | 1).to_bytes(8, "little")
        view, backend, mine = bench.arena.view, bench.first.backend, one.at(bench.first, 0)
        put(bench, [one], [0])
        view[GENERATION_AT:HEADER_BYTES] = word
        assert outcomes(backend.open_write([mine], soon())) == [OK]
        assert outcomes(backend.write([mine], 0, one.layers, soon())) == [OK]
        assert outcomes(backend.commit([mine], soon())) == [OK]
        assert bytes(view[GENERATION_AT:HEADER_BYTES]) == word, "workers compare it while the object is stored"
        for client in bench.clients:
            place = one.at(client, 0, known=False)
            view[:HEADER_BYTES] = bytes(HEADER_BYTES)  # as the pool leaves a place that it gives away
            opened = eventually(lambda: outcomes(client.backend.open_fetch([place], soon())) == [OK])  # noqa: B023
            assert opened
            for layer in range(one.layers):
                assert outcomes(client.backend.fetch([place], layer, layer + 1, soon())) == [OK]
                assert bytes(view[GENERATION_AT:HEADER_BYTES]) == bytes(8)
            client.backend.close_fetch([place])
            assert np.array_equal(bench.arena.array[: one.nbytes], one.bytes)

    def test_revoke_leaves_nothing(self, bench):
        one, other, backend = bench.thing("one"), bench.thing("other"), bench.first.backend
        offsets = lay_out([one, other])
        put(bench, [one, other], offsets)
        places = [one.at(bench.first, offsets[0]), other.at(bench.first, offsets[1])]
        assert outcomes(backend.open_write(places, soon())) == [OK, OK]
        assert outcomes(backend.write(places, 0, one.layers, soon())) == [OK, OK]
        backend.revoke(places[:1])
        assert outcomes(backend.commit(places[1:], soon())) == [OK]
        assert seen(bench, one, other) == [[False, True]] * len(bench.clients)
        assert load(bench, bench.clients[-1], [one], ARENA // 2)[0][0] == MISSING
        assert save(bench, bench.clients[-1], [one]) == [OK]  # and the key is free
        assert_whole(bench, bench.first, [one])

    def test_revoke_right_after_open(self, bench):
        one = bench.thing("one")
        place = one.at(bench.first, 0)
        assert outcomes(bench.first.backend.open_write([place], soon())) == [OK]
        bench.first.backend.revoke([place])
        assert seen(bench, one) == [[False]] * len(bench.clients)
        assert save(bench, bench.first, [one]) == [OK]

    @pytest.mark.parametrize("call", ["open_write", "commit"])
    def test_a_call_that_raises_leaves_its_keys_free(self, bench, call):
        """The host revokes all that such a call was for; then they can be written again, or are whole."""
        if bench.outage is None:
            pytest.skip("its calls do not raise here")
        things = [bench.thing(("outage", call, number)) for number in range(3)]
        offsets, backend = lay_out(things), bench.first.backend
        put(bench, things, offsets)
        places = [thing.at(bench.first, offset) for thing, offset in zip(things, offsets, strict=True)]
        if call == "commit":
            assert outcomes(backend.open_write(places, soon())) == [OK] * 3
            assert outcomes(backend.write(places, 0, things[0].layers, soon())) == [OK] * 3
        with bench.outage(call), pytest.raises(Exception):  # noqa: B017 - of whatever kind
            getattr(backend, call)(places, soon())
        backend.revoke(places)
        for thing in things:
            assert save(bench, bench.first, [thing]) in ([OK], [EXISTS])
        for client in bench.clients:
            assert_whole(bench, client, things)

    # Write once ----------------------------------------------------------------------------------

    def test_a_complete_object_is_not_written_again(self, bench):
        one, again = bench.thing("one"), bench.thing("one", variant=1)
        assert save(bench, bench.first, [one]) == [OK]
        for number, client in enumerate(bench.clients):
            assert save(bench, client, [again, bench.thing(("beside it", number))]) == [EXISTS, OK]
        for client in bench.clients:
            assert_whole(bench, client, [one])

    def test_a_key_that_is_being_written(self, bench):
        one, other = bench.thing("one"), bench.thing("other")
        places = [one.at(bench.first, 0), one.at(bench.first, ARENA // 2)]
        put(bench, [one], [0])
        assert outcomes(bench.first.backend.open_write(places[:1], soon())) == [OK]
        results = bench.first.backend.open_write([places[1], other.at(bench.first, ARENA // 4)], soon())
        assert outcomes(results) == [EXISTS, OK]
        bench.first.backend.revoke([other.at(bench.first, ARENA // 4)])
        assert outcomes(bench.first.backend.write(places[:1], 0, one.layers, soon())) == [OK]
        assert outcomes(bench.first.backend.commit(places[:1], soon())) == [OK]
        assert load(bench, bench.first, [one], ARENA // 2)[0][0] == OK

    def test_calls_for_a_place_that_was_not_opened_change_nothing(self, bench):
        """As of a job whose room was given up, and opened by another job of its key."""
        one, other = bench.thing("one"), bench.thing("one", variant=1)
        put(bench, [one, other], [0, ARENA // 2])
        backend, mine, theirs = bench.first.backend, one.at(bench.first, 0), other.at(bench.first, ARENA // 2)
        assert outcomes(backend.open_write([mine], soon())) == [OK]
        assert outcomes(backend.write([mine], 0, 1, soon())) == [OK]
        assert outcomes(backend.write([theirs], 1, 2, soon())) == [FAILED]
        assert outcomes(backend.commit([theirs], soon())) == [FAILED]
        backend.revoke([theirs])
        assert outcomes(backend.write([mine], 1, one.layers, soon())) == [OK]
        assert outcomes(backend.commit([mine], soon())) == [OK]
        for client in bench.clients:
            assert_whole(bench, client, [one])

    @pytest.mark.parametrize("ends", [("commit", "commit"), ("commit", "revoke"), ("revoke", "commit")], ids="-".join)
    def test_two_writers_of_one_key(self, bench, ends):
        """Two clients, each order of their calls: one of their objects or none, never a mix, never half of one."""
        if bench.second is None:
            pytest.skip("this pool has one client")
        for number, order in enumerate(sorted(set(permutations((0, 0, 0, 1, 1, 1))))):
            things = [bench.thing(("contested", number), variant=writer) for writer in (0, 1)]
            offsets = lay_out(things)
            put(bench, things, offsets)
            places = [things[w].at(bench.clients[w], offsets[w]) for w in (0, 1)]
            at, holds, done, tried = [0, 0], [False, False], [False, False], [False, False]
            for w in order:
                backend, call = bench.clients[w].backend, ("open", "write", ends[w])[at[w]]
                at[w] += 1
                if call == "revoke":
                    if holds[w]:
                        backend.revoke(places[w : w + 1])
                        holds[w] = False
                elif call == "open":
                    holds[w] = outcomes(backend.open_write(places[w : w + 1], soon()))[0] == OK
                elif call == "write" and holds[w]:
                    holds[w] = outcomes(backend.write(places[w : w + 1], 0, things[w].layers, soon()))[0] == OK
                elif call == "commit" and holds[w]:
                    tried[w] = True
                    done[w] = outcomes(backend.commit(places[w : w + 1], soon()))[0] == OK
                    holds[w] = False
                story = f"{order} {ends}: after {call} of {w}"
                assert not all(done), f"{story}: both published"
                visible = seen(bench, things[0])
                assert visible == [[any(done)]] * 2 or (any(tried) and not any(done)), story
                if [True] in visible:
                    whose = done if any(done) else tried
                    for client in bench.clients:
                        [(outcome, data)] = load(bench, client, [any_of(things[0])], ARENA // 2)
                        assert outcome == OK or not any(done), story
                        allowed = [thing.bytes for thing, yes in zip(things, whose, strict=True) if yes]
                        assert outcome != OK or any(np.array_equal(data, each) for each in allowed), story
            for w in (0, 1):
                if holds[w]:
                    bench.clients[w].backend.revoke(places[w : w + 1])

    def test_the_losers_revoke_does_not_harm_the_winner(self, bench):
        if bench.second is None:
            pytest.skip("this pool has one client")
        one, other = bench.thing("one"), bench.thing("one", variant=1)
        put(bench, [one, other], [0, ARENA // 4])
        mine, theirs = one.at(bench.first, 0), other.at(bench.second, ARENA // 4)
        assert outcomes(bench.first.backend.open_write([mine], soon())) == [OK]
        assert outcomes(bench.first.backend.write([mine], 0, 1, soon())) == [OK]
        bench.second.backend.open_write([theirs], soon())
        bench.second.backend.revoke([theirs])
        assert outcomes(bench.first.backend.write([mine], 1, one.layers, soon())) == [OK]
        assert outcomes(bench.first.backend.commit([mine], soon())) == [OK]
        bench.second.backend.revoke([theirs])
        for client in bench.clients:
            assert_whole(bench, client, [one])

    # Layers --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("steps", [(), (1, 3), (6, 1), (1, 1, 1, 1, 1, 1, 1)], ids=str)
    def test_uneven_layers(self, bench, steps):
        things = [bench.thing(i, blocks=1 + i, layers=7, tokens=16 * (1 + i)) for i in range(3)]
        offsets = lay_out(things)
        put(bench, things, offsets)
        backend, places = bench.first.backend, [t.at(bench.first, o) for t, o in zip(things, offsets, strict=True)]
        assert outcomes(backend.open_write(places, soon())) == [OK] * 3
        lo = 0
        for step in [*steps, 7]:
            hi = min(lo + step, 7)
            if lo < hi:
                assert outcomes(backend.write(places, lo, hi, soon())) == [OK] * 3
            lo = hi
        assert outcomes(backend.commit(places, soon())) == [OK] * 3
        for client in bench.clients:
            for reading in ((1, 3), steps):
                assert_whole(bench, client, things, reading)

    def test_many_keys_per_call(self, bench):
        things = [bench.thing(("many", i), blocks=1 + i % 7, layers=4) for i in range(64)]
        assert save(bench, bench.first, things) == [OK] * 64
        assert seen(bench, *things) == [[True] * 64] * len(bench.clients)
        for client in bench.clients:
            assert_whole(bench, client, things, (1, 2))

    def test_one_layer_objects(self, bench):
        one = bench.thing("flat", layers=1)
        assert save(bench, bench.first, [one]) == [OK]
        assert_whole(bench, bench.clients[-1], [one])

    # Not there -----------------------------------------------------------------------------------

    def test_what_is_missing_spoils_nothing(self, bench):
        here = [bench.thing(i) for i in range(3)]
        assert save(bench, bench.first, here) == [OK] * 3
        absent = bench.thing("absent")
        for client in bench.clients:
            mixed = [here[0], absent, here[1], here[2]]
            assert client.backend.lookup([thing.key for thing in mixed], soon()) == [True, False, True, True]
            results = load(bench, client, mixed, ARENA // 2, (2,))
            assert [outcome for outcome, _ in results] == [OK, MISSING, OK, OK]
            for thing, (_, data) in zip(here, [results[0], *results[2:]], strict=True):
                assert np.array_equal(data, thing.bytes)

    @pytest.mark.parametrize("wrong", [{"layer_bytes": 2 * BLOCK}, {"layers": 4}, {"layers": 6}], ids=str)
    def test_another_size_is_missing(self, bench, wrong):
        one, other = bench.thing("one"), bench.thing("other")
        assert save(bench, bench.first, [one, other]) == [OK, OK]
        for client in bench.clients:
            places = [replace(one, **wrong).at(client, ARENA // 2), other.at(client, ARENA // 4)]
            assert outcomes(client.backend.open_fetch(places, soon())) == [MISSING, OK]
            client.backend.close_fetch(places[1:])

    def test_unknown_ones_are_ignored(self, bench):
        absent = bench.thing("absent")
        for client in bench.clients:
            place = absent.at(client, 0)
            client.backend.close_fetch([place])
            client.backend.revoke([place])
            client.backend.hide([absent.key])
            client.backend.close_fetch([place, place])
            assert client.backend.lookup([absent.key], soon()) == [False]

    def test_closing_twice(self, bench):
        one = bench.thing("one")
        assert save(bench, bench.first, [one]) == [OK]
        place = one.at(bench.first, ARENA // 2)
        assert outcomes(bench.first.backend.open_fetch([place], soon())) == [OK]
        bench.first.backend.close_fetch([place])
        bench.first.backend.close_fetch([place])
        bench.first.backend.revoke([place])
        assert_whole(bench, bench.first, [one])

    def test_empty_batches(self, bench):
        for client in bench.clients:
            backend = client.backend
            assert list(backend.lookup([], soon())) == []
            assert list(backend.open_fetch([], soon())) == list(backend.fetch([], 0, 1, soon())) == []
            assert list(backend.open_write([], soon())) == list(backend.write([], 0, 1, soon())) == []
            assert list(backend.commit([], soon())) == []
            backend.close_fetch([])
            backend.revoke([])
            backend.hide([])

    def test_hide_removes(self, bench):
        one, other = bench.thing("one"), bench.thing("other")
        assert save(bench, bench.first, [one, other]) == [OK, OK]
        bench.first.backend.hide([one.key, bench.key("absent")])
        assert seen(bench, one, other) == [[False, True]] * len(bench.clients)
        assert load(bench, bench.first, [one], ARENA // 2)[0][0] == MISSING
        fresh = bench.thing("one", variant=1)
        assert save(bench, bench.first, [fresh]) == [OK]
        assert_whole(bench, bench.clients[-1], [fresh])

    def test_alive(self, bench):
        for client in bench.clients:
            client.backend.check()
            assert all(isinstance(value, int | float) for value in client.backend.statistics().values())

    # Full ----------------------------------------------------------------------------------------

    @staticmethod
    def filling(bench: Bench) -> tuple[int, int]:
        """Blocks of an object of which the pool holds some two dozen (or as large as the arena allows); how many do."""
        blocks = max(1, min(bench.capacity // 24, ARENA // 4) // (4 * BLOCK))
        return blocks, bench.capacity // (blocks * 4 * BLOCK)

    def test_a_full_pool(self, bench):
        """FULL, or something older goes; never wrong bytes."""
        blocks, count = self.filling(bench)
        things = [bench.thing(("filling", i), blocks, 4) for i in range(count + count // 3)]
        stored: list[Thing] = []
        refused = 0
        for thing in things:
            [outcome] = save(bench, bench.first, [thing], wait=PATIENCE_S if bench.evicts else 0.2)
            assert outcome in (OK, FULL)
            if outcome == FULL:
                assert not bench.evicts, "a pool that evicts makes room in time"
                refused += 1
                if refused == 2:
                    break
            else:
                stored.append(thing)
        assert stored
        assert refused or bench.evicts
        present = [thing for thing in stored if all(row == [True] for row in seen(bench, thing))]
        assert present
        assert sum(thing.nbytes for thing in present) <= bench.capacity
        assert len(present) == len(stored) or bench.evicts
        for thing in present[:: max(1, len(present) // 16)]:
            [(outcome, data)] = load(bench, bench.clients[-1], [thing], ARENA // 2, (1,))
            assert outcome == OK or bench.evicts
            assert outcome != OK or np.array_equal(data, thing.bytes)

    def test_too_large(self, bench):
        huge = replace(bench.thing("huge"), layer_bytes=bench.capacity // BLOCK * BLOCK)
        one = bench.thing("one")
        places = [huge.at(bench.first, 0), one.at(bench.first, 0)]
        first, other = outcomes(bench.first.backend.open_write(places, soon(1.0)))
        assert first in (TOO_LARGE, FULL)
        assert other == OK
        bench.first.backend.revoke(places[1:])
        assert seen(bench, huge, one) == [[False, False]] * len(bench.clients)

    def test_an_object_that_leaves_while_it_is_read(self, bench):
        """It stays until the end of the fetch, or the fetch says that it went; what was OK is right."""
        blocks, count = self.filling(bench)
        one = bench.thing("read slowly", blocks, 4)
        assert save(bench, bench.first, [one]) == [OK]
        reader, at = bench.clients[-1], ARENA // 2
        place = one.at(reader, at, known=False)
        # Another client may hear of what was published a little later.
        opened = eventually(lambda: outcomes(reader.backend.open_fetch([place], soon())) == [OK])
        assert opened
        for layer in range(one.layers):
            if opened:
                [outcome] = outcomes(reader.backend.fetch([place], layer, layer + 1, soon()))
                assert outcome in (OK, MISSING, EXPIRED, BROKEN)
                opened = outcome == OK
                if opened:
                    lo, hi = place.start(layer), place.start(layer + 1)
                    assert np.array_equal(bench.arena.array[at + lo : at + hi], one.bytes[lo:hi])
            for i in range(count // 3 + 1):
                save(bench, bench.first, [bench.thing(("pushing", layer, i), blocks, 4)], wait=0.2)
        reader.backend.close_fetch([place])

    def test_eviction_under_load(self, bench):
        """One thread writes twice what the pool holds, another reads what lookup says is there."""
        blocks, count = self.filling(bench)
        count = min(count, 200)
        stored: list[Thing] = []
        failures: list[BaseException] = []
        begun, over = threading.Event(), threading.Event()

        def write() -> None:
            try:
                for i in range(2 * count):
                    thing = bench.thing(("load", i), blocks, 4)
                    if save(bench, bench.first, [thing], wait=0.2) == [OK]:
                        stored.append(thing)
                        begun.set()
            except BaseException as error:  # noqa: BLE001 - it is the test's to report
                failures.append(error)
            finally:
                begun.set()
                over.set()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            reader, right, last = bench.clients[-1], 0, False
            assert begun.wait(PATIENCE_S)
            patience = time.monotonic() + PATIENCE_S
            while not last or (not right and time.monotonic() < patience):
                last = over.is_set()
                known = stored[-2:] + stored[:: max(1, len(stored) // 2)]
                there = [t for t in known if reader.backend.lookup([t.key], soon())[0]]
                for thing in there:
                    [(outcome, data)] = load(bench, reader, [thing], ARENA // 2, (1, 2))
                    assert outcome in (OK, MISSING, EXPIRED, BROKEN)
                    if outcome == OK:
                        assert np.array_equal(data, thing.bytes)
                        right += 1
        finally:
            writer.join()
        assert failures == []
        assert right, "nothing was ever read"


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S, every_s: float = 0.002) -> bool:
    """Look until it holds; False after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(every_s)
    return True
