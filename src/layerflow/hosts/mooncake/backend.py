"""A Mooncake store behind the arena: one object a chunk, its layers as ranges of put and get sessions.

Needs a package with sessions (0.3.13). How many calls reach the master does not depend on the number of
layers: a write is a start and an end, a fetch a start and a look at the sizes, for all objects of a job.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from layerflow.hosts.backend import (
    OK,
    BackendError,
    BackendInfo,
    ObjectLocation,
    ObjectResult,
    ObjectStatus,
    Unreachable,
    pool_name,
)
from layerflow.hosts.mooncake.client import (
    EXISTS,
    INVALID,
    NOT_FOUND,
    NOT_IN_MEMORY,
    NOT_OURS,
    Master,
    MooncakeClient,
    MooncakeOptions,
    Warming,
    added,
    connect,
    explain,
    mapped,
    moved,
    opening,
    reading,
    writing,
)
from layerflow.hosts.shared.service import Service
from layerflow.hosts.shared.store import OTHER_SIZE, OpenRead, OpenWrite, SharedStore, StoreReader, StoreWriter
from layerflow.objects import HEADER_BYTES, stored_header
from layerflow.system.memfd import SharedMemory

# Reading from Mooncake: get sessions. Opening asks the master once for all objects; layers then ask it nothing.


_NO_SIZE = ObjectResult(ObjectStatus.FAILED, "Mooncake's master did not say how large it is")


class MooncakeReader(StoreReader):
    """The fetch thread's. The library knows one session by an object's name, however many jobs read the object.

    :ivar offloads: a client of the store moves objects to a disk of its own. Then that an object is there does not mean
        that it is in memory, and a session reads from memory only.
    """

    def __init__(self, calls: MooncakeClient, master: Service) -> None:
        super().__init__(calls, master)
        self._calls = calls
        self._open: dict[bytes, OpenRead] = {}
        self.offloads = False

    def _lease(self, places: Sequence[ObjectLocation], generation: int) -> list[ObjectResult]:
        names = [pool_name(place.key) for place in places]
        codes = self._calls.codes("batch_get_session_start", names)
        self.offloads = self.offloads or NOT_IN_MEMORY in codes
        results = [reading(code) for code in codes]
        started = [at for at, result in enumerate(results) if result is OK]
        refused = [names[at] for at in started if places[at].key not in self._open]
        try:
            sizes = self._sizes([names[at] for at in started])
            refused = []
            for at in started:
                place, name = places[at], names[at]
                if sizes.get(name) != {place.nbytes}:
                    results[at] = OTHER_SIZE if name in sizes else _NO_SIZE
                    if place.key not in self._open:
                        refused.append(name)
                else:
                    opened = self._open.setdefault(place.key, OpenRead(generation))
                    opened.generation = generation  # the library's session was replaced, for earlier readers too
                    opened.readers += 1
        finally:
            if refused:
                self._calls("batch_get_session_end", refused)
        return results

    def in_memory(self, names: list[str]) -> set[str]:
        """Return keys of which a copy is in the memory of some client. Any thread.

        :raises Unreachable: the master does not answer.
        """
        return {name for name, sizes in self._sizes(names).items() if sizes}

    def forget(self) -> None:
        """See :meth:`StoreReader.forget`."""
        super().forget()
        self._open.clear()

    def _opened(self, place: ObjectLocation) -> OpenRead | None:
        return self._open.get(place.key)

    def _copy(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        spans = [(place.start(lo) if lo else 0, place.start(hi)) for place in places]
        codes = self._calls.codes(
            "batch_get_into_multi_buffer_ranges",
            [pool_name(place.key) for place in places],
            [[place.address + start] for place, (start, _) in zip(places, spans, strict=True)],
            [[stop - start] for start, stop in spans],
            [[start] for start, _ in spans],
        )
        return [reading(moved(code, stop - start)) for code, (start, stop) in zip(codes, spans, strict=True)]

    def _unlease(self, places: Sequence[ObjectLocation]) -> None:
        """End the sessions of objects that nobody else reads; the master is not asked."""
        ended: list[str] = []
        for place in places:
            opened = self._open.get(place.key)
            if opened is None:
                continue
            opened.readers -= 1
            if not opened.readers:
                del self._open[place.key]
                ended.append(pool_name(place.key))
        if ended:
            self._calls("batch_get_session_end", ended)

    def _sizes(self, names: list[str]) -> dict[str, set[int]]:
        """Bytes of each object, as its copies in memory have it; one call."""
        copies = self._calls("batch_get_replica_desc", names) if names else {}
        self.offloads = self.offloads or any(each.is_local_disk_replica() for some in copies.values() for each in some)
        return {
            name: {each.get_memory_descriptor().buffer_descriptor.size for each in some if each.is_memory_replica()}
            for name, some in copies.items()
        }


# Writing to Mooncake: put sessions. An object is visible when its session has ended well, and not before.
#
# The library publishes whatever part of an object was written, so the layers are counted by :class:`StoreWriter`.


SESSION_S = 300.0
"""A session older than this writes no more: after `put_start_release_timeout_sec` (by default 600) the master
gives its room to others, and writes into it would still succeed."""
QUARANTINE_S = 60.0
"""So long the room of a write that failed under way stays taken: what hangs at its owner may still land there."""

_LANDING = ObjectResult(ObjectStatus.FAILED, "an earlier write of it failed under way, and may still be landing")


class HeaderRoom:
    """Memory that headers are put from as they are stored; the write thread's. What of it may still be landing after a
    call that failed lands in the rooms of writes that are given up."""

    SLOTS = 64

    def __init__(self) -> None:
        self.nbytes = self.SLOTS * HEADER_BYTES
        self._memory = mmap.mmap(-1, self.nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def fill(self, headers: Iterable[bytes]) -> list[int]:
        """Put up to :data:`SLOTS` headers in, over those before; the address of each."""
        addresses = []
        for at, header in enumerate(headers):
            self._memory[at * HEADER_BYTES : (at + 1) * HEADER_BYTES] = header
            addresses.append(self.address + at * HEADER_BYTES)
        return addresses


class MooncakeWriter(StoreWriter):
    """The write thread's.

    :ivar replicate: the library's ``ReplicateConfig``.
    """

    def __init__(self, calls: MooncakeClient, master: Service) -> None:
        super().__init__(calls, master)
        self._calls = calls
        self.replicate: Any = None
        self.headers = HeaderRoom()
        self._landing: dict[bytes, float] = {}  # until when their room stays taken

    def forget(self) -> None:
        """See :meth:`StoreWriter.forget`."""
        super().forget()
        self._landing.clear()

    def check(self, place: ObjectLocation, layers: int | None = None) -> ObjectResult:
        """See :meth:`StoreWriter.check`."""
        return _LANDING if place.key in self._landing else super().check(place, layers)

    def _allocate(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        self._free_landed()
        results = [_LANDING] * len(places)
        generation, free = (
            self._service.reach(),
            [at for at, place in enumerate(places) if place.key not in self._landing],
        )
        now = time.monotonic()
        for at, code in zip(free, self._start([places[at] for at in free]), strict=True):
            results[at] = opening(code)
            if code == 0:
                self._open[places[at].key] = OpenWrite(places[at].offset, generation, now + SESSION_S)
        return results

    def _copy(
        self, places: Sequence[ObjectLocation], spans: Sequence[tuple[int, int]], until: float
    ) -> list[ObjectResult]:
        return self._put_ranges(
            places, spans, [place.address + start for place, (start, _) in zip(places, spans, strict=True)]
        )

    def _copy_headers(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """From a room of their own: a range is one request to the owner, and two of each header cost twice the time."""
        assert self.arena is not None
        results: list[ObjectResult] = []
        for first in range(0, len(places), HeaderRoom.SLOTS):
            batch = places[first : first + HeaderRoom.SLOTS]
            addresses = self.headers.fill(stored_header(self.arena.view, place.offset) for place in batch)
            results += self._put_ranges(batch, [(0, HEADER_BYTES)] * len(batch), addresses)
        return results

    def _put_ranges(
        self, places: Sequence[ObjectLocation], spans: Sequence[tuple[int, int]], addresses: Sequence[int]
    ) -> list[ObjectResult]:
        """Copy bytes `spans[i]` of `places[i]` from `addresses[i]`."""
        codes = self._calls.codes(
            "batch_put_from_multi_buffer_ranges",
            [pool_name(place.key) for place in places],
            [[address] for address in addresses],
            [[stop - start] for start, stop in spans],
            [[start] for start, _ in spans],
        )
        codes = [moved(code, stop - start) for code, (start, stop) in zip(codes, spans, strict=True)]
        quarantined = time.monotonic() + QUARANTINE_S
        self._landing |= {place.key: quarantined for place, code in zip(places, codes, strict=True) if code != 0}
        return [writing(code) for code in codes]

    def _publish(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        codes = self._calls.codes("batch_put_session_end", [pool_name(place.key) for place in places])
        if taken := codes.count(NOT_OURS):
            self._calls.count("sessions_taken_over", taken)
        return [writing(code) for code in codes]

    def _give_back(self, ended: dict[bytes, OpenWrite]) -> None:
        """What may still be landing keeps its room for a while."""
        self._revoke([key for key in ended if key not in self._landing])

    def _start(self, places: Sequence[ObjectLocation]) -> list[int]:
        if not places:
            return []
        names, sizes = [pool_name(place.key) for place in places], [place.nbytes for place in places]
        codes = self._calls.codes("batch_put_session_start", names, sizes, self.replicate)
        # The library keeps a session whose end the master refused or did not hear, and starts no other one of its name.
        left = [at for at, code in enumerate(codes) if code == INVALID]
        if left:
            revoked = self._calls.codes("batch_put_session_revoke", [names[at] for at in left])
            for at, code in zip(left, revoked, strict=True):
                codes[at] = EXISTS if code == NOT_OURS else code
            left = [at for at in left if codes[at] == 0]
        if left:
            again = self._calls.codes(
                "batch_put_session_start", [names[at] for at in left], [sizes[at] for at in left], self.replicate
            )
            for at, code in zip(left, again, strict=True):
                codes[at] = code
        return codes

    def _free_landed(self) -> None:
        now = time.monotonic()
        landed = [key for key, until in self._landing.items() if until <= now]
        for key in landed:
            del self._landing[key]
        try:
            self._revoke(landed)
        except Unreachable:
            self._calls.count("failed_revokes", len(landed))

    def _revoke(self, keys: Sequence[bytes]) -> None:
        # Without the master there is nothing to give back; what the library keeps is revoked where it is in the way.
        if keys and self._service.generation:
            self._calls.codes("batch_put_session_revoke", [pool_name(key) for key in keys])


# Objects whose bytes were found broken: removed from the store, but never under another node's lease.
#
# With `force` the master removes at once, and gives the memory to other objects while another node still reads it under
# a lease. Without, it refuses as long as anyone has a lease; looking an object up takes one. So a client that found an
# object broken asks for it no more, and tries to remove it until it succeeds.


_MANY = 4096


class PendingRemovals:
    """Keys to be removed. Any thread.

    :param calls: of the client.
    """

    def __init__(self, calls: MooncakeClient) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[bytes]) -> None:
        """Remove these, now or once their leases have run out. Past a few thousand the oldest are forgotten."""
        with self._lock:
            self._keys |= dict.fromkeys(keys)
            for key in list(self._keys)[: max(0, len(self._keys) - _MANY)]:
                del self._keys[key]
        self.remove()

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget the removal of keys that were written anew."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def remove(self) -> None:
        """Try again. What the master does not answer for stays condemned."""
        keys = list(self._keys)
        if not keys:
            return
        try:
            codes = self._calls.codes("batch_remove", [pool_name(key) for key in keys], False)
        except Unreachable:
            return
        self.discard(key for key, code in zip(keys, codes, strict=True) if code in (0, NOT_FOUND))

    def forget(self) -> None:
        """The store is another."""
        with self._lock:
            self._keys.clear()


_COUNTED = ("full_retries", "expired_leases", "failed_calls", "failed_revokes", "sessions_taken_over")


class Mooncake(SharedStore[MooncakeClient, MooncakeReader, MooncakeWriter]):
    """A client of a store; with a segment, also one of those who give it memory.

    :param options: of ``[pool.mooncake]``; see :class:`MooncakeOptions`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = MooncakeOptions.read(options)
        master = Master(self._options.master, self._options.metrics)
        calls = MooncakeClient(master)
        super().__init__(
            "Mooncake",
            calls,
            master,
            reader=MooncakeReader(calls, master),
            writer=MooncakeWriter(calls, master),
            counted=_COUNTED,
        )
        self._condemned = PendingRemovals(self._calls)
        self._warming: Warming | None = None

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        self._start_over()
        before = mapped()
        client = connect(self._options, self._service)
        self._use(client.store, arena)
        self._writer.replicate = client.replicate
        segment = self._options.segment_size
        if segment and self._options.warm:
            self._warming = Warming(added(before, mapped(), segment), segment)
        return BackendInfo(
            {
                "version": client.version,
                "master": self._options.master,
                "client": client.name,
                "protocol": self._options.protocol,
                "segment_bytes": segment,
                "replicas": self._options.replicas,
            }
        )

    def check(self) -> None:
        self._service.check()
        self._condemned.remove()

    def statistics(self) -> dict[str, float]:
        figures = super().statistics()
        figures["segment_bytes"] = self._options.segment_size
        figures["segment_warm_bytes"] = self._warming.warm_bytes if self._warming else 0
        figures["masters_lost"] = self._service.lost
        return figures

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        if not keys:
            return []
        self._service.reach()
        names = [pool_name(key) for key in keys]
        # Asking for one that is to be removed would lease it again.
        asked = [name for name, key in zip(names, keys, strict=True) if key not in self._condemned]
        codes = self._calls.codes("batch_is_exist", asked) if asked else []
        there = {name for name, code in zip(asked, codes, strict=True) if code == 1}
        if there and self._reader.offloads:
            there &= self._reader.in_memory([name for name in asked if name in there])
        return [name in there for name in names]

    def hide(self, keys: Sequence[bytes]) -> None:
        """Hide keys, which are removed once no lease keeps them."""
        self._condemned.add(keys)

    def clear(self, keys: Sequence[bytes], until: float) -> int:
        """Everything of layerflow's in the store, whichever server wrote it; by force, which bypasses leases.

        A node that is reading finds by its checksum that the bytes are no longer those of its object.
        """
        if not self._service.generation:
            raise Unreachable("the Mooncake master does not answer; purge again when it is back")
        removed = int(self._calls("remove_by_regex", f"^{pool_name(b'')}.*", True))
        if removed < 0:
            raise BackendError(f"the Mooncake master removed nothing: {explain(removed)}")
        return removed

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        results = super().commit(places, until)
        self._condemned.discard(place.key for place, result in zip(places, results, strict=True) if result is OK)
        return results

    def _register(self, arena: SharedMemory) -> str:
        for memory in (arena, self._writer.headers):
            code = self._calls("register_buffer", memory.address, memory.nbytes)
            if code != 0:
                return explain(code)
        return ""

    def _leave(self) -> bool:
        if self._warming is not None:
            self._warming.stop()
            self._warming = None
        self._condemned.forget()
        return super()._leave()
