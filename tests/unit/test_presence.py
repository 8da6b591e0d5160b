"""The presence table against a bag of keys, and between two processes' mappings."""

from __future__ import annotations

import gc
import hashlib
import mmap
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from layerflow.errors import ExtentError, LayerflowError, Unsupported
from layerflow.keys import object_key
from layerflow.presence import (
    BUCKET_BYTES,
    MAX_BYTES,
    MIN_BYTES,
    OBJECT_BYTES,
    Presence,
    PresenceWriter,
    place_of,
    tail_marks,
)
from layerflow.spec import Shard
from layerflow.system.memfd import SharedMemory

BUCKETS = MIN_BYTES // BUCKET_BYTES


def key_of(name: object, group: int = 0, shard: Shard | None = None) -> bytes:
    return object_key(hashlib.blake2b(repr(name).encode(), digest_size=16).digest(), group, shard or Shard())


def crowd(count: int, bucket: int = 3) -> list[bytes]:
    """Keys that share a bucket of the smallest table."""
    digest = (bucket << 64) // BUCKETS + 1
    return [digest.to_bytes(8, "little") + number.to_bytes(8, "little") + bytes(8) for number in range(1, count + 1)]


def reader_of(writer: Presence) -> Presence:
    return Presence(SharedMemory.attach(writer.memory.fd, writer.memory.nbytes, writable=False))


class TableMachine(RuleBasedStateMachine):
    """Ten keys of one bucket, so that it overflows, and some that lie anywhere; as objects and as parents of tails."""

    names = st.sampled_from([*crowd(10), *(key_of(number) for number in range(10))])

    def __init__(self) -> None:
        super().__init__()
        self.writer = PresenceWriter(0)
        self.reader = reader_of(self.writer)
        self.most = 0  #: tags that one bucket has held at once
        self.objects: Counter[bytes] = Counter()
        self.parents: Counter[bytes] = Counter()

    @rule(key=names)
    def add(self, key: bytes) -> None:
        self.writer.add(key)
        self.objects[key] += 1

    @rule(key=names)
    def add_tails(self, key: bytes) -> None:
        self.writer.add_tails(key)
        self.parents[key] += 1

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        if there := sorted(+self.objects):
            key = data.draw(st.sampled_from(there))
            self.writer.discard(key)
            self.objects[key] -= 1

    @rule(data=st.data())
    def discard_tails(self, data: st.DataObject) -> None:
        if there := sorted(+self.parents):
            key = data.draw(st.sampled_from(there))
            self.writer.discard_tails(key)
            self.parents[key] -= 1

    @rule()
    def discard_everything(self) -> None:
        for key in self.objects.elements():
            self.writer.discard(key)
        for key in self.parents.elements():
            self.writer.discard_tails(key)
        self.objects.clear()
        self.parents.clear()
        assert not self.reader.memory.array.any(), "an empty table is all zeros"

    @invariant()
    def nothing_there_is_denied(self) -> None:
        assert all(self.reader.may_hold(key) for key in +self.objects)
        assert all(self.reader.may_hold_tails(key) for key in +self.parents)

    @invariant()
    def what_is_seen_is_there_and_what_is_denied_is_not(self) -> None:
        for key in self.objects:
            seen = self.reader.holds(key)
            assert seen is None or seen == bool(self.objects[key])
            assert seen is not None or self.reader.may_hold(key)

    @invariant()
    def what_is_not_there_is_denied_unless_its_bucket_has_overflowed(self) -> None:
        with self.reader.memory.view.cast("Q") as words:
            for key in [*crowd(12), *(key_of(number) for number in range(20))]:
                overflowed = words[place_of(key, 0, BUCKETS)[0] * 8 + 7]
                if not self.objects[key] and not overflowed:
                    assert not self.reader.may_hold(key)

    @invariant()
    def no_bucket_overflows_while_it_has_had_room(self) -> None:
        self.most = max(self.most, sum(self.objects[key] for key in crowd(10)))
        if self.most <= 7:
            assert not self.reader.may_hold(crowd(11)[-1])

    def teardown(self) -> None:
        self.reader.close()
        self.writer.close()


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*crowd(3), key_of(1), key_of(2)]), st.integers(1, 50)), max_size=60),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([0, 1, 15, 16, 31, 40, 255]),
)
def test_lengths_are_seen_together_as_one_by_one(
    tails: list[tuple[bytes, int]], filled: int, spanned: int, most: int
) -> None:
    """One length's bucket, and one span's, have overflowed where they were added more than seven times."""
    table = PresenceWriter(0)
    for _ in range(filled):
        table.add_tails(key_of(1), 3)
    for _ in range(spanned):
        table.add_tails(key_of(2), tail_marks(20)[1])
    for parent, tokens in tails:
        for mark in tail_marks(tokens):
            table.add_tails(parent, mark)
    for parent in [*crowd(3), key_of(1), key_of(2), key_of(3)]:
        seen = table.tail_lengths(parent, most)
        assert seen == [
            tokens
            for tokens in range(most, 0, -1)
            if all(table.may_hold_tails(parent, mark) for mark in tail_marks(tokens)[1:])
        ]
        assert {tokens for mine, tokens in tails if mine == parent and tokens <= most} <= set(seen)


