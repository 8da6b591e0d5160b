"""The host's main thread: hears the server, attaches the backend, hands out work, and answers pings itself."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import structlog

from layerflow.backends import installed, named
from layerflow.errors import ProtocolError
from layerflow.hosts.backend import Backend, BackendInfo, Unreachable, Unusable
from layerflow.hosts.lanes import (
    BackendCalls,
    CallTimeout,
    FetchLane,
    HealthCheck,
    Hide,
    Lane,
    LookupLane,
    WriteLane,
    describe,
    refuse,
    unknown,
)
from layerflow.hosts.objects import IndexReporter
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import (
    STOP_S,
    Ask,
    Clear,
    Cleared,
    Down,
    Drop,
    EndFetch,
    EndWrite,
    Fetch,
    Fetched,
    Frames,
    Ping,
    Pong,
    Pull,
    Push,
    Start,
    Stop,
    ToHost,
    ToServer,
    Write,
    Written,
    decode_to_host,
    encode,
)

# Makes a backend by its name. None is imported before it is wanted.


def make(name: str, options: Mapping[str, Any]) -> Backend:
    """A backend that is not attached yet.

    :param name: an installed one, or ``module:Class`` (for tests; the configuration knows names only).
    :raises Unusable: there is none of that name, or it refuses its options.
    """
    known = installed()
    reference = known[name].backend if name in known else name
    if ":" not in reference:
        there = ", ".join(known) or "none: install layerflow again, so that its entry points are known"
        raise Unusable(f"backend {name!r} is not installed; there are {there}")
    try:
        factory = named(reference)
    except (ImportError, AttributeError) as error:
        raise Unusable(f"backend {name!r} cannot be loaded: {error}; is layerflow installed whole?") from error
    try:
        made = factory(options)
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"backend {name!r} cannot work with its options: {describe(error)}; see its section") from error
    if not isinstance(made, Backend):
        raise Unusable(f"{name!r} is no backend")
    return made


log = structlog.get_logger(__name__)

ENDED, HUNG, FATAL = 0, 1, 3
"""Exit codes: told to stop or left alone; a call hangs; and a backend that trying again would not help."""

CALL_MS = 5000
"""What a native call may take where the backend's options do not say it (`timeout_ms`)."""
HUNG_CALLS = 3
"""A lookup or check may be a few native calls; past so many times that it counts as hung. A check that hangs ends the
host. A lookup does not: with the host would go the memory that it gives to a shared pool, on all nodes at the same time
where the pool's service hangs."""

FIRST_RETRY_S, LAST_RETRY_S = 0.2, 2.0
ALONE_S = 0.5
"""How long leaving may take when the server is gone: its arena is nobody's. Told to, it is :data:`STOP_S`."""
CALLS_SHARE = 0.25
"""Of that, for calls under way; the rest is for closing."""
_READ_BYTES = 1 << 18


class _HostEnded(Exception):
    """:param alone: the server is gone; False = it said so."""

    def __init__(self, alone: bool) -> None:
        self.alone = alone


