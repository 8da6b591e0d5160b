"""Engine memory and a shared store, without the arena between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from layerflow.agent.direct.client import StoreClient, Watchdog, give_back
from layerflow.agent.step.leases import LeasedObject
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.device.base import DeviceEvent
from layerflow.errors import DeadlineExceeded, PoolError
from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, Unreachable, Unusable, pool_name
from layerflow.hosts.memcache.backend import MemcacheReader, MemcacheWriter, is_header
from layerflow.hosts.memcache.client import SLOTS, HeaderBuffer, MemcacheClient, explain
from layerflow.objects import HEADER_BYTES, pack_header
from layerflow.ops.extents import Extents
from layerflow.ops.paged import PagedMemory
from layerflow.system.memfd import SharedMemory
from layerflow.wire.messages import Batch

L2G, G2L = 0, 1
"""Device memory to the pool, and back."""
GRACE_S = 1.0
"""What a copy may take. A load that was begun before its step's deadline has so long beyond it; a save is begun so long
before the first lease of its step's room ends, or not at all."""
HEADERS_S = 0.5
"""Headers are read in one call; where that fails each is tried by itself, for so long."""


class DirectStore:
    """Reads and writes of one worker.

    :meth:`load` is the load lane's, :meth:`save` the save lane's, all else one other thread's.

    :raises Unusable: the transport refuses memory.
    """

    def __init__(self, client: StoreClient, memory: PagedMemory) -> None:
        self._client = client
        self._calls = MemcacheClient(client.meta)
        self._calls.open(client.store)
        self._reader = MemcacheReader(self._calls, client.meta, client.world_size)
        self._writer = MemcacheWriter(self._calls, client.meta)
        self._headers = SharedMemory.create(SLOTS * HEADER_BYTES)
        for address, nbytes in [
            (self._headers.address, self._headers.nbytes),
            *((region.address, region.nbytes) for region in memory.regions()),
        ]:
            code = self._calls.register(address, nbytes)
            if code != 0:
                raise Unusable(f"memcache cannot register {nbytes} bytes at {address:#x} ({explain(code)})")
        self._scratch, self._lane_scratch = HeaderBuffer(self._calls), HeaderBuffer(self._calls)
        self._writer.scratch = HeaderBuffer(self._calls)
        self._writer.arena = self._headers
        self._writer.number = client.number

    def lease(self, places: Sequence[ObjectLocation], until: float) -> list[LeasedObject | None]:
        """What may be read from now on; None = it is not there, or not what it should be.

        :raises Unreachable: nothing can be learnt.
        """
        results = self._reader.open(places, until)
        held = [self._held(self._reader.lease(place), place) for place in places]
        there = [at for at, result in enumerate(results) if result is OK and held[at] is not None]
        kept: list[LeasedObject | None] = [None] * len(places)
        headers = self._scratch.read([found.gva for at in there if (found := held[at])], until + HEADERS_S)
        broken: list[ObjectLocation] = []
        for at, (code, header) in zip(there, headers, strict=True):
            if code == 0 and is_header(header, places[at]):
                kept[at] = held[at]
            elif code == 0:
                broken.append(places[at])
        self._reader.close([places[at] for at in there if kept[at] is None])
        self._hide(broken)
        return kept

    def unlease(self, places: Sequence[ObjectLocation]) -> None:
        """Give leases back."""
        self._reader.close(places)

    def allocate(self, places: Sequence[ObjectLocation], until: float) -> list[LeasedObject | ObjectResult | None]:
        """Room for an object, or why there is none: EXISTS where it is in the pool, or another worker writes it.

        :raises Unreachable: nothing can be learnt.
        """
        results = self._writer.open(places, until)
        return [
            self._held(self._writer.room(place), place) if result is OK else result
            for place, result in zip(places, results, strict=True)
        ]

    def publish(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        """Every layer is written: the headers, then they are there for all.

        :raises Unreachable: the MetaService did not answer; they are complete all the same, or not there.
        """
        results: list[ObjectResult] = []
        for first in range(0, len(places), SLOTS):
            written = places[first : first + SLOTS]
            headers = [self._with_header(place, slot) for slot, place in enumerate(written)]
            self._writer.landed(written, headers)
            results += self._writer.commit(headers, until)
        return results

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        """Give up objects that will not be finished. No copy into them may be under way."""
        self._writer.revoke(places)

    def load(self, extents: Extents, objects: Sequence[LeasedObject]) -> None:
        """Pool to device memory; when this returns, every byte is in place and is that of its object.

        :raises PoolError: it is not known to be.
        """
        self._readable(objects)
        self._move(extents, G2L)
        headers = self._lane_scratch.read([held.gva for held in objects], time.monotonic() + HEADERS_S)
        for held, (code, header) in zip(objects, headers, strict=True):
            if code != 0 or not is_header(header, held.place):
                raise PoolError(f"object {held.place.key.hex()}: another took its place while it was read")
        self._readable(objects)

    def save(self, extents: Extents, objects: Sequence[LeasedObject]) -> None:
        """Device memory to the pool.

        :raises PoolError: it may not be all there.
        """
        self._writable(objects)
        self._move(extents, L2G)
        self._writable(objects)

    def close(self, patience_s: float) -> bool:
        """Close the client; takes seconds, with the GIL held.

        :param patience_s: for calls under way.
        :returns: False: they have not come back, and the process keeps the client.
        """
        if not self._calls.close(patience_s):
            return False
        self._headers.close()
        give_back(self._client)
        return True

    def _move(self, extents: Extents, direction: int) -> None:
        if extents.total:
            columns = extents.arena.tolist(), extents.engine.tolist(), extents.nbytes.tolist()
            code = self._calls.move(*columns, direction)
            if code != 0:
                raise PoolError(f"{explain(code)}; {len(columns[0])} ranges of {extents.total} bytes together")

    def _readable(self, objects: Sequence[LeasedObject]) -> None:
        _raise_first(objects, self._reader.check)

    def _writable(self, objects: Sequence[LeasedObject]) -> None:
        _raise_first(objects, self._writer.check)

    def _with_header(self, place: ObjectLocation, slot: int) -> ObjectLocation:
        at = slot * HEADER_BYTES
        payload = place.nbytes - HEADER_BYTES
        header = pack_header(place.key, blocks=place.blocks, tokens=place.tokens, payload=payload)
        self._headers.view[at : at + HEADER_BYTES] = header
        return ObjectLocation(
            place.key, at, self._headers.address + at, place.layer_bytes, place.layers, place.blocks, place.tokens,
            place.parent,
        )  # fmt: skip

    def _hide(self, places: Sequence[ObjectLocation]) -> None:
        """What is broken must not be found again."""
        if places:
            with contextlib.suppress(Unreachable):  # what is not hidden is found broken again
                self._calls.remove([pool_name(place.key) for place in places])

    @staticmethod
    def _held(at: tuple[int, float] | None, place: ObjectLocation) -> LeasedObject | None:
        return None if at is None else LeasedObject(place, *at)


def _raise_first(objects: Sequence[LeasedObject], check: Callable[[ObjectLocation], ObjectResult]) -> None:
    for held in objects:
        result = check(held.place)
        if result is not OK:
            raise PoolError(f"object {held.place.key.hex()}: {result.reason}")


LANES = {LOAD: "load", SAVE: "save"}


class DirectCopier:
    """A :class:`~layerflow.ops.base.Copier` for one batch of one step.

    Waits on the calling thread for what the copy comes after. The call itself cannot be called back: see
    :class:`layerflow.agent.direct.client.Watchdog`.
    """

    way = "ranges"

    def __init__(self, pool: DirectStore, watchdog: Watchdog, step: Step, batch: Batch) -> None:
        self._pool = pool
        self._watchdog = watchdog
        self._step = step
        self._layer = batch.layer

    def load(self, extents: Extents, after: DeviceEvent | None = None) -> None:
        """Pool to engine memory.

        :raises DeadlineExceeded: the step's deadline has passed; nothing was copied.
        :raises PoolError: the bytes are not known to be those of their objects.
        """
        step = self._step
        assert step.leases is not None
        if after is not None:
            after.synchronize()
        if step.fenced or time.monotonic() >= step.deadline:
            raise DeadlineExceeded(f"step {step.number}: a load of layer {self._layer} came too late to be begun")
        with self._watchdog.in_flight(LANES[LOAD], step.number, self._layer):
            self._pool.load(extents, step.leases.holding(extents.arena))

    def save(self, extents: Extents, after: DeviceEvent | None = None) -> None:
        """Engine memory to the pool.

        :raises DeadlineExceeded: a lease of the step's room is about to end; nothing was copied.
        :raises PoolError: it is not known to be where it belongs; the object is not published then.
        """
        step = self._step
        assert step.leases is not None
        if after is not None:
            after.synchronize()
        # The watchdog ends the process if a save is under way when the first of the leases ends.
        if time.monotonic() >= step.leases.room_until - GRACE_S:
            raise DeadlineExceeded(f"step {step.number}: a save of layer {self._layer} came too late to be begun")
        with self._watchdog.in_flight(LANES[SAVE], step.number, self._layer):
            self._pool.save(extents, step.leases.holding(extents.arena))

    def drain(self) -> None:
        """Nothing is ever enqueued."""

    def close(self) -> None:
        """The pool's client outlives it."""
