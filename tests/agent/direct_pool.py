"""Workers move bytes past the arena, to and from a :class:`FakePool`: which is patched for that, in one place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent.fake_memcache import HOST, FakePool, FakeStore
from layerflow.agent.direct import client, lane
from layerflow.agent.direct.client import Watchdog
from layerflow.hosts.memcache.setup import MemcacheConnection
from layerflow.server import terms


def workers_join(pool: FakePool, patch: pytest.MonkeyPatch) -> list[FakeStore]:
    """Agents' clients join the pool, and memory on the cpu suits them. Those that were made."""
    made: list[FakeStore] = []

    def connect(options: object, meta: object) -> MemcacheConnection:
        made.append(FakeStore(pool))
        return MemcacheConnection(made[-1], made[-1].number, "fake")

    patch.setattr(client, "connect", connect)
    patch.setattr(client, "suits", lambda device: True)
    # A machine that stands still for a second must not end the process that runs the tests.
    patch.setattr(lane, "Watchdog", lambda: Watchdog(lambda: None))
    return made


def servers_offer(pool: FakePool, patch: pytest.MonkeyPatch) -> None:
    """Servers that start from now on have the pool behind their arena, and let workers move bytes past it."""
    tests = Path(__file__).resolve().parents[1]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tests), os.environ.get("PYTHONPATH")))))
    patch.setattr(terms, "tier_of", lambda settings: (HOST, {"folder": str(pool.folder)}))
    patch.setattr(terms, "direct_options", lambda settings: json.dumps(pool.urls))
