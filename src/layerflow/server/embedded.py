"""Embedded mode: the same server on a thread of the engine's process, the same messages over ``inproc://``."""

from __future__ import annotations

import threading
from types import TracebackType

import anyio
import anyio.from_thread
import zmq

from layerflow.config.settings import Settings
from layerflow.errors import DeadlineExceeded
from layerflow.server.server import Server

START_TIMEOUT_S = 10.0
TERM_TIMEOUT_S = 0.5
"""How long closing waits for agents to let go of the context; it ends in the background when the last one has."""


class EmbeddedServer:
    """A running server in this process. Agents take :attr:`endpoint` and :attr:`context`.

    :param settings: its ``server.endpoint`` is replaced; HTTP is not served.
    :param endpoint: an ``ipc://`` one, where other processes are to reach the server too; None = an ``inproc://`` one.
    :raises DeadlineExceeded: it did not start.
    """

    def __init__(self, settings: Settings | None = None, endpoint: str | None = None) -> None:
        base = settings or Settings()
        self.endpoints: list[str] = []  #: as they are bound; with ``server.tcp_endpoint`` there are two
        self.endpoint = endpoint or f"inproc://layerflow-{id(self):x}"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server_settings = base.server.model_copy(update={"endpoint": self.endpoint})
        self.server = Server(base.model_copy(update={"server": server_settings}), self.context)
        self._shutdown: anyio.Event | None = None
        self._token: anyio.lowlevel.EventLoopToken | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._ending: threading.Thread | None = None
        self._thread = threading.Thread(target=self._main, name="layerflow-server", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            raise DeadlineExceeded(f"the embedded server did not start within {START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drain and stop; closing again does nothing.

        Close the agents first: what they have open is drained up to the timeout.
        """
        if self._thread.is_alive() and self._shutdown is not None:
            anyio.from_thread.run_sync(self._shutdown.set, token=self._token)
        self._thread.join()
        # Not destroy(): it would close sockets under the threads of agents that are still open.
        if self._ending is None:
            self._ending = threading.Thread(target=self.context.term, name="layerflow-context", daemon=True)
            self._ending.start()
        self._ending.join(TERM_TIMEOUT_S)

    def call(self, function: object, *args: object) -> object:
        """Run a function on the server's loop and return its result (statistics, new settings)."""
        return anyio.from_thread.run_sync(function, *args, token=self._token)  # type: ignore[arg-type]

    def _main(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - handed to the constructor's thread
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._shutdown = anyio.Event()
        self._token = anyio.lowlevel.current_token()
        await self.server.run(self._shutdown, started=self._started)

    def _started(self, endpoints: list[str]) -> None:
        self.endpoints = endpoints
        self._ready.set()
