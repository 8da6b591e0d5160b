"""Calls into the Mooncake client, guarded: before setup and after close most of them end the process (SIGSEGV)."""

from __future__ import annotations

import time
from typing import Any

from layerflow.hosts.backend import Unreachable
from layerflow.hosts.guard import Guard
from layerflow.hosts.mooncake_codes import FAULTS, RPC_FAILED, explain, unreachable

# The library keeps several connections. After the master ended, the first call over each fails at once, even if another
# master is there by now; calls that fail late have tried to connect again, for seconds.
_REPEATED = frozenset(("batch_is_exist", "batch_get_session_start", "batch_put_session_start"))
_QUICK_S = 0.2


class Calls(Guard):
    """A client while it is set up. Any thread; calls that move data do not hold the GIL."""

    def __init__(self) -> None:
        super().__init__("the Mooncake client is not set up")

    def __call__(self, method: str, *arguments: Any) -> Any:
        """:raises Unreachable: it is not set up, or closed."""
        with self.client() as store:
            return getattr(store, method)(*arguments)

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
