"""layerflow's linker, writing down which layers SGLang's forward passes wait for and which are saved when. Named by a
server's linker config.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerflow.agent import Step
from layerflow.agent.lanes.save import SaveLane
from layerflow.connectors.sglang import LayerflowLinker
from layerflow.connectors.sglang.batch_saves import BatchSaves

_wait_layer: Callable[..., Any] = Step.wait_layer
_layer_done: Callable[..., Any] = BatchSaves.layer_done
_move: Callable[..., Any] = SaveLane._move
_log = Path(os.environ["WATCHED_LOG"])


def _note(kind: str, layer: int | None, number: int, figure: float) -> None:
    with _log.open("a") as log:
        log.write(json.dumps([kind, layer, number, figure, time.monotonic()]) + "\n")


def _watch_wait(step: Step, layer: int, *given: Any, **named: Any) -> Any:
    """As ``Step.wait_layer``; a line per call: ``wait``, the layer, the step, seconds."""
    began = time.monotonic()
    try:
        return _wait_layer(step, layer, *given, **named)
    finally:
        _note("wait", layer, step.number, time.monotonic() - began)


def _watch_hook(saves: BatchSaves, layer: int | None) -> Any:
    """As ``BatchSaves.layer_done``: ``hook``, the layer."""
    _note("hook", layer, 0, 0.0)
    return _layer_done(saves, layer)


def _watch_save(lane: SaveLane, job: Any) -> Any:
    """As the save lane moves a batch, of an emulated link: ``save``, the layer, the step, bytes."""
    _note("save", job.batch.layer, job.step.number, job.batch.nbytes)
    return _move(lane, job)


Step.wait_layer = _watch_wait  # type: ignore[method-assign]
BatchSaves.layer_done = _watch_hook  # type: ignore[method-assign]
SaveLane._move = _watch_save  # type: ignore[method-assign]


class WatchedLinker(LayerflowLinker):  # type: ignore[misc]
    """Nothing of its own: SGLang takes a class of the module that it is told of."""
