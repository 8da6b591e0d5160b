"""Resets and purges with saves and fetches under way, on a tier whose calls a test holds up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from e2e.known import KnownWorker, Run, eventually, step_of
from e2e.stopping import stopped
from hosts.fake_backend import NAME

from layerflow.agent import Control
from layerflow.agent.agent import REPLACED
from layerflow.errors import SpecError
from layerflow.keys import Chain
from layerflow.server import EmbeddedServer, terms
from layerflow.server.handlers import forget
from layerflow.server.tier import host, tier
from server.support import Embed, observe, worker_on

TESTS = Path(__file__).resolve().parents[1]
PATIENT = {
    "pool": {"size": "16MiB", "lookup_timeout_ms": 4000, "lease_ms": 60_000, "fetch_timeout_ms": 30_000},
    "transfer": {"step_timeout_ms": 30_000, "save_timeout_ms": 30_000},
}
TOKENS = 100


class Gate:
    """A call of the backend waits until it is let through."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDWR)

    def let(self, calls: int = 1000) -> None:
        os.write(self._file, bytes(calls))

    def close(self) -> None:
        os.close(self._file)


class World:
    """A server with a tier behind it."""

    gate: Gate

    def __init__(self, embed: Embed, **settings: Any) -> None:
        self.server: EmbeddedServer = embed(**(PATIENT | settings))
        self.control: Control = observe(self.server)
        assert eventually(lambda: self.tier["up"])

    @property
    def tier(self) -> dict[str, Any]:
        return self.control.status()["tier"]  # type: ignore[no-any-return]

    @property
    def pool(self) -> dict[str, Any]:
        return self.control.status()["pool"]  # type: ignore[no-any-return]

    @property
    def leases(self) -> list[int]:
        """By session, in the order of their coming: the observer, the engine's worker, its lookups, ..."""
        return [session["leases"] for session in self.control.status()["sessions"]]

    def worker(self, engine: str = "e2e") -> KnownWorker:
        return worker_on(self.server, engine=engine, lookup_timeout_s=5.0)

    def reset(self, engine: str) -> dict[str, Any]:
        """As the engine's scheduler says it."""
        scheduler = Control(self.server.endpoint, engine, context=self.server.context)
        try:
            return scheduler.reset()
        finally:
            scheduler.close()

    def settled(self) -> bool:
        return not (self.tier["writing_jobs"] or self.tier["fetching_jobs"])


@pytest.fixture
def behind(embed: Embed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))

    def start(method: str) -> World:
        path = tmp_path / method
        gate = Gate(path)
        monkeypatch.setattr(terms, "tier_of", lambda _: (NAME, {"gates": {method: str(path)}, "timeout_ms": 30_000}))
        world = World(embed)
        world.gate = gate
        worlds.append(world)
        return worlds[-1]

    yield start
    for world in worlds:
        world.gate.let()
        world.control.close()
        world.server.close()
        world.gate.close()


def fetching(world: World, worker: KnownWorker) -> Run:
    """A prompt that is in the tier only, looked up and on its way."""
    chain = worker.prompt(TOKENS)
    worker.serve(chain)
    assert eventually(lambda: world.tier["written_objects"] and world.settled())
    world.control.purge()
    run = worker.admit(chain)
    assert run.hit.tokens > 0
    assert world.tier["fetching_jobs"] == 1
    return run


def test_after_a_reset_the_same_prompt_is_computed_whatever_the_tier_holds(behind):
    world = behind("nothing")
    with world.worker() as worker, world.worker("other") as other:
        chain = worker.prompt(TOKENS)
        worker.serve(chain)
        assert eventually(lambda: world.tier["written_objects"] and world.settled())
        worker.agent.reset()
        again = worker.agent.chain(chain.tokens)
        assert worker.serve(again).hit.tokens == 0
        assert worker.serve(again).hit.tokens == TOKENS - 1, "what is computed now is found"
        assert other.serve(other.agent.chain(chain.tokens)).hit.tokens == TOKENS - 1, "another engine keeps its own"


def test_chains_of_before_neither_hit_nor_load_nor_save(behind):
    world = behind("nothing")
    with world.worker() as worker:
        run = worker.admit(worker.prompt(TOKENS))
        stored = worker.serve(run.chain).chain
        hit = worker.admit(stored)
        assert hit.hit.tokens
        worker.agent.reset()
        assert worker.agent.lookup("late", stored).tokens == 0
        with pytest.raises(SpecError, match="before the last reset"):
            worker.agent.open_step([hit.request()])
        before = world.pool["commits"]
        worker.serve(stored, look=False)
        assert world.pool["commits"] == before


