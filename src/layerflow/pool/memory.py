"""The embedded pool: objects in the arena, their room and headers, and nothing behind it."""

from __future__ import annotations

import math
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
import structlog

from layerflow.errors import BadKey, PoolError
from layerflow.keys import KEY_BYTES, describe_key
from layerflow.objects import CHECKSUM_AT, GENERATION_AT, HEADER_BYTES, check_header, header_start, pack_header
from layerflow.places import NO_PLACE, PLACE
from layerflow.pool.base import (
    Located,
    NewObject,
    Owner,
    PoolStatistics,
    Reservation,
    ReserveStatus,
    SharedChunk,
    StoredTail,
)
from layerflow.pool.chunk_index import ANY_LENGTH
from layerflow.pool.directory import Directory, DirectoryEntry, ObjectState
from layerflow.pool.eviction import AdaptiveClock, EvictionPolicy
from layerflow.pool.slots import Slots
from layerflow.presence import Presence, PresenceWriter

# Headers of objects in the arena. Only the pool writes them, so one that is not as it wrote it was overwritten.


log = structlog.get_logger(__name__)

_NO_HEADER = bytes(HEADER_BYTES)
_LAST_GENERATION = (1 << 64) - 1
_WORDS = np.arange(CHECKSUM_AT // 8)
MANY = 48
"""So many headers are compared at once: of fewer, one by one is quicker."""


class ObjectHeaders(Protocol):
    """What marks objects in an arena; see :class:`Headers` for what each method does."""

    def write(self, entry: DirectoryEntry) -> None: ...

    def erase(self, offset: int) -> None: ...

    def erase_before(self, offset: int, room: int) -> None: ...

    def overwritten(self, entries: Sequence[DirectoryEntry]) -> list[bytes]: ...

    def are_current(self, places: bytes) -> bool: ...


class Headers:
    """The headers of one arena's objects.

    :param view: its bytes.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._words = np.frombuffer(view[: len(view) // 8 * 8], np.int64)
        # Old payload must not look like a generation by chance, nor the word that another server's host stored with a
        # header: they begin anywhere.
        self._generation = secrets.randbits(63)
        self._dirty = 0  # bytes from the start that an object may ever have covered

    def write(self, entry: DirectoryEntry) -> None:
        """The header of an object that is complete."""
        offset, blocks, tokens, _ = entry.located
        generation = self._generation = self._generation % _LAST_GENERATION + 1
        header = pack_header(
            entry.key, blocks=blocks, tokens=tokens, payload=entry.nbytes - HEADER_BYTES, generation=generation
        )
        self._view[offset : offset + HEADER_BYTES] = header
        entry.header, entry.place = header[:CHECKSUM_AT], PLACE.pack(offset, generation)

    def erase(self, offset: int) -> None:
        """No stale header verifies."""
        self._view[offset : offset + HEADER_BYTES] = _NO_HEADER

    def erase_before(self, offset: int, room: int) -> None:
        """Where an object of `room` bytes will be written, none verifies before that."""
        if offset < self._dirty:
            self._view[offset : offset + HEADER_BYTES] = _NO_HEADER
        self._dirty = max(self._dirty, offset + room)

    def overwritten(self, entries: Sequence[DirectoryEntry]) -> list[bytes]:
        """Return the keys of those of these complete objects whose header is not theirs any more."""
        if len(entries) >= MANY and self._are_all(entries):
            return []
        view = self._view
        return [
            entry.key
            for entry in entries
            if header_start(view, entry.located.offset) != entry.header and not self._intact(entry)
        ]

    def are_current(self, places: bytes) -> bool:
        """Has each of these places (:data:`layerflow.places.PLACE`) the generation that it names?

        Workers who load by a plan compare this, too. It is less, and takes less, than what :meth:`overwritten` does.
        """
        wanted = np.frombuffer(places, np.int64).reshape(-1, PLACE.size // 8)
        return bool((self._words[wanted[:, 0] + GENERATION_AT >> 3] == wanted[:, 1]).all())

    def _are_all(self, entries: Sequence[DirectoryEntry]) -> bool:
        places = np.frombuffer(b"".join([entry.place for entry in entries]), np.int64).reshape(-1, PLACE.size // 8)
        wanted = np.frombuffer(b"".join([entry.header for entry in entries]), np.int64).reshape(-1, _WORDS.size)
        return bool((self._words[(places[:, :1] >> 3) + _WORDS] == wanted).all())

    def _intact(self, entry: DirectoryEntry) -> bool:
        offset, blocks, *_ = entry.located
        try:
            check_header(self._view[offset : offset + HEADER_BYTES], entry.key, blocks)
        except PoolError as error:
            log.error("object_overwritten", key=describe_key(entry.key), offset=offset, error=str(error))
            return False
        return True


# Room in the arena: free slots, and objects that are evicted where there are none.


_TRIES = 2  # so often may victims in the policy's order free no room of a size; then they are chosen by their place


class Room:
    """That of one arena of `nbytes`.

    :ivar policy: complete objects that nobody pins, in the order in which they would go.
    """

    def __init__(
        self, nbytes: int, directory: Directory, headers: ObjectHeaders, policy: EvictionPolicy[DirectoryEntry]
    ) -> None:
        self.slots = Slots(nbytes)
        self.policy = policy
        self.evictions = self.evicted_bytes = 0
        self._directory = directory
        self._headers = headers

    def free(self, entry: DirectoryEntry) -> None:
        """The room of an object that is on no books any more."""
        self._headers.erase(entry.located.offset)
        self.slots.free(entry.located.offset)

    def admit(self, entry: DirectoryEntry) -> None:
        """A new object may be evicted from now on."""
        entry.extent.evictable += 1
        self.policy.admit(entry)

    def park(self, entries: Collection[DirectoryEntry]) -> None:
        """These may not be evicted: somebody pins them, or they are no longer there."""
        for entry in entries:
            entry.extent.evictable -= 1
        self.policy.park(entries)

    def unpark(self, entries: Collection[DirectoryEntry]) -> None:
        """These may be evicted again."""
        for entry in entries:
            entry.extent.evictable += 1
        self.policy.unpark(entries)

    def place(self, wanted: dict[int, list[int]]) -> list[tuple[int, int, int]]:
        """(index, offset, room) for what fits: runs per size if all fits, else one by one in the caller's order."""
        placed: list[tuple[int, int, int]] = []
        pending: list[int] = []
        for room, indices in wanted.items():
            offsets = self._make_room(room, len(indices), pending)
            placed += ((index, offset, room) for index, offset in zip(indices, offsets, strict=False))
            if len(offsets) < len(indices) and len(wanted) > 1:
                break
        else:
            return placed
        for offset in pending:
            self.slots.free(offset)
        pending.clear()
        in_order = sorted((index, room) for room, indices in wanted.items() for index in indices)
        return [(index, offset, room) for index, room in in_order for offset in self._make_room(room, 1, pending)]

    def _make_room(self, room: int, count: int, pending: list[int]) -> list[int]:
        """Up to `count` offsets, ascending. Evicts only where that leads to at least one more.

        :param pending: offsets of this call that are on no books yet; the new ones are added.
        """
        slots, policy = self.slots, self.policy
        offsets = slots.alloc(room, count)
        pending += offsets
        tries = _TRIES
        while (missing := count - len(offsets)) and len(policy):
            window: list[int] | None = None
            if not policy.of_size(room) or not tries:
                window = slots.window(room)
                if window is None and not policy.of_size(room):
                    break
            if window is not None and not tries:
                for offset in window:
                    entry = self._directory.at[offset]
                    self.park((entry,))
                    self._evicted(entry)
            else:
                self._evict_in_order(missing * room)
            more = slots.alloc(room, missing)
            offsets += more
            pending += more
            tries = _TRIES if more else max(tries - 1, 0)
        return sorted(offsets)

    def _evict_in_order(self, nbytes: int) -> None:
        victim = self.policy.victim
        while nbytes > 0 and (entry := victim()) is not None:
            entry.extent.evictable -= 1
            nbytes -= entry.room
            self._evicted(entry)

    def _evicted(self, entry: DirectoryEntry) -> None:
        self._directory.hide(entry)
        self.free(entry)
        self.evictions += 1
        self.evicted_bytes += entry.room


PINS_AT_ONCE = 256
"""Pins that are let go of may end together, if so many or fewer: whoever wants their room waits for that."""

_UINT32 = 1 << 32

_EXISTS = Reservation(ReserveStatus.EXISTS, -1)
_BUSY = Reservation(ReserveStatus.BUSY, -1)
_FULL = Reservation(ReserveStatus.FULL, -1)
_TOO_LARGE = Reservation(ReserveStatus.TOO_LARGE, -1)


class ArenaMemory(Protocol):
    """What the pool needs of an arena."""

    @property
    def nbytes(self) -> int: ...

    @property
    def warm_bytes(self) -> int: ...

    @property
    def view(self) -> memoryview: ...


class MemoryPool:
    """A :class:`layerflow.pool.base.Pool` in one arena. One thread, no I/O, no clock.

    Every method validates before it changes anything. Keys are 24 bytes, `until` and `now` monotonic seconds.

    :param presence: a table to tell clients with; None = they are told nothing.
    :param lease_share: leases pin only while all pins are within this share of the room.
    :param headers: of the objects; None = in the arena.
    :param policy: in which order objects go; None = CAR.
    """

    def __init__(
        self,
        arena: ArenaMemory,
        presence: PresenceWriter | None = None,
        *,
        lease_share: float = 1.0,
        headers: ObjectHeaders | None = None,
        policy: EvictionPolicy[DirectoryEntry] | None = None,
    ) -> None:
        self._lease_share = lease_share
        self._arena = arena
        self._view = arena.view
        self._headers = headers or Headers(arena.view)
        self._directory = Directory(arena.nbytes, presence)
        self._room = Room(
            arena.nbytes, self._directory, self._headers, policy if policy is not None else AdaptiveClock()
        )
        self._slots = self._room.slots
        self._policy = self._room.policy
        self._hits = self._misses = self._commits = self._full = self._revoked = self._hidden = 0

    # Reading -------------------------------------------------------------------------------------

    @property
    def presence(self) -> Presence | None:
        """The table that tells clients which objects are certainly not here; None = none is kept."""
        return self._directory.presence

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener` with the key of each object that becomes complete, or is evicted or hidden, from now on."""
        self._directory.listener = listener

    def listen_owners(self, listener: Callable[[Owner], None]) -> None:
        """Call `listener` with each owner that pins nothing any more, from now on."""
        self._directory.owner_listener = listener

    def memory_at(self, offset: int, nbytes: int) -> memoryview:
        """The arena's bytes there, to be written by who has reserved them."""
        return self._view[offset : offset + nbytes]

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects are complete. Does not count as a use."""
        return list(map(self._directory.ready.__contains__, keys))

    def keys(self) -> list[bytes]:
        """Every complete object."""
        return list(self._directory.ready)

    def tails(self, parent: bytes, most: int = ANY_LENGTH, *, undigested: bool = False) -> Iterator[StoredTail]:
        """Complete partial chunks that follow `parent`; parameters and order as of :meth:`.ChunkIndex.tails`."""
        return self._directory.chunks.tails(parent, most, undigested=undigested)

    def sharing(self, prompt_blocks: bytes) -> Iterator[SharedChunk]:
        """Complete chunks that share leading blocks with a prompt; order as of :meth:`.ChunkIndex.sharing`."""
        return self._directory.chunks.sharing(prompt_blocks)

    def acquire(
        self,
        keys: Sequence[bytes],
        owner: Owner,
        until: float,
        *,
        lease: bool = False,
        counts: Sequence[int] | None = None,
    ) -> list[Located | None]:
        """Pin complete objects until released or until `until`; None = not there. Counts a hit or miss per key.

        An object whose header was overwritten (by an engine that wrote where it must not) is hidden instead.

        :param counts: blocks that are wanted of each: an object that has fewer is not there.
        """
        found = self._directory.find(keys)
        if counts is not None:
            found = [
                entry if entry is not None and entry.located.blocks >= count else None
                for entry, count in zip(found, counts, strict=True)
            ]
        there = [entry for entry in found if entry is not None]
        if overwritten := self._headers.overwritten(there):
            self.hide(overwritten)
            return MemoryPool.acquire(self, keys, owner, until, lease=lease, counts=counts)
        self._pin(there, owner, until, lease)
        if not lease:
            self._misses += len(found) - len(there)
        return [None if entry is None else entry.located for entry in found]

    def lease(self, keys: Sequence[bytes], owner: Owner, until: float) -> bytes:
        """As :meth:`acquire` with `lease`: a :data:`layerflow.places.PLACE` for each key, of what is pinned here."""
        while True:
            found = self._directory.find(keys)
            there = [entry for entry in found if entry is not None]
            places = b"".join([entry.place for entry in there])
            if self._headers.are_current(places) or not (overwritten := self._headers.overwritten(there)):
                break
            self.hide(overwritten)
        self._pin(there, owner, until, lease=True)
        mine = self._directory.pinned_by(owner)
        if all(map(mine.__contains__, found)):
            return places
        return b"".join([entry.place if entry is not None and entry in mine else NO_PLACE for entry in found])

    def _pin(self, there: Sequence[DirectoryEntry], owner: Owner, until: float, lease: bool) -> None:
        """Pin these, as far as leases may, and count."""
        fresh, first = self._directory.pin(there, owner, until, self._most(lease, there))
        self._room.park(first)
        self._policy.use(fresh)
        self._hits += len(there)

    def hold(self, keys: Sequence[bytes], owner: Owner, until: float, *, lease: bool = False) -> int:
        """Pin complete objects without counting a hit or a use; what is not there is left out.

        :returns: the room, in bytes, of what the owner did not pin before.
        """
        there = [entry for entry in self._directory.find(keys) if entry is not None]
        fresh, first = self._directory.pin(there, owner, until, self._most(lease, there))
        self._room.park(first)
        return sum([entry.room for entry in fresh])

    def transfer_pins(self, owner: Owner, heir: Owner, until: float) -> None:
        """All pins of `owner` are `heir`'s from now on, until `until`, or longer where `heir` had some."""
        self._directory.transfer_pins(owner, heir, until)

    def copy_pins(self, owner: Owner, keys: Sequence[bytes], reader: Owner) -> list[Located] | None:
        """`reader` pins, without an end, what `owner` pins of these keys, hidden since or not; None: not all of them.

        It counts neither a hit nor a use: looking up has.
        """
        return self._directory.copy_pins(owner, keys, reader)

    def release(self, owner: Owner, keys: Sequence[bytes] | None = None) -> None:
        """Drop the owner's pins on `keys` (None = all of them). Unknown pins are ignored."""
        self._release_idle(self._directory.unpin(owner, keys))

    def owners(self) -> list[Owner]:
        """Return everyone who pins something."""
        return self._directory.owners()

    def pinned_by(self, *owners: Owner) -> int:
        """How many objects these owners pin; what several pin counts once."""
        pins = [mine for owner in owners if (mine := self._directory.pinned_by(owner))]
        return len(pins[0] if len(pins) == 1 else set().union(*pins))

    def pinned_bytes_by(self, owner: Owner) -> int:
        """The room of what an owner pins, in bytes."""
        return sum([entry.room for entry in self._directory.pinned_by(owner)])

    def unpinned(self, keys: Sequence[bytes], owner: Owner) -> list[int]:
        """Return the room, in bytes, of each complete object of these that an owner does not pin."""
        mine = self._directory.pinned_by(owner)
        return [entry.room for entry in self._directory.find(keys) if entry is not None and entry not in mine]

    @property
    def lease_bytes(self) -> float:
        """Leases pin only while all that is pinned is within so many bytes."""
        return self._lease_share * self._slots.capacity_bytes

    @property
    def pinned_bytes(self) -> int:
        """The room of all that is pinned."""
        return self._directory.pinned_bytes

    @property
    def lets_go(self) -> bool:
        """May some pins be left that were let go of?"""
        return self._directory.lets_go

    def let_go(self, owner: Owner) -> None:
        """The owner's pins are its no more, and end in :meth:`expire`, however early it is told, or for their room."""
        self._directory.let_go(owner)

    def expire(self, now: float, most: int = sys.maxsize) -> int:
        """Drop pins that ran out at or before `now`, at most so many; how many."""
        dropped, idle = self._directory.expire(now, most)
        self._release_idle(idle)
        return dropped

    # Writing -------------------------------------------------------------------------------------

    def reserve(self, objects: Sequence[NewObject], owner: Owner) -> list[Reservation]:
        """Room for each object, evicting if needed; one outcome per object, in order.

        Where room is short, earlier objects get it. A key listed twice is BUSY the second time.

        :raises BadKey: a key or parent is not 24 bytes long; nothing was reserved.
        :raises PoolError: an object has an impossible size; nothing was reserved.
        """
        ready, writing, slots = self._directory.ready, self._directory.writing, self._slots
        results: list[Reservation | None] = []
        wanted: dict[int, list[int]] = {}
        claimed: set[bytes] = set()
        for index, new in enumerate(objects):
            key = new.key
            if (
                len(key) != KEY_BYTES
                or (new.parent and len(new.parent) != KEY_BYTES)
                or new.nbytes < HEADER_BYTES
                or not 0 < new.blocks < _UINT32
                or not 0 < new.tokens < _UINT32
            ):
                raise _impossible(new)
            if key in ready:
                results.append(_EXISTS)
            elif key in writing:
                results.append(_BUSY)
            elif new.nbytes > slots.capacity_bytes:
                results.append(_TOO_LARGE)
            else:
                results.append(None)
                if key not in claimed:
                    claimed.add(key)
                    wanted.setdefault(slots.stride(new.nbytes), []).append(index)
        if wanted:
            self._end_let_go(len(claimed))
        for index, offset, room in self._room.place(wanted):
            self._directory.reserve(DirectoryEntry(objects[index], self._slots.extent_at(offset), offset, room, owner))
            self._headers.erase_before(offset, room)
            results[index] = Reservation(ReserveStatus.RESERVED, offset)
        final = [
            result or (_BUSY if new.key in writing else _FULL) for result, new in zip(results, objects, strict=True)
        ]
        self._full += final.count(_FULL)
        return final

    def commit(self, keys: Sequence[bytes], owner: Owner) -> int:
        """Write the headers and publish; how many were the owner's to publish."""
        published: list[DirectoryEntry] = []
        for key in keys:
            entry = self._directory.owned(key, owner)
            if entry is None:
                continue
            self._headers.write(entry)
            self._directory.publish(entry)
            published.append(entry)
        for entry in reversed(published):  # a prompt's last chunks go first: without the first ones they are no use
            self._room.admit(entry)
        self._commits += len(published)
        return len(published)

    def revoke(self, keys: Sequence[bytes], owner: Owner) -> int:
        """Give back reservations of this owner; how many."""
        mine = [entry for key in dict.fromkeys(keys) if (entry := self._directory.owned(key, owner)) is not None]
        return self._revoke_reservations(mine)

    def take_reservation(self, new: NewObject, owner: Owner, by: Owner) -> int | None:
        """The room that `owner` has reserved for this object is `by`'s from now on: its offset. None: it has none.

        Of another size or shape than it was reserved for, it has none either.
        """
        entry = self._directory.owned(new.key, owner)
        if entry is None or (entry.nbytes, *entry.located[1:3]) != (new.nbytes, new.blocks, new.tokens):
            return None
        entry.parent, entry.block_digests = new.parent, new.block_digests
        self._directory.take_reservation(entry, by)
        return entry.located.offset

    def transfer_reservations(self, keys: Sequence[bytes], owner: Owner, by: Owner) -> None:
        """What `owner` has reserved for these is `by`'s from now on; keys that it has not reserved are left out."""
        for key in keys:
            entry = self._directory.owned(key, owner)
            if entry is not None:
                self._directory.take_reservation(entry, by)

    def writer(self, key: bytes) -> Owner | None:
        """Return who has reserved room for an object that is not complete."""
        entry = self._directory.writing.get(key)
        return entry.writer if entry is not None else None

    def room(self, key: bytes) -> Located | None:
        """Where an object that is not complete is being written."""
        entry = self._directory.writing.get(key)
        return entry.located if entry is not None else None

    # Leaving -------------------------------------------------------------------------------------

    def hide(self, keys: Sequence[bytes]) -> int:
        """Take complete objects out of lookup for good; how many. Room returns once unpinned."""
        hidden = 0
        for key in keys:
            entry = self._directory.ready.get(key)
            if entry is None:
                continue
            hidden += 1
            if not entry.readers:
                self._room.park((entry,))
                self._room.free(entry)
            self._directory.hide(entry)
        self._hidden += hidden
        return hidden

    def clear(self) -> int:
        """Hide every complete object; how many."""
        return self.hide(list(self._directory.ready))

    def drop_owner(self, owner: Owner) -> int:
        """The owner died: its pins and reservations are gone; how many.

        Only for an owner that can write no more: its half-written room is handed out again.
        """
        pins = len(self._directory.pinned_by(owner))
        self._release_idle(self._directory.unpin(owner, None))
        return pins + self._revoke_reservations(self._directory.reserved_by(owner))

    # Looking -------------------------------------------------------------------------------------

    @property
    def departures(self) -> int:
        """How many complete objects have been evicted or hidden since the start."""
        return self._room.evictions + self._hidden

    def statistics(self) -> PoolStatistics:
        """A snapshot. `used_bytes` counts whole slots; `pinned` counts hidden objects that are still read."""
        directory = self._directory
        return PoolStatistics(
            capacity_bytes=self._slots.capacity_bytes,
            warm_bytes=self._arena.warm_bytes,
            used_bytes=self._slots.used_bytes,
            objects=len(directory.ready),
            half_written=len(directory.writing),
            pinned=directory.pinned,
            hits=self._hits,
            misses=self._misses,
            commits=self._commits,
            evictions=self._room.evictions,
            evicted_bytes=self._room.evicted_bytes,
            full=self._full,
            revoked=self._revoked,
            hidden=self._hidden,
        )

    def validate(self) -> None:
        """Check every invariant, for tests. O(objects).

        :raises PoolError: naming the one that does not hold.
        """
        self._slots.validate()
        self._directory.validate()
        self._policy.validate()
        if sum(entry.room for _, entry in self._directory.at.items()) != self._slots.used_bytes:
            raise PoolError("the room of all objects is not the room in use")
        end = 0
        for offset, entry in sorted(self._directory.at.items()):
            if offset < end or entry.nbytes > entry.room or offset + entry.room > self._arena.nbytes:
                raise PoolError(f"object {entry.key.hex()} at {offset} overlaps one that ends at {end}, or the end")
            end = offset + entry.room
        if len(self._policy) != sum(not entry.readers for entry in self._directory.ready.values()):
            raise PoolError("eviction considers other objects than the complete unpinned ones")
        if any(self._slots.extent_at(offset) is not entry.extent for offset, entry in self._directory.at.items()):
            raise PoolError("an object's extent is not the one that it lies in")
        evictable = Counter(entry.extent for entry in self._directory.ready.values() if not entry.readers)
        if any(extent.evictable != evictable[extent] for extent in self._slots.extents()):
            raise PoolError("the objects of an extent that may be evicted are miscounted")

    def _revoke_reservations(self, entries: list[DirectoryEntry]) -> int:
        for entry in entries:
            self._directory.remove_reservation(entry)
            self._room.free(entry)
        self._revoked += len(entries)
        return len(entries)

    def _release_idle(self, idle: list[DirectoryEntry]) -> None:
        """Let objects that lost their last pin be evicted, and drop those of them that are hidden."""
        stored = idle
        if self._directory.hides:
            stored = [entry for entry in idle if entry.state is not ObjectState.HIDDEN]
        self._room.unpark(stored)
        if len(stored) < len(idle):
            for entry in idle:
                if entry.state is ObjectState.HIDDEN:
                    self._directory.forget(entry)
                    self._room.free(entry)

    def _most(self, lease: bool, there: Sequence[DirectoryEntry]) -> float:
        """Bytes that all pins may take where these are to be pinned; pins that are let go of end first for a lease."""
        if not lease:
            return math.inf
        most, directory = self.lease_bytes, self._directory
        if directory.lets_go and directory.pinned_bytes + sum([e.room for e in there if not e.readers]) > most:
            self._end_let_go(len(there))
        return most

    def _end_let_go(self, wanted: int) -> None:
        """So many pins that are let go of end, or a few more: they take no room from so many objects."""
        if self._directory.lets_go:
            self.expire(-math.inf, max(wanted, PINS_AT_ONCE))


def _impossible(new: NewObject) -> BadKey | PoolError:
    if len(new.key) != KEY_BYTES or (new.parent and len(new.parent) != KEY_BYTES):
        return BadKey(f"object key {new.key.hex()} after {new.parent.hex() or 'nothing'}: keys are {KEY_BYTES} bytes")
    return PoolError(
        f"object {new.key.hex()} of {new.nbytes} bytes, {new.blocks} blocks, {new.tokens} tokens: it needs a "
        f"{HEADER_BYTES}-byte header and at least one block and token"
    )
