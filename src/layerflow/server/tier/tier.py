"""The tier behind the arena: a shared pool or a disk, moved by one host process.

It is asked by lookups, brings objects into the arena ahead of the steps that load them, and receives
what steps save. Everything here is bookkeeping on the server's loop; a tier that is slow, down or dead
costs its own transfers and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from layerflow.config.settings import PoolSettings
from layerflow.expiring import ExpiringSet
from layerflow.flow.events import Event, HostLost, WriteOpened
from layerflow.hosts.backend import IndexEntry, ObjectStatus
from layerflow.keys import KEY_BYTES, describe_key
from layerflow.observe.collectors import TierStatistics
from layerflow.pool.base import NewObject, Pool
from layerflow.pool.chunk_index import NO_CHUNKS, ChunkIndex
from layerflow.server.account import Charge
from layerflow.server.incoming import IncomingFetches, IncomingObject, IncomingObjects, StepKey
from layerflow.server.mailboxes import Answer
from layerflow.server.tier.host import HostProcess
from layerflow.server.tier.index import MAX_RECENT_CHUNKS, TierIndex
from layerflow.server.tier.partitions import PartitionRegistry
from layerflow.server.tier.writes import WriteCommand, Writes
from layerflow.system.numbers import ascending
from layerflow.wire.host_messages import (
    Ask,
    Clear,
    Cleared,
    Down,
    Evicted,
    Fetched,
    Indexed,
    Pong,
    Present,
    ToHost,
    ToServer,
    Up,
    split_keys,
)
from layerflow.wire.host_messages import Written as WrittenMessage
from layerflow.wire.packing import list_u32

# Which objects the backend has, asked of its host: equal questions once, each answered by its deadline.


ASKED_KEYS = 4096
"""Keys that the host is asked for at a time for one client. What a client asks for beyond waits until the host has
answered that: whoever asks for little does not wait for whoever asks for much."""


@dataclass(slots=True, eq=False)
class Asker:
    """One who has asked. :param keys: of the questions that the host has. :param waiting: numbers of the others."""

    name: Hashable
    keys: int = 0
    waiting: deque[int] = field(default_factory=deque)


@dataclass(slots=True)
class PendingLookup:
    """A lookup that waits for the host, and equal ones that came meanwhile.

    :param timer: its deadline's.
    :param sent: the host has it.
    """

    asker: Asker
    packed: bytes
    on_done: list[Callable[[frozenset[bytes]], None]]
    timer: asyncio.TimerHandle
    sent: bool = False

    @property
    def keys(self) -> int:
        """How many are asked for."""
        return len(self.packed) // KEY_BYTES


class Questions:
    """The questions under way.

    :param send: to the host; False = there is none.
    :ivar unanswered: those whose deadline came before their answer.
    """

    def __init__(self, send: Callable[[ToHost], bool]) -> None:
        self._send = send
        self._pending: dict[int, PendingLookup] = {}
        self._by_keys: dict[bytes, int] = {}
        self._askers: dict[Hashable, Asker] = {}
        self._numbers = ascending()
        self.asked = self.asked_keys = self.unanswered = 0

    def ask(
        self,
        name: Hashable,
        packed: bytes,
        on_done: Callable[[frozenset[bytes]], None],
        timeout_s: float,
    ) -> None:
        """Call `on_done` once with those keys that are there; with none of them where no answer comes in time.

        :param name: of the one who asks, whose other questions it waits behind; see :data:`ASKED_KEYS`.
        :param packed: the keys, of 24 bytes each: a question that waits keeps no more of them.
        """
        if packed in self._by_keys:
            self._pending[self._by_keys[packed]].on_done.append(on_done)
            return
        number = self._by_keys[packed] = next(self._numbers)
        asker = self._askers.setdefault(name, Asker(name))
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expired, number)
        self._pending[number] = question = PendingLookup(asker, packed, [on_done], timer)
        self.asked += 1
        self.asked_keys += question.keys
        asker.waiting.append(number)
        self._go_on(asker)

    def answered(self, message: Present) -> None:
        """The host's answer; perhaps to a question that has expired."""
        question = self._pending.get(message.id)
        if question is not None:
            self._answer(message.id, frozenset(itertools.compress(split_keys(question.packed), message.present)))
            self._go_on(question.asker)

    def give_up(self) -> None:
        """The backend is down: nothing is there."""
        for number in list(self._pending):
            self._answer(number, frozenset())
        for asker in list(self._askers.values()):
            self._go_on(asker)

    def _expired(self, number: int) -> None:
        self.unanswered += 1
        asker = self._pending[number].asker
        self._answer(number, frozenset())
        self._go_on(asker)

    def _go_on(self, asker: Asker) -> None:
        """Send what an asker has waiting, as far as it may."""
        while asker.waiting:
            number = asker.waiting[0]
            question = self._pending.get(number)
            if question is not None and asker.keys and asker.keys + question.keys > ASKED_KEYS:
                return
            asker.waiting.popleft()
            if question is None:  # its deadline has come meanwhile
                continue
            question.sent = True
            asker.keys += question.keys
            left_s = question.timer.when() - asyncio.get_running_loop().time()
            if not self._send(Ask(number, question.packed, max(1, round(left_s * 1e3)))):
                self._answer(number, frozenset())
        if not asker.keys and self._askers.get(asker.name) is asker:
            del self._askers[asker.name]

    def _answer(self, number: int, present: frozenset[bytes]) -> None:
        question = self._pending.pop(number, None)
        if question is not None:
            question.timer.cancel()
            del self._by_keys[question.packed]
            if question.sent:
                question.asker.keys -= question.keys
            for on_done in question.on_done:
                on_done(present)


