"""A pool without room: what does not fit is not stored, counted, and never found; the engine goes on."""

from __future__ import annotations

import math

import pytest
from e2e.known import KnownWorker, Run, eventually, small_spec

from layerflow.pool.base import ReserveStatus
from layerflow.server import EmbeddedServer
from layerflow.server.planner import NO_ROOM
from layerflow.wire.messages import LACKING, Message, Notice
from server.support import Embed, observe, worker_on


def test_old_objects_make_room(embed: Embed) -> None:
    server = embed(pool__size="128KiB")
    control = observe(server)
    with worker_on(server, spec=small_spec(4)) as worker:
        for _ in range(12):
            chain = worker.prompt(100)  # 25 KiB
            assert worker.serve(chain).hit.tokens == 0
            assert worker.serve(chain).hit.tokens == 99
        pool = control.status()["pool"]
        assert pool["evictions"] > 0
        assert pool["used_bytes"] <= pool["capacity_bytes"]
        assert pool["half_written"] == 0
    control.close()


def test_everything_is_pinned(embed: Embed) -> None:
    """Room that readers hold is not taken away: new objects are given up, and the next step is as good as ever."""
    server = embed(pool__size="64KiB", pool__lease_ms=60_000, pool__lease_share=1.0)
    control = observe(server)
    with worker_on(server, spec=small_spec(4)) as worker:
        held = [worker.prompt(96), worker.prompt(96)]
        for chain in held:
            worker.serve(chain)
            assert worker.agent.lookup(f"holder-{id(chain)}", chain).tokens == 95
        full = worker.prompt(96)
        assert worker.serve(full).hit.tokens == 0
        assert control.status()["pool"]["full"] > 0
        assert worker.agent.lookup("partly", full).tokens < 95
        worker.agent.drop_lease("partly")
        for chain in held:
            assert worker.serve(chain).hit.tokens == 95
            worker.agent.drop_lease(f"holder-{id(chain)}")
        assert eventually(lambda: control.status()["pool"]["pinned"] == 0)
        assert worker.serve(full).hit.tokens < 95
        assert worker.serve(full).hit.tokens == 95
    control.close()


def test_an_object_larger_than_the_pool(embed: Embed) -> None:
    server = embed(pool__size="64KiB")
    control = observe(server)
    # One chunk: 64 tokens, 8 layers of 64 bytes twice: 64 KiB and a header.
    with worker_on(server, spec=small_spec(8, chunk_tokens=64, row=64)) as worker:
        chain = worker.prompt(64)
        run = worker.serve(chain)
        assert worker.agent.poll().failed_saves == ((run.name, NO_ROOM[ReserveStatus.TOO_LARGE]),)
        assert worker.serve(chain).hit.tokens == 0
        small = worker.prompt(20)  # a partial chunk has room
        worker.serve(small)
        assert worker.serve(small).hit.tokens == 19
        status = control.status()
        assert status["pool"]["half_written"] == 0
        assert status["flow"]["steps"] == 0
    control.close()


def pin(server: EmbeddedServer) -> None:
    """Nothing that is stored now is evicted."""
    pool = server.server.pool
    server.call(lambda: pool.hold(pool.keys(), "a test", math.inf))


def save(worker: KnownWorker, *runs: Run) -> None:
    """One step that only saves."""
    with worker.agent.open_step([run.request() for run in runs], 30.0) as step:
        worker.forward(step, runs)
    assert all(worker.agent.wait_idle(run.name, 30.0) for run in runs)


def reasons(worker: KnownWorker) -> dict[str, set[str]]:
    """By request, why some of it was not saved."""
    found: dict[str, set[str]] = {}
    for request, reason in worker.agent.poll().failed_saves:
        found.setdefault(request, set()).add(reason)
    return found


def test_saves_without_room_are_told_as_failed_with_one_message(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    server = embed(pool__size="64KiB")
    full = NO_ROOM[ReserveStatus.FULL]
    sent: list[Message] = []
    with worker_on(server, spec=small_spec(4)) as worker:
        stored = [worker.serve(worker.prompt(96)) for _ in range(2)]
        pin(server)
        for _ in range(20):  # more than there is room for
            worker.serve(worker.prompt(16))
            pin(server)
        worker.agent.poll()
        send = server.server.driver._send

        def note(session: int, message: Message) -> None:
            sent.append(message)
            send(session, message)

        monkeypatch.setattr(server.server.driver, "_send", note)
        runs = [worker.admit(worker.prompt(40)) for _ in range(20)]
        save(worker, *runs)
        assert reasons(worker) == {run.name: {full} for run in runs}
        notices = [message for message in sent if isinstance(message, Notice)]
        assert sum(len(notice.stored) for notice in notices) == 1, "of 60 objects"
        again = worker.admit(stored[0].chain, look=False)
        save(worker, again)
        assert reasons(worker) == {}, "what is stored already has not failed"


def test_a_part_with_some_room_is_saved_and_told_as_failed_too(embed: Embed) -> None:
    server = embed(pool__size="64KiB")
    with worker_on(server, spec=small_spec(4)) as worker:
        worker.serve(worker.prompt(96))
        pin(server)
        worker.agent.poll()
        run = worker.admit(worker.prompt(256))
        save(worker, run)
        ended = worker.agent.poll()
        assert ended.saved == (run.name,)
        assert ended.failed_saves == ((run.name, NO_ROOM[ReserveStatus.FULL]),)
        assert 0 < worker.agent.lookup("later", run.chain).tokens < 255


def test_what_is_computed_on_a_load_that_is_missing_is_told_as_failed(embed: Embed) -> None:
    server = embed()
    with worker_on(server, spec=small_spec(4)) as worker:
        stored = worker.serve(worker.prompt(64))
        run = worker.admit(worker.prompt(96, like=stored.chain, shared=64), planned=False)
        assert run.hit.tokens == 64
        pool = server.server.pool
        server.call(lambda: pool.hide(pool.keys()))
        save(worker, run)
        assert run.failed
        assert reasons(worker) == {run.name: {LACKING}}
