"""What a recording leaves out: names, digests and texts become numbers and words before anything is written."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from layerflow.flow import commands as wanted
from layerflow.flow import events as told

K = TypeVar("K")

MOST_CHUNKS: Final = 1 << 18
"""Chunks that keep their numbers at least; some 60 MB for twice as many, which an arena of a terabyte rarely holds."""

MOST_REQUESTS: Final = 1 << 14
MOST_WORD: Final = 48

MOST_ENGINES: Final = 1 << 12

_WORD = re.compile(r"[^:('\"\d/]*")


class Numbers(Generic[K]):
    """Numbers from 1, in the order of first sight.

    :param most: the last so many keys that were seen keep theirs; one that was not seen for longer may get a new one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: dict[K, int] = {}
        self._older: dict[K, int] = {}
        self._next = 1

    def of(self, key: K) -> int:
        """The number of `key`."""
        number = self._recent.get(key)
        if number is not None:
            return number
        number = self._older.pop(key, 0)
        if not number:
            number = self._next
            self._next += 1
        self._recent[key] = number
        if len(self._recent) >= self._most:
            self._older, self._recent = self._recent, {}
        return number


def word(reason: str) -> str:
    """A reason's head, without what it may quote: a name, a number, a path."""
    found = _WORD.match(reason)
    return found[0].strip()[:MOST_WORD] if found else ""


class Renumbering:
    """The numbers of one recording; for one thread."""

    def __init__(self) -> None:
        self._chunks: Numbers[bytes] = Numbers(MOST_CHUNKS)
        self._requests: Numbers[tuple[int, str]] = Numbers(MOST_REQUESTS)
        self._engines: Numbers[str] = Numbers(MOST_ENGINES)

    def chunks(self, digests: bytes) -> tuple[int, ...]:
        """Numbers of chunks by their digests, 16 bytes each."""
        of = self._chunks.of
        return tuple([of(digests[start : start + 16]) for start in range(0, len(digests), 16)])

    def tail(self, digest: bytes) -> int:
        """Number of a partial chunk; 0 = there is none."""
        return self._chunks.of(digest) if digest else 0

    def engine(self, engine: str) -> int:
        """Number of an engine by its identity."""
        return self._engines.of(engine)

    def request(self, engine: str, name: str) -> int:
        """Number of an engine's request."""
        return self._requests.of((self._engines.of(engine), name))

    def change(self, event: Any, engine_of: Mapping[int, str]) -> Any:
        """An event or a command of a kind in :data:`WITH_TEXT`, without names and texts.

        :param engine_of: the engine of each session.
        """
        return WITH_TEXT[type(event)](self, event, engine_of)

    def _step(self, event: told.StepOpened, engine_of: Mapping[int, str]) -> told.StepOpened:
        engine = engine_of.get(event.session, "")
        return dataclasses.replace(
            event, loads=self._parts(event.loads, engine), saves=self._parts(event.saves, engine)
        )

    def _parts(self, parts: Iterable[told.Part], engine: str) -> tuple[told.Part, ...]:
        return tuple(
            told.Part(str(self.request(engine, part.request)), part.group, part.blocks, part.needs, part.awaited)
            for part in parts
        )

    def _named(self, event: Any, engine_of: Mapping[int, str]) -> Any:
        request = self.request(engine_of.get(event.session, ""), event.request)
        changes = {"request": str(request)}
        if hasattr(event, "reason"):
            changes["reason"] = word(event.reason)
        return dataclasses.replace(event, **changes)

    def _transfer(self, event: Any, _: Mapping[int, str]) -> Any:
        return dataclasses.replace(event, engine=str(self.engine(event.engine)))

    def _reason(self, event: Any, _: Mapping[int, str]) -> Any:
        return dataclasses.replace(event, reason=word(event.reason))

    def _failures(self, event: Any, _: Mapping[int, str]) -> Any:
        if not event.failed:
            return event
        return dataclasses.replace(event, failed=tuple((place, word(reason)) for place, reason in event.failed))

    def _lost_blocks(self, event: Any, _: Mapping[int, str]) -> Any:
        if not event.failed:
            return event
        failed = tuple(lost._replace(reason=word(lost.reason)) for lost in event.failed)
        return dataclasses.replace(event, failed=failed)


WITH_TEXT: Final[Mapping[type, Callable[[Renumbering, Any, Mapping[int, str]], Any]]] = MappingProxyType(
    {
        told.StepOpened: Renumbering._step,
        told.RequestAborted: Renumbering._named,
        told.FetchOpened: Renumbering._transfer,
        told.WriteOpened: Renumbering._transfer,
        told.BatchFailed: Renumbering._reason,
        told.LoadsFenced: Renumbering._reason,
        told.HostLost: Renumbering._reason,
        told.StepsRevoked: Renumbering._reason,
        told.WritesRevoked: Renumbering._reason,
        told.FetchesRevoked: Renumbering._reason,
        told.CallDone: Renumbering._failures,
        told.IncomingFailed: Renumbering._failures,
        told.LoadsLost: Renumbering._lost_blocks,
        told.LoadsMoved: Renumbering._lost_blocks,
        wanted.LoadFailed: Renumbering._named,
        wanted.Revoke: Renumbering._reason,
        wanted.ObjectsLost: Renumbering._reason,
    }
)
"""How each kind that has a text is recorded. A test looks for kinds that are missing."""
