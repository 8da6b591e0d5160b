"""What the next report to the server will carry; any thread may append to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from layerflow.wire.messages import Closed, Failure, Fence, Figures, Moved, Progress, Report

REPORT_ITEMS = 4096
"""Of one kind in one report; the server takes no report of any length."""

T = TypeVar("T")


@dataclass(slots=True)
class ReportBuffer:
    """What the next report will carry. Each attachment has its own: another server's batches bear the same numbers."""

    done: deque[int] = field(default_factory=deque)
    failed: deque[Failure] = field(default_factory=deque)
    fenced: deque[Fence] = field(default_factory=deque)
    closed: deque[Closed] = field(default_factory=deque)
    figures: deque[Figures] = field(default_factory=deque)
    moved: deque[Moved] = field(default_factory=deque)

    def take(self, progress: Callable[[], list[Progress]]) -> Report | None:
        """The next report; None = there is nothing to tell.

        :param progress: open steps that moved on. Asked behind the batches' ends and before the steps', so that a
            step's end is not told before its layers.
        """
        done, failed, fenced = _drain(self.done), _drain(self.failed), _drain(self.fenced)
        moved_on = progress()
        closed, measured, moved = _drain(self.closed), _drain(self.figures), _drain(self.moved)
        if not (done or failed or fenced or moved_on or closed or measured or moved):
            return None
        return Report(done, failed, fenced, moved_on, closed, measured, moved)


def _drain(column: deque[T]) -> list[T]:
    out: list[T] = []
    while column and len(out) < REPORT_ITEMS:
        out.append(column.popleft())
    return out
