"""What each client makes the server keep: counted where it is made, given back where it ends, ended with the client.

A client's share bounds it whatever it asks for, and the total bounds all clients together. Where the total is used up,
whoever keeps less than an equal part of it, with all its clients, is let through all the same: those that keep most are
refused first.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from layerflow.errors import ProtocolError

ENTRY_BYTES = 4096
"""What the server's own records of one entry take at most, in bytes: objects, timers, places in tables."""

SLICE_S = 0.0005
"""How long the ends of what was kept for clients that have gone run, before others get their turn, in seconds."""

WORTH_BYTES = 8 << 20
"""A client that has kept so much is worth some milliseconds of the loop, when it has ended."""


class Refused(ProtocolError):
    """A well-formed message that cannot be done now; `code` is the Problem's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, eq=False)
class Charge:
    """One entry of an account.

    :param nbytes: what it keeps.
    :param end: ends what is kept, when the client does; None = it ends in another way.
    """

    account: Account
    nbytes: int
    end: Callable[[], None] | None = None

    def on_end(self, end: Callable[[], None] | None) -> None:
        """Call this (None = nothing) where the client ends before the charge is released, if it is not yet."""
        if self.account.holds(self):
            self.end = end

    def resize(self, nbytes: int) -> None:
        """Count so many bytes besides :data:`ENTRY_BYTES` from now on: what is kept has grown or shrunk already."""
        self.account.resize(self, nbytes + ENTRY_BYTES)

    def extend(
        self, what: str, nbytes: int, *, always: bool = False, giver: Charge | None = None, given: int = 0
    ) -> None:
        """Count so many bytes more of something that is about to be kept; parameters as of :meth:`Account.charge`.

        :param giver: a charge for the same thing, which stays as it is. :param given: so many bytes need no room.
        :raises Refused: the share or the total is used up; nothing has changed.
        """
        self.account.extend(self, what, nbytes, always=always, giver=giver, given=given)

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """What was kept is gone; again = nothing."""
        self.account.release(self)


OVERDRAFT = 2
"""What ends something is counted even where it does not fit: a client may come to so many times its share by that."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What may be kept, in bytes: by one client, and by all together."""

    share: int
    total: int


@dataclass(slots=True)
class Kept:
    """What the clients of one principal keep together.

    :param accounts: how many of them are open. :param nbytes: of all of them, those included that are being ended.
    """

    accounts: int = 0
    nbytes: int = 0


class Account:
    """One client's account.

    :param emptied: called whenever nothing is kept any more.
    :ivar principal: whose client it is. :ivar whose: what all clients of that principal keep.
    :ivar nbytes: that the client makes the server keep. :ivar most: that it ever did.
    """

    def __init__(self, accounts: Accounts, principal: Hashable, emptied: Callable[[], object] | None = None) -> None:
        self._accounts, self.principal = accounts, principal
        self._emptied = emptied
        self.whose = accounts.kept_by(principal)
        self.whose.accounts += 1
        self._charges: dict[Charge, None] = {}
        self._closed = False
        self.nbytes = self.most = 0

    @property
    def entries(self) -> int:
        """How many things are kept for the client."""
        return len(self._charges)

    def charge(
        self,
        what: str,
        nbytes: int = 0,
        *,
        end: Callable[[], None] | None = None,
        always: bool = False,
        giver: Charge | None = None,
        given: int = 0,
    ) -> Charge:
        """Count something that is about to be kept for this client.

        :param what: names it, in a refusal. :param nbytes: besides :data:`ENTRY_BYTES`.
        :param end: called once if the client ends before the charge is released.
        :param always: count it even where it does not fit: it lets something else end.
        :param giver: a charge, of any account, some of which is counted here from now on: only what is more has to fit.
        :param given: so many bytes of it; where they are all, it is released.
        :raises Refused: the share or the total is used up; nothing has changed.
        """
        nbytes += ENTRY_BYTES
        if not always:
            self._accounts.check(self, what, nbytes, giver, given)
        if giver is not None:
            giver.account.resize(giver, giver.nbytes - given)
            if not giver.nbytes:
                giver.release()
        charge = Charge(self, nbytes, end)
        self._charges[charge] = None
        self._add(nbytes)
        return charge

    def holds(self, charge: Charge) -> bool:
        """Is this charge not released yet?"""
        return charge in self._charges

    def release(self, charge: Charge) -> None:
        """A charge's end; again = nothing."""
        if self._charges.pop(charge, charge) is None:
            charge.end = None  # it refers to what was kept, which must not wait for the garbage collector
            self._add(-charge.nbytes)
            if not self._charges and self._emptied is not None:
                self._emptied()

    def resize(self, charge: Charge, nbytes: int) -> None:
        """A charge's bytes change; of one that is released, nothing."""
        if charge in self._charges:
            self._add(nbytes - charge.nbytes)
            charge.nbytes = nbytes

    def extend(
        self,
        charge: Charge,
        what: str,
        nbytes: int,
        *,
        always: bool = False,
        giver: Charge | None = None,
        given: int = 0,
    ) -> None:
        """See :meth:`Charge.extend`."""
        if not always:
            self._accounts.check(self, what, nbytes, giver, given)
        self.resize(charge, charge.nbytes + nbytes)

    def close(self) -> None:
        """The client has ended; what is kept for it is ended next, by :meth:`end_one`."""
        self._closed = True

    def end_one(self) -> bool:
        """End the oldest of what is kept; False: nothing is."""
        charge = next(iter(self._charges), None)
        if charge is None:
            return False
        end = charge.end
        charge.release()
        if end is not None:
            end()
        return True

    @property
    def overdrawn(self) -> bool:
        """Has what is counted even where it does not fit come to :data:`OVERDRAFT` times what this client may keep?"""
        return self._accounts.overdrawn(self)

    @property
    def closed(self) -> bool:
        """The client has ended."""
        return self._closed

    def _add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.most = max(self.most, self.nbytes)
        self._accounts.nbytes += nbytes
        self.whose.nbytes += nbytes
        self._accounts.forget_unused(self.principal, self.whose)


