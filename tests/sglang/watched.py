"""layerflow's linker, writing down which layers SGLang's forward passes wait for. Named by a server's linker config."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerflow.agent import Step
from layerflow.connectors.sglang import LayerflowLinker

_wait_layer: Callable[..., Any] = Step.wait_layer
_log = Path(os.environ["WATCHED_LOG"])


def _watch(step: Step, layer: int, *given: Any, **named: Any) -> Any:
    """As ``Step.wait_layer``; a line per call: the step, the layer, seconds."""
    began = time.monotonic()
    try:
        return _wait_layer(step, layer, *given, **named)
    finally:
        with _log.open("a") as log:
            log.write(json.dumps([step.number, layer, time.monotonic() - began]) + "\n")


Step.wait_layer = _watch  # type: ignore[method-assign]


class WatchedLinker(LayerflowLinker):  # type: ignore[misc]
    """Nothing of its own: SGLang takes a class of the module that it is told of."""
