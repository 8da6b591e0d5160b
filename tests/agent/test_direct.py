"""Bytes past the arena: a pool of memcache's calls in this process, and cpu memory that stands for a device's."""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
from e2e.known import KnownWorker, Run, eventually, small_spec, step_of

from agent.direct_pool import servers_offer, workers_join
from agent.fake_memcache import G2L, L2G, FakePool, FakeStore
from layerflow.agent.direct import client as direct_client
from layerflow.agent.direct import lane as direct
from layerflow.agent.direct.client import EXIT_STUCK, Watchdog, end_process
from layerflow.agent.direct.store import DirectCopier
from layerflow.agent.step.step import Step
from layerflow.config.settings import Settings
from layerflow.errors import DeadlineExceeded, ProtocolError, SpecError
from layerflow.hosts.backend import Unreachable, Unusable, pool_name
from layerflow.hosts.memcache.backend import ROOM_LEASE_S
from layerflow.hosts.memcache.metaservice import MetaService
from layerflow.hosts.memcache.setup import MemcacheConnection, make_store
from layerflow.keys import object_key
from layerflow.server import EmbeddedServer
from layerflow.wire import codec
from layerflow.wire.messages import LACKING, Message, OpenStep

TOKENS = 100
BLOCKS = 25
WHOLE = TOKENS * 2 * 32 * 4  #: bytes of a prompt in engine memory
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that a busy machine holds up is not stuck."""
    monkeypatch.setattr(direct, "STUCK_S", PATIENCE_S)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FakePool]:
    pool = FakePool(tmp_path)
    yield pool
    pool.close()


@pytest.fixture
def joined(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> list[FakeStore]:
    """Clients join the fake pool, and memory on the cpu suits them. Those that were made."""
    return workers_join(pool, monkeypatch)


@pytest.fixture
def serve(
    pool: FakePool, joined: list[FakeStore], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., EmbeddedServer]]:
    """Servers with the fake pool behind their arena."""
    servers_offer(pool, monkeypatch)
    running: list[EmbeddedServer] = []

    def start(**transfer: object) -> EmbeddedServer:
        settings = Settings(
            pool={"size": "2MiB", "lookup_timeout_ms": 10_000},
            transfer={"step_timeout_ms": 60_000} | transfer,
            server={"drain_timeout_s": 0.2, "liveness_ms": 20_000},
        )
        running.append(EmbeddedServer(settings))
        tier = running[-1].server.tier
        assert tier is not None
        assert eventually(lambda: tier.up)
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.fixture
def house(serve: Callable[..., EmbeddedServer]) -> EmbeddedServer:
    return serve()


@pytest.fixture
def worker(house: EmbeddedServer) -> Iterator[KnownWorker]:
    with KnownWorker(house.endpoint, context=house.context) as worker:
        assert eventually(lambda: worker.agent.direct, PATIENCE_S)
        yield worker


def names_of(worker: KnownWorker, run: Run) -> list[str]:
    """The names in the pool of a prompt's objects: of its chunks, and of its tail."""
    chain, chunk = run.chain, worker.spec.chunk_tokens
    digests = [*chain.digests]
    if len(chain) % chunk:
        digests.append(chain.partial(len(digests), len(chain) % chunk))
    return [pool_name(object_key(digest, 0, worker.spec.shard)) for digest in digests]


def forward(worker: KnownWorker, *runs: Run) -> None:
    """All layers of one step over these; saves may go on."""
    with worker.agent.open_step([run.request() for run in runs]) as step:
        worker.forward(step, runs)


@contextmanager
def stuck_save(worker: KnownWorker, pool: FakePool) -> Iterator[Run]:
    """A step is over, and the copies of its save return at the end of the with-block only."""
    run = worker.admit(worker.prompt(TOKENS))
    gate = pool.gate(L2G)
    try:
        forward(worker, run)
        yield run
    finally:
        gate.set()
    assert worker.agent.wait_idle(run.name, PATIENCE_S)


def objects_in_arena(house: EmbeddedServer) -> int:
    return house.call(house.server.pool.statistics).objects  # type: ignore[attr-defined]


