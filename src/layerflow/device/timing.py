"""Sleeping until a moment, to some ten microseconds.

A plain ``time.sleep`` of 100 us lands 60 to 90 us late: 50 us of that is Linux's default timer slack,
which a thread may give up; the rest is the way back onto a core, which a short final spin absorbs. The
spin is no longer than naps have lately overshot: a thread that spins all the time uses up its share of a
busy core, and is then kept off it for milliseconds.
"""

from __future__ import annotations

import ctypes
import threading
import time

DEFAULT_SPIN_US = 150
_FIRST_GUESS = 40e-6  # seconds that a nap overshoots, before the first one was seen
_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>

_libc = ctypes.CDLL(None)


class _Timer(threading.local):
    """What is known of the calling thread's timer."""

    precise = False
    overshoot = _FIRST_GUESS  # seconds, running mean


_timer = _Timer()


def use_precise_timers() -> None:
    """Give up the calling thread's timer slack (Linux; elsewhere nothing happens). Cheap to call again."""
    if not _timer.precise:
        prctl = getattr(_libc, "prctl", None)
        if prctl is not None:
            prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
        _timer.precise = True


def sleep_until(deadline: float, spin_us: int = DEFAULT_SPIN_US) -> float:
    """Return at `deadline`, on ``time.monotonic``'s clock, or at once if it has passed.

    :param spin_us: longest final spin in microseconds; never more than :data:`DEFAULT_SPIN_US`.
    :returns: seconds past the deadline.
    """
    use_precise_timers()
    spin = min(spin_us * 1e-6, DEFAULT_SPIN_US * 1e-6, 1.5 * _timer.overshoot + 5e-6)
    wake = deadline - spin
    nap = wake - time.monotonic()
    if nap > 0:
        time.sleep(nap)
        late = min(time.monotonic() - wake, DEFAULT_SPIN_US * 1e-6)
        _timer.overshoot += (late - _timer.overshoot) / 8
    while (now := time.monotonic()) < deadline:
        pass
    return now - deadline
