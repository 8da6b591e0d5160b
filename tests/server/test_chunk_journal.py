"""The journal of described chunks, against readers that each keep what they were told."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import TypeVar

import pytest

from layerflow.keys import DIGEST_BYTES, object_key
from layerflow.server import chunk_journal
from layerflow.server.chunk_journal import ABSENT, ARENA, TIER, ChunkJournal, Described
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

T = TypeVar("T")
TOKENS = bytes(4 * 8)


def spec_of(name: str, ranks: int = 1) -> ModelSpec:
    shard = Shard(0, ranks, 0, 1, (2, 2), ((1,), (1,)))
    plane = (Plane("k", "uint8", (shard.box(0).heads, 8)),)
    groups = tuple(GroupSpec("full", 8, (layer,), plane) for layer in range(2))
    return ModelSpec(name, name, groups, shard, chunk_tokens=8)


def finish(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Places:
    """Which objects are where."""

    def __init__(self) -> None:
        self.arena: set[bytes] = set()
        self.tier: set[bytes] = set()

    def where(self, keys: Sequence[bytes]) -> int:
        if self.arena.issuperset(keys):
            return ARENA
        return TIER if (self.arena | self.tier).issuperset(keys) else ABSENT


class JournalReader:
    """What one reader believes."""

    def __init__(self, journal: ChunkJournal, model: bytes, most: int) -> None:
        self._journal, self._model, self._most = journal, model, most
        self._after = self._begun = 0
        self._stale: set[bytes] = set()
        self.believed: dict[bytes, bytes] = {}

    def read(self) -> bool:
        """Read once; whether there is more."""
        read = finish(self._journal.read(self._model, self._after, self._begun, self._most))
        if read.lost or not self._after:
            self._stale = set(self.believed)
        for digest, states, _ in read.changes:
            self._stale.discard(digest)
            if any(states):
                self.believed[digest] = states
            else:
                self.believed.pop(digest, None)
        self._after, self._begun = read.upto, read.begun
        if not read.more:
            for digest in self._stale:
                self.believed.pop(digest, None)
            self._stale.clear()
        return read.more


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("room", [1 << 30, 40 * chunk_journal.RECORD_BYTES])
def test_every_reader_ends_with_what_is_there(seed: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_GONE", 6), ("SEGMENT", 8), ("READ_AT_ONCE", 5)):
        monkeypatch.setattr(chunk_journal, name, value)
    rng, places = random.Random(seed), Places()
    journal = ChunkJournal(places.where, lambda: room)
    specs = [spec_of("one"), spec_of("two"), spec_of("one", 2)]
    assert specs[0].fingerprint == specs[2].fingerprint
    digests = {spec.fingerprint: [rng.randbytes(DIGEST_BYTES) for _ in range(60)] for spec in specs[:2]}
    readers = [JournalReader(journal, spec.fingerprint, most) for spec in specs[:2] for most in (1, 7, 256)]

    def keys_of(spec: ModelSpec, digest: bytes) -> list[bytes]:
        return [object_key(digest, group, shard) for group in (0, 1) for shard in spec.shard.peers()]

    for _ in range(3000):
        spec = rng.choice(specs)
        digest = rng.choice(digests[spec.fingerprint])
        act = rng.random()
        if act < 0.3:
            finish(journal.describe(spec, Described(digest, b"", TOKENS, b"")))
            finish(journal.shrink())
        elif act < 0.7:
            for key in keys_of(spec, digest):
                rng.choice((places.arena, places.tier)).symmetric_difference_update([key])
                journal.object_changed(key)
        elif act < 0.72:
            places.tier.clear()
            finish(journal.look_again())
        else:
            rng.choice(readers).read()
    forgotten = journal.statistics().forgotten
    assert (forgotten > 0) == (room < 1 << 30)
    for reader in readers:
        while reader.read():
            pass
    there = {digest: record for shard in journal._shards for digest, record in shard.items() if any(record.states)}
    known = {digest: record.states for digest, record in there.items()}
    assert len(known) == journal.statistics().there
    for reader, spec in zip(readers, [each for each in specs[:2] for _ in range(3)], strict=True):
        assert reader.believed == {digest: known[digest] for digest in digests[spec.fingerprint] if digest in known}
    for digest, states in known.items():
        spec = specs[0] if digest in digests[specs[0].fingerprint] else specs[1]
        record = there[digest]
        assert states == bytes(min(places.where(part[group]) or 9 for part in record.keys) % 9 for group in (0, 1))
    if room == 1 << 30:
        journal._most_bytes = lambda: 0
        assert sum(1 for _ in journal.shrink()), "most of them are dropped in turns"
    assert journal.statistics().nbytes <= room
    assert sum(len(segment.entries) for segment in journal._segments) <= 8 * (len(journal._segments) + 1)


def describe_stored(
    journal: ChunkJournal, places: Places, spec: ModelSpec, count: int, extra: bytes = b""
) -> list[bytes]:
    """Chunks that are in the arena, described; their digests, in order."""
    digests = [number.to_bytes(DIGEST_BYTES, "big") for number in range(count)]
    for digest in digests:
        places.arena.update(object_key(digest, group, spec.shard) for group in (0, 1))
        finish(journal.describe(spec, Described(digest, b"", TOKENS, extra)))
    return digests


def test_an_engine_that_attaches_reads_what_is_there_in_slices() -> None:
    places, spec = Places(), spec_of("one")
    journal = ChunkJournal(places.where, lambda: 1 << 40)
    digests = describe_stored(journal, places, spec, 5000)
    others = spec_of("two")
    turns = sum(1 for _ in journal.read(others.fingerprint, 0, 0, 256))
    assert turns == 5000 // chunk_journal.READ_AT_ONCE, "another model's chunks are passed over in turns"
    after = begun = 0
    found: list[bytes] = []
    for _ in range(100):
        read = finish(journal.read(spec.fingerprint, after, begun, 256))
        assert len(read.changes) <= 256
        found += [change.digest for change in read.changes]
        after, begun = read.upto, read.begun
        if not read.more:
            break
    assert found == digests


def test_no_dict_is_so_large_that_the_loop_waits_while_it_grows() -> None:
    journal, count = ChunkJournal(Places().where, lambda: 1 << 40), 8192
    spec = spec_of("m")
    for number in range(count):
        finish(journal.describe(spec, Described(number.to_bytes(DIGEST_BYTES, "big"), b"", TOKENS, b"")))
    assert journal.described == count
    assert max(map(len, journal._shards)) < count / 32


def test_another_server_is_read_from_the_beginning() -> None:
    journal = ChunkJournal(Places().where, lambda: 1 << 40)
    assert finish(journal.read(b"", 5, 5, 1)).lost


def test_an_answer_is_bounded_by_its_bytes_too() -> None:
    places, spec = Places(), spec_of("one")
    journal = ChunkJournal(places.where, lambda: 1 << 40)
    digests = describe_stored(journal, places, spec, 5, bytes(1000))
    each = len(TOKENS) + 1000
    read = finish(journal.read(spec.fingerprint, 0, 0, 256, 2 * each))
    assert [change.digest for change in read.changes] == digests[:2] and read.more
    read = finish(journal.read(spec.fingerprint, read.upto, read.begun, 256, 1))
    assert [change.digest for change in read.changes] == digests[2:3] and read.more, "one at least"
    read = finish(journal.read(spec.fingerprint, read.upto, read.begun, 256))
    assert [change.digest for change in read.changes] == digests[3:] and not read.more


def test_another_models_description_of_a_digest_changes_nothing() -> None:
    places, spec = Places(), spec_of("one")
    journal = ChunkJournal(places.where, lambda: 1 << 40)
    [digest] = digests = [bytes(DIGEST_BYTES)]
    places.arena.update(object_key(digest, group, spec.shard) for group in (0, 1))
    finish(journal.describe(spec, Described(digest, b"", TOKENS, b"mine")))
    before = journal.statistics()
    finish(journal.describe(spec_of("two", 2), Described(digest, b"", TOKENS, b"theirs")))
    assert journal.statistics() == before
    read = finish(journal.read(spec.fingerprint, 0, 0, 256))
    assert [(change.digest, change.chunk.extra) for change in read.changes if change.chunk] == [(*digests, b"mine")]


def test_keys_of_many_groups_and_shards_are_made_and_looked_at_in_turns() -> None:
    plane = (Plane("k", "uint8", (8,)),)
    groups = tuple(GroupSpec("full", 8, (layer,), plane) for layer in range(8))
    spec = ModelSpec("wide", "wide", groups, Shard(0, 512), chunk_tokens=8)
    journal = ChunkJournal(Places().where, lambda: 1 << 40)
    assert chunk_journal.keys_of_chunk(spec) == chunk_journal.MOST_KEYS
    turns = sum(1 for _ in journal.describe(spec, Described(bytes(DIGEST_BYTES), b"", TOKENS, b"")))
    assert turns == chunk_journal.MOST_KEYS // chunk_journal.KEYS_AT_ONCE
    finish(journal.describe(spec, Described(b"x" * DIGEST_BYTES, b"", TOKENS, b"")))
    assert sum(1 for _ in journal.look_again()) == 2
