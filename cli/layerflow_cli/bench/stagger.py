"""How close to its stagger slot a lane submits while another lane keeps the memory busy."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from layerflow.device.timing import sleep_until
from layerflow.ops.copier import copy_fallback, copy_native

COPY_BYTES = 8 << 20
EXTENT_BYTES = 64 << 10


def measure(slots: int = 400, stagger_us: float = 100.0, copy_threads: int = 1) -> dict[str, Any]:
    """Submit at absolute slots, as a lane does.

    :param slots: how many.
    :param stagger_us: distance of two slots, microseconds.
    :param copy_threads: threads that copy without pause meanwhile.
    :returns: ``error_us`` (lateness) as ``p50``, ``p95`` and ``max`` microseconds.
    """
    stop = threading.Event()
    copies = [threading.Thread(target=_copy_until, args=(stop,)) for _ in range(copy_threads)]
    errors: list[float] = []
    lane = threading.Thread(target=_submit, args=(errors, slots, stagger_us * 1e-6))
    for thread in (*copies, lane):
        thread.start()
    lane.join()
    stop.set()
    for thread in copies:
        thread.join()
    late = np.array(errors) * 1e6
    return {
        "error_us": {
            "p50": float(np.percentile(late, 50)),
            "p95": float(np.percentile(late, 95)),
            "max": float(late.max()),
        }
    }


def _submit(errors: list[float], slots: int, distance: float) -> None:
    start = time.monotonic() + 0.02
    errors.extend(sleep_until(start + slot * distance) for slot in range(slots))


def _copy_until(stop: threading.Event) -> None:
    copy = copy_native or copy_fallback
    source, target = (np.ones(COPY_BYTES, np.uint8) for _ in range(2))
    at = np.arange(0, COPY_BYTES, EXTENT_BYTES, dtype=np.int64)
    nbytes = np.full(at.size, EXTENT_BYTES, np.int64)
    while not stop.is_set():
        copy(target.ctypes.data, source.ctypes.data, at, at, nbytes)
