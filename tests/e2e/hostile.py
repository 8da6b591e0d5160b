"""A client that knows the protocol and keeps no rule of it."""

from __future__ import annotations

import math
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from layerflow.agent.handshake import Handshake, dial, fetch_arena
from layerflow.errors import ProtocolError
from layerflow.keys import DIGEST_BYTES
from layerflow.spec import ModelSpec
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message
from layerflow.wire.packing import pack_u32

DIGEST = bytes(DIGEST_BYTES)
U32 = pack_u32


class Hostile:
    """A worker that has attached as it should, and from then on sends nonsense.

    :param spec: what it claims to cache.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, spec: ModelSpec) -> None:
        self.spec = spec
        self.conversation = Handshake(dial(context, endpoint))
        deadline = time.monotonic() + 30
        welcome = self.conversation.introduce("hostile", "agent", deadline)
        self.connection: socket.socket
        self.connection, fd, _ = fetch_arena(Path(welcome.fd_server), welcome.token, deadline)
        os.close(fd)
        self.conversation.attach(wire.Attach(spec, memory=True), deadline)

    def send(self, *frames: bytes) -> None:
        self.conversation.dealer.send_multipart(frames)

    def alive(self, timeout_s: float = 60.0) -> bool:
        """Does the server still answer this session?"""
        sent = time.monotonic()
        self.conversation.send(wire.Beat(sent))
        until = sent + timeout_s
        while time.monotonic() < until:
            message = codec.decode_reply(self.conversation.receive(until), 64 << 20)
            if isinstance(message, wire.Beat) and message.sent == sent:
                return True
        return False

    def close(self) -> None:
        self.connection.send(wire.QUIET)
        self.connection.close()
        self.conversation.dealer.close()


def valid_messages(spec: ModelSpec, step: int) -> list[Message]:
    """One of each kind that a worker sends, each well-formed."""
    now = time.monotonic()
    tokens = spec.chunk_tokens
    blocks = tokens // spec.groups[0].block_size
    load = wire.LoadPart("r", 0, DIGEST, U32([blocks]), 0, b"")
    save = wire.SavePart("r", 0, DIGEST, U32([blocks]), U32([tokens]), b"")
    return [
        wire.Hello("hostile", "agent", 1),
        wire.Attach(spec, True),
        wire.Lookup(1, "r", DIGEST, DIGEST, tokens + 1, 100, DIGEST),
        wire.OpenStep(step, now + 0.05, now + 0.05, [load], [save]),
        wire.Report([1], [wire.Failure(2, "x")], [wire.Fence(step, "x")], [wire.Progress(step, 0, 0)]),
        wire.Abort(["r"]),
        wire.Beat(now),
        wire.StatusRequest(7),
        wire.DropLease("r"),
        wire.Missed(1, tokens),
    ]


def nonsense(rng: random.Random, spec: ModelSpec) -> Iterator[bytes]:
    """Frames without end: random, cut off, flipped, and well-formed ones that contradict themselves."""
    step = 0
    makers: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randrange(0, 200)),
        lambda: _cut(rng, codec.encode(rng.choice(valid_messages(spec, step)))),
        lambda: _flip(rng, codec.encode(rng.choice(valid_messages(spec, step)))),
        lambda: _retag(rng, codec.encode(rng.choice(valid_messages(spec, step)))),
        codec.greeting,
        lambda: codec.encode(rng.choice(contradictions(spec, step))),
        lambda: codec.encode(rng.choice(contradictions(spec, step))),
    ]
    while True:
        step += 1
        frame = rng.choice(makers)()
        if not _is_purge(frame):  # a valid wish, which every engine on the server would notice
            yield frame


def _is_purge(frame: bytes) -> bool:
    try:
        return isinstance(codec.decode_request(frame), wire.Purge)
    except ProtocolError:
        return False


def contradictions(spec: ModelSpec, step: int) -> list[Message]:
    """Well-formed messages that cannot be meant."""
    now = time.monotonic()
    soon = now + 0.05
    nan, inf = math.nan, math.inf
    most = spec.chunk_tokens // spec.groups[0].block_size

    def load(
        group: int = 0, digests: bytes = DIGEST, counts: bytes = U32([1]), tail: int = 0, parent: bytes = b""
    ) -> list[wire.LoadPart]:
        return [wire.LoadPart("r", group, digests, counts, tail, parent)]

    def save(
        group: int = 0,
        digests: bytes = DIGEST,
        counts: bytes = U32([most]),
        tokens: bytes = U32([spec.chunk_tokens]),
        parent: bytes = b"",
    ) -> list[wire.SavePart]:
        return [wire.SavePart("r", group, digests, counts, tokens, parent)]

    return [
        wire.Hello("again", "agent", -1),
        wire.Attach(spec, True),
        wire.Lookup(1, "r", b"", DIGEST, spec.chunk_tokens, 100, b""),
        wire.Lookup(1, "r", DIGEST, DIGEST[:5], spec.chunk_tokens, 100, b""),
        wire.Lookup(1, "r", DIGEST, DIGEST, -5, 100, b""),
        wire.Lookup(1, "r", DIGEST, DIGEST, 2**62, 100, b""),
        wire.Lookup(1, "r", DIGEST, DIGEST, spec.chunk_tokens, -1, b""),
        wire.Lookup(2**63, "r", DIGEST, DIGEST, spec.chunk_tokens, 2**60, b""),
        wire.Lookup(1, "r", DIGEST, DIGEST, spec.chunk_tokens, 100, DIGEST),
        wire.Lookup(1, "r", DIGEST, DIGEST, spec.chunk_tokens + 1, 100, DIGEST[:7]),
        wire.OpenStep(step, soon, soon, load(tail=3), []),
        wire.OpenStep(step, soon, soon, load(tail=spec.chunk_tokens, parent=DIGEST), []),
        wire.OpenStep(step, soon, soon, load(tail=-1, parent=DIGEST), []),
        wire.OpenStep(step, soon, soon, load(parent=DIGEST), []),
        wire.OpenStep(step, nan, soon, load(), []),
        wire.OpenStep(step, soon, nan, load(), []),
        wire.OpenStep(step, inf, inf, load(), []),
        wire.OpenStep(step, -inf, soon, load(), []),
        wire.OpenStep(step, soon, now - 1, load(), []),
        wire.OpenStep(step, now + 1e9, now + 1e9, load(), []),
        wire.OpenStep(step, soon, soon, load(group=7), []),
        wire.OpenStep(step, soon, soon, load(group=-1), []),
        wire.OpenStep(step, soon, soon, load(group=2**40), []),
        wire.OpenStep(step, soon, soon, load(digests=DIGEST[:15]), []),
        wire.OpenStep(step, soon, soon, load(digests=b"", counts=b""), []),
        wire.OpenStep(step, soon, soon, load(counts=U32([0])), []),
        wire.OpenStep(step, soon, soon, load(counts=U32([most + 1])), []),
        wire.OpenStep(step, soon, soon, load(counts=b"abc"), []),
        wire.OpenStep(step, soon, soon, [], save(group=9)),
        wire.OpenStep(step, soon, soon, [], save(counts=U32([most - 1]))),
        wire.OpenStep(step, soon, soon, [], save(tokens=U32([0]))),
        wire.OpenStep(step, soon, soon, [], save(tokens=U32([2**32 - 1]))),
        wire.OpenStep(step, soon, soon, [], save(tokens=U32([3]), counts=U32([1]))),
        wire.OpenStep(step, soon, soon, [], save(tokens=U32([3]), counts=U32([1]), parent=b"x")),
        wire.OpenStep(step, soon, soon, [], save(tokens=b"", counts=b"")),
        wire.OpenStep(step, soon, soon, load(), save()),
        wire.OpenStep(1, soon, soon, load(), save()),
        wire.OpenStep(1, soon, soon, load(), save()),
        wire.OpenStep(-(2**63), soon, soon, load(), save()),
        wire.Report(done=[2**63]),
        wire.Report(done=[-1, 0]),
        wire.Report(done=list(range(1, 40))),
        wire.Report(failed=[wire.Failure(number, "broken: all of them") for number in range(1, 40)]),
        wire.Report(fenced=[wire.Fence(2**62, "x")]),
        wire.Report(progress=[wire.Progress(step, 2**40, 2**40)]),
        wire.Report(progress=[wire.Progress(step, -5, -5)]),
        wire.Report(closed=[wire.Closed(2**50, True), wire.Closed(step, False)]),
        wire.Report(figures=[wire.Figures(1, -5, nan, -inf, 2**62, inf, nan)]),
        wire.Abort([]),
        wire.Abort(["nobody"] * 100),
        wire.DropLease(""),
        wire.Missed(0, 0),
        wire.Missed(2**62, -1),
        wire.Bye(),
        wire.Beat(nan),
        wire.StatusRequest(-1),
    ]


def _cut(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def _flip(rng: random.Random, frame: bytes) -> bytes:
    flipped = bytearray(frame)
    for _ in range(rng.randrange(1, 4)):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _retag(rng: random.Random, frame: bytes) -> bytes:
    fields = msgspec.msgpack.decode(frame)
    fields[0] = rng.choice([0, 4, 5, 12, 99, 101, 105, 255, -1, "x", None])
    return msgspec.msgpack.encode(fields)
