"""What the narrower server tests share."""

from __future__ import annotations

from collections.abc import Callable

from e2e.known import KnownWorker

from layerflow.agent import Control
from layerflow.server import EmbeddedServer

Embed = Callable[..., EmbeddedServer]


class Memory:
    """An arena of ordinary memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.warm_bytes = nbytes
        self.view = memoryview(bytearray(nbytes))


def worker_on(server: EmbeddedServer, **more: object) -> KnownWorker:
    """A worker attached to an embedded server."""
    return KnownWorker(server.endpoint, context=server.context, **more)  # type: ignore[arg-type]


def observe(server: EmbeddedServer) -> Control:
    """A client that only looks."""
    return Control(server.endpoint, "observer", context=server.context)
