"""How close to its stagger slot a lane submits while another lane keeps the memory busy."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from layerflow.device.timing import sleep_until, use_precise_timers
from layerflow.ops.copier import copy_fallback, copy_native

COPY_BYTES = 8 << 20
EXTENT_BYTES = 64 << 10


def measure(slots: int = 400, stagger_us: float = 100.0, copy_threads: int = 1, rounds: int = 5) -> dict[str, Any]:
    """Submit at absolute slots, as a lane does.

    :param slots: how many in one round.
    :param stagger_us: distance of two slots, microseconds.
    :param copy_threads: other lanes' threads, which copy without pause meanwhile.
    :param rounds: the medians over so many rounds are reported: one foreign process that holds a core for 3 ms
        spoils 30 slots of its round.
    :returns: ``error_us`` (lateness) as ``p50``, ``p95`` and ``max`` microseconds.
    """
    stop = threading.Event()
    copies = [threading.Thread(target=_copy_until, args=(stop,)) for _ in range(copy_threads)]
    for thread in copies:
        thread.start()
    late = []
    for _ in range(rounds):
        errors: list[float] = []
        lane = threading.Thread(target=_submit, args=(errors, slots, stagger_us * 1e-6))
        lane.start()
        lane.join()
        late.append(np.percentile(errors, (50, 95, 100)) * 1e6)
    stop.set()
    for thread in copies:
        thread.join()
    p50, p95, most = np.median(late, axis=0).tolist()
    return {"error_us": {"p50": p50, "p95": p95, "max": most}}


def _submit(errors: list[float], slots: int, distance: float) -> None:
    start = time.monotonic() + 0.02
    errors.extend(sleep_until(start + slot * distance) for slot in range(slots))


def _copy_until(stop: threading.Event) -> None:
    use_precise_timers()  # as the agent's lanes do
    copy = copy_native or copy_fallback
    source, target = (np.ones(COPY_BYTES, np.uint8) for _ in range(2))
    at = np.arange(0, COPY_BYTES, EXTENT_BYTES, dtype=np.int64)
    nbytes = np.full(at.size, EXTENT_BYTES, np.int64)
    while not stop.is_set():
        copy(target.ctypes.data, source.ctypes.data, at, at, nbytes)