class HostMain:
    """One host, from the first message to the exit code.

    :param connection: to the server; blocking.
    :param arena: the server's, mapped here.
    """

    def __init__(self, connection: socket.socket, arena: SharedMemory) -> None:
        self._connection, self._arena = connection, arena
        self._sending = threading.Lock()
        self._frames = Frames()
        self._readable = select.poll()  # not select(): it knows no descriptors above 1023
        self._readable.register(connection, select.POLLIN)
        self._messages: deque[ToHost] = deque()
        self._holding = IndexReporter(self._tell)
        self._check: HealthCheck | None = None
        self._movers: tuple[Lane[Any], ...] = ()
        self._call_timeout = CallTimeout()

    def run(self) -> int:
        """Until the server says Stop or is gone, or the backend is unusable; the exit code.

        Threads of the backend or of a hung call may be left: the caller ends the process with ``os._exit``.
        """
        try:
            start = self._hear(None)
            if not isinstance(start, Start):
                log.error("host_misled", error=f"{type(start).__name__} before Start")
                return FATAL
            self._call_timeout = CallTimeout(start.options.get("timeout_ms", CALL_MS) / 1e3)
            backend = make(start.backend, start.options)
            backend.report_found(self._holding.found)
            self._holding.attach(self._attach(backend))
        except Unusable as error:
            self._tell(Down(str(error), fatal=True))
            return FATAL
        except _HostEnded:
            return ENDED
        self._serve(backend)
        return ENDED

    # Attaching -----------------------------------------------------------------------------------

    def _attach(self, backend: Backend) -> BackendInfo:
        said, delay = "", FIRST_RETRY_S
        while True:
            try:
                return backend.attach(self._arena, self._holding.gone)
            except Unusable:
                raise
            except Unreachable as error:
                reason = str(error)
            except Exception as error:
                reason = describe(error)
                if reason != said:
                    log.exception("backend_call_failed", call="attach", error=reason)
            if reason != said:
                self._tell(Down(reason))
                said = reason
            until = time.monotonic() + delay
            while (message := self._hear(until)) is not None:
                self._refuse(message, reason)
            delay = min(2 * delay, LAST_RETRY_S)

    def _refuse(self, message: ToHost, reason: str) -> None:
        """Answer what cannot be done now; what belongs to a job that was refused needs no answer."""
        match message:
            case Ping():
                self._pong(message)
            case Ask():
                self._tell(unknown(message, f"unreachable: {reason}"))
            case Clear():
                self._tell(Cleared(message.id, 0, f"unreachable: {reason}"))
            case Pull():
                self._tell(Fetched(message.id, message.call, tuple(refuse(message, f"unreachable: {reason}"))))
            case Push():
                self._tell(Written(message.id, message.call, tuple(refuse(message, f"unreachable: {reason}"))))
            case Stop():
                raise _HostEnded(alone=False)

    # Serving -------------------------------------------------------------------------------------

    def _serve(self, backend: Backend) -> None:
        check = HealthCheck(backend, lambda reason: self._tell(Down(reason)), self._holding.again, self._over)
        backend_calls = BackendCalls(check.suspect)
        ask = LookupLane(backend, self._tell, backend_calls)
        fetch = FetchLane(
            backend,
            self._arena,
            self._tell,
            backend_calls=backend_calls,
            hide=lambda keys: ask.put(Hide(keys)),
            call_timeout=self._call_timeout,
        )
        write = WriteLane(backend, self._arena, backend_calls, self._tell, self._call_timeout)
        self._check, self._movers = check, (fetch, write)
        parts = (ask, fetch, write, check)
        for part in parts:
            part.start()
        try:
            while True:
                message = self._hear(None)
                assert message is not None
                if check.reason and isinstance(message, Ask | Clear | Pull | Push):
                    self._refuse(message, check.reason)
                    continue
                match message:
                    case Ping():
                        self._pong(message)
                    case Ask() if time.monotonic() - ask.began > HUNG_CALLS * self._call_timeout.call_s:
                        self._tell(unknown(message, "an earlier lookup hangs in the backend"))
                    case Ask() | Clear():
                        ask.put((message, time.monotonic()))
                    case Fetch() | Pull() | EndFetch():
                        fetch.put(message)
                    case Write() | Push() | Drop() | EndWrite():
                        write.put(message)
                    case Stop():
                        raise _HostEnded(alone=False)
                    case Start():
                        log.error("host_misled", error="Start twice")
        except _HostEnded as ended:
            grace_s = ALONE_S if ended.alone else STOP_S
        last = threading.Timer(grace_s, os._exit, (ENDED,))
        last.daemon = True
        last.start()
        until = time.monotonic() + CALLS_SHARE * grace_s
        # Not under calls that still run: a library that is closed then may crash, or free what they use.
        if all([part.stop(max(0.0, until - time.monotonic())) for part in parts]):
            backend_calls.quietly("close", backend.close)

    def _over(self, reason: str) -> None:
        """From the check thread; the main thread may be anywhere."""
        self._tell(Down(reason, fatal=True))
        os._exit(FATAL)

    def _pong(self, message: Ping) -> None:
        if self._check is None:
            self._tell(Pong(message.id, {}))
            return
        if time.monotonic() - self._check.began > HUNG_CALLS * self._call_timeout.call_s:
            self._hang("a check")
        for name, lane in zip(("a fetch", "a write"), self._movers, strict=False):
            if time.monotonic() > lane.hung_at:
                self._hang(name)
        self._tell(Pong(message.id, self._check.statistics))

    def _hang(self, name: str) -> None:
        """A call has outlived its time: the end of the process is all that ends it."""
        self._tell(Down(f"{name} hangs in the backend"))
        os._exit(HUNG)

    # The socket ----------------------------------------------------------------------------------

    def _tell(self, message: ToServer) -> None:
        frame = encode(message)
        with self._sending:
            try:
                self._connection.sendall(frame)
            except OSError as error:  # the main thread reads the end of the socket, and ends this process
                log.warning("server_unreachable", message=type(message).__name__, error=str(error))

    def _hear(self, until: float | None) -> ToHost | None:
        """The next message; None: nothing came until then.

        :raises _Ended: the server is gone, or says what no server would.
        """
        while not self._messages:
            if until is not None:
                left_s = until - time.monotonic()
                if left_s <= 0 or not self._readable.poll(1e3 * left_s):
                    return None
            try:
                data = self._connection.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                raise _HostEnded(alone=True)
            try:
                self._messages += map(decode_to_host, self._frames.feed(data))
            except ProtocolError as error:
                log.error("host_misled", error=str(error))
                raise _HostEnded(alone=True) from None
        return self._messages.popleft()
