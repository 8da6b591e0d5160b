"""Sleeping until a moment, to some ten microseconds.

A plain ``time.sleep`` of 100 us lands 60 to 90 us late: 50 us of that is Linux's default timer slack,
which a thread may give up; the rest is the way back onto a core, which a short final spin absorbs. The
spin is no longer than naps usually overshoot: a thread that spins all the time uses up its share of a
busy core, and is then kept off it for milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
import time

DEFAULT_SPIN_US = 150
_SHORTEST_SLICE_NS = 100_000  # the least that the scheduler takes, kernel/sched/syscalls.c
_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # <asm/unistd.h>
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # struct sched_attr, <linux/sched/types.h>, first version

_libc = ctypes.CDLL(None)


class _Timer(threading.local):
    """What is known of the calling thread's timer. Seconds."""

    precise = False
    overshoot = 20e-6  # a nap is later than this one time in five
    more = 4e-6
    less = 1e-6

    def learn(self, late: float) -> None:
        """Follow the naps' 80th percentile, unmoved by how far an outlier lies."""
        step = self.more if late > self.overshoot else -self.less
        self.overshoot = min(max(self.overshoot + step, 0.0), DEFAULT_SPIN_US * 1e-6)


_timer = _Timer()


def use_precise_timers() -> None:
    """Make the calling thread wake promptly; cheap to call again.

    Gives up its timer slack, and asks the scheduler for short slices (Linux 6.12), which let it onto a core as
    soon as it wakes. Neither needs a privilege; a kernel that knows neither leaves the thread as it is.
    """
    if _timer.precise:
        return
    _timer.precise = True
    prctl = getattr(_libc, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    if _SYS_SCHED_SETATTR is not None and os.sched_getscheduler(0) == os.SCHED_OTHER:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())  # of this thread, on Linux
        attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, _SHORTEST_SLICE_NS, 0, 0)
        _libc.syscall(ctypes.c_long(_SYS_SCHED_SETATTR), ctypes.c_long(0), attributes, ctypes.c_long(0))


def sleep_until(deadline: float, spin_us: int = DEFAULT_SPIN_US) -> float:
    """Return at `deadline`, on ``time.monotonic``'s clock, or at once if it has passed.

    :param spin_us: longest final spin in microseconds; never more than :data:`DEFAULT_SPIN_US`.
    :returns: seconds past the deadline.
    """
    use_precise_timers()
    wake = deadline - min(spin_us * 1e-6, _timer.overshoot + 5e-6)
    nap = wake - time.monotonic()
    if nap > 0:
        time.sleep(nap)
        _timer.learn(time.monotonic() - wake)
    while (now := time.monotonic()) < deadline:
        pass
    return now - deadline
