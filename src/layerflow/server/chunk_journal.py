"""What became of the chunks that engines have described: a log that each of them reads at its own pace.

The pool knows digests. A router wants tokens: so an engine that stores a chunk, or hits one, describes it once, and the
journal says to every engine of the model when its objects came, moved and went. Snapshot and log are one: an entry is a
chunk's last change, and a change moves it to the end. Whoever reads from 0 gets what is there now.

What is kept is bounded. A description that is dropped for room is told as a chunk that went, though it may still be
hit: what routers do not know costs them a guess, what they believe wrongly costs a prompt's time.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerflow.keys import DIGEST_BYTES, object_keys
from layerflow.observe.collectors import DescribedStatistics
from layerflow.spec import ModelSpec

ABSENT, ARENA, TIER = 0, 1, 2
"""Where all of a chunk's objects of one group are; TIER: some of them only behind the arena."""

MAX_GONE = 65_536
"""Chunks without a description that are remembered as gone. Who has not read the older ones starts over."""
MOST_PARTITIONS = 4
SEGMENT = 512
SHARDS = 256
"""Dicts that hold the chunks. One is copied where it grows, and the loop waits: 190 ms for an ordered one of 10^6."""
READ_AT_ONCE = 128
"""Entries looked at, or descriptions dropped, before others get their turn."""
KEYS_AT_ONCE = 512
"""Keys that are made or looked at before others get their turn: 1.3 ms."""
MOST_KEYS = 4096
"""Of one chunk: 512 shards with 8 groups. Each object of a chunk that comes or goes has all of them looked at."""
RECORD_BYTES, KEY_BYTES = 680, 110
"""What a description takes beside its tokens and extra keys, and of it each object's key: tracemalloc has 760 with one
key, of 10^5 descriptions, and 1,460 with eight."""

MOST_READ_BYTES = 1 << 20
"""Of tokens and extra keys in one answer: 256 chunks of 256 tokens have a quarter. One chunk may have a third."""

Where = Callable[[Sequence[bytes]], int]
"""Where all of some objects are: ABSENT, ARENA or TIER."""


class Described(NamedTuple):
    """A chunk in an engine's words.

    :param digest: of the chunk. :param parent: of the chunk before; empty = it is a prompt's first.
    :param tokens: uint32 each. :param extra: the engine's own, for engines of the same model.
    """

    digest: bytes
    parent: bytes
    tokens: bytes
    extra: bytes


class ChunkChange(NamedTuple):
    """Where a chunk is now.

    :param states: a byte for each group. :param chunk: None where all of them are ABSENT.
    """

    digest: bytes
    states: bytes
    chunk: Described | None


class Read(NamedTuple):
    """A piece of the log.

    :param upto: read on behind this. :param more: there is more.
    :param begun: where reading from 0 has begun; goes with the next reads.
    :param lost: entries that were never read are gone: read from 0, and forget what is not told again.
    """

    changes: list[ChunkChange]
    upto: int
    more: bool
    begun: int
    lost: bool = False


class _Segment:
    """A piece of the log: (number, digest), of which `live` are their chunks' last."""

    __slots__ = ("entries", "live")

    def __init__(self) -> None:
        self.entries: list[tuple[int, bytes]] = []
        self.live = 0


@dataclass(slots=True, eq=False)
class _Record:
    """A chunk's last change.

    :param digest: of the chunk. :param model: fingerprint. :param groups: how many the model has.
    :param chunk: None = it is only remembered as gone.
    :param keys: of each partition that describes it: keys by group. :param objects: how many keys these are.
    """

    digest: bytes
    model: bytes
    groups: int
    chunk: Described | None
    keys: list[list[list[bytes]]]
    states: bytes
    objects: int = 0
    number: int = 0
    segment: _Segment | None = None
    older: _Record | None = None
    newer: _Record | None = None


class _Queue:
    """Records, oldest first; each knows those beside it."""

    __slots__ = ("_count", "first", "last")

    def __init__(self) -> None:
        self.first: _Record | None = None
        self.last: _Record | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, record: _Record) -> None:
        """A record of no queue is the youngest here."""
        record.older = self.last
        if self.last is None:
            self.first = record
        else:
            self.last.newer = record
        self.last = record
        self._count += 1

    def remove(self, record: _Record) -> None:
        """One of these leaves."""
        older, newer = record.older, record.newer
        if older is None:
            self.first = newer
        else:
            older.newer = newer
        if newer is None:
            self.last = older
        else:
            newer.older = older
        record.older = record.newer = None  # no cycle is left to the garbage collector
        self._count -= 1


