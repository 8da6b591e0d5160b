"""One hand-off: its states, what it keeps, and who wants to hear of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from layerflow.keys import DIGEST_BYTES
from layerflow.pool.base import NewObject, Owner
from layerflow.server.clients.account import Charge
from layerflow.spec import ModelSpec


class HandoffStatus(enum.Enum):
    """Where a hand-off is."""

    ANNOUNCED = "announced"
    """A reader has asked for it, and no engine has opened it yet."""
    OPEN = "open"
    """Its engine computes, and all of it is stored or has room."""
    COMPLETE = "complete"
    """All of it is stored."""
    FAILED = "failed"
    """Some of it never will be."""
    REVOKED = "revoked"
    """The server took it back: nobody came for it in time, or others needed its room."""
    RELEASED = "released"
    """Nobody needs it any more."""

    @property
    def readable(self) -> bool:
        """A reader may count on it."""
        return self in (HandoffStatus.OPEN, HandoffStatus.COMPLETE)


@dataclass(frozen=True, slots=True)
class HandoffStatistics:
    """A snapshot. The first half is now, sizes in bytes; the second counts since the server's start.

    :param kept_bytes: what hand-offs that are not over pin or reserve.
    """

    announced: int
    open: int
    complete: int
    kept_bytes: int
    opened: int
    completed: int
    claimed: int
    failed: int
    revoked: int
    refused: int
    released: int


REMEMBERED = 4096
"""Hand-offs that are over and can still be asked about: the last so many."""

Told = Callable[["Handoff"], None]


@dataclass(slots=True, eq=False)
class Handoff:
    """One hand-off. Times are monotonic seconds.

    :param serial: tells it from an earlier one of the same name.
    :param engine: that computes it; empty while it is announced.
    :param session: of the client that opened it.
    :param spec: of a worker of that engine.
    :param tokens: that a reader can load at most.
    :param objects: what it keeps. :param partial: those of them that are partial chunks.
    :param parts_kept: of the model, that they hold; see :func:`layerflow.keys.covered_by`.
    :param pending: keys of it that are not stored. :param promised: those of them that this hand-off keeps room for.
    :param foreign: those that somebody else brings into the arena, whose end nobody tells of.
    :param ended: its engine computes nothing more of it.
    :param parts: how many other servers keep parts of it that are not complete.
    :param due: what then happens depends on the state: nobody opened it, it is not complete, its lease is over.
    :param claims: readers that have come for it.
    :param watchers: told of its next state.
    :param charge: what the client that opened it is charged for it.
    """

    name: str
    serial: int
    status: HandoffStatus = HandoffStatus.ANNOUNCED
    engine: str = ""
    session: int = 0
    spec: ModelSpec | None = None
    tokens: int = 0
    lease_s: float = 0.0
    due: float = math.inf
    reason: str = ""
    ended: bool = False
    parts: int = 0
    claims: int = 0
    objects: dict[bytes, NewObject] = field(default_factory=dict)
    partial: list[NewObject] = field(default_factory=list)
    parts_kept: set[bytes] = field(default_factory=set)
    pending: set[bytes] = field(default_factory=set)
    promised: set[bytes] = field(default_factory=set)
    foreign: set[bytes] = field(default_factory=set)
    watchers: dict[Told, None] = field(default_factory=dict)
    charge: Charge | None = None

    @property
    def owner(self) -> Owner:
        """Who pins and reserves in the pool."""
        return ("handoff", self.name, self.serial)

    def keep(self, objects: Mapping[bytes, NewObject]) -> None:
        """It keeps these, too."""
        self.objects.update(objects)
        self.partial += [new for new in objects.values() if new.parent]
        self.parts_kept.update(key[DIGEST_BYTES:] for key in objects)

    def story(self) -> str:
        """The state, and why, as a reader is told it."""
        return f"{self.status.value}: {self.reason}" if self.reason else self.status.value
