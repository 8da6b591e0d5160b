"""One host process: spawned, talked to, killed and reaped, on the server's loop, which it never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

import structlog

from layerflow.errors import ProtocolError
from layerflow.server.tier.output import Output, Throttle
from layerflow.wire.host_messages import Frames, ToServer, decode_to_server

MAX_UNREAD_BYTES = 64 << 20
"""Messages that the host has not read; past this it counts as hung."""

_READ_BYTES = 1 << 16  # all that they tell is done before the loop's other work

log = structlog.get_logger("layerflow.server.tier.child")


class HostChild:
    """A running host. Made on the loop's thread: the kernel kills the process when that thread ends.

    :param backend: for its logs.
    :param arena: descriptor and size of what it maps. :param mapped: False = it is given it, and does not map it.
    :param module: what runs in it.
    :param environment: all of it.
    :param heard: told every message, in order; also those that a dead process has left.
    :param dead: told why, once, when the process is dead and reaped.
    :raises OSError: the machine has no process or descriptor to spare.
    """

    def __init__(
        self,
        backend: str,
        arena: tuple[int, int],
        module: str,
        environment: Mapping[str, str],
        throttle: Throttle,
        heard: Callable[[ToServer], None],
        dead: Callable[[str], None],
        *,
        mapped: bool = True,
    ) -> None:
        self._heard, self._dead = heard, dead
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
            self._heard(message)
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