def test_a_load_from_the_tier_under_way_fails(behind):
    world = behind("fetch")
    with world.worker() as worker:
        run = fetching(world, worker)
        step = step_of(worker.agent.open_step([run.request()]))
        worker.agent.reset()
        outcome = step.wait_all()
        assert not outcome.ready
        assert {failed.reason for failed in outcome.failed} == {REPLACED}
        step.close(False)
        world.gate.let()
        assert eventually(lambda: world.settled() and not world.pool["pinned"])
        assert worker.serve(worker.agent.chain(run.chain.tokens)).hit.tokens == 0


def test_the_server_alone_revokes_what_the_engine_has_under_way(behind):
    """The scheduler's message is enough, wherever the workers are."""
    world = behind("fetch")
    with world.worker() as worker:
        load = fetching(world, worker)
        save = worker.admit(worker.prompt(TOKENS))
        loading = step_of(worker.agent.open_step([load.request(save=False)]))
        saving = step_of(worker.agent.open_step([save.request()]))
        for layer in range(2):
            worker.compute(save, layer, 0, TOKENS)
            saving.layer_done(layer)
        before = world.pool["commits"]
        assert world.reset("e2e")["steps"] == 2
        assert {failed.reason for failed in loading.wait_all().failed} == {REPLACED}
        loading.close()
        for layer in range(2, worker.spec.num_layers):
            worker.compute(save, layer, 0, TOKENS)
            saving.layer_done(layer)
        saving.close()
        assert worker.agent.wait_idle(save.name, 10)
        world.gate.let()
        assert eventually(lambda: world.settled() and not world.pool["half_written"] and not world.pool["pinned"])
        assert world.pool["commits"] == before, "nothing of the save was published, and nothing of the fetch"


def test_leases_are_dropped_and_what_they_held_is_called_back(behind):
    world = behind("fetch")
    with world.worker() as worker:
        fetching(world, worker)
        resident = worker.serve(worker.prompt(TOKENS)).chain
        assert worker.agent.lookup("resident", resident).tokens
        assert world.pool["pinned"] and sum(world.leases) >= 2
        assert world.reset("e2e")["leases"] == 2
        assert not any(world.leases)
        # What is still being written to the tier is pinned for that; the leases would last for a minute.
        assert eventually(lambda: not world.pool["pinned"])
        world.gate.let(1)
        assert eventually(world.settled)
        assert not world.tier["fetched_objects"], "the fetch was called back"


def test_a_lookup_under_way_brings_nothing(behind):
    world = behind("lookup")
    with world.worker() as worker:
        chain = worker.prompt(TOKENS)
        world.gate.let(1)
        worker.serve(chain)
        assert eventually(lambda: world.tier["written_objects"] and world.settled())
        world.control.purge()
        asked = world.tier["lookups"]
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(worker.agent.lookup("waits", chain).tokens))
        thread.start()
        assert eventually(lambda: world.tier["lookups"] > asked)
        world.reset("e2e")
        world.gate.let()
        thread.join()
        assert found == [0]
        assert not world.tier["fetching_jobs"]
        assert not world.tier["fetched_objects"]


def test_another_engines_leases_and_steps_are_left_alone(behind):
    world = behind("fetch")
    with world.worker() as worker, world.worker("other") as other:
        run = fetching(world, other)
        step = step_of(other.agent.open_step([run.request()]))
        worker.agent.reset()
        world.gate.let()
        assert step.wait_all().ready
        step.close(False)


def test_a_purge_publishes_nothing_of_what_was_on_its_way(behind):
    world = behind("fetch")
    with world.worker() as worker:
        load = fetching(world, worker)
        save = worker.admit(worker.prompt(TOKENS))
        step = step_of(worker.agent.open_step([load.request(save=False), save.request()]))
        worker.compute(save, 0, 0, TOKENS)
        step.layer_done(0)
        told = world.control.empty()
        assert told["revoked"] > 0
        assert not step.wait_all().ready
        for layer in range(1, worker.spec.num_layers):
            worker.compute(save, layer, 0, TOKENS)
            step.layer_done(layer)
        step.close()
        world.gate.let()
        assert eventually(lambda: world.settled() and not world.pool["half_written"] and not world.pool["pinned"])
        assert world.pool["objects"] == 0
        assert worker.serve(load.chain).hit.tokens > 0, "the tier keeps what it had"


