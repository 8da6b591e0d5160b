"""Helper threads that somebody owns: one that ends by an error is noticed, logged, and restarted or given up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

LONGEST_PAUSE_S = 5.0
"""Between the end of a thread's work by an error and its next beginning, at most."""

log = structlog.get_logger("layerflow.threads")


class OwnedThread:
    """A daemon thread whose owner is told when its work ends by an error, of whatever kind.

    Work that returns has ended as it was meant to. Work that raises is logged as ``thread_failed``, once for each error
    in a row, and `lost` is called on the thread. Then the work begins anew where `restart_s` is set; else the thread
    ends, and :attr:`error` tells why.

    :param name: of the thread.
    :param work: runs on the thread. Where it may be restarted, its state is outside of it.
    :param args: of `work`.
    :param lost: told of the error, before the work begins anew. What it raises is logged.
    :param restart_s: pause before the work begins anew, seconds; it doubles, up to :data:`LONGEST_PAUSE_S`, with each
        error of one kind in a row. None = it does not begin anew.
    """

    def __init__(
        self,
        name: str,
        work: Callable[..., object],
        *args: object,
        lost: Callable[[BaseException], object] | None = None,
        restart_s: float | None = None,
    ) -> None:
        self._work, self._args = work, args
        self._lost = lost
        self._restart_s = restart_s
        self._ending = threading.Event()
        self._error: BaseException | None = None
        self._restarts = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __repr__(self) -> str:
        state = "running" if self.alive else "ended" if self.ident else "not started"
        return f"<OwnedThread {self.name} {state}, {self._restarts} restarts>"

    @property
    def name(self) -> str:
        """The thread's name."""
        return self._thread.name

    @property
    def ident(self) -> int | None:
        """As of :class:`threading.Thread`; None = it was not started."""
        return self._thread.ident

    @property
    def alive(self) -> bool:
        """Does it run, or is it about to begin anew?"""
        return self._thread.is_alive()

    @property
    def current(self) -> bool:
        """Is it the calling thread?"""
        return threading.current_thread() is self._thread

    @property
    def error(self) -> BaseException | None:
        """What has ended its work for good; None = nothing has."""
        return self._error

    @property
    def restarts(self) -> int:
        """How often its work has begun anew."""
        return self._restarts

    def start(self) -> OwnedThread:
        """Begin.

        :raises RuntimeError: the system has no thread left, or this one was started before.
        """
        self._thread.start()
        return self

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; False after `timeout_s`. Its owner has told the work to end.

        From here on the work does not begin anew. Returns at once on the thread itself, and where it was not started.
        """
        self._ending.set()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended by itself; False after `timeout_s`."""
        if self.current:
            return False
        if self.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        last, pause_s = "", 0.0
        while True:
            try:
                self._work(*self._args)
                return
            except BaseException as error:  # also SystemExit, which would end a thread in silence
                again = self._restart_s is not None and not self._ending.is_set()
                reason = f"{type(error).__name__}: {error}"
                if reason != last:
                    log.error("thread_failed", thread=self.name, error=reason, restarts=again, exc_info=True)
                    last, pause_s = reason, self._restart_s or 0.0
                else:
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                self._error = None if again else error
                self._tell(error)
            if not again or self._ending.wait(pause_s):
                return
            self._restarts += 1

    def _tell(self, error: BaseException) -> None:
        if self._lost is None:
            return
        try:
            self._lost(error)
        except Exception:
            log.exception("thread_loss_not_told", thread=self.name)
