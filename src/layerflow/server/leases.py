"""What is pinned for requests that wait: each lease is counted for a client, and its pins end few at a time."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from layerflow.places import NO_PLACE
from layerflow.pool.base import Owner, Pool
from layerflow.server.account import ENTRY_BYTES, Accounts, Charge, Refused
from layerflow.server.clients import ClientSession
from layerflow.server.incoming import IncomingObjects
from layerflow.server.mailboxes import Slices
from layerflow.server.share import LeaseShare
from layerflow.system.numbers import ascending

PINNED_BYTES = 64
"""What the pin of one object takes, in bytes: 36 to 54 in the table of its owner, by how full that is.

So does what is leased that is on its way, in a set: 32 to 66. The rest is within :data:`.ENTRY_BYTES` of the lease.
"""

PINS_PER_TURN = 1024
"""Pins that end before anything else may get its turn, some 0.4 ms: a hit of usual length ends in one."""


WANTED_S = 1.0
"""How long keys are held to their parts once somebody found no room, in seconds."""


class _KeyLease(NamedTuple):
    """What a lease of a remote key pins, in bytes, or a plan."""

    key: str
    number: int
    nbytes: int
    planned: bool


def lease_owner(engine: str, request: str) -> tuple[str, str, str]:
    """The owner of the pins of what a lookup has leased."""
    return ("lease", engine, request)


def is_lease_of(engine: str, owner: Owner) -> bool:
    """Return whether this owner is one of an engine's leases or lookups."""
    return isinstance(owner, tuple) and owner[:2] == ("lease", engine)


