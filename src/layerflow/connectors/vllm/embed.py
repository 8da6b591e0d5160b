"""Without an endpoint: a server on a thread of the first worker's process, reachable for the engine's others."""

from __future__ import annotations

import os

from layerflow.config.settings import Settings
from layerflow.connectors.vllm.options import Options
from layerflow.server import EmbeddedServer


def embedded_endpoint(engine_id: str) -> str:
    """Where an engine's embedded server listens; all its processes compute the same."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108  the folder below it is private
    return f"ipc://{folder}/layerflow-{os.getuid()}/vllm-{engine_id[-40:]}"


def embed(options: Options, engine_id: str) -> EmbeddedServer:
    """Start it.

    :raises LayerflowError: its settings are wrong, or its endpoint is taken.
    """
    return EmbeddedServer(Settings.load(None, options.server), endpoint=embedded_endpoint(engine_id))
