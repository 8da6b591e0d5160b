"""Calls into the memcache client, guarded: counted, checked for shape, never after it was closed.

What the library keeps by itself matters here. A copy goes through a table of the client, by address, and an
address gets into it by an allocation or a lease of this client only. What is not leased any more leaves the table
up to a second later. Until then a key that was evicted and allocated again is confused with what it was: writes to
it are skipped, without an error. So keys that the table may still have are told by :meth:`MemcacheClient.remembers`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from layerflow.hosts.backend import OK, ObjectResult, ObjectStatus, Unreachable, Unusable
from layerflow.hosts.shared.client import CLOSE_PATIENCE_S, ClientHandle
from layerflow.hosts.shared.service import Service
from layerflow.objects import HEADER_BYTES

# Calls to the MetaService, made by a thread that can be given up.
#
# The library waits a minute for an answer, whatever its configuration says: from a MetaService that hangs, and from one
# that has ended, though its connection to the next one is made meanwhile and other calls get through. Nobody else may
# wait so long: a lookup has its own deadline, and a lane that waited for a minute would be taken for a host that hangs.


ANSWER_S = 0.5
"""An answer that the MetaService gave before it ended has come by then."""
LOOK_S = 0.1
MAX_GIVEN_UP = 32
"""Calls that may be given up with no answer to another one in between. Past this only probes are made."""
MAX_THREADS = 256
"""Threads whose calls were given up and have not come back, for up to a minute. Past this no call is made."""

T = TypeVar("T")


class _NativeCall:
    """One call, and what came of it once `done` can be acquired."""

    __slots__ = ("answer", "call", "done", "error")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.answer: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        try:
            self.answer = self.call()
        except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
            self.error = error
        self.done.release()


class AbandonableCaller:
    """Makes calls for other threads, one at a time for each.

    :param generation: changes when the MetaService ends; see ``Service.generation``.
    :param answer_s: see :data:`ANSWER_S`.
    :param look_s: how often it looks whether the MetaService has ended, in seconds.
    """

    def __init__(self, generation: Callable[[], int], answer_s: float = ANSWER_S, look_s: float = LOOK_S) -> None:
        self._generation, self._answer_s, self._look_s = generation, answer_s, look_s
        self._lock = threading.Lock()
        self._queues: dict[int, SimpleQueue[_NativeCall | None]] = {}  # by the thread that asks
        self._given_up: list[_NativeCall] = []
        self._in_a_row = 0  # calls that were given up since the last answer

    def ask(self, call: Callable[[], T], until: float = math.inf, *, probing: bool = False) -> T:
        """What the call returns, or raises.

        :param until: so long it is waited for, on the monotonic clock.
        :param probing: the call is made although many in a row were given up: its answer lets others through again.
            What was asked over a connection that the library has lost comes back a minute later, though the
            MetaService may be well again by then.
        :raises Unreachable: no answer by then, or the MetaService has ended meanwhile. The call may come back later;
            nobody hears of it.
        """
        generation, pending = self._generation(), _NativeCall(call)
        with self._lock:
            self._given_up = [each for each in self._given_up if each.done.locked()]
            unanswered = len(self._given_up)
            if unanswered >= MAX_THREADS or (min(unanswered, self._in_a_row) >= MAX_GIVEN_UP and not probing):
                raise Unreachable(f"{unanswered} calls to memcache's MetaService are still unanswered")
            queue = self._queues.get(threading.get_ident())
            if queue is None:
                queue = self._queues[threading.get_ident()] = SimpleQueue()
                threading.Thread(target=_serve, args=(queue,), name="layerflow-meta", daemon=True).start()
            queue.put(pending)
        why = "memcache's MetaService did not answer in time"
        ended = False
        while not pending.done.acquire(timeout=max(0.0, min(self._look_s, until - time.monotonic()))):
            # Generation 0: it is not there now, but the library may not have seen that yet.
            if not ended and (not generation or self._generation() != generation):
                ended, why = True, "memcache's MetaService ended while it was asked"
                until = min(until, time.monotonic() + self._answer_s)
            if time.monotonic() >= until:
                with self._lock:
                    self._given_up.append(pending)
                    self._in_a_row += 1
                    queue.put(None)  # the next call of this thread is made by another one
                    self._queues.pop(threading.get_ident(), None)
                raise Unreachable(why)
        with self._lock:
            self._in_a_row = 0
        if pending.error is not None:
            raise pending.error
        answer: T = pending.answer
        return answer

    def close(self) -> None:
        """End the threads, once what they were asked has come back; the next calls have others."""
        with self._lock:
            for queue in self._queues.values():
                queue.put(None)
            self._queues.clear()


def _serve(calls: SimpleQueue[_NativeCall | None]) -> None:
    while (pending := calls.get()) is not None:
        pending.run()


# What memcache_hybrid's return codes mean here. Each was seen with 1.3.0 against a real MetaService.


INVALID = -3000
TIMED_OUT = -3004
NOT_THERE = -3007
UNLINKED = -3014
NO_CLIENT = -3019
WRONG_STATE, UNKNOWN = -3101, -3102
LEASE_OVER = -3106
UNANSWERED = frozenset((TIMED_OUT, UNLINKED, -3017, -3018, NO_CLIENT))
"""The MetaService did not answer, or the client is not there; nothing is known of the object."""

_WORDS = {
    -1: "failed",
    -2: "the copy failed: is the client alive that gave the memory, and known to this one?",
    INVALID: "invalid parameters, or a key that this client did not open",
    -3001: "no memory in the client",
    TIMED_OUT: "the MetaService did not answer in time",
    NOT_THERE: "it is not there",
    -3008: "not initialised",
    UNLINKED: "no connection to the MetaService",
    -3016: "no memory",
    -3017: "the MetaService is not connected",
    -3018: "the client's memory is not connected",
    NO_CLIENT: "the client is not initialised, or closed",
    WRONG_STATE: "it is not complete, or not to be written",
    UNKNOWN: "it is not there, or not leased by this client",
    -3103: "an impossible change of its state",
    -3104: "it is leased",
    -3105: "its entry could not be backed up",
    LEASE_OVER: "its lease ran out",
}
_LEASING = {
    -1: ObjectStatus.MISSING,  # in this client's table, another object is in its place: one that left a moment ago
    NOT_THERE: ObjectStatus.MISSING,
    UNKNOWN: ObjectStatus.MISSING,
    WRONG_STATE: ObjectStatus.MISSING,
}
_READING = {LEASE_OVER: ObjectStatus.EXPIRED, UNKNOWN: ObjectStatus.EXPIRED}


def explain(code: int) -> str:
    """A code in words, for people who look it up too."""
    return f"memcache says {code}: {_WORDS.get(code, 'unknown to layerflow')}"


def leasing(code: int) -> ObjectResult:
    """Say what a code of ``batch_add_lease`` means."""
    return _result(code, _LEASING)


def reading(code: int) -> ObjectResult:
    """Say what a code of ``batch_copy`` out of the pool means; under a lease, what is not known has expired."""
    return _result(code, _READING)


def writing(code: int) -> ObjectResult:
    """Say what a code of ``batch_copy`` into the pool, or of ``batch_write_finish``, means."""
    return _result(code, {})


def _result(code: int, outcomes: dict[int, ObjectStatus]) -> ObjectResult:
    return OK if code == 0 else ObjectResult(outcomes.get(code, ObjectStatus.FAILED), explain(code))


G2H, H2G = 2, 3
"""Pool to host, host to pool."""
_SWEEP_S = 2.5
"""The library's own period is one second."""
CALL_S = 5.0
"""What a call to the MetaService may take where the options do not say it (`timeout_ms`)."""


