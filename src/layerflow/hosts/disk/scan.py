"""Reading what a folder holds, on a thread of its own: on a cold disk each file's size is a seek, minutes for all."""

from __future__ import annotations

import threading
import time

import structlog

from layerflow.hosts.disk.folder import Folder
from layerflow.hosts.disk.format import StoredFile
from layerflow.hosts.disk.index import DiskIndex

log = structlog.get_logger(__name__)

BATCH = 4096
"""Objects that enter the index under one holding of its lock; as many as one message to the server names."""
REMOVE_BATCH = 64
DESCRIBED = 256
"""Objects whose block digests are told at once."""


class Scan:
    """One reading of one folder into the index, which is written to and evicted from meanwhile. Starts at once.

    Objects are offered when every file is known, because the oldest must enter the order of eviction first.
    """

    def __init__(self, index: DiskIndex, folder: Folder) -> None:
        self._index, self._folder = index, folder
        self._reading = index.clear()
        self._began = time.monotonic()
        self._done = threading.Event()
        self.objects = 0  #: found so far
        self.error = ""  #: why the folder cannot be read; empty = it can
        threading.Thread(target=self._run, name="layerflow-scan", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether objects are missing in the index because they were not found yet."""
        return not self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended in time."""
        return self._done.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._fill()
        except OSError as error:
            self.error = f"cannot be read: {error.strerror}; see the system's log"
            log.warning("disk_not_read", error=error.strerror)
        except _Superseded:
            log.info("disk_reading_stopped", reason="the folder was opened anew")
        except Exception as error:  # what was found until then is not all there is
            self.error = f"cannot be read: {type(error).__name__}: {error}"
            log.exception("disk_not_read", error=self.error)
        finally:
            self._done.set()

    def _fill(self) -> None:
        found = self._folder.scan(self._count)
        removed = 0
        for at in range(0, len(found), BATCH):
            with self._index.lock:  # a file of the same name may be published right after
                outdated = self._index.fill(self._reading, found[at : at + BATCH])
                for stored in outdated:
                    self._folder.remove(stored)
            removed += len(outdated)
        self._index.filled(self._reading)
        while True:
            with self._index.lock:
                victims = self._index.shrink_to_capacity(REMOVE_BATCH)
                for stored in victims:
                    self._folder.remove(stored)
            if not victims:
                break
            removed += len(victims)
        now = self._index.statistics()
        log.info(
            "disk_opened",
            path=str(self._folder.path),
            objects=now.objects,
            bytes=now.used_bytes,
            removed=removed,
            took_s=round(time.monotonic() - self._began, 3),
        )
        self._describe([stored for stored in reversed(found) if stored.digests])

    def _describe(self, found: list[StoredFile]) -> None:
        """Block digests are in the files: a read of each that has some, the newest first. They are offered whole until
        then."""
        for at in range(0, len(found), DESCRIBED):
            few = [(stored, self._folder.block_digests(stored)) for stored in found[at : at + DESCRIBED]]
            if not self._index.describe(few):  # another scan reads the folder, which was opened anew
                raise _Superseded

    def _count(self, objects: int, nbytes: int) -> None:
        self.objects += objects
        if not self._index.count(self._reading, nbytes):
            raise _Superseded


class _Superseded(Exception):
    """The folder at this path is another one by now, and read by another scan."""
