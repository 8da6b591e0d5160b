"""Objects with bytes of their own, and a pool under test that they are saved to and loaded from."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from layerflow.hosts.backend import Backend, ObjectLocation, ObjectStatus
from layerflow.objects import HEADER_BYTES, pack_header, set_checksum
from layerflow.system.memfd import SharedMemory

ARENA = 16 << 20  # bytes that a bench's arena has at least
BLOCK = 4096
PATIENCE_S = 10.0
_GUARD = 0xEE

OK, EXISTS, FULL, TOO_LARGE = ObjectStatus.OK, ObjectStatus.EXISTS, ObjectStatus.FULL, ObjectStatus.TOO_LARGE
MISSING, EXPIRED, BROKEN, FAILED = ObjectStatus.MISSING, ObjectStatus.EXPIRED, ObjectStatus.BROKEN, ObjectStatus.FAILED


@dataclass(frozen=True)
class Client:
    """An attached backend, or a proxy for one in another process.

    :param address: where the arena begins in the process in which it is attached.
    """

    backend: Backend
    address: int


@dataclass
class Bench:
    """What is tested. Only methods of the contract are called, with plain values.

    :param first: a client, attached over `arena`.
    :param second: another client of the same pool over the same arena; None where a pool has only one.
    :param arena: of :data:`ARENA` bytes or more, as mapped by the test.
    :param capacity: bytes that the pool holds; more than so many cannot be in it at once.
    :param evicts: whether a full pool makes room by itself.
    :param outage: ``outage("open_write")`` or ``outage("commit")``: while that context lasts, such a call of the first
        client raises when it has done some of its work. None = it never raises there, or a test cannot make it.
    """

    first: Client
    second: Client | None
    arena: SharedMemory
    capacity: int
    evicts: bool = True
    outage: Callable[[str], AbstractContextManager[object]] | None = None
    nonce: bytes = field(default_factory=lambda: os.urandom(8))  # pools outlive tests: keys are of one bench

    @property
    def clients(self) -> list[Client]:
        return [self.first, self.second] if self.second else [self.first]

    def key(self, name: object) -> bytes:
        return hashlib.blake2b(repr(name).encode(), digest_size=24, key=self.nonce).digest()

    def thing(self, name: object, blocks: int = 3, layers: int = 5, *, variant: int = 0, **more: object) -> Thing:
        """An object named `name`; variants of one name have one key and size, and different bytes."""
        return Thing(self.key(name), blocks, layers, blocks * BLOCK, variant=variant, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Thing:
    """An object with bytes that follow from its key and variant."""

    key: bytes
    blocks: int
    layers: int
    layer_bytes: int
    tokens: int = 256
    parent: bytes = b""
    variant: int = 0
    block_digests: bytes = b""

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + self.layers * self.layer_bytes

    @property
    def header(self) -> bytes:
        """With the checksum that a store which is reached over a network adds."""
        nbytes = self.layers * self.layer_bytes
        header = bytearray(pack_header(self.key, blocks=self.blocks, tokens=self.tokens, payload=nbytes))
        set_checksum(memoryview(header), xxhash.xxh3_64_intdigest(self.payload))
        return bytes(header)

    @property
    def payload(self) -> np.ndarray:
        """uint8."""
        seed = int.from_bytes(self.key[:8], "big") + self.variant
        return np.random.default_rng(seed).integers(0, 256, self.layers * self.layer_bytes, np.uint8)

    @property
    def bytes(self) -> np.ndarray:
        """uint8, header and payload."""
        return np.concatenate([np.frombuffer(self.header, np.uint8), self.payload])

    def at(self, client: Client, offset: int, *, known: bool = True) -> ObjectLocation:
        """:param known: whether tokens, parent and block digests are told, as they are to a writer."""
        return ObjectLocation(
            self.key,
            offset,
            client.address + offset,
            self.layer_bytes,
            self.layers,
            self.blocks,
            self.tokens if known else 0,
            self.parent if known else b"",
            self.block_digests if known else b"",
        )


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def outcomes(results: Sequence[tuple[int, str]]) -> list[ObjectStatus]:
    """Also checks that what is not OK says why."""
    for outcome, reason in results:
        assert outcome == OK or reason, ObjectStatus(outcome)
    return [ObjectStatus(outcome) for outcome, _ in results]


def lay_out(things: Sequence[Thing], start: int = 0) -> list[int]:
    """Offsets in the arena, one after the other with room between, each a multiple of 64."""
    offsets = []
    for thing in things:
        offsets.append(start)
        start += -(-(thing.nbytes + 64) // 64) * 64
    return offsets


def put(bench: Bench, things: Sequence[Thing], offsets: Sequence[int]) -> None:
    """Bytes into the arena, headers included."""
    for thing, offset in zip(things, offsets, strict=True):
        bench.arena.array[offset : offset + thing.nbytes] = thing.bytes


def save(bench: Bench, client: Client, things: Sequence[Thing], start: int = 0, *, wait: float = PATIENCE_S) -> list:
    """Write whole objects in two goes; the outcome of each."""
    offsets = lay_out(things, start)
    put(bench, things, offsets)
    places = [thing.at(client, offset) for thing, offset in zip(things, offsets, strict=True)]
    final = outcomes(client.backend.open_write(places, soon(wait)))
    layers = max(place.layers for place in places)
    for step in ((0, 1), (1, layers)):
        now = [index for index, outcome in enumerate(final) if outcome == OK]
        if now:
            results = client.backend.write([places[index] for index in now], *step, soon())
            for index, outcome in zip(now, outcomes(results), strict=True):
                final[index] = outcome
                if outcome != OK:
                    client.backend.revoke([places[index]])
    now = [index for index, outcome in enumerate(final) if outcome == OK]
    if now:
        results = client.backend.commit([places[index] for index in now], soon())
        for index, outcome in zip(now, outcomes(results), strict=True):
            final[index] = outcome
    return final


def load(
    bench: Bench, client: Client, things: Sequence[Thing], start: int, steps: Sequence[int] = ()
) -> list[tuple[ObjectStatus, np.ndarray | None]]:
    """Fetch objects of equally many layers, `steps` layers at a time and then the rest.

    :returns: for each the outcome and, where it is OK, the bytes that lie in the arena then.
    """
    arena = bench.arena.array
    offsets = lay_out(things, start)
    end = offsets[-1] + things[-1].nbytes + 64
    arena[start:end] = _GUARD
    places = [thing.at(client, offset, known=False) for thing, offset in zip(things, offsets, strict=True)]
    final = outcomes(client.backend.open_fetch(places, soon()))
    opened = [place for place, outcome in zip(places, final, strict=True) if outcome == OK]
    layers, lo = things[0].layers, 0
    for step in [*steps, layers]:
        hi = min(lo + step, layers)
        now = [index for index, outcome in enumerate(final) if outcome == OK]
        if now and lo < hi:
            results = outcomes(client.backend.fetch([places[index] for index in now], lo, hi, soon()))
            for index, outcome in zip(now, results, strict=True):
                final[index] = outcome
                begin, stop = offsets[index] + places[index].start(lo), offsets[index] + places[index].start(hi)
                if outcome == OK:  # each part is right when it is reported, not only in the end
                    right = things[index].bytes[places[index].start(lo) : places[index].start(hi)]
                    assert np.array_equal(arena[begin:stop], right) or things[index].variant < 0
        lo = hi
    client.backend.close_fetch(opened)
    for thing, offset in zip(things, offsets, strict=True):
        assert (arena[offset + thing.nbytes : offset + thing.nbytes + 64] == _GUARD).all(), "written past its end"
    return [
        (outcome, arena[offset : offset + thing.nbytes].copy() if outcome == OK else None)
        for thing, offset, outcome in zip(things, offsets, final, strict=True)
    ]


def assert_whole(bench: Bench, client: Client, things: Sequence[Thing], steps: Sequence[int] = ()) -> None:
    """Each of them can be loaded, into the second half of the arena, and has its own bytes."""
    for thing, (outcome, data) in zip(things, load(bench, client, things, ARENA // 2, steps), strict=True):
        assert outcome == OK, outcome
        assert np.array_equal(data, thing.bytes), "wrong bytes"


def seen(bench: Bench, *things: Thing) -> list[list[bool]]:
    """For each client, what lookup says of each."""
    return [list(client.backend.lookup([thing.key for thing in things], soon())) for client in bench.clients]


def any_of(thing: Thing) -> Thing:
    """For loads of which it is not known which variant was stored."""
    return replace(thing, variant=-1)
