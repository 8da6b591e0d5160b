"""First tokens of prompts that are handed over: kept until they are fetched, or why there is none."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

KEPT_S, MOST_ROOMS = 300.0, 1 << 16
"""How long a first token waits for a decode engine that has not come yet, and how many do; hand-offs end sooner."""


@dataclass(slots=True)
class _Room:
    """One prompt's first token.

    :param attempt: to compute it, see :func:`.prefilling.handoff_name`.
    :param until: monotonic seconds. :param rows: of SGLang's metadata buffers; [] = not there yet.
    :param ranks: of decode that ask for it here; 0 = not known. :param given: all of them have got the rows.
    :param waiting: addresses of decode ranks. :param served: of those that have the rows: they still load the prompt.
    :param reason: why there will be none.
    """

    attempt: int
    until: float
    rows: list[bytes] = field(default_factory=list)
    ranks: int = 0
    given: bool = False
    waiting: set[tuple[str, int]] = field(default_factory=set)
    served: set[tuple[str, int]] = field(default_factory=set)
    reason: str = ""


class FirstTokens:
    """First tokens of prompts, who waits for them, and why there is none. Any thread may call.

    Prefill keeps its own until all ranks of decode have come, decode those that come until their prompts are loaded:
    each for :data:`KEPT_S`, the latest :data:`MOST_ROOMS` of them. Of a room only the last attempt counts that anything
    was heard of: what is said of an earlier one changes nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rooms: OrderedDict[int, _Room] = OrderedDict()  #: those that were touched last are last

    def __len__(self) -> int:
        return len(self._rooms)

    def put(self, room: int, rows: list[bytes], attempt: int = 0) -> None:
        """A prompt's first token is there."""
        with self._lock:
            if found := self._touched(room, attempt):
                found.rows = rows

    def wait(self, room: int, address: tuple[str, int], attempt: int = 0, ranks: int = 0) -> str:
        """A decode rank waits for it. Return why it gets none; "" = it gets it once it is there.

        :param ranks: of its engine that ask for it here; once they all have it, it is not kept; 0 = not known.
        """
        with self._lock:
            found = self._touched(room, attempt)
            if found is None:
                return ""
            if found.given and not found.reason:
                return f"its first token was given to the {found.ranks} ranks that were to ask for it"
            if not found.reason:
                found.ranks = ranks
                found.waiting.add(address)
            return found.reason

    def leave(self, room: int) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            if room in self._rooms:
                self._rooms[room].waiting.clear()
                self._rooms[room].served.clear()

    def fail(self, room: int, reason: str, attempt: int = 0) -> set[tuple[str, int]]:
        """There will be none, or its prompt is not handed over. Who waits for it or has it, and is to be told."""
        with self._lock:
            found = self._touched(room, attempt)
            if found is None:
                return set()
            told, found.reason = found.waiting | found.served, reason
            found.waiting, found.served = set(), set()
            return told

    def ready(self, room: int, attempt: int = 0) -> tuple[list[bytes], set[tuple[str, int]]]:
        """The rows, and who waits for them and is to get them now; nobody, where they are not there yet."""
        with self._lock:
            found = self._known(room, attempt)
            if found is None or not found.rows:
                return [], set()
            waiting, found.waiting = found.waiting, set()
            found.served |= waiting
            rows = found.rows
            if found.ranks and len(found.served) >= found.ranks:
                found.rows, found.given = [], True
            return rows, waiting

    def take(self, room: int, attempt: int = 0) -> list[bytes]:
        """The rows, [] if they are not there; the room is forgotten with them."""
        with self._lock:
            found = self._known(room, attempt)
            return self._rooms.pop(room).rows if found is not None and found.rows else []

    def _known(self, room: int, attempt: int) -> _Room | None:
        found = self._rooms.get(room)
        return found if found is not None and found.attempt == attempt else None

    def _touched(self, room: int, attempt: int) -> _Room | None:
        """The room, as of this attempt; None where a later one is known."""
        now = self._clock()
        found = self._rooms.get(room)
        if found is not None and found.attempt > attempt:
            return None
        if found is None or found.attempt < attempt:
            found = self._rooms[room] = _Room(attempt, 0.0)
        found.until = now + KEPT_S
        self._rooms.move_to_end(room)
        while len(self._rooms) > MOST_ROOMS or next(iter(self._rooms.values())).until <= now:
            self._rooms.popitem(last=False)
        return found
