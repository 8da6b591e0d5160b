"""Which keys a server holds, readable in shared memory without asking it.

A table of buckets, 64 bytes each: seven aligned 8-byte words for tags, 0 = free, and one word that counts
the tags that found no room. A key's tag and bucket come from its own bytes. One process writes, any number
read. A tag never moves while it is there, and every entry is one word: a reader needs no lock and sees each
entry whole, or not at all. What was added before a look is always found. What was not may be found too: by another
key's tag (both 64 bits and the bucket alike), or, where a bucket has overflowed, because nobody can tell.
"""

from __future__ import annotations

import struct

from layerflow.errors import ExtentError
from layerflow.system.memfd import SharedMemory

BUCKET_BYTES = 64
MIN_BYTES = 32 << 10
MAX_BYTES = 16 << 20
OBJECT_BYTES = 64 << 10
"""The table has room for four times as many tags as a pool has objects of this size."""

_BUCKET_WORDS, _TAGS = BUCKET_BYTES // 8, 7
_KEY = struct.Struct("<QQQ")
_BUCKET = struct.Struct("@8Q")
_MASK = 2**64 - 1
_MIX = 0x9E3779B97F4A7C15
_TAILS = 0xC2B2AE3D27D4EB4F
_SPAN = 16
"""Lengths of tails that are looked for together first: a prompt may go on with any of hundreds, and few are there."""
_SPANS = 1 << 32
_BLOCK = b"\xff" * 8
"""Follows a block's digest where an object's key has the group and the ranks, which never are this."""


def place_of(key: bytes, salt: int, buckets: int) -> tuple[int, int]:
    """A key's bucket and its tag, which is never 0.

    A key is a digest, uniform already, and the ranks, which are small numbers: those are multiplied up, and
    the bucket taken from the high bits, or all ranks' objects of one chunk would share a bucket.

    :param key: 24 bytes.
    :param buckets: how many there are, a power of two.
    """
    low, high, ranks = _KEY.unpack(key)
    mixed = ranks * _MIX + salt
    return (low + mixed & _MASK) * buckets >> 64, ((high ^ mixed) & _MASK) or 1


def tail_marks(tokens: int) -> tuple[int, int, int]:
    """What a tail of so many tokens is listed as: any, one of its span, one of its length."""
    return 0, _SPANS + tokens // _SPAN, tokens


def _salt(mark: int) -> int:
    return _TAILS + mark * _MIX & _MASK


