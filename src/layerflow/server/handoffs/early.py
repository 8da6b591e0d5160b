"""Hand-offs whose reader was gone before anybody opened them: an abort may be quicker than a prefiller's scheduler."""

from __future__ import annotations

REMEMBERED = 4096
"""Names; beyond them the oldest is forgotten, and costs its room until its lease ends."""


class ReleasedEarly:
    """Their names, each until a time. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, name: str, until: float) -> None:
        """Released; who opens it before `until` has nobody to open it for."""
        self._until.pop(name, None)
        if len(self._until) >= REMEMBERED:
            del self._until[next(iter(self._until))]
        self._until[name] = until

    def holds(self, name: str, now: float) -> bool:
        """Was it released, and not too long ago?"""
        return self._until.get(name, now) > now

    def forget(self, name: str) -> bool:
        """A reader has come for it again; False = it was not released."""
        return self._until.pop(name, None) is not None
