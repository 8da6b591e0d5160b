"""A hit carries its plan: loads that begin without a message, and what makes that safe."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from e2e.known import POISON, KnownWorker, Run, eventually, small_spec, step_of
from server.support import Embed, observe, worker_on

from layerflow.agent import link
from layerflow.agent.agent import Agent
from layerflow.objects import GENERATION_AT
from layerflow.server import EmbeddedServer
from layerflow.spec import Shard

LAYERS = 8
SLOW = {"pool__link_gbps": 0.004, "transfer__max_transfer_bytes": "8KiB", "pool__lease_ms": 60_000}
"""Batches leave one by one, and a load has a middle, where it can be held."""
LAYER_BYTES = 512 * 64
PATIENCE_S = 20.0
LONG_S = 120.0
"""A load that is held may take so long."""


def pinned(server: EmbeddedServer) -> int:
    found: int = server.call(lambda: server.server.pool.statistics().pinned)  # type: ignore[assignment]
    return found


def stored(worker: KnownWorker, tokens: int = 512) -> Run:
    """A run that hits what an earlier one has stored."""
    chain = worker.prompt(tokens)
    worker.serve(chain)
    run = worker.admit(chain)
    assert run.hit.tokens == tokens - 1 and run.hit.plan is not None
    return run


def slow_worker(server: EmbeddedServer, **more: object) -> KnownWorker:
    return worker_on(server, spec=small_spec(LAYERS, row=32), lookup_timeout_s=PATIENCE_S, **more)


class Held:
    """A server whose loop does nothing until it is let go on."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._go, held = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            self._go.wait(PATIENCE_S)

        self._thread = threading.Thread(target=server.call, args=(hold,))
        self._thread.start()
        assert held.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._go.set()
        self._thread.join()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


class HeldLoad:
    """A worker whose load lane stands still before the first batch behind so many layers, until it is let go on."""

    def __init__(self, worker: KnownWorker, layers: int) -> None:
        self._go = threading.Event()
        copied = 0
        copier: Any = worker.agent._dispatcher.access.copiers[0]  # type: ignore[union-attr]
        load = copier.load

        def loads(extents: Any, after: Any = None) -> None:
            nonlocal copied
            if copied >= layers * LAYER_BYTES:
                assert self._go.wait(LONG_S)
            load(extents, after)
            copied += extents.total

        copier.load = loads

    def let_go(self) -> None:
        self._go.set()

    def __enter__(self) -> HeldLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


def tamper(worker: KnownWorker, run: Run, row: int) -> None:
    """Another object takes the place of one of the hit's."""
    assert run.hit.plan is not None
    offset = int(run.hit.plan.rows[row, 0, 0, 0])
    arena = worker.agent._steps.attachment.arena  # type: ignore[union-attr]
    arena.array[offset + GENERATION_AT : offset + GENERATION_AT + 8] += 1


def test_a_resident_load_needs_no_word_of_the_server(embed: Embed) -> None:
    server = embed()
    with worker_on(server) as worker:
        run = stored(worker, 250)
        with Held(server):
            step = step_of(worker.agent.open_step([run.request(save=False)], PATIENCE_S))
            assert worker.forward(step, [run]) == 0
            assert not run.failed
            step.close()
        assert worker.agent.wait_idle(run.name, PATIENCE_S), "the server has heard of it all the same"
        assert eventually(lambda: not pinned(server))
        figures = server.call(server.server.driver.flow.statistics)
        assert figures.loaded_bytes == worker.agent.statistics().loaded_bytes  # type: ignore[attr-defined]


def test_what_is_saved_behind_a_planned_load_is_published(embed: Embed) -> None:
    server = embed()
    with worker_on(server) as worker:
        first = worker.prompt(120)
        worker.serve(first)
        longer = worker.prompt(250, like=first, shared=120)
        run = worker.serve(longer)
        assert run.hit.plan is not None and run.hit.tokens == 120
        assert worker.serve(longer).hit.tokens == 249


