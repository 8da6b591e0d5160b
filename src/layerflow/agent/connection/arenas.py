"""The arenas that this worker has mapped: its server's, and those of servers that are gone, while a plan may name them.

What lies in an arena outlives its server's process: the mapping keeps it, and nothing changes it any more. Only the end
of that process makes sure of that. A server that has merely hung up may give the places to others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import structlog

from layerflow.agent.connection.mapping import ArenaAccess
from layerflow.device.base import Device
from layerflow.ops.base import Copier
from layerflow.system.memfd import SharedMemory

log = structlog.get_logger("layerflow.agent")


class Owner(enum.Enum):
    """What is known of an arena's server."""

    SERVES = "serves"
    UNKNOWN = "unknown"  # it has hung up, and that it has ended is yet to be found out
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class KnownArena:
    """One arena, ready for loads.

    :param access: copies to and from it.
    :param keep_s: once its server is dead, a hit that it answered last may be loaded for so long.
    :param until: when it is let go of, monotonic seconds; steps that load from it keep it longer.
    :param loading: numbers of these steps.
    """

    incarnation: int
    memory: SharedMemory
    access: ArenaAccess
    keep_s: float
    owner: Owner = Owner.SERVES
    until: float = 0.0
    loading: set[int] = field(default_factory=set)

    @property
    def copier(self) -> Copier:
        """Of the load lane."""
        return self.access.copiers[0]


class Arenas:
    """By incarnation. The caller holds the lock of the open steps.

    :param device: for which they are pinned.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[int, KnownArena] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, arena: KnownArena) -> None:
        """A server has taken this worker."""
        self._known[arena.incarnation] = arena

    def get(self, incarnation: int) -> KnownArena | None:
        """None: no plan of it can be used."""
        return self._known.get(incarnation)

    def abandoned(self, incarnation: int) -> KnownArena | None:
        """Its server has hung up."""
        arena = self._known.get(incarnation)
        if arena is not None:
            arena.owner = Owner.UNKNOWN
        return arena

    def decide(self, arena: KnownArena, dead: bool, now: float) -> None:
        """Has its server's process ended? If not, no plan of it is used any more."""
        if dead:
            arena.owner, arena.until = Owner.DEAD, now + arena.keep_s
        else:
            self._known.pop(arena.incarnation, None)

    def overdue(self, now: float) -> list[KnownArena]:
        """Dead servers' arenas that no plan in use names any more; they are known no longer."""
        if len(self._known) < 2 and not any(each.owner is Owner.DEAD for each in self._known.values()):
            return []
        late = [
            each for each in self._known.values() if each.owner is Owner.DEAD and each.until <= now and not each.loading
        ]
        for arena in late:
            del self._known[arena.incarnation]
        return late

    def let_go(self, arena: KnownArena) -> None:
        """Nothing loads from it any more; without the lock."""
        arena.access.close()
        log.info("arena_let_go", incarnation=arena.incarnation, arena_bytes=arena.memory.nbytes)
