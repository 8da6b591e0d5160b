"""Lookups whose slices run in turn with others'."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from e2e.known import KnownWorker, eventually

from layerflow.agent import Hit
from layerflow.agent.lookups import Lookups
from layerflow.keys import Chain
from layerflow.server import EmbeddedServer, mailboxes
from layerflow.server.handlers import lookups
from layerflow.server.handlers.forget import reset_engine
from layerflow.server.mailboxes import next_turn
from layerflow.wire import messages as wire
from server.raw import RawClient
from server.support import Embed, worker_on

PATIENCE_S = 30.0
CLIENTS = 3


@pytest.fixture
def server(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> EmbeddedServer:
    """Each slice ends where it may."""
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)
    return embed(transfer__step_timeout_ms=60_000, pool__lookup_timeout_ms=10_000, pool__lease_ms=60_000)


def connect(server: EmbeddedServer, worker: KnownWorker) -> Lookups:
    return Lookups(server.endpoint, "e2e", worker.spec, context=server.context, timeout_s=PATIENCE_S)


@contextmanager
def stored_for(server: EmbeddedServer) -> Iterator[tuple[KnownWorker, Chain, list[Lookups]]]:
    """A worker that has stored a prompt, and clients of its engine."""
    with ExitStack() as stack:
        worker = stack.enter_context(worker_on(server, lookup_timeout_s=PATIENCE_S))
        chain = worker.prompt(100)
        worker.serve(chain, look=False)
        clients = [stack.enter_context(closing(connect(server, worker))) for _ in range(CLIENTS)]
        assert all(client.wait_connected(PATIENCE_S) for client in clients)
        yield worker, chain, clients


def ask_together(server: EmbeddedServer, clients: list[Lookups], request: str, chain: Chain) -> list[Hit]:
    """All are waiting before the server reads the first."""
    go_on, stands = threading.Event(), threading.Event()
    pause = threading.Thread(target=server.call, args=(lambda: (stands.set(), go_on.wait(PATIENCE_S)),))
    pause.start()
    assert stands.wait(PATIENCE_S)
    asked = [client.ask(request, chain) for client in clients]
    go_on.set()
    pause.join()
    hits = [client.wait(inquiry, PATIENCE_S) for client, inquiry in zip(clients, asked, strict=True)]
    return [hit for hit in hits if hit is not None]


def test_ranks_that_ask_for_one_request_have_a_plan_each(server: EmbeddedServer) -> None:
    with stored_for(server) as (worker, chain, clients):
        hits = ask_together(server, clients, "load", chain)
        assert [hit.plan is not None and hit.tokens > 0 for hit in hits] == [True] * CLIENTS
        for client, hit in zip(clients, hits, strict=True):
            run = replace(worker.admit(chain, look=False), hit=hit)
            with worker.agent.open_step([run.request(save=False)], PATIENCE_S) as step:
                assert worker.forward(step, [run]) == 0
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
            assert not run.failed
            client.drop_lease("load")
        assert eventually(lambda: not server.call(lambda: server.server.pool.statistics().pinned), PATIENCE_S)


def test_what_a_reset_overtakes_hits_nothing(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between two slices of a lookup, whose keys are those of the old weights."""
    with worker_on(server, lookup_timeout_s=PATIENCE_S) as worker:
        chain = worker.prompt(100)
        worker.serve(chain, look=False)
        pool, context = server.server.pool, server.server._server_context
        lease = pool.lease
        overtaken: list[object] = []

        def overtake(*leased: Any) -> bytes:
            places = lease(*leased)
            overtaken.append(deque(reset_engine(context, "e2e")))
            return places

        monkeypatch.setattr(pool, "lease", overtake)
        with closing(connect(server, worker)) as client:
            assert client.wait_connected(PATIENCE_S)
            hit = client.wait(client.ask("load", chain), PATIENCE_S)
            assert overtaken
            assert hit is not None and (hit.tokens, hit.plan) == (0, None)
            assert not server.call(lambda: pool.statistics().pinned)


def test_a_reset_whose_client_goes_ends_all_the_same(server: EmbeddedServer) -> None:
    """What it ends was told other clients of the engine, too."""
    with stored_for(server) as (_, chain, clients):
        assert all(hit.plan is not None for hit in ask_together(server, clients, "load", chain))

        def reset_and_go() -> None:
            context, handlers = server.server._server_context, server.server._handlers
            asker = next(session for session in context.sessions if session.hit_leases)
            handlers.handle(asker, wire.Reset(1 << 40))
            handlers.lose(asker, "it has gone")

        server.call(reset_and_go)
        assert eventually(lambda: not server.call(lambda: server.server.pool.statistics().pinned), PATIENCE_S)


@pytest.mark.parametrize("where", ["as it is read", "as it is seen whether to follow"])
def test_what_a_reset_overtakes_before_the_search_hits_nothing(
    embed: Embed, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    server = embed(pd__follow="auto")
    with worker_on(server, lookup_timeout_s=PATIENCE_S) as worker:
        chain = worker.prompt(100)
        worker.serve(chain, look=False)
        context = server.server._server_context
        client = RawClient(server.context, server.endpoint, worker.spec, "e2e")
        message = client.lookup("load", list(chain.digests), follow_ms=1000)
        name = "read_lookup" if where == "as it is read" else "follow_saves"
        goes_on = getattr(lookups, name)

        async def overtaken(*given: Any) -> Any:
            deque(reset_engine(context, "e2e"))
            await next_turn()
            return await goes_on(*given)

        for overtakes in (True, False):
            with monkeypatch.context() as patch:
                if overtakes:
                    patch.setattr(lookups, name, overtaken)
                client.say(message)
                found = client.hear(wire.Found)
            assert isinstance(found, wire.Found) and (found.tokens > 0) is not overtakes
        client.close()
