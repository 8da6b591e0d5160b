"""The contract between the server and a pool of objects.

A pool is bookkeeping: which object lies where in the arena, who reads it, who writes it. Bytes are
moved by agents (engine memory <-> arena). Keys are the 24 bytes of :func:`layerflow.keys.object_key`.
An *owner* is any hashable name of a reader or writer, e.g. ``("session", 3)`` or ``("engine", id, request)``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from layerflow.boxes import Box
from layerflow.presence import Presence
from layerflow.spec import ModelSpec, Shard

Owner = Hashable


class ReserveStatus(enum.Enum):
    """What became of one reservation."""

    RESERVED = "reserved"
    EXISTS = "exists"  # complete already: write-once, nothing to do
    BUSY = "busy"  # another writer is at it
    FULL = "full"  # no room now: everything is pinned or half-written
    TOO_LARGE = "too_large"  # larger than the pool will ever hold


class Located(NamedTuple):
    """A complete object: where its header starts in the arena, and its shape.

    :param pieces: where it was not stored itself: the boxes of the objects that cover it, see
        :meth:`layerflow.boxes.Box.of_layers`, and their offsets.
    """

    offset: int
    blocks: int
    tokens: int
    pieces: tuple[tuple[Box, int], ...] = ()


class StoredTail(NamedTuple):
    """A stored partial chunk that follows `parent`: its length in tokens and its key."""

    tokens: int
    key: bytes


class SharedChunk(NamedTuple):
    """A stored chunk, full or partial, that shares leading blocks with a prompt: see :class:`NewObject`.

    :param shared: so many. :param blocks: whole ones that the chunk has.
    """

    shared: int
    tokens: int
    key: bytes
    blocks: int


@dataclass(frozen=True, slots=True)
class NewObject:
    """What a writer wants to store.

    :param key: 24-byte object key.
    :param nbytes: header and payload.
    :param blocks: blocks in each layer.
    :param tokens: tokens of the chunk.
    :param parent: 24-byte key of what precedes a *partial* chunk (its parent's digest with the same
        group and ranks), so that a longer prompt finds the tail; ``b""`` for a full chunk.
    :param block_digests: the digest after each of the chunk's blocks, so that a prompt which parts from it in its
        middle finds it; kept with the objects of the first group and shard alone, else ``b""``.
    """

    key: bytes
    nbytes: int
    blocks: int
    tokens: int
    parent: bytes = b""
    block_digests: bytes = b""


class Reservation(NamedTuple):
    """Room for one object: `offset` of its header in the arena, valid when RESERVED."""

    outcome: ReserveStatus
    offset: int


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A snapshot. Sizes in bytes, the rest counts since start."""

    capacity_bytes: int
    warm_bytes: int
    used_bytes: int
    objects: int
    half_written: int
    pinned: int
    hits: int
    misses: int
    commits: int
    evictions: int
    evicted_bytes: int
    full: int
    revoked: int
    hidden: int


class Covering(Protocol):
    """Objects of other partitions (tensor and pipeline sizes), which may stand in for one that was never stored."""

    def overlapping_keys(self, key: bytes) -> list[bytes]:
        """Objects, complete or not, that have something of this one."""
        ...

    def sources(self, key: bytes, there: Callable[[bytes], bool]) -> list[tuple[Box, bytes]]:
        """Return, of those that can be had, some that together cover this one; none if something is missing.

        Boxes are those that keys tell, see :meth:`layerflow.boxes.Box.of_layers`.
        """
        ...


