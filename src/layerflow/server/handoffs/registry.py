"""The hand-offs of one server: opened, completed, claimed, and taken back.

A hand-off pins what it needs and is stored, and keeps room for what is still to be stored; the saves of its engine take
that room over, key by key. It fails as soon as something of it will never be stored, and its readers hear of it then.
What nobody claims pins at most a set share of the arena: past it the oldest goes, so that a decoder which never comes
costs the prefiller nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from layerflow.pool.base import NewObject, Owner, Pool
from layerflow.server.handoffs.contents import take
from layerflow.server.handoffs.early import ReleasedEarly
from layerflow.server.handoffs.handoff import REMEMBERED, Handoff, HandoffStatistics, HandoffStatus, Told
from layerflow.server.handoffs.kept import KeptObjects
from layerflow.spec import ModelSpec

ENDED_GRACE_S = 0.5
"""Once its engine has ended it, a hand-off waits so long for steps that save the rest: their socket is another one."""

Withdraw = Callable[[Sequence[bytes], Owner, str], None]
log = structlog.get_logger("layerflow.server.handoffs")


class Handoffs:
    """All hand-offs of a server. `now` is monotonic seconds.

    :param room_bytes: of the arena. :param share: of it that hand-offs may keep together.
    :param withdraw: takes reserved room of keys that nobody will write, and why; it returns once no load touches it.
    :param soon: calls a function a moment later, when nothing else is under way.
    :param changed: told of each change of a state, and of each claim.
    """

    def __init__(
        self,
        pool: Pool,
        room_bytes: int,
        share: Callable[[], float],
        withdraw: Withdraw,
        soon: Callable[[Callable[[], None]], object],
        changed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._room_bytes = room_bytes
        self._share = share
        self._withdraw = withdraw
        self._soon = soon
        self._changed = changed
        self._serials = itertools.count(1)
        self._by_name: dict[str, Handoff] = {}
        self._over: deque[Handoff] = deque()
        self._waiting: dict[bytes, list[Handoff]] = {}
        self._kept = KeptObjects()
        self._released_early = ReleasedEarly()
        self._counts: Counter[str] = Counter()

    # Asked ---------------------------------------------------------------------------------------

    def get(self, name: str) -> Handoff | None:
        """By name; None = nobody has spoken of it, or its end is long ago."""
        return self._by_name.get(name)

    def live(self) -> list[Handoff]:
        """Those that are not over, oldest first."""
        live = (HandoffStatus.ANNOUNCED, HandoffStatus.OPEN, HandoffStatus.COMPLETE)
        return sorted((each for each in self._by_name.values() if each.status in live), key=lambda each: each.serial)

    @property
    def wanted(self) -> bool:
        """Is one being computed, or does one wait for its reader?"""
        return any(
            each.status is HandoffStatus.OPEN or (each.status is HandoffStatus.COMPLETE and not each.claims)
            for each in self._by_name.values()
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
            kept_bytes=self._kept.nbytes,
            opened=counts["opened"],
            completed=counts["completed"],
            claimed=counts["claimed"],
            failed=counts[HandoffStatus.FAILED.value],
            revoked=counts[HandoffStatus.REVOKED.value],
            refused=counts["refused"],
            released=counts[HandoffStatus.RELEASED.value],
        )

    # Readers -------------------------------------------------------------------------------------

    def announce(self, name: str, until: float) -> Handoff:
        """The hand-off of this name; one that nobody knows is announced, and forgotten at `until`."""
        known = self._by_name.get(name)
        if self._released_early.forget(name) or known is None:
            known = self._by_name[name] = Handoff(name, next(self._serials))
            known.due = until
        elif known.status is HandoffStatus.ANNOUNCED:
            known.due = max(known.due, until)
        return known

    def watch(self, handoff: Handoff, told: Told) -> None:
        """Tell of its next state, once."""
        handoff.watchers.append(told)

    def unwatch(self, handoff: Handoff, told: Told) -> None:
        """Nobody waits any more."""
        if told in handoff.watchers:
            handoff.watchers.remove(told)

    def claim(self, handoff: Handoff, now: float, lease_s: float) -> None:
        """A reader has come: it is kept for as long as that reader may need, and others may come.

        :param lease_s: how long the reader has its hit leased.
        """
        handoff.claims += 1
        self._counts["claimed"] += 1
        self._changed()
        if handoff.status is HandoffStatus.COMPLETE:
            handoff.due = max(handoff.due, now + max(lease_s, handoff.lease_s))

    # The engine that computes it -----------------------------------------------------------------

    def open(
        self,
        name: str,
        engine: str,
        session: int,
        spec: ModelSpec,
        tokens: int,
        objects: Mapping[bytes, NewObject],
        lease_s: float,
        due: float,
    ) -> str:
        """Pin what is stored of these objects and reserve room for the others. Why not, else empty.

        :param due: it has failed if it is not complete by then.
        """
        known = self._by_name.get(name)
        if known is not None and known.status.readable:
            return self._refused(name, f"a hand-off of this name is {known.status.value} already")
        if self._released_early.holds(name, time.monotonic()):
            return self._refused(name, "its reader has released it already")
        if why := self._make_share(objects):
            return self._refused(name, why)
        handoff = known if known is not None and known.status is HandoffStatus.ANNOUNCED else None
        if handoff is None:
            handoff = Handoff(name, next(self._serials))
        taken = take(self._pool, handoff.owner, objects)
        while taken is None and self._revoke_oldest():
            taken = take(self._pool, handoff.owner, objects)
        if taken is None:
            return self._refused(name, "the arena has no room: what is in it is pinned, or being written")
        handoff.pending, handoff.promised, handoff.foreign = taken
        handoff.engine, handoff.session, handoff.spec, handoff.tokens = engine, session, spec, tokens
        handoff.lease_s, handoff.due = lease_s, due
        handoff.objects = dict(objects)
        handoff.status = HandoffStatus.OPEN
        self._by_name[name] = handoff
        self._kept.add(objects)
        for key in handoff.pending:
            self._waiting.setdefault(key, []).append(handoff)
        self._counts["opened"] += 1
        log.debug("handoff_opened", handoff=name, engine=engine, tokens=tokens, to_store=len(handoff.pending))
        self._tell(handoff)
        return ""

    def adopt(self, engine: str, objects: Sequence[NewObject], owner: Owner) -> dict[bytes, int]:
        """A step of this engine saves these: of those for which a hand-off of it keeps room, the offset in the arena.

        :param owner: the step's, whose room it is from now on.
        """
        found: dict[bytes, int] = {}
        for new in objects:
            for handoff in self._waiting.get(new.key, ()):
                if new.key in handoff.promised and handoff.engine == engine:
                    offset = self._pool.adopt(new, handoff.owner, owner)
                    if offset is not None:
                        handoff.promised.discard(new.key)
                        found[new.key] = offset
                    break
        return found

    def give_back(self, engine: str, keys: Iterable[bytes]) -> None:
        """A load of this engine brings these into the arena by itself: no room is kept for them any more."""
        for key in keys:
            for handoff in self._waiting.get(key, ()):
                if key in handoff.promised and handoff.engine == engine:
                    handoff.promised.discard(key)
                    self._withdraw([key], handoff.owner, "its engine loads it from behind the arena")
                handoff.foreign.add(key)

    def end(self, name: str, engine: str, tokens: int, reason: str, now: float) -> None:
        """Its engine computes nothing more of it."""
        handoff = self._by_name.get(name)
        if handoff is None or handoff.engine != engine or handoff.status is not HandoffStatus.OPEN:
            return
        if reason or tokens < handoff.tokens:
            why = reason or f"its engine computed {tokens} of {handoff.tokens} tokens"
            self._close(handoff, HandoffStatus.FAILED, why)
            return
        handoff.ended = True
        if handoff.promised:
            handoff.due = min(handoff.due, now + ENDED_GRACE_S)
        self._settle(handoff, now)

    def give_up(self, handoff: Handoff, reason: str) -> None:
        """A part of it, at another server, will not be whole: neither is it. No reason: that part is released."""
        if handoff.status.readable:
            over = HandoffStatus.FAILED if handoff.status is HandoffStatus.OPEN else HandoffStatus.REVOKED
            self._close(handoff, over if reason else HandoffStatus.RELEASED, reason)

    def part_stored(self, handoff: Handoff) -> None:
        """Everything of a part of it, at another server, is stored."""
        handoff.parts -= 1
        self._settle(handoff, time.monotonic())

    def part_released(self, handoff: Handoff) -> None:
        """Nobody needs a part of it, at another server, any more: nor the rest."""
        if handoff.status.readable:
            self._close(handoff, HandoffStatus.RELEASED, "")

    def release(self, name: str, until: float) -> None:
        """Nobody needs it any more. One that nobody has opened is refused to who opens it before `until`."""
        handoff = self._by_name.get(name)
        if handoff is None or handoff.status is HandoffStatus.ANNOUNCED:
            self._released_early.add(name, until)
        if handoff is not None and (handoff.status.readable or handoff.status is HandoffStatus.ANNOUNCED):
            self._close(handoff, HandoffStatus.RELEASED, "")

    # What becomes of its objects -----------------------------------------------------------------

    def stored(self, keys: Iterable[bytes], now: float) -> None:
        """These are whole in the arena."""
        if not self._waiting:
            return
        for key in keys:
            for handoff in self._waiting.pop(key, ()):
                handoff.pending.discard(key)
                handoff.promised.discard(key)
                handoff.foreign.discard(key)
                self._pool.hold([key], handoff.owner, math.inf)
                self._settle(handoff, now)

    def lost(self, keys: Iterable[bytes], reason: str) -> None:
        """These were being saved, and will not be stored."""
        if not self._waiting:
            return
        for key in keys:
            for handoff in list(self._waiting.get(key, ())):
                if key not in handoff.promised:
                    self._close(handoff, HandoffStatus.FAILED, f"a save of it was given up: {reason}")

    def purge(self, reason: str) -> None:
        """Nothing that is stored may be read any more."""
        for handoff in self.live():
            if handoff.status.readable:
                self._close(handoff, HandoffStatus.REVOKED, reason)

    def lose_engine(self, engine: str, reason: str) -> None:
        """A worker of this engine is gone, or its weights are: what its engine has open fails."""
        for handoff in self.live():
            if handoff.status is HandoffStatus.OPEN and handoff.engine == engine:
                self._close(handoff, HandoffStatus.FAILED, reason)

    def lose_session(self, session: int, reason: str) -> None:
        """A client is gone: nobody ends what it has opened."""
        for handoff in self.live():
            if handoff.status is HandoffStatus.OPEN and handoff.session == session and not handoff.ended:
                self._close(handoff, HandoffStatus.FAILED, reason)

    def expire(self, now: float) -> None:
        """Whatever was due by now."""
        for handoff in self.live():
            if handoff.foreign:
                self._look_for_foreign(handoff, now)
            if handoff.due > now:
                continue
            match handoff.status:
                case HandoffStatus.ANNOUNCED:
                    self._close(handoff, HandoffStatus.FAILED, "nobody opened it in time")
                case HandoffStatus.OPEN if handoff.ended and handoff.promised:
                    why = f"its engine ended it and did not save {len(handoff.promised)} of its objects"
                    self._close(handoff, HandoffStatus.FAILED, why)
                case HandoffStatus.OPEN:
                    why = f"it was not complete in time: {len(handoff.pending)} objects were not stored"
                    self._close(handoff, HandoffStatus.FAILED, why)
                case HandoffStatus.COMPLETE:
                    why = "its lease is over" if handoff.claims else "nobody came for it within its lease"
                    self._close(handoff, HandoffStatus.REVOKED, why)

    # ---------------------------------------------------------------------------------------------

    def _refused(self, name: str, why: str) -> str:
        self._counts["refused"] += 1
        log.info("handoff_refused", handoff=name, reason=why)
        return why

    def _make_share(self, objects: Mapping[bytes, NewObject]) -> str:
        """Revoke the oldest complete ones until these objects are within the share; why they cannot be, else empty."""
        most = self._share() * self._room_bytes
        if self._kept.nbytes_with(objects) <= most:
            return ""
        fixed = {key: new.nbytes for key, new in objects.items()}
        for handoff in self.live():
            if handoff.status is HandoffStatus.OPEN:
                fixed |= {key: new.nbytes for key, new in handoff.objects.items()}
        if sum(fixed.values()) > most:
            return (
                f"hand-offs that are not complete would keep {sum(fixed.values())} bytes; pd.handoff_share allows "
                f"{most:.0f}"
            )
        while self._kept.nbytes_with(objects) > most and self._revoke_oldest():
            pass
        return ""

    def _revoke_oldest(self) -> bool:
        """Take back the complete one that was opened first, one that a reader has come for before others."""
        complete = [each for each in self.live() if each.status is HandoffStatus.COMPLETE]
        if not complete:
            return False
        victim = min(complete, key=lambda each: (not each.claims, each.serial))
        self._close(victim, HandoffStatus.REVOKED, "newer hand-offs needed its room")
        return True

    def _look_for_foreign(self, handoff: Handoff, now: float) -> None:
        foreign = list(handoff.foreign)
        here = [key for key, there in zip(foreign, self._pool.lookup(foreign), strict=True) if there]
        self.stored(here, now)
        gone = [key for key in handoff.foreign if self._pool.writer(key) is None]
        if gone and handoff.status is HandoffStatus.OPEN:
            self._close(handoff, HandoffStatus.FAILED, f"{len(gone)} of its objects did not come from behind the arena")

    def _settle(self, handoff: Handoff, now: float) -> None:
        if handoff.ended and not (handoff.pending or handoff.parts) and handoff.status is HandoffStatus.OPEN:
            handoff.status = HandoffStatus.COMPLETE
            handoff.due = now + handoff.lease_s
            self._counts["completed"] += 1
            log.debug("handoff_complete", handoff=handoff.name, claims=handoff.claims)
            self._tell(handoff)

    def _close(self, handoff: Handoff, status: HandoffStatus, reason: str) -> None:
        before, handoff.status, handoff.reason = handoff.status, status, reason
        self._counts[status.value] += 1
        for key in handoff.pending:
            others = self._waiting.get(key, [])
            if handoff in others:
                others.remove(handoff)
            if not others:
                self._waiting.pop(key, None)
        promised = [key for key in handoff.promised if not self._pass_on(key, handoff)]
        handoff.promised.clear()
        if promised:
            self._withdraw(promised, handoff.owner, f"hand-off {handoff.name!r} {handoff.story()}")
        self._pool.release(handoff.owner)
        self._kept.discard(handoff.objects)
        handoff.objects, handoff.pending = {}, set()
        self._over.append(handoff)
        if len(self._over) > REMEMBERED:
            oldest = self._over.popleft()
            if self._by_name.get(oldest.name) is oldest:
                del self._by_name[oldest.name]
        names = {"handoff": handoff.name, "engine": handoff.engine}
        if status is not HandoffStatus.RELEASED:
            log.info("handoff_over", **names, was=before.value, state=status.value, reason=reason)
        self._tell(handoff)

    def _pass_on(self, key: bytes, handoff: Handoff) -> bool:
        """Let another hand-off of the same engine that waits for the key keep its room."""
        other = next((each for each in self._waiting.get(key, ()) if each.engine == handoff.engine), None)
        if other is None or self._pool.adopt(handoff.objects[key], handoff.owner, other.owner) is None:
            return False
        other.promised.add(key)
        return True

    def _tell(self, handoff: Handoff) -> None:
        self._changed()
        watchers, handoff.watchers = handoff.watchers, []
        for told in watchers:
            self._soon(functools.partial(told, handoff))