class TestAWorkerPastTheArena:
    def test_saves_and_loads_and_not_a_byte_passes_the_arena(
        self, house: EmbeddedServer, worker: KnownWorker, pool: FakePool
    ) -> None:
        first = worker.serve(worker.prompt(TOKENS))
        assert worker.agent.poll().saved == (first.name,), "idle means published"
        assert pool.complete() == set(names_of(worker, first))
        second = worker.serve(first.chain)
        assert second.hit.tokens == TOKENS - 1
        assert pool.copied[L2G] == pool.copied[G2L] == WHOLE
        assert objects_in_arena(house) == 0
        assert eventually(lambda: pool.leases() == 0), "leases end with the loads"

    def test_loads_part_of_a_prompt_and_saves_the_rest(self, worker: KnownWorker) -> None:
        first = worker.serve(worker.prompt(64))
        longer = worker.serve(worker.prompt(TOKENS, like=first.chain, shared=64))
        assert longer.hit.tokens == 64
        assert worker.serve(longer.chain).hit.tokens == TOKENS - 1

    def test_several_groups(self, house: EmbeddedServer) -> None:
        with KnownWorker(house.endpoint, small_spec(window=24), context=house.context) as worker:
            assert worker.serve(worker.serve(worker.prompt(TOKENS)).chain).hit.tokens == TOKENS - 1

    def test_calls_to_the_service_do_not_grow_with_layers(self, house: EmbeddedServer, pool: FakePool) -> None:
        asked = []
        for layers in (2, 12):
            with KnownWorker(house.endpoint, small_spec(layers, content=str(layers)), context=house.context) as worker:
                before = pool.calls.total() - pool.calls["batch_copy"]
                worker.serve(worker.serve(worker.prompt(TOKENS)).chain)
            # Closed, the worker has given back what it had.
            asked.append(pool.calls.total() - pool.calls["batch_copy"] - before)
        assert asked[0] == asked[1]

    def test_is_closed_with_its_agent(self, house: EmbeddedServer, joined: list[FakeStore]) -> None:
        KnownWorker(house.endpoint, context=house.context).agent.close()
        assert [store.closed for store in joined] == [True]

    def test_goes_on_with_another_server(self, serve: Callable[..., EmbeddedServer], joined: list[FakeStore]) -> None:
        first = serve()
        with KnownWorker(first.endpoint, context=first.context) as worker:
            run = worker.serve(worker.prompt(TOKENS))
        second = serve()
        with KnownWorker(second.endpoint, context=second.context) as worker:
            assert worker.serve(worker.agent.chain(run.tokens)).hit.tokens == TOKENS - 1, "the pool outlives a server"


