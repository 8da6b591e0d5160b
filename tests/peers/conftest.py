"""Pairs of servers, real processes: one lends its arena, the other reads it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.known import KnownWorker, eventually

from layerflow.agent import Control
from layerflow.links import links
from layerflow.spec import ModelSpec
from layerflow_cli.bench.harness import ServerProcess

LINKS = tuple(links())
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With the backends' packages only what goes over links that need some: all else is `make test`'s."""
    if not os.environ.get("LAYERFLOW_TEST_BACKENDS"):
        return
    packaged = {name for name, plugin in links().items() if plugin.package}
    others = [item for item in items if item.path.is_relative_to(HERE) and _link_of(item) not in packaged]
    config.hook.pytest_deselected(items=others)
    left = set(items) - set(others)
    items[:] = [item for item in items if item in left]


def _link_of(item: pytest.Item) -> str:
    return str(item.callspec.params.get("link", "")) if hasattr(item, "callspec") else ""


@functools.cache
def missing(link: str) -> str:
    """Why a link's library cannot be loaded; "" = it can, or there is none."""
    module = links()[link].probe
    if not module:
        return ""
    probe = [sys.executable, "-c", f"import {module}"]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"link {link}: {tried.stderr.strip().splitlines()[-1]}" if tried.returncode else ""


class Pair:
    """An owner, and a reader that is attached to it (through `address`, if that is not the owner's own)."""

    def __init__(self, owner: dict[str, object], reader: dict[str, object], link: str = "tcp") -> None:
        chosen: dict[str, object] = {"peers.link": link, "peers.trusted_network": "true"} if link != "tcp" else {}
        owner, reader = chosen | owner, chosen | reader
        # Nobody of these counts as gone, and no answer as late, for a machine that is busy for seconds.
        common = {"pool.size": "16MiB", "pool.warm": "false", "server.liveness_ms": 10_000}
        self.owner = ServerProcess(common | {"peers.serve": "true"} | owner)
        attach = json.dumps([{"name": "owner", "address": self.owner.endpoint}])
        self.reader = ServerProcess(
            common | {"peers.attach": attach, "peers.lookup_timeout_ms": 4500, "pool.lookup_timeout_ms": 4500} | reader
        )
        self._controls = {server: Control(server.endpoint, "observer") for server in (self.owner, self.reader)}

    def status(self, server: ServerProcess) -> dict[str, Any]:
        return self._controls[server].status(10.0)["peers"]

    @property
    def lends(self) -> dict[str, Any]:
        return self.status(self.owner)["lends"]

    @property
    def reads(self) -> dict[str, Any]:
        return self.status(self.reader)["reads"]

    def ready(self) -> bool:
        """Attached, with an exporter at the one end, of which the other has heard, and an importer there."""
        reads = self.reads
        peer = reads["peers"][0]
        attached = peer["state"] == "up" and not peer["reason"]  # the reason why nothing can be read from it
        return reads["importer"]["state"] == "up" and attached and bool(self.lends["endpoints"])

    def settled(self) -> bool:
        """Nothing is leased, pinned or on its way any more, at either side."""
        lends, reads = self.lends, self.reads
        lent = lends["leases"] or lends["lent_bytes"] or lends["exporter_figures"].get("lent_leases")
        return not (lent or reads["leases"] or reads["fetching_jobs"])

    @contextlib.contextmanager
    def workers(self, spec: ModelSpec | None = None) -> Iterator[tuple[KnownWorker, KnownWorker]]:
        """An engine worker at the owner, and one of the same model at the reader."""
        with (
            KnownWorker(self.owner.endpoint, spec, engine="p") as p,
            KnownWorker(self.reader.endpoint, spec, engine="d") as d,
        ):
            yield p, d

    def pid(self, role: str) -> int:
        """Of ``owner``, ``reader``, ``exporter`` or ``importer``."""
        if role in ("owner", "reader"):
            return int(getattr(self, role).process.pid)
        return int((self.lends if role == "exporter" else self.reads)[role]["pid"])

    def close(self) -> None:
        for control in self._controls.values():
            control.close()
        self.reader.close()
        self.owner.close()


@pytest.fixture(autouse=True)
def _forked(forked_servers: None) -> None: ...


@pytest.fixture
def link() -> str:
    """What bytes come over; a test is parametrised with ``LINKS`` where that matters."""
    return "tcp"


@pytest.fixture
def pair(link: str) -> Iterator[Callable[..., Pair]]:
    """``pair(owner={...}, reader={...})``: extra settings of the two servers."""
    if missing(link):
        pytest.skip(missing(link))
    pairs: list[Pair] = []

    def start(owner: dict[str, object] | None = None, reader: dict[str, object] | None = None) -> Pair:
        pairs.append(Pair(owner or {}, reader or {}, link))
        assert eventually(pairs[-1].ready), (pairs[-1].lends, pairs[-1].reads)
        return pairs[-1]

    yield start
    for each in pairs:
        each.close()
