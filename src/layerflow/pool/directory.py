"""Which object lies where, who writes it, who reads it. Pure bookkeeping; time is an argument.

An entry is *writing* (its writer's alone, invisible), then *ready* (visible, write-once), and may become
*hidden* (invisible for good; its room stays while a reader pins it). A key has at most one entry that is
writing or ready; hidden entries of the same key may linger beside it.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from layerflow.errors import PoolError
from layerflow.keys import DIGEST_BYTES
from layerflow.pool.base import Child, Located, NewObject, Owner, Tail
from layerflow.pool.eviction import Item
from layerflow.pool.sharing import SharedBlocks
from layerflow.presence import PresenceWriter, tail_marks

_COMPACT_OVER = 4096  # pins listed in the expiry heap beyond four times those alive


class ObjectState(enum.Enum):
    WRITING = "writing"
    READY = "ready"
    HIDDEN = "hidden"


class DirectoryEntry(Item):
    """One object's place and state."""

    __slots__ = ("block_digests", "located", "nbytes", "parent", "pins", "state", "writer")

    def __init__(self, new: NewObject, offset: int, room: int, writer: Owner) -> None:
        super().__init__(new.key, room)
        self.located = Located(offset, new.blocks, new.tokens)
        self.nbytes = new.nbytes
        self.parent = new.parent
        self.block_digests = new.block_digests
        self.pins: dict[Owner, float] = {}  #: reader -> when its pin runs out
        self.state = ObjectState.WRITING
        self.writer = writer


