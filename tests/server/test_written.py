"""What another node of the pool can load of a prompt: something to wait on for a hand-off."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.known import eventually

from layerflow.agent import Control
from layerflow.errors import RemoteError
from layerflow.server import EmbeddedServer
from layerflow.wire import messages as wire
from server.raw import RawClient
from server.support import Embed, worker_on


def asking(server: EmbeddedServer, worker: object) -> Control:
    return Control(server.endpoint, "hand-off", worker.spec, context=server.context)  # type: ignore[attr-defined]


def up(control: Control) -> bool:
    return bool(control.status()["tier"]["up"])


def test_what_was_saved_is_written_once_it_was_waited_for(embed: Embed, tmp_path: Path) -> None:
    server = embed(pool__disk={"path": str(tmp_path / "tier")})
    with worker_on(server) as worker:
        control = asking(server, worker)
        assert eventually(lambda: up(control))
        chain, other = worker.prompt(100), worker.prompt(100)
        worker.serve(chain)
        assert control.written(chain, 10).tokens == 99
        assert control.written(other, 10).tokens == 0, "nothing of it is on its way: it is not waited for"
        longer = worker.prompt(160, like=chain, shared=64)
        assert control.written(longer, 10).tokens == 64
        control.close()


def test_what_was_shed_is_not_waited_for(embed: Embed, tmp_path: Path) -> None:
    server = embed(pool__disk={"path": str(tmp_path / "tier")}, pool__write_backlog=0)
    with worker_on(server) as worker:
        control = asking(server, worker)
        assert eventually(lambda: up(control))
        chain = worker.prompt(100)
        worker.serve(chain)
        assert worker.serve(chain).hit.tokens == 99, "it is in the arena"
        assert control.written(chain, 3600).tokens == 0
        assert control.status()["tier"]["shed_objects"]
        control.close()


@pytest.mark.parametrize("ends", ["in time", "with its client"])
def test_a_lookup_that_has_waited_long_enough_leaves_nothing_behind(embed: Embed, tmp_path: Path, ends: str) -> None:
    """While what it has waited for is still on its way: its step may stay open for an hour."""
    server = embed(pool__disk={"path": str(tmp_path / "tier")})
    with worker_on(server) as worker:
        control = asking(server, worker)
        assert eventually(lambda: up(control))
        run = worker.admit(worker.prompt(100))
        client = RawClient(server.context, server.endpoint, worker.spec)
        session = server.call(lambda: server.server.sessions.get(client.number))
        assert session is not None and server.server.tier is not None
        waiters = server.server.tier._writes._waiters
        with worker.agent.open_step([run.request()], 30.0) as step:
            assert eventually(lambda: server.call(lambda: server.server.driver.open_steps) == 1)
            digests = list(run.chain.digests)
            wait_ms = 1 if ends == "in time" else 60_000
            for number in range(1000):
                client.say(client.lookup(f"r{number}", digests, tail=run.chain.tail, written_ms=wait_ms))
            if ends == "in time":
                found = [client.hear(wire.Found) for _ in range(1000)]
                assert all(isinstance(each, wire.Found) and each.tokens == 0 for each in found)
            else:
                assert eventually(lambda: server.call(lambda: (len(waiters), session.account.entries)) == (1, 1000))
                client.close()
                assert eventually(lambda: server.call(lambda: session.account.entries) == 0)
            assert server.call(lambda: len(waiters)) == 0
            assert server.call(lambda: server.server.driver.open_steps) == 1
            worker.forward(step, [run])
        control.close()


def test_without_a_pool_behind_the_arena_nothing_is_written(embed: Embed) -> None:
    server = embed()
    with worker_on(server) as worker:
        chain = worker.prompt(100)
        worker.serve(chain)
        control = asking(server, worker)
        assert control.written(chain, 3600).tokens == 0
        with pytest.raises(RemoteError, match="written_ms"):
            control.written(chain, 90_000)
        control.close()
