"""Control messages without end, made from the message types themselves, so that a new message is covered at once."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, get_args, get_type_hints

import msgspec
import zmq

from e2e.hostile import Hostile, contradictions, valid_messages
from e2e.known import small_spec
from layerflow.errors import ProtocolError
from layerflow.keys import DIGEST_BYTES
from layerflow.spec import ModelSpec
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message

KINDS: tuple[type[Message], ...] = get_args(wire.ToServer)
PER_BEAT = 500
"""Messages between two heartbeats that are waited for: the server is not left more than so many behind."""

SKIPPED = (wire.Purge,)  # a valid wish, which every engine on the server would notice
INTEGERS = [-(2**63), -1, 0, 1, 2, 3, 7, 8, 16, 40, 255, 2**31, 2**32, 2**62, 2**63 - 1]
FLOATS = [0.0, -1.0, 1e-9, 1e300, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "r", "r0", "r1", "hostile", "broken: all", "x" * 300, "\0", "é☃"]


class Generator:
    """Seeded; each message by itself, in no order that makes sense.

    :param spec: what the sessions that receive them have attached with.
    """

    def __init__(self, seed: int, spec: ModelSpec) -> None:
        self.random = random.Random(seed)
        self.kinds: dict[str, int] = {}
        self._spec = spec
        self._step = 0

    def frames(self) -> Iterator[list[bytes]]:
        """Messages as lists of frames."""
        while True:
            message = self._message()
            if isinstance(message, SKIPPED):
                continue
            self.kinds[type(message).__name__] = self.kinds.get(type(message).__name__, 0) + 1
            frame = self._spoiled(codec.encode(message))
            if not _is_skipped(frame):
                yield [frame] * self.random.choice([2, 3, 50]) if self.random.random() < 0.002 else [frame]

    def _message(self) -> Message:
        roll = self.random.random()
        if roll < 0.4:
            return self._of(self.random.choice(KINDS))
        self._step = self._step + 1 if roll < 0.6 else self.random.randrange(self._step + 1)
        return self.random.choice((valid_messages if roll < 0.8 else contradictions)(self._spec, self._step))

    def _spoiled(self, frame: bytes) -> bytes:
        rng, roll = self.random, self.random.random()
        if roll < 0.7:
            return frame
        if roll < 0.72:
            return rng.randbytes(rng.randrange(200))
        if roll < 0.74:
            return codec.greeting()
        if roll < 0.8:
            return frame[: rng.randrange(len(frame))]
        if roll < 0.85:
            return frame + rng.randbytes(rng.randrange(1, 40))
        flipped = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)

    def _of(self, kind: type[Any]) -> Any:
        """Any instance of a struct: well-formed, mostly meaningless."""
        if kind is ModelSpec:
            return self._spec
        hints = get_type_hints(kind)
        return kind(
            **{field.name: self._value(hints[field.name], field.name) for field in msgspec.structs.fields(kind)}
        )

    def _value(self, kind: Any, name: str) -> Any:
        rng = self.random
        if inner := get_args(kind):
            return [self._value(inner[0], name) for _ in range(rng.choice([0, 1, 1, 2, 5, 40]))]
        if kind is bool:
            return rng.random() < 0.5
        if kind is int:
            return rng.choice(INTEGERS) if rng.random() < 0.7 else rng.randrange(self._step + 8)
        if kind is float:
            return rng.choice(FLOATS) if rng.random() < 0.4 else time.monotonic() + rng.uniform(-0.2, 0.2)
        if kind is str:
            return rng.choice(TEXTS)
        if kind is bytes:
            return rng.randbytes(DIGEST_BYTES if "digest" in name else 4) * rng.choice([0, 1, 1, 2, 9, 300])
        return self._of(kind)


def flood(pipe: Connection, endpoint: str, seed: int, count: int, gives_way: bool) -> None:
    """Send `count` messages from one connection, which is closed and opened anew now and then; then say which kinds.

    :param gives_way: to all else on this machine: what is measured is the server, not four senders that take its cores.
    """
    if gives_way:
        os.nice(19)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    spec = small_spec(2, content="hostile")
    generator, rng = Generator(seed, spec), random.Random(seed)
    frames = generator.frames()
    hostile = Hostile(context, endpoint, spec)
    for number in range(count):
        hostile.send(*next(frames))
        if number % PER_BEAT == PER_BEAT - 1:
            assert hostile.alive(60), "the server no longer answers the session that sends nonsense"
        if rng.random() < 1 / 5000:
            hostile.close()
            hostile = Hostile(context, endpoint, spec)
    assert hostile.alive(60)
    hostile.close()
    context.destroy(linger=0)
    pipe.send(sorted(generator.kinds))


def _is_skipped(frame: bytes) -> bool:
    try:
        return isinstance(codec.decode_request(frame), SKIPPED)
    except ProtocolError:
        return False
