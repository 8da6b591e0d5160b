"""Asks engine workers what took time in their last steps."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from layerflow.errors import ProtocolError
from layerflow.server.account import ENTRY_BYTES
from layerflow.server.clients import ClientSession
from layerflow.system.numbers import ascending
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message

PATIENCE_S = 2.0
"""How long workers may take to answer: they pack their spans beside their engine's work."""

MOST_TRACE_BYTES = 8 << 20
"""Of steps and their spans in one answer; older ones are left out."""
STEP_BYTES = 704
"""What a step takes beside its spans, as it is kept and as JSON: 376,832 without any took 249 MiB."""


Told = tuple[float, ClientSession, wire.StepSpans]
"""A step that a worker has told of, and when the step began."""


def talking_workers(sessions: Iterable[ClientSession]) -> Iterator[ClientSession]:
    """The engine workers among sessions that can be asked: those that are not silent."""
    return (session for session in sessions if session.memory and not session.silent)


class SpanQuestions:
    """Questions that workers have not answered yet. For the server's loop.

    :param send: queue a message for a session.
    """

    def __init__(self, send: Callable[[ClientSession, Message], None]) -> None:
        self._send = send
        self._numbers = ascending()
        self._newest = 0
        self._asked: dict[int, tuple[int, Callable[[wire.Spans | None], None]]] = {}

    def ask(self, worker: ClientSession, *, after: int, since: float, tell: Callable[[wire.Spans | None], None]) -> int:
        """Ask one worker, as of :class:`layerflow.wire.messages.SpansWanted`. The question's number.

        :param tell: told each part of the answer; None = the worker has left.
        """
        number = self._newest = next(self._numbers)
        self._asked[number] = worker.number, tell
        self._send(worker, wire.SpansWanted(number, after, since))
        return number

    def answered(self, session: ClientSession, message: wire.Spans) -> None:
        """A worker answers. Where nobody waits for it any more it is dropped.

        :raises ProtocolError: it was not asked this.
        """
        asked, tell = self._asked.get(message.id, (-1, None))
        if tell is None and 0 < message.id <= self._newest:
            return
        if asked != session.number or tell is None:
            raise ProtocolError(f"spans for question {message.id}, which this session was not asked")
        if not message.more:
            del self._asked[message.id]
        tell(message)

    def withdraw(self, number: int) -> None:
        """Nobody waits for this answer any more. The question is forgotten: a worker may never answer it."""
        self._asked.pop(number, None)

    def lose(self, session: int) -> None:
        """A worker is gone."""
        for number in [number for number, (asked, _) in self._asked.items() if asked == session]:
            self._asked.pop(number)[1](None)


def answer_bytes(share: int) -> int:
    """How large an answer may be, in bytes, for a client that may make the server keep `share`."""
    return min(MOST_TRACE_BYTES, share // 4)


def kept_bytes(workers: int, most: int) -> int:
    """What :func:`trace_workers` keeps at most until it answers with `most` bytes: what is told, and its questions."""
    return 2 * most + workers * ENTRY_BYTES


async def trace_workers(
    questions: SpanQuestions, workers: Sequence[ClientSession], seconds: float, most: int
) -> dict[str, Any]:
    """What took time in the last steps of `workers`, as ``TraceRequest`` is answered.

    :param most: bytes of steps and their spans in the answer; meanwhile twice as much is kept.
    :returns: ``steps``, and as ``silent`` the engines of workers that did not answer in time.
    """
    since = time.monotonic() - seconds
    found: list[Told] = []
    held = left_out = 0
    waiting: dict[int, ClientSession] = {worker.number: worker for worker in workers}
    all_told = asyncio.Event()

    def told(worker: ClientSession, answer: wire.Spans | None) -> None:
        nonlocal held, left_out
        for step in answer.steps if answer is not None else ():
            found.append((step.origin, worker, step))
            held += STEP_BYTES + len(step.spans)
        if held > 2 * most:
            held, dropped = _keep_newest(found, most)
            left_out += dropped
        if answer is None or not answer.more:
            waiting.pop(worker.number, None)
            if not waiting:
                all_told.set()

    asked = [questions.ask(worker, after=0, since=since, tell=functools.partial(told, worker)) for worker in workers]
    try:
        with contextlib.suppress(TimeoutError):
            if workers:
                await asyncio.wait_for(all_told.wait(), PATIENCE_S)
    finally:
        for number in asked:
            questions.withdraw(number)
    left_out += _keep_newest(found, most)[1]
    steps = [
        {
            "session": worker.number,
            "step": step.step,
            "engine": worker.name,
            "rank": worker.spec.shard.tp_rank if worker.spec is not None else 0,
            "origin": origin,
            "spans": base64.b64encode(step.spans).decode(),
        }
        for origin, worker, step in found
    ]
    return {"steps": steps, "left_out": left_out, "silent": sorted({worker.name for worker in waiting.values()})}


def _keep_newest(found: list[Told], most: int) -> tuple[int, int]:
    """Sort by time, and drop the oldest past `most` bytes. The bytes kept, and how many steps are not."""
    found.sort(key=lambda one: one[0])
    held, first = 0, len(found)
    while first and held + STEP_BYTES + len(found[first - 1][2].spans) <= most:
        first -= 1
        held += STEP_BYTES + len(found[first][2].spans)
    del found[:first]
    return held, first
