"""What every pool must do, whatever is behind it. A backend's tests subclass :class:`PoolContract`."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Protocol

import numpy as np
import pytest

from layerflow.errors import PoolError
from layerflow.objects import HEADER_BYTES, check_header
from layerflow.pool.base import Located, NewObject, Pool, Reservation, ReserveStatus

OBJECT = 4096  # bytes of an ordinary object in these tests
WRITER, READER, OTHER = ("session", 1), ("engine", "a", "request-1"), ("engine", "b", "request-2")


def key_of(name: object) -> bytes:
    return hashlib.blake2b(repr(name).encode(), digest_size=24).digest()


def new(name: object, nbytes: int = OBJECT, *, tokens: int = 256, blocks: int = 16, parent: bytes = b"") -> NewObject:
    return NewObject(key_of(name), nbytes, blocks, tokens, parent)


class Bench(Protocol):
    """A pool under test and another process's sight of its arena."""

    pool: Pool

    @property
    def memory(self) -> np.ndarray:
        """uint8, the arena's bytes through a second mapping."""
        ...


def outcomes(reservations: list[Reservation]) -> list[ReserveStatus]:
    return [reservation.outcome for reservation in reservations]


class PoolContract:
    """Subclass as ``TestX`` and override the fixture ``bench``: room for exactly 16 objects of `OBJECT` bytes."""

    @pytest.fixture
    def bench(self) -> Bench:
        raise NotImplementedError

    @pytest.fixture
    def pool(self, bench: Bench) -> Pool:
        return bench.pool

    @staticmethod
    def store(pool: Pool, *objects: NewObject, owner=WRITER) -> list[int]:
        reserved = pool.reserve(objects, owner)
        assert outcomes(reserved) == [ReserveStatus.RESERVED] * len(objects)
        assert pool.commit([each.key for each in objects], owner) == len(objects)
        return [each.offset for each in reserved]

    # Publish last --------------------------------------------------------------------------------

    def test_present_only_after_commit(self, pool):
        one = new("one", parent=key_of("parent"))
        pool.reserve([one], WRITER)
        assert pool.lookup([one.key]) == [False]
        assert pool.acquire([one.key], READER, 9.0) == [None]
        assert list(pool.tails(one.parent)) == []
        assert pool.commit([one.key], WRITER) == 1
        assert pool.lookup([one.key, key_of("absent")]) == [True, False]
        assert list(pool.tails(one.parent)) == [(one.tokens, one.key)]

    def test_place_and_shape_come_back(self, pool):
        one = new("one", tokens=100, blocks=7)
        [offset] = self.store(pool, one)
        assert pool.acquire([key_of("absent"), one.key], READER, 9.0) == [None, Located(offset, 7, 100)]

    def test_header_is_in_the_arena_at_commit_not_before(self, pool, bench):
        one = new("one")
        [(_, offset)] = pool.reserve([one], WRITER)
        with pytest.raises(PoolError):
            check_header(bench.memory[offset : offset + HEADER_BYTES].data, one.key, one.blocks)
        pool.commit([one.key], WRITER)
        check_header(bench.memory[offset : offset + HEADER_BYTES].data, one.key, one.blocks)

    @pytest.mark.parametrize("leave", ["revoke", "hide", "clear", "drop_owner", "evict"])
    def test_no_header_verifies_once_the_room_is_free(self, pool, bench, leave):
        one = new("one")
        if leave in ("revoke", "drop_owner"):
            [(_, offset)] = pool.reserve([one], WRITER)
            bench.memory[offset : offset + 4] = np.frombuffer(b"LFOB", np.uint8)  # what a former object left
            pool.revoke([one.key], WRITER) if leave == "revoke" else pool.drop_owner(WRITER)
        else:
            [offset] = self.store(pool, one)
            if leave == "hide":
                pool.hide([one.key])
            elif leave == "clear":
                pool.clear()
            else:
                pool.reserve([new(i) for i in range(16)], WRITER)
        assert pool.lookup([one.key]) == [False]
        assert not bench.memory[offset : offset + 4].any()

    def test_header_like_bytes_are_wiped_at_reuse(self, pool, bench):
        large, small = new("large", 4 * OBJECT), new("small")
        [offset] = self.store(pool, large)
        bench.memory[offset : offset + 4 * OBJECT] = np.resize(np.frombuffer(b"LFOB", np.uint8), 4 * OBJECT)
        pool.hide([large.key])
        for reserved in pool.reserve([new(i) for i in range(16)], WRITER):
            assert not bench.memory[reserved.offset : reserved.offset + 4].any()
        assert pool.reserve([small], OTHER)[0].outcome is ReserveStatus.FULL

    # Write once ----------------------------------------------------------------------------------

    def test_a_complete_object_is_not_written_again(self, pool):
        one = new("one")
        self.store(pool, one)
        assert outcomes(pool.reserve([one], OTHER)) == [ReserveStatus.EXISTS]
        assert pool.commit([one.key], OTHER) == 0

    def test_two_writers_of_one_key(self, pool):
        one = new("one")
        pool.reserve([one], WRITER)
        assert outcomes(pool.reserve([one], OTHER)) == [ReserveStatus.BUSY]
        assert outcomes(pool.reserve([one], WRITER)) == [ReserveStatus.BUSY]
        assert pool.commit([one.key], OTHER) == 0
        assert pool.revoke([one.key], OTHER) == 0
        assert pool.lookup([one.key]) == [False]
        assert pool.commit([one.key], WRITER) == 1

    def test_a_key_twice_in_one_batch(self, pool):
        one = new("one")
        assert outcomes(pool.reserve([one, one], WRITER)) == [ReserveStatus.RESERVED, ReserveStatus.BUSY]
        assert pool.commit([one.key, one.key], WRITER) == 1

    def test_commit_and_revoke_of_unknown_keys_count_nothing(self, pool):
        assert pool.commit([key_of("absent")], WRITER) == 0
        assert pool.revoke([key_of("absent")], WRITER) == 0
        assert pool.hide([key_of("absent")]) == 0
        pool.release(READER)
        pool.release(READER, [key_of("absent")])
        assert pool.drop_owner(READER) == 0

    def test_a_committed_object_cannot_be_revoked(self, pool):
        one = new("one")
        self.store(pool, one)
        assert pool.revoke([one.key], WRITER) == 0
        assert pool.lookup([one.key]) == [True]

    def test_a_revoked_key_can_be_written_again(self, pool):
        one = new("one")
        pool.reserve([one], WRITER)
        assert pool.revoke([one.key, one.key], WRITER) == 1
        assert pool.commit([one.key], WRITER) == 0
        self.store(pool, one, owner=OTHER)

    # Room ----------------------------------------------------------------------------------------

    def test_a_batch_lies_in_one_ascending_run(self, pool):
        offsets = self.store(pool, *(new(i, 1024 + 64) for i in range(4)))
        assert [after - before for before, after in pairwise(offsets)] == [1088] * 3

    def test_too_large_for_ever(self, pool):
        self.store(pool, new("one"))
        before = pool.statistics()
        assert outcomes(pool.reserve([new("huge", 17 * OBJECT)], WRITER)) == [ReserveStatus.TOO_LARGE]
        assert pool.statistics() == before

    def test_full_of_half_written_and_pinned_objects(self, pool):
        pinned = [new(("pinned", i)) for i in range(8)]
        self.store(pool, *pinned)
        pool.acquire([each.key for each in pinned], READER, 9.0)
        pool.reserve([new(("writing", i)) for i in range(8)], WRITER)
        before = pool.statistics()
        assert outcomes(pool.reserve([new("more")], WRITER)) == [ReserveStatus.FULL]
        after = pool.statistics()
        assert (after.full, after.evictions, after.objects) == (before.full + 1, before.evictions, before.objects)
        assert pool.lookup([each.key for each in pinned]) == [True] * 8
        pool.release(READER, [pinned[3].key])
        assert outcomes(pool.reserve([new("more")], WRITER)) == [ReserveStatus.RESERVED]
        assert pool.lookup([each.key for each in pinned]) == [True] * 3 + [False] + [True] * 4

    def test_a_batch_that_partly_fits_serves_its_first_objects(self, pool):
        pool.reserve([new(("writing", i)) for i in range(12)], WRITER)
        batch = [new("a"), new("huge", 99 * OBJECT), new("b", 2 * OBJECT), new(("writing", 0)), new("c"), new("d")]
        assert outcomes(pool.reserve(batch, OTHER)) == [
            ReserveStatus.RESERVED,
            ReserveStatus.TOO_LARGE,
            ReserveStatus.RESERVED,
            ReserveStatus.BUSY,
            ReserveStatus.RESERVED,
            ReserveStatus.FULL,
        ]
        assert pool.statistics().half_written == 15

    def test_full_changes_nothing_although_something_could_be_evicted(self, pool):
        self.store(pool, *(new(i) for i in range(16)))
        pool.acquire([key_of(i) for i in range(0, 16, 2)], READER, 9.0)  # no two neighbours may go
        before = pool.statistics()
        assert outcomes(pool.reserve([new("wide", 4 * OBJECT)], WRITER)) == [ReserveStatus.FULL]
        after = pool.statistics()
        assert (after.objects, after.evictions, after.used_bytes) == (16, 0, before.used_bytes)

    def test_room_for_another_size_is_made(self, pool):
        self.store(pool, *(new(i) for i in range(16)))
        self.store(pool, *(new(("wide", i), 4 * OBJECT) for i in range(4)))
        assert pool.statistics().objects == 4
        self.store(pool, *(new(i) for i in range(16)))
        assert pool.statistics().objects == 16

    # Eviction ------------------------------------------------------------------------------------

    def test_eviction_spares_what_is_pinned_or_half_written(self, pool):
        pinned = [new(("pinned", i)) for i in range(5)]
        self.store(pool, *pinned)
        places = pool.acquire([each.key for each in pinned], READER, 9.0)
        writing = pool.reserve([new(("writing", i)) for i in range(5)], WRITER)
        held = {place.offset for place in places} | {reserved.offset for reserved in writing}
        for i in range(60):
            assert held.isdisjoint(self.store(pool, new(i), owner=OTHER))
        assert pool.lookup([each.key for each in pinned]) == [True] * 5
        assert pool.commit([key_of(("writing", i)) for i in range(5)], WRITER) == 5
        assert pool.statistics().evictions == 60 - 6

    def test_the_end_of_a_prompt_goes_before_its_beginning(self, pool):
        self.store(pool, *(new(i) for i in range(16)))
        self.store(pool, *(new(("next", i)) for i in range(4)))
        assert pool.lookup([key_of(i) for i in range(16)]) == [True] * 12 + [False] * 4

    # Pins ----------------------------------------------------------------------------------------

    def test_lookup_counts_nothing_and_acquire_counts_each_key(self, pool):
        self.store(pool, new("one"))
        pool.lookup([key_of("one"), key_of("absent")])
        assert (pool.statistics().hits, pool.statistics().misses) == (0, 0)
        pool.acquire([key_of("one"), key_of("absent"), key_of("absent too")], READER, 9.0)
        pool.acquire([key_of("one")], READER, 9.0)
        assert (pool.statistics().hits, pool.statistics().misses) == (2, 2)

    def test_an_owners_pins_expire_together_at_the_latest_end(self, pool):
        self.store(pool, new("one"), new("two"))
        pool.acquire([key_of("one"), key_of("two")], READER, 5.0)
        pool.acquire([key_of("one")], READER, 8.0)
        pool.acquire([key_of("one")], READER, 6.0)
        pool.acquire([key_of("absent")], READER, 9.0)
        pool.acquire([key_of("two")], OTHER, 7.0)
        assert pool.statistics().pinned == 2
        assert pool.expire(6.9) == 0
        assert pool.expire(7.0) == 1
        assert pool.statistics().pinned == 2
        assert pool.expire(7.9) == 0
        assert pool.expire(8.0) == 2
        assert pool.statistics().pinned == 0

    def test_pins_that_ran_out_end_few_at_a_time(self, pool):
        self.store(pool, *map(new, range(8)))
        for number in range(4):
            pool.acquire([key_of(2 * number), key_of(2 * number + 1)], ("lease", number), 5.0 + number)
        pool.acquire([key_of(0)], OTHER, 9.0)
        pinned = [pool.statistics().pinned]
        for _ in range(3):
            assert pool.expire(7.0, 2) == 2
            pinned.append(pool.statistics().pinned)
        assert pool.expire(7.0, 2) == 0
        assert pinned == [8, 7, 5, 3]

    def test_an_owner_of_more_than_end_at_a_time_keeps_the_first_until_its_turn(self, pool):
        self.store(pool, *map(new, range(5)))
        pool.acquire([key_of(number) for number in range(5)], READER, 5.0)
        assert [pool.expire(5.0, 2), pool.pinned_by(READER)] == [2, 3]
        pool.acquire([key_of(4)], READER, 9.0)
        assert pool.expire(5.0, 2) == 0, "what it has left lasts longer, too"
        assert [pool.expire(9.0, 3), pool.expire(9.0, 3)] == [3, 1]
        assert not pool.owners() and not pool.statistics().pinned

    def test_what_an_owner_has_let_go_is_its_no_more_and_ends_when_there_is_time(self, pool):
        heard: list[object] = []
        pool.listen_owners(heard.append)
        self.store(pool, *map(new, range(5)))
        pool.acquire([key_of(number) for number in range(5)], READER, float("inf"))
        pool.let_go(READER)
        assert heard == [READER] and not pool.pinned_by(READER)
        assert pool.copy_pins(READER, [key_of(0)], OTHER) is None
        pool.acquire([key_of(0)], READER, 9.0)
        assert pool.statistics().pinned == 5, "nothing that may still be read is evicted"
        assert [pool.expire(float("-inf"), 3) for _ in range(3)] == [3, 2, 0]
        assert pool.statistics().pinned == pool.pinned_by(READER) == 1
        pool.let_go(OTHER)
        assert pool.owners() == [READER]

    def test_what_is_let_go_takes_no_room_from_what_is_stored_next(self, pool):
        self.store(pool, *map(new, range(16)))
        for owner in (READER, OTHER):
            pool.acquire([key_of(number) for number in range(16)], owner, float("inf"))
        pool.hide([key_of(0)])
        pool.let_go(READER)
        assert outcomes(pool.reserve([new("next")], WRITER)) == [ReserveStatus.FULL]
        pool.let_go(OTHER)
        assert outcomes(pool.reserve([new("next"), new("another")], WRITER)) == [ReserveStatus.RESERVED] * 2

    def test_each_owner_that_pins_nothing_any_more_is_told(self, pool):
        heard: list[object] = []
        pool.listen_owners(heard.append)
        self.store(pool, new("one"), new("two"))
        for owner in ("released", "moved", "expired"):
            pool.acquire([key_of("one"), key_of("two")], owner, 5.0)
        pool.release("released", [key_of("one")])
        assert heard == []
        pool.release("released")
        pool.transfer_pins("moved", "heir", 9.0)
        pool.release("nobody")
        pool.expire(5.0)
        assert heard == ["released", "moved", "expired"]

    def test_owners_pin_independently(self, pool):
        self.store(pool, new("one"))
        pool.acquire([key_of("one")], READER, 5.0)
        pool.acquire([key_of("one")], OTHER, float("inf"))
        pool.release(READER, [key_of("one")])
        assert pool.statistics().pinned == 1
        assert pool.expire(1e9) == 0
        pool.release(OTHER)
        assert pool.statistics().pinned == 0

    def test_a_released_pin_does_not_expire_later(self, pool):
        self.store(pool, new("one"))
        pool.acquire([key_of("one")], READER, 5.0)
        pool.release(READER)
        pool.acquire([key_of("one")], READER, 9.0)
        assert pool.expire(6.0) == 0
        assert pool.statistics().pinned == 1

    # Hiding, dying -------------------------------------------------------------------------------

    def test_hide_is_at_once_and_room_returns_with_the_last_reader(self, pool, bench):
        one = new("one", parent=key_of("parent"))
        [offset] = self.store(pool, one)
        used = pool.statistics().used_bytes
        pool.acquire([one.key], READER, 9.0)
        pool.acquire([one.key], OTHER, 9.0)
        assert pool.hide([one.key]) == 1
        assert pool.hide([one.key]) == 0
        assert pool.lookup([one.key]) == [False]
        assert list(pool.tails(one.parent)) == []
        assert pool.acquire([one.key], READER, 99.0) == [None]
        pool.release(READER)
        assert pool.statistics().used_bytes == used
        pool.release(OTHER, [one.key])
        assert (pool.statistics().used_bytes, pool.statistics().pinned) == (0, 0)
        assert not bench.memory[offset : offset + 4].any()

    def test_a_hidden_key_is_written_anew_beside_its_last_readers(self, pool):
        one = new("one")
        [old] = self.store(pool, one)
        pool.acquire([one.key], READER, 9.0)
        pool.hide([one.key])
        [fresh] = self.store(pool, one, owner=OTHER)
        assert fresh != old
        assert pool.acquire([one.key], READER, 5.0)[0].offset == fresh
        assert pool.statistics().pinned == 2
        assert pool.expire(5.0) == 0  # the old one's pin is longer, and an owner's pins end together
        pool.release(READER, [one.key])  # both
        assert pool.statistics().pinned == 0
        assert pool.lookup([one.key]) == [True]
        assert pool.statistics().objects == 1

    def test_clear_spares_what_is_being_written(self, pool):
        self.store(pool, new("one"), new("two"))
        pool.reserve([new("half")], WRITER)
        assert pool.clear() == 2
        assert pool.lookup([key_of("one"), key_of("two")]) == [False, False]
        assert pool.commit([key_of("half")], WRITER) == 1

    def test_a_dead_owner_leaves_nothing(self, pool):
        self.store(pool, new("one"), owner=OTHER)
        pool.reserve([new("half"), new("half too")], WRITER)
        pool.acquire([key_of("one")], WRITER, 9.0)
        pool.acquire([key_of("one")], READER, 9.0)
        assert pool.drop_owner(WRITER) == 3
        after = pool.statistics()
        assert (after.half_written, after.pinned, after.objects, after.revoked) == (0, 1, 1, 2)
        assert pool.commit([key_of("half")], WRITER) == 0
        self.store(pool, new("half"), owner=OTHER)

    # Tails ---------------------------------------------------------------------------------------

    def test_tails_longest_first(self, pool):
        parent = key_of("parent")
        for tokens in (16, 240, 128):
            self.store(pool, new(("tail", tokens), 1024, tokens=tokens, parent=parent))
        self.store(pool, new("elsewhere", parent=key_of("other parent")), new("full chunk"))
        assert [tail.tokens for tail in pool.tails(parent)] == [240, 128, 16]
        pool.hide([key_of(("tail", 240))])
        assert list(pool.tails(parent)) == [(128, key_of(("tail", 128))), (16, key_of(("tail", 16)))]
        assert list(pool.tails(key_of("unknown"))) == []

    # Limits --------------------------------------------------------------------------------------

    def test_statistics_add_up(self, pool):
        self.store(pool, *(new(i) for i in range(16)))
        self.store(pool, new("more"))
        pool.reserve([new("half")], WRITER)
        now = pool.statistics()
        assert (now.objects, now.half_written, now.commits, now.evictions) == (15, 1, 17, 2)
        assert now.used_bytes == 16 * OBJECT <= now.capacity_bytes
        assert now.evicted_bytes == 2 * OBJECT

    @pytest.mark.parametrize(
        "bad",
        [
            NewObject(b"short", OBJECT, 16, 256),
            NewObject(key_of(1), OBJECT, 16, 256, b"short"),
            NewObject(key_of(1), 63, 16, 256),
            NewObject(key_of(1), OBJECT, 0, 256),
            NewObject(key_of(1), OBJECT, 16, 1 << 32),
        ],
    )
    def test_an_impossible_object_is_refused_and_nothing_reserved(self, pool, bad):
        with pytest.raises((PoolError, ValueError)):
            pool.reserve([new("good"), bad], WRITER)
        assert pool.statistics().half_written == 0
