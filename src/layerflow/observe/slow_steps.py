"""A log line for each step that held its engine for long, with where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import structlog

if TYPE_CHECKING:
    from layerflow.wire.messages import Figures

PERIOD_S: Final = 1.0
"""At most one line per engine worker in this time; steps that are left out are counted in the next line."""


class WorkerLike(Protocol):
    """What a line says of a session."""

    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...


class SlowSteps:
    """Watches what agents measured.

    :param limit_s: a step whose loads held the engine for longer is slow; 0 or less = none is. Asked for each step,
        since the setting may change.
    """

    def __init__(self, limit_s: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._said: dict[int, tuple[float, int]] = {}
        self._log = structlog.get_logger("layerflow.server.steps")

    def see(self, worker: WorkerLike, figures: Figures) -> None:
        """A step has ended; say so if it was slow."""
        limit = self._limit_s()
        if limit <= 0 or figures.load_exposed_s < limit:
            return
        now = self._clock()
        said, unsaid = self._said.get(worker.number, (-PERIOD_S, 0))
        if now - said < PERIOD_S:
            self._said[worker.number] = said, unsaid + 1
            return
        self._said[worker.number] = now, 0
        self._log.warning(
            "slow_step",
            session=worker.number,
            engine=worker.name,
            step=figures.step,
            load_exposed_ms=round(figures.load_exposed_s * 1e3, 1),
            load_hidden_ms=round(max(0.0, figures.load_transfer_s - figures.load_exposed_s) * 1e3, 1),
            load_bytes=figures.load_bytes,
            load_gbps=round(figures.load_bytes / figures.load_transfer_s / 1e9, 2) if figures.load_transfer_s else 0.0,
            save_transfer_ms=round(figures.save_transfer_s * 1e3, 1),
            save_bytes=figures.save_bytes,
            unsaid=unsaid,
        )

    def forget(self, session: int) -> None:
        """A session is gone."""
        self._said.pop(session, None)
