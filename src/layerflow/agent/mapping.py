"""The arenas that a worker has mapped, each made ready for copies: pinned for the device piece by piece, or mapped."""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass, field

import structlog

from layerflow.device.base import Device
from layerflow.device.captures import CaptureGate
from layerflow.errors import SessionError, Unsupported
from layerflow.ops.base import Copier
from layerflow.ops.copier import copier_for
from layerflow.ops.paged import PagedMemory
from layerflow.system.machine import free_bytes
from layerflow.system.memfd import POPULATE_PIECE_BYTES, SharedMemory
from layerflow.system.threads import OwnedThread

log = structlog.get_logger("layerflow.agent")

PIN_PIECE_BYTES = 256 << 20
"""What one call of the driver pins: some 0.1 s, so that a lost server's arena is let go at once."""
SPARE_BYTES, FREE_LOOK_S = 64 << 20, 0.5
"""Pinning leaves so much memory to others, in bytes, and looks again after so many seconds."""

PROGRESS_S = 2.0
"""How often the log tells how far pinning is."""


class ArenaAccess:
    """Copies to and from one server's arena, which is made ready meanwhile.

    :param gate: shut while the engine captures a graph.
    :raises SessionError: a capture is under way.

    :ivar copiers: of the load and the save lane.
    """

    def __init__(self, memory: PagedMemory, arena: SharedMemory, device: Device, gate: CaptureGate) -> None:
        pinned = Pinning(arena, device, gate) if device.capabilities().pinned else None
        with gate.work(lambda: True) as may:
            if not may:
                raise SessionError("the engine began to capture a graph; its worker attaches when that has ended")
            # Before anything is pinned: a limit on pinned memory is to leave room for what these pin.
            load, save = (copier_for(memory, arena, device, pinned) for _ in range(2))
        self.copiers: tuple[Copier, Copier] = (load, save)
        if pinned is not None:
            # Seconds, the first time. Nobody waits for it: copies go on without.
            self._speeding_up = OwnedThread("layerflow-kernel", device.prepare).start()
        self._preparing: Pinning | Populating = pinned or Populating(arena)
        self._preparing.start()

    @property
    def pinned_bytes(self) -> int:
        """How far, from its start, the arena is pinned; -1 = it is not pinned at all."""
        return self._preparing.pinned_bytes

    def set_way(self, way: str) -> None:
        """How blocks move from now on; see :class:`layerflow.ops.base.Copier`."""
        for copier in self.copiers:
            copier.way = way

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is pinned or mapped that can be; False after `timeout_s`."""
        return self._preparing.wait(timeout_s)

    def close(self) -> None:
        """Let what is under way end, and give back what is pinned. Nothing is copied any more."""
        for copier in self.copiers:
            try:
                copier.close()
            except Exception:  # its device is broken, and copies nothing any more either
                log.exception("copier_broken")
        self._preparing.undo()


class Pinning:
    """Pins an arena from its start, which slots are handed out from, beside copies that can do without.

    Only as far as memory is free: the driver takes pages that are not there yet, and they count for this process.

    :param device: that copies from and to it.
    :param gate: shut while the engine captures a graph.
    :param piece_bytes: what one call of the driver pins.
    """

    def __init__(
        self, arena: SharedMemory, device: Device, gate: CaptureGate, piece_bytes: int = PIN_PIECE_BYTES
    ) -> None:
        self.piece_bytes = piece_bytes
        self._arena = arena
        self._bytes = arena.array  # the mapping stays while the driver pins
        self._address, self._nbytes = arena.address, arena.nbytes
        self._device = device
        self._gate = gate
        self._stopping = threading.Event()
        self._thread = OwnedThread("layerflow-pin", self._run)
        self._pinned = 0

    def start(self) -> None:
        """Begin, on a thread of its own."""
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """How far it has come."""
        return self._pinned

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is pinned, or the driver refuses; False after `timeout_s`."""
        return self._thread.wait(timeout_s)

    def undo(self) -> None:
        """End, and give back what is pinned."""
        self._stopping.set()
        self._thread.join()
        pinned, self._pinned = self._pinned, 0
        for at in range(0, pinned, self.piece_bytes):
            self._device.unpin(self._address + at)

    def _run(self) -> None:
        self._device.leave_captures()
        began = told = time.monotonic()
        log.info("arena_pinning", device=self._device.kind, nbytes=self._nbytes)
        while self._pinned < self._nbytes and self._wait_free() and self._pin_next():
            if (now := time.monotonic()) - told >= PROGRESS_S:
                told = now
                log.info("arena_pinning", device=self._device.kind, nbytes=self._nbytes, pinned_bytes=self._pinned)
        if self._pinned == self._nbytes:
            seconds = round(time.monotonic() - began, 3)
            log.info("arena_pinned", device=self._device.kind, nbytes=self._nbytes, seconds=seconds)
        elif not self._stopping.is_set():
            _populate(self._arena, self._pinned)

    def _wait_free(self) -> bool:
        """Wait until there is memory for the next piece; False: it is to stop."""
        told = False
        end = min(self._pinned + self.piece_bytes, self._nbytes)
        while (missing := self._arena.missing_bytes(self._pinned, end)) and free_bytes() < missing + SPARE_BYTES:
            if not told:
                told = True
                log.info("arena_pinning_waits", pinned_bytes=self._pinned, nbytes=self._nbytes)
            if self._stopping.wait(FREE_LOOK_S):
                return False
        return True

    def _pin_next(self) -> bool:
        """Whether there was a piece to pin, and the driver did."""
        size = min(self.piece_bytes, self._nbytes - self._pinned)
        reason = ""
        with self._gate.work(self._stopping.is_set) as may:
            if not may or self._stopping.is_set():
                return False
            try:
                done = self._device.pin(self._address + self._pinned, size)
            except Unsupported as error:
                done, reason = False, str(error)
        if done:
            self._pinned += size
        else:
            log.warning(
                "arena_not_pinned",
                device=self._device.kind,
                pinned_bytes=self._pinned,
                nbytes=self._nbytes,
                reason=reason or "the device cannot pin memory",
            )
        return done


