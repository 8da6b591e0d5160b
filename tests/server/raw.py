"""Clients and readers that say what they like, one message at a time."""

from __future__ import annotations

import itertools
import time
from typing import Any, TypeVar

import zmq

from layerflow.agent.handshake import Handshake, dial
from layerflow.server import EmbeddedServer
from layerflow.spec import ModelSpec
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message

Told = TypeVar("Told", bound=Message)
LIMIT = 64 << 20


class RawClient:
    """A client without memory.

    :param spec: that it attaches with.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, spec: ModelSpec, engine: str = "raw"
    ) -> None:
        self.spec = spec
        self.conversation = Handshake(dial(context, endpoint))
        self.conversation.dealer.sndhwm = self.conversation.dealer.rcvhwm = 0
        deadline = time.monotonic() + 20
        self.number = self.conversation.introduce(engine, "raw", deadline).session
        self.conversation.attach(wire.Attach(spec, False), deadline)
        self._ids = itertools.count(1)

    def say(self, message: Message) -> None:
        """Say something, and wait for nothing."""
        self.conversation.send(message)

    def hear(self, kind: type[Told], timeout_s: float = 20.0) -> Told | wire.Problem:
        """The next message of this kind, or Problem."""
        until = time.monotonic() + timeout_s
        while True:
            message = codec.decode_reply(self.conversation.receive(until), LIMIT)
            if isinstance(message, (kind, wire.Problem)):
                return message

    def beat(self) -> float:
        """In how many seconds a heartbeat is answered: what was said before has been heard then."""
        sent = time.monotonic()
        self.say(wire.Beat(sent))
        while True:
            message = codec.decode_reply(self.conversation.receive(sent + 60), LIMIT)
            if isinstance(message, wire.Beat) and message.sent == sent:
                return time.monotonic() - sent

    def lookup(self, request: str, digests: list[bytes], **more: Any) -> wire.Lookup:
        """A lookup of whole chunks, with one token behind them."""
        number, tokens = next(self._ids), len(digests) * self.spec.chunk_tokens + 1
        given = {"tail": bytes(16), "root": bytes(16)} | more
        return wire.Lookup(number, request, digests=b"".join(digests), tokens=tokens, lease_ms=60_000, **given)

    def close(self) -> None:
        self.say(wire.Bye())
        self.conversation.dealer.close()


class RawReader:
    """A server that reads, as far as the control socket knows."""

    def __init__(self, server: EmbeddedServer, name: str = "reader", pid: int = 1) -> None:
        self.dealer = dial(server.context, server.endpoint)
        self.dealer.send(codec.greeting())
        self.dealer.recv()
        self.dealer.send(codec.encode(wire.PeerHello(name, bytes(16), pid)))
        welcome = self.hear(wire.PeerWelcome)
        while not welcome.endpoints:  # its exporter is still to come
            welcome = self.hear(wire.PeerWelcome)
        self.incarnation = welcome.incarnation
        self._ids = itertools.count(1)

    def say(self, message: Message) -> None:
        """Say something, and wait for nothing."""
        self.dealer.send(codec.encode(message))

    def hear(self, kind: type[Told], timeout_s: float = 30.0) -> Told:
        """The next message of this kind; Problem, where that is asked for."""
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            assert left > 0, f"no {kind.__name__} in {timeout_s:g} s"
            if not self.dealer.poll(min(left, 0.5) * 1e3):
                self.say(wire.PeerBeat(0.0))
                continue
            message = codec.decode_reply(self.dealer.recv(), LIMIT)
            if isinstance(message, kind):
                return message
            assert not isinstance(message, wire.Problem), message

    def look(self, keys: list[bytes], lease_ms: int = 60_000, handoff: str = "", wait_ms: int = 0) -> int:
        """Ask for keys: the question's number."""
        number = next(self._ids)
        self.say(wire.PeerLookup(number, self.incarnation, b"".join(keys), lease_ms, handoff, wait_ms))
        return number

    def close(self) -> None:
        self.say(wire.Bye())
        self.dealer.close()
