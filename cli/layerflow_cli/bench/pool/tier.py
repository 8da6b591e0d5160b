"""What lies behind a server's arena, as the server tells of it; and an emptied arena, so that loads come from there."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from layerflow.agent.control import Control
from layerflow.errors import LayerflowError

READY_S = 60.0
POLL_S = 20e-3
"""Asking more often would take the cores that the transfers need; when something was over, the server says."""


class Tier:
    """Of the server at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self._control = Control(endpoint, engine="bench")

    @property
    def written(self) -> int:
        """Objects written so far."""
        return int(self._status()["written_objects"])

    @property
    def written_at(self) -> float:
        """When the last of them was written, in monotonic seconds."""
        return float(self._status()["written_at"])

    @property
    def fetched(self) -> int:
        """Objects brought into the arena so far."""
        return int(self._status()["fetched_objects"])

    def wait_ready(self) -> None:
        """Until it is up and its memory warm: no transfer pays for the first touch of a page.

        :raises LayerflowError: it is not, after :data:`READY_S`.
        """
        until = time.monotonic() + READY_S
        while True:
            tier = self._status()
            figures = tier["backend_figures"]  # they come a moment after the tier
            if tier["up"] and figures and figures.get("segment_warm_bytes", 0) >= figures.get("segment_bytes", 0):
                return
            if time.monotonic() > until:
                raise LayerflowError(f"{tier['backend']} is not ready after {READY_S:g} s: {self.story()}")
            time.sleep(POLL_S)

    def wait_written(self, wanted: int, timeout_s: float) -> bool:
        """Until so many objects have been written; False after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while self.written < wanted:
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def wait_idle(self, timeout_s: float) -> bool:
        """Until everything that was saved has been written; False after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while self._status()["writing_jobs"]:
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def empty_arena(self) -> None:
        """What is loaded from now on comes from the tier."""
        self._control.purge()

    def story(self) -> str:
        """What went wrong lately, for an error."""
        tier = self._status()
        return (
            f"the tier is {'up' if tier['up'] else 'down: ' + tier['reason']}; failures: {tier['failures'] or 'none'}"
        )

    def close(self) -> None:
        """Hang up."""
        self._control.close()

    def __enter__(self) -> Tier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _status(self) -> dict[str, Any]:
        tier: dict[str, Any] = self._control.status()["tier"]
        return tier
