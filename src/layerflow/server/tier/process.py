"""Keeps one host process running: spawns it, watches that it answers, starts it anew when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from layerflow.errors import LayerflowError
from layerflow.hosts.environment import environment, takes_long
from layerflow.server.tier.child import HostChild
from layerflow.server.tier.output import Throttle
from layerflow.system.numbers import ascending
from layerflow.wire.host_messages import STOP_S, Down, Ping, Pong, Start, Stop, ToHost, ToServer, Up, encode

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

log = structlog.get_logger("layerflow.server.tier.process")


class HostListener(Protocol):
    """Who the host works for. Called on the loop."""

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

    :param backend: a name of :mod:`layerflow.hosts.registry`.
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
                variables,
                self._throttle,
                self._heard,
                self._died,
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

    def _heard(self, message: ToServer) -> None:
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
