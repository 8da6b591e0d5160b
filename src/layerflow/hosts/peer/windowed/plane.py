"""What a transfer library has to do for a windowed link."""

from __future__ import annotations

import abc
import mmap

import numpy as np

from layerflow.hosts.backend import Unusable
from layerflow.hosts.peer.link import LinkFailed

__all__ = ["DataPlane", "Hanging", "LinkFailed", "PlaneRead", "Unusable", "Window"]


class Hanging(LinkFailed):
    """A read has not ended in time. The library cannot take it back: its window must not be used again."""


class Window:
    """Memory of this process that a library may be shown. Its pages are taken when they are first written."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = nbytes
        self.view = memoryview(self._mapping)
        self.address = int(np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data)


class PlaneRead(abc.ABC):
    """One read that is under way."""

    @abc.abstractmethod
    def wait(self, until: float) -> None:
        """Until its bytes are in the window; `until` is on the monotonic clock.

        :raises Hanging: they are not by then.
        :raises LinkFailed: they will not come, and nothing of it is written any more.
        """


class DataPlane(abc.ABC):
    """One library, registered with one window. Made in a host process; making it may take a second.

    :param window: all that is registered.
    :param host: the address of this machine that its peers use; "" = any.
    :raises Unusable: the library is missing or does not work here.
    """

    @classmethod
    @abc.abstractmethod
    def load(cls) -> None:
        """Import the library, ahead of the first window.

        :raises Unusable: it is missing.
        """

    @abc.abstractmethod
    def __init__(self, window: Window, host: str) -> None: ...

    @abc.abstractmethod
    def describe(self) -> bytes:
        """What a reader needs to read from this window; at most 64 KiB."""

    @abc.abstractmethod
    def connect(self, described: bytes, host: str) -> None:
        """Reader's end, once: whose window is read, and at which address that machine is.

        :raises LinkFailed: it cannot be reached.
        """

    @abc.abstractmethod
    def read(self, local: int, remote: int, nbytes: int) -> PlaneRead:
        """Begin to read so many bytes at `remote` in the peer's window to `local` in this one.

        :raises LinkFailed: it cannot.
        """

    def serve(self) -> None:  # noqa: B027 - most have threads of their own
        """Lender's end: let the library work for its readers, and return; called over and over while they may read."""

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing is under way: leave. Never raises."""
