"""What an exporter may read for whom: the leases that its server has lent, and the reads of them that are under way."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from layerflow.errors import PoolError
from layerflow.objects import HEADER_BYTES, check_header
from layerflow.wire.host_messages import Extend, Lend, split_keys
from layerflow.wire.packing import list_u32, list_u64
from layerflow.wire.peer_link import GONE, NOT_YET, OUTSIDE, READ, TAG_BYTES, TAG_NONCE_BYTES, TAIL

# Tags of what crosses a link, from the bytes that the exporter has read to those that lie in the importer's memory.
#
# AES-256-GMAC: where the processor has carry-less multiplication it is as quick as a checksum without a key.


_RANGE = struct.Struct("<16s24sQQ")
"""Token of the lease, the object's key, first byte within the object, bytes."""
MAX_RANGE_BYTES = (1 << 31) - 1
"""That one tag can cover."""


class RangeSeal:
    """Tags ranges of objects under the key of one lease. Any thread.

    A tag covers the lease, the object, the range and the bytes: a range that was altered, cut, or put in the place of
    another has no tag that fits. The same range again does fit: its bytes never change.

    :param lease_key: 32 bytes, which reached the reader over the control connection.
    """

    def __init__(self, lease_key: bytes, token: bytes) -> None:
        self._cipher, self._token = AESGCM(lease_key), token

    def tag(self, key: bytes, start: int, data: memoryview) -> bytes:
        """Nonce and code.

        :param key: of the object. :param start: where `data` begins within it.
        """
        nonce = os.urandom(TAG_NONCE_BYTES)
        return nonce + self._code(nonce, key, start, data)

    def fits(self, tag: bytes, key: bytes, start: int, data: memoryview) -> bool:
        """Are these the bytes for which the other end has made `tag`?"""
        return hmac.compare_digest(tag[TAG_NONCE_BYTES:], self._code(tag[:TAG_NONCE_BYTES], key, start, data))

    def _code(self, nonce: bytes, key: bytes, start: int, data: memoryview) -> bytes:
        # What is small is encrypted, so that what is large needs no copy to stand behind it: GCM's code covers both.
        covered = _RANGE.pack(self._token, key, start, data.nbytes)
        return bytes(self._cipher.encrypt(nonce, covered, data)[_RANGE.size :])


LEND_S = 1.0
"""A reader may be quicker than its owner's word to the exporter: so long a request waits for that, whatever it asks.
The reader gives a link up on which nothing comes for twice as long (``STALL_S``)."""


@dataclass(slots=True, eq=False)
class LentObject:
    """One object of a lease, as :class:`.host_messages.Lend` tells of it. `stored` grows under the lock of
    :class:`Grants`."""

    key: bytes
    offset: int
    nbytes: int
    blocks: int
    stored: int


@dataclass(slots=True, eq=False)
class ReadGrant:
    """One lease. Fields change under the lock of :class:`Grants`.

    :param objects: by their positions in the lease; of what was asked for and is not lent there is none.
    :param seal: tags what is read of it.
    :param reading: the connections that read it now.
    """

    lease: int
    token: bytes
    objects: dict[int, LentObject]
    seal: RangeSeal
    withdrawn: bool = False
    reading: list[socket.socket] = field(default_factory=list)

    def tag(self, item: tuple[int, int, int], data: memoryview) -> bytes:
        """The tag of an item whose bytes are `data`."""
        position, start, _ = item
        return self.seal.tag(self.objects[position].key, start, data)

    def tail(self, read: Callable[[int, int], bytes], item: tuple[int, int, int], tag: bytes) -> bytes:
        """What is said of an item behind its bytes: whether they count, with their tag where they do.

        Its bytes have been tagged and copied: if they may be read now, they were the object's all the while.
        """
        position, status = item[0], self.check(read, *item)
        return TAIL.pack(position, status, tag if status == READ else bytes(TAG_BYTES))

    def check(self, read: Callable[[int, int], bytes], position: int, start: int, length: int) -> int:
        """Whether these bytes of an object may be read, and are its own: a status of :mod:`layerflow.wire.peer_link`.

        :param read: so many bytes of the arena.
        """
        if self.withdrawn:
            return GONE
        lent = self.objects.get(position)
        if lent is None or not 0 < length <= MAX_RANGE_BYTES or start + length > lent.nbytes:
            return OUTSIDE
        if start + length > lent.stored:
            return NOT_YET
        if lent.blocks:
            # The pool wipes the header of a place that it gives to another object, before that is written there.
            header = read(lent.offset, HEADER_BYTES)
            try:
                check_header(header, lent.key, lent.blocks)
            except PoolError:
                return GONE
        return READ


