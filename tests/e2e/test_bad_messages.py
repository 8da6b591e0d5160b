"""A thousand malformed control messages while another engine works: it notices nothing, and the server lives."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from e2e.hostile import Hostile, nonsense, valid_messages
from e2e.known import PATIENCE_S, KnownWorker, eventually, small_spec
from e2e.rounds import record
from layerflow.agent import Control
from layerflow.agent.handshake import Handshake, dial
from layerflow.spec import ModelSpec
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow_cli.bench.harness import ServerProcess

MESSAGES = 1000
LIMIT = 64 << 10


class Background:
    """Another engine that saves and loads all the time, and checks every byte."""

    def __init__(self, endpoint: str) -> None:
        self._worker = KnownWorker(endpoint, small_spec(), engine="honest", lookup_timeout_s=PATIENCE_S)
        self._stop = threading.Event()
        self.served = self.hits = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                chain = self._worker.prompt(90)
                assert self._worker.serve(chain).hit.tokens == 0
                assert self._worker.serve(chain).hit.tokens == 89
                self.served += 1
        except BaseException as error:  # noqa: BLE001 - shown by the test's thread
            self.failure = error

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        lost = self._worker.agent.statistics().attachments
        self._worker.agent.close()
        if self.failure is not None:
            raise self.failure
        assert lost == 1, "the honest engine was detached"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield own
    own.destroy(linger=0)


def refused(control: Control) -> float:
    """Messages that the server has refused so far; none of them because something unforeseen happened."""
    counted = control.status()["figures"].get("protocol_errors_total", {})
    assert "internal" not in counted, counted
    return float(sum(counted.values()))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_thousand_bad_messages(serve: Callable[..., ServerProcess], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    server = serve(server__max_message_bytes=LIMIT, log__level="error")
    control = Control(server.endpoint, "observer", context=context)
    honest = Background(server.endpoint)
    rng = random.Random(17)
    spec = small_spec(2, content="hostile")
    try:
        assert eventually(lambda: honest.served > 2 or honest.failure)
        before, rss = refused(control), resident_bytes(server.process.pid)
        hostile = Hostile(context, server.endpoint, spec)
        frames = nonsense(rng, spec)
        for number in range(MESSAGES):
            hostile.send(next(frames))
            if number % 100 == 99:
                assert hostile.alive(), "the server no longer answers the session that sends nonsense"
        for count in (0, 2, 7, 8, 9, 200):
            hostile.send(*[b""] * count or [b""])
            hostile.send(*[codec.encode(wire.Beat(1.0))] * count or [b""])
        assert hostile.alive()
        during = honest.served
        hostile.close()

        def alone() -> bool:
            status = control.status()
            workers = [session["engine"] for session in status["sessions"] if session["memory"]]
            return workers == ["honest"]

        assert eventually(alone), control.status()["sessions"]
        assert eventually(lambda: honest.served > during + 2 or honest.failure)
    finally:
        honest.close()
    assert eventually(lambda: control.status()["flow"]["steps"] == 0)
    status = control.status()
    assert status["pool"]["half_written"] == 0
    assert status["flow"]["load_inflight_bytes"] == status["flow"]["save_inflight_bytes"] == 0
    assert server.process.poll() is None
    grown = resident_bytes(server.process.pid) - rss
    record("bad_messages", sent=MESSAGES, refused=refused(control) - before, rss_grown=grown, served=honest.served)
    assert refused(control) - before > MESSAGES / 3
    assert grown < 48 << 20
    control.close()


def _hello(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Handshake:
    return Handshake(dial(context, endpoint))


def _problem(conversation: Handshake, timeout_s: float = PATIENCE_S) -> wire.Problem:
    until = time.monotonic() + timeout_s
    while True:
        frame = conversation.receive(until)
        if frame[:4] == codec.MAGIC:
            continue
        message = codec.decode_reply(frame)
        if isinstance(message, wire.Problem):
            return message


def test_the_wrong_beginning(serve: Callable[..., ServerProcess], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Greetings of other versions, nonsense before any greeting, hello twice, a worker without the arena."""
    server = serve(server__max_message_bytes=LIMIT)
    control = Control(server.endpoint, "observer", context=context)
    sessions = len(control.status()["sessions"])
    spec: ModelSpec = small_spec(2)
    greetings = {
        "version": [
            struct.pack("<4sHH16s", codec.MAGIC, codec.PROTOCOL_VERSION + 1, 0, codec.FINGERPRINT),
            struct.pack("<4sHH16s", codec.MAGIC, codec.PROTOCOL_VERSION, 0, bytes(16)),
        ],
        "stranger": [
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            codec.greeting()[:-1],
            codec.greeting() + b"x",
            *(codec.encode(message) for message in valid_messages(spec, 1)),
        ],
    }
    for code, frames in greetings.items():
        for frame in frames:
            stranger = _hello(context, server.endpoint)
            stranger.send_raw(frame)
            assert _problem(stranger).code == code, frame
            stranger.dealer.close()
    for message in valid_messages(spec, 1)[1:]:
        stranger = _hello(context, server.endpoint)
        stranger.send_raw(codec.greeting())
        stranger.send(message)
        assert "Hello" in _problem(stranger).message, message
        stranger.dealer.close()
    assert len(control.status()["sessions"]) == sessions, "a client that never said hello has a session"

    stranger = _hello(context, server.endpoint)
    stranger.send_raw(codec.greeting())
    stranger.send(wire.Hello("stranger", "agent", 1))
    stranger.send(wire.Attach(spec, True))
    assert _problem(stranger).code == "no_arena"
    stranger.send(wire.OpenStep(1, 1.0, 1.0, [], []))
    assert _problem(stranger).code == "no_memory"
    stranger.send(wire.Lookup(1, "r", bytes(16), b"", 3, 100, b""))
    assert _problem(stranger).code == "not_attached"
    absurd = codec.encode(wire.Attach(spec, False)).replace(
        b"chunk_tokens" + msgspec.msgpack.encode(spec.chunk_tokens), b"chunk_tokens" + msgspec.msgpack.encode(0)
    )
    assert absurd != codec.encode(wire.Attach(spec, False))
    stranger.send_raw(absurd)
    assert "chunk_tokens 0 must be positive" in _problem(stranger).message
    stranger.send(wire.Bye())
    assert eventually(lambda: len(control.status()["sessions"]) == sessions)

    # Larger than it may be: the connection goes, the server stays.
    huge = _hello(context, server.endpoint)
    huge.send_raw(codec.greeting())
    huge.send_raw(bytes(LIMIT + 1))
    huge.send_raw(bytes(LIMIT - 1))
    assert control.status()["healthy"]
    stranger.dealer.close()
    huge.dealer.close()
    control.close()