@pytest.mark.parametrize("native", [True, False], ids=["native", "fallback"])
def test_an_object_that_was_replaced_is_not_begun(embed: Embed, monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        from layerflow.ops import copier

        monkeypatch.setattr(copier, "copy_batches_native", None)
    with worker_on(embed()) as worker:
        run, other = stored(worker, 160), stored(worker, 160)
        looked: list[bool] = []

        def _there(self: Any) -> bool:
            looked.append(True)
            same = bool((self._memory[self._indices] == self.generation_words[1]).all())
            return same or len(looked) == 1  # it was replaced right after it was looked at

        monkeypatch.setattr("layerflow.agent.step.loads.ObjectGuard.there", property(_there))

        tamper(worker, run, 3)
        with worker.agent.open_step([run.request(), other.request()], PATIENCE_S) as step:
            worker.forward(step, [run, other])
        assert run.failed == {0: set(range(12, 16))}, "the blocks of that object, and no others"
        assert not other.failed
        for layer in range(worker.spec.num_layers):
            assert not worker.changed_bytes(run, layer, {12, 13, 14, 15}, POISON), "it was not copied at all"
        assert worker.agent.wait_idle(run.name, PATIENCE_S)


def test_an_object_that_was_replaced_while_it_is_copied_is_never_ready(embed: Embed) -> None:
    with slow_worker(embed(**SLOW)) as worker:
        run = stored(worker)
        with HeldLoad(worker, 2):
            step = step_of(worker.agent.open_step([run.request()], LONG_S))
            for layer in range(2):
                assert step.wait_layer(layer).ready
                assert worker.wrong_bytes(run, layer, 0, run.hit.tokens) == 0
            tamper(worker, run, 7)
        outcome = step.wait_layer(LAYERS - 1)
        worker.note([run], outcome)
        assert run.failed == {0: set(range(28, 32))}
        assert "replaced" in outcome.failed[0].reason
        step.close(False)
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert worker.agent.lookup("again", run.chain).tokens, "the objects themselves are not to blame"


def test_an_object_that_was_replaced_under_the_last_copy_is_not_ready(
    embed: Embed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is begun behind it that would see it."""
    with slow_worker(embed(**SLOW)) as worker:
        run = stored(worker)
        copier: Any = worker.agent._dispatcher.access.copiers[0]  # type: ignore[union-attr]
        load, copied = copier.load, []

        def loads(extents: Any, after: Any = None) -> None:
            load(extents, after)
            copied.append(extents.total)
            if sum(copied) == LAYER_BYTES * LAYERS:
                tamper(worker, run, 5)

        monkeypatch.setattr(copier, "load", loads)
        step = step_of(worker.agent.open_step([run.request()], PATIENCE_S))
        worker.note([run], step.wait_all())
        assert sum(copied) == LAYER_BYTES * LAYERS, "all was copied"
        assert run.failed == {0: set(range(20, 24))}
        step.close(False)
        assert worker.agent.wait_idle(run.name, PATIENCE_S)


def test_a_replaced_object_seen_in_time_is_planned_by_the_server(embed: Embed) -> None:
    with worker_on(embed()) as worker:
        run = stored(worker, 160)
        tamper(worker, run, 2)
        with worker.agent.open_step([run.request()], PATIENCE_S) as step:
            assert step.residents is None
            assert worker.forward(step, [run]) == 0
        assert not run.failed


def test_no_time_ends_a_plan_in_use(embed: Embed) -> None:
    """The load outlasts the lease, and all of the arena is wanted meanwhile."""
    server = embed(**SLOW, pool__size="1MiB", pool__lease_share=1.0)
    with slow_worker(server, blocks=2048) as worker:
        run = stored(worker)
        with HeldLoad(worker, 1) as load, Held(server) as held:
            step = step_of(worker.agent.open_step([run.request(save=False)], LONG_S))
            assert step.wait_layer(0)
            held.let_go()
            server.call(lambda: server.server.pool.expire(1e18))
            assert worker.agent._control.plans.expired(1e18) == []
            for _ in range(4):
                pressing = worker.admit(worker.prompt(1024), look=False)
                with worker.agent.open_step([pressing.request(load=False)], PATIENCE_S) as saving:
                    for layer in range(LAYERS):
                        worker.compute(pressing, layer, 0, 1024)
                        saving.layer_done(layer)
                assert worker.agent.wait_idle(pressing.name, PATIENCE_S)
            load.let_go()
            assert worker.forward(step, [run]) == 0, "wrong bytes"
            assert not run.failed
            step.close()
        assert worker.agent.wait_idle(run.name, PATIENCE_S)


def test_a_plan_that_is_not_used_is_void_in_time_and_given_back(embed: Embed) -> None:
    server = embed(pool__lease_ms=50)
    with worker_on(server) as worker:
        run = stored(worker, 160)
        assert eventually(lambda: run.hit.plan.revoked)  # type: ignore[union-attr]
        assert eventually(lambda: not pinned(server))
        with worker.agent.open_step([run.request()], PATIENCE_S) as step:
            assert step.residents is None, "nothing begins by a plan that was given back"
            assert worker.forward(step, [run]) == 0


def test_a_plan_lasts_until_it_is_dropped(embed: Embed) -> None:
    """The server itself ends none, however short the lease was."""
    server = embed(pool__lease_ms=60_000)
    with worker_on(server) as worker:
        run = stored(worker, 160)
        server.call(lambda: server.server.pool.expire(1e18))
        assert pinned(server)
        worker.agent.drop_lease(run.name)
        assert eventually(lambda: not pinned(server))


def test_a_plan_serves_one_step(embed: Embed) -> None:
    with worker_on(embed()) as worker:
        run = stored(worker, 160)
        for planned in (True, False):
            with worker.agent.open_step([run.request(save=False)], PATIENCE_S) as step:
                assert (step.residents is not None) is planned
                assert worker.forward(step, [run]) == 0


def test_an_abort_ends_no_pin_while_the_load_moves(embed: Embed) -> None:
    server = embed(**SLOW)
    with slow_worker(server) as worker:
        run, observer = stored(worker), observe(server)
        with HeldLoad(worker, 1):
            step = step_of(worker.agent.open_step([run.request(save=False)], LONG_S))
            assert step.wait_layer(0)
            worker.agent.abort(run.name)
            worker.agent.drop_lease(run.name)
            assert eventually(lambda: observer.status(PATIENCE_S)["flow"]["aborted_requests"] == 1)
            assert pinned(server), "the worker has not said that it is over"
            assert run.name not in worker.agent.poll().released
        step.close()
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert eventually(lambda: not pinned(server))
        observer.close()


def test_beyond_the_lease_share_a_hit_has_no_plan(embed: Embed) -> None:
    server = embed(pool__size="256KiB", pool__lease_share=0.1)
    with worker_on(server) as worker:
        chain = worker.prompt(250)
        worker.serve(chain)
        run = worker.admit(chain)
        assert run.hit.tokens == 249 and run.hit.plan is None
        with worker.agent.open_step([run.request()], PATIENCE_S) as step:
            assert worker.forward(step, [run]) == 0


def test_each_rank_ends_its_part_of_a_plan(embed: Embed) -> None:
    server = embed()
    workers = [worker_on(server, spec=small_spec(content="ranks", shard=Shard(rank, 2))) for rank in range(2)]
    try:
        tokens = np.arange(160)
        for worker in workers:
            worker.serve(worker.agent.chain(tokens), look=False)
        first = workers[0].admit(workers[0].agent.chain(tokens))
        assert first.hit.plan is not None
        second = replace(workers[1].admit(workers[1].agent.chain(tokens), look=False), name=first.name, hit=first.hit)
        for worker, run in zip(workers, (first, second), strict=True):
            assert pinned(server)
            with worker.agent.open_step([run.request(save=False)], PATIENCE_S) as step:
                assert step_of(step).residents is not None
                assert worker.forward(step, [run]) == 0
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
        assert eventually(lambda: not pinned(server))
    finally:
        for worker in workers:
            worker.agent.close()


def test_a_worker_that_is_gone_holds_no_plan(embed: Embed) -> None:
    server = embed()
    with worker_on(server) as worker, worker_on(server, engine="other") as watching:
        stored(worker, 160)
        watching.prompt(7)  # or both would draw the same prompts
        other = stored(watching, 160)
        assert pinned(server) == 20
        worker.agent.close()
        assert eventually(lambda: pinned(server) == 10), "and the other engine's stays"
        assert other.hit.plan is not None


def test_what_a_client_was_told_and_hung_up_is_a_lease_again(embed: Embed) -> None:
    server = embed(pool__lease_ms=300)
    with worker_on(server) as worker:
        stored(worker, 160)
        worker.agent._control.plans._plans.clear()  # as after its end: it gives nothing back itself
        worker.agent._control.close()
        assert eventually(lambda: not server.call(lambda: len(server.server._server_context.plans)))
        assert eventually(lambda: not pinned(server))


@pytest.fixture
def cut_connection(embed: Embed) -> Iterator[tuple[KnownWorker, EmbeddedServer, Callable[[], None]]]:
    server = embed(**SLOW)
    with slow_worker(server) as worker:

        def hang_up() -> None:
            doorway: Any = server.server._fd_server
            for connection, token in list(doorway._connections.items()):
                session = server.server.sessions.holding(token)
                if session is not None and session.entered:
                    doorway._forget(connection)

        yield worker, server, lambda: server.call(hang_up)  # type: ignore[return-value]


def test_a_hang_up_is_no_death(
    cut_connection: tuple[KnownWorker, EmbeddedServer, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server lives, and may give the places to others: nothing is loaded from it any more."""
    worker, _, hang_up = cut_connection
    run = stored(worker)
    with HeldLoad(worker, 2):
        step = step_of(worker.agent.open_step([run.request()], LONG_S))
        assert step.wait_layer(1)
        hang_up()
        assert eventually(lambda: step.fenced)
    worker.note([run], step.wait_layer(LAYERS - 1))
    assert run.failed
    step.close(False)
    assert worker.agent.wait_idle(run.name, PATIENCE_S)
    known = worker.agent._steps.arenas
    assert eventually(lambda: not known.get(run.hit.plan.incarnation) or worker.agent.attached)  # type: ignore[union-attr]


def test_a_server_that_has_died_fails_no_load_and_its_arena_goes_later(
    cut_connection: tuple[KnownWorker, EmbeddedServer, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _, hang_up = cut_connection
    agent: Agent = worker.agent
    run, late = stored(worker), stored(worker)
    steps = agent._steps
    judged = steps.server_exit_known
    monkeypatch.setattr(steps, "server_exit_known", lambda dead: judged(True))  # as if another process had served
    monkeypatch.setattr(link, "RETRY_S", (60.0,))
    with HeldLoad(worker, 2):
        step = step_of(agent.open_step([run.request()], LONG_S))
        assert step.wait_layer(1)
        hang_up()
        assert eventually(lambda: step.detached)
    assert worker.forward(step, [run]) == 0
    assert not run.failed
    step.close()
    assert agent.wait_idle(run.name, PATIENCE_S), "nobody else says that it has ended"
    assert run.name in [request for request, _ in agent.poll().failed_saves], "nothing of it was saved"
    step = step_of(agent.open_step([late.request()], PATIENCE_S))
    assert worker.forward(step, [late]) == 0, "a hit of before is loaded from what is still mapped"
    assert not late.failed
    step.close()
    assert agent.wait_idle(late.name, PATIENCE_S)
    incarnation = run.hit.plan.incarnation  # type: ignore[union-attr]
    arena = steps.arenas.get(incarnation)
    assert arena is not None
    arena.loading.add(1)
    arena.until = 0.0
    steps.sweep_arenas(1.0)
    assert steps.arenas.get(incarnation) is arena, "a step still loads from it"
    arena.loading.clear()
    steps.sweep_arenas(1.0)
    assert steps.arenas.get(incarnation) is None


def test_a_forked_pid_is_no_proof() -> None:
    """What is proven is the end of the process that listens, not of one with its number."""
    import socket

    from layerflow.system.unix_sockets import has_died, is_here, peer_pidfd

    ours, theirs = socket.socketpair()
    assert is_here(ours)
    pidfd = peer_pidfd(ours)
    try:
        assert not has_died(pidfd)
    finally:
        os.close(pidfd)
        ours.close()
        theirs.close()