class Grants:
    """All leases of one exporter. Thread-safe.

    :param withdrawn: told a lease once nothing of it is read any more; any thread.
    :param arena_bytes: no lease leaves them.
    """

    def __init__(self, withdrawn: Callable[[int], None], arena_bytes: int) -> None:
        self._withdrawn = withdrawn
        self._arena_bytes = arena_bytes
        self._by_token: dict[bytes, ReadGrant] = {}
        self._by_lease: dict[int, ReadGrant] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._by_lease)

    def lend(self, message: Lend) -> None:
        """A new lease.

        :raises PoolError: its lists do not fit together, or it leaves the arena.
        """
        columns = (
            split_keys(message.keys),
            list_u64(message.offsets),
            list_u64(message.nbytes),
            list_u32(message.blocks),
            list_u64(message.stored),
        )
        positions = list_u32(message.positions)
        if {len(column) for column in columns} != {len(positions)}:
            raise PoolError(f"lease {message.lease}: lists of different lengths")
        objects = dict(zip(positions, map(LentObject, *columns), strict=True))
        if any(lent.offset + lent.nbytes > self._arena_bytes for lent in objects.values()):
            raise PoolError(f"lease {message.lease}: an object leaves the arena")
        seal = RangeSeal(message.lease_key, message.token)
        grant = ReadGrant(message.lease, message.token, objects, seal)
        with self._changed:
            self._by_token[grant.token] = self._by_lease[grant.lease] = grant
            self._changed.notify_all()

    def extend(self, message: Extend) -> None:
        """More of some objects is stored."""
        with self._changed:
            grant = self._by_lease.get(message.lease)
            if grant is not None:
                pairs = zip(list_u32(message.positions), list_u64(message.stored), strict=True)
                for position, stored in pairs:
                    lent = grant.objects[position]
                    lent.stored = max(lent.stored, stored)
                self._changed.notify_all()

    def wait(self, grant: ReadGrant, position: int, end: int, until: float) -> None:
        """A reader may have heard of a layer before its owner's word came here: wait for that.

        :param until: on the monotonic clock.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: grant.withdrawn or grant.objects[position].stored >= end, max(0.0, until - time.monotonic())
            )

    def withdraw(self, lease: int) -> None:
        """Nothing of it is read any more: what reads it now is hung up on."""
        with self._changed:
            grant = self._by_lease.pop(lease, None)
            if grant is not None:
                del self._by_token[grant.token]
                grant.withdrawn = True
                self._changed.notify_all()
                for connection in grant.reading:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                if grant.reading:
                    return  # the last of them tells
        self._withdrawn(lease)

    @contextlib.contextmanager
    def read(self, token: bytes, connection: socket.socket, until: float) -> Iterator[ReadGrant | None]:
        """Around the reads of one request; None = there is no such lease, nor was one lent until then."""
        with self._changed:
            self._changed.wait_for(lambda: token in self._by_token, max(0.0, until - time.monotonic()))
            grant = self._by_token.get(token)
            if grant is not None:
                grant.reading.append(connection)
        try:
            yield grant
        finally:
            if grant is not None:
                with self._changed:
                    grant.reading.remove(connection)
                    last = grant.withdrawn and not grant.reading
                if last:
                    self._withdrawn(grant.lease)
