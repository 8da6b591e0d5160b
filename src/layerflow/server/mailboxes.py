"""Each client's messages one after the other, long ones in slices, so that no message holds the server's loop.

A message is a coroutine, driven here and by no task. It stops every half millisecond or so (:func:`next_turn`): other
clients' messages, timers and descriptors get their turn between two slices. What a client sends while one of its
messages is not finished waits behind it. A message that waits for an :class:`Answer` steps aside: the client's next
ones are handled meanwhile, and once it has been told it waits its turn behind them. Whoever tells runs nothing of it:
one event may be what thousands wait for.
"""

from __future__ import annotations

import asyncio
import math
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

from layerflow.server.account import Account, Charge, Refused

T = TypeVar("T")

SLICE_S = 0.0005
"""How long one client's message may run before another gets its turn, in seconds."""

MAX_WAITING = 1024
"""Messages that one client may have waiting behind one that is not finished."""

Work = Coroutine[Any, Any, None]
"""What a message asks for: `async`, awaiting nothing but what this module has."""

Slices = Generator[None, None, T]
"""Long work that stops now and then and waits for nothing; a message awaits it with :func:`in_slices`."""


@types.coroutine
def next_turn() -> Slices[None]:
    """A place where another client may get its turn."""
    yield


@types.coroutine
def in_slices(work: Slices[T]) -> Slices[T]:
    """Do long work within a message: where it stops, another client may get its turn."""
    return (yield from work)


async def in_turns(work: Slices[T]) -> T:
    """Do long work in a task, in turns with the rest of the loop: no client that goes stops it."""
    until = time.monotonic() + SLICE_S
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return cast(T, ended.value)
        if time.monotonic() >= until:
            await asyncio.sleep(0)
            until = time.monotonic() + SLICE_S


