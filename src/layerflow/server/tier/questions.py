"""Which objects the backend has, asked of its host: equal questions once, each answered by its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerflow.system.numbers import ascending
from layerflow.wire.host_messages import Ask, Present, ToHost


@dataclass(slots=True)
class PendingLookup:
    """A lookup that waits for the host, and equal ones that came meanwhile."""

    keys: Sequence[bytes]
    packed: bytes
    then: list[Callable[[frozenset[bytes]], None]]
    timer: asyncio.TimerHandle


class Questions:
    """Those under way.

    :param send: to the host; False = there is none.
    :ivar unanswered: those whose deadline came before their answer.
    """

    def __init__(self, send: Callable[[ToHost], bool]) -> None:
        self._send = send
        self._pending: dict[int, PendingLookup] = {}
        self._by_keys: dict[bytes, int] = {}
        self._numbers = ascending()
        self.asked = self.asked_keys = self.unanswered = 0

    def ask(self, keys: Sequence[bytes], then: Callable[[frozenset[bytes]], None], timeout_s: float) -> None:
        """Call `then` once with those of `keys` that are there; with none of them where no answer comes in time."""
        packed = b"".join(keys)
        if packed in self._by_keys:
            self._pending[self._by_keys[packed]].then.append(then)
            return
        number = self._by_keys[packed] = next(self._numbers)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expired, number)
        self._pending[number] = PendingLookup(keys, packed, [then], timer)
        self.asked += 1
        self.asked_keys += len(keys)
        if not self._send(Ask(number, packed, max(1, round(timeout_s * 1e3)))):
            self._answer(number, frozenset())

    def heard(self, message: Present) -> None:
        """The host's answer; perhaps to a question that has expired."""
        question = self._pending.get(message.id)
        if question is not None:
            present = zip(question.keys, message.present, strict=False)
            self._answer(message.id, frozenset(key for key, there in present if there))

    def give_up(self) -> None:
        """The backend is down: nothing is there."""
        for number in list(self._pending):
            self._answer(number, frozenset())

    def _expired(self, number: int) -> None:
        self.unanswered += 1
        self._answer(number, frozenset())

    def _answer(self, number: int, present: frozenset[bytes]) -> None:
        question = self._pending.pop(number, None)
        if question is not None:
            question.timer.cancel()
            del self._by_keys[question.packed]
            for then in question.then:
                then(present)


def once(until: float, then: Callable[[], None]) -> Callable[[], None]:
    """Calls `then` when it is first called, or else at `until`."""
    pending = [then]

    def call() -> None:
        if pending:
            timer.cancel()
            pending.pop()()

    timer = asyncio.get_running_loop().call_later(max(0.0, until - time.monotonic()), call)
    return call
