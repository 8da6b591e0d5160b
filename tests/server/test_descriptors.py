"""A server with few file descriptors, and clients of every kind that want more: it goes on, and so do its engines."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest
import zmq
from e2e.known import eventually, small_spec
from wire.zmtp_client import frame, greeting, ready

from layerflow.agent.handshake import Handshake, dial, fetch_arena
from layerflow.errors import ConfigError, LayerflowError
from layerflow.hosts.peer import exporter
from layerflow.proxy import serve
from layerflow.system import descriptors
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow_cli.bench import harness
from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.ports import held_ports

PATIENCE_S = 30.0


class FewDescriptors(ServerProcess):
    """A server under ``ulimit -n``."""

    most = 256

    def _popen(self, command: Sequence[str], environment: Mapping[str, str]) -> harness.subprocess.Popen[str]:
        limited = f'ulimit -n {self.most}; exec "$@"'
        return super()._popen(["bash", "-c", limited, "bash", *command], environment)


class Worker:
    """An attached worker that only shows whether the server still answers it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.conversation = Handshake(dial(context, endpoint))
        deadline = time.monotonic() + PATIENCE_S
        try:
            welcome = self.conversation.introduce("steady", "agent", deadline)
            self.connection, fd, _ = fetch_arena(Path(welcome.fd_server), welcome.token, deadline)
            os.close(fd)
            self.conversation.attach(wire.Attach(small_spec(), memory=True), deadline)
        except LayerflowError:
            self.conversation.dealer.close()
            raise

    def answered(self) -> float:
        """Seconds until a Beat is answered."""
        sent = time.monotonic()
        self.conversation.send(wire.Beat(sent))
        while True:
            message = self.conversation.expect(wire.Beat, sent + PATIENCE_S)
            if isinstance(message, wire.Beat) and message.sent == sent:
                return time.monotonic() - sent

    def close(self) -> None:
        self.connection.close()
        self.conversation.dealer.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """This process is all the clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(stack: contextlib.ExitStack, path: Path | tuple[str, int], said: bytes) -> socket.socket | None:
    """A connection on which this was said; None: nobody takes it."""
    family = socket.AF_UNIX if isinstance(path, Path) else socket.AF_INET
    client = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    client.settimeout(0.05)
    try:
        client.connect(str(path) if isinstance(path, Path) else path)
        client.sendall(said)
    except OSError:
        return None
    return client


def enter(stack: contextlib.ExitStack, path: Path) -> None:
    """A session that fetches the arena and never attaches, as far as it gets."""
    client = connect(stack, path, greeting() + ready() + frame(codec.greeting()))
    if client is None:
        return
    with contextlib.suppress(OSError, LayerflowError, ValueError, IndexError):
        client.sendall(frame(codec.encode(wire.Hello("never", "agent", 1))))
        heard = b""
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            heard += client.recv(4096)
            welcome = _welcome(heard)
            if welcome is not None:
                connection, fd, _ = fetch_arena(Path(welcome.fd_server), welcome.token, time.monotonic() + 0.1)
                stack.callback(connection.close)
                os.close(fd)
                return


def _welcome(heard: bytes) -> wire.Welcome | None:
    """Of what the server has sent: ZMTP's greeting and READY, layerflow's greeting, Welcome."""
    at = 64
    while len(heard) >= at + 2 and len(heard) >= at + 2 + heard[at + 1]:
        body = heard[at + 2 : at + 2 + heard[at + 1]]
        if not heard[at] & 4 and body[:4] != codec.MAGIC:
            message = codec.decode_reply(body)
            return message if isinstance(message, wire.Welcome) else None
        at += 2 + heard[at + 1]
    return None


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("most", [256, pytest.param(1024, marks=pytest.mark.campaign)])
def test_whatever_connects_the_server_and_its_engines_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(FewDescriptors, "most", most)
    (port,) = held_ports(1)  # the server is told which: it says where it listens at start only
    settings: dict[str, object] = {
        "pool.size": "16MiB", "pool.warm": False, "peers.learn": True, "server.max_sessions": 512,
        "server.max_clients": 1024, "server.http_port": port,
    }  # fmt: skip
    server = FewDescriptors(settings, tmp_path)
    control = tmp_path / "control"
    http = ("127.0.0.1", port)
    with contextlib.closing(server), zmq.Context() as context:
        steady = Worker(context, server.endpoint)
        slowest = 0.0
        with contextlib.ExitStack() as stack:
            steady_reader = Handshake(dial(context, server.endpoint))
            stack.callback(steady_reader.dealer.close)
            deadline = time.monotonic() + PATIENCE_S
            steady_reader.introduce("steady", "control", deadline)
            steady_reader.attach(wire.Attach(small_spec(), memory=False), deadline)
            for number in range(most // 3):
                connect(stack, http, b"GET / HTTP/1.1\r\n")
                enter(stack, control)
                connect(stack, control, greeting() + ready() + frame(codec.greeting()))
                if number % 3 == 0:
                    request, servers = f"r{number}", [f"ipc:///nowhere/{number}/control"]
                    tokens = small_spec().chunk_tokens + 1
                    steady_reader.send(
                        wire.Lookup(
                            number,
                            request,
                            bytes(16),
                            bytes(16),
                            tokens,
                            1000,
                            bytes(16),
                            handoff=request,
                            servers=servers,
                            follow_ms=500,
                        )
                    )
                if number % 10 == 0:
                    slowest = max(slowest, steady.answered())
            assert server.process.poll() is None, f"the server ended with {server.process.returncode}"
            slowest = max(slowest, steady.answered())
        assert slowest < PATIENCE_S

        def back_to_normal() -> bool:
            try:
                another = Worker(context, server.endpoint)
            except LayerflowError:
                return False
            another.close()
            try:
                return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=1.0).status_code == 200
            except httpx.HTTPError:
                return False

        assert eventually(back_to_normal, PATIENCE_S)
        steady.answered()
        steady.close()
        assert server.process.poll() is None


def test_a_server_does_not_start_with_too_few(tmp_path: Path) -> None:
    done = harness.subprocess.run(
        ["bash", "-c", 'ulimit -n 100; exec "$@"', "bash", sys.executable, "-m", "layerflow_cli", "run",
         "--endpoint", f"ipc://{tmp_path}/own/control", "--set", "server.http_port=-1", "--pool-size", "16MiB"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "ulimit -n" in done.stdout + done.stderr


def test_the_limit_is_raised_and_the_floor_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(64, 4096)]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert descriptors.prepare_descriptors() == 4096
    limits[:] = [(64, 100)]
    with pytest.raises(ConfigError, match="may open 100 files"):
        descriptors.prepare_descriptors()


def test_exporter_and_proxy_raise_theirs_before_anybody_can_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(64, 4096)]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, pair: limits.append(pair))

    class Connected(Exception):
        """The exporter would serve now."""

    def connect(*_: object, **__: object) -> None:
        assert limits[-1] == (4096, 4096)
        raise Connected

    monkeypatch.setattr(exporter, "connect", connect)
    with pytest.raises(Connected):
        exporter.main()
    limits[:] = [(64, 4096)]
    few = serve._most_connections()
    assert limits[-1] == (4096, 4096) and 16 < few < 4096 // 4, "each request has up to three more, to engines"
    limits[:] = [(64, 100)]
    with pytest.raises(ConfigError, match="may open 100 files"):
        serve._most_connections()


def test_what_is_left_is_seen_whoever_took_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(int(name) for name in os.listdir("/proc/self/fd"))
    opened = [os.dup(0)]
    while opened[-1] <= top:  # so that no number below is free
        opened.append(os.dup(0))
    newest = opened[-1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (newest + 11, hard))
        assert descriptors.leaves(newest, 10)
        assert not descriptors.leaves(newest, 11)
        seen: list[bool] = []
        while opened[-1] <= newest:  # again, where garbage of earlier tests was closed meanwhile
            seen = [descriptors.has_room(*asked) for asked in ((4, 6), (5, 6), (12, 0))]
            opened.append(os.dup(0))
        assert seen == [True, False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)
