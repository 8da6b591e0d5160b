"""Which partitions (tensor and pipeline sizes) of a model store in the backend: noted there, one small object each.

So a server that was restarted, and one on another node, know whose objects may stand in for those of its own sizes. A
model has a few numbered keys; a partition that is found under none of them is written to the first that is free.
Writing once settles who was first, as for every object. An object that the backend has evicted is written again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import structlog

from layerflow.errors import SpecError
from layerflow.keys import DIGEST_BYTES, KEY_BYTES
from layerflow.objects import HEADER_BYTES, pack_header
from layerflow.pool.base import NewObject, Owner, Reservation, ReserveStatus
from layerflow.pool.covering import same_model
from layerflow.server.incoming import describe
from layerflow.spec import ModelSpec, Shard
from layerflow.wire.host_messages import EndFetch, EndWrite, Fetch, Fetched, Pull, Push, ToHost, Write, Written

MOST_RECORDED = 16
"""Partitions of a model that are noted: the first so many."""
REFRESH_S = 10.0
"""How long another node's partition may stay unknown: so often a model's keys are asked for, in one call."""
RETRY_S = 0.2
FAILED_S = 1.0
"""When a partition could not be noted, it is tried again after so long: another server may be faster, or room come."""
PAYLOAD_BYTES = 4096
FIRST_JOB = 1 << 48
"""Numbers of these jobs, so that the host's reports of them are told from those of the core's transfers."""
_LENGTH_BYTES = 4
_Recorded = tuple[int, int, tuple[int, ...], tuple[tuple[int, ...], ...]]

log = structlog.get_logger("layerflow.server.tier.partitions")


class PoolRoom(Protocol):
    """What is needed of the pool: room for an object that is on its way, and whom to tell of a partition."""

    def reserve(self, objects: Sequence[NewObject], owner: Owner) -> Sequence[Reservation]: ...

    def revoke(self, keys: Sequence[bytes], owner: Owner) -> int: ...

    def memory_at(self, offset: int, nbytes: int) -> memoryview: ...

    def add_remote_partition(self, model: bytes, shard: Shard) -> None: ...


@dataclass(slots=True, eq=False)
class _Model:
    """:ivar recorded: by number, the partition that was read or written there; None = those bytes name none.
    :ivar stale: it is to be looked at once more when it is no longer busy.
    """

    fingerprint: bytes
    own: list[Shard]
    recorded: dict[int, Shard | None] = field(default_factory=dict)
    busy: bool = False
    stale: bool = False
    told_full: bool = False

    def like(self, shard: Shard) -> bool:
        """Does this partition divide the same model?"""
        return same_model(shard, self.own[0])


@dataclass(slots=True, eq=False)
class _Job:
    """One read of several objects, or the write of one."""

    model: _Model
    numbers: list[int]
    placed: list[tuple[NewObject, int]]
    writes: Shard | None = None


class PartitionRegistry:
    """One tier's partitions.

    :param send: to the host; False = there is none.
    :param present: calls back, once, with those of the keys that the backend has.
    :param up: can the backend be used?
    """

    def __init__(
        self,
        pool: PoolRoom,
        send: Callable[[ToHost], bool],
        present: Callable[[Sequence[bytes], Callable[[frozenset[bytes]], None]], None],
        up: Callable[[], bool],
    ) -> None:
        self._pool, self._send, self._present, self._up = pool, send, present, up
        self._models: dict[bytes, _Model] = {}
        self._jobs: dict[int, _Job] = {}
        self._next = FIRST_JOB
        self._timer: asyncio.TimerHandle | None = None

    def add_partition(self, spec: ModelSpec) -> None:
        """A worker of this model has attached."""
        shard = spec.shard.peers()[0]
        if not shard.shareable:
            return
        model = self._models.setdefault(spec.fingerprint, _Model(spec.fingerprint, []))
        if shard not in model.own:
            model.own.append(shard)
        self.refresh()

    def recorded(self) -> dict[str, list[str]]:
        """By a model's fingerprint: the sizes that are noted, for people."""
        return {
            fingerprint.hex(): [f"tp {shard.tp_size} pp {shard.pp_size}" for shard in model.recorded.values() if shard]
            for fingerprint, model in self._models.items()
            if any(model.recorded.values())
        }

    def refresh(self) -> None:
        """Look what is noted, and note what is missing. Again every :data:`REFRESH_S`."""
        self._again(REFRESH_S)
        for model in self._models.values() if self._up() else ():
            if model.busy:
                model.stale = True
            else:
                model.busy = True
                keys = [note_key(model.fingerprint, number) for number in range(MOST_RECORDED)]
                self._present(keys, lambda found, model=model: self._listed(model, found))  # type: ignore[misc]

    def lost(self) -> None:
        """The host is dead: nothing of its jobs comes, and nothing touches their room."""
        for job in list(self._jobs):
            self._end(job)

    def call_ended(self, message: Fetched | Written) -> bool:
        """The host has ended a call; False: not one of these."""
        job = self._jobs.get(message.id)
        if job is None:
            return message.id >= FIRST_JOB
        failed = {failure.position for failure in message.failed}
        if isinstance(message, Fetched):
            for position, (number, (_, offset)) in enumerate(zip(job.numbers, job.placed, strict=True)):
                if position not in failed:
                    self._read(job.model, number, bytes(self._pool.memory_at(offset + HEADER_BYTES, PAYLOAD_BYTES)))
            self._send(EndFetch(message.id))
            self._end(message.id)
            job.model.busy = True
            self._record(job.model, set(job.model.recorded) | set(job.numbers))
        elif failed or message.call == 2:
            if not failed:
                job.model.recorded[job.numbers[0]] = job.writes
                log.info("partition_noted", fingerprint=job.model.fingerprint.hex(), number=job.numbers[0])
            self._send(EndWrite(message.id))
            self._end(message.id)
            if failed:
                self._again(FAILED_S)
            elif self._unnoted(job.model):
                self._again(RETRY_S)
        return True

    def _listed(self, model: _Model, found: frozenset[bytes]) -> None:
        there = {number for number in range(MOST_RECORDED) if note_key(model.fingerprint, number) in found}
        model.recorded = {number: shard for number, shard in model.recorded.items() if number in there}
        unread = sorted(there - set(model.recorded))
        if not unread:
            self._record(model, there)
            return
        job = self._begin(model, unread)
        if job is not None and self._send(Fetch(job, describe(self._jobs[job].placed, 1))):
            self._send(Pull(job, 1, 0, len(self._jobs[job].placed), 0, 1))
        elif job is not None:
            self._end(job)

    def _record(self, model: _Model, taken: set[int]) -> None:
        """Write a partition of this server's workers that is not noted yet."""
        missing = self._unnoted(model)
        free = next((number for number in range(MOST_RECORDED) if number not in taken), None)
        if free is None and missing and not model.told_full:
            model.told_full = True
            log.warning("partitions_full", fingerprint=model.fingerprint.hex(), noted=MOST_RECORDED)
        if free is None or not missing:
            self._rest(model)
            return
        shard = missing[0]
        raw = msgspec.msgpack.encode((shard.tp_size, shard.pp_size, shard.heads, shard.stages))
        job = self._begin(model, [free], shard) if len(raw) <= PAYLOAD_BYTES - _LENGTH_BYTES else None
        if job is None:
            self._rest(model)
            return
        new, offset = self._jobs[job].placed[0]
        room = self._pool.memory_at(offset, new.nbytes)
        payload = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw
        room[:HEADER_BYTES] = pack_header(new.key, blocks=1, tokens=1, payload=PAYLOAD_BYTES)
        room[HEADER_BYTES:] = payload.ljust(PAYLOAD_BYTES, b"\0")
        if self._send(Write(job, describe(self._jobs[job].placed, 1))):
            self._send(Push(job, 1, 0, 1, 0, 1))
            self._send(Push(job, 2, 0, 1, 1, 1))
        else:
            self._end(job)

    def _unnoted(self, model: _Model) -> list[Shard]:
        return [shard for shard in model.own if shard not in model.recorded.values()]

    def _read(self, model: _Model, number: int, raw: bytes) -> None:
        """Another server wrote this: the worst that a wrong one may do is that its objects are asked for in vain."""
        length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
        model.recorded[number] = None
        try:
            noted = msgspec.msgpack.decode(raw[_LENGTH_BYTES : _LENGTH_BYTES + length], type=_Recorded)
            shard = Shard(0, noted[0], 0, noted[1], noted[2], noted[3])
        except (msgspec.DecodeError, SpecError) as error:
            log.warning("partition_not_read", fingerprint=model.fingerprint.hex(), number=number, error=str(error))
            return
        if model.like(shard):
            model.recorded[number] = shard
            self._pool.add_remote_partition(model.fingerprint, shard)

    def _begin(self, model: _Model, numbers: list[int], writes: Shard | None = None) -> int | None:
        """A new job's number, once its objects have room in the arena; None: there is none now."""
        self._next += 1
        objects = [
            NewObject(note_key(model.fingerprint, number), HEADER_BYTES + PAYLOAD_BYTES, 1, 1) for number in numbers
        ]
        owner = ("partitions", self._next)
        room = list(zip(numbers, objects, self._pool.reserve(objects, owner), strict=True))
        placed = [(number, new, place.offset) for number, new, place in room if place.outcome is ReserveStatus.RESERVED]
        if not placed:
            self._rest(model)
            return None
        pairs = [(new, offset) for _, new, offset in placed]
        self._jobs[self._next] = _Job(model, [number for number, _, _ in placed], pairs, writes)
        return self._next

    def _end(self, number: int) -> None:
        job = self._jobs.pop(number)
        self._pool.revoke([new.key for new, _ in job.placed], ("partitions", number))
        self._rest(job.model)

    def _rest(self, model: _Model) -> None:
        model.busy = False
        if model.stale:
            model.stale = False
            self._again(RETRY_S)

    def _again(self, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(after_s, self.refresh)


def note_key(fingerprint: bytes, number: int) -> bytes:
    """Where a model's partition is noted: 24 bytes, as of an object."""
    name = fingerprint + number.to_bytes(2, "little")
    digest = hashlib.blake2b(name, digest_size=DIGEST_BYTES, person=b"layerflow-sizes").digest()
    return digest.ljust(KEY_BYTES, b"\0")
