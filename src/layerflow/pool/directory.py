"""Which object lies where, who writes it, who reads it. Pure bookkeeping; time is an argument.

An entry is *writing* (its writer's alone, invisible), then *ready* (visible, write-once), and may become
*hidden* (invisible for good; its room stays while a reader pins it). A key has at most one entry that is
writing or ready; hidden entries of the same key may linger beside it.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, islice

from layerflow.errors import PoolError
from layerflow.expiring import ExpiryHeap
from layerflow.keys import DIGEST_BYTES
from layerflow.places import NO_PLACE
from layerflow.pool.base import Located, NewObject, Owner
from layerflow.pool.chunk_index import ChunkIndex
from layerflow.pool.eviction import Evictable
from layerflow.pool.slots import ByOffset, Extent
from layerflow.presence import PresenceWriter, tail_marks


class ObjectState(enum.Enum):
    WRITING = "writing"
    READY = "ready"
    HIDDEN = "hidden"


class DirectoryEntry(Evictable):
    """One object's place and state.

    :param extent: that it lies in.
    :ivar header: what its header began with when it was published.
    :ivar place: its offset and generation, as plans have them.
    """

    __slots__ = (
        "block_digests",
        "extent",
        "header",
        "located",
        "nbytes",
        "parent",
        "place",
        "readers",
        "state",
        "writer",
    )

    def __init__(self, new: NewObject, extent: Extent, offset: int, room: int, writer: Owner) -> None:
        super().__init__(new.key, room)
        self.extent = extent
        self.located = Located(offset, new.blocks, new.tokens)
        self.nbytes = new.nbytes
        self.parent = new.parent
        self.block_digests = new.block_digests
        self.header = b""
        self.place = NO_PLACE
        self.readers = 0  #: owners that pin it
        self.state = ObjectState.WRITING
        self.writer = writer


class Directory:
    """All entries, by key, by offset, by owner. Methods that unpin return what nobody pins any more.

    :param nbytes: of the arena.
    :param presence: kept in step: it holds exactly the keys of ready entries, and the parents that have tails.
    """

    def __init__(self, nbytes: int, presence: PresenceWriter | None = None) -> None:
        self.presence = presence
        self.listener: Callable[[bytes], None] | None = None  #: hears the key of what became ready, or is no more
        self.ready: dict[bytes, DirectoryEntry] = {}
        self.writing: dict[bytes, DirectoryEntry] = {}
        self.at: ByOffset[DirectoryEntry] = ByOffset(nbytes)
        self.pinned = 0  #: entries with a pin, hidden ones included
        self.pinned_bytes = 0  #: their room
        self._hidden: dict[bytes, dict[DirectoryEntry, None]] = {}
        self.chunks = ChunkIndex()  #: of ready entries
        self._tail_counts: Counter[tuple[bytes, int]] = Counter()  # by parent and mark, see tail_marks
        #: What each owner pins: a lease is an owner, however many objects it holds.
        self._pins: dict[Owner, dict[DirectoryEntry, None]] = {}
        self._ends: ExpiryHeap[Owner] = ExpiryHeap()  #: of exactly the owners in `_pins`
        self.owner_listener: Callable[[Owner], None] | None = None  #: hears of each owner that pins nothing any more
        self._let_go = count()  #: numbers those whose pins are over
        self._reserved: dict[Owner, dict[DirectoryEntry, None]] = {}

    # Writing -------------------------------------------------------------------------------------

    def reserve(self, entry: DirectoryEntry) -> None:
        """A new half-written entry; its key is neither ready nor being written."""
        self.writing[entry.key] = entry
        self.at[entry.located.offset] = entry
        self._reserved.setdefault(entry.writer, {})[entry] = None

    def owned(self, key: bytes, writer: Owner) -> DirectoryEntry | None:
        """The half-written entry of `key` if `writer` is writing it."""
        entry = self.writing.get(key)
        return entry if entry is not None and entry.writer == writer else None

    def publish(self, entry: DirectoryEntry) -> None:
        """Half-written to ready."""
        self._end_reservation(entry)
        entry.state = ObjectState.READY
        self.ready[entry.key] = entry
        presence = self.presence
        if presence is not None:
            presence.add(entry.key)
        if self.listener is not None:
            self.listener(entry.key)
        if not (entry.parent or entry.block_digests):
            return
        block = entry.block_digests[:DIGEST_BYTES]
        if presence is not None and block and not self.chunks.begins(block):
            presence.add_block(block)
        self.chunks.add(entry.key, entry.located.tokens, entry.parent, entry.block_digests)
        if entry.parent:
            for mark in tail_marks(entry.located.tokens):
                self._tail_counts[entry.parent, mark] += 1
                if presence is not None and self._tail_counts[entry.parent, mark] == 1:
                    presence.add_tails(entry.parent, mark)

    def remove_reservation(self, entry: DirectoryEntry) -> None:
        """A half-written entry goes."""
        self._end_reservation(entry)
        self.at.pop(entry.located.offset)

    def reserved_by(self, writer: Owner) -> list[DirectoryEntry]:
        """What `writer` has half-written."""
        return list(self._reserved.get(writer, ()))

    def take_reservation(self, entry: DirectoryEntry, by: Owner) -> None:
        """Another writer takes a half-written entry over."""
        self._end_reservation(entry)
        entry.writer = by
        self.reserve(entry)

    def _end_reservation(self, entry: DirectoryEntry) -> None:
        del self.writing[entry.key]
        mine = self._reserved[entry.writer]
        del mine[entry]
        if not mine:
            del self._reserved[entry.writer]

    # Leaving -------------------------------------------------------------------------------------

    def hide(self, entry: DirectoryEntry) -> None:
        """A ready entry becomes invisible; where nobody pins it, it is gone."""
        self._unlist(entry)
        entry.state = ObjectState.HIDDEN
        if entry.readers:
            self._hidden.setdefault(entry.key, {})[entry] = None
        else:
            self.at.pop(entry.located.offset)

    def forget(self, entry: DirectoryEntry) -> None:
        """A hidden entry that lost its last pin goes."""
        same_key = self._hidden[entry.key]
        del same_key[entry]
        if not same_key:
            del self._hidden[entry.key]
        self.at.pop(entry.located.offset)

    def _unlist(self, entry: DirectoryEntry) -> None:
        del self.ready[entry.key]
        presence = self.presence
        if presence is not None:
            presence.discard(entry.key)
        if self.listener is not None:
            self.listener(entry.key)
        if not (entry.parent or entry.block_digests):
            return
        self.chunks.discard(entry.key, entry.located.tokens, entry.parent, entry.block_digests)
        block = entry.block_digests[:DIGEST_BYTES]
        if presence is not None and block and not self.chunks.begins(block):
            presence.discard_block(block)
        if entry.parent:
            for mark in tail_marks(entry.located.tokens):
                self._tail_counts[entry.parent, mark] -= 1
                if not self._tail_counts[entry.parent, mark]:
                    del self._tail_counts[entry.parent, mark]
                    if presence is not None:
                        presence.discard_tails(entry.parent, mark)

    @property
    def hides(self) -> bool:
        """Is any object hidden?"""
        return bool(self._hidden)

    # Pins ----------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[DirectoryEntry | None]:
        """The ready entry of each key; None = there is none."""
        return list(map(self.ready.get, keys))

    def pin(
        self, there: Sequence[DirectoryEntry], owner: Owner, until: float, most: float = math.inf
    ) -> tuple[list[DirectoryEntry], list[DirectoryEntry]]:
        """Pin ready entries. All pins of an owner end together, at the latest end that it asked for.

        :param most: bytes pinned by all owners; what would go beyond is not pinned.
        :returns: the entries that `owner` newly pinned, and those of them that nobody had pinned before.
        """
        mine = self._pins.get(owner, {})
        before = len(mine)
        # A dict keeps its order, and what is in it already stays where it is: the new ones are the last.
        within = self._within(most, there)
        mine.update(dict.fromkeys(within))
        fresh = list(islice(mine, before, None))
        first = [entry for entry in fresh if not entry.readers]
        for entry in fresh:
            entry.readers += 1
        self.pinned += len(first)
        self.pinned_bytes += sum([entry.room for entry in first])
        if within:
            self._pins[owner] = mine
            if until > self._ends.until(owner):
                self._ends.set(owner, until)
        return fresh, first

    def copy_pins(self, owner: Owner, keys: Sequence[bytes], reader: Owner) -> list[Located] | None:
        """`reader` pins, without an end, what `owner` pins of these keys; None, and nothing changes: not all of them.

        What was hidden since `owner` pinned it is where it was.
        """
        theirs = self._pins.get(owner)
        if theirs is None:
            return None
        entries: list[DirectoryEntry] = []
        for key in keys:
            entry = self.ready.get(key)
            if entry is None or entry not in theirs:
                entry = next((hidden for hidden in self._hidden.get(key, ()) if hidden in theirs), None)
                if entry is None:
                    return None
            entries.append(entry)
        self.pin(entries, reader, math.inf)
        return [entry.located for entry in entries]

    def transfer_pins(self, owner: Owner, heir: Owner, until: float) -> None:
        """All pins of `owner` are `heir`'s from now on, until `until`, or longer where `heir` had some."""
        pins = self._pins.pop(owner, None)
        if pins is None:
            return
        self._ends.discard(owner)
        if self.owner_listener is not None:
            self.owner_listener(owner)
        mine = self._pins.setdefault(heir, pins)  # as they are, where the heir has none: a lookup's, at its end
        if mine is not pins:
            for entry in pins:
                if entry in mine:
                    entry.readers -= 1
                else:
                    mine[entry] = None
        self._ends.set(heir, max(until, self._ends.until(heir)))

    def unpin(self, owner: Owner, keys: Iterable[bytes] | None) -> list[DirectoryEntry]:
        """Drop the owner's pins on `keys` (None = all); the entries now unpinned, newest pin first."""
        mine = self._pins.get(owner)
        if mine is None:
            return []
        if keys is None:
            return self._drop(owner, list(reversed(mine)))
        chosen = []
        for key in keys:
            entry = self.ready.get(key)
            if entry is not None and entry in mine:
                chosen.append(entry)
            chosen.extend(entry for entry in self._hidden.get(key, ()) if entry in mine)
        return self._drop(owner, list(dict.fromkeys(reversed(chosen))))

    def pinned_by(self, owner: Owner) -> Collection[DirectoryEntry]:
        """What `owner` pins."""
        return self._pins.get(owner, ())

    def let_go(self, owner: Owner) -> None:
        """The owner's pins are its no more; :meth:`expire` drops them. However many they are, this is done at once."""
        self.transfer_pins(owner, ("let_go", next(self._let_go)), -math.inf)

    @property
    def lets_go(self) -> bool:
        """May some pins be nobody's, and still there?"""
        return self._ends.due(-math.inf)

    def expire(self, now: float, most: int = sys.maxsize) -> tuple[int, list[DirectoryEntry]]:
        """Drop pins that run out at or before `now`, `most` at a time: how many, and the entries now unpinned."""
        dropped, idle = 0, []
        for owner in self._ends.expire(now):
            pins = self._pins[owner]
            left = most - dropped
            if len(pins) <= left:
                dropped += len(pins)
                idle += self._drop(owner, list(reversed(pins)))
            else:
                dropped += left
                idle += self._unread([pins.popitem()[0] for _ in range(left)])  # the newest, as above
                self._ends.set(owner, -math.inf)  # the rest is over, too, unless its owner prolongs it
            if dropped >= most:
                break
        return dropped, idle

    def owners(self) -> list[Owner]:
        """Return everyone who pins something."""
        return list(self._pins)

    def _drop(self, owner: Owner, entries: list[DirectoryEntry]) -> list[DirectoryEntry]:
        mine = self._pins[owner]
        if len(entries) == len(mine):
            del self._pins[owner]
            self._ends.discard(owner)
        else:
            for entry in entries:
                del mine[entry]
        idle = self._unread(entries)
        if owner not in self._pins and self.owner_listener is not None:
            self.owner_listener(owner)
        return idle

    def _unread(self, entries: list[DirectoryEntry]) -> list[DirectoryEntry]:
        """An owner pins these no more; those that nobody pins any more."""
        for entry in entries:
            entry.readers -= 1
        idle = [entry for entry in entries if not entry.readers]
        self.pinned -= len(idle)
        self.pinned_bytes -= sum([entry.room for entry in idle])
        return idle

    def _within(self, most: float, entries: Sequence[DirectoryEntry]) -> Sequence[DirectoryEntry]:
        """Return those that can be pinned while pins stay within `most` bytes: what is pinned already costs nothing."""
        left = most - self.pinned_bytes
        if left >= sum([entry.room for entry in entries]):
            return entries
        within = []
        for entry in dict.fromkeys(entries):
            if not entry.readers:
                if entry.room > left:
                    continue
                left -= entry.room
            within.append(entry)
        return within

    def validate(self) -> None:
        """:raises PoolError: the indexes disagree."""
        hidden = [entry for entries in self._hidden.values() for entry in entries]
        everything = [*self.ready.values(), *self.writing.values(), *hidden]
        if {entry.located.offset: entry for entry in everything} != dict(self.at.items()) or len(everything) != len(
            self.at
        ):
            raise PoolError("the index by offset differs from the entries")
        if self.ready.keys() & self.writing.keys():
            raise PoolError("a key is ready and being written at once")
        readers = Counter(entry for pins in self._pins.values() for entry in pins)
        if dict(readers) != {entry: entry.readers for entry in everything if entry.readers}:
            raise PoolError("pins by owner differ from the readers of the entries")
        if not all(self._pins.values()):
            raise PoolError("an owner without pins lingers")
        if self.pinned_bytes != sum(entry.room for entry in readers):
            raise PoolError("the room of pinned entries is miscounted")
        if self.pinned != len(readers) or not all(entry.readers for entry in hidden):
            raise PoolError("pinned entries are miscounted, or a hidden one without readers lingers")
        if set(self._ends) != self._pins.keys() or not self._ends.complete():
            raise PoolError("the owners that have an end differ from those that pin something")
        if {e for mine in self._reserved.values() for e in mine} != set(self.writing.values()):
            raise PoolError("reservations by owner differ from the half-written entries")
        self.chunks.validate()
        if sorted(self.chunks.tail_keys()) != sorted(e.key for e in self.ready.values() if e.parent):
            raise PoolError("the tails differ from the ready partial chunks")
        blocks = self.chunks.first_blocks()
        if blocks != {e.key: e.block_digests[:DIGEST_BYTES] for e in self.ready.values() if e.block_digests}:
            raise PoolError("the chunks by first block differ from the ready ones")
        if self.presence is not None and not (
            all(map(self.presence.may_hold_block, blocks.values()))
            and all(map(self.presence.may_hold, self.ready))
            and all(self.presence.may_hold_tails(parent, mark) for parent, mark in self._tail_counts)
        ):
            raise PoolError("the presence table lacks a ready object, or a parent that has tails")
        for state, entries in ((ObjectState.READY, self.ready.values()), (ObjectState.WRITING, self.writing.values())):
            if any(entry.state is not state for entry in entries):
                raise PoolError(f"an entry listed as {state.value} is in another state")