FREED_PER_SLICE = 2048
"""Entries of an index of no use any more that are freed before anything else may get its turn."""

CLEARED_PER_SLICE = 16_384
"""Keys of a purge that the host is told of in one message, some 2 ms; it is told of more once it has read that."""

ANSWER_S = 0.5
"""Of the time that a purge has, what is left for the answer to come back."""

MAX_HIDDEN_KEYS = 65_536
"""Objects that are not offered at a time; of more, those whose read failed first are offered again."""
HIDE_S = 30.0
"""How long an object whose read failed is not offered: long enough for an engine to recompute and store it anew."""
OFFERED_AGAIN_AT_ONCE = 1024
"""Hidden objects whose time is over of which the rest of the server hears in one round of its housekeeping."""
ASK_S = 5.0
"""How long the backend may take to say which partitions are noted: nobody waits for it."""


class Tier:
    """What lies behind the arena of one server.

    :param name: the backend's.
    :param options: the backend's section of the configuration.
    :param emit: gives events to the core.
    :param changed: hears the key of what it lists or lists no more, as of :meth:`lists`.
    :param turned: called when all that it has may come or go at once.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        settings: PoolSettings,
        *,
        pool: Pool,
        arena: tuple[int, int],
        emit: Callable[[Sequence[Event]], None],
        incoming: IncomingObjects,
        changed: Callable[[bytes], None],
        turned: Callable[[], None],
    ) -> None:
        self.name = name
        self.settings = settings
        self.up = False
        self.indexed = False
        self.details: dict[str, Any] = {}
        self.reason = "starting"
        self._outcomes: Counter[str] = Counter()
        self._log = structlog.get_logger("layerflow.server.tier.tier")
        self._changed, self._turned = changed, turned
        self._index = TierIndex(changed)
        self._generation = self._coming = 0  # of the host's index: which is whole here, and which is being told
        self._recent = ChunkIndex(MAX_RECENT_CHUNKS)  # of a backend without an index: what this server wrote to it
        self._hidden: ExpiringSet[bytes] = ExpiringSet(MAX_HIDDEN_KEYS)  # their last read failed: a retry must not loop
        self._clearing: dict[int, asyncio.Future[Cleared]] = {}
        self._withheld = 0  # purges under way
        self._numbers = ascending()
        self._host = HostProcess(name, options, *arena, self)
        self._questions = Questions(self._host.send)
        self._incoming = incoming
        self._fetches = IncomingFetches(incoming, self._host.send, self._read_failed)
        self.partitions = PartitionRegistry(pool, self._host.send, self._which, lambda: self.up)
        self._emit = emit
        self._writes = Writes(pool, self._host.send, emit, self._written, self._write_failed)

    def start(self) -> None:
        """Start the host; the server serves from the arena until it is up."""
        self._host.start()

    async def drain(self) -> None:
        """Until everything that steps have committed is written."""
        await self._writes.idle()

    async def close(self) -> bool:
        """Stop the host. True: nothing of it can touch the arena any more; see :meth:`HostProcess.close`."""
        return await self._host.close()

    # Lookups -------------------------------------------------------------------------------------

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which of `keys` can be brought for certain: those on their way, and those in the tier's index."""
        known = self._index if self._offering else ()
        hidden = self._hidden.among(keys, time.monotonic())
        coming = self._fetches.among(keys)
        return [come or (key in known and key not in hidden) for key, come in zip(keys, coming, strict=True)]

    def lists(self, key: bytes) -> bool:
        """Is the object in the tier's index, and can it be read? Of a tier without an index it is not known."""
        return self._offering and key in self._index and not self._hidden.among([key], time.monotonic())

    async def ask(self, keys: bytes, charge: Charge, until: float) -> frozenset[bytes]:
        """Ask the backend which of `keys` can be brought; one with an index has said so already.

        :param keys: of 24 bytes each.
        :param charge: of the client that waits.
        :param until: the answer comes by then, monotonic seconds.
        """
        if not self._offering or self.indexed:
            return frozenset()
        hidden = self._hidden.among(split_keys(keys), time.monotonic())
        if hidden:
            keys = b"".join(key for key in split_keys(keys) if key not in hidden)
        timeout_s = until - time.monotonic()
        if not keys or timeout_s <= 0:
            return frozenset()
        answer = Answer[frozenset[bytes]](charge)
        self._questions.ask(charge.account, keys, answer.tell, timeout_s)
        return await answer

    def _which(self, keys: Sequence[bytes], on_done: Callable[[frozenset[bytes]], None]) -> None:
        """Which of these are in the backend?"""
        if self.indexed:
            on_done(frozenset(key for key in keys if key in self._index))
        else:
            self._questions.ask(self, b"".join(keys), on_done, ASK_S)

    def hide(self, keys: Sequence[bytes]) -> int:
        """Do not offer these for a while: reading them has failed. Return how many they are."""
        for key in keys:
            self._hide(key)
        return len(keys)

    def expire(self, now: float) -> None:
        """Offer again what was hidden for long enough, some at a time. `now`: monotonic seconds."""
        for key in self._hidden.expire(now, OFFERED_AGAIN_AT_ONCE):
            self._changed(key)

    def _hide(self, key: bytes) -> None:
        forgotten = self._hidden.add(key, time.monotonic() + HIDE_S)
        self._changed(key)
        if forgotten is not None:
            self._changed(forgotten)

    @property
    def chunks(self) -> ChunkIndex:
        """Chunks that can be brought. Of a backend without an index: whether they are there is to be asked."""
        if not self._offering:
            return NO_CHUNKS
        return self._index.chunks if self.indexed else self._recent

    # Loads ---------------------------------------------------------------------------------------

    def bring(self, objects: Sequence[NewObject], layers: Sequence[int], engine: str) -> None:
        """Fetch objects of one group that are not in the arena, as far as that can be; see :meth:`coming`.

        :param layers: the model's layer numbers of the group.
        :param engine: for which.
        """
        if not self._offering:
            return
        hidden = self._hidden.among([new.key for new in objects], time.monotonic())
        coming = self._incoming.coming
        missing = [
            new
            for new in objects
            if new.key not in hidden and new.key not in coming and (not self.indexed or new.key in self._index)
        ]
        if missing:
            self._fetches.begin(missing, layers, engine)

    def coming(self, key: bytes) -> IncomingObject | None:
        """An object's room in the arena while it is on its way from the backend."""
        return self._fetches.coming(key)

    def revoke_writes(self, reason: str) -> int:
        """What is on its way to the backend is not published there. How many objects."""
        return self._writes.revoke(reason)

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Meanwhile nothing is offered or brought; saves are written as always.

        Whoever asks for what is being removed would bring it into the arena, behind the purge that has emptied that.
        """
        self._withheld += 1
        self._questions.give_up()
        self._turned()
        try:
            yield
        finally:
            self._withheld -= 1
            self._turned()

    @property
    def _offering(self) -> bool:
        return self.up and not self._withheld

    async def clear(self, keys: Sequence[bytes], timeout_s: float) -> Cleared:
        """Remove what the backend holds, once writes under way have ended.

        :param keys: what to remove from a backend that cannot tell what it holds.
        """
        number, loop = next(self._numbers), asyncio.get_running_loop()
        until = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._writes.ended()
                named = () if self.indexed else keys
                start = 0
                while (left_s := until - ANSWER_S - time.monotonic()) > 0:
                    few = named[start : start + CLEARED_PER_SLICE]
                    start += len(few)
                    answer: asyncio.Future[Cleared] = loop.create_future()
                    self._clearing[number] = answer
                    clear = Clear(number, b"".join(few), max(1, round(left_s * 1e3)), start == len(named))
                    if not self._host.send(clear):
                        return Cleared(number, 0, "its host process is not running; purge again when it is")
                    cleared = await answer
                    if cleared.reason or start == len(named):
                        return cleared
                why = "could not be told of all objects"
        except TimeoutError:
            why = "did not answer"
        finally:
            self._clearing.pop(number, None)
        return Cleared(number, 0, f"it {why} within {timeout_s:g} s, and offers what it still has; purge again")

    def obey(self, command: WriteCommand) -> None:
        """What the core wants done on the way to the tier."""
        self._writes.obey(command)

    # Saves ---------------------------------------------------------------------------------------

    def plan(
        self,
        step: StepKey,
        source: str,
        group: int,
        *,
        layers: int,
        placed: Sequence[tuple[NewObject, int]],
        parts: Sequence[int],
    ) -> list[WriteOpened]:
        """A step is about to save these at these places; see :meth:`Writes.plan`. What to tell the core then."""
        return [self._writes.plan(step, source, group, layers=layers, placed=placed, parts=parts)] if self.up else []

    def committed(self, step: StepKey, keys: Sequence[bytes]) -> None:
        """Note that these are whole in the arena."""
        self._writes.committed(step, keys)

    def writing(self, keys: Sequence[bytes]) -> set[int]:
        """The writes, by number, with which some of `keys` are on their way into the tier."""
        return self._writes.writing(keys)

    def when_written(self, writes: Iterable[int], on_done: Callable[[], None]) -> Callable[[], None]:
        """Call `on_done` once all of these have ended; see :meth:`Writes.when_ended`."""
        return self._writes.when_ended(writes, on_done)

    # The host ------------------------------------------------------------------------------------

    def host_said(self, message: ToServer) -> None:
        """News from the host."""
        match message:
            case Fetched() if not self.partitions.call_ended(message):
                self._fetches.call_ended(message)
            case WrittenMessage() if not self.partitions.call_ended(message):
                self._writes.call_ended(message)
            case Present():
                self._questions.answered(message)
            case Up():
                self._raise(message)
            case Indexed():
                self._hold(message)
            case Evicted():
                self._index.discard(split_keys(message.keys))
            case Down():
                self._lower(message.reason)
            case Cleared():
                waiting = self._clearing.pop(message.id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Pong() | Fetched() | WrittenMessage():
                pass

    def host_stuck(self, why: str) -> None:
        """The host was killed and does not die: what it was given of the arena is given to no other until it does."""
        self._lower(why)

    def host_lost(self, why: str) -> None:
        """The host is dead and will be started anew."""
        self._lower(why)
        self.partitions.lost()
        fetching, writing = self._fetches.coming_objects, self._writes.pending_objects
        self._emit([HostLost(f"the host process is gone: {why}")])
        if fetching:  # counted, and not shunned: the objects may be well
            self._outcomes["fetch_failed"] += fetching
        if writing:
            self._outcomes["write_failed"] += writing

    def segment_warmth(self) -> tuple[int, int] | None:
        """Bytes touched, and bytes in all, of memory that the backend gives to a shared pool; None = it gives none."""
        figures = self._host.statistics
        warm, total = figures.get("segment_warm_bytes", 0), figures.get("segment_bytes", 0)
        return (int(warm), int(total)) if warm else None

    def statistics(self) -> TierStatistics:
        """A snapshot."""
        fetches, writes = self._fetches, self._writes
        return TierStatistics(
            up=self.up,
            restarts=self._host.state.restarts,
            indexed_objects=len(self._index),
            shunned_objects=len(self._hidden),
            fetching_jobs=len(fetches),
            writing_jobs=len(writes),
            backlog_bytes=writes.backlog_bytes,
            lookups=self._questions.asked,
            lookup_keys=self._questions.asked_keys,
            unanswered_lookups=self._questions.unanswered,
            fetched_objects=fetches.fetched_objects,
            fetched_bytes=fetches.fetched_bytes,
            fetches_without_room=fetches.refused,
            written_objects=writes.written_objects,
            written_bytes=writes.written_bytes,
            written_at=writes.written_at,
            shed_objects=writes.shed_objects,
            failures=dict(self._outcomes),
        )

    def status(self) -> dict[str, object]:
        """For ``layerflow status``: the snapshot, and what the backend and its host say of themselves."""
        return {
            "backend": self.name,
            "reason": "" if self.up else self._host.state.reason or self.reason,
            "details": self.details,
            "host": dataclasses.asdict(self._host.state),
            "backend_figures": dict(self._host.statistics),
            "noted": self.partitions.recorded(),
            **dataclasses.asdict(self.statistics()),
        }

    def _lower(self, reason: str) -> None:
        if self.up or self.reason != reason:
            self._log.warning("tier_down", backend=self.name, reason=reason)
        was_up, self.up, self.reason = self.up, False, reason
        if was_up:
            self._turned()
        self._questions.give_up()
        for number, waiting in self._clearing.items():
            if not waiting.done():
                waiting.set_result(Cleared(number, 0, reason))

    def _raise(self, message: Up) -> None:
        """Let the tier be used: at once, but for an index that is still to be told."""
        self.reason, self.details, self.indexed = "", message.details, message.indexed
        whole = message.indexed and message.generation == self._generation
        if not whole:
            self._free(self._index)
            self._index = TierIndex(self._changed)
            self._generation, self._coming = 0, message.generation
        self.up = whole or not message.indexed
        self._log.info("tier_up", backend=self.name, **message.details)
        self._turned()
        if self.up:
            self.partitions.refresh()

    def _free(self, index: TierIndex) -> None:
        """In slices: a million entries take half a second."""
        if index.free(FREED_PER_SLICE):
            asyncio.get_running_loop().call_soon(self._free, index)

    def _hold(self, message: Indexed) -> None:
        parents, digests = dict(message.parents), dict(message.block_digests)
        rows = zip(split_keys(message.keys), list_u32(message.blocks), list_u32(message.tokens), strict=True)
        self._index.add(
            IndexEntry(key, blocks, tokens, parents.get(at, b""), digests.get(at, b""))
            for at, (key, blocks, tokens) in enumerate(rows)
        )
        if message.last and self._coming:
            self._generation, self._coming = self._coming, 0
            if not self.reason:  # else it is away again by now
                self.up = True
                self._turned()
                self.partitions.refresh()

    def _read_failed(self, key: bytes, outcome: int, reason: str) -> None:
        name = ObjectStatus(outcome).name.lower()
        self._outcomes[f"fetch_{name}"] += 1
        if outcome == ObjectStatus.BROKEN:
            self._index.discard([key])
        self._hide(key)
        self._log.warning("fetch_failed", backend=self.name, key=describe_key(key), outcome=name, reason=reason)

    def _written(self, new: NewObject) -> None:
        """An index has been told of it by now, in the order in which objects come and go; it may have left again."""
        if self._hidden.discard(new.key):
            self._changed(new.key)
        if not self.indexed and new.block_digests:
            self._recent.add(new.key, new.tokens, block_digests=new.block_digests)

    def _write_failed(self, key: bytes, outcome: int, reason: str) -> None:
        name = ObjectStatus(outcome).name.lower()
        self._outcomes[f"write_{name}"] += 1
        if outcome == ObjectStatus.EXISTS:
            if self._hidden.discard(key):
                self._changed(key)
        else:
            self._log.warning("write_failed", backend=self.name, key=describe_key(key), outcome=name, reason=reason)
