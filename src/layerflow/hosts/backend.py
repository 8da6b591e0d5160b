"""The contract of a backend: a pool behind the arena, as its host process sees it.

A backend moves objects between the arena and its pool. It may block, spin and crash: it lives in a
child process, and killing that process is the fence. Its methods are called from four threads of the
host (*ask*, *fetch*, *write*, *check*, named with each method), never twice at once from one of them; so
`check` and `statistics` may run beside a lookup. All are batched, and each object has its own
:class:`ObjectResult`: one bad object never spoils the others.

`until` is a moment on the monotonic clock. A method returns by then, with what is not done as FAILED;
only a hung native call may take longer, and then the server kills the process.
"""

from __future__ import annotations

import abc
import enum
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerflow.errors import ExtentError, ProtocolError
from layerflow.keys import KEY_BYTES
from layerflow.objects import HEADER_BYTES, LAYOUT_VERSION
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Evicted, Indexed, Objects, ToServer, Up, split_keys
from layerflow.wire.packing import list_u32, list_u64, pack_u32


class BackendError(Exception):
    """Something about a whole backend, not about one object. The message says what to do."""


class Unreachable(BackendError):
    """It does not answer now; the host tries again."""


class Unusable(BackendError):
    """It cannot work as it is configured or installed; trying again would not help."""


def pool_name(key: bytes) -> str:
    """What an object is called in a pool that names objects by text; says the layout's version, for people too."""
    return f"layerflow{LAYOUT_VERSION}-{key.hex()}"


class ObjectStatus(enum.IntEnum):
    """What became of one object in one call. Numbers cross the socket to the server."""

    OK = 0
    EXISTS = 1  # writing: complete already, or another writer is at it; nothing to do, nothing was changed
    FULL = 2  # writing: no room before `until`
    TOO_LARGE = 3  # writing: larger than the pool will ever hold
    MISSING = 4  # reading: not there, or not complete
    EXPIRED = 5  # reading: the pool's own lease ran out before the last byte came
    BROKEN = 6  # reading: its bytes are not those of the object (header or checksum)
    FAILED = 7  # anything else


class ObjectResult(NamedTuple):
    """An outcome, and for all but OK what happened, in a few words."""

    outcome: ObjectStatus
    reason: str = ""


OK = ObjectResult(ObjectStatus.OK)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectLocation:
    """One object of a job: its key, and where it lies (or shall lie) in this process's mapping of the arena.

    The object is ``header (64 bytes) | layer 0 | layer 1 | ...``, all layers of equal size
    (:mod:`layerflow.objects`).

    :param key: 24 bytes.
    :param offset: of the header in the arena, in bytes.
    :param address: of the header in this process.
    :param layer_bytes: bytes of one layer.
    :param layers: how many.
    :param blocks: blocks in each layer; in the header.
    :param tokens: tokens of the chunk; 0 where the reader does not know.
    :param parent: 24-byte key of what precedes a partial chunk; ``b""`` for a full one.
    :param block_digests: the digest after each of the chunk's blocks, kept with some objects; a backend with an index
        of its own keeps them too.
    :param origin: where the objects of this job lie at a peer; empty = at the backend. :param position: among them.
    """

    key: bytes
    offset: int
    address: int
    layer_bytes: int
    layers: int
    blocks: int
    tokens: int = 0
    parent: bytes = b""
    block_digests: bytes = b""
    origin: bytes = b""
    position: int = 0

    @property
    def nbytes(self) -> int:
        """Header and payload."""
        return HEADER_BYTES + self.layers * self.layer_bytes

    def start(self, layer: int) -> int:
        """Where `layer` begins within the object, in bytes."""
        return HEADER_BYTES + layer * self.layer_bytes