class Pool(Protocol):
    """What every backend does. `now` is monotonic seconds."""

    @property
    def presence(self) -> Presence | None:
        """Says which objects :meth:`lookup` and :meth:`tails` certainly would not find, to clients that do not ask.

        None: this backend cannot tell, and clients ask for every prompt.
        """
        ...

    def add_partition(self, spec: ModelSpec) -> None:
        """A worker of this model has attached."""
        ...

    def covering(self, spec: ModelSpec) -> Covering | None:
        """Which objects may stand in for this model's; None = it is known in one partition only."""
        ...

    def add_remote_partition(self, model: bytes, shard: Shard) -> None:
        """Workers of this partition have stored this model (its fingerprint) behind the arena, or at a peer."""
        ...

    def memory_at(self, offset: int, nbytes: int) -> memoryview:
        """The arena's bytes there, to be written by who has reserved them."""
        ...

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects are complete. Does not count as a use."""
        ...

    def tails(self, parent: bytes, most: int = ..., *, undigested: bool = False) -> Iterator[StoredTail]:
        """Complete partial chunks that follow `parent`, longest first. Nothing may change while they are taken.

        :param most: tokens that each has at most.
        :param undigested: only those whose block digests are not known; :meth:`sharing` finds the others.
        """
        ...

    def sharing(self, prompt_blocks: bytes) -> Iterator[SharedChunk]:
        """Complete chunks that share leading blocks with a prompt, those that share most first.

        Of those that share as many, the ones that end there go first. Nothing may change while they are taken.

        :param prompt_blocks: the prompt's block digests.
        """
        ...

    def acquire(
        self,
        keys: Sequence[bytes],
        owner: Owner,
        until: float,
        *,
        lease: bool = False,
        counts: Sequence[int] | None = None,
    ) -> list[Located | None]:
        """Pin complete objects against eviction until released or until `until`; None = not there.

        Counts a hit or a miss per key. All pins of an owner end together: at the latest `until` that it gave for
        something that was pinned.

        :param lease: for a hit that waits for its step. Where pins take a set share of the room already, such an
            object is told and counted, and not pinned, so that saves find room however many requests wait.
        :param counts: blocks that are wanted of each: an object that has fewer is not there.
        """
        ...

    def lease(self, keys: Sequence[bytes], owner: Owner, until: float) -> bytes:
        """As :meth:`acquire` with `lease`: a :data:`layerflow.places.PLACE` for each key, of what is pinned here."""
        ...

    def transfer_pins(self, owner: Owner, heir: Owner, until: float) -> None:
        """All pins of `owner` are `heir`'s from now on, until `until`, or longer where `heir` had some."""
        ...

    def copy_pins(self, owner: Owner, keys: Sequence[bytes], reader: Owner) -> list[Located] | None:
        """`reader` pins, without an end, what `owner` pins of these keys, hidden since or not.

        None, and nothing changes: `owner` does not pin all of them.
        """
        ...

    def hold(self, keys: Sequence[bytes], owner: Owner, until: float, *, lease: bool = False) -> int:
        """As :meth:`acquire`, for bookkeeping: counts neither a hit nor a use; what is not there is left out.

        :returns: the room, in bytes, of what the owner did not pin before.
        """
        ...

    def release(self, owner: Owner, keys: Sequence[bytes] | None = None) -> None:
        """Drop the owner's pins on `keys` (None = all of them). Unknown pins are ignored."""
        ...

    def listen_owners(self, listener: Callable[[Owner], None]) -> None:
        """Call `listener` with each owner that pins nothing any more, from now on."""
        ...

    def owners(self) -> list[Owner]:
        """Return everyone who pins something."""
        ...

    def pinned_by(self, *owners: Owner) -> int:
        """How many objects these owners pin; what several pin counts once."""
        ...

    def pinned_bytes_by(self, owner: Owner) -> int:
        """The room of what an owner pins, in bytes."""
        ...

    def unpinned(self, keys: Sequence[bytes], owner: Owner) -> list[int]:
        """Return the room, in bytes, of each complete object of these that an owner does not pin."""
        ...

    @property
    def lease_bytes(self) -> float:
        """Leases pin only while all that is pinned is within so many bytes."""
        ...

    @property
    def pinned_bytes(self) -> int:
        """The room of all that is pinned."""
        ...

    @property
    def lets_go(self) -> bool:
        """May some pins be left that were let go of?"""
        ...

    def keys(self) -> list[bytes]:
        """Every complete object."""
        ...

    def let_go(self, owner: Owner) -> None:
        """As :meth:`release` of all pins, at once however many they are: they are the owner's no more, and end in
        :meth:`expire`, or where a lease or a reservation wants what they take.
        """
        ...

    def expire(self, now: float, most: int = ...) -> int:
        """Drop pins that ran out, at most so many; how many. As many as `most`: there may be more."""
        ...

    def reserve(self, objects: Sequence[NewObject], owner: Owner) -> list[Reservation]:
        """Room for each object, evicting if needed, in ascending runs where possible. Invisible until committed."""
        ...

    def commit(self, keys: Sequence[bytes], owner: Owner) -> int:
        """Write the headers and publish; how many were the owner's to publish."""
        ...

    def revoke(self, keys: Sequence[bytes], owner: Owner) -> int:
        """Give back reservations of this owner; how many."""
        ...

    def take_reservation(self, new: NewObject, owner: Owner, by: Owner) -> int | None:
        """The room that `owner` has reserved for this object is `by`'s from now on: its offset. None: it has none."""
        ...

    def transfer_reservations(self, keys: Sequence[bytes], owner: Owner, by: Owner) -> None:
        """What `owner` has reserved for these is `by`'s from now on; keys that it has not reserved are left out."""
        ...

    def writer(self, key: bytes) -> Owner | None:
        """Return who has reserved room for an object that is not complete."""
        ...

    def room(self, key: bytes) -> Located | None:
        """Where an object that is not complete is being written."""
        ...

    def hide(self, keys: Sequence[bytes]) -> int:
        """Take complete objects out of lookup for good (their read failed); how many. Room returns once unpinned."""
        ...

    def drop_owner(self, owner: Owner) -> int:
        """The owner died: its pins and reservations are gone; how many."""
        ...

    def clear(self) -> int:
        """Hide every complete object; how many."""
        ...

    @property
    def departures(self) -> int:
        """How many complete objects have been evicted or hidden since the start."""
        ...

    def statistics(self) -> PoolStatistics:
        """A snapshot."""
        ...
