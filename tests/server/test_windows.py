"""Windows of loads by plans: shares of all workers that are told seldom, and never add up to more than there is."""

from __future__ import annotations

import os

import pytest
from e2e.known import eventually

from layerflow.agent.handshake import fetch_arena
from layerflow.server import server as server_module
from layerflow.server.terms import sharers
from layerflow.wire.messages import Message, Terms
from server.support import Embed
from server.test_fd_server import Visitor


def test_shares_change_seldom_and_fit() -> None:
    shares = [sharers(workers) for workers in range(5000)]
    assert shares[:16] == [1, *range(1, 16)], "few workers share evenly"
    assert shares == sorted(shares)
    assert all(workers <= share <= max(1, workers * 9 / 8) for workers, share in enumerate(shares))
    assert len(set(shares)) < 100


def test_a_worker_that_comes_is_not_told_to_all_the_others(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    told = 0
    send = server_module.Server._send

    def counting(self: server_module.Server, session: object, message: Message) -> None:
        nonlocal told
        told += isinstance(message, Terms)
        send(self, session, message)  # type: ignore[arg-type]

    monkeypatch.setattr(server_module.Server, "_send", counting)
    server = embed(pool__size="16MiB")
    visitors, connections = [], []
    count = 48
    for _ in range(count):
        visitor = Visitor(server)
        connection, fd, _ = fetch_arena(visitor.door, visitor.welcome.token, visitor.deadline)
        os.close(fd)
        visitor.attach(memory=True)
        visitors.append(visitor)
        connections.append(connection)
    # Exact shares would be told 48 * 47 / 2 times.
    assert eventually(lambda: server.call(server.server.sessions.workers) == count)
    changes = sum(sharers(n) for n in range(1, count + 1) if sharers(n) != sharers(n - 1))
    assert told <= changes
    assert changes < count * (count - 1) // 2
    for connection, visitor in zip(connections, visitors, strict=True):
        connection.close()
        visitor.conversation.dealer.close()
