"""A polling executor: one thread that asks a device's events whether they are done, and calls back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog

from layerflow.device.base import DeviceEvent
from layerflow.device.timing import use_precise_timers
from layerflow.errors import InvalidTransition
from layerflow.system.threads import OwnedThread

log = structlog.get_logger(__name__)

DEFAULT_INTERVAL_US = 50
DEFAULT_MAX_INTERVAL_US = 1000
_BACK_OFF = 1.5
_RESTART_S = 0.05


def _nothing() -> None:
    """For a device whose threads need no preparing."""


@dataclass(frozen=True, slots=True)
class PollerStatistics:
    """A snapshot.

    :param watching: events not yet seen done.
    :param parked: the thread sleeps until it is woken.
    :param interval_us: between two sweeps, in microseconds.
    :param sweeps: times that it looked, since the start.
    :param fired: callbacks called.
    :param failed: callbacks and events that raised.
    """

    watching: int
    parked: bool
    interval_us: float
    sweeps: int
    fired: int
    failed: int


class _Watched(NamedTuple):
    event: DeviceEvent
    callback: Callable[..., object]
    args: tuple[Any, ...]
    on_error: Callable[..., object] | None


class Poller:
    """One thread for all events of one device.

    It looks every `interval_us` while something moves and backs off to `max_interval_us` while nothing does;
    with nothing to watch it parks.

    :param name: of the thread.
    :param interval_us: shortest interval between two sweeps, microseconds.
    :param max_interval_us: longest interval.
    :param prepare: called first on the thread.
    :param lost: told that the thread has failed; it begins anew, with the events that it watches.
    """

    def __init__(
        self,
        name: str = "layerflow-poller",
        *,
        interval_us: float = DEFAULT_INTERVAL_US,
        max_interval_us: float = DEFAULT_MAX_INTERVAL_US,
        prepare: Callable[[], object] = _nothing,
        lost: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._prepare = prepare
        self._shortest = interval_us * 1e-6
        self._longest = max_interval_us * 1e-6
        self._interval = self._shortest
        self._incoming: deque[_Watched] = deque()
        self._watched: deque[_Watched] = deque()
        self._condition = threading.Condition()
        self._parked = False
        self._closed = False
        self._sweeps = self._fired = self._failed = 0
        self._thread = OwnedThread(name, self._run, lost=lost, restart_s=_RESTART_S).start()

    def watch(
        self,
        event: DeviceEvent,
        callback: Callable[..., object],
        *args: Any,
        on_error: Callable[..., object] | None = None,
    ) -> None:
        """Call ``callback(*args)`` on the poller's thread once `event` is done.

        Callbacks of events seen done in one sweep are called in the order they were watched. From any thread; a
        deque append while the poller is not parked.

        :param on_error: called as ``on_error(error, *args)`` instead if asking the event raises (the device failed).
        :raises InvalidTransition: the poller is closed.
        """
        if self._closed:
            raise InvalidTransition("an event was given to a poller that is closed; nothing would ever look at it")
        self._incoming.append(_Watched(event, callback, args, on_error))
        # The poller raises _parked before it looks at _incoming for the last time: one of the two sees the other.
        if self._parked:
            self._wake()

    def close(self, timeout: float | None = 5.0) -> bool:
        """End the thread; callbacks of events that are not done yet are never called. Whether it has ended."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        ended = self._thread.join(timeout)
        dropped = len(self._watched) + len(self._incoming)
        if dropped:
            log.warning("poller_closed_with_events", dropped=dropped)
        return ended

    def statistics(self) -> PollerStatistics:
        """A snapshot, from any thread."""
        return PollerStatistics(
            watching=len(self._watched) + len(self._incoming),
            parked=self._parked,
            interval_us=self._interval * 1e6,
            sweeps=self._sweeps,
            fired=self._fired,
            failed=self._failed,
        )

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def _run(self) -> None:
        use_precise_timers()
        self._prepare()
        while not self._closed:
            if self._sweep():
                self._interval = self._shortest
            else:
                self._interval = min(self._interval * _BACK_OFF, self._longest)
            if self._watched or self._incoming:
                time.sleep(self._interval)
            else:
                self._park()

    def _park(self) -> None:
        with self._condition:
            self._parked = True
            while not (self._incoming or self._closed):
                self._condition.wait()
            self._parked = False
            self._interval = self._shortest

    def _sweep(self) -> bool:
        """Look at everything once; whether anything moved."""
        self._sweeps += 1
        moved, waiting = bool(self._incoming), self._watched
        while self._incoming:
            waiting.append(self._incoming.popleft())
        for _ in range(len(waiting)):
            watched = waiting.popleft()  # whatever its callback does, it is called once
            if self._fire_if_done(watched):
                moved = True
            else:
                waiting.append(watched)
        return moved

    def _fire_if_done(self, watched: _Watched) -> bool:
        """Whether the watched event needs no further look."""
        try:
            done = watched.event.query()
        except Exception as error:
            self._failed += 1
            log.exception("device_event_failed")
            if watched.on_error is not None:
                self._guarded(watched.on_error, error, *watched.args)
            return True
        if done:
            self._fired += 1
            self._guarded(watched.callback, *watched.args)
        return done

    def _guarded(self, function: Callable[..., object], *args: Any) -> None:
        """One failure hurts one caller: a callback that raises is logged and the thread goes on."""
        try:
            function(*args)
        except Exception:
            self._failed += 1
            log.exception("poller_callback_failed", function=getattr(function, "__qualname__", repr(function)))
