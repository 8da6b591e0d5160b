"""What the link tells of its server, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from layerflow.system.memfd import SharedMemory
from layerflow.wire.messages import Progress, Terms, ToClient, Welcome


@dataclass(slots=True)
class Attachment:
    """One life of the link: a server, its arena and that one's name, its terms."""

    session: int
    arena: SharedMemory
    terms: Terms
    welcome: Welcome
    direct: bool
    incarnation: int = 0


class LinkListener(Protocol):
    """What the link tells; all on the link's thread.

    :ivar pinned_bytes: how far the arena is pinned; -1 = it is not pinned at all.
    """

    @property
    def pinned_bytes(self) -> int: ...

    def may_attach(self) -> bool:
        """Is it a good moment? If not, the link asks again soon."""
        ...

    def may_bypass(self, welcome: Welcome) -> bool:
        """Will this worker move bytes past the server's arena? May take seconds, the first time."""
        ...

    def connection_made(self, attachment: Attachment) -> None:
        """A server has taken this agent; steps may be opened."""
        ...

    def lost(self, reason: str) -> None:
        """The server is gone; nothing of it answers any more."""
        ...

    def judged(self, dead: bool) -> None:
        """Has its process ended, for certain? Told a moment after :meth:`lost`."""
        ...

    def waiting(self, now: float) -> None:
        """Time passed without a server."""
        ...

    def heard(self, message: ToClient) -> None:
        """A message."""
        ...

    def progress(self) -> list[Progress]:
        """Open steps that moved on since the last report."""
        ...

    def has_moved(self) -> bool:
        """Is there any?"""
        ...

    def tick(self, now: float, silent: bool) -> None:
        """Time passed. `silent`: the server is there but has not answered heartbeats for its ``liveness_ms``."""
        ...

    def sampling(self) -> bool:
        """Is :meth:`progress` or :meth:`tick` to be called within a millisecond?"""
        ...