class Populating:
    """Maps the arena's pages into this process, on a thread of its own, so that no copy pays for it."""

    pinned_bytes = -1

    def __init__(self, arena: SharedMemory) -> None:
        self._thread = OwnedThread("layerflow-populate", _populate, arena)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all are mapped; False after `timeout_s`."""
        return self._thread.wait(timeout_s)

    def undo(self) -> None:
        """Pages go with the mapping."""


def _populate(arena: SharedMemory, start: int = 0) -> None:
    try:
        # What the server has not warmed for want of memory is not taken here either.
        for begin in range(start, arena.nbytes, POPULATE_PIECE_BYTES):
            if free_bytes() < 2 * POPULATE_PIECE_BYTES:
                log.info("arena_populated_partly", populated_bytes=begin, arena_bytes=arena.nbytes)
                return
            arena.populate(begin, min(begin + POPULATE_PIECE_BYTES, arena.nbytes))
    except Unsupported as error:
        log.warning("arena_not_populated", error=str(error))


# The arenas that this worker has mapped: its server's, and those of servers that are gone, while a plan may name them.
#
# What lies in an arena outlives its server's process: the mapping keeps it, and nothing changes it any more. Only the
# end of that process makes sure of that. A server that has merely hung up may give the places to others.


class ServerState(enum.Enum):
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
    server: ServerState = ServerState.SERVES
    until: float = 0.0
    loading: set[int] = field(default_factory=set)

    @property
    def copier(self) -> Copier:
        """The load lane's copier."""
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
        """Note that an arena's server has hung up. Return the arena; None = it is not mapped."""
        arena = self._known.get(incarnation)
        if arena is not None:
            arena.server = ServerState.UNKNOWN
        return arena

    def decide(self, arena: KnownArena, dead: bool, now: float) -> None:
        """Has its server's process ended? If not, no plan of it is used any more."""
        if dead:
            arena.server, arena.until = ServerState.DEAD, now + arena.keep_s
        else:
            self._known.pop(arena.incarnation, None)

    def overdue(self, now: float) -> list[KnownArena]:
        """Dead servers' arenas that no plan in use names any more; they are known no longer."""
        if len(self._known) < 2 and not any(each.server is ServerState.DEAD for each in self._known.values()):
            return []
        late = [
            each
            for each in self._known.values()
            if each.server is ServerState.DEAD and each.until <= now and not each.loading
        ]
        for arena in late:
            del self._known[arena.incarnation]
        return late

    def let_go(self, arena: KnownArena) -> None:
        """Nothing loads from it any more; without the lock."""
        arena.access.close()
        log.info("arena_let_go", incarnation=arena.incarnation, arena_bytes=arena.memory.nbytes)