class TestThroughTheArenaAsEver:
    def test_where_the_device_does_not_suit(self, house: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(direct_client, "suits", lambda device: False)
        with KnownWorker(house.endpoint, context=house.context) as worker:
            assert not worker.agent.direct
            assert worker.serve(worker.serve(worker.prompt(TOKENS)).chain).hit.tokens == TOKENS - 1
        assert objects_in_arena(house) > 0

    def test_where_no_client_can_be_made(self, house: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(options: object, meta: object) -> MemcacheConnection:
            raise Unusable("memcache needs CANN")

        monkeypatch.setattr(direct_client, "connect", refuse)
        with structlog.testing.capture_logs() as logs, KnownWorker(house.endpoint, context=house.context) as worker:
            assert not worker.agent.direct
            worker.serve(worker.prompt(TOKENS))
        [told] = [log for log in logs if log["event"] == "direct_unavailable"]
        assert "memcache needs CANN" in told["error"]

    @pytest.mark.parametrize("refusals", [direct_client.JOINS - 1, direct_client.JOINS])
    def test_a_pool_that_does_not_let_a_client_in_is_asked_again(
        self, pool: FakePool, monkeypatch: pytest.MonkeyPatch, refusals: int
    ) -> None:
        asked = 0

        def connect(options: object, meta: object) -> MemcacheConnection:
            nonlocal asked
            asked += 1
            if asked <= refusals:
                raise Unreachable("memcache cannot join the pool")
            return MemcacheConnection(FakeStore(pool), 1, "fake")

        monkeypatch.setattr(direct_client, "connect", connect)
        if refusals < direct_client.JOINS:
            direct_client.give_back(direct_client.open_client(json.dumps(pool.urls), 0))
        else:
            with pytest.raises(Unreachable, match="cannot join"):
                direct_client.open_client(json.dumps(pool.urls), 0)
        assert asked == direct_client.JOINS

    @pytest.mark.parametrize("what", ["memory that the transport refuses", "a library that surprises"])
    def test_whatever_goes_wrong_and_the_next_worker_tries_again(
        self, house: EmbeddedServer, joined: list[FakeStore], monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        with monkeypatch.context() as patch:
            if what == "a library that surprises":
                patch.setattr(FakeStore, "register_buffer", lambda *_: 1 // 0)
            else:
                patch.setattr(FakeStore, "register_buffer", lambda *_: -1)
            with KnownWorker(house.endpoint, context=house.context) as worker:
                assert not worker.agent.direct
                worker.serve(worker.prompt(TOKENS))
        assert [store.closed for store in joined] == [True]
        with KnownWorker(house.endpoint, context=house.context) as worker:
            assert worker.agent.direct

    def test_the_second_worker_of_a_process(self, house: EmbeddedServer, worker: KnownWorker) -> None:
        with KnownWorker(house.endpoint, context=house.context, engine="other") as other:
            assert worker.agent.direct
            assert not other.agent.direct


class TestWhatIsNotThere:
    def test_a_lost_object_fails_with_its_blocks_and_nothing_computed_on_it_is_saved(
        self, worker: KnownWorker, pool: FakePool
    ) -> None:
        saved = worker.serve(worker.prompt(TOKENS))
        lost = names_of(worker, saved)[2]
        run = worker.admit(worker.prompt(160, like=saved.chain, shared=96))
        assert run.hit.tokens == 96
        pool.drop(lost)
        before = pool.complete()
        forward(worker, run)
        assert run.failed == {0: set(range(8, 12))}
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert all(not worker.wrong_bytes(run, layer, 0, 96, but=set(range(8, 12))) for layer in range(4))
        assert all(not worker.changed_bytes(run, layer, range(8, 12), 0xEE) for layer in range(4))
        assert pool.complete() == before
        assert worker.agent.poll().failed_saves == ((run.name, LACKING),)
        assert eventually(lambda: pool.leases() == 0)

    def test_a_broken_header_hides_the_object(self, worker: KnownWorker, pool: FakePool) -> None:
        saved = worker.serve(worker.prompt(TOKENS))
        name = names_of(worker, saved)[0]
        pool.wake(name, 0, b"LFOB" + bytes(60))
        run = worker.admit(saved.chain)
        forward(worker, run)
        assert run.failed == {0: set(range(4))}
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert name not in pool.objects, "or a retry would loop"

    def test_everything_lost_costs_no_deadline(self, worker: KnownWorker, pool: FakePool) -> None:
        saved = worker.serve(worker.prompt(TOKENS))
        run = worker.admit(saved.chain)
        for name in names_of(worker, saved):
            pool.drop(name)
        with worker.agent.open_step([run.request(save=False)], timeout_s=3600) as step:
            assert not step.wait_all()
        assert worker.agent.wait_idle(run.name, PATIENCE_S)

    def test_a_copy_that_fails_fails_the_load_and_the_object_is_not_offered_again(
        self, worker: KnownWorker, pool: FakePool
    ) -> None:
        saved = worker.serve(worker.prompt(TOKENS))
        pool.copy_codes[G2L] = -2
        run = worker.admit(saved.chain)
        forward(worker, run)
        assert run.failed == {0: set(range(BLOCKS))}
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert eventually(lambda: worker.agent.lookup("again", saved.chain).tokens == 0)

    @pytest.mark.parametrize("what", ["the service ends", "another object takes the place"])
    def test_bytes_that_may_be_anothers_are_never_ready(self, worker: KnownWorker, pool: FakePool, what: str) -> None:
        saved = worker.serve(worker.prompt(TOKENS))
        run = worker.admit(saved.chain)
        gate = pool.gate(G2L)
        with worker.agent.open_step([run.request(save=False)]) as step:
            assert pool.arrived[G2L].wait(PATIENCE_S)
            if what == "the service ends":
                pool.end_service()
            else:
                for name in names_of(worker, saved):
                    pool.wake(name, 16, bytes(40))
            gate.set()
            assert not step.wait_all()
        assert worker.agent.wait_idle(run.name, PATIENCE_S)


class TestWriting:
    def test_what_is_there_is_left_alone(self, worker: KnownWorker, pool: FakePool) -> None:
        run = worker.serve(worker.prompt(TOKENS))
        worker.agent.poll()
        moved = pool.copied[L2G]
        worker.serve(run.chain, look=False)
        assert pool.copied[L2G] == moved
        assert worker.agent.poll().failed_saves == ()

    def test_what_another_client_is_writing_is_left_alone(self, worker: KnownWorker, pool: FakePool) -> None:
        other = FakeStore(pool)
        run = worker.admit(worker.prompt(32))
        mine, others = names_of(worker, run)
        other.batch_alloc([others], [123_456])
        forward(worker, run)
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert pool.complete() == {mine}
        assert pool.bytes_of(others) == bytes(123_456)

    def test_the_same_prompt_twice_in_a_step_is_written_once(self, worker: KnownWorker, pool: FakePool) -> None:
        chain = worker.prompt(TOKENS)
        one, two = worker.admit(chain), worker.admit(chain)
        forward(worker, one, two)
        assert worker.agent.wait_idle(one.name, PATIENCE_S)
        assert pool.copied[L2G] == WHOLE
        assert worker.agent.poll().failed_saves == ()

    def test_a_pool_without_room_saves_nothing_and_holds_nobody_up(self, worker: KnownWorker, pool: FakePool) -> None:
        pool.room = 0
        run = worker.serve(worker.prompt(TOKENS), timeout_s=3600)
        assert pool.objects == {}
        assert worker.agent.poll().failed_saves == ((run.name, "no room in the store"),)
        assert not worker.agent.busy(run.name)

    def test_a_machine_too_busy_to_ask_for_room_says_so(
        self, worker: KnownWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(direct, "ROOM_S", -1.0)
        run = worker.serve(worker.prompt(TOKENS))
        assert worker.agent.poll().failed_saves == ((run.name, "no time was left for it"),)

    def test_a_copy_that_fails_is_never_published_and_its_room_goes_back(
        self, worker: KnownWorker, pool: FakePool
    ) -> None:
        pool.copy_codes[L2G] = -2
        run = worker.serve(worker.prompt(TOKENS))
        assert [request for request, _ in worker.agent.poll().failed_saves] == [run.name]
        assert eventually(lambda: pool.objects == {})

    def test_nothing_is_visible_before_the_last_layer(self, worker: KnownWorker, pool: FakePool) -> None:
        run = worker.admit(worker.prompt(TOKENS))
        with worker.agent.open_step([run.request()]) as step:
            for layer in range(3):
                worker.compute(run, layer, 0, TOKENS)
                step.layer_done(layer)
            assert eventually(lambda: pool.copied[L2G] == WHOLE * 3 // 4)
            assert pool.complete() == set()
            assert worker.agent.lookup("early", run.chain).tokens == 0
            worker.compute(run, 3, 0, TOKENS)
            step.layer_done(3)
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert pool.complete() == set(names_of(worker, run))

    def test_a_service_that_ends_halfway_has_nothing_published(self, worker: KnownWorker, pool: FakePool) -> None:
        run = worker.admit(worker.prompt(TOKENS))
        with worker.agent.open_step([run.request()]) as step:
            for layer in range(4):
                worker.compute(run, layer, 0, TOKENS)
                step.layer_done(layer)
                if layer == 1:
                    assert eventually(lambda: pool.copied[L2G] >= WHOLE // 4)
                    pool.end_service()
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert pool.complete() == set()
        assert [request for request, _ in worker.agent.poll().failed_saves] == [run.name]


class TestEnds:
    def test_a_lost_server_gives_everything_back(
        self, house: EmbeddedServer, worker: KnownWorker, pool: FakePool
    ) -> None:
        run = worker.admit(worker.prompt(TOKENS))
        with worker.agent.open_step([run.request()]) as step:
            worker.compute(run, 0, 0, TOKENS)
            step.layer_done(0)
            assert eventually(lambda: len(pool.objects) == 7)
            house.close()
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert eventually(lambda: pool.objects == {})

    def test_an_aborted_request_is_released_and_leaves_nothing(self, worker: KnownWorker, pool: FakePool) -> None:
        run = worker.admit(worker.prompt(TOKENS))
        with worker.agent.open_step([run.request()]) as step:
            worker.compute(run, 0, 0, TOKENS)
            step.layer_done(0)
            worker.agent.abort(run.name)
            step.close(False)
        assert eventually(lambda: run.name in worker.agent.poll().released)
        assert eventually(lambda: pool.objects == {})

    def test_abort_and_close_before_the_server_knows_of_the_step(self, worker: KnownWorker, pool: FakePool) -> None:
        saved = worker.serve(worker.prompt(TOKENS))
        gate = pool.gate("batch_add_lease")
        run = worker.admit(saved.chain)
        with worker.agent.open_step([run.request()], timeout_s=3600) as step:
            assert pool.arrived["batch_add_lease"].wait(PATIENCE_S)
            worker.agent.abort(run.name)
            step.close(False)
        assert worker.agent.busy(run.name)
        gate.set()
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert eventually(lambda: pool.leases() == 0)
        worker.serve(worker.prompt(TOKENS))

    def test_a_step_that_ends_while_it_is_announced_gives_everything_back(
        self, worker: KnownWorker, pool: FakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = worker.serve(worker.prompt(TOKENS))
        gate = pool.gate("batch_add_lease")
        lane = worker.agent._dispatcher.direct
        over = lane.over
        run = worker.admit(saved.chain)

        def slowly(step: Step) -> None:
            """Give the lane time to announce the step, if it may, behind the look at what the step has leased."""
            over(step)
            gate.set()
            eventually(lambda: step.announced, 0.5)

        monkeypatch.setattr(lane, "over", slowly)
        with worker.agent.open_step([run.request()], timeout_s=3600) as step:
            assert pool.arrived["batch_add_lease"].wait(PATIENCE_S)
            step_of(step).deadline = time.monotonic()
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert eventually(lambda: pool.calls["batch_remove_lease"] > 0, PATIENCE_S)
        assert eventually(lambda: pool.leases() == 0)

    def test_a_step_that_cannot_be_told_to_the_server_fails_at_once(
        self, worker: KnownWorker, pool: FakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = worker.serve(worker.prompt(TOKENS))
        worker.agent.poll()
        before = pool.complete()
        run = worker.admit(worker.prompt(160, like=saved.chain, shared=96))
        encode = codec.encode_request

        def refuse(message: Message) -> bytes:
            if isinstance(message, OpenStep):
                raise ProtocolError("too many parts: do less in one step")
            return encode(message)

        monkeypatch.setattr(codec, "encode_request", refuse)
        with worker.agent.open_step([run.request()], timeout_s=3600) as step:
            assert step.wait_loaded(PATIENCE_S)
            assert [failed.reason for failed in step.failed] == ["too many parts: do less in one step"]
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert worker.agent.poll().failed_saves == ((run.name, "too many parts: do less in one step"),)
        assert eventually(lambda: pool.leases() == 0)
        assert eventually(lambda: set(pool.objects) == before)

    def test_a_pool_that_hangs_costs_a_load_its_deadline_and_the_next_ones_nothing(
        self, worker: KnownWorker, pool: FakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = worker.serve(worker.prompt(TOKENS))
        gate = pool.gate("batch_add_lease")
        runs = [worker.admit(saved.chain) for _ in range(2)]
        with worker.agent.open_step([runs[0].request()], timeout_s=3600) as step:
            assert pool.arrived["batch_add_lease"].wait(PATIENCE_S)
            monkeypatch.setattr(direct, "STUCK_S", 0.0)  # not before: what the save left to do is no hanging pool
            step.deadline = time.monotonic()
            worker.forward(step, runs[:1])
        with worker.agent.open_step([runs[1].request()], timeout_s=3600) as step:
            worker.forward(step, runs[1:])
        for run in runs:
            assert run.failed == {0: set(range(BLOCKS))}
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
        gate.set()
        assert eventually(lambda: pool.leases() == 0)
        assert eventually(lambda: not worker.agent._dispatcher.direct.stuck)
        assert worker.serve(saved.chain).hit.tokens == TOKENS - 1


def test_a_load_too_late_to_be_begun_says_nothing_against_its_objects(
    worker: KnownWorker, house: EmbeddedServer, pool: FakePool
) -> None:
    saved = worker.serve(worker.prompt(TOKENS))
    gate = pool.gate(G2L)
    run = worker.admit(saved.chain)
    with worker.agent.open_step([run.request(save=False)], timeout_s=3600) as step:
        assert pool.arrived[G2L].wait(PATIENCE_S)
        step.deadline = time.monotonic()  # which has passed when the next batch is to begin, however long that takes
        gate.set()
        assert not step.wait_all()
    assert worker.agent.wait_idle(run.name, PATIENCE_S)
    tier = house.server.tier
    assert tier is not None
    assert house.call(tier.statistics).shunned_objects == 0  # type: ignore[attr-defined]
    assert worker.serve(saved.chain).hit.tokens == TOKENS - 1


@pytest.mark.parametrize(("fenced", "deadline"), [(False, 0.0), (True, math.inf)])
def test_a_copier_begins_no_load_that_its_step_does_not_wait_for(fenced: bool, deadline: float) -> None:
    step: Any = SimpleNamespace(number=3, leases=object(), fenced=fenced, deadline=deadline)
    batch: Any = SimpleNamespace(layer=2)
    nowhere: Any = None
    with pytest.raises(DeadlineExceeded, match="step 3: a load of layer 2 came too late"):
        DirectCopier(nowhere, nowhere, step, batch).load(nowhere)


def test_a_save_that_could_outlive_its_lease_is_not_begun(
    worker: KnownWorker, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog would take the copy, however healthy, for one that hangs when the lease ends under it."""
    monkeypatch.setattr("layerflow.agent.direct.store.GRACE_S", ROOM_LEASE_S)
    run = worker.serve(worker.prompt(TOKENS))
    [(name, reason)] = worker.agent.poll().failed_saves
    assert name == run.name and reason.startswith("cancelled: step") and "came too late to be begun" in reason
    assert pool.copied[L2G] == 0
    assert eventually(lambda: pool.objects == {})


class TestCopiesThatDoNotReturn:
    @pytest.fixture
    def ended(self, joined: list[FakeStore], monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """Set instead of ending this process."""
        ended = threading.Event()
        monkeypatch.setattr(direct, "Watchdog", lambda: Watchdog(ended.set))
        monkeypatch.setattr(direct, "GRACE_S", 0.05)
        monkeypatch.setattr("layerflow.agent.direct.store.GRACE_S", 0.05)
        return ended

    def test_a_load_beyond_its_deadline_ends_the_process_and_says_which(
        self, ended: threading.Event, house: EmbeddedServer, pool: FakePool
    ) -> None:
        with KnownWorker(house.endpoint, context=house.context) as worker:
            saved = worker.serve(worker.prompt(TOKENS))
            gate = pool.gate(G2L)
            run = worker.admit(saved.chain)
            with structlog.testing.capture_logs() as logs:
                # Until then the load has to be begun, on however busy a machine.
                step = worker.agent.open_step([run.request(save=False)], timeout_s=3.0)
                assert ended.wait(PATIENCE_S)
            gate.set()
            assert not step.wait_all(), "the deadline has passed before the bytes came"
            step.close()
        [told] = [log for log in logs if log["event"] == "direct_copy_stuck"]
        assert (told["log_level"], told["direction"], told["step"], told["layer"]) == (
            "critical",
            "load",
            step.number,
            0,
        )
        assert told["exit_code"] == EXIT_STUCK

    def test_a_load_in_time_does_not(self, ended: threading.Event, house: EmbeddedServer) -> None:
        with KnownWorker(house.endpoint, context=house.context) as worker:
            saved = worker.serve(worker.prompt(TOKENS), timeout_s=4.0)
            worker.serve(saved.chain, timeout_s=4.0)
            dog = worker.agent._dispatcher.direct._direct._watchdog  # type: ignore[union-attr]
            assert eventually(lambda: not dog._alarms or dog._alarms[0].due > time.monotonic() + 10)
        assert not ended.is_set()

    def test_a_late_save_is_waited_for_a_while_and_never_published(
        self, ended: threading.Event, house: EmbeddedServer, pool: FakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("layerflow.agent.step.step.LATE_SAVE_S", 0.05)
        with KnownWorker(house.endpoint, context=house.context) as worker:
            with stuck_save(worker, pool) as run:
                assert pool.arrived[L2G].wait(PATIENCE_S)
                assert worker.agent.reclaim([run.tables[0]], 0.05) == 1, "it comes back although the copy does not"
            assert [request for request, _ in worker.agent.poll().failed_saves] == [run.name]
            assert pool.complete() == set()
        assert not ended.is_set()

    def test_a_save_beyond_its_lease_ends_the_process(
        self, ended: threading.Event, house: EmbeddedServer, pool: FakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("layerflow.hosts.memcache.backend.ROOM_LEASE_S", 4.0)  # a save has to be begun within it
        with KnownWorker(house.endpoint, context=house.context) as worker, stuck_save(worker, pool):
            assert ended.wait(PATIENCE_S), "the room that it writes into will be another's"

    def test_ending_the_process_is_at_once_and_has_a_code_of_its_own(self) -> None:
        child = multiprocessing.get_context("fork").Process(target=end_process)
        child.start()
        child.join(PATIENCE_S)
        assert child.exitcode == EXIT_STUCK


def test_the_librarys_constructor_keeps_no_signal_from_whatever_thread() -> None:
    """It takes them over in native code."""

    class Library:
        @staticmethod
        def DistributedObjectStore() -> str:
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                ctypes.CDLL(None).signal(int(number), 1)  # SIG_IGN
            return "store"

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        made: list[object] = []
        thread = threading.Thread(target=lambda: made.append(make_store(Library)))
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert eventually(lambda: heard == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert made == ["store"]


def test_a_client_gives_no_memory_and_has_an_address_of_its_own(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def connect(options: object, meta: MetaService) -> MemcacheConnection:
        seen.append(options)
        return MemcacheConnection(FakeStore(pool), 5, "fake")

    monkeypatch.setattr(direct_client, "connect", connect)
    said = pool.urls | {"hcom_url": "tcp://127.0.0.1:7000", "dram_size": 1 << 30, "world_size": 9}
    client = direct_client.open_client(json.dumps(said), 3)
    direct_client.give_back(client)
    [options] = seen
    assert (options.dram_size, options.device_id, options.world_size) == (0, 3, 9)
    assert options.hcom_url.startswith("tcp://127.0.0.1:")
    assert options.hcom_url != said["hcom_url"]
    assert (client.number, client.world_size) == (5, 9)


def test_a_client_that_cannot_be_made_leaves_the_place_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(Unusable, match="no address of this machine"):
            direct_client.open_client(json.dumps({"hcom_url": "tcp://192.0.2.1:7000"}), 0)


def test_numpy_blocks_of_another_model_are_still_refused(worker: KnownWorker) -> None:
    run = worker.admit(worker.prompt(TOKENS))
    run.tables = (np.full(BLOCKS, 10**6),)
    with pytest.raises(SpecError, match="registered"):
        worker.agent.open_step([run.request()])
