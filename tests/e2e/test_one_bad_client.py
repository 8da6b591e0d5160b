"""One local client that makes a server keep what it can: it is bounded or ended, alone; what it took is given back."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from wire.zmtp_client import MORE, frame, greeting, ready

from e2e.known import eventually, small_spec
from layerflow.agent.handshake import Handshake, dial
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow_cli.bench.harness import ServerProcess

PATIENCE_S = 30.0
MOST_GROWN = 128 << 20
SPEC = small_spec()


def resident(pid: int) -> int:
    """Bytes of the process's own memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def lookup(number: int) -> wire.Lookup:
    return wire.Lookup(number, f"r{number}", bytes(16), os.urandom(64 * 16), 64 * SPEC.chunk_tokens, 1000, b"")


def percentile(took: list[float]) -> float:
    """The 95th, in ms."""
    return round(sorted(took)[int(len(took) * 0.95)] * 1e3, 2)


class BadClient:
    """A raw connection with a session, that never reads."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(2.0)
        self.socket.connect(str(path))
        self.socket.sendall(greeting() + ready() + frame(codec.greeting()))
        self.say(wire.Hello("bad", "hostile", 1), wire.Attach(SPEC, memory=False))

    def say(self, *messages: wire.Message) -> None:
        self.socket.sendall(b"".join(frame(codec.encode(message)) for message in messages))


def endless(client: BadClient) -> None:
    while True:
        client.socket.sendall(frame(bytes(60_000), MORE))


def unread(client: BadClient) -> None:
    """Answers are hundreds of times as large as what is asked."""
    asked = frame(codec.encode(wire.StatusRequest(1))) * 100
    while True:
        client.socket.sendall(asked)


def _flood(misuse: Callable[[BadClient], None], client: BadClient) -> None:
    with contextlib.suppress(OSError):  # it is hung up on, or not listened to
        misuse(client)


def sessions(client: Handshake) -> int:
    client.send(wire.StatusRequest(1 << 40))
    told = client.expect(wire.Status, time.monotonic() + PATIENCE_S, 1 << 40)
    assert isinstance(told, wire.Status)
    return len(json.loads(told.json)["sessions"])


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    made = ServerProcess({"pool.size": "16MiB", "pool.warm": False, "server.max_leases": 16384})
    yield made
    made.close()


@pytest.mark.parametrize("misuse", [endless, unread])
def test_one_client_costs_the_server_little_and_others_nothing(
    server: ServerProcess, misuse: Callable[[BadClient], None]
) -> None:
    with zmq.Context() as context:
        steady = Handshake(dial(context, server.endpoint))
        deadline = time.monotonic() + PATIENCE_S
        steady.introduce("steady", "control", deadline)
        steady.attach(wire.Attach(SPEC, memory=False), deadline)

        def ask(number: int) -> float:
            asked, begun = lookup(number), time.monotonic()
            steady.send(asked)
            steady.expect(wire.Found, begun + PATIENCE_S, number)
            return time.monotonic() - begun

        usual = sorted(ask(number) for number in range(200))
        before = resident(server.process.pid)
        grown, number, took = 0, 1000, []
        for _ in range(2):  # what the first took is given back: the second takes no more
            client = BadClient(server.folder / "control")
            flooding = threading.Thread(target=_flood, args=(misuse, client))
            flooding.start()
            while flooding.is_alive():
                took.append(ask(number))
                number += 1
                grown = max(grown, resident(server.process.pid) - before)
            grown = max(grown, resident(server.process.pid) - before)
            assert grown <= MOST_GROWN, f"{grown >> 20} MiB"
            client.socket.close()
            assert eventually(lambda: sessions(steady) == 1, PATIENCE_S)
        print(f"{misuse.__name__}: {grown >> 20} MiB; others' p95 {percentile(took)}, usually {percentile(usual)} ms")
        ask(1)
        steady.dealer.close()
    assert server.process.poll() is None
