"""What the tests of the host's threads share: an arena, objects in it, a backend that tells what it was called for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hosts.fake_backend import FakeBackend
from layerflow.hosts.lanes import BackendCalls, Lane
from layerflow.hosts.objects import places_of
from layerflow.objects import HEADER_BYTES, pack_header
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import EndWrite, Objects, Push, ToServer, Write
from layerflow.wire.packing import pack_u32, pack_u64

PATIENCE_S = 20.0


def key_of(number: int) -> bytes:
    return number.to_bytes(24, "big")


@dataclass(frozen=True)
class Thing:
    """Objects of one job, one behind the other in the arena."""

    first: int
    count: int
    layers: int
    layer_bytes: int
    at: int = 0
    blocks: int = 2

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + self.layers * self.layer_bytes

    @property
    def keys(self) -> list[bytes]:
        return [key_of(self.first + at) for at in range(self.count)]

    @property
    def offsets(self) -> list[int]:
        return [self.at + position * self.nbytes for position in range(self.count)]

    def said(self, **changes: Any) -> Objects:
        fields: dict[str, Any] = {
            "layers": self.layers,
            "keys": b"".join(self.keys),
            "offsets": pack_u64(self.offsets),
            "blocks": pack_u32([self.blocks] * self.count),
            "layer_bytes": pack_u64([self.layer_bytes] * self.count),
            "tokens": pack_u32([16] * self.count),
        }
        return Objects(**(fields | changes))

    def writing(self, number: int) -> tuple[Write, Push, Push, EndWrite]:
        """What a host is told to write all of it as job `number`: its reports are those of two calls."""
        layers = Push(number, 1, 0, self.count, 0, self.layers)
        return Write(number, self.said()), layers, self.publishing(number), EndWrite(number)

    def publishing(self, number: int, call: int = 2) -> Push:
        """The call that publishes all of it."""
        return Push(number, call, 0, self.count, self.layers, self.layers)

    def fill(self, arena: SharedMemory) -> None:
        """The bytes that these objects have, headers included."""
        for key, offset in zip(self.keys, self.offsets, strict=True):
            payload = self.layers * self.layer_bytes
            header = pack_header(key, blocks=self.blocks, tokens=16, payload=payload)
            arena.view[offset : offset + HEADER_BYTES] = header
            arena.array[offset + HEADER_BYTES : offset + self.nbytes] = self._payload(key)

    def wipe(self, arena: SharedMemory) -> None:
        arena.array[self.at : self.at + self.count * self.nbytes] = 0

    def intact(self, arena: SharedMemory) -> list[bool]:
        """Which of them are in the arena, byte for byte."""
        return [
            bool((arena.array[offset + HEADER_BYTES : offset + self.nbytes] == self._payload(key)).all())
            for key, offset in zip(self.keys, self.offsets, strict=True)
        ]

    def _payload(self, key: bytes) -> np.ndarray:
        seed = int.from_bytes(key, "big")
        return np.random.default_rng(seed).integers(0, 256, self.layers * self.layer_bytes, dtype=np.uint8)


class Seen(FakeBackend):
    """Tells its calls as ``"write 2 0:3"``; a gated method waits in each call until it is let through."""

    def __init__(self, options: Mapping[str, Any], gated: tuple[str, ...]) -> None:
        super().__init__(options)
        self.calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.gates = {name: threading.Semaphore(0) for name in gated}

    def _enter(self, method: str, *what: object) -> None:
        self.calls.put(" ".join([method, *map(str, what)]))
        if method in self.gates:
            self.gates[method].acquire()
        super()._enter(method, *what)


@dataclass
class Bench:
    """One lane under test."""

    arena: SharedMemory
    backend: Seen
    told: queue.SimpleQueue[ToServer] = field(default_factory=queue.SimpleQueue)
    suspected: threading.Event = field(default_factory=threading.Event)
    lane: Lane[Any] | None = None

    @property
    def backend_calls(self) -> BackendCalls:
        return BackendCalls(self.suspected.set)

    def hear(self) -> Any:
        return self.told.get(timeout=PATIENCE_S)

    def call(self) -> str:
        """The next call of the backend, as it begins."""
        return self.backend.calls.get(timeout=PATIENCE_S)

    def calls(self, count: int) -> list[str]:
        return [self.call() for _ in range(count)]

    def store(self, thing: Thing) -> None:
        """The pool has these; the arena does not (any more)."""
        thing.fill(self.arena)
        for place in places_of(thing.said(), self.arena):
            self.backend._objects[place.key] = bytes(self.arena.view[place.offset : place.offset + place.nbytes])
        thing.wipe(self.arena)


MakeBench = Callable[..., Bench]
