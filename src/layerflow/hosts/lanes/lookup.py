"""The ask thread: what is there, and what is to be hidden or removed."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from layerflow.hosts.backend import Backend, BackendError, Unreachable
from layerflow.hosts.lanes.lane import BackendCalls, Lane, Tell, describe, log
from layerflow.wire.host_messages import Ask, Clear, Cleared, Present, split_keys


@dataclass(frozen=True, slots=True)
class Hide:
    """These objects' bytes were found broken: 24-byte keys."""

    keys: Sequence[bytes]


class LookupLane(Lane[tuple[Ask | Clear, float] | Hide]):
    """Items are messages with the moment they came, and what the fetch thread found broken.

    :param backend_calls: is told where the backend seems to be out of reach.
    """

    def __init__(self, backend: Backend, tell: Tell, backend_calls: BackendCalls) -> None:
        super().__init__("ask")
        self._backend, self._tell, self._backend_calls = backend, tell, backend_calls
        self._waiting: deque[tuple[Ask | Clear, float] | Hide] = deque()
        self.began = math.inf  #: when the call that is under way began, on the monotonic clock

    def _accept(self, item: tuple[Ask | Clear, float] | Hide) -> None:
        self._waiting.append(item)

    def _patience(self) -> float | None:
        return 0 if self._waiting else None

    def _turn(self) -> None:
        if not self._waiting:
            return
        item = self._waiting.popleft()
        self.began = time.monotonic()
        try:
            self._serve(item)
        finally:
            self.began = math.inf

    def _serve(self, item: tuple[Ask | Clear, float] | Hide) -> None:
        if isinstance(item, Hide):
            self._backend_calls.quietly("hide", lambda: self._backend.hide(item.keys))
        else:
            message, came = item
            until = came + message.timeout_ms / 1e3
            self._tell(self._answer(message, until) if isinstance(message, Ask) else self._clear(message, until))

    def _clear(self, message: Clear, until: float) -> Cleared:
        try:
            return Cleared(message.id, self._backend.clear(split_keys(message.keys), until))
        except Unreachable as error:
            self._backend_calls.suspect()
            return Cleared(message.id, 0, f"unreachable: {error}")
        except Exception as error:  # noqa: BLE001 - a backend may raise anything; it costs this call only
            if not isinstance(error, BackendError):
                log.exception("backend_call_failed", call="clear", error=describe(error))
            return Cleared(message.id, 0, str(error) if isinstance(error, BackendError) else describe(error))

    def _answer(self, message: Ask, until: float) -> Present:
        keys = split_keys(message.keys)
        if time.monotonic() >= until:
            return unknown(message, "the lookups before it took too long")
        try:
            present = self._backend.lookup(keys, until)
            if len(present) != len(keys):
                raise BackendError(f"the backend answered for {len(present)} of {len(keys)} keys")
        except Unreachable as error:
            self._backend_calls.suspect()
            return unknown(message, f"unreachable: {error}")
        except Exception as error:  # noqa: BLE001 - a backend may raise anything; it costs this lookup only
            log.exception("backend_call_failed", call="lookup", objects=len(keys), error=describe(error))
            return unknown(message, describe(error))
        return Present(message.id, bytes(map(bool, present)))

    def _leave(self) -> None:
        self._waiting.clear()


def unknown(message: Ask, reason: str) -> Present:
    """Nothing could be learnt."""
    return Present(message.id, bytes(len(split_keys(message.keys))), reason)
