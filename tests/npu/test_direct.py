"""Bytes past the arena: real memcache_hybrid, MetaService and torch_npu tensors; the CANN below them is emulated."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if not os.environ.get("LAYERFLOW_TEST_NPU"):
    pytest.skip("npu tests run by tests/npu/run.sh only", allow_module_level=True)
if importlib.util.find_spec("memcache_hybrid") is None:
    pytest.skip("memcache_hybrid is not installed here", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "backends"))

from direct_engine import LAYERS, ROW, Remote
from e2e.known import eventually
from e2e.stopping import go_on, stop
from meta_service import MetaService

from layerflow import EmbeddedServer, Settings
from layerflow.agent.direct.client import EXIT_STUCK
from layerflow.hosts.environment import environment

CANN = {"cann_emulator": os.environ["ASCEND_HOME_PATH"]}
COUNT = 100  #: tokens of a prompt: 6 chunks and a tail
TIER_S = 30.0


class House:
    """A pool, a server with it behind its arena, and the engines of a test."""

    def __init__(self, protocol: str, folder: Path) -> None:
        self.protocol = protocol
        self.meta = MetaService()
        options = self.meta.options(**CANN, protocol=protocol, dram_size=64 << 20, max_dram_size=64 << 20, direct=True)
        timeout_ms = options.pop("timeout_ms")
        pool = {"size": "4MiB", "backend": "memcache", "memcache": options, "host_timeout_ms": timeout_ms}
        pool["lookup_timeout_ms"] = 10_000
        settings = Settings(pool=pool, transfer={"step_timeout_ms": 3000})
        self.server = EmbeddedServer(settings, f"ipc://{folder}/control")
        self._engines: list[Remote] = []

    def engine(self, device: str = "npu:0", **variables: str) -> Remote:
        """Another worker, attached; on an npu past the arena."""
        self._engines.append(Remote(self.server.endpoint, environment("memcache", CANN) | variables, device))
        assert self._engines[-1].direct() == (device != "cpu"), self._engines[-1].said()
        return self._engines[-1]

    def tier(self) -> dict[str, object]:
        """What the server says of its tier."""
        told = self.server.call(self.server.server.status)
        return told["tier"]  # type: ignore[index]

    def wait_up(self) -> None:
        assert eventually(lambda: self.tier()["up"], TIER_S, 0.05), self.tier()["reason"]

    def arena_objects(self) -> int:
        pool = self.server.server.pool
        return self.server.call(pool.statistics).objects  # type: ignore[attr-defined]

    def close(self) -> None:
        for engine in self._engines:
            engine.leave()
        self.server.close()
        self.meta.close()


@pytest.fixture(scope="module", params=["host_shm", "host_tcp"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(request.param, tmp_path_factory.mktemp("direct"))
    try:
        house.wait_up()
        yield house
    finally:
        house.close()


@pytest.fixture(scope="module")
def first(house: House) -> Remote:
    return house.engine()


@pytest.fixture(scope="module")
def second(house: House) -> Remote:
    return house.engine()


def test_what_one_process_saves_another_loads(house: House, first: Remote, second: Remote) -> None:
    assert first.save(1, COUNT) == (("request-1",), ())
    before = second.statistics()["loaded"]
    assert second.hit(1, COUNT) == COUNT - 1
    told = second.load(1, COUNT, first=3)
    assert told == {"hit": COUNT - 1, "failed": [], "ready": [True] * LAYERS}
    assert second.load(1, COUNT, first=46, step=-1)["ready"] == [True] * LAYERS, "into scattered blocks"
    assert second.wrong() == first.wrong() == []
    assert second.statistics()["loaded"] - before == 2 * COUNT * 2 * ROW * LAYERS
    assert house.arena_objects() == 0, "not a byte of it passed the arena"


def test_an_object_is_written_once(first: Remote, second: Remote) -> None:
    assert first.save(2, COUNT)[0]
    saved = second.statistics()["saved"]
    assert second.save(2, COUNT) == ((), ()), "it is there already: nothing to do, and nothing has failed"
    assert second.statistics()["saved"] == saved


def test_two_who_save_the_same_at_once_do_not_disturb_each_other(first: Remote, second: Remote) -> None:
    first.begin(3, COUNT, layers=3)
    second.begin(3, COUNT)
    assert second.end() == ((), ()), "the other one is at it"
    assert second.hit(3, COUNT) == 0, "nobody has it until it is whole"
    assert first.abort()
    assert second.hit(3, COUNT) == 0
    assert second.save(3, COUNT)[0], "what the other gave up can be written"
    assert first.load(3, COUNT, first=10)["ready"] == [True] * LAYERS
    assert first.wrong() == second.wrong() == []


def test_what_is_not_there_fails_with_its_blocks_and_nothing_is_written_to_them(first: Remote, second: Remote) -> None:
    told = second.load(4, COUNT, first=5, trust=96)
    assert told["ready"] == [False] * LAYERS
    assert told["failed"] == list(range(24))
    assert second.wrong() == []

    first.save(4, 48)  # three chunks of the same prompt
    told = second.load(4, COUNT, first=5, trust=96)
    assert told["failed"] == list(range(12, 24)), "the chunks that are not there, and no others"
    assert second.wrong() == []


def test_a_killed_engine_leaves_nothing_visible(house: House, first: Remote) -> None:
    victim = house.engine()
    victim.begin(5, COUNT, layers=LAYERS - 1)
    victim.kill()
    assert first.hit(5, COUNT) == 0
    assert first.load(5, COUNT, first=2, trust=96)["failed"] == list(range(24))
    assert first.wrong() == []
    assert first.save(5, COUNT) == ((), ()), "its room is the dead one's until its lease has run out"
    assert first.save(6, COUNT)[0], "and nobody else is held up"


def test_signals_stay_the_engines(first: Remote) -> None:
    assert first.interrupted() == "SIGTERM"


def test_a_pool_that_hangs_costs_the_deadline_and_no_more(house: House, first: Remote) -> None:
    assert first.save(7, COUNT)[0]
    house.meta.pause()
    try:
        told = first.load(7, COUNT, first=4, trust=96)
    finally:
        house.meta.resume()
    assert told["failed"] == list(range(24))
    assert first.wrong() == []
    house.wait_up()
    assert eventually(lambda: not first.load(7, COUNT, first=4, trust=96)["failed"], TIER_S, 0.1), first.said()
    assert first.wrong() == []


def test_workers_through_the_arena_share_the_pool_with_those_past_it(house: House, first: Remote) -> None:
    through = house.engine("cpu")
    assert first.save(9, COUNT)[0]
    assert through.load(9, COUNT, first=1)["ready"] == [True] * LAYERS
    assert through.save(10, COUNT)[0]
    assert eventually(lambda: first.hit(10, COUNT), TIER_S, 0.05), "it is written behind the step"
    assert first.load(10, COUNT, first=1)["ready"] == [True] * LAYERS
    assert first.wrong() == through.wrong() == []


def test_closing_takes_everything_back(house: House) -> None:
    engine = house.engine()
    assert engine.save(8, COUNT)[0]
    assert engine.leave() == 0


def test_a_load_that_does_not_come_back_ends_its_engine(house: House, first: Remote) -> None:
    """The process that gives the pool its memory is stopped while an engine is about to copy out of it."""
    if house.protocol != "host_tcp":
        pytest.skip("a stopped process's memory is read all the same")
    assert first.save(11, COUNT)[0]
    victim = house.engine(CANN_EMU_EVENT_DELAY_US="1500000")
    giver = house.tier()["host"]["pid"]  # type: ignore[index]
    assert victim.begin_load(11, COUNT, timeout_s=2.0), "it has leased, and waits for the engine's event"
    stop(giver)
    try:
        code = victim.wait(10)
    finally:
        go_on(giver)
    assert code == EXIT_STUCK, victim.said()
    assert "direct_copy_stuck" in victim.said()