class ObjectInfo(NamedTuple):
    """What the MetaService has under a key: bytes (0 = nothing), and its address in the pool."""

    nbytes: int
    gva: int


class AddressRange(NamedTuple):
    """Bytes to copy between the pool and this process."""

    gva: int
    address: int
    nbytes: int


@dataclass(slots=True)
class _Known:
    """A key in the library's table. :param until: it is gone then, once there are no leases."""

    leases: int = 0
    until: float = 0.0


class MemcacheClient(ClientHandle):
    """A client while it is connected. Any thread; none of these calls holds the GIL.

    :param meta: nothing is asked of it while it is ill.
    :param call_s: what a call to it may take.
    """

    def __init__(self, meta: Service, call_s: float = CALL_S) -> None:
        super().__init__("the memcache client is not connected")
        self._meta, self.call_s = meta, call_s
        self._asker = AbandonableCaller(lambda: meta.generation)
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._lost: dict[str, float] = {}
        self._unleased: list[str] = []
        self.unlinked = False  #: the MetaService did not answer the last call

    def open(self, store: Any) -> None:
        """Calls go to `store` from now on."""
        with self._lock:
            self._known.clear()
            self._lost.clear()
            self._unleased.clear()
        self.unlinked = False
        super().open(store)

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> bool:
        """See :meth:`ClientHandle.close`. Takes two to three seconds, and holds the GIL; else the process aborts."""
        closed = super().close(patience_s)
        if closed:
            self._asker.close()
        return closed

    # Metadata: one message to the MetaService each ----------------------------------------------

    def exists(self, names: Sequence[str], until: float = math.inf) -> list[int]:
        """1 = complete."""
        return self._codes("batch_is_exist", names, until=until)

    def probe(self) -> None:
        """Where the last call was not answered: is the next one? The library connects again by itself.

        :raises Unreachable: no.
        """
        if self.unlinked:
            answers = self._call("batch_is_exist", ["layerflow-probe"], probing=True)
            self._backend_calls(answers or [NO_CLIENT])

    def info(self, names: Sequence[str], *, complete: bool) -> list[ObjectInfo]:
        """:param complete: nothing of what is still being written."""
        if not names:
            return []
        answers = self._call("batch_get_key_info", list(names), int(complete))
        if len(answers) != len(names):
            self._backend_calls([NO_CLIENT])
        found = [(each.size(), each.gva_list()) for each in answers]
        return [ObjectInfo(size, gvas[0]) if size and gvas else ObjectInfo(0, 0) for size, gvas in found]

    def lease(self, names: Sequence[str], ttl_ms: int) -> list[int]:
        """0 = leased, and its address may be read by this client."""
        codes = self._codes("batch_add_lease", names, ttl_ms)
        with self._lock:
            for name, code in zip(names, codes, strict=True):
                if code == 0:
                    self._known.setdefault(name, _Known()).leases += 1
        return codes

    def unlease(self, names: Sequence[str]) -> None:
        """Give leases back, without waiting for the MetaService; what cannot be given back runs out. Never raises.

        The library must be told in any case, later if the MetaService is ill now: it counts leases by itself, and takes
        the place of an object that it believes leased for that object's until the process ends.
        """
        with self._lock:
            for name in names:
                known = self._known.setdefault(name, _Known())
                known.leases = max(0, known.leases - 1)
                known.until = time.monotonic() + _SWEEP_S
            self._unleased += names
        self.give_back()

    def give_back(self) -> None:
        """Leases that could not be given back while the MetaService was ill. Never raises."""
        if self._meta.ill:
            return
        with self._lock:
            names, self._unleased = self._unleased, []
        try:
            # The library gives back none after the first that it does not know.
            if names and self._call("batch_remove_lease", names) != 0 and len(names) > 1:
                for name in names:
                    self._call("batch_remove_lease", [name])
        except Unreachable:
            self.count("leases_left", len(names))

    def allocate(self, names: Sequence[str], sizes: Sequence[int], ttl_ms: int) -> list[int]:
        """Addresses; 0 = no room. Of a key that is there already: its address, whatever its size."""
        return self._shaped("batch_alloc", names, list(sizes), 1, ttl_ms)

    def finish(self, names: Sequence[str]) -> list[int]:
        """Publish; 0 = done."""
        codes = self._codes("batch_write_finish", names, [0] * len(names))
        with self._lock:
            until = time.monotonic() + _SWEEP_S
            for name in names:
                self._known.setdefault(name, _Known()).until = until
        return codes

    def remove(self, names: Sequence[str]) -> list[int]:
        """0 = gone, from the library's table too; its memory is kept until leases on it have run out."""
        codes = self._codes("remove_batch", names)
        with self._lock:
            for name, code in zip(names, codes, strict=True):
                if code == 0:
                    self._known.pop(name, None)
        return codes

    # Data: no message to the MetaService --------------------------------------------------------

    def copy(self, spans: Sequence[AddressRange], direction: int, until: float) -> list[int]:
        """A code for each. The library has one for all, so where that is an error each is tried by itself."""
        if not all(span.nbytes for span in spans):  # which the library refuses
            copied = iter(self.copy([span for span in spans if span.nbytes], direction, until))
            return [next(copied) if span.nbytes else 0 for span in spans]
        if not spans:
            return []
        code = self._copy(spans, direction)
        if code == 0 or len(spans) == 1:
            return [code] * len(spans)
        codes = []
        for span in spans:
            if time.monotonic() < until:
                code = self._copy([span], direction)
            codes.append(code)
        return codes

    def move(self, gvas: list[int], addresses: list[int], sizes: list[int], direction: int) -> int:
        """As :meth:`copy`, of columns and with the library's one code for all."""
        code = int(self._call("batch_copy", gvas, addresses, sizes, direction, data=True))
        if code not in (0, INVALID, UNKNOWN):
            self.count("failed_calls")
        return code

    def register(self, address: int, nbytes: int) -> int:
        """Make memory of this process known to the transport; 0 = done."""
        return int(self._call("register_buffer", address, nbytes, data=True))

    # ---------------------------------------------------------------------------------------------

    def remembers(self, name: str) -> bool:
        """Whether the library's table may still have this key, from a read or a write that is over or going on."""
        now = time.monotonic()
        with self._lock:
            if len(self._known) > 1024:
                self._known = {name: known for name, known in self._known.items() if known.leases or known.until > now}
            known = self._known.get(name)
            return known is not None and (known.leases > 0 or known.until > now)

    def lose(self, name: str, until: float) -> None:
        """Count a key as lost that is another writer's: the client takes it for unfinished until then."""
        now = time.monotonic()
        with self._lock:
            self._lost = {name: until for name, until in self._lost.items() if until > now} | {name: until}

    def lost(self) -> list[str]:
        """See :meth:`lose`."""
        now = time.monotonic()
        with self._lock:
            return [name for name, until in self._lost.items() if until > now]

    def forget_lost(self, names: Sequence[str]) -> None:
        """Count keys as lost no more."""
        with self._lock:
            for name in names:
                self._lost.pop(name, None)

    def _codes(self, method: str, names: Sequence[str], *arguments: Any, until: float = math.inf) -> list[int]:
        """:raises Unreachable: the MetaService answered for none of them."""
        codes = self._shaped(method, names, *arguments, until=until)
        self._backend_calls(codes)
        return codes

    def _shaped(self, method: str, names: Sequence[str], *arguments: Any, until: float = math.inf) -> list[int]:
        if not names:
            return []
        answers: list[int] = self._call(method, list(names), *arguments, until=until)
        return answers if len(answers) == len(names) else [NO_CLIENT] * len(names)

    def _backend_calls(self, codes: Sequence[int]) -> None:
        self.unlinked = bool(codes) and all(code in UNANSWERED for code in codes)
        if self.unlinked:
            self.count("failed_calls")
            raise Unreachable(f"{explain(codes[0])}; is the MetaService running?")

    def _copy(self, spans: Sequence[AddressRange], direction: int) -> int:
        gvas, addresses, sizes = (list(column) for column in zip(*spans, strict=True))
        return self.move(gvas, addresses, sizes, direction)

    def _call(
        self, method: str, *arguments: Any, data: bool = False, probing: bool = False, until: float = math.inf
    ) -> Any:
        """One call of the library.

        :param data: it asks the MetaService nothing.
        :param probing: it is made although the MetaService is ill.
        :param until: how long an answer is waited for, at most as long as any call may take.
        :raises Unreachable: there is no client, it was closed, or the MetaService is ill, ends or does not answer.
        """

        def call() -> Any:
            with self.client() as store:
                self.count("copy_calls" if data else "metadata_calls")
                return getattr(store, method)(*arguments)

        if data:
            return call()
        if self._meta.ill and not probing:
            raise Unreachable(self._meta.ill)
        try:
            return self._asker.ask(call, min(until, time.monotonic() + self.call_s), probing=probing)
        except Unreachable:
            self.unlinked = True
            self.count("failed_calls")
            raise


