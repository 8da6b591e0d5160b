"""A step that is driven by hand, in place of the link and the lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from e2e.known import small_spec

from layerflow.agent import Hit, StepRequest
from layerflow.agent.descriptors import Numbered, describe_loads
from layerflow.agent.step.step import Step
from layerflow.agent.step.transfers import LOAD
from layerflow.device import device_for
from layerflow.device.base import Device
from layerflow.keys import Chain
from layerflow.places import NOWHERE
from layerflow.wire.messages import Batch, Plan, PlanPart
from layerflow.wire.packing import pack_u32, pack_u64

SPEC = small_spec(2)
BLOCKS = 8


class Scene:
    """A step of two requests that load 8 blocks each in 2 layers, planned and with every batch granted."""

    def __init__(
        self, timeout_s: float = 60.0, missing: bool = False, granted: bool = True, device: Device | None = None
    ) -> None:
        requests = [self._request(name) for name in ("a", "b")]
        loads = describe_loads(SPEC, requests)
        self.fenced: list[str] = []
        self.closed: list[bool] = []
        self.attended = 0
        self.on_attend: Callable[[], None] = lambda: None
        deadline = time.monotonic() + timeout_s
        self.step = Step(
            1,
            groups=[0, 0],
            block_bytes=[SPEC.groups[0].bytes_per_block],
            loads=loads,
            saves=[],
            deadline=deadline,
            save_deadline=deadline,
            device=device or device_for("cpu"),
            pump=self._attend,
            on_fenced=lambda _, reason: self.fenced.append(reason),
            on_closed=lambda _, ok: self.closed.append(ok),
        )
        self.bound: list[Numbered] = []
        offsets = [[0, NOWHERE if missing else 4096], [8192, 12288]]
        plans = [PlanPart(pack_u64(places), pack_u32([4, 4])) for places in offsets]
        self.step.planned(Plan(1, plans, []), self._bind)
        self.batches = [self._batch(number, layer) for number, layer in enumerate(range(2), 1)]
        for batch in self.batches if granted else ():
            self.step.granted(batch)

    @staticmethod
    def _request(name: str) -> StepRequest:
        chain = Chain(b"r" * 16, np.arange(40) + ord(name), SPEC.chunk_tokens)
        return StepRequest(name, chain, (np.arange(10),), load=(0, 32), hit=Hit(32))

    def _bind(self, group: int, blocks: Numbered) -> Any:
        self.bound.append(blocks)
        return blocks

    def _batch(self, number: int, layer: int) -> Batch:
        return Batch(1, number, LOAD, layer, 0, len(self.bound[0].numbers), 0, 0, 1, -1, True)

    def _attend(self) -> None:
        self.attended += 1
        self.on_attend()

    def copy(self, *layers: int) -> None:
        """The lane copies these layers."""
        for layer in layers:
            assert self.step.begin(self.batches[layer])
            self.step.end(self.batches[layer])


def some_batch(direction: int) -> Batch:
    """One that is at work."""
    return Batch(1, 9, direction, 0, 0, BLOCKS, 0, 0, 1, -1, True)


def waiting(step: Step, layer: int) -> tuple[threading.Thread, list[Any]]:
    """An engine thread in ``wait_layer``, and where its outcome will be."""
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(step.wait_layer(layer)))
    thread.start()
    return thread, outcomes
