"""How much the core costs: events per second, and whether a step's size shows in the cost of an event."""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from layerflow.flow import Flow
from layerflow.flow.commands import Command, Submit, WakeAt
from layerflow.flow.events import (
    BatchDone,
    Event,
    FrontierReached,
    LayersComputed,
    LayerShape,
    Part,
    SessionOpened,
    StepClosed,
    StepOpened,
)
from layerflow.flow.limits import Limits

BLOCK_BYTES = 64 << 10
BLOCKS_PER_PART = 2
STEPS = 15
UNCAPPED = Limits(
    max_transfer_blocks=1 << 30, max_transfer_bytes=1 << 44, max_inflight_bytes=1 << 46, save_backlog_bytes=1 << 60
)


def measure(requests: Sequence[int] = (8, 64, 512), layers: int = 61) -> dict[str, Any]:
    """Drive loading and saving steps, answering every batch with its completion.

    :param requests: batch sizes to compare; each request loads and saves one part.
    :param layers: layers of the model, all in one group.
    :returns: ``events_per_s`` (of the largest batch, median step), ``us_per_event`` and
        ``commands_per_layer`` by number of requests.
    """
    us_per_event: dict[str, float] = {}
    commands_per_layer: dict[str, float] = {}
    for count in requests:
        flow = Flow(UNCAPPED)
        flow.handle(SessionOpened(0, (LayerShape(0, BLOCK_BYTES),) * layers), 0.0)
        samples = []
        commands = 0
        for step in range(STEPS):
            events, seconds, commands = _drive(flow, step, count, layers)
            samples.append(seconds / events * 1e6)
        us_per_event[str(count)] = statistics.median(samples)
        commands_per_layer[str(count)] = commands / layers
    return {
        "events_per_s": 1e6 / us_per_event[str(max(requests))],
        "us_per_event": us_per_event,
        "commands_per_layer": commands_per_layer,
    }


def _drive(flow: Flow, step: int, requests: int, layers: int) -> tuple[int, float, int]:
    """One step: events handled, seconds spent in the core, commands it gave."""
    parts = tuple(Part(f"request-{number}", 0, BLOCKS_PER_PART) for number in range(requests))
    events: list[Event] = [StepOpened(0, step, step + 30.0, step + 60.0, parts, parts)]
    for layer in range(layers):
        events += [FrontierReached(0, step, layer), LayersComputed(0, step, layer + 1)]
    events.append(StepClosed(0, step, ok=True))
    reports: deque[BatchDone] = deque()
    handled, spent, given = 0, 0.0, 0
    gc.collect()
    gc.disable()
    try:
        for event in events:
            seconds, commands = _handle(flow, event, float(step))
            spent, handled, given = spent + seconds, handled + 1, given + len(commands)
            _answer(commands, reports)
            while reports:
                seconds, commands = _handle(flow, reports.popleft(), float(step))
                spent, handled, given = spent + seconds, handled + 1, given + len(commands)
                _answer(commands, reports)
    finally:
        gc.enable()
    return handled, spent, given


def _handle(flow: Flow, event: Event, now: float) -> tuple[float, list[Command]]:
    start = time.perf_counter()
    commands = flow.handle(event, now)
    return time.perf_counter() - start, [command for command in commands if not isinstance(command, WakeAt)]


def _answer(commands: list[Command], reports: deque[BatchDone]) -> None:
    for command in commands:
        if isinstance(command, Submit):
            reports.append(BatchDone(command.session, command.batch))