class IndexEntry(NamedTuple):
    """An object that a backend with an index of its own holds."""

    key: bytes
    blocks: int
    tokens: int
    parent: bytes
    block_digests: bytes = b""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a backend says of itself once it is connected.

    :param details: for people: version, address, sizes; JSON-ready, shown by ``layerflow status``.
    :param index: the objects it holds, where nobody else can add to it; None = others share it, ask. What it finds
        later, and what leaves it, it tells, also while it cannot be reached; see :meth:`Backend.report_found`.
    """

    details: dict[str, str | int | float | bool]
    index: Sequence[IndexEntry] | None = None


class Backend(abc.ABC):
    """One pool behind the arena. Made in the host process, from its section of the configuration.

    Nothing native is imported before :meth:`attach`.
    """

    def report_found(self, found: Callable[[Sequence[IndexEntry]], None]) -> None:  # noqa: B027 - most have no index
        """Once, before :meth:`attach`. A backend that has an index and takes long to read it tells `found` of objects
        as it learns of them, before it tells that any of these is gone; any thread. Others ignore it.
        """

    @abc.abstractmethod
    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        """Connect, and register the arena (once, whole). Before any other call; after an error, again. Main thread.

        :param gone: to be told keys that have left a backend with an index (its own eviction); any thread.
        :raises Unreachable: no answer (yet).
        :raises Unusable: wrong version, bad option, missing library: with what to do.
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Is the pool alive? Called about twice a second, also while lookups and transfers run. *check* thread.

        :raises Unreachable: no. Calls that are under way may still block until their own time-outs.
        :raises Unusable: and a new process would be needed, or nothing would help: the host exits.
        """

    @abc.abstractmethod
    def statistics(self) -> dict[str, float]:
        """Counters and gauges for metrics, by snake_case name with unit. After each :meth:`check`; *check* thread."""

    # Looking ----------------------------------------------------------------- ask thread

    @abc.abstractmethod
    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        """Which objects are complete. An object whose state cannot be learnt is False.

        :raises Unreachable: nothing can be learnt.
        """

    @abc.abstractmethod
    def hide(self, keys: Sequence[bytes]) -> None:
        """Remove complete objects whose bytes were found broken, as far as that can be done."""

    def clear(self, keys: Sequence[bytes], until: float) -> int:
        """Remove every object of layerflow that is complete; how many are gone.

        This removes `keys`, what the server knows of: for a pool that cannot tell what it holds.

        :raises BackendError: some are left; the message says which.
        """
        self.hide(keys)
        raise BackendError(f"asked to remove the {len(keys)} objects that this server knew of; it cannot list others")

    # Reading --------------------------------------------------------------- fetch thread

    @abc.abstractmethod
    def open_fetch(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Make objects readable: leases and whatever else it takes, in a fixed number of calls.

        What is OK is closed later with :meth:`close_fetch`; nothing else is. MISSING also where the size differs.
        """

    @abc.abstractmethod
    def fetch(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        """Copy layers `lo` to `hi` (exclusive) of opened objects into the arena, and the header before layer 0.

        The caller compares headers. OK means that these bytes are those of the object: what a checksum or
        a lease contradicts is BROKEN or EXPIRED, and never was OK.
        """

    @abc.abstractmethod
    def close_fetch(self, places: Sequence[ObjectLocation]) -> None:
        """Give back what :meth:`open_fetch` took. Never raises; unknown ones are ignored."""

    # Writing --------------------------------------------------------------- write thread

    @abc.abstractmethod
    def open_write(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Room for new objects, invisible to everybody. A full pool that can evict is tried again until `until`.

        What is OK ends with :meth:`commit` or :meth:`revoke`; EXISTS and the others end here. After an exception all of
        them are revoked.
        """

    @abc.abstractmethod
    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        """Copy layers `lo` to `hi` (exclusive) of opened objects out of the arena. Each layer once, in order."""

    @abc.abstractmethod
    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Every layer is written: add the header (it lies in the arena now) and publish.

        What fails here is not visible, or complete all the same. After an exception all of them are revoked.
        """

    @abc.abstractmethod
    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        """Opened objects that will not be finished: they never become visible, and their keys are free for others.

        What is not open is ignored, also what a commit that raised has published. Never raises.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Disconnect, as far as the library can. The process ends afterwards, whatever happens here. Main thread."""


# The objects of a host's jobs: where they lie in the arena, and which of them a backend with an index holds.


def places_of(objects: Objects, arena: SharedMemory) -> list[ObjectLocation]:
    """The objects of a job, in its order.

    :raises ProtocolError: the arrays do not fit together.
    :raises ExtentError: an object would leave the arena.
    """
    keys = split_keys(objects.keys)
    try:
        offsets, sizes = list_u64(objects.offsets), list_u64(objects.layer_bytes)
        blocks, tokens = list_u32(objects.blocks), list_u32(objects.tokens)
        positions = list_u32(objects.positions) if objects.origin else [0] * len(keys)
    except ValueError as error:
        raise ProtocolError(f"the objects of a job do not fit together: {error}") from None
    if {len(offsets), len(sizes), len(blocks), len(tokens), len(positions)} != {len(keys)} or objects.layers < 1:
        raise ProtocolError(
            f"a job of {len(keys)} keys, {len(offsets)} offsets, {len(sizes)} sizes, {len(blocks)} block counts and "
            f"{len(tokens)} token counts over {objects.layers} layers"
        )
    parents, digests = dict(objects.parents), dict(objects.block_digests)
    if any(not 0 <= at < len(keys) or len(parent) != KEY_BYTES for at, parent in parents.items()):
        raise ProtocolError(f"a job of {len(keys)} keys with a parent at no position of it, or of the wrong size")
    base = arena.address
    places = [
        ObjectLocation(
            *(key, offset, base + offset, size, objects.layers, count, length, parents.get(at, b"")),
            *(digests.get(at, b""), objects.origin, position),
        )
        for at, (key, offset, size, count, length, position) in enumerate(
            zip(keys, offsets, sizes, blocks, tokens, positions, strict=True)
        )
    ]
    for place in places:
        if place.offset + place.nbytes > arena.nbytes or not place.blocks or not place.layer_bytes:
            raise ExtentError(
                f"object {place.key.hex()} of {place.blocks} blocks at bytes {place.offset} to "
                f"{place.offset + place.nbytes} of an arena of {arena.nbytes}"
            )
    return places


PIECE = 512
"""Entries of one message, some 2 ms of the server's loop: 16 KB, and 260 bytes more for each with block digests."""


class IndexReporter:
    """Says Up, and with an index everything that follows from it. The index itself is told once and not kept here.

    :param tell: sends to the server.
    """

    def __init__(self, tell: Callable[[ToServer], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._up = Up({})
        self._found_early: dict[bytes, IndexEntry] = {}
        self._gone_early: set[bytes] = set()
        self._attached = False

    def attach(self, attached: BackendInfo) -> None:
        """The backend is connected for the first time."""
        with self._lock:
            indexed = attached.index is not None
            self._up = Up(dict(attached.details), indexed, secrets.randbits(62) + 1 if indexed else 0)
            self._tell(self._up)
            if attached.index is not None:
                told = [
                    entry
                    for entry in attached.index
                    if entry.key not in self._gone_early and entry.key not in self._found_early
                ]
                self._say_held([*told, *self._found_early.values()])
            self._found_early, self._gone_early = {}, set()
            self._attached = True

    def again(self) -> None:
        """It can be used again after it could not."""
        with self._lock:
            self._tell(self._up)

    def found(self, entries: Sequence[IndexEntry]) -> None:
        """The backend holds these too. Any thread."""
        with self._lock:
            if not self._attached:
                self._found_early |= {entry.key: entry for entry in entries}
            elif self._up.indexed and entries:
                self._say_held(entries)

    def gone(self, keys: Sequence[bytes]) -> None:
        """These have left the backend. Any thread."""
        with self._lock:
            if not self._attached:
                self._gone_early |= set(keys)
                for key in keys:
                    self._found_early.pop(key, None)
            elif self._up.indexed:
                for at in range(0, len(keys), PIECE):
                    self._tell(Evicted(b"".join(keys[at : at + PIECE])))

    def _say_held(self, entries: Sequence[IndexEntry]) -> None:
        for at in range(0, max(1, len(entries)), PIECE):
            piece = entries[at : at + PIECE]
            self._tell(
                Indexed(
                    b"".join(entry.key for entry in piece),
                    pack_u32([entry.blocks for entry in piece]),
                    pack_u32([entry.tokens for entry in piece]),
                    tuple((position, entry.parent) for position, entry in enumerate(piece) if entry.parent),
                    at + PIECE >= len(entries),
                    tuple(
                        (position, entry.block_digests) for position, entry in enumerate(piece) if entry.block_digests
                    ),
                )
            )
