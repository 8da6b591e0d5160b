"""Waiting until no batch touches certain blocks any more.

Abort and failure are states of a transfer, not its absence: objects are given back and requests
released only when the batches that were in flight on them have been reported. Which batches those are
is worked out once, when something dies; a batch that nobody watches costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerflow.flow.spans import Span, touches

if TYPE_CHECKING:
    from layerflow.flow.steps import Flight, Step, Strand


@dataclass(slots=True, eq=False)
class Quiet:
    """What to do once the watched batches have ended.

    :param pending: batches still in flight.
    :param revoke: save parts to give back: step, positions, reason.
    :param release: an aborted request to release then.
    """

    pending: int = 0
    revoke: tuple[Step, tuple[int, ...], str] | None = None
    release: str | None = None

    def watch(self, blocks: Iterable[tuple[Strand, Sequence[Span]]]) -> None:
        """Wait for every batch in flight that touches these blocks."""
        for strand, spans in blocks:
            for flight in strand.flights.values():
                if touches(spans, flight.lo, flight.hi):
                    self._add(flight)

    def _add(self, flight: Flight) -> None:
        if flight.watch is None:
            flight.watch = [self]
        elif self not in flight.watch:
            flight.watch.append(self)
        else:
            return
        self.pending += 1