class Accounts:
    """The accounts of all clients of a server, by the address that each is known by.

    :ivar nbytes: that all of them make the server keep.
    """

    def __init__(self, allowance: Callable[[], Allowance]) -> None:
        self._allowance = allowance
        self._accounts: dict[Hashable, Account] = {}
        self._kept: dict[Hashable, Kept] = {}  # by principal, of those that have an account or keep something
        self._most_freed = 0
        self._ending: deque[Account] = deque()
        self._scheduled = False
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, client: Hashable, principal: Hashable = None) -> Account:
        """The account of a client, opened when it is first asked for.

        :param principal: whose client it is; None = it is the only one of its own.
        """
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = Account(self, client if principal is None else principal)
        return account

    def kept_by(self, principal: Hashable) -> Kept:
        """What the accounts of a principal keep, those included that are being ended."""
        return self._kept.setdefault(principal, Kept())

    def forget_unused(self, principal: Hashable, kept: Kept) -> None:
        """Forget what a principal kept, where that is nothing and none of its accounts is open.

        Before that a client that comes back finds what its others still keep, and has no part of the total beside it.
        """
        if not kept.accounts and not kept.nbytes and self._kept.get(principal) is kept:
            del self._kept[principal]

    def charge_left(self, who: Hashable, what: str, nbytes: int, *, always: bool = False) -> Charge:
        """Count what clients who have gone leave behind, as what one client keeps that lasts as long as any of it does.

        :param who: their principal: other clients of his may go too, and what they leave is counted with this.
        :raises Refused: as of :meth:`Account.charge`.
        """
        key = ("left", who)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(self, who, functools.partial(self._remove, key))
        try:
            return account.charge(what, nbytes, always=always)
        except Refused:
            if not account.entries:
                self._remove(key)
            raise

    def _remove(self, client: Hashable) -> Account | None:
        account = self._accounts.pop(client, None)
        if account is not None:
            account.whose.accounts -= 1
            self.forget_unused(account.principal, account.whose)
        return account

    def close(self, client: Hashable) -> None:
        """A client has ended, and with it all that is kept for it, much of it in slices on the running loop."""
        account = self._remove(client)
        if account is not None:
            account.close()
            self._ending.append(account)
            if not self._scheduled:
                self._end()

    def _end(self) -> None:
        """One slice."""
        self._scheduled = False
        until = time.monotonic() + SLICE_S
        while self._ending:
            more = True  # behind an end that fails, too
            try:
                more = self._ending[0].end_one()
            except Exception as error:  # noqa: BLE001 - told: a bug in one end keeps no other, nor what its caller does next
                told = {"message": "what was kept for a client did not end", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)
            if not more:
                self._most_freed = max(self._most_freed, self._ending.popleft().most)
            elif time.monotonic() >= until:
                break
        if self._ending:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._end)

    def return_memory(self) -> None:
        """Give what ended clients have kept back to the system, beside the running loop: it takes up to 0.1 s.

        The C library's heap keeps it else.
        """
        if self._most_freed >= WORTH_BYTES and not self._ending:
            self._most_freed = 0
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
            if trim is not None:
                asyncio.get_running_loop().run_in_executor(None, trim, 0)

    def overdrawn(self, account: Account) -> bool:
        """See :attr:`Account.overdrawn`."""
        allowed = self._allowance()
        if account.nbytes > OVERDRAFT * allowed.share:
            return True
        total = OVERDRAFT * allowed.total
        return (
            self.nbytes > total
            and account.nbytes > total // max(1, len(self._accounts))
            and account.whose.nbytes > total // max(1, len(self._kept))
        )

    def check(self, account: Account, what: str, nbytes: int, giver: Charge | None = None, given: int = 0) -> None:
        """May this be kept for a client? Parameters as of :meth:`Account.charge`; where nothing grows, it may.

        :raises Refused: it may not.
        """
        allowed = self._allowance()
        more = nbytes - given  # of all clients, of this one's principal, and of this one
        of_whose = more if giver is not None and giver.account.whose is account.whose else nbytes
        mine = more if giver is not None and giver.account is account else nbytes
        if mine > 0 and account.nbytes + mine > allowed.share:
            raise Refused(
                "quota",
                f"{what} of {nbytes} bytes: {account.entries} things of {account.nbytes} bytes are kept for this "
                f"client, and server.max_client_bytes is {allowed.share}; wait for answers, drop leases, or ask for "
                "less at once",
            )
        kept = account.whose.nbytes
        part = allowed.total // max(1, len(self._kept))
        if more > 0 and self.nbytes + more > allowed.total and kept + of_whose > part:
            raise Refused(
                "quota",
                f"{what} of {nbytes} bytes: {self.nbytes} bytes are kept for {len(self._accounts)} clients, {kept} of "
                f"them for those of this key or process, and server.max_clients_bytes is {allowed.total}; try again "
                "later",
            )
