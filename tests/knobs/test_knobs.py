"""Settings do what they say together: every pair of values of every two settings, ways, shapes and sources meets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from agent.direct_pool import servers_offer, workers_join
from agent.fake_memcache import G2L, L2G, FakePool
from allpairspy import AllPairs
from e2e.known import KnownWorker, eventually
from knobs.passage import ATTEMPTS, BLOCK, Passage, spec_of
from knobs.table import AXES, KNOBS, LINK, NOT_ABOUT_TRANSFERS, PLACES, Combination, fits

from layerflow.config.settings import Settings, reference
from layerflow.server import EmbeddedServer

PATIENT_MS = 60_000
DEADLINES = ("transfer.step_timeout_ms", "transfer.save_timeout_ms", "pool.fetch_timeout_ms", "pool.host_timeout_ms")
"""Never shorter here: what a busy machine takes, for a page a message say, is no finding."""


def pairs() -> list[Combination]:
    return [dict(zip(AXES, row, strict=True)) for row in AllPairs(list(AXES.values()), filter_func=fits)]


def named(combination: Combination) -> str:
    """What of a combination is not the default."""
    settings = [f"{key.partition('.')[2]}={value}" for key, value in combination.items() if key in KNOBS]
    return "-".join([combination[name] for name in ("way", "shape", "source")]) + ":" + ",".join(settings)


@contextmanager
def passage(combination: Combination, folder: Path) -> Iterator[tuple[Passage, EmbeddedServer]]:
    """A server under these settings, with a disk or a fake memcache behind its arena where loads come from there, and a
    worker.
    """
    chosen = {key: value for key, value in combination.items() if key in KNOBS}
    chosen |= {"pool.size": "8MiB", "log.level": "error", "server.liveness_ms": PATIENT_MS}
    chosen |= {key: max(int(combination.get(key, 0)), PATIENT_MS) for key in DEADLINES}
    if combination["source"] == "tier":
        chosen["pool.disk.path"] = str(folder)
    direct = combination["source"] == "direct"
    with past_the_arena(folder) if direct else nullcontext(), EmbeddedServer(Settings.load(None, chosen)) as server:
        tier = server.server.tier
        assert tier is None or eventually(lambda: tier.up)
        with KnownWorker(server.endpoint, spec_of(combination["shape"]), context=server.context) as worker:
            assert eventually(lambda: worker.agent.attached)
            assert worker.agent.direct == direct
            yield Passage(server, worker, combination["source"]), server


@contextmanager
def past_the_arena(folder: Path) -> Iterator[None]:
    """While it lasts, servers and workers have a pool that both reach. Bytes must pass, and leases go back."""
    with pytest.MonkeyPatch.context() as patch, closing(FakePool(folder)) as pool:
        workers_join(pool, patch)
        servers_offer(pool, patch)
        yield
        assert eventually(lambda: not pool.leases()), "leases are left"
        assert pool.copied[G2L] and pool.copied[L2G]


def messages_by_default(way: str, shape: str, source: str, link: tuple[float, ...], folder: Path) -> int:
    """What a load needs under default settings over the same link: the most of three."""
    defaults = {"way": way, "shape": shape, "source": source, **dict(zip(LINK, link, strict=True))}
    with passage(defaults, folder) as (run, _):
        counts = []
        for _ in range(3):
            run.load(run.save(), way)
            counts.append(run.messages)
    return max(counts)


def test_every_setting_that_touches_transfers_is_in_the_table():
    touching = {row.key for row in reference() if row.key.startswith("transfer.")}
    touching |= {row.key for row in reference() if row.key.startswith("pool.") and row.key.count(".") == 1}
    assert touching == KNOBS.keys() | NOT_ABOUT_TRANSFERS.keys()


def test_the_table_has_every_default():
    defaults = {row.key: row.default.strip('"') for row in reference()}
    for key, values in KNOBS.items():
        shown = [str(value).lower() if isinstance(value, bool) else f"{value}" for value in values]
        assert defaults[key] in shown or float(defaults[key]) in values, key


def check(run: Passage, server: EmbeddedServer) -> None:
    """Nothing has failed or run to its deadline, and every cap held where bytes moved."""
    figures: Any = server.call(server.server.metrics.summary)
    assert figures.get("failed_loads_total", {}) == {}
    assert server.call(server.server.driver.flow.statistics).expired_jobs == 0  # type: ignore[attr-defined]
    settings = server.server.settings.transfer
    assert run.calls.of(0), "nothing was loaded"
    assert run.calls.most_blocks <= settings.max_transfer_blocks
    assert run.calls.most_bytes <= settings.max_transfer_bytes
    assert run.calls.most_granted <= settings.max_inflight_bytes
    assert bool(run.host_calls.count) == run.by_host
    assert run.host_calls.most_bytes <= settings.max_transfer_bytes
    assert run.host_calls.most_at_once <= settings.max_inflight_bytes


@pytest.mark.parametrize("combination", pairs(), ids=named)
def test_pairwise(combination: Combination, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    way, shape, source = (combination[name] for name in ("way", "shape", "source"))
    link = tuple(combination[key] for key in LINK)
    usual = messages_by_default(way, shape, source, link, tmp_path_factory.mktemp("default"))
    with passage(combination, tmp_path) as (run, server):
        for _ in range(ATTEMPTS):
            saved = run.save()
            loaded = run.load(saved, way)
            expected = len(saved.chain) - 1
            if combination["transfer.discard_partial_chunks"]:
                expected = len(saved.chain) // 16 * 16
            assert loaded.hit.tokens >= min(expected, expected // BLOCK * BLOCK) or way == "inside_block"
            check(run, server)
            # What a call of the host brings is granted, and reported, when it is there: small calls take more messages.
            calls = run.host_calls.count
            if run.messages <= 2 * (usual + calls):
                break
        assert run.messages <= 2 * (usual + calls), f"{run.kinds}, by default {usual} messages, and {calls} calls"


@pytest.mark.parametrize(("way", "shape", "source"), PLACES)
def test_the_least_that_is_allowed(way: str, shape: str, source: str, tmp_path: Path) -> None:
    """A layer ahead, a block a call, a page a call, two pages on their way: slow, and right."""
    least = {
        "transfer.prefetch_layers": 1,
        "transfer.max_transfer_blocks": 1,
        "transfer.max_transfer_bytes": "4KiB",
        "transfer.max_inflight_bytes": "8KiB",
    }
    with passage({"way": way, "shape": shape, "source": source, **least}, tmp_path) as (run, server):
        loaded = run.load(run.save(), way)
        assert loaded.hit.tokens > 0
        check(run, server)


@pytest.mark.parametrize(("way", "shape", "source"), PLACES)
def test_by_default(way: str, shape: str, source: str, tmp_path: Path) -> None:
    """What the others are compared with is right itself."""
    with passage({"way": way, "shape": shape, "source": source}, tmp_path) as (run, _):
        loaded = run.load(run.save(), way)
        assert loaded.hit.tokens > 0
