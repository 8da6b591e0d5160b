"""Asking a server for its status. For tools that start often: imports no more than a question needs."""

from __future__ import annotations

import contextlib
import json
import time
from types import TracebackType
from typing import Any, cast

import zmq

from layerflow.agent.handshake import Handshake, dial
from layerflow.errors import LayerflowError, ServerLost, SessionUnknown
from layerflow.system.numbers import ascending
from layerflow.wire.messages import Bye, Status, StatusRequest

DEFAULT_TIMEOUT_S = 2.0
BYE_LINGER_MS = 100


class Observer:
    """One connection, kept from question to question, and made anew after the server was away; for one thread.

    :param endpoint: of the server on this machine.
    """

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._endpoint = endpoint
        self._context = context or zmq.Context.instance()
        self._numbers = ascending()
        self._conversation: Handshake | None = None

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """The server's state, as ``layerflow status --json`` prints it.

        :raises LayerflowError: the server did not answer.
        """
        deadline = time.monotonic() + timeout_s
        try:
            return self._ask(deadline)
        except SessionUnknown:  # a server that was started anew
            self.close()
        except LayerflowError:
            self.close()
            raise
        return self._ask(deadline)

    def close(self) -> None:
        """Hang up."""
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            with contextlib.suppress(ServerLost):
                conversation.send(Bye())
            conversation.dealer.close(BYE_LINGER_MS)

    def _ask(self, deadline: float) -> dict[str, Any]:
        if self._conversation is None:
            self._conversation = Handshake(dial(self._context, self._endpoint))
            self._conversation.introduce("status", "control", deadline)
        number = next(self._numbers)
        self._conversation.send(StatusRequest(number))
        answer = cast(Status, self._conversation.expect(Status, deadline, number))
        return cast(dict[str, Any], json.loads(answer.json))


def fetch_status(endpoint: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
    """The state of the server at `endpoint`.

    :raises LayerflowError: the server did not answer.
    """
    with Observer(endpoint) as observer:
        return observer.status(timeout_s)
