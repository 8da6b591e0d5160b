"""Calls into the Mooncake client, guarded: before setup and after close most of them end the process (SIGSEGV)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from layerflow.hosts.backend import Unreachable
from layerflow.hosts.mooncake_codes import FAULTS, RPC_FAILED, explain, unreachable

_CLOSE_PATIENCE_S = 1.0
# The library keeps several connections. After the master ended, the first call over each fails at once, even if another
# master is there by now; calls that fail late have tried to connect again, for seconds.
_REPEATED = frozenset(("batch_is_exist", "batch_get_session_start", "batch_put_session_start"))
_QUICK_S = 0.2


class Calls:
    """A client while it is set up. Any thread; calls that move data do not hold the GIL."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._store: Any = None
        self._under_way = 0
        self._counts: Counter[str] = Counter()

    def open(self, store: Any) -> None:
        """Calls go to `store` from now on."""
        with self._changed:
            self._store = store

    def __call__(self, method: str, *arguments: Any) -> Any:
        """:raises Unreachable: it is not set up, or closed."""
        with self._changed:
            store = self._store
            if store is None:
                raise Unreachable("the Mooncake client is not set up")
            self._under_way += 1
        try:
            return getattr(store, method)(*arguments)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def codes(self, method: str, *arguments: Any) -> list[int]:
        """A call that answers with a code per object.

        :raises Unreachable: also where the master did not answer for any of them.
        """
        quick = time.monotonic() + _QUICK_S
        codes: list[int] = self(method, *arguments)
        while method in _REPEATED and set(codes) == {RPC_FAILED} and time.monotonic() < quick:
            codes = self(method, *arguments)
        if failed := sum(code in FAULTS for code in codes):
            self.count("failed_calls", failed)
        if codes and all(map(unreachable, codes)):
            raise Unreachable(explain(codes[0]))
        return codes

    def close(self) -> None:
        """Close the client, unless calls are under way that do not end: it is never closed under one."""
        with self._changed:
            store, self._store = self._store, None
            if store is None or not self._changed.wait_for(lambda: not self._under_way, _CLOSE_PATIENCE_S):
                return
        store.close()

    def count(self, name: str, by: int = 1) -> None:
        """Something for :attr:`counts`."""
        with self._changed:
            self._counts[name] += by

    @property
    def counts(self) -> dict[str, int]:
        """What was counted since the start."""
        with self._changed:
            return dict(self._counts)