class Directory:
    """All entries, by key, by offset, by owner. Methods that unpin return what nobody pins any more.

    :param presence: kept in step: it holds exactly the keys of ready entries, and the parents that have tails.
    """

    def __init__(self, presence: PresenceWriter | None = None) -> None:
        self.presence = presence
        self.ready: dict[bytes, DirectoryEntry] = {}
        self.writing: dict[bytes, DirectoryEntry] = {}
        self.at: dict[int, DirectoryEntry] = {}
        self.pinned = 0  #: entries with a pin, hidden ones included
        self._hidden: dict[bytes, dict[DirectoryEntry, None]] = {}
        self._tails: dict[bytes, dict[DirectoryEntry, None]] = {}
        self._tail_counts: Counter[tuple[bytes, int]] = Counter()  # by parent and mark, see tail_marks
        self._shared = SharedBlocks()
        self._pins: dict[Owner, dict[DirectoryEntry, None]] = {}
        self._reserved: dict[Owner, dict[DirectoryEntry, None]] = {}
        self._due: list[tuple[float, int, Owner, list[DirectoryEntry]]] = []
        self._due_pins = 0
        self._live_pins = 0
        self._serial = 0

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
        if entry.block_digests:
            only = self._shared.add(Child(entry.located.tokens, entry.key, entry.block_digests))
            if presence is not None and only:
                presence.add_block(entry.block_digests[:DIGEST_BYTES])
        if entry.parent:
            self._tails.setdefault(entry.parent, {})[entry] = None
            for mark in tail_marks(entry.located.tokens):
                self._tail_counts[entry.parent, mark] += 1
                if presence is not None and self._tail_counts[entry.parent, mark] == 1:
                    presence.add_tails(entry.parent, mark)

    def withdraw(self, entry: DirectoryEntry) -> None:
        """A half-written entry goes."""
        self._end_reservation(entry)
        del self.at[entry.located.offset]

    def reserved_by(self, writer: Owner) -> list[DirectoryEntry]:
        """What `writer` has half-written."""
        return list(self._reserved.get(writer, ()))

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
        if entry.pins:
            self._hidden.setdefault(entry.key, {})[entry] = None
        else:
            del self.at[entry.located.offset]

    def forget(self, entry: DirectoryEntry) -> None:
        """A hidden entry that lost its last pin goes."""
        same_key = self._hidden[entry.key]
        del same_key[entry]
        if not same_key:
            del self._hidden[entry.key]
        del self.at[entry.located.offset]

    def _unlist(self, entry: DirectoryEntry) -> None:
        del self.ready[entry.key]
        presence = self.presence
        if presence is not None:
            presence.discard(entry.key)
        if entry.block_digests:
            last = self._shared.discard(entry.key)
            if presence is not None and last:
                presence.discard_block(entry.block_digests[:DIGEST_BYTES])
        if entry.parent:
            siblings = self._tails[entry.parent]
            del siblings[entry]
            if not siblings:
                del self._tails[entry.parent]
            for mark in tail_marks(entry.located.tokens):
                self._tail_counts[entry.parent, mark] -= 1
                if not self._tail_counts[entry.parent, mark]:
                    del self._tail_counts[entry.parent, mark]
                    if presence is not None:
                        presence.discard_tails(entry.parent, mark)

    def tails(self, parent: bytes) -> list[Tail]:
        """Ready partial chunks after `parent`, longest first; ties by key."""
        found = [Tail(entry.located.tokens, entry.key) for entry in self._tails.get(parent, ())]
        return sorted(found, key=lambda tail: (-tail.tokens, tail.key))

    def sharing(self, block: bytes) -> Iterator[Child]:
        """Ready chunks whose first block has this digest, newest first."""
        return self._shared.sharing(block)

    # Pins ----------------------------------------------------------------------------------------

    def pin(
        self, keys: Sequence[bytes], owner: Owner, until: float
    ) -> tuple[list[Located | None], list[DirectoryEntry], list[DirectoryEntry]]:
        """Pin what is ready, or extend the owner's pin.

        :returns: places in the order of `keys` (None = not there), the entries that `owner` newly pinned, and
            those of them that nobody had pinned before.
        """
        ready, mine = self.ready, self._pins.get(owner, {})
        places: list[Located | None] = []
        timed: list[DirectoryEntry] = []
        fresh: list[DirectoryEntry] = []
        first: list[DirectoryEntry] = []
        for key in keys:
            entry = ready.get(key)
            if entry is None:
                places.append(None)
                continue
            places.append(entry.located)
            pins = entry.pins
            before = pins.get(owner)
            if before is None:
                fresh.append(entry)
                if not pins:
                    first.append(entry)
                mine[entry] = None
            elif before >= until:
                continue
            pins[owner] = until
            timed.append(entry)
        if fresh:
            self._pins[owner] = mine
            self.pinned += len(first)
            self._live_pins += len(fresh)
        if timed and until < math.inf:
            self._serial += 1
            heapq.heappush(self._due, (until, self._serial, owner, timed))
            self._due_pins += len(timed)
            self._compact()
        return places, fresh, first

    def unpin(self, owner: Owner, keys: Iterable[bytes] | None) -> list[DirectoryEntry]:
        """Drop the owner's pins on `keys` (None = all); the entries now unpinned, newest pin first."""
        mine = self._pins.get(owner)
        if mine is None:
            return []
        if keys is None:
            chosen = list(mine)
        else:
            chosen = []
            for key in keys:
                entry = self.ready.get(key)
                if entry is not None and entry in mine:
                    chosen.append(entry)
                chosen.extend(entry for entry in self._hidden.get(key, ()) if entry in mine)
        return self._drop(owner, dict.fromkeys(reversed(chosen)))

    def pins_of(self, owner: Owner) -> int:
        """How many entries `owner` pins."""
        return len(self._pins.get(owner, ()))

    def expire(self, now: float) -> tuple[int, list[DirectoryEntry]]:
        """Drop pins that run out at or before `now`: how many, and the entries now unpinned."""
        dropped, idle = 0, []
        while self._due and self._due[0][0] <= now:
            _, _, owner, entries = heapq.heappop(self._due)
            self._due_pins -= len(entries)
            overdue = dict.fromkeys(e for e in reversed(entries) if e.pins.get(owner, math.inf) <= now)
            dropped += len(overdue)
            idle += self._drop(owner, overdue)
        return dropped, idle

    def owners(self) -> list[Owner]:
        """Who pins something."""
        return list(self._pins)

    def held(self) -> Iterator[int]:
        """Offsets of everything that must stay: half-written or pinned (with repeats)."""
        for entry in self.writing.values():
            yield entry.located.offset
        for mine in self._pins.values():
            for entry in mine:
                yield entry.located.offset

    def _drop(self, owner: Owner, entries: Iterable[DirectoryEntry]) -> list[DirectoryEntry]:
        idle: list[DirectoryEntry] = []
        mine = self._pins.get(owner, {})
        for entry in entries:
            del mine[entry]
            del entry.pins[owner]
            self._live_pins -= 1
            if not entry.pins:
                idle.append(entry)
        if not mine:
            self._pins.pop(owner, None)
        self.pinned -= len(idle)
        return idle

    def _compact(self) -> None:
        """Released pins stay listed until they would have run out; drop them once they are the bulk."""
        if self._due_pins <= 4 * self._live_pins + _COMPACT_OVER:
            return
        kept = [
            (until, serial, owner, [entry for entry in entries if entry.pins.get(owner) == until])
            for until, serial, owner, entries in self._due
        ]
        self._due = [item for item in kept if item[3]]
        heapq.heapify(self._due)
        self._due_pins = sum(len(item[3]) for item in self._due)

    def validate(self) -> None:
        """:raises PoolError: the indexes disagree."""
        hidden = [entry for entries in self._hidden.values() for entry in entries]
        everything = [*self.ready.values(), *self.writing.values(), *hidden]
        if {entry.located.offset: entry for entry in everything} != self.at or len(everything) != len(self.at):
            raise PoolError("the index by offset differs from the entries")
        if self.ready.keys() & self.writing.keys():
            raise PoolError("a key is ready and being written at once")
        pins = {(owner, entry) for owner, mine in self._pins.items() for entry in mine}
        if pins != {(owner, entry) for entry in everything for owner in entry.pins} or len(pins) != self._live_pins:
            raise PoolError("pins by owner differ from pins by entry")
        if self.pinned != sum(bool(entry.pins) for entry in everything) or not all(entry.pins for entry in hidden):
            raise PoolError("pinned entries are miscounted, or a hidden one without readers lingers")
        timed = {(owner, entry, until) for until, _, owner, entries in self._due for entry in entries}
        if any(
            until < math.inf and (owner, entry, until) not in timed
            for entry in everything
            for owner, until in entry.pins.items()
        ):
            raise PoolError("a pin that runs out is not in the expiry heap")
        if {e for mine in self._reserved.values() for e in mine} != set(self.writing.values()):
            raise PoolError("reservations by owner differ from the half-written entries")
        if {e for mine in self._tails.values() for e in mine} != {e for e in self.ready.values() if e.parent}:
            raise PoolError("the tails differ from the ready partial chunks")
        shared = {key: block for block, mine in self._shared.by_block.items() for key in mine}
        if shared != {e.key: e.block_digests[:DIGEST_BYTES] for e in self.ready.values() if e.block_digests}:
            raise PoolError("the chunks by first block differ from the ready ones")
        if self.presence is not None and not (
            all(map(self.presence.may_hold_block, self._shared.by_block))
            and all(map(self.presence.may_hold, self.ready))
            and all(self.presence.may_hold_tails(parent, mark) for parent, mark in self._tail_counts)
        ):
            raise PoolError("the presence table lacks a ready object, or a parent that has tails")
        for state, entries in ((ObjectState.READY, self.ready.values()), (ObjectState.WRITING, self.writing.values())):
            if any(entry.state is not state for entry in entries):
                raise PoolError(f"an entry listed as {state.value} is in another state")
