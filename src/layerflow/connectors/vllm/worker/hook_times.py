"""How long vLLM spends inside each hook, where ``LAYERFLOW_HOOK_TIMES`` names a file to write it to."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = "LAYERFLOW_HOOK_TIMES"
KEPT = 200_000
"""Calls remembered of each hook; later ones are not."""


class HookTimes:
    """Wraps an object's methods, remembers what each call took and writes a summary when it is closed.

    :param path: to write to; the role and the process are added to its name.
    """

    def __init__(self, path: str, role: str) -> None:
        self._path = Path(f"{path}.{role}.{os.getpid()}")
        self._taken: dict[str, list[float]] = {}

    def watch(self, owner: object, names: tuple[str, ...]) -> None:
        """Time these methods of `owner` from now on."""
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def write(self) -> None:
        """``{hook: {"count", "p50_us", "p99_us", "max_us"}}``."""
        summary = {name: _summary(sorted(taken)) for name, taken in self._taken.items() if taken}
        self._path.write_text(json.dumps(summary, indent=1))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        taken = self._taken.setdefault(name, [])

        @functools.wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **named)
            finally:
                if len(taken) < KEPT:
                    taken.append((time.perf_counter() - began) * 1e6)

        return call


def _summary(taken: list[float]) -> dict[str, float]:
    last = len(taken) - 1
    return {
        "count": len(taken),
        "p50_us": round(taken[last // 2], 2),
        "p99_us": round(taken[int(last * 0.99)], 2),
        "max_us": round(taken[-1], 2),
    }