def keys_of_chunk(spec: ModelSpec) -> int:
    """How many objects a chunk of this model has."""
    return len(spec.own.groups) * len(spec.own.shard.peers())


class ChunkJournal:
    """For the server's loop.

    :param where: asks the pool and what lies behind it.
    :param most_bytes: what descriptions may take.

    :ivar nbytes: what they take. :ivar forgotten: descriptions that were dropped for room.
    """

    def __init__(self, where: Where, most_bytes: Callable[[], int]) -> None:
        self._where = where
        self._most_bytes = most_bytes
        # Oldest first. An engine describes a prompt's last chunk first: without the first ones it is no use.
        self._there, self._absent, self._gone = _Queue(), _Queue(), _Queue()
        self._shards: tuple[dict[bytes, _Record], ...] = tuple({} for _ in range(SHARDS))  #: all three, by digest
        self._segments: list[_Segment] = []
        self._number = 0
        self._dropped = 0  #: entries up to this number may be missing
        self.nbytes = 0
        self.forgotten = 0

    @property
    def described(self) -> int:
        """How many chunks have a description."""
        return len(self._there) + len(self._absent)

    def statistics(self) -> DescribedStatistics:
        """A snapshot."""
        return DescribedStatistics(len(self._there), len(self._absent), self.nbytes, self.forgotten)

    def describe(self, spec: ModelSpec, chunk: Described) -> Generator[None, None, None]:
        """An engine of this model has stored, stores, or has hit a chunk; in slices. :meth:`shrink` is due then.

        A digest is of one model: whoever describes it for another is not listened to.

        :param spec: with at most :data:`MOST_KEYS` objects of a chunk, see :func:`keys_of_chunk`.
        """
        own = spec.own
        shards, groups = own.shard.peers(), range(len(own.groups))
        keys, made = [], 0
        for group in groups:
            keys.append(object_keys([chunk.digest], [group], shards))
            made += len(shards)
            if made >= KEYS_AT_ONCE:
                made = 0
                yield
        record = self._record(chunk.digest)
        if record is None or record.chunk is None:
            known = record
            record = _Record(chunk.digest, spec.fingerprint, len(groups), chunk, [keys], bytes(len(groups)))
            record.objects = keys_of_chunk(spec)
            if known is not None:
                self._gone.remove(known)
                record.number, record.segment = known.number, known.segment
            self._shard(chunk.digest)[chunk.digest] = record
            self._absent.append(record)
            self.nbytes += _size(record)
        elif record.model != spec.fingerprint:
            return
        elif keys not in record.keys:
            self.nbytes -= _size(record)
            record.keys = [*record.keys, keys][-MOST_PARTITIONS:]
            record.objects = sum(len(group) for partition in record.keys for group in partition)
            self.nbytes += _size(record)
        queue = self._there if any(record.states) else self._absent
        queue.remove(record)
        queue.append(record)
        self._look(record)

    def shrink(self) -> Generator[None, None, None]:
        """Keep within the bound, in slices: due after descriptions. A bound that was lowered may drop most of them."""
        dropped = 0
        while self.nbytes > self._most_bytes() and (record := self._dispensable().first) is not None:
            self.nbytes -= _size(record)
            self.forgotten += any(record.states)
            self._forget(record)
            dropped += 1
            if dropped % READ_AT_ONCE == 0:
                yield

    def object_changed(self, key: bytes) -> None:
        """An object came, moved or went."""
        record = self._record(key[:DIGEST_BYTES])
        if record is not None and record.chunk is not None:
            self._look(record)

    def look_again(self) -> Generator[None, None, None]:
        """Much has changed at once: look at every chunk, some at a time."""
        looked = 0
        for shard in self._shards:
            for digest in list(shard):
                record = self._record(digest)
                if record is not None and record.chunk is not None:
                    self._look(record)
                    looked += max(record.objects, KEYS_AT_ONCE // READ_AT_ONCE)
                if looked >= KEYS_AT_ONCE:
                    looked = 0
                    yield

    def read(
        self, model: bytes, after: int, begun: int, most: int, most_bytes: int = MOST_READ_BYTES
    ) -> Generator[None, None, Read]:
        """What has changed of a model's chunks, in slices.

        :param after: the last number that was read; 0 = from the beginning.
        :param begun: what the read from 0 has told. A chunk that went before was never told to this reader.
        :param most: changes. :param most_bytes: of their tokens and extra keys, but for the last one's.
        """
        begun = begun if after else self._number
        if after > self._number or begun > self._number:
            return Read([], 0, True, 0, lost=True)
        changes: list[ChunkChange] = []
        upto, looked, nbytes = after, 0, 0
        while (entry := self._next(upto)) is not None and self._dropped <= max(upto, begun):
            if len(changes) >= most or nbytes >= most_bytes:
                return Read(changes, upto, True, begun)
            upto, digest = entry
            record = self._record(digest)
            if record is not None and record.number == upto and record.model == model and (after or any(record.states)):
                chunk = record.chunk if any(record.states) else None
                nbytes += len(chunk.tokens) + len(chunk.extra) if chunk is not None else 0
                changes.append(ChunkChange(digest, record.states, chunk))
            looked += 1
            if looked % READ_AT_ONCE == 0:
                yield
        if self._dropped > max(upto, begun):
            return Read([], 0, True, 0, lost=True)
        return Read(changes, self._number, False, begun)

    def _shard(self, digest: bytes) -> dict[bytes, _Record]:
        return self._shards[hash(digest) % SHARDS]

    def _record(self, digest: bytes) -> _Record | None:
        return self._shard(digest).get(digest)

    def _look(self, record: _Record) -> None:
        states = bytes(self._state(keys[group] for keys in record.keys) for group in range(record.groups))
        if states == record.states:
            return
        before, record.states = any(record.states), states
        if any(states) != before:
            left, entered = (self._there, self._absent) if before else (self._absent, self._there)
            left.remove(record)
            entered.append(record)
        self._note(record)

    def _state(self, keys_of_partitions: Iterable[Sequence[bytes]]) -> int:
        """The nearest place where some partition is whole."""
        found = [self._where(keys) for keys in keys_of_partitions]
        return ARENA if ARENA in found else max(found)

    def _note(self, record: _Record) -> None:
        """The chunk's change is the last of all."""
        if record.segment is not None:
            self._leave(record.segment)
        if not self._segments or len(self._segments[-1].entries) >= SEGMENT:
            if self._segments and not self._segments[-1].live:
                self._segments.pop()
            self._segments.append(_Segment())
        self._number += 1
        record.number, record.segment = self._number, self._segments[-1]
        record.segment.entries.append((record.number, record.digest))
        record.segment.live += 1

    def _leave(self, segment: _Segment) -> None:
        """An entry is its chunk's last no more. A segment that is nearly dead is packed, a dead one goes."""
        segment.live -= 1
        if segment is self._segments[-1]:
            return
        if not segment.live:
            self._segments.remove(segment)
        elif segment.live * 4 < len(segment.entries):
            segment.entries = [
                entry
                for entry in segment.entries
                if (record := self._record(entry[1])) is not None and record.number == entry[0]
            ]

    def _next(self, after: int) -> tuple[int, bytes] | None:
        """The first entry behind a number."""
        at = bisect.bisect_right(self._segments, after, key=lambda segment: segment.entries[0][0])
        if at:
            entries = self._segments[at - 1].entries
            place = bisect.bisect_right(entries, after, key=lambda entry: entry[0])
            if place < len(entries):
                return entries[place]
        return self._segments[at].entries[0] if at < len(self._segments) else None

    def _dispensable(self) -> _Queue:
        """What is about to be stored has a quarter of the room: without it nothing that comes would be told."""
        return self._absent if len(self._absent) * 4 > self.described else self._there or self._absent

    def _forget(self, record: _Record) -> None:
        """A description is dropped; that the chunk is gone is remembered for a while, where it was ever told."""
        was_there, record.states = any(record.states), bytes(record.groups)
        record.chunk, record.keys, record.objects = None, [], 0
        (self._there if was_there else self._absent).remove(record)
        if not record.number:
            del self._shard(record.digest)[record.digest]
            return
        self._gone.append(record)
        if was_there:
            self._note(record)
        while len(self._gone) > MAX_GONE and (oldest := self._gone.first) is not None:
            self._gone.remove(oldest)
            del self._shard(oldest.digest)[oldest.digest]
            self._dropped = max(self._dropped, oldest.number)
            if oldest.segment is not None:
                self._leave(oldest.segment)


def _size(record: _Record) -> int:
    assert record.chunk is not None
    return RECORD_BYTES + len(record.chunk.tokens) + len(record.chunk.extra) + KEY_BYTES * record.objects
