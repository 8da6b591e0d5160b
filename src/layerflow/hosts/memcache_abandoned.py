"""Objects that a writer left unfinished: nothing in memcache removes them while there is room."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from layerflow.hosts.memcache_calls import Calls, Info

_MANY = 4096


@dataclass(slots=True)
class _Sight:
    info: Info
    since: float


class Abandoned:
    """Remembers what was seen unfinished, and removes what has been so for longer than any writer may take.

    :param after_s: longer than a write's lease: its owner, if it lives, has stopped by then.
    """

    def __init__(self, calls: Calls, after_s: float) -> None:
        self._calls, self._after_s = calls, after_s
        self._seen: dict[str, _Sight] = {}

    def look(self, there: Mapping[str, Info]) -> set[str]:
        """What of these was removed just now.

        :param there: what a writer found in the pool, complete or not.
        """
        if not there:
            return set()
        names = list(there)
        complete = self._calls.info(names, complete=True)
        now = time.monotonic()
        over: list[str] = []
        for name, info in zip(names, complete, strict=True):
            sight = self._seen.get(name)
            if info.nbytes:
                self._seen.pop(name, None)
            elif sight is None or sight.info != there[name]:
                self._seen[name] = _Sight(there[name], now)
            elif now - sight.since > self._after_s:
                over.append(name)
                del self._seen[name]
        if len(self._seen) > _MANY:  # the oldest; dictionaries keep their order
            for name in list(self._seen)[: _MANY // 2]:
                del self._seen[name]
        if over:
            self._calls.count("abandoned_removed", len(over))
        return {name for name, code in zip(over, self._calls.remove(over), strict=True) if code == 0}
