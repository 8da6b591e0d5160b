"""What two servers and their hosts still hold for somebody, and what they never gave back."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from layerflow.agent.observer import fetch_status
from layerflow.errors import LayerflowError
from layerflow_cli.bench.harness import ServerProcess

BALANCE_S = 30.0
TICK_S = 0.25


class Patience:
    """So many seconds, of which a machine that stands still takes none."""

    def __init__(self, seconds: float) -> None:
        self._left, self._last = seconds, time.monotonic()

    def over(self) -> bool:
        now = time.monotonic()
        self._left -= min(TICK_S, now - self._last)
        self._last = now
        return self._left < 0


class Balance:
    """Of the server that the prefiller stores at, the owner, and the decoder's, the reader."""

    def __init__(self, owner: ServerProcess, reader: ServerProcess) -> None:
        self.owner, self.reader = owner, reader
        self._files: dict[int, Counter[str]] = {}
        self._never = threading.Event()

    def state(self) -> dict[str, dict[str, Any]]:
        """What each server says."""
        return {"owner": fetch_status(self.owner.endpoint), "reader": fetch_status(self.reader.endpoint)}

    def host_pid(self, role: str) -> int:
        """Of ``exporter`` or ``importer``; 0 while it is being started."""
        peers = self.state()["owner" if role == "exporter" else "reader"]["peers"]
        return int(peers["lends" if role == "exporter" else "reads"][role]["pid"])

    def held(self) -> dict[str, Any]:
        """What is kept, pinned, leased, followed, half-written or on its way."""
        left: dict[str, Any] = {}
        for name, status in self.state().items():
            pool, flow, peers = status["pool"], status["flow"], status["peers"]
            found = {key: pool[key] for key in ("pinned", "half_written")}
            found |= {key: flow[key] for key in ("steps", "following", "fetches", "load_inflight_bytes")}
            found |= {key: status["follows"][key] for key in ("follows", "to_store")}
            found |= {key: status["handoffs"][key] for key in ("live", "kept_bytes")}
            found |= {f"leases of {one['client']}": one["leases"] for one in status["sessions"]}
            if peers["lends"] is not None:
                found |= {f"lent {key}": peers["lends"][key] for key in ("leases", "lent_bytes")}
                found["exporter's leases"] = peers["lends"]["exporter_figures"].get("lent_leases")
            if peers["reads"] is not None:
                found |= {f"read {key}": peers["reads"][key] for key in ("leases", "fetching_jobs")}
            left |= {f"{name}: {key}": value for key, value in found.items() if value}
        return left

    def more_files(self, others: Mapping[str, int]) -> dict[str, Counter[str]]:
        """Descriptors that a process has now and did not have when it was first seen settled."""
        pids = {"owner": self.owner.process.pid, "reader": self.reader.process.pid, **others}
        pids |= {role: self.host_pid(role) for role in ("exporter", "importer")}
        found = {name: (pid, open_files(pid)) for name, pid in pids.items()}
        return {name: more for name, (pid, now) in found.items() if (more := now - self._files.setdefault(pid, now))}

    def settle(self, others: Mapping[str, int]) -> None:
        """Wait until nothing is held.

        :param others: further processes whose descriptors are counted.
        :raises AssertionError: something stays.
        """
        patience, left = Patience(BALANCE_S), {}
        while not patience.over():
            # Whoever was killed may be starting, and answer nothing yet.
            with contextlib.suppress(LayerflowError, FileNotFoundError):
                left = self.held() or self.more_files(others)
                if not left:
                    return
            self._never.wait(0.02)
        raise AssertionError(f"kept for nobody: {left}")


def open_files(pid: int) -> Counter[str]:
    """What a process's descriptors refer to, numbers left out."""
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[re.sub(r"\d+", "N", os.readlink(f"/proc/{pid}/fd/{fd}"))] += 1
    return found
