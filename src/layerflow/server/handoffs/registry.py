"""The hand-offs of one server: opened, completed, claimed, and taken back.

A hand-off pins what it needs and is stored, and keeps room for what is still to be stored; the saves of its engine take
that room over, key by key. It fails as soon as something of it will never be stored, and its readers hear of it then.
What nobody claims pins at most a set share of the arena: past it the oldest goes, so that a decoder which never comes
costs the prefiller nothing. Whose goes is said in :mod:`layerflow.server.handoffs.share`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import structlog

from layerflow.errors import shortened
from layerflow.expiring import ExpiringSet, ExpiryHeap
from layerflow.observe.logs import LogRateLimiter
from layerflow.pool.base import NewObject, Owner, Pool, ReserveStatus
from layerflow.server.account import Charge
from layerflow.server.handoffs.handoff import (
    REMEMBERED,
    HandoffRecord,
    HandoffStatistics,
    HandoffStatus,
    Prompt,
    Reserved,
    Told,
    sort_by_writer,
    take,
)
from layerflow.server.handoffs.share import HandoffShare
from layerflow.server.mailboxes import SLICE_S, Answer, Slices
from layerflow.spec import ModelSpec
from layerflow.system.numbers import ascending

ENDED_GRACE_S = 0.5
"""Once its engine has ended it, a hand-off waits so long for steps that save the rest: their socket is another one."""

PIECE = 64
"""Objects that one that is over gives back at once: some of them cost the loop 20 us each."""

Withdraw = Callable[[Sequence[bytes], Owner, str], None]
_ENDED = object()
log = structlog.get_logger("layerflow.server.handoffs")


class _Turns:
    """Work that is done one after the other: what is little at once, else in turns with the rest of the loop."""

    def __init__(self, soon: Callable[[Callable[[], None]], object]) -> None:
        self._soon = soon
        self._work: deque[Slices[None]] = deque()
        self._scheduled = False

    @property
    def busy(self) -> bool:
        """Is some of it not done?"""
        return bool(self._work)

    def add(self, work: Slices[None]) -> None:
        """Do this behind what is put off already."""
        self._work.append(work)
        if len(self._work) == 1 and not self._scheduled:
            self._turn()

    def do_all(self) -> Slices[None]:
        """Do all that is put off, in slices."""
        while self._work:
            self._do_piece()
            yield

    def _turn(self) -> None:
        self._scheduled = False
        until = time.monotonic() + SLICE_S
        try:
            while self._work:
                self._do_piece()
                if time.monotonic() >= until:
                    break
        finally:
            if self._work and not self._scheduled:
                self._scheduled = True
                self._soon(self._turn)

    def _do_piece(self) -> None:
        ended = True  # also where it raises
        try:
            ended = next(self._work[0], _ENDED) is _ENDED
        finally:
            if ended:
                self._work.popleft()


class Handoffs:
    """All hand-offs of a server. `now` is monotonic seconds.

    :param room_bytes: of the arena. :param share: of it that hand-offs may keep together.
    :param revoke_reservations: takes reserved room of keys that nobody will write, and why; the room returns once no
        load touches it.
    :param soon: calls a function a moment later, when nothing else is under way.
    :param changed: told of each change of a state, and of each claim.
    """

    def __init__(
        self,
        pool: Pool,
        room_bytes: int,
        share: Callable[[], float],
        *,
        revoke_reservations: Withdraw,
        soon: Callable[[Callable[[], None]], object],
        changed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._room_bytes = room_bytes
        self._share = HandoffShare(lambda: share() * self._room_bytes)
        self._revoke_reservations = revoke_reservations
        self._soon = soon
        self._changed = changed
        self._serials = ascending()
        self._by_name: dict[str, HandoffRecord] = {}
        #: those that are not over, each until it is due; oldest first
        self._live: ExpiryHeap[HandoffRecord] = ExpiryHeap()
        self._stored_by_others: dict[HandoffRecord, None] = {}  # some of whose objects others bring
        self._to_end: set[HandoffRecord] = set()  # live ones whose end is put off for a few turns
        self._over: deque[HandoffRecord] = deque()
        self._returning, self._notes = _Turns(soon), _Turns(soon)
        self._telling: deque[tuple[HandoffRecord, Iterator[Told]]] = deque()  # watchers to be told, in order
        self._waiting: dict[bytes, list[HandoffRecord]] = {}
        self._log_limit = LogRateLimiter()
        # An abort may be quicker than a prefiller's scheduler: names of hand-offs that were released before `open`.
        self._released_before_open: ExpiringSet[str] = ExpiringSet(REMEMBERED)
        self._counts: Counter[str] = Counter()

    # Asked ---------------------------------------------------------------------------------------

    def get(self, name: str) -> HandoffRecord | None:
        """By name; None = nobody has spoken of it, or its end is long ago."""
        return self._by_name.get(name)

    def live(self) -> list[HandoffRecord]:
        """Return the hand-offs that are not over, oldest first."""
        return list(self._live)

    def due(self, handoff: HandoffRecord) -> float:
        """Return when a hand-off ends by itself: nobody has opened it, it is not complete, or its lease is over."""
        return self._live.until(handoff)

    @property
    def wanted(self) -> bool:
        """Is one being computed, or does one wait for its reader?"""
        return any(
            each.status is HandoffStatus.OPEN or (each.status is HandoffStatus.COMPLETE and not each.claims)
            for each in self._live
        )

    def concerned(self, keys: Iterable[bytes]) -> bool:
        """Does a hand-off that is not complete wait for one of these?"""
        return any(key in self._waiting for key in keys)

    def statistics(self) -> HandoffStatistics:
        """A snapshot."""
        states = Counter(each.status for each in self._by_name.values())
        counts = self._counts
        return HandoffStatistics(
            announced=states[HandoffStatus.ANNOUNCED],
            open=states[HandoffStatus.OPEN],
            complete=states[HandoffStatus.COMPLETE],
            kept_bytes=self._share.kept.nbytes,
            opened=counts["opened"],
            completed=counts["completed"],
            claimed=counts["claimed"],
            failed=counts[HandoffStatus.FAILED.value],
            revoked=counts[HandoffStatus.REVOKED.value],
            refused=counts["refused"],
            released=counts[HandoffStatus.RELEASED.value],
        )

    # Readers -------------------------------------------------------------------------------------

    def announce(self, name: str, until: float) -> HandoffRecord:
        """The hand-off of this name; one that nobody knows is announced, and forgotten at `until`."""
        known = self._by_name.get(name)
        released = self._released_before_open.discard(name)
        if known is None or (released and known.status is HandoffStatus.RELEASED):  # else it was refused since
            known = self._begin(name, until)
        elif known.status is HandoffStatus.ANNOUNCED:
            self._live.set(known, max(self._live.until(known), until))
        return known

    async def changed(self, handoff: HandoffRecord, until: float, charge: Charge) -> HandoffRecord:
        """Wait for a hand-off's next state; at `until` it is as it is.

        :param charge: of the client that waits. Where the client ends first, what nobody else waits for, or opens, is
            forgotten.
        """
        answer = Answer[HandoffRecord](charge)
        handoff.watchers[answer.tell] = None
        try:
            return await answer.by(until, handoff)
        except GeneratorExit:
            handoff.watchers.pop(answer.tell, None)
            if handoff.status is HandoffStatus.ANNOUNCED and not (handoff.watchers or handoff.engine):
                self._forget(handoff)
            raise
        finally:
            handoff.watchers.pop(answer.tell, None)

    async def outlast(
        self, name: str, pending: Callable[[HandoffRecord], bool], until: float, charge: Callable[..., Charge]
    ) -> HandoffRecord:
        """The hand-off of this name once it is not `pending` any more; or as it is at `until`.

        :param charge: of what is kept of the message that waits; its `always` = however much is kept already.
        """
        handoff = None
        while True:
            late = time.monotonic() >= until
            with charge(always=late) as kept:  # before anything is kept: a name that is announced is
                handoff = handoff or self.announce(name, until)
                if late or not pending(handoff):
                    return handoff
                handoff = await self.changed(handoff, until, kept)

    def watch(self, handoff: HandoffRecord, told: Told) -> None:
        """Tell of its next state, once."""
        handoff.watchers[told] = None

    def claim(self, handoff: HandoffRecord, now: float, lease_s: float) -> None:
        """A reader has come: it is kept for as long as that reader may need, and others may come.

        :param lease_s: how long the reader has its hit leased.
        """
        handoff.claims += 1
        if handoff.claims == 1 and handoff.status is HandoffStatus.COMPLETE:
            self._share.completed(handoff, len(self._live))
        self._counts["claimed"] += 1
        self._changed()
        if handoff.status is HandoffStatus.COMPLETE:
            self._live.set(handoff, max(self._live.until(handoff), now + max(lease_s, handoff.lease_s)))

    # The engine that computes it -----------------------------------------------------------------

    def open(
        self,
        name: str,
        engine: str,
        session: int,
        *,
        specs: Sequence[ModelSpec],
        prompt: Prompt,
        lease_s: float,
        due: float,
        charge: Charge,
        key: str = "",
    ) -> Slices[str]:
        """Pin what is stored of a prompt and reserve room for the rest, in slices. Why not, else empty.

        :param specs: of the engine's workers here, those that hold the same once.
        :param due: it has failed if it is not complete by then.
        :param charge: of the client that opens it; released when it is over.
        :param key: of that client; "" = it is of this machine.
        """
        yield from self.return_all()
        known = self._by_name.get(name)
        if known is not None and known in self._live and known.engine:
            return self.refuse(name, engine, f"a hand-off of this name is {known.status.value} already")
        if self._released_before_open.holds(name, time.monotonic()):
            return self.refuse(name, engine, "its reader has released it already")
        self._released_before_open.discard(name)  # that time is over: readers of this one are others
        most = self._share.room()
        if (alone := prompt.nbytes(specs)) > most:
            return self.refuse(name, engine, f"it alone would keep {alone} bytes; pd.handoff_share allows {most:.0f}")
        announced = known if known is not None and known.status is HandoffStatus.ANNOUNCED else None
        handoff = announced or self._begin(name, due)
        handoff.engine, handoff.session, handoff.spec, handoff.tokens = engine, session, specs[0], prompt.tokens
        handoff.lease_s, handoff.due, handoff.key = lease_s, due, key
        self._live.set(handoff, max(self._live.until(handoff), due))
        why = "its client ended while it was being opened"
        try:
            why = yield from self._keep(handoff, prompt.objects(specs))
            if handoff.status is not HandoffStatus.ANNOUNCED:
                why = self._refused(name, handoff.story())  # it ended while it was being opened
        finally:
            if why and handoff.status is HandoffStatus.ANNOUNCED:
                self._refuse(handoff, why)
        if why:
            return why
        handoff.enter(HandoffStatus.OPEN)
        handoff.charge = charge
        self._live.set(handoff, due)
        self._counts["opened"] += 1
        log.debug("handoff_opened", handoff=name, engine=engine, tokens=prompt.tokens, to_store=len(handoff.pending))
        self._tell(handoff)
        return ""

    def _keep(self, handoff: HandoffRecord, slices: Iterable[Mapping[bytes, NewObject]]) -> Slices[str]:
        """Keep these objects for a hand-off that is being opened. Why they cannot be, else empty."""
        share, key = self._share, handoff.key
        objects: list[Mapping[bytes, NewObject]] = []
        share.begin(handoff)
        kept, unfinished = share.with_all(key, 0), share.unfinished.nbytes
        fixed = wanted = 0
        for few in slices:
            objects.append(few)
            fixed += share.unfinished.more(few)
            wanted += share.more_of(key, few)
            yield
            if handoff.status is not HandoffStatus.ANNOUNCED:
                return handoff.story()
        # Another one may have begun to keep some of these between two slices: it counts once, and what has ended not.
        wanted += min(kept, share.with_all(key, 0))
        fixed += min(unfinished, share.unfinished.nbytes) - share.moved(key, wanted)
        if fixed > (most := share.room()):
            return f"hand-offs that are not complete would keep {fixed} bytes; pd.handoff_share allows {most:.0f}"
        lacks = False
        try:
            for few in objects:
                while (taken := self._take(handoff, few)) is None:
                    if not lacks:
                        lacks = True
                        share.lacks(key)
                    if not self._make_room(key, wanted):
                        if share.fits(key, few):
                            return "the arena has no room: what is in it is pinned, or being written"
                        return (
                            f"hand-offs would keep more of the {most:.0f} bytes of pd.handoff_share than this key may"
                        )
                    yield from self.return_all()
                    if handoff.status is not HandoffStatus.ANNOUNCED:
                        return handoff.story()
                share.add(handoff, few)
                handoff.keep(few)
                handoff.pending |= taken.pending
                handoff.reserved_here |= taken.reserved_here
                handoff.reserved_there |= taken.reserved_there
                self._look_after(handoff, taken.stored_by_others)
                for each in taken.pending:
                    self._waiting.setdefault(each, []).append(handoff)
                yield
                if handoff.status is not HandoffStatus.ANNOUNCED:
                    return handoff.story()
        finally:
            if lacks:
                share.lacks_no_more(key)
        return ""

    def _take(self, handoff: HandoffRecord, few: Mapping[bytes, NewObject]) -> Reserved | None:
        return take(self._pool, handoff.owner, few) if self._share.fits(handoff.key, few) else None

    def take_reservations(
        self, engine: str, objects: Sequence[NewObject], owner: Owner, *, loads: Callable[[bytes], bool]
    ) -> dict[bytes, int]:
        """A step saves these: of those for which a hand-off keeps room, the offset in the arena.

        Whichever engine's step comes first stores them for all hand-offs that wait for them: who has reserved the room
        may have to wait long for its turn, in its engine. What an engine is to load from another one's hand-off it
        leaves to that one.

        :param engine: the step's. :param owner: the step's, whose room it is from now on.
        :param loads: does that engine wait for an object that is still to be stored?
        """
        found: dict[bytes, int] = {}
        for new in objects:
            waiting = self._waiting.get(new.key, ())
            handoff = next((each for each in waiting if new.key in each.reserved_here), None)
            if handoff is None or (handoff.engine != engine and loads(new.key)):
                continue
            offset = self._pool.take_reservation(new, handoff.owner, owner)
            if offset is not None:
                found[new.key] = offset
                for each in waiting:
                    self._drop_room(each, new.key)
        return found

    def cancel_reservations(self, engine: str, keys: Iterable[bytes]) -> None:
        """A load of this engine brings these into the arena by itself: no room is kept for them any more."""
        for key in keys:
            waiting = self._waiting.get(key, ())
            keeper = next((each for each in waiting if key in each.reserved_here), None)
            if keeper is not None and keeper.engine != engine:
                continue  # readers may follow what is to come there
            if keeper is not None:
                self._revoke_reservations([key], keeper.owner, "its engine loads it from behind the arena")
            for handoff in waiting:
                self._drop_room(handoff, key)
                if self._waits(handoff, key):
                    self._look_after(handoff, [key])

    def refuse(self, name: str, engine: str, why: str) -> str:
        """Tell who waits for a hand-off, and who asks for it later, that this engine does not open it: `why`, returned.

        Where another one has it open, or the engine itself, that one stays.
        """
        handoff = self._by_name.get(name)
        if handoff is None or handoff not in self._live:
            handoff = self._begin(name, math.inf)
        elif handoff.engine:
            return self._refused(name, why)
        handoff.engine = engine
        return self._refuse(handoff, why)

    def end(self, name: str, engine: str, tokens: int, reason: str, now: float) -> None:
        """Note that a hand-off's engine computes no more of it; with a reason, also of one that it never opened."""
        handoff = self._by_name.get(name)
        if reason and (handoff is None or not handoff.engine):
            self.refuse(name, engine, reason)
        if handoff is None or handoff.engine != engine or handoff.status is not HandoffStatus.OPEN:
            return
        if reason or tokens < handoff.tokens:
            why = reason or f"its engine computed {tokens} of {handoff.tokens} tokens"
            self._close(handoff, HandoffStatus.FAILED, why)
            return
        handoff.ended = True
        if handoff.unsaved:
            self._live.set(handoff, min(handoff.due, now + ENDED_GRACE_S))
        self._complete_if_done(handoff, now)

    def give_up(self, handoff: HandoffRecord, reason: str) -> None:
        """A part of it, at another server, will not be whole: neither is it."""
        if handoff.status.readable:
            over = HandoffStatus.FAILED if handoff.status is HandoffStatus.OPEN else HandoffStatus.REVOKED
            self._close(handoff, over, reason)

    def part_stored(self, handoff: HandoffRecord) -> None:
        """Everything of a part of it, at another server, is stored."""
        handoff.parts -= 1
        self._complete_if_done(handoff, time.monotonic())

    def part_released(self, handoff: HandoffRecord) -> None:
        """Release a hand-off of which a part, at another server, is not needed any more."""
        if handoff.status.readable:
            self._close(handoff, HandoffStatus.RELEASED, "")

    def release(self, name: str, until: float) -> None:
        """End a hand-off that no reader needs. One that is not open yet cannot be opened before `until`."""
        handoff = self._by_name.get(name)
        if handoff is None or handoff.status is HandoffStatus.ANNOUNCED:
            self._released_before_open.add(name, until)
        if handoff is not None and (handoff.status.readable or handoff.status is HandoffStatus.ANNOUNCED):
            self._close(handoff, HandoffStatus.RELEASED, "")

    # What becomes of its objects -----------------------------------------------------------------

    def stored(self, keys: Iterable[bytes], now: float) -> None:
        """Note that these are whole in the arena: nothing takes them from there any more; hand-offs hear in turns."""
        waiting = [(key, self._waiting.pop(key)) for key in keys if key in self._waiting]
        if waiting:
            owner: Owner = ("stored", next(self._serials))
            self._pool.hold([key for key, _ in waiting], owner, math.inf)
            self._notes.add(self._note_stored(waiting, owner, now))

    def _note_stored(
        self, waiting: Sequence[tuple[bytes, Sequence[HandoffRecord]]], owner: Owner, now: float
    ) -> Slices[None]:
        try:
            for key, handoffs in waiting:
                for handoff in handoffs:
                    if self._waits(handoff, key):
                        handoff.pending.discard(key)
                        self._drop_room(handoff, key)
                        handoff.stored_by_others.discard(key)
                        self._pool.hold([key], handoff.owner, math.inf)
                        self._complete_if_done(handoff, now)
                    yield
                self._pool.release(owner, [key])
        finally:
            self._pool.release(owner)

    def lost(self, keys: Iterable[bytes], reason: str) -> None:
        """Note that these were being saved, and this save of them was given up.

        It may have been another request's: an engine that has not ended its hand-off may save them yet.
        """
        if not self._waiting:
            return
        lost: dict[HandoffRecord, list[bytes]] = {}
        for key in keys:
            for handoff in self._waiting.get(key, ()):
                if self._waits(handoff, key) and key not in handoff.reserved_here:
                    lost.setdefault(handoff, []).append(key)
        for handoff, mine in lost.items():
            self._keep_again(handoff, mine, f"a save of it was given up: {reason}")

    def purge(self, reason: str) -> None:
        """Nothing that is stored may be read any more; in turns, until :attr:`returning` is over."""
        self._end_each([handoff for handoff in self._live if handoff.engine], HandoffStatus.REVOKED, reason)

    def lose_engine(self, engine: str, reason: str) -> None:
        """A worker of this engine is gone, or its weights are: what its engine has open fails; in turns, as above."""
        mine = (each for each in self._live if each.engine == engine and each.status is not HandoffStatus.COMPLETE)
        self._end_each(list(mine), HandoffStatus.FAILED, reason)

    def lose_session(self, session: int, reason: str) -> None:
        """A client is gone: nobody ends what it has opened; in turns, as above."""
        mine = (each for each in self._live if each.engine and each.session == session and not each.ended)
        self._end_each(
            [each for each in mine if each.status is not HandoffStatus.COMPLETE], HandoffStatus.FAILED, reason
        )

    def expire(self, now: float) -> None:
        """End the hand-offs that were due by now."""
        for handoff in list(self._stored_by_others):
            self._look_for_others(handoff, now)
        for handoff in self._live.expire(now):
            match handoff.status:
                case HandoffStatus.ANNOUNCED:
                    self._close(handoff, HandoffStatus.FAILED, "nobody opened it in time")
                case HandoffStatus.OPEN if handoff.ended and handoff.unsaved:
                    story = f" ({handoff.given_up})" if handoff.given_up else ""
                    why = f"its engine ended it and did not save {handoff.unsaved} of its objects{story}"
                    self._close(handoff, HandoffStatus.FAILED, why)
                case HandoffStatus.OPEN:
                    why = f"it was not complete in time: {len(handoff.pending)} objects were not stored"
                    self._close(handoff, HandoffStatus.FAILED, why)
                case HandoffStatus.COMPLETE:
                    why = "its lease is over" if handoff.claims else "nobody came for it within its lease"
                    self._close(handoff, HandoffStatus.REVOKED, why)

    # ---------------------------------------------------------------------------------------------

    def _refuse(self, handoff: HandoffRecord, why: str) -> str:
        """End one that was not opened. What of it was kept already returns."""
        self._end(handoff, HandoffStatus.FAILED, why)
        return self._refused(handoff.name, why)

    def _refused(self, name: str, why: str) -> str:
        why = shortened(why)
        self._counts["refused"] += 1
        if (unlogged := self._log_limit.admit(time.monotonic())) is not None:
            log.info("handoff_refused", handoff=name, reason=why, unlogged=unlogged)
        return why

    def _make_room(self, key: str, wanted: int) -> bool:
        """Take one back for a hand-off that is being opened; False = none makes room for it.

        :param key: of its client. :param wanted: what all of that client's key are to keep.
        """
        victim = self._share.next_to_go(key, wanted)
        if victim is None:
            return False
        if victim.status is HandoffStatus.COMPLETE:
            self._close(victim, HandoffStatus.REVOKED, "newer hand-offs needed its room")
        else:
            why = "its key has hand-offs keep more than its part of pd.handoff_share, and others needed the room"
            self._close(victim, HandoffStatus.FAILED, why)
        return True

    def _look_for_others(self, handoff: HandoffRecord, now: float) -> None:
        stored_by_others = list(handoff.stored_by_others)
        if not stored_by_others:
            self._stored_by_others.pop(handoff, None)
            return
        here = [key for key, there in zip(stored_by_others, self._pool.lookup(stored_by_others), strict=True) if there]
        self.stored(here, now)
        gone = [
            key
            for key in handoff.stored_by_others.difference(here)
            # Of the others it is to hear that they came, though they may be hidden by then.
            if handoff in self._waiting.get(key, ()) and self._pool.writer(key) is None
        ]
        if gone:
            self._keep_again(
                handoff, gone, f"{len(gone)} of its objects did not come: their save or fetch was given up"
            )

    def _look_after(self, handoff: HandoffRecord, keys: Iterable[bytes]) -> None:
        """Look from time to time what becomes of these, for nobody tells."""
        handoff.stored_by_others.update(keys)
        if handoff.stored_by_others:
            self._stored_by_others[handoff] = None

    def _keep_again(self, handoff: HandoffRecord, keys: Sequence[bytes], why: str) -> None:
        """Reserve room once more for objects that nobody stores now: the hand-off's engine may save them yet.

        :param why: it fails, where its engine has ended it or there is no room.
        """
        if not self._stays(handoff):
            return
        if handoff.ended:
            self._close(handoff, HandoffStatus.FAILED, why)
            return
        room = self._pool.reserve([handoff.objects[key] for key in keys], handoff.owner)
        mine = {key for key, place in zip(keys, room, strict=True) if place.outcome is ReserveStatus.RESERVED}
        handoff.reserved_here |= mine
        if any(place.outcome in (ReserveStatus.FULL, ReserveStatus.TOO_LARGE) for place in room):
            self._close(handoff, HandoffStatus.FAILED, f"{why}; the arena has no room to save it again")
            return
        handoff.given_up = shortened(why)
        reserved_there, untold = sort_by_writer(self._pool, set(keys) - mine)
        handoff.reserved_there |= reserved_there
        handoff.stored_by_others.difference_update(keys)
        self._look_after(handoff, untold)

    def _complete_if_done(self, handoff: HandoffRecord, now: float) -> None:
        done = handoff.ended and not (handoff.pending or handoff.parts) and handoff.status is HandoffStatus.OPEN
        if done and handoff not in self._to_end:
            handoff.enter(HandoffStatus.COMPLETE)
            self._live.set(handoff, now + handoff.lease_s)
            self._share.completed(handoff, len(self._live))
            self._returning.add(self._uncount(handoff))
            self._counts["completed"] += 1
            log.debug("handoff_complete", handoff=handoff.name, claims=handoff.claims)
            self._tell(handoff)

    def _close(self, handoff: HandoffRecord, status: HandoffStatus, reason: str) -> None:
        before = handoff.status
        self._end(handoff, status, reason)
        self._counts[status.value] += 1
        names = {"handoff": handoff.name, "engine": handoff.engine}
        unlogged = self._log_limit.admit(time.monotonic()) if status is not HandoffStatus.RELEASED else None
        if unlogged is not None:
            became = {"was": before.value, "state": status.value, "reason": handoff.reason}
            log.info("handoff_over", **names, **became, unlogged=unlogged)

    def _end_each(self, handoffs: Sequence[HandoffRecord], status: HandoffStatus, reason: str) -> None:
        """End many, in turns. From now on none of them takes note of what is stored or lost, nor becomes complete."""
        if handoffs:
            self._to_end.update(handoffs)
            self._returning.add(self._ending(handoffs, status, reason))

    def _ending(self, handoffs: Sequence[HandoffRecord], status: HandoffStatus, reason: str) -> Slices[None]:
        for handoff in handoffs:
            if handoff in self._live:
                self._close(handoff, status, reason)
            yield

    def _end(self, handoff: HandoffRecord, status: HandoffStatus, reason: str) -> None:
        was_open = handoff.status is not HandoffStatus.COMPLETE
        handoff.enter(status)
        handoff.reason = shortened(reason)  # remembered beyond its client, and charged to nobody
        self._live.discard(handoff)
        self._to_end.discard(handoff)
        self._stored_by_others.pop(handoff, None)
        self._share.over(handoff)
        why = f"hand-off {handoff.name!r} {handoff.story()}"
        self._returning.add(self._give_all_back(handoff, why, was_open=was_open))
        self._over.append(handoff)
        if len(self._over) > REMEMBERED:
            oldest = self._over.popleft()
            if self._by_name.get(oldest.name) is oldest:
                del self._by_name[oldest.name]
        self._tell(handoff)

    def _give_all_back(self, handoff: HandoffRecord, why: str, *, was_open: bool) -> Slices[None]:
        """Pins, and room that is reserved, return to the arena; the client that opened it is not charged any more."""
        objects = handoff.objects
        while objects:
            piece = dict(objects.popitem() for _ in range(min(PIECE, len(objects))))  # the last first
            for key in piece:
                others = [each for each in self._waiting.get(key, ()) if each is not handoff]
                if others:
                    self._waiting[key] = others
                else:
                    self._waiting.pop(key, None)
            reserved_here = [
                key for key, new in piece.items() if key in handoff.reserved_here and not self._pass_on(new, handoff)
            ]
            handoff.pending.difference_update(piece)
            handoff.reserved_here.difference_update(piece)
            if reserved_here:
                self._revoke_reservations(reserved_here, handoff.owner, why)
                self.lost(reserved_here, why)
            self._pool.release(handoff.owner, list(reversed(piece)))
            self._share.discard(handoff, piece, unfinished=was_open)
            yield
        handoff.reserved_there.clear()
        handoff.stored_by_others.clear()
        if handoff.charge is not None:
            handoff.charge.release()

    def _uncount(self, handoff: HandoffRecord) -> Slices[None]:
        """Stop counting objects that are complete; what takes any of them away is done behind this."""
        left = iter(handoff.objects.items())
        while piece := dict(itertools.islice(left, PIECE)):
            self._share.finish(handoff, piece)
            yield

    def _drop_room(self, handoff: HandoffRecord, key: bytes) -> None:
        """Note that no room waits for a step that saves this object; with the last one a short grace is over."""
        unsaved = handoff.unsaved
        handoff.reserved_here.discard(key)
        handoff.reserved_there.discard(key)
        if unsaved and not handoff.unsaved and handoff.ended and handoff.status is HandoffStatus.OPEN:
            self._live.set(handoff, handoff.due)

    def _waits(self, handoff: HandoffRecord, key: bytes) -> bool:
        """Is it still to store this object, and not over?"""
        return key in handoff.pending and self._stays(handoff)

    def _stays(self, handoff: HandoffRecord) -> bool:
        """Is it not over, nor about to be?"""
        return handoff in self._live and handoff not in self._to_end

    @property
    def returning(self) -> bool:
        """Are hand-offs still to be ended, or is some of what those kept that are over still to be given back?"""
        return self._returning.busy

    def return_all(self) -> Slices[None]:
        """Do what is put off: for somebody who waits for room, or for the end of hand-offs."""
        yield from self._notes.do_all()
        yield from self._returning.do_all()

    def _begin(self, name: str, due: float) -> HandoffRecord:
        handoff = self._by_name[name] = HandoffRecord(name, next(self._serials))
        self._live.set(handoff, due)
        return handoff

    def _forget(self, handoff: HandoffRecord) -> None:
        """Forget a hand-off that never was more than a name that somebody waited for."""
        self._live.discard(handoff)
        if self._by_name.get(handoff.name) is handoff:
            del self._by_name[handoff.name]

    def _pass_on(self, new: NewObject, handoff: HandoffRecord) -> bool:
        """Let another hand-off that waits for the object keep its room; one that steps still come for, if there is."""
        others = [each for each in self._waiting.get(new.key, ()) if self._waits(each, new.key)]
        other = min(others, key=lambda each: each.ended, default=None)
        if other is None or self._pool.take_reservation(new, handoff.owner, other.owner) is None:
            return False
        other.reserved_here.add(new.key)
        other.reserved_there.discard(new.key)
        return True

    def _tell(self, handoff: HandoffRecord) -> None:
        self._changed()
        watchers, handoff.watchers = handoff.watchers, {}
        if watchers:
            self._telling.append((handoff, iter(watchers)))
            if len(self._telling) == 1:
                self._soon(self._tell_some)

    def _tell_some(self) -> None:
        """Tell watchers; where there are many, in turns with the rest of the loop."""
        until = time.monotonic() + SLICE_S
        try:
            while self._telling:
                handoff, left = self._telling[0]
                told = next(left, None)
                if told is None:
                    self._telling.popleft()
                    continue
                told(handoff)
                if time.monotonic() >= until:
                    break
        finally:  # what one of them raises keeps it from no other
            if self._telling:
                self._soon(self._tell_some)