# Objects' headers in memcache, read and written through memory of our own.


SLOTS = 1024


class HeaderBuffer:
    """Room for :data:`SLOTS` headers, and one header of zeros. One thread's.

    :raises Unusable: the transport refuses the memory.
    """

    def __init__(self, calls: MemcacheClient) -> None:
        self._calls = calls
        self._memory = mmap.mmap(-1, (SLOTS + 1) * HEADER_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._zeros = self._address + SLOTS * HEADER_BYTES
        code = calls.register(self._address, len(self._memory))
        if code != 0:
            raise Unusable(f"memcache cannot register memory ({explain(code)}); raise the limit of locked memory")

    def read(self, gvas: Sequence[int], until: float) -> Iterator[tuple[int, bytes]]:
        """For each address in the pool the code of the copy, and the header there."""
        for first in range(0, len(gvas), SLOTS):
            batch = gvas[first : first + SLOTS]
            spans = [AddressRange(gva, self._address + at * HEADER_BYTES, HEADER_BYTES) for at, gva in enumerate(batch)]
            for at, code in enumerate(self._calls.copy(spans, G2H, max(until, time.monotonic() + 0.1))):
                yield code, self._memory[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]

    def blank(self, gvas: Sequence[int], until: float) -> list[int]:
        """Write zeros where headers will be; a code for each."""
        return self._calls.copy([AddressRange(gva, self._zeros, HEADER_BYTES) for gva in gvas], H2G, until)


OBJECTS = 16
"""The MetaService spreads them over the clients that give memory."""
LEASE_MS = 2000


def reaches_all(calls: MemcacheClient, scratch: HeaderBuffer) -> bool:
    """Write a few bytes wherever the MetaService allocates; nothing of it becomes visible.

    :raises Unreachable: the MetaService does not answer.
    """
    nonce = os.urandom(8).hex()
    names = [f"layerflow-trial-{nonce}-{at}" for at in range(OBJECTS)]
    gvas = calls.allocate(names, [HEADER_BYTES] * OBJECTS, LEASE_MS)
    given = [at for at, gva in enumerate(gvas) if gva]
    try:
        codes = scratch.blank([gvas[at] for at in given], time.monotonic() + LEASE_MS / 1e3)
    finally:
        calls.remove([names[at] for at in given])
    return not any(codes)
