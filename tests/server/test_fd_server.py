"""What the fd server hands out, to whom, and what it makes of a hang-up."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.known import eventually, small_spec

from layerflow.agent.handshake import Handshake, dial, fetch_arena, fetch_presence
from layerflow.errors import RemoteError, ServerLost, Unsupported
from layerflow.pool.memory import MemoryPool
from layerflow.server import EmbeddedServer, clients
from layerflow.server.transport import fd_server as fd_server_module
from layerflow.system.memfd import SharedMemory
from layerflow.wire.messages import Attach, Bye, Missed, Welcome
from server.support import Embed

PATIENCE_S = 20.0


class Visitor:
    """A client that has said hello."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.conversation = Handshake(dial(server.context, server.endpoint))
        self.deadline = time.monotonic() + PATIENCE_S
        self.welcome: Welcome = self.conversation.introduce("visitor", "test", self.deadline)
        self.door = Path(self.welcome.fd_server)

    def attach(self, memory: bool) -> None:
        self.conversation.attach(Attach(small_spec(), memory=memory), self.deadline)

    def knock(self, said: bytes) -> bytes:
        """What the fd server answers."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(self.door))
            connection.sendall(said)
            return connection.recv(8)


@pytest.fixture
def server(embed: Embed) -> EmbeddedServer:
    return embed(server__liveness_ms=100, server__heartbeat_ms=50)


@pytest.fixture
def visitor(server: EmbeddedServer) -> Iterator[Visitor]:
    made = Visitor(server)
    yield made
    made.conversation.dealer.close()


def test_the_table_is_handed_out_for_reading_only(server: EmbeddedServer, visitor: Visitor) -> None:
    connection, fd, nbytes = fetch_presence(visitor.door, visitor.welcome.token, visitor.deadline)
    assert fd is not None
    assert server.server.pool.presence is not None
    assert nbytes == server.server.pool.presence.memory.nbytes
    with SharedMemory.attach(fd, nbytes, writable=False) as memory:
        assert not memory.array.any()
    with pytest.raises(Unsupported):
        SharedMemory.attach(fd, nbytes)
    os.close(fd)
    connection.close()


def test_who_has_the_table_is_no_worker(server: EmbeddedServer, visitor: Visitor) -> None:
    connection, fd, _ = fetch_presence(visitor.door, visitor.welcome.token, visitor.deadline)
    assert fd is not None
    os.close(fd)
    with pytest.raises(RemoteError, match="no_arena"):
        visitor.attach(memory=True)
    visitor.attach(memory=False)
    assert server.server.sessions.workers() == 0
    connection.close()


def test_each_session_enters_once(visitor: Visitor) -> None:
    connection, fd, _ = fetch_arena(visitor.door, visitor.welcome.token, visitor.deadline)
    os.close(fd)
    with pytest.raises(ServerLost, match="hung up"):
        fetch_presence(visitor.door, visitor.welcome.token, visitor.deadline)
    connection.close()


@pytest.mark.parametrize("wish", [b"", b"x", b"A"])
def test_an_unknown_wish_is_refused_and_costs_nothing(visitor: Visitor, wish: bytes) -> None:
    assert visitor.knock(visitor.welcome.token + wish) == b""
    assert visitor.knock(b"?" * 16 + b"p") == b""
    visitor.attach(memory=False)


def test_a_quiet_scheduler_is_not_called_silent_and_not_forgotten(server: EmbeddedServer, visitor: Visitor) -> None:
    connection, fd, _ = fetch_presence(visitor.door, visitor.welcome.token, visitor.deadline)
    assert fd is not None
    os.close(fd)
    visitor.attach(memory=False)
    [session] = server.server.sessions
    session.heard_at -= 1e6
    server.call(server.server._clients.lose_silent, session)
    assert not session.silent
    assert list(server.server.sessions) == [session]
    connection.close()
    assert eventually(lambda: not len(server.server.sessions)), "a hang-up ends its session"


def test_last_words_come_through(server: EmbeddedServer, visitor: Visitor) -> None:
    """What a scheduler said before it hung up is heard, whichever of the two arrives first."""
    connection, fd, _ = fetch_presence(visitor.door, visitor.welcome.token, visitor.deadline)
    assert fd is not None
    os.close(fd)
    visitor.attach(memory=False)
    connection.close()
    visitor.conversation.send(Missed(3, 500))
    figures = server.server.metrics.summary
    assert eventually(lambda: figures()["lookups_total"] == 3 and figures()["lookup_miss_tokens_total"] == 500)
    assert eventually(lambda: not len(server.server.sessions))
    assert figures().get("protocol_errors_total", {}) == {}


@pytest.mark.parametrize("requests, tokens", [(0, 0), (-1, 5), (1, -1)])
def test_impossible_misses_are_refused(server: EmbeddedServer, visitor: Visitor, requests: int, tokens: int) -> None:
    visitor.attach(memory=False)
    visitor.conversation.send(Missed(requests, tokens))
    with pytest.raises(RemoteError, match="cannot have missed"):
        visitor.conversation.expect(Welcome, visitor.deadline)
    assert server.server.metrics.summary()["lookups_total"] == 0


def test_a_pool_without_a_table(monkeypatch: pytest.MonkeyPatch, embed: Embed) -> None:
    monkeypatch.setattr(MemoryPool, "presence", None)
    server = embed()
    visitor = Visitor(server)
    connection, fd, nbytes = fetch_presence(visitor.door, visitor.welcome.token, visitor.deadline)
    assert (fd, nbytes) == (None, 0)
    visitor.attach(memory=False)
    connection.close()
    assert eventually(lambda: not len(server.server.sessions))
    visitor.conversation.dealer.close()


@pytest.mark.parametrize(
    ("code", "let_in"),
    [(errno.EMFILE, False), (errno.ENFILE, False), (errno.ENOMEM, False), (errno.ESRCH, True), (errno.EINVAL, True)],
)
def test_only_a_process_in_another_namespace_is_trusted_without_a_pidfd(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch, code: int, let_in: bool
) -> None:
    """Whose death cannot be seen for want of descriptors would count as dead when it hangs up, and may still write."""

    def fail(_: socket.socket) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fd_server_module, "peer_pidfd", fail)
    if let_in:
        connection, fd, _ = fetch_arena(visitor.door, visitor.welcome.token, visitor.deadline)
        os.close(fd)
        connection.close()
        return
    with pytest.raises(ServerLost, match="hung up"):
        fetch_arena(visitor.door, visitor.welcome.token, visitor.deadline)
    monkeypatch.undo()
    connection, fd, _ = fetch_arena(visitor.door, visitor.welcome.token, visitor.deadline)  # it tries again
    os.close(fd)
    connection.close()


def test_who_takes_the_arena_and_does_not_attach_is_hung_up_on(
    server: EmbeddedServer, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "ATTACH_S", 0.0)
    connection, fd, _ = fetch_arena(visitor.door, visitor.welcome.token, visitor.deadline)
    os.close(fd)
    connection.settimeout(PATIENCE_S)
    assert connection.recv(1) == b""
    assert eventually(lambda: not len(server.server.sessions))
    connection.close()


def test_who_has_the_arena_counts_before_it_attaches(embed: Embed) -> None:
    server = embed(server__max_sessions=1)
    first, second = Visitor(server), Visitor(server)
    connection, fd, _ = fetch_arena(first.door, first.welcome.token, first.deadline)
    os.close(fd)
    with pytest.raises(ServerLost, match="hung up"):
        fetch_arena(second.door, second.welcome.token, second.deadline)
    with pytest.raises(RemoteError, match="max_sessions"):
        second.attach(memory=True)
    connection.close()
    for visitor in (first, second):
        visitor.conversation.dealer.close()


def test_a_connection_whose_session_has_ended_is_closed(server: EmbeddedServer, visitor: Visitor) -> None:
    """A client could else take a new session, and one more descriptor, as often as it likes."""
    connection, fd, _ = fetch_presence(visitor.door, visitor.welcome.token, visitor.deadline)
    assert fd is not None
    os.close(fd)
    visitor.conversation.send(Bye())
    connection.settimeout(PATIENCE_S)
    assert connection.recv(1) == b""
    connection.close()
