"""What tests of several rooms share: one torch thread, embedded servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec

import pytest
import torch
from e2e.forked import Forker

from layerflow.config.settings import Settings
from layerflow.server import EmbeddedServer
from layerflow_cli.bench.harness import ServerProcess

# Of the processes that tests start: they are many, several run at a time, and none multiplies large matrices.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long one example takes says more about a busy machine than about what is tested.
if find_spec("hypothesis"):
    import hypothesis

    slow = hypothesis.HealthCheck.too_slow
    hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=[slow])
    hypothesis.settings.load_profile("any machine")


def _is_installed(engine: str) -> bool:
    """The tests' folder itself is found as a package of that name, one without a file, where the real one is not."""
    found = find_spec(engine)
    return found is not None and found.origin is not None


collect_ignore = [] if _is_installed("vllm") else ["vllm", "pd"]
if not _is_installed("vllm_ascend"):
    collect_ignore.append("ascend")
if not _is_installed("sglang"):
    collect_ignore.append("sglang")


CAMPAIGN_S = 3600
"""A campaign may take so long where it does not say otherwise."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is too long for every day has the time that it needs."""
    for item in items:
        if item.get_closest_marker("campaign") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(CAMPAIGN_S))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which is not in every environment of tests
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: three for two cores, since tests wait for a third of their time."""
    return len(os.sched_getaffinity(0)) * 3 // 2


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    with closing(Forker()) as forker:
        yield forker


@pytest.fixture
def forked_servers(forker: Forker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each :class:`ServerProcess` of the test is forked."""
    monkeypatch.setattr(ServerProcess, "_popen", lambda _, command, environment: forker.popen(command, environment))


@pytest.fixture
def embed() -> Iterator[Callable[..., EmbeddedServer]]:
    """Embedded servers; all are stopped at the end. ``pool__size=...`` is ``pool.size``, ``pool={...}`` several.

    They wait long for their clients and for what is behind the arena, as threads of a busy machine may stand still.
    """
    servers: list[EmbeddedServer] = []

    def start(**settings: object) -> EmbeddedServer:
        sections: dict[str, dict[str, object]] = {
            "pool": {"size": "16MiB", "lookup_timeout_ms": 10_000},
            "server": {"drain_timeout_s": 0.2, "liveness_ms": 60_000},
            "transfer": {"step_timeout_ms": 60_000, "save_timeout_ms": 60_000},
        }
        for name, value in settings.items():
            section, _, key = name.partition("__")
            sections.setdefault(section, {}).update({key: value} if key else value)  # type: ignore[call-overload]
        servers.append(EmbeddedServer(Settings(**sections)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