def on_disk_and_in_both(world: World, worker: KnownWorker) -> tuple[Chain, Chain]:
    """Two prompts that are stored; the first has left the arena."""
    gone, here = worker.prompt(TOKENS), worker.prompt(TOKENS)
    worker.serve(gone)
    assert eventually(lambda: world.tier["written_objects"] and world.settled())
    world.control.purge()
    written = world.tier["written_objects"]
    worker.serve(here)
    assert eventually(lambda: world.tier["written_objects"] > written and world.settled())
    return gone, here


def test_while_the_tier_is_purged_it_offers_nothing(embed, tmp_path):
    world = World(embed, pool=PATIENT["pool"] | {"disk": {"path": str(tmp_path / "tier")}})
    told: list[dict[str, Any]] = []
    with world.worker() as worker, closing(world.control), closing(observe(world.server)) as other:
        gone, here = on_disk_and_in_both(world, worker)
        stored = world.tier["indexed_objects"]
        thread = threading.Thread(target=lambda: told.append(other.empty(tier=True)))
        with stopped(world.tier["host"]["pid"]):
            thread.start()
            assert eventually(lambda: not world.pool["objects"])
            assert worker.agent.lookup("meanwhile", gone).tokens == 0
            assert world.tier["fetching_jobs"] == 0
            saved = worker.serve(worker.prompt(TOKENS)).chain
        thread.join()
        assert not told[0]["tier"]["reason"] and told[0]["tier"]["purged"] >= stored
        assert eventually(world.settled)
        assert [worker.agent.lookup("then", chain).tokens for chain in (gone, here)] == [0, 0]
        assert worker.serve(saved).hit.tokens > 0, "what is stored meanwhile stays"


def test_a_tier_that_was_not_purged_in_time_offers_what_it_has(embed, tmp_path, monkeypatch):
    world = World(embed, pool=PATIENT["pool"] | {"disk": {"path": str(tmp_path / "tier")}})
    monkeypatch.setattr(forget, "CLEAR_S", tier.ANSWER_S + 0.1)
    with world.worker() as worker, closing(world.control):
        gone, _ = on_disk_and_in_both(world, worker)
        with stopped(world.tier["host"]["pid"]):
            told = world.control.empty(tier=True)["tier"]
            assert told["purged"] == 0 and "offers what it still has" in told["reason"]
            assert worker.agent.lookup("again", gone).tokens > 0


def test_a_purge_of_more_keys_than_a_host_may_leave_unread_empties_the_tier(embed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr(terms, "tier_of", lambda _: (NAME, {"timeout_ms": 30_000}))
    monkeypatch.setattr(host, "MAX_UNREAD_BYTES", 64 << 10)
    monkeypatch.setattr(tier, "CLEARED_PER_SLICE", 1024)
    monkeypatch.setattr(forget, "CLEAR_S", 60.0)
    world = World(embed)
    with world.worker() as worker, closing(world.control):
        chain = worker.serve(worker.prompt(TOKENS)).chain
        assert eventually(lambda: world.tier["written_objects"] and world.settled())
        pool = world.server.server.pool
        # Others that have left the backend meanwhile stand between those that are there.
        first, *rest = world.server.call(pool.keys)
        keys = [first, *(b"gone" + at.to_bytes(20) for at in range(100 * 1024)), *rest]
        monkeypatch.setattr(pool, "keys", lambda: keys)
        told = world.control.empty(tier=True)["tier"]
        assert f"asked to remove the {len(keys)} objects" in told["reason"], "this backend cannot tell what it holds"
        assert world.tier["restarts"] == 0 and world.tier["up"]
        assert worker.serve(chain).hit.tokens == 0


def test_a_purge_with_the_tier_waits_for_writes_and_removes_them(behind):
    world = behind("commit")
    with world.worker() as worker:
        chain = worker.prompt(TOKENS)
        worker.serve(chain)
        assert eventually(lambda: world.pool["objects"] and world.tier["writing_jobs"])
        told: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: told.append(world.control.empty(tier=True)))
        thread.start()
        other = observe(world.server)
        assert eventually(lambda: not other.status()["pool"]["objects"])
        world.gate.let()
        thread.join()
        other.close()
        assert told[0]["revoked"] > 0
        assert told[0]["tier"]["backend"] == NAME
        assert "cannot list others" in told[0]["tier"]["reason"], "this backend cannot tell what it holds"
        assert worker.serve(chain).hit.tokens == 0