class Presence:
    """The reader's side.

    :param memory: from the server; mapped read-only.
    :raises ExtentError: it cannot be a table.
    """

    def __init__(self, memory: SharedMemory) -> None:
        buckets, rest = divmod(memory.nbytes, BUCKET_BYTES)
        if rest or buckets < 2 or buckets & (buckets - 1):
            raise ExtentError(
                f"a presence table of {memory.nbytes} bytes: it has two 64-byte buckets or another power of two"
            )
        self.memory = memory
        self._buckets = buckets
        # One word is read and written by one load or store of the machine; numpy would take ten times as long.
        self._words = memory.view.cast("Q")

    def may_hold(self, key: bytes) -> bool:
        """False: no object with this 24-byte key is complete."""
        return self._may_hold(key, 0)

    def holds(self, key: bytes) -> bool | None:
        """Whether an object with this 24-byte key is complete, as far as one sees; None: its bucket has overflowed."""
        words, tag = self._look(key, 0)
        return True if tag in words[:_TAGS] else None if words[_TAGS] else False

    def may_hold_tails(self, parent: bytes, mark: int = 0) -> bool:
        """False: no complete partial chunk with this mark (:func:`tail_marks`) follows this 24-byte key."""
        return self._may_hold(parent, _salt(mark))

    def may_hold_block(self, block: bytes) -> bool:
        """False: no complete chunk begins with a block of this 16-byte digest."""
        return self._may_hold(block + _BLOCK, 0)

    def tail_lengths(self, parent: bytes, most: int) -> list[int]:
        """Return the lengths, of 1 to `most` tokens and longest first, that partial chunks after `parent` may have."""
        lengths: list[int] = []
        last = most // _SPAN
        for mark in self._marks(parent, _SPANS, _SPANS + last):
            low = (mark - _SPANS) * _SPAN
            lengths += self._marks(parent, max(low, 1), min(low + _SPAN - 1, most))
        return lengths

    def _marks(self, parent: bytes, first: int, last: int) -> list[int]:
        """Return the marks of `first` to `last`, the last one first, for which :meth:`may_hold_tails` is true."""
        # Without numpy: each of its calls costs 10 us where nothing is in the caches; a loop is in them from its second
        # round on. Buckets and tags are those of place_of, but for a tag of 0, which stays: that says "maybe".
        unpack, table, shift = _BUCKET.unpack_from, self._words, 65 - self._buckets.bit_length()
        low, high, ranks = _KEY.unpack(parent)
        mixed = ranks * _MIX + _salt(last) & _MASK
        found = []
        for mark in range(last, first - 1, -1):
            words = unpack(table, ((low + mixed & _MASK) >> shift) * BUCKET_BYTES)
            if high ^ mixed in words or words[_TAGS]:
                found.append(mark)
            mixed = mixed - _MIX & _MASK
        return found

    def close(self) -> None:
        """Unmap; nothing may be asked any more."""
        self._words.release()
        self.memory.close()

    def _may_hold(self, key: bytes, salt: int) -> bool:
        words, tag = self._look(key, salt)
        return words[_TAGS] != 0 or tag in words

    def _look(self, key: bytes, salt: int) -> tuple[tuple[int, ...], int]:
        bucket, tag = place_of(key, salt, self._buckets)
        return _BUCKET.unpack_from(self._words, bucket * BUCKET_BYTES), tag


class PresenceWriter(Presence):
    """The one writer's side: a bag of keys. Removing takes one occurrence of what was added.

    A tag without room is only counted, and until it is removed its bucket says "maybe" to everything.

    :param pool_bytes: size of the pool whose objects are told.
    :raises Unsupported: the machine cannot give the memory.
    """

    def __init__(self, pool_bytes: int) -> None:
        wanted = min(max(pool_bytes // OBJECT_BYTES * 32, MIN_BYTES), MAX_BYTES)
        memory = SharedMemory.create(1 << (wanted - 1).bit_length(), name="layerflow-presence", readers_only=True)
        memory.populate()
        super().__init__(memory)

    def add(self, key: bytes) -> None:
        """An object is complete."""
        self._add(key, 0)

    def discard(self, key: bytes) -> None:
        """An object that was added is gone."""
        self._discard(key, 0)

    def add_tails(self, parent: bytes, mark: int = 0) -> None:
        """A first partial chunk with this mark (:func:`tail_marks`) follows `parent`."""
        self._add(parent, _salt(mark))

    def discard_tails(self, parent: bytes, mark: int = 0) -> None:
        """The last such chunk after `parent`, which was added, is gone."""
        self._discard(parent, _salt(mark))

    def add_block(self, block: bytes) -> None:
        """A first chunk begins with a block of this digest."""
        self._add(block + _BLOCK, 0)

    def discard_block(self, block: bytes) -> None:
        """The last such chunk is gone."""
        self._discard(block + _BLOCK, 0)

    def _add(self, key: bytes, salt: int) -> None:
        at, tag, words = self._bucket(key, salt)
        if 0 in words:
            self._words[at + words.index(0)] = tag
        else:
            self._words[at + _TAGS] += 1

    def _discard(self, key: bytes, salt: int) -> None:
        at, tag, words = self._bucket(key, salt)
        if tag in words:
            self._words[at + words.index(tag)] = 0
        else:
            self._words[at + _TAGS] -= 1

    def _bucket(self, key: bytes, salt: int) -> tuple[int, int, list[int]]:
        bucket, tag = place_of(key, salt, self._buckets)
        at = bucket * _BUCKET_WORDS
        return at, tag, self._words[at : at + _TAGS].tolist()
