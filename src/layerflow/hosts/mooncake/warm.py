"""The memory that this client gives to the store: its pages are taken from the machine before transfers need them.

A first touch costs about 17 us per 4 KiB page, ten times what copying the page does. Whoever writes an object pays it,
over the network too.

The segment is found as what setup added to this process's memory map, and populated with
``MADV_POPULATE_WRITE``. That changes no byte, whatever other clients read or write there meanwhile, and
needs no lock that transfers need for long; a mapping that was not the segment would only take memory.
Objects written and removed to the same end would evict those of others from a store that is nearly full.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Sequence

import structlog

from layerflow.system.memfd import MADV_POPULATE_WRITE

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