def test_an_overflowed_bucket_says_maybe_until_what_found_no_room_is_gone() -> None:
    table = PresenceWriter(0)
    keys, stranger = crowd(9), crowd(10)[-1]
    for key in keys[:7]:
        table.add(key)
    assert not table.may_hold(stranger)
    for key in keys[7:]:
        table.add(key)
    assert table.may_hold(stranger)
    for key in keys[:7]:
        table.discard(key)
    assert all(table.may_hold(key) for key in keys[7:])
    table.discard(keys[8])
    assert table.may_hold(keys[7])
    table.discard(keys[7])
    assert not any(table.may_hold(key) for key in [*keys, stranger])


def test_a_full_pool_gives_few_false_alarms() -> None:
    """As many objects as the table is made for, every fourth a tail; then keys that nobody has added."""
    count = 4096
    table = PresenceWriter(count * OBJECT_BYTES)
    for number in range(count):
        table.add(key_of(number, number % 3, Shard(number % 8, 8)))
        if number % 4 == 0:
            table.add_tails(key_of(("parent", number)))
    assert sum(table.may_hold(key_of(("nobody", number))) for number in range(10_000)) < 150
    assert sum(table.may_hold_tails(key_of(number)) for number in range(10_000)) < 150


@pytest.mark.parametrize("buckets", [BUCKETS, MAX_BYTES // BUCKET_BYTES])
def test_the_objects_of_one_chunk_lie_apart(buckets: int) -> None:
    """All groups and ranks of a chunk are there or not there together: in one bucket they would always overflow."""
    places = [
        place_of(key_of("chunk", group, Shard(tp, 64, pp, 4)), 0, buckets)
        for group in range(4)
        for tp in range(64)
        for pp in range(4)
    ]
    assert max(Counter(bucket for bucket, _ in places).values()) <= 8
    assert len({tag for _, tag in places}) == len(places)


@pytest.mark.parametrize("pool_bytes, nbytes", [(0, MIN_BYTES), (3 << 30, 2 << 20), (1 << 50, MAX_BYTES)])
def test_its_size_follows_the_pools(pool_bytes: int, nbytes: int) -> None:
    table = PresenceWriter(pool_bytes)
    assert table.memory.nbytes == nbytes
    table.close()


def test_readers_cannot_write() -> None:
    table = PresenceWriter(0)
    reader = reader_of(table)
    with pytest.raises((TypeError, ValueError)):
        reader.memory.view[0] = 1
    with pytest.raises((LayerflowError, PermissionError)):
        SharedMemory.attach(table.memory.fd, table.memory.nbytes)
    with pytest.raises(PermissionError):
        mmap.mmap(table.memory.fd, 4096)
    reader.memory.populate()
    reader.close()
    table.add(key_of(1))
    assert table.may_hold(key_of(1))


def test_what_cannot_be_a_table_is_refused() -> None:
    with SharedMemory.create(3 * mmap.PAGESIZE) as memory, pytest.raises(ExtentError, match="power of two"):
        Presence(memory)
    with pytest.raises(ExtentError):
        table = PresenceWriter(0)
        SharedMemory.attach(table.memory.fd, 2 * table.memory.nbytes, writable=False)


def test_closing_unmaps() -> None:
    table = PresenceWriter(0)
    table.close()
    gc.collect()
    with pytest.raises(ValueError, match="released"):
        table.may_hold(key_of(1))


def test_a_kernel_without_the_seal_still_makes_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerflow.system.memfd._SEAL_FUTURE_WRITE", 0x4000)
    try:
        table = PresenceWriter(0)
    except Unsupported as error:
        pytest.fail(f"refused: {error}")
    table.add(key_of(1))
    reader = reader_of(table)
    assert reader.may_hold(key_of(1))
    reader.close()
