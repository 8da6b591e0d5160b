"""Keeps one host process running: spawned, talked to, watched, its output logged, started anew when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import IO, Any, Protocol

import structlog

from layerflow.errors import LayerflowError, ProtocolError
from layerflow.hosts.environment import environment, takes_long
from layerflow.observe.logs import LEVELS
from layerflow.system.numbers import ascending
from layerflow.wire.host_messages import (
    STOP_S,
    Down,
    Frames,
    Ping,
    Pong,
    Start,
    Stop,
    ToHost,
    ToServer,
    Up,
    decode_to_server,
    encode,
)

# What a host prints, as structured logs. Native libraries are chatty: there is a limit.


WINDOW_S = 10.0
WINDOW_LINES = 200
"""So many lines in each window are logged; of the rest only the number."""

LINE_CHARS = 2000
RECORD_BYTES = 64 << 10
"""The longest line that is kept whole until its end comes: our own ones carry traces."""
_READ_BYTES = 1 << 16
_LAST_READS = 16  # what a dead process may have left in a pipe: 64 KiB, or 1 MiB where somebody enlarged it
_OURS = ("timestamp", "level", "event", "logger")

log = structlog.get_logger("layerflow.server.tier.host")


class Throttle:
    """Counts lines over all streams of one host, through all its processes."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._lines = self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None

    def admit(self) -> bool:
        """Whether one more line may be logged."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self.close)
        self._lines += 1
        if self._lines > WINDOW_LINES:
            self._dropped += 1
        return self._lines <= WINDOW_LINES

    def close(self) -> None:
        """The window ends."""
        if self._dropped:
            log.warning("host_output_dropped", backend=self._backend, lines=self._dropped, seconds=WINDOW_S)
        self._lines = self._dropped = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Output:
    """One stream of one process, read on the running loop.

    :param pipe: owned, closed at its end.
    :param stream: ``"stdout"`` or ``"stderr"``.
    """

    def __init__(self, pipe: IO[bytes], backend: str, pid: int, stream: str, throttle: Throttle) -> None:
        self._pipe = pipe
        self._names: dict[str, Any] = {"backend": backend, "pid": pid}
        self._stream = stream
        self._throttle = throttle
        self._pending = bytearray()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe, self._read)

    def close(self) -> None:
        """Log what a dead process left. A child of it that lives on writes to nobody."""
        for _ in range(_LAST_READS):
            if not self._read():
                break
        if not self._pipe.closed:
            self._end()

    def _read(self) -> bool:
        if self._pipe.closed:
            return False
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        self._pending += data
        *lines, rest = self._pending.split(b"\n")
        if len(rest) > RECORD_BYTES:
            lines.append(rest)
            rest = bytearray()
        self._pending = rest
        for line in lines:
            self._say(bytes(line))
        return True

    def _end(self) -> None:
        self._loop.remove_reader(self._pipe)
        self._pipe.close()
        rest, self._pending = bytes(self._pending), bytearray()
        self._say(rest)

    def _say(self, line: bytes) -> None:
        if not line.strip() or not self._throttle.admit():
            return
        record = _own_record(line)
        if record is not None:
            fields = {name: value for name, value in record.items() if name not in _OURS and name not in self._names}
            getattr(log, record["level"])(record["event"], logged_by=record["logger"], **self._names, **fields)
            return
        text = line.decode("utf-8", "replace").rstrip()[:LINE_CHARS]
        log.info("host_output", **self._names, stream=self._stream, line=text)


def _own_record(line: bytes) -> dict[str, Any] | None:
    """A line that layerflow's own logging wrote in the host, decoded; None for any other."""
    if not line.startswith(b"{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    level, event, logger = (record.get(name) for name in ("level", "event", "logger"))
    ours = isinstance(logger, str) and logger.startswith("layerflow.") and isinstance(event, str) and level in LEVELS
    return record if ours else None


# One host process: spawned, talked to, killed and reaped, on the server's loop, which it never blocks.


MAX_UNREAD_BYTES = 64 << 20
"""Messages that the host has not read; past this it counts as hung."""


class HostChild:
    """A running host. Made on the loop's thread: the kernel kills the process when that thread ends.

    :param backend: for its logs.
    :param arena: descriptor and size of what it maps. :param mapped: False = it is given it, and does not map it.
    :param module: what runs in it.
    :param environment: all of it.
    :param on_message: told every message, in order; also those that a dead process has left.
    :param dead: told why, once, when the process is dead and reaped.
    :raises OSError: the machine has no process or descriptor to spare.
    """

    def __init__(
        self,
        backend: str,
        arena: tuple[int, int],
        module: str,
        *,
        environment: Mapping[str, str],
        throttle: Throttle,
        on_message: Callable[[ToServer], None],
        dead: Callable[[str], None],
        mapped: bool = True,
    ) -> None:
        self._on_message, self._dead = on_message, dead
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._unread = bytearray()
        self._why = ""
        self._reading = True
        ours, theirs = socket.socketpair()
        try:
            # 0.4 ms, whatever this process has mapped: vfork. start_new_session: a terminal's Ctrl-C is not for it.
            self._process = subprocess.Popen(
                _command(module, theirs.fileno(), arena, mapped),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(), arena[0]),
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._socket = ours
        self._pidfd = -1
        ours.setblocking(False)
        self._loop.add_reader(ours, self._readable)
        self._outputs = [
            Output(getattr(self._process, name), backend, self.pid, name, throttle) for name in ("stdout", "stderr")
        ]
        self._watch()

    def send(self, frame: bytes) -> bool:
        """Soon, in order. False: the process is being killed."""
        if self._why:
            return False
        if self._unread:
            self._unread += frame
        else:
            sent = self._push(frame)
            if sent < len(frame):
                self._unread += frame[sent:]
                self._loop.add_writer(self._socket, self._writable)
        if len(self._unread) > MAX_UNREAD_BYTES:
            self.kill(f"hung: {len(self._unread)} bytes of messages that it does not read")
        return not self._why

    def kill(self, why: str) -> None:
        """SIGKILL, to its whole process group; `dead` is told when it has worked."""
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError):  # it is a zombie already, and will be reaped next
            os.killpg(self.pid, signal.SIGKILL)

    # The socket ----------------------------------------------------------------------------------

    def _readable(self) -> bool:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        try:
            messages = [decode_to_server(body) for body in self._frames.feed(data)]
        except ProtocolError as error:
            self._deaf(f"it says what no host says: {error}")
            return False
        for message in messages:
            self._on_message(message)
        if not data:
            self._deaf("")
        return bool(data)

    def _deaf(self, why: str) -> None:
        """Nothing more is read. It ends now, or is made to."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # an exit that is under way keeps its own code
        self._why = self._why or why

    def _push(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the process is gone or going: its end is noticed elsewhere
            return len(data)

    def _writable(self) -> None:
        del self._unread[: self._push(self._unread)]
        if not self._unread:
            self._loop.remove_writer(self._socket)

    # Its end -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # a sandbox without it, or no descriptor left
            threading.Thread(target=self._wait, name="layerflow-host-wait", daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._died)

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._died)

    def _died(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        # Its children, if a library made some: they map the arena too. Before reaping, so that the number is still its.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        while self._reading and self._readable():
            pass
        code = self._process.wait()
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for output in self._outputs:
            output.close()
        self._dead(self._why or _story(code))


def _command(module: str, fd: int, arena: tuple[int, int], mapped: bool) -> Sequence[str]:
    # -P: no module of the working directory takes another's place. -u: what was printed before a crash is not lost.
    return (
        *(sys.executable, "-P", "-u", "-m", module),
        *("--socket", str(fd), "--arena", str(arena[0]), "--arena-bytes", str(arena[1]), "--parent", str(os.getpid())),
        *(() if mapped else ("--unmapped",)),
    )


def _story(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"


PING_S = 0.5
KILL_S = STOP_S + 1.0
"""A host that was told to stop counts by itself, from when it hears of it, and cannot while a library holds its GIL."""
DEATH_S = 5.0
"""SIGKILL works at once, but for a process in an uninterruptible call (a disk or driver that does not answer)."""
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0
"""Before the next start of a host that never got up; doubling from the first."""
MAX_DELAY_AFTER_UP_S = 0.4
"""The same for one that got up: it works here, and what killed it may be over."""
STEADY_S = 10.0
"""After so long the next death is the first again."""
UNUSABLE_DELAY_S = 30.0
"""Where the host itself says that trying again will not help: somebody may mend it meanwhile."""


class HostListener(Protocol):
    """One that the host works for. Called on the loop."""

    def host_said(self, message: ToServer) -> None:
        """A message, in order."""

    def host_stuck(self, why: str) -> None:
        """The process was killed and does not die: what it was given of the arena stays its own until ``host_lost``."""

    def host_lost(self, why: str) -> None:
        """The process is dead and reaped: nothing of it can touch the arena any more. Once for each process."""


@dataclass(frozen=True)
class HostState:
    """For status.

    :param state: ``starting`` (no word yet; as long as there is no pid, what it needs is being built), ``up``, ``down``
        (it runs, its backend does not answer), ``restarting`` (there is no process) or ``stopped``.
    :param reason: why it is not up.
    :param pid: of the process; 0 = there is none.
    :param restarts: processes after the first.
    :param up_since: Unix time; 0 = it is not up.
    """

    state: str = "stopped"
    reason: str = ""
    pid: int = 0
    restarts: int = 0
    up_since: float = 0.0


class HostProcess:
    """The host of one backend. All methods on one loop's thread, which must outlive the process.

    :param backend: a name that :func:`layerflow.hosts.process.make` knows.
    :param options: its section of the configuration, JSON-ready.
    :param arena_fd: the arena's memfd; still the caller's.
    :param liveness_s: a process that answers no ping for so long is killed.
    :param module: what runs in the process.
    :param mapped: whether it maps the arena.
    :param attach_timeout_s: the same until it is up for the first time: registering memory may hold its main thread.
    """

    def __init__(
        self,
        backend: str,
        options: dict[str, Any],
        arena_fd: int,
        arena_bytes: int,
        listener: HostListener,
        *,
        liveness_s: float = 3.0,
        attach_timeout_s: float = 120.0,
        module: str = "layerflow.hosts",
        mapped: bool = True,
    ) -> None:
        self.statistics: dict[str, float] = {}  #: the backend's latest
        self.state = HostState()
        self._backend, self._options, self._arena = backend, options, (arena_fd, arena_bytes)
        self._listener, self._module, self._mapped = listener, module, mapped
        self._liveness_s, self._attach_timeout_s = liveness_s, attach_timeout_s
        self._throttle = Throttle(backend)
        self._child: HostChild | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._delay = 0.0
        self._pings = ascending()
        self._unanswered_s = 0.0
        self._answered = True
        self._been_up = self._unusable = self._closing = False
        self._undead = False
        self._gone: asyncio.Event | None = None

    def start(self) -> None:
        """Spawn it; on the running loop, once."""
        self._spawn()
        self._tick()

    def send(self, message: ToHost) -> bool:
        """Never blocks. False: there is no process; one that dies later says so through ``host_lost``."""
        return self._child is not None and self._child.send(encode(message))

    def kill(self, why: str) -> None:
        """SIGKILL; ``host_lost(why)`` follows, then a new process."""
        if self._child is not None:
            self._child.kill(why)
            if "death" not in self._timers:
                self._later("death", DEATH_S, self._stuck)

    async def close(self) -> bool:
        """Stop it, or kill it after :data:`KILL_S`.

        :returns: whether it is dead and reaped. False: killed, and alive :data:`DEATH_S` later. It keeps its mapping
            of the arena until it dies, and the memory is given to no other process before.
        """
        self._closing = True
        for name, timer in self._timers.items():
            if name != "death":
                timer.cancel()
        if self._child is not None and not self._undead:
            if self._gone is None:
                self._gone = asyncio.Event()
                self.send(Stop())
                self._later("stop", KILL_S, self.kill, "it did not stop when told to")
            await self._gone.wait()
            if stop := self._timers.get("stop"):
                stop.cancel()
        self._throttle.close()
        if self._child is not None:
            return False
        self.state = replace(self.state, state="stopped", reason="", pid=0, up_since=0.0)
        return True

    def _stuck(self) -> None:
        if self._child is None:
            return
        self._undead = True
        why = f"process {self._child.pid} was killed {DEATH_S:g} s ago and does not die: see the system's log"
        log.error("host_stuck", backend=self._backend, pid=self._child.pid, reason=why)
        self.state = replace(self.state, state="down", reason=why, up_since=0.0)
        self._listener.host_stuck(why)
        if self._gone is not None:
            self._gone.set()

    def _spawn(self) -> None:
        self._been_up = self._unusable = False
        self._answered, self._unanswered_s = True, 0.0
        additions = functools.partial(environment, self._backend, self._options)
        if takes_long(self._backend):
            self.state = replace(self.state, state="starting")
            self._aside(additions)
        else:
            self._spawn_with(additions)

    def _aside(self, additions: Callable[[], dict[str, str]]) -> None:
        """Find them on a thread that no end of the server or of its loop waits for."""
        loop, found = asyncio.get_running_loop(), Future[dict[str, str]]()

        def find() -> None:
            try:
                found.set_result(additions())
            except BaseException as error:  # noqa: BLE001 - raised again on the loop
                found.set_exception(error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                loop.call_soon_threadsafe(self._spawn_with, found.result)

        try:
            threading.Thread(target=find, name="layerflow-host-environment", daemon=True).start()
        except RuntimeError as error:  # the machine has none to spare
            self._again(f"it cannot be started: {error}")

    def _spawn_with(self, additions: Callable[[], dict[str, str]]) -> None:
        """:param additions: gives what to add to this process's environment."""
        if self._closing:
            return
        try:
            variables = {**os.environ, **additions()}
            self._child = HostChild(
                self._backend,
                self._arena,
                self._module,
                environment=variables,
                throttle=self._throttle,
                on_message=self._on_message,
                dead=self._died,
                mapped=self._mapped,
            )
        except (OSError, LayerflowError) as error:
            self._again(f"it cannot be started: {error}")
            return
        self.state = replace(self.state, state="starting", pid=self._child.pid)
        log.info("host_started", backend=self._backend, pid=self._child.pid)
        self.send(Start(self._backend, self._options))

    def _tick(self) -> None:
        """Silence is counted in ticks, not by the clock: a server that was itself stopped judges nobody by that."""
        self._later("tick", PING_S, self._tick)
        if self._child is None:
            return
        if self._answered:
            self._answered, self._unanswered_s = False, 0.0
            self.send(Ping(next(self._pings)))
            return
        self._unanswered_s += PING_S
        limit = self._liveness_s if self._been_up else self._attach_timeout_s
        if self._unanswered_s >= limit:
            self.kill(f"hung: no answer for {limit:g} s")

    def _on_message(self, message: ToServer) -> None:
        match message:
            case Pong():
                self._answered = True
                self.statistics = message.statistics
            case Up():
                if not self._been_up:
                    self._been_up, self._unanswered_s = True, 0.0
                self.state = replace(self.state, state="up", reason="", up_since=time.time())
            case Down():
                self._unusable = self._unusable or message.fatal
                self.state = replace(self.state, state="down", reason=message.reason, up_since=0.0)
        try:
            self._listener.host_said(message)
        except Exception as error:
            log.exception("host_message_failed", backend=self._backend, kind=type(message).__name__, error=str(error))

    def _died(self, why: str) -> None:
        self._child, self._undead = None, False
        if death := self._timers.pop("death", None):
            death.cancel()
        self.statistics = {}
        if self._unusable:
            why = self.state.reason
        if self._closing:
            why = "the server stops"
        else:
            self._again(why)
        try:
            self._listener.host_lost(why)
        except Exception as error:
            log.exception("host_message_failed", backend=self._backend, kind="host_lost", error=str(error))
        if self._gone is not None:
            self._gone.set()

    def _again(self, why: str) -> None:
        """A new process, later."""
        steady = self.state.up_since and time.time() - self.state.up_since > STEADY_S
        longest = MAX_DELAY_AFTER_UP_S if self._been_up else MAX_DELAY_S
        self._delay = FIRST_DELAY_S if steady else min(max(2 * self._delay, FIRST_DELAY_S), longest)
        delay = UNUSABLE_DELAY_S if self._unusable else self._delay
        log.warning("host_lost", backend=self._backend, pid=self.state.pid, reason=why, again_in_s=delay)
        self.state = replace(
            self.state, state="restarting", reason=why, pid=0, restarts=self.state.restarts + 1, up_since=0.0
        )
        self._later("spawn", delay, self._spawn)

    def _later(self, name: str, delay: float, call: Any, *arguments: Any) -> None:
        self._timers[name] = asyncio.get_running_loop().call_later(delay, call, *arguments)
