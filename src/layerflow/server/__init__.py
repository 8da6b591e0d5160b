"""The server: ``layerflow run`` in its own process, or embedded on a thread of the engine's."""

from layerflow.server.embedded import EmbeddedServer
from layerflow.server.server import Server

__all__ = ["EmbeddedServer", "Server"]
