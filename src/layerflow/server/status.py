"""What ``layerflow status`` shows: one JSON-ready picture of a running server."""

from __future__ import annotations

import dataclasses
import os
import time
from datetime import datetime
from typing import TYPE_CHECKING

from layerflow._version import __version__

if TYPE_CHECKING:
    from layerflow.config.settings import Settings
    from layerflow.server.handlers.context import ServerContext
    from layerflow.server.watch import FileState
    from layerflow.spec import ModelSpec


MOST_LISTED = 100
"""Hand-offs that are shown one by one."""


def status_of(
    server: ServerContext, settings: Settings, started_at: float, file: FileState | None, *, healthy: bool
) -> dict[str, object]:
    """Sessions, limits, pool, core and figures. Sizes in bytes, times in seconds unless named otherwise.

    :param file: the watched configuration file; None = none is watched.
    """
    now = time.monotonic()
    return {
        "version": __version__,
        "pid": os.getpid(),
        "started_at": started_at,
        "uptime_s": round(time.time() - started_at, 3),
        "healthy": healthy,
        "endpoint": settings.server.endpoint,
        "link_emulated": settings.pool.link_gbps > 0,
        "sessions": [
            {
                "session": session.number,
                "engine": session.engine,
                "name": session.name,
                "client": session.client,
                "pid": session.pid,
                "version": session.version,
                "memory": session.memory,
                "pinned_bytes": session.pinned if session.pinned >= 0 else None,
                "silent": session.silent,
                "heard_s_ago": round(now - session.heard_at, 3),
                "leases": sum(until > now for until in session.hit_leases.values()),
                "open_steps": len(session.open_steps),
                "kept_bytes": session.account.nbytes,
                "kept": session.account.entries,
                "model": session.spec.name if session.spec else None,
                "fingerprint": session.spec.fingerprint.hex() if session.spec else None,
                "tp": f"{session.spec.shard.tp_rank}/{session.spec.shard.tp_size}" if session.spec else None,
                **dataclasses.asdict(session.figures),
                "bound_to_size": _bound(session.spec) if session.spec else [],
            }
            for session in server.sessions
        ],
        "limits": settings.transfer.model_dump(),
        "config": None if file is None else _file(file),
        "trial": server.trials.status(),
        "pool": dataclasses.asdict(server.pool.statistics()),
        "tier": None if server.sources is None or server.sources.tier is None else server.sources.tier.status(),
        "handoffs": _handoffs(server, now),
        "peers": None if server.peers is None else server.peers.status(),
        "follows": {
            "follows": len(server.driver.follows),
            "objects": server.driver.follows.objects,
            "to_store": server.driver.follows.coming_objects,
        },
        "recording": server.recorder.status(),
        "described": dataclasses.asdict(server.journal.statistics()),
        "flow": dataclasses.asdict(server.driver.flow.statistics()),
        "figures": server.metrics.summary(),
        "exposed_load": server.metrics.exposed_load.plain(),
    }


def _file(file: FileState) -> dict[str, object]:
    """Which file, when it was last applied, and since when and why an edit of it is refused (None = none is)."""
    now = time.time()

    def when(at: float) -> str | None:
        return datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds") if at else None

    return {
        "path": file.path,
        "sha256": file.sha256,
        "applied_at": when(file.applied_at),
        "applied_s_ago": round(now - file.applied_at, 3) if file.applied_at else None,
        "refused_since": when(file.refused_at),
        "refused_s": round(now - file.refused_at, 3) if file.refused_at else None,
        "problems": list(file.problems),
        "refusals": file.refusals,
    }


def _handoffs(server: ServerContext, now: float) -> dict[str, object]:
    """Counts, and the oldest of those that are not over."""
    live = [
        {
            "handoff": each.name,
            "engine": each.engine,
            "state": each.status.value,
            "tokens": each.tokens,
            "to_store": len(each.pending),
            "claims": each.claims,
            "due_in_s": round(server.handoffs.due(each) - now, 3),
        }
        for each in server.handoffs.live()[:MOST_LISTED]
    ]
    return {**dataclasses.asdict(server.handoffs.statistics()), "live": live}


def _bound(spec: ModelSpec) -> list[str]:
    return [f"group {number} ({spec.groups[number].kind}): {why}" for number, why in spec.bound_to_size().items()]
