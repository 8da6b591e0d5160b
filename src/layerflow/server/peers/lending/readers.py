"""Servers that read from this one's arena, and what they lease there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from layerflow.server.clients.sessions import Address


@dataclass(slots=True, eq=False)
class Lease:
    """:param nbytes: that it pins. :param timer: ends it."""

    number: int
    reader: Reader
    lease_s: float
    nbytes: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def owner(self) -> tuple[str, int]:
        """Of its pins."""
        return ("peer", self.number)


@dataclass(slots=True, eq=False)
class Reader:
    """A server that reads here. :param heard: when it last said anything, monotonic seconds."""

    address: Address
    name: str
    incarnation: bytes
    pid: int
    heard: float
    leases: dict[int, Lease] = field(default_factory=dict)
    lookups: int = 0
