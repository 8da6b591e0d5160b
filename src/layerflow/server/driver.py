"""Drives the core: events in, commands out as messages, timers and pool operations."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from layerflow.errors import InvalidTransition
from layerflow.expiring import ExpiringSet
from layerflow.flow import Flow
from layerflow.flow.commands import (
    Arrived,
    Call,
    Cancel,
    Command,
    Commit,
    LayersStored,
    LoadFailed,
    LoadsDone,
    ObjectsLost,
    ObjectsPublished,
    Release,
    Revoke,
    RoomFreed,
    Seal,
    StepDone,
    Submit,
    TransferDone,
    WakeAt,
    WriteBegun,
)
from layerflow.flow.events import BatchDone, Event, FrontierReached, Hop, Limits, SessionLost, Tick
from layerflow.observe.metrics import Metrics
from layerflow.pool.base import Owner, Pool
from layerflow.server.incoming import IncomingObjects, IncomingSaves
from layerflow.server.planner import MOST_UNCLAIMED, StepRecord
from layerflow.wire.messages import (
    BROKEN,
    Batch,
    Cancelled,
    Failed,
    Grant,
    LayerSealed,
    Message,
    Notice,
    Report,
    Stored,
)

if TYPE_CHECKING:
    from layerflow.server.handoffs.registry import Handoffs
    from layerflow.server.recorder import Recorder
    from layerflow.server.sources import ObjectSources


REVOKED_PER_TURN = 512
"""Objects that lost sessions were saving and that are given back before anything else may get its turn."""


@dataclass(slots=True)
class _LostSaves:
    """What a step of a lost session was saving.

    :param book: of the step; None = all of it is given back, and its owner has nothing.
    """

    owner: Owner
    book: StepRecord | None = None
    keys: list[bytes] = field(default_factory=list)
    reason: str = ""


class Driver:
    """The core, the pool, and the books of open steps.

    :param send: queue a message for a session.
    :param step_done: told of each finished step (session, loaded bytes, saved bytes).

    `sources`: of objects that are not in the pool; None = there are none. `recorder`: may be recording; None = never.
    `unclaimed`: objects that a worker did not store in its turn: any equal one may.
    """

    let_go: Callable[[Owner], None]  #: ends all pins of an owner in turns; set before a session is lost

    def __init__(
        self,
        pool: Pool,
        limits: Limits,
        metrics: Metrics,
        send: Callable[[int, Message], None],
        step_done: Callable[[StepDone], None],
    ) -> None:
        self.flow = Flow(limits)
        self.sources: ObjectSources | None = None
        self.unclaimed: ExpiringSet[bytes] = ExpiringSet(MOST_UNCLAIMED)
        self.incoming = IncomingObjects(pool, self.emit)
        self.follows = IncomingSaves(self.incoming, self._part_of)
        self.handoffs: Handoffs | None = None
        self.recorder: Recorder | None = None
        self._pool = pool
        self._metrics = metrics
        self._send = send
        self._step_done = step_done
        self._books: dict[tuple[int, int], StepRecord] = {}
        self._grants: dict[int, Grant] = {}
        self._notices: dict[int, Notice] = {}
        self._granted_at: dict[int, dict[int, tuple[float, str]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wake: float | None = None
        self._handling = False
        self._losing: int | None = None  # the session that the core is being told of as lost
        self._lost_saves: deque[_LostSaves] = deque()
        self._revokes = False
        self._later: deque[Event] = deque()
        self._log = structlog.get_logger("layerflow.server.driver")

    @property
    def open_steps(self) -> int:
        """Steps that are not finished."""
        return len(self._books)

    def open(self, key: tuple[int, int], book: StepRecord) -> None:
        """Remember a step before the core is told of it. With what follows its worker learns which saves have no room.

        Of parts that have some, it learns that at their end: until then they are being read.
        """
        self._books[key] = book
        if book.unplaced:
            self._give_up(key, sorted(book.unplaced.keys() - set(book.save_parts)))

    def steps(self) -> list[tuple[int, int]]:
        """Open steps: session and number."""
        return list(self._books)

    def is_open(self, key: tuple[int, int]) -> bool:
        """Is this step known and unfinished?"""
        return key in self._books

    def discard(self, key: tuple[int, int]) -> None:
        """Forget a step that the core refused, and give back what was planned for it."""
        self._pool.drop_owner(self._books.pop(key).owner)

    def handle(self, *events: Event) -> None:
        """Tell the core, then do what it wants; each session gets one Grant, or two where loads begin, and one Notice.

        :raises InvalidTransition: the first impossible event; all others were handled.
        """
        refused: InvalidTransition | None = None
        self._handling = True
        self._later.extend(events)
        try:
            while self._later:
                event = self._later.popleft()
                try:
                    most = sys.maxsize if isinstance(event, _REFILLS) else FIRST_BATCHES
                    commands = self._tell(event, most)
                except InvalidTransition as error:
                    refused = refused or error
                    continue
                self._losing = event.session if isinstance(event, SessionLost) else None
                for command in commands:
                    self._obey(command)
                if self._lost_saves and not self._revokes:
                    self._revoke_some()
                if self.flow.paused:
                    self._flush()
                    os.sched_yield()  # the thread that sends may be waiting for this core
                    for command in self._tell(Tick(), sys.maxsize):
                        self._obey(command)
        finally:
            self._handling = False
            self._flush()
        if refused is not None:
            raise refused

    def _tell(self, event: Event, most: int) -> list[Command]:
        now = time.monotonic()
        commands = self.flow.handle(event, now, most)
        if self.recorder is not None and (recording := self.recorder.current) is not None:
            recording.core(now, event, commands)
        return commands

    def expected(self, step: tuple[int, int], now: float) -> float | None:
        """In how many seconds a step will have stored all that it saves, by its pace so far; None = not known."""
        book, share = self._books.get(step), self.flow.stored(*step)
        return (now - book.opened_at) * (1 - share) / share if book is not None and share > 0 else None

    def emit(self, events: Sequence[Event]) -> None:
        """Tell the core; of what follows from its own commands, once all of those are carried out."""
        if self._handling:
            self._later.extend(events)
        elif events:
            self.handle(*events)

    def _part_of(self, step: tuple[int, int], key: bytes) -> int | None:
        book = self._books.get(step)
        return book.part_of(key) if book is not None else None

    def time_batches(self, session: int, report: Report) -> None:
        """Count how long the first batch of a session's report took; an observation a batch would cost too much."""
        granted = self._granted_at.get(session)
        if granted is None:
            return
        for failure in report.failed:
            granted.pop(failure.batch, None)
        for position, batch in enumerate(report.done):
            found = granted.pop(batch, None)
            if found is not None and not position:
                self._metrics.batch_done(found[1], time.monotonic() - found[0])

    def forget_session(self, session: int) -> None:
        """A session is gone; none of its batches is reported any more."""
        self._granted_at.pop(session, None)

    def close(self) -> None:
        """Stop the timer, and what is put off."""
        self._lost_saves.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                granted = self._granted_at.setdefault(command.session, {})
                granted[command.batch] = time.monotonic(), _WAYS[command.direction]
                self._grant(command.session).batches.append(
                    Batch(
                        command.step,
                        command.batch,
                        int(command.direction),
                        command.layer,
                        command.lo,
                        command.hi,
                        command.byte_lo,
                        command.byte_hi,
                        command.nbytes,
                        command.gate,
                        command.seals,
                    )
                )
            case Seal():
                sealed = LayerSealed(command.step, int(command.direction), command.layer)
                self._grant(command.session).sealed.append(sealed)
            case LoadFailed():
                self._load_failed(command)
            case Cancel():
                cancelled = Cancelled(command.step, int(command.direction), command.reason)
                self._grant(command.session).cancelled.append(cancelled)
            case Commit():
                self._stored(command, True, "")
            case Revoke():
                self._stored(command, False, command.reason)
            case LoadsDone():
                self._unpin(self._books[command.session, command.step].owner)
            case Release():
                self._notice(command.session).released.append(command.request)
            case StepDone():
                # A step without loads has no LoadsDone, and may have pinned what turned out to be of no use.
                owner = self._books.pop((command.session, command.step)).owner
                self._unpin(owner)
                if command.session == self._losing:
                    self._lost_saves.append(_LostSaves(owner))
                else:
                    self._pool.drop_owner(owner)
                self._notice(command.session).finished.append(command.step)
                self._step_done(command)
            case Arrived() | RoomFreed() | LayersStored():
                self.incoming.obey(command)
            case Call() | ObjectsLost() | TransferDone() if command.hop is not Hop.WRITE:
                self.incoming.obey(command)
            case Call() | ObjectsLost() | TransferDone() | WriteBegun() | ObjectsPublished():
                assert self.sources is not None
                self.sources.obey(command)
            case WakeAt():
                self._wake = command.when

    def _unpin(self, owner: Owner) -> None:
        """A step's pins end; of a session that is lost all steps do in this turn, and their pins in later ones."""
        if self._losing is not None:
            self.let_go(owner)
        else:
            self._pool.release(owner)

    def _load_failed(self, command: LoadFailed) -> None:
        book = self._books[command.session, command.step]
        self._metrics.load_failed(_word(command.reason))
        if command.reason.startswith(BROKEN):
            keys = book.keys_of(command.group, command.lo, command.hi)
            hidden = self.sources.hide(keys) if book.direct and self.sources is not None else self._pool.hide(keys)
            self._log.warning(
                "load_broken", session=command.session, step=command.step, request=command.request, hidden=hidden
            )
        self._grant(command.session).failed.append(
            Failed(command.step, command.request, command.group, command.lo, command.hi, command.reason)
        )

    def _stored(self, command: Commit | Revoke, committed: bool, reason: str) -> None:
        step = (command.session, command.step)
        book = self._books[step]
        keys = [] if book.direct else [key for part in command.parts for key in book.save_keys[part]]
        if command.session == self._losing and not committed:
            self._lost_saves.append(_LostSaves(book.owner, book, keys, reason))
        elif not book.direct:
            self._commit_or_revoke(step, book, keys, committed, reason)
        if reason == SHED:
            self._metrics.saves_shed(len(command.parts))
        elif not committed:
            self._metrics.save_failed(_word(reason), len(command.parts))
        positions = [book.save_parts[part] for part in command.parts]
        self._notice(command.session).stored.append(Stored(command.step, positions, committed, reason))
        if committed and book.unplaced:
            self._give_up(step, [position for position in positions if position in book.unplaced])

    def _give_up(self, step: tuple[int, int], positions: Sequence[int]) -> None:
        """Tell the worker, once for each reason, that these save parts are not stored, or not wholly."""
        session, number = step
        reasons: dict[str, list[int]] = {}
        for position in positions:
            reasons.setdefault(self._books[step].unplaced[position], []).append(position)
        if reasons:
            told = self._notice(session).stored
            told.extend(Stored(number, parts, False, why) for why, parts in reasons.items())

    def _commit_or_revoke(
        self, step: tuple[int, int], book: StepRecord, keys: list[bytes], committed: bool, reason: str
    ) -> None:
        if committed:
            self._pool.commit(keys, book.owner)
            if self.unclaimed:
                for key in keys:
                    self.unclaimed.discard(key)
            if self.handoffs is not None:
                self.handoffs.stored(keys, time.monotonic())
            if self.sources is not None:
                self.sources.committed(step, keys)
        else:
            self._revoke(book, keys, reason)

    def _revoke(self, book: StepRecord, keys: list[bytes], reason: str) -> None:
        self.follows.revoke_reservations(keys, book.owner, reason)
        if self.handoffs is not None:
            self.handoffs.lost(keys, reason)
        if book.in_turns:
            for key in keys:
                self.unclaimed.add(key)

    def _revoke_some(self) -> None:
        """Give back some of what lost sessions were saving; until then nobody has its room, or saves the same."""
        self._revokes, left = True, REVOKED_PER_TURN  # also for what this tells the core
        try:
            while self._lost_saves and left > 0:
                lost = self._lost_saves[0]
                few = lost.keys[-left:]
                del lost.keys[-left:]
                left -= len(few) + 1
                if not lost.keys:
                    self._lost_saves.popleft()
                if lost.book is None:
                    self._pool.drop_owner(lost.owner)
                elif few:
                    self._revoke(lost.book, few, lost.reason)
        finally:
            self._revokes = bool(self._lost_saves)
            if self._revokes:
                asyncio.get_running_loop().call_soon(self._revoke_some)

    def _grant(self, session: int) -> Grant:
        grant = self._grants.get(session)
        if grant is None:
            grant = self._grants[session] = Grant([], [], [], [])
        return grant

    def _notice(self, session: int) -> Notice:
        notice = self._notices.get(session)
        if notice is None:
            notice = self._notices[session] = Notice([], [], [])
        return notice

    def _flush(self) -> None:
        grants, self._grants = self._grants, {}
        notices, self._notices = self._notices, {}
        for session, grant in grants.items():
            self._send(session, grant)
        for session, notice in notices.items():
            self._send(session, notice)
        if self._wake is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(self._wake, self._tick)
            self._wake = None

    def _tick(self) -> None:
        self._timer = None
        self.handle(Tick())


FIRST_BATCHES = 4
"""Batches that are sent before the rest of an event's are built, at some 10 us each: the first load starts earlier."""

_REFILLS = (BatchDone, FrontierReached)
"""Events that make room for further batches of a load: its lane has some left, or tells in time."""

SHED = "shed"
_WAYS = ("load", "save")


def _word(reason: str) -> str:
    """A reason's head, fit for a metric's label."""
    return reason.split(":", 1)[0].split(" (", 1)[0]
