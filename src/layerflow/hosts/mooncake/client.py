"""Mooncake's store client: from options to one that is set up, its calls, codes and master, and the memory it gives."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.metadata
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from layerflow.backends import free_ports
from layerflow.hosts.backend import OK, ObjectResult, ObjectStatus, Unreachable, Unusable
from layerflow.hosts.mooncake.plugin import MooncakeSettings
from layerflow.hosts.shared.client import ClientHandle, HostOptions
from layerflow.hosts.shared.service import HttpProbe, Service, ServiceMonitor
from layerflow.system.memfd import MADV_POPULATE_WRITE

NO_ROOM = -200
INVALID = -600  # also: no such session here, or one that is open already
NOT_OURS = -601
NOT_IN_MEMORY = -702
NOT_READY, NOT_FOUND, EXISTS, LEASED, LEASE_OVER = -703, -704, -705, -706, -707
TRANSFER_FAILED = -800
CHECKSUM = -801
RPC_FAILED, RPC_LATE = -900, -901
FAULTS = frozenset((-10, -101, NOT_OURS, TRANSFER_FAILED, CHECKSUM, RPC_FAILED, RPC_LATE, -1010))
"""What happens only where something is wrong: neither misses nor a full store."""

_WORDS = {
    -10: "a buffer is too small",
    -101: "the segment is gone",
    NO_ROOM: "no room in the store",
    INVALID: "invalid parameters, or no such session",
    NOT_OURS: "another client has taken the key over",
    NOT_IN_MEMORY: "it is on the disk of a client only",
    NOT_READY: "it is being written",
    NOT_FOUND: "it is not there",
    EXISTS: "it is there already, or being written",
    LEASED: "it is leased",
    LEASE_OVER: "its lease ran out",
    -708: "it is being replicated",
    TRANSFER_FAILED: "the transfer failed: is the client alive that gave the memory?",
    CHECKSUM: "its checksum is wrong",
    RPC_FAILED: "the master does not answer",
    RPC_LATE: "the master did not answer in time",
    -1010: "the store cannot do it in its present state",
}
_READING = {
    NOT_IN_MEMORY: ObjectStatus.MISSING,
    NOT_READY: ObjectStatus.MISSING,
    NOT_FOUND: ObjectStatus.MISSING,
    INVALID: ObjectStatus.EXPIRED,  # the library drops a session whose lease ran out
    LEASE_OVER: ObjectStatus.EXPIRED,
    CHECKSUM: ObjectStatus.BROKEN,
}
_OPENING = {EXISTS: ObjectStatus.EXISTS, NO_ROOM: ObjectStatus.FULL}


def explain(code: int) -> str:
    """A code in words, for people who look it up too."""
    return f"Mooncake says {code}: {_WORDS.get(code, 'unknown to layerflow')}"


def unreachable(code: int) -> bool:
    """Whether the master itself did not answer."""
    return code in (RPC_FAILED, RPC_LATE)


def reading(code: int) -> ObjectResult:
    """Say what a code of a get session means; 0 = OK."""
    return _result(code, _READING)


def opening(code: int) -> ObjectResult:
    """Say what a code of the start of a put session means; 0 = OK."""
    return _result(code, _OPENING)


def writing(code: int) -> ObjectResult:
    """Say what a code of the rest of a put session means; 0 = OK."""
    return _result(code, {})


def moved(code: int, nbytes: int) -> int:
    """A range call returns the bytes it moved: 0 if those are `nbytes`, else a code."""
    if code == nbytes:
        return 0
    return code if code < 0 else TRANSFER_FAILED


def _result(code: int, outcomes: dict[int, ObjectStatus]) -> ObjectResult:
    return OK if code == 0 else ObjectResult(outcomes.get(code, ObjectStatus.FAILED), explain(code))


# The library keeps several connections. After the master ended, the first call over each fails at once, even if another
# master is there by now; calls that fail late have tried to connect again, for seconds.
_REPEATED = frozenset(("batch_is_exist", "batch_get_session_start", "batch_put_session_start"))
_QUICK_S = 0.2
# They ask the master nothing.
_LOCAL = frozenset(
    (
        "batch_get_into_multi_buffer_ranges",
        "batch_get_session_end",
        "batch_put_from_multi_buffer_ranges",
        "register_buffer",
    )
)


class MooncakeClient(ClientHandle):
    """A client while it is set up. Any thread; calls that move data do not hold the GIL.

    :param master: nothing is asked of it while it is ill.
    """

    def __init__(self, master: Service) -> None:
        super().__init__("the Mooncake client is not set up")
        self._master = master

    def __call__(self, method: str, *arguments: Any) -> Any:
        """:raises Unreachable: it is not set up, or closed, or the master is known to be ill."""
        if method not in _LOCAL and self._master.ill:
            raise Unreachable(self._master.ill)
        with self.client() as store:
            return getattr(store, method)(*arguments)

    def codes(self, method: str, *arguments: Any) -> list[int]:
        """A call that answers with a code per object.

        :raises Unreachable: also where the master did not answer for any of them.
        """
        quick = time.monotonic() + _QUICK_S
        codes: list[int] = self(method, *arguments)
        while method in _REPEATED and set(codes) == {RPC_FAILED} and time.monotonic() < quick:
            codes = self(method, *arguments)
        if failed := sum(code in FAULTS for code in codes):
            self.count("failed_calls", failed)
        if codes and all(map(unreachable, codes)):
            raise Unreachable(explain(codes[0]))
        return codes


_WHOSE = "Mooncake's master"
_ADVICE = "start mooncake_master there, or set pool.mooncake.master"


class Master(Service):
    """One master's addresses.

    :param address: of its RPC, ``host:port``.
    :param http_url: of its HTTP; ``""`` = ask nothing there.
    """

    def __init__(self, address: str, http_url: str) -> None:
        host, _, port = address.rpartition(":")
        monitor = ServiceMonitor((host.strip("[]"), int(port)), _WHOSE, _ADVICE)
        super().__init__(_WHOSE, monitor, HttpProbe(http_url, _WHOSE, "segment_total_capacity_bytes"))


# From options to a Mooncake client that is set up. Checks first: the library explains little and waits long.


NEEDED = "0.3.13"
_PACKAGE = f"mooncake-transfer-engine-non-cuda>={NEEDED} (or mooncake-transfer-engine, built for CUDA)"
# The ranges need no staging memory: the arena is registered, and everything is copied from and to it.
_LOCAL_BUFFER_BYTES = 0
_MIN_TRANSFER_S = 5  # the library takes no smaller MC_TRANSFER_TIMEOUT


class MooncakeOptions(MooncakeSettings, HostOptions):
    """The section ``[pool.mooncake]``, in the host process."""


@dataclass(frozen=True, slots=True)
class MooncakeConnection:
    """A client that is set up.

    :param store: ``mooncake.store.MooncakeDistributedStore``.
    :param replicate: ``mooncake.store.ReplicateConfig`` for new objects.
    :param name: what other clients call this one's segment.
    :param version: of the package.
    """

    store: Any
    replicate: Any
    name: str
    version: str


def connect(options: MooncakeOptions, master: Service) -> MooncakeConnection:
    """Set up a client. Blocks, and holds the GIL for most of that time.

    :raises Unreachable: the master does not answer.
    :raises Unusable: the package is missing, too old or lacks a library; or it refuses the options.
    """
    master.reach()  # set-up waits up to 90 s for a master that is not there
    _limit_waits(options.timeout_ms)
    library, version = load()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if options.segment_size > memory:
        raise Unusable(
            f"pool.mooncake.segment_size = {options.segment_size}: this machine has {memory} bytes; choose less"
        )
    name = f"{options.hostname}:{options.port or free_ports(1)[0]}"  # without a port, set-up tries 20 of them
    store = library.MooncakeDistributedStore()
    code = store.setup(
        name,
        options.metadata_server,
        options.segment_size,
        _LOCAL_BUFFER_BYTES,
        options.protocol,
        options.devices,
        options.master,
    )
    if code != 0:
        master.reach()
        raise Unusable(
            f"Mooncake {version} refused to set up {name} with the master {options.master} ({explain(code)}); check "
            f"protocol = {options.protocol!r}, devices, metadata_server, segment_size and hostname in pool.mooncake, "
            "and the host's log"
        )
    replicate = library.ReplicateConfig()
    replicate.replica_num = options.replicas
    if options.preferred_segment:
        replicate.preferred_segment = options.preferred_segment
    if options.soft_pin:
        replicate.soft_pin_action = library.SoftPinAction.ENABLE
    return MooncakeConnection(store, replicate, name, version)


def load() -> tuple[Any, str]:
    """The module ``mooncake.store``, and the version of its package.

    :raises Unusable: it is missing, too old or lacks a library.
    """
    try:
        library = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        if error.name not in ("mooncake", "mooncake.store"):
            raise Unusable(f"Mooncake's package cannot be loaded: {error}; install {error.name}") from error
        raise Unusable(f"Mooncake's package is not installed: pip install {_PACKAGE}") from error
    except ImportError as error:
        hint = "apt-get install libibverbs1, or rdma-core" if "libibverbs" in str(error) else "install what it names"
        raise Unusable(f"Mooncake's package cannot be loaded: {error}; {hint}") from error
    version = _version()
    if not hasattr(library.MooncakeDistributedStore, "batch_put_session_start"):
        raise Unusable(f"Mooncake {version} is too old: layers need its sessions; pip install {_PACKAGE}")
    return library, version


def _version() -> str:
    names = importlib.metadata.packages_distributions().get("mooncake", [])
    return importlib.metadata.version(names[0]) if names else "of unknown version"


def _limit_waits(timeout_ms: int) -> None:
    """The library reads these once, when it is loaded.

    What may hang has given up before the server kills the host, and its connection is dropped then, so that nothing
    lands late. Not so with MC_TRANSFER_TIMEOUT: what it gives up is still under way, so it must not come first.
    """
    seconds = max(1, timeout_ms * 3 // 5000)
    os.environ["MC_RPC_TIMEOUT_MS"] = str(max(1, timeout_ms * 2 // 5))
    os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = str(seconds)
    os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = str(seconds)
    os.environ["MC_TRANSFER_TIMEOUT"] = str(max(_MIN_TRANSFER_S, timeout_ms * 10 // 1000))


# The memory that this client gives to the store: its pages are taken from the machine before transfers need them.
#
# A first touch costs about 17 us per 4 KiB page, ten times what copying the page does. Whoever writes an object pays
# it, over the network too.
#
# The segment is found as what setup added to this process's memory map, and populated with
# ``MADV_POPULATE_WRITE``. That changes no byte, whatever other clients read or write there meanwhile, and
# needs no lock that transfers need for long; a mapping that was not the segment would only take memory.
# Objects written and removed to the same end would evict those of others from a store that is nearly full.


PIECE_BYTES = 4 << 20  # 5 to 20 ms a call: it may have to stop
_SEGMENT_BYTES = 16 << 20  # of a segment that the library cuts into several mappings; stacks are smaller
_LAZIEST = 19

log = structlog.get_logger(__name__)
# A foreign function call through CDLL does not hold the GIL.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int

Span = tuple[int, int]


def mapped() -> list[Span]:
    """Private writable memory of this process: [start, stop) addresses, ascending."""
    spans: list[Span] = []
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            place, rights, _, _, inode, *name = line.split(None, 5)
            if rights == "rw-p" and (inode == "0" or name[0].startswith("/anon_hugepage")):
                start, stop = (int(part, 16) for part in place.split("-"))
                spans.append((start, stop))
    return spans


def added(before: Sequence[Span], after: Sequence[Span], nbytes: int) -> list[Span]:
    """Where a segment of `nbytes` lies that was mapped in between; empty if that cannot be told."""
    fresh: list[Span] = []
    for first, stop in after:
        start = first
        for old_start, old_stop in before:  # the kernel joins a new mapping to an old neighbour
            if old_start < stop and old_stop > start:
                if old_start > start:
                    fresh.append((start, old_start))
                start = old_stop
        if start < stop:
            fresh.append((start, stop))
    fresh.sort(key=lambda span: span[0] - span[1])
    found: list[Span] = []
    for start, stop in fresh:
        if nbytes <= 0 or stop - start < _SEGMENT_BYTES:
            break
        found.append((start, stop))
        nbytes -= stop - start
    return found if nbytes <= 0 else []


class Warming:
    """Populates a segment on a thread of the lowest priority.

    :param spans: where it lies.
    :param nbytes: its size; the spans may be larger, by what the library keeps beside it.
    """

    def __init__(self, spans: Sequence[Span], nbytes: int) -> None:
        self._spans, self._nbytes = spans, nbytes
        self._beside = sum(stop - start for start, stop in spans) - nbytes
        self._done = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="layerflow-warm", daemon=True)
        self._thread.start()

    @property
    def warm_bytes(self) -> int:
        """Bytes of the segment that are in memory, at least."""
        return max(0, self._done - self._beside)

    def stop(self) -> None:
        """Returns once nothing is touched any more."""
        self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAZIEST)
        for start, stop in self._spans:
            for at in range(start, stop, PIECE_BYTES):
                if self._stopping or not self._populate(at, min(stop, at + PIECE_BYTES)):
                    return
        log.info("segment_warm", nbytes=self._nbytes)

    def _populate(self, start: int, stop: int) -> bool:
        while not self._stopping and _libc.madvise(start, stop - start, MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EINTR, errno.EAGAIN):  # EINVAL: before Linux 5.14; ENOMEM: the machine is full
                log.warning("segment_not_warmed", reason=os.strerror(code), done=self._done, nbytes=self._nbytes)
                return False
        self._done += stop - start
        return True
