"""SIGSTOP, and the moment from which it holds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STOPPED = frozenset("TZX")
PATIENCE_S = 10.0


def stop(pid: int) -> None:
    """SIGSTOP; returns when no thread of the process runs any more: until then it may still answer.

    :raises TimeoutError: one goes on.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + PATIENCE_S
    while not states(pid) <= STOPPED:
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} was not stopped within {PATIENCE_S:g} s")
        time.sleep(0.0005)


def go_on(pid: int) -> None:
    """SIGCONT, unless the process is dead by now: a server kills a host that is silent for too long."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """No thread of the process runs within the with-block."""
    stop(pid)
    try:
        yield
    finally:
        go_on(pid)


def left_over(tier: Callable[[], dict[str, Any]]) -> bool:
    """Has a host that is stopped fetches to end?

    :param tier: the server's word on it; asked twice, as what the host had ended may lie before the server unread.
    """
    return bool([tier()["fetching_jobs"] for _ in range(2)][-1])


def states(pid: int) -> set[str]:
    """Of its threads, as proc(5) names them: R runs, T is stopped, Z has ended."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found