class Leases:
    """The leases of all requests, by the owner of their pins.

    A lease outlives its client, for the engine's workers may load what it protects. What clients who have gone leave
    behind is counted together, for each key, or engine of this machine: what does not fit ends.

    Where pins reach ``pool.lease_share``, leases of remote keys end for hits of this machine's engines, and for those
    of another key up to an equal part: of whoever has most, the oldest. A plan ends for nobody, so that the plans of
    all remote keys together may pin half of what leases may.

    :param soon: calls something on the loop's next round.
    """

    def __init__(
        self,
        pool: Pool,
        incoming: IncomingObjects,
        accounts: Accounts,
        soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._pool = pool
        self._incoming = incoming
        self._accounts = accounts
        self._soon = soon
        self._charges: dict[Owner, Charge] = {}  #: exactly those that pin something, or will once it has come
        self._of_engine: dict[str, dict[Owner, None]] = {}  #: the same
        self._overtaken: set[Owner] = set()  # those among them that a reset is to end
        self._of_keys: dict[Owner, _KeyLease] = {}  #: likewise, of remote keys, and their plans
        self._owners: dict[int, Owner] = {}  # of those that may end for others, by number
        self._planned = 0  # bytes that the plans among them pin
        self._numbers = ascending()
        self._share = LeaseShare(lambda: pool.lease_bytes - (pool.pinned_bytes - self._share.nbytes))
        self._expired = -math.inf
        self._scheduled = False
        pool.listen_owners(self._released)
        incoming.owner_listener = self._released
        incoming.pin_leased = self._pin_come

    # What is kept --------------------------------------------------------------------------------

    def keep(self, asker: ClientSession, request: str, lookup: Owner, until: float) -> None:
        """Make what a lookup has pinned, and leased of what is on its way, the request's lease, counted for `asker`.

        :param lookup: the lookup's owner. :param until: the lease lasts at least until then, monotonic seconds.
        :raises Refused: that is more than the asker may keep; the lookup keeps what it has.
        """
        owner = lease_owner(asker.engine, request)
        self._end_overtaken(owner)
        before = self._charges.get(owner)
        charge = asker.account.charge(
            f"request {request!r}: the lease of a hit",
            self.held(owner, lookup) * PINNED_BYTES,
            giver=before,
            given=before.nbytes if before is not None else 0,
        )
        self._count(owner, charge, asker)
        self._pool.transfer_pins(lookup, owner, until)
        self._incoming.transfer_lease(lookup, owner, until)
        self._count_bytes(owner, asker.rights.key)

    def charge_plan(self, asker: ClientSession, request: str, lookup: Owner) -> Charge:
        """Count what a lookup and the request's lease pin for a plan, which takes their pins over next.

        :param lookup: the lookup's owner.
        :raises Refused: that is more than the asker, or its key, may keep; the lookup keeps what it has.
        """
        owner = lease_owner(asker.engine, request)
        self._end_overtaken(owner)
        if asker.rights.key:
            nbytes = self._pool.pinned_bytes_by(owner) + self._pool.pinned_bytes_by(lookup)
            most = self._pool.lease_bytes / 2
            if self._planned + nbytes > most:
                raise Refused("quota", f"request {request!r}: remote keys' plans may pin {most:.0f} bytes; load sooner")
        before, given = self._charges.get(owner), 0
        if before is not None:
            coming = self._incoming.leased_by(owner)  # stays the lease's
            given = before.nbytes - (ENTRY_BYTES + coming * PINNED_BYTES if coming else 0)
        pinned = self._pool.pinned_by(owner, lookup)
        what = f"request {request!r}: the plan of a hit"
        return asker.account.charge(what, pinned * PINNED_BYTES, giver=before, given=given)

    def plan_kept(self, plan: Owner, asker: ClientSession) -> None:
        """A plan has taken over what was charged for it."""
        self._count_bytes(plan, asker.rights.key, planned=True)

    def from_plan(self, plan: Owner, charge: Charge, asker: ClientSession, request: str, until: float) -> None:
        """Make what a plan pins the request's lease until then, monotonic seconds.

        :param charge: of the plan, which counts for the lease from now on; of an asker who has gone, none does.
        """
        owner = lease_owner(asker.engine, request)
        self._end_overtaken(owner)
        self._pool.transfer_pins(plan, owner, until)
        if charge.account.holds(charge):
            self._count(owner, charge, asker)
        counted = self._charges.get(owner)
        if counted is not None:
            counted.resize(self.held(owner) * PINNED_BYTES)
            self._released(owner)
        else:
            self._leave(owner, asker.engine, _who(asker))
        self._count_bytes(owner, asker.rights.key)

    def charge_left(self, asker: ClientSession, objects: int) -> Charge:
        """Count for an asker who has gone so many objects that somebody still reads, whether or not they fit."""
        return self._accounts.charge_left(_who(asker), "", objects * PINNED_BYTES, always=True)

    def charged(self, asker: ClientSession, request: str) -> tuple[Charge | None, int]:
        """The charge of the lease that a request has, and for how many objects it is; None = it has none."""
        charge = self._charges.get(lease_owner(asker.engine, request))
        return charge, (charge.nbytes - ENTRY_BYTES) // PINNED_BYTES if charge is not None else 0

    def holds(self, owner: Owner) -> bool:
        """Does this owner pin anything, or has it leased something that is on its way?"""
        return bool(self.held(owner))

    def held(self, *owners: Owner) -> int:
        """How many objects these owners pin, or have leased that are on their way; what several have counts once."""
        return self._pool.pinned_by(*owners) + self._incoming.leased_by(*owners)

    def _count(self, owner: Owner, charge: Charge, asker: ClientSession) -> None:
        before = self._charges.get(owner)
        self._enter(owner, asker.engine, charge)
        if before is not None:
            before.release()
        charge.on_end(functools.partial(self._leave, owner, asker.engine, _who(asker)))

    def _leave(self, owner: Owner, engine: str, who: Hashable) -> None:
        """Its client has gone."""
        self._end_overtaken(owner)
        self._forget(owner, engine)
        held = self.held(owner)
        if held:
            what = "the lease of a client that has gone"
            try:
                self._enter(owner, engine, self._accounts.charge_left(who, what, held * PINNED_BYTES))
            except Refused:
                self.end(owner)

    def _enter(self, owner: Owner, engine: str, charge: Charge) -> None:
        self._charges[owner] = charge
        self._of_engine.setdefault(engine, {})[owner] = None

    def _forget(self, owner: Owner, engine: str) -> None:
        charge = self._charges.pop(owner, None)
        if charge is not None:
            charge.release()
            self._overtaken.discard(owner)
            mine = self._of_engine[engine]
            del mine[owner]
            if not mine:
                del self._of_engine[engine]

    def _released(self, owner: Owner) -> None:
        """It pins nothing any more, or has leased nothing more of what is on its way."""
        lease = self._of_keys.get(owner)
        if lease is not None and not self._pool.pinned_by(owner):
            self._count_bytes(owner, lease.key, planned=lease.planned)
        if owner in self._charges and not self.held(owner):
            assert isinstance(owner, tuple)
            self._forget(owner, owner[1])

    # Whose leases end for others ------------------------------------------------------------------

    def pin(self, asker: ClientSession, keys: Sequence[bytes], lookup: Owner, until: float) -> bytes:
        """Pin for a lookup what is here of these, as far as leases may; as :meth:`.MemoryPool.lease`."""
        key = asker.rights.key
        if key and self._share.is_held(key, time.monotonic()):
            return NO_PLACE * len(keys)
        return self._pool.lease(keys, lookup, until)

    def make_room(self, asker: ClientSession, keys: Sequence[bytes], lookup: Owner) -> bool:
        """Let a lease of a remote key end where not all of these could be pinned. Is it worth another try?"""
        if not self._of_keys:
            return False
        key, short = asker.rights.key, self._pool.unpinned(keys, lookup)
        if not short:
            self._share.content(key)
            return False
        if key and self._share.is_held(key, time.monotonic()):
            return False
        if self._pool.lets_go:
            return True
        wanted = self._share.want(key, short, time.monotonic() + WANTED_S)
        number = self._share.next_to_end(key, wanted) if wanted else None
        if number is None:
            return False
        self.let_go(self._owners[number])
        return True

    def _count_bytes(self, owner: Owner, key: str, *, planned: bool = False) -> None:
        """Count what a lease, or a plan, pins for the key of whoever has asked; "" = nobody's but this machine's.

        What is still to come of a lease counts once it is pinned.
        """
        self._uncount_bytes(owner)
        if key and self.held(owner):
            lease = self._of_keys[owner] = _KeyLease(key, next(self._numbers), 0, planned)
            if not planned:
                self._owners[lease.number] = owner
            self._count_more_bytes(owner, lease, self._pool.pinned_bytes_by(owner))

    def _count_more_bytes(self, owner: Owner, lease: _KeyLease, nbytes: int) -> None:
        """It pins so much more."""
        if not nbytes:
            return
        lease = self._of_keys[owner] = lease._replace(nbytes=lease.nbytes + nbytes)
        self._share.pin(lease.key, nbytes)
        if lease.planned:
            self._planned += nbytes
        else:
            self._share.lend(lease.key, lease.number, lease.nbytes)

    def _pin_come(self, keys: Sequence[bytes], owner: Owner, until: float) -> None:
        """Pin what has come for an owner that has leased it, as far as leases may."""
        lease = self._of_keys.get(owner)
        if lease is not None and self._share.is_held(lease.key, time.monotonic()):
            return
        nbytes = self._pool.hold(keys, owner, until, lease=True)
        if lease is not None:
            self._count_more_bytes(owner, lease, nbytes)

    def _uncount_bytes(self, owner: Owner) -> None:
        lease = self._of_keys.pop(owner, None)
        if lease is None:
            return
        if lease.planned:
            self._planned -= lease.nbytes
        else:
            del self._owners[lease.number]
            self._share.withdraw(lease.key, lease.number)
        self._share.free(lease.key, lease.nbytes, withdrawn=not lease.planned)

    # What ends -----------------------------------------------------------------------------------

    def end(self, owner: Owner) -> None:
        """The owner's pins are its no more, nor is what it has leased that is on its way."""
        self.let_go(owner)
        self._incoming.drop_lease(owner)

    def end_all(self, engine: str) -> Slices[int]:
        """End what an engine has leased, in slices; how many leases. Those that are made from now on stay.

        What its lookups have leased of what is on its way ends, too: nobody else ends it before that has come.
        """
        leases = list(self._of_engine.get(engine, ()))
        self._overtaken.update(leases)
        others = self._incoming.lease_owners() - self._charges.keys()
        lookups = [owner for owner in others if is_lease_of(engine, owner)]

        def end() -> Slices[int]:
            ended = 0
            for owner in leases:
                ended += self._end_overtaken(owner)
                yield
            for owner in lookups:
                if self._incoming.leased_by(owner):
                    self.end(owner)
                    ended += 1
                yield
            return ended

        return end()

    def _end_overtaken(self, owner: Owner) -> bool:
        """End a lease that a reset is to end, whose turn may not have come; was it one?"""
        if owner not in self._overtaken:
            return False
        self._overtaken.discard(owner)
        self.end(owner)
        return True

    def let_go(self, owner: Owner) -> None:
        """The owner's pins are its no more; the first end at once, others in turns with the rest of the loop."""
        if self._pool.pinned_by(owner):
            self._pool.let_go(owner)
            self._begin()

    def expire(self, now: float) -> None:
        """Pins whose time is over at `now`, monotonic seconds, end: the first at once, others in turns."""
        self._expired = now
        self._begin()

    def _begin(self) -> None:
        if not self._scheduled:
            self._turn()

    def _turn(self) -> None:
        # Behind a turn that ends any there is another: however often pins are let go of, no more end in a round.
        self._scheduled = False
        if self._pool.expire(self._expired, PINS_PER_TURN):
            self._scheduled = True
            self._soon(self._turn)


def _who(asker: ClientSession) -> Hashable:
    return asker.rights.key or asker.engine
