"""What is pinned for requests that wait: each lease is counted for a client, and its pins end few at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable

from layerflow.pool.base import Owner, Pool
from layerflow.server.account import Accounts, Charge, Refused
from layerflow.server.clients import ClientSession
from layerflow.server.incoming import IncomingObjects

PINNED_BYTES = 64
"""What the pin of one object takes, in bytes."""

PINS_PER_TURN = 256
"""Pins that end before anything else may get its turn."""


def lease_owner(engine: str, request: str) -> tuple[str, str, str]:
    """The owner of the pins of what a lookup has leased."""
    return ("lease", engine, request)


class Leases:
    """The leases of all requests, by the owner of their pins.

    A lease outlives its client, for the engine's workers may load what it protects. What clients who have gone leave
    behind is counted together, for each key, or engine of this machine: what does not fit ends.

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
        self._expired = -math.inf
        self._scheduled = False
        pool.listen_owners(self._released)
        incoming.owner_listener = self._released

    # What is kept --------------------------------------------------------------------------------

    def charge(self, asker: ClientSession, request: str, objects: int) -> None:
        """Count a request's lease for `asker`, with so many objects more; :meth:`settle` follows.

        :raises Refused: that is more than it may keep; the lease is counted as before.
        """
        owner = lease_owner(asker.engine, request)
        what = f"request {request!r}: the lease of a hit"
        charge = asker.account.charge(what, (self._held(owner) + objects) * PINNED_BYTES)
        self._count(owner, charge, asker)

    def from_plan(self, plan: Owner, charge: Charge, asker: ClientSession, request: str, until: float) -> None:
        """Make what a plan pins the request's lease until then, monotonic seconds.

        :param charge: of the plan, which counts for the lease from now on; of an asker who has gone, none does.
        """
        owner = lease_owner(asker.engine, request)
        self._pool.transfer_pins(plan, owner, until)
        if charge.account.holds(charge):
            self._count(owner, charge, asker)
        if owner in self._charges:
            self.settle(owner)
        else:
            self._leave(owner, _who(asker))

    def settle(self, owner: Owner) -> bool:
        """All that a lease is to hold it holds by now: count that, and nothing where it holds nothing.

        What nobody is charged for, as its client is lost or was refused, ends. Is there a lease?
        """
        charge = self._charges.get(owner)
        if charge is not None:
            charge.resize(self._held(owner) * PINNED_BYTES)
            self._released(owner)
        else:
            self._end(owner)
        return owner in self._charges

    def charge_left(self, asker: ClientSession, objects: int) -> Charge:
        """Count for an asker who has gone so many objects that somebody still reads, whether or not they fit."""
        return self._accounts.charge_left(_who(asker), "", objects * PINNED_BYTES, always=True)

    def _held(self, owner: Owner) -> int:
        return self._pool.pinned_by(owner) + self._incoming.leased_by(owner)

    def _count(self, owner: Owner, charge: Charge, asker: ClientSession) -> None:
        before = self._charges.get(owner)
        self._charges[owner] = charge
        if before is not None:
            before.release()
        charge.on_end(functools.partial(self._leave, owner, _who(asker)))

    def _leave(self, owner: Owner, who: Hashable) -> None:
        """Its client has gone."""
        before = self._charges.pop(owner, None)
        if before is not None:
            before.release()
        held = self._held(owner)
        if held:
            what = "the lease of a client that has gone"
            try:
                self._charges[owner] = self._accounts.charge_left(who, what, held * PINNED_BYTES)
            except Refused:
                self._end(owner)

    def _end(self, owner: Owner) -> None:
        self.let_go(owner)
        self._incoming.drop_lease(owner)

    def _released(self, owner: Owner) -> None:
        """It pins nothing any more, or has leased nothing more of what is on its way."""
        if owner in self._charges and not self._held(owner):
            self._charges.pop(owner).release()

    # What ends -----------------------------------------------------------------------------------

    def let_go(self, owner: Owner) -> None:
        """The owner's pins are its no more; they end in turns with the rest of the loop."""
        if self._pool.pinned_by(owner):
            self._pool.let_go(owner)
            self._schedule()

    def expire(self, now: float) -> None:
        """Pins whose time is over at `now`, monotonic seconds, end: the first at once, others in turns."""
        self._expired = now
        if not self._scheduled:
            self._turn()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._pool.expire(self._expired, PINS_PER_TURN) >= PINS_PER_TURN:
            self._schedule()


def _who(asker: ClientSession) -> Hashable:
    return asker.rights.key or asker.engine
