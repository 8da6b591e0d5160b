"""Sees when vLLM's own prefix cache has forgotten everything."""

from __future__ import annotations

from collections.abc import Callable


class OwnCache:
    """VLLM's own prefix cache, as far as its block pool shows it.

    A reset that succeeds gives the pool a new table, and is possible only while no request has a block. So what the
    table holds behind it was computed by steps that were planned behind it.

    :ivar step: the number of the step that is planned, among those that compute.
    """

    def __init__(self) -> None:
        self._table: Callable[[], object] = lambda: None
        self._known: object = None  # kept, so that no other table gets its address
        self._empty_at = 0
        self.step = 1

    def meet(self, table: Callable[[], object]) -> None:
        """The scheduler has its blocks.

        :param table: of the blocks that it can find again; None where this vLLM has none.
        """
        self._table = table

    @property
    def is_seen(self) -> bool:
        """Does this vLLM show what its cache holds?"""
        return self._table() is not None

    def look(self) -> bool:
        """Before the first request of a step starts, or when it is planned: was the cache emptied since the one before?

        Whoever asks later in a step than its first request takes what that one puts into the cache for forgotten.
        """
        table = self._table()
        if table is self._known:
            return False
        self._known, self._empty_at = table, self.step
        return True

    def was_empty_at(self, step: int) -> bool:
        """Is all that it holds of this step, or of later ones?"""
        return self._empty_at == step

    def planned(self, *, computes: bool) -> None:
        """The step is planned."""
        self.step += computes
