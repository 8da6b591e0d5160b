"""Hand-offs whose reader was gone before anybody opened them: an abort may be quicker than a prefiller's scheduler."""

from __future__ import annotations

from layerflow.server.handoffs.handoff import REMEMBERED


class ReleasedEarly:
    """Their names, each until a time; the last so many. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, name: str, until: float) -> None:
        """Released; who opens it before `until` has nobody to open it for."""
        self._until.pop(name, None)
        if len(self._until) >= REMEMBERED:
            del self._until[next(iter(self._until))]
        self._until[name] = until

    def holds(self, name: str, now: float) -> bool:
        """Was it released, and not too long ago? What was is forgotten."""
        if self._until.get(name, now) > now:
            return True
        self._until.pop(name, None)
        return False

    def forget(self, name: str) -> bool:
        """A reader has come for it again; False = it was not released."""
        return self._until.pop(name, None) is not None
