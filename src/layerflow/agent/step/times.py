"""What the engine's thread did in one step, layer by layer, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from layerflow.observe.trace import Span


class LayerTimes:
    """Times of the engine's calls, monotonic seconds; 0.0 = not yet.

    The engine's thread stores into the lists itself, since a call would cost it more than the store. Others only read.

    :param layers: of the model.

    :ivar asked_at: by layer: when the engine asked whether it is ready.
    :ivar waited_at: by layer: when it was told, so that the layer could compute.
    :ivar done_at: by layer: when the layer's KV was written.
    :ivar done: by layer: None until its KV is written; then True, or the device event behind it. Stored last.
    :ivar closed_at: when the forward pass ended.
    :ivar hurried: a thread waits for the saves.
    """

    __slots__ = ("asked_at", "closed_at", "done", "done_at", "hurried", "waited_at")

    def __init__(self, layers: int) -> None:
        self.asked_at = [0.0] * layers
        self.waited_at = [0.0] * layers
        self.done_at = [0.0] * layers
        self.done: list[Any] = [None] * layers
        self.closed_at = 0.0
        self.hurried = False

    @property
    def computed_layers(self) -> int:
        """How many layers, from the first on, are marked done."""
        for layer, done in enumerate(self.done):
            if done is None:
                return layer
        return len(self.done)

    def pace(self, now: float) -> float:
        """Seconds per layer since the first one was done; 0.0 before. Grows while a layer is computed.

        After the forward pass: its average, or the time since its end where that is longer, so that the engine uses the
        pass's result first. Infinite when a thread waits for the saves.
        """
        if self.hurried:
            return math.inf
        done = self.computed_layers
        if not done:
            return 0.0
        if self.closed_at:
            return max((self.closed_at - self.done_at[0]) / done, now - self.closed_at)
        return (now - self.done_at[0]) / done

    def compute_spans(self) -> Iterator[Span]:
        """Each layer's computing, once the step is over.

        A layer computes until the engine asks for the next one: its attention goes on after its KV is written.
        """
        ends = [*self.asked_at[1:], self.closed_at]
        for layer, (began, ended, done) in enumerate(zip(self.waited_at, ends, self.done_at, strict=True)):
            if began > 0.0 and max(ended, done) > began:
                yield Span("compute", layer, began, ended if ended > began else done)
