"""The saves of one step, as its plan carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from layerflow.agent.descriptors import PartDescriptor

Tables = Sequence[Sequence[int]]
"""Block ids of a request, per layerflow group."""


class PlannedSaves:
    """Outlined when the parts are first asked for: behind a short forward pass, and not while it is scheduled.

    Pickled, they are outlined: a worker in another process gets them as they would be here.

    :param requests: whose saves these are.
    :param tables: their block tables, which nobody changes any more.
    :param outline: makes the parts.
    """

    __slots__ = ("_outline", "_parts", "_tables", "requests")

    def __init__(
        self,
        requests: Sequence[str] = (),
        tables: Sequence[Tables] = (),
        outline: Callable[[], Sequence[PartDescriptor]] = tuple,
    ) -> None:
        self.requests = tuple(requests)
        self._tables = tuple(tables)
        self._outline = outline
        self._parts: Sequence[PartDescriptor] | None = None

    def __bool__(self) -> bool:
        return bool(self.requests)

    def __reduce__(self) -> tuple[Any, ...]:
        return _outlined, (list(self.parts),)

    @property
    def parts(self) -> Sequence[PartDescriptor]:
        """What is saved of each request and group.

        :raises SpecError: see :func:`layerflow.agent.descriptors.describe_saves`.
        """
        if self._parts is None:
            self._parts = self._outline()
        return self._parts

    def read_any(self, blocks: Sequence[Sequence[int]]) -> bool:
        """May one of these blocks, given per group, be read by these saves?"""
        wanted = [set(ids) for ids in blocks]
        return any(
            not ids.isdisjoint(table)
            for tables in self._tables
            for ids, table in zip(wanted, tables, strict=False)  # of the last groups there may be nothing to save
            if ids
        )


NO_SAVES = PlannedSaves()


def _outlined(parts: Sequence[PartDescriptor]) -> PlannedSaves:
    tables = [[[]] * part.group + [part.table.tolist()] for part in parts]
    return PlannedSaves(tuple({part.request: None for part in parts}), tables, lambda: parts)
