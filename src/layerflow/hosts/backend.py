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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from layerflow.objects import HEADER_BYTES, LAYOUT_VERSION

if TYPE_CHECKING:
    from layerflow.system.memfd import SharedMemory  # numpy: the configuration reads this module too


class BackendError(Exception):
    """Something about a whole backend, not about one object. The message says what to do."""


class Unreachable(BackendError):
    """The backend does not answer now; the host tries again."""


class Unusable(BackendError):
    """The backend cannot work as it is configured or installed; trying again would not help."""


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
    :param index: the objects it holds, where nobody else can add to it; None = others share it, ask. What it publishes
        or finds later, and what leaves it, it tells, also while it cannot be reached; see :meth:`Backend.report_found`.
    """

    details: dict[str, str | int | float | bool]
    index: Sequence[IndexEntry] | None = None


class Backend(abc.ABC):
    """One pool behind the arena. Made in the host process, from its section of the configuration.

    Nothing native is imported before :meth:`attach`.
    """

    def report_found(self, found: Callable[[Sequence[IndexEntry]], None]) -> None:  # noqa: B027 - most have no index
        """Once, before :meth:`attach`. A backend that has an index tells `found` of each object that it publishes,
        before `commit` returns, and of others as it learns of them where its index takes long to read; of each before
        it tells that it is gone; any thread. Others ignore it.

        It knows the order in which an object was published and left: while one call publishes many, another thread may
        remove the first of them.
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

        The header's generation word (:data:`layerflow.objects.GENERATION_AT`) is 0, as it was stored. The caller
        compares headers. OK means that these bytes are those of the object: what a checksum or a lease contradicts is
        BROKEN or EXPIRED, and never was OK.
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

        What is added is :func:`layerflow.objects.stored_header`: the generation word is the server's alone.

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