def at_once(work: Work) -> None:
    """Do all of a message now, which stops nowhere and waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise AssertionError(f"{work!r} stopped, and was to be done at once")


class Answer(Generic[T]):
    """What a message waits for, told once, perhaps before it is awaited; what is told later is ignored.

    :param charge: of what is kept of the message meanwhile. Where the client ends before it is released, the message is
        closed where it stands: its ``finally`` clauses undo what it has begun.
    """

    def __init__(self, charge: Charge) -> None:
        self._charge = charge
        self._told: list[T] = []
        self._go_on: Callable[[], None] | None = None

    def tell(self, told: T) -> None:
        """The message goes on with this, in a turn of its client."""
        if not self._told:
            self._told.append(told)
            if self._go_on is not None:
                self._go_on()

    def __await__(self) -> Generator[Answer[T], None, T]:
        try:
            if not self._told:
                yield self
        finally:
            self._go_on = None  # it refers to the message, which refers to this: nothing waits for the collector
            self._charge.on_end(None)
        return self._told[0]

    async def by(self, until: float, otherwise: T) -> T:
        """What it is told, or `otherwise` where nothing is by `until` (monotonic seconds; ``inf`` = never)."""
        if until == math.inf:
            return await self
        delay = max(0.0, until - time.monotonic())
        timer = asyncio.get_running_loop().call_later(delay, self.tell, otherwise)
        try:
            return await self
        finally:
            timer.cancel()

    def _park(self, work: Work, go_on: Callable[[], None]) -> None:
        """The message has stopped here."""
        self._go_on = go_on
        self._charge.on_end(work.close)


class _Mailbox(deque[tuple[Work, Charge | None]]):
    """One client's unfinished messages, oldest first: the work, and what the message that asks for it keeps.

    One that has been told what it waited for, and has not gone on, is counted by the charge of its :class:`Answer`.

    :ivar charged: how many have a charge here.
    """

    charged = 0


class Mailboxes:
    """What the clients have asked for and is not finished; runs on the running loop."""

    def __init__(self) -> None:
        self._mailboxes: dict[Account, _Mailbox] = {}
        self._scheduled = False

    @property
    def busy(self) -> bool:
        """Is some message not finished? Those that wait for an answer do not count."""
        return bool(self._mailboxes)

    def start(self, client: Account, work: Work, nbytes: int = 0, *, always: bool = False) -> None:
        """Run it now, or behind what this client has waiting.

        :param work: handles its own exceptions; closed unfinished when the client is lost.
        :param nbytes: of the message that asks for it.
        :param always: however much waits: it goes on with what has begun, or lets something end.
        :raises Refused: it would have to wait, and there is no room for that.
        """
        mailbox = self._mailboxes.get(client)
        if mailbox is None:
            if self._run(client, work, time.monotonic() + SLICE_S):
                return
            if client.closed:
                work.close()
                return
            charge = client.charge("a message that is handled", nbytes, always=True)
            mailbox = self._mailboxes.setdefault(client, _Mailbox())
            mailbox.appendleft((work, charge))  # before those that it has told
            mailbox.charged += 1
            self._schedule()
            return
        if mailbox.charged >= MAX_WAITING and not always:
            work.close()
            raise Refused("quota", f"{MAX_WAITING} of this client's messages wait to be handled; send them more slowly")
        try:
            # Behind those that have been told alone it is as it would be behind none.
            always = always or not mailbox.charged
            charge = client.charge("a message that waits to be handled", nbytes, always=always)
        except Refused:
            work.close()
            raise
        mailbox.append((work, charge))
        mailbox.charged += 1

    def forget(self, client: Account) -> None:
        """The client is gone: what it has waiting is closed. A close that fails is told, and keeps nothing else."""
        mailbox = self._mailboxes.pop(client, None)
        if mailbox is None:
            return
        for work, charge in mailbox:
            if charge is not None:
                charge.release()
            if work.cr_running:  # type: ignore[attr-defined]
                continue
            try:
                work.close()
            except Exception as error:  # noqa: BLE001 - told: a bug in one message keeps neither the others nor the turns
                told = {"message": "a message of a client that has gone did not end", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)

    def _go_on(self, client: Account, work: Work) -> None:
        """A message has been told what it waited for."""
        if not client.closed:  # else the end of its charge closes it
            mailbox = self._mailboxes.get(client)
            if mailbox is None:
                mailbox = self._mailboxes[client] = _Mailbox()
                self._schedule()
            mailbox.append((work, None))

    def _schedule(self) -> None:
        if not self._scheduled and self._mailboxes:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """One slice of the client whose turn it is; the next one's follows on the loop's next round."""
        self._scheduled = False
        if not self._mailboxes:
            return
        client, mailbox = next(iter(self._mailboxes.items()))
        if client.closed:  # what ended with it has told others of its messages
            self.forget(client)
        until = time.monotonic() + SLICE_S
        try:
            while self._mailboxes.get(client) is mailbox and mailbox:  # not lost meanwhile
                work, charge = mailbox[0]
                finished = True  # also where it raises
                try:
                    finished = self._run(client, work, until)
                finally:
                    if finished:
                        mailbox.popleft()
                        if charge is not None:
                            mailbox.charged -= 1
                            charge.release()
                    elif client.closed:
                        work.close()
                    elif charge is None:
                        mailbox[0] = work, client.charge("a message that goes on", always=True)
                        mailbox.charged += 1
                if time.monotonic() >= until:
                    break
        finally:
            if self._mailboxes.get(client) is mailbox:
                del self._mailboxes[client]
                if mailbox:
                    self._mailboxes[client] = mailbox  # behind the others
            self._schedule()

    def _run(self, client: Account, work: Work, until: float) -> bool:
        """Run until `until` (monotonic seconds); whether it has finished, or waits for an answer."""
        try:
            while True:
                answer = work.send(None)
                if answer is not None:
                    answer._park(work, lambda: self._go_on(client, work))
                    return True
                if time.monotonic() >= until:
                    return False
        except StopIteration:
            return True
