"""Objects whose bytes were found broken: removed from the store, but never under another node's lease.

With `force` the master removes at once, and gives the memory to other objects while another node still reads it under
a lease. Without, it refuses as long as anyone has a lease; looking an object up takes one. So a client that found an
object broken asks for it no more, and tries to remove it until it succeeds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from layerflow.hosts.backend import Unreachable, pool_name
from layerflow.hosts.mooncake.client import NOT_FOUND, MooncakeClient

_MANY = 4096


class Condemned:
    """Keys to be removed. Any thread.

    :param calls: of the client.
    """

    def __init__(self, calls: MooncakeClient) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[bytes]) -> None:
        """Remove these, now or once their leases have run out. Past a few thousand the oldest are forgotten."""
        with self._lock:
            self._keys |= dict.fromkeys(keys)
            for key in list(self._keys)[: max(0, len(self._keys) - _MANY)]:
                del self._keys[key]
        self.remove()

    def discard(self, keys: Iterable[bytes]) -> None:
        """They were written anew."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def remove(self) -> None:
        """Try again. What the master does not answer for stays condemned."""
        keys = list(self._keys)
        if not keys:
            return
        try:
            codes = self._calls.codes("batch_remove", [pool_name(key) for key in keys], False)
        except Unreachable:
            return
        self.discard(key for key, code in zip(keys, codes, strict=True) if code in (0, NOT_FOUND))

    def forget(self) -> None:
        """The store is another."""
        with self._lock:
            self._keys.clear()
