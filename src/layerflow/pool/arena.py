"""The arena: the shared memory that holds the pool's objects, and its warming.

Untouched memory costs the first writer a page fault per 4 KiB (17 µs each under load). Warming takes
the pages in the background, lowest addresses first, which is also how slots are handed out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np
import numpy.typing as npt
import structlog

from layerflow.errors import ExtentError, Unsupported
from layerflow.system.machine import NUMA_OFF, free_bytes, here, place
from layerflow.system.memfd import POPULATE_PIECE_BYTES, SharedMemory

log = structlog.get_logger(__name__)

WARMING_STEP_BYTES = 8 << 20  # some 4 ms
SPARE_BYTES = 64 << 20
"""Warming leaves so much memory to others, in bytes, and looks again after :data:`FREE_LOOK_S` seconds."""
FREE_LOOK_S = 0.5


class Arena:
    """The pool's memory: created by the server, mapped by agents and hosts.

    :param nbytes: bytes, rounded up to whole pages; see :attr:`nbytes`.
    :param hugepages: take reserved 2 MiB pages.
    :param numa: on which memory node; see :func:`layerflow.system.machine.placement`.
    :raises Unsupported: the machine cannot give it.
    :raises ConfigError: there is no such node.

    :ivar placed: on which nodes it is, or why on none.
    """

    def __init__(self, nbytes: int, hugepages: bool = False, numa: str = NUMA_OFF) -> None:
        placement = here(numa)
        self._open(SharedMemory.create(nbytes, name="layerflow-arena", hugepages=hugepages))
        self.placed = str(placement)
        if placement.nodes:
            self._place(placement.nodes)

    def _place(self, nodes: tuple[int, ...]) -> None:
        """Before its first page is taken. What the kernel refuses costs speed, nothing else."""
        try:
            place(self.address, self.nbytes, nodes)
        except Unsupported as error:
            log.warning("arena_not_placed", nodes=list(nodes), error=str(error))
            self.placed = f"not placed: {error}"

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Self:
        """A second mapping of another process's arena; see :meth:`SharedMemory.attach`."""
        arena = cls.__new__(cls)
        arena._open(SharedMemory.attach(fd, nbytes))
        return arena

    def _open(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.placed = ""
        self._warm = 0

    @property
    def fd(self) -> int:
        """The descriptor, to pass to agents and hosts."""
        return self.memory.fd

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def address(self) -> int:
        """Where the arena starts in this process."""
        return self.memory.address

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8, shape ``(nbytes,)``, writable."""
        return self.memory.array

    @property
    def view(self) -> memoryview:
        """The same bytes as a writable memoryview."""
        return self.memory.view

    @property
    def warm_bytes(self) -> int:
        """How far, from its start, the arena is known to have its pages."""
        return self._warm

    def populate(self, start: int = 0, stop: int | None = None) -> None:
        """Populate bytes ``start:stop`` of this mapping; see :meth:`SharedMemory.populate`."""
        stop = self.nbytes if stop is None else stop
        self.memory.populate(start, stop)
        if start <= self._warm:
            self._warm = max(self._warm, stop)

    def warm(self, step: int = POPULATE_PIECE_BYTES) -> Iterator[int]:
        """Take the arena's pages from the machine, from its start, `step` bytes per item; yields :attr:`warm_bytes`.

        The pages do not stay mapped here: the server touches headers only, and its death must show at once.
        """
        while self._warm < self.nbytes:
            begin, end = self._warm, min(self._warm + step, self.nbytes)
            self.populate(begin, end)
            self.memory.unmap_pages(begin, end)
            yield self._warm

    def close(self) -> bool:
        """Unmap once nothing uses it any more; see :meth:`SharedMemory.close`."""
        return self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Warmer:
    """Warms an arena on a background thread, half of the time. The arena is usable all the while.

    Only as far as memory is free: engines may still have the arena of an earlier server mapped, to load from.

    :param step: bytes between two looks at :meth:`stop`.
    :param free: bytes that can be had now.
    """

    def __init__(self, arena: Arena, step: int = WARMING_STEP_BYTES, free: Callable[[], float] = free_bytes) -> None:
        self._arena = arena
        self._free = free
        self._step = step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="layerflow-warmer", daemon=True)
        self.error: Unsupported | None = None  #: why warming ended early; the pool works on, colder

    def start(self) -> Self:
        self._thread.start()
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End warming and wait for the thread: at most one step."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until warming has ended; whether it has, after at most `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _wait_free(self) -> bool:
        """Wait until there is memory for one more step; False: it is to stop."""
        told = False
        while self._arena.warm_bytes < self._arena.nbytes and self._free() < self._step + SPARE_BYTES:
            if not told:
                told = True
                log.info("arena_warming_waits", warm_bytes=self._arena.warm_bytes, reason="no memory is free")
            if self._stop.wait(FREE_LOOK_S):
                return False
        return True

    def _run(self) -> None:
        # It rests as long as it works. A lower priority would be worse: preempted with the GIL in hand, such a
        # thread holds up every other thread of an engine that embeds the server.
        try:
            if not self._wait_free():
                return
            began = time.monotonic()
            for _ in self._arena.warm(self._step):
                if self._stop.wait(time.monotonic() - began) or not self._wait_free():
                    return
                began = time.monotonic()
        except Unsupported as error:
            self.error = error
            log.warning("arena_warming_failed", warm_bytes=self._arena.warm_bytes, error=str(error))
        except ExtentError:
            log.info("arena_closed_while_warming")
        else:
            log.info("arena_warm", nbytes=self._arena.nbytes)
