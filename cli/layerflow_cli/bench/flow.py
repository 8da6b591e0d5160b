"""How much the core costs: events per second, and whether a step's size or the number of sessions shows in an event.

Sessions are compared under the default caps, where saves wait for room: a session that is asked for its next batch
although nothing has changed for it is a try that grows with the sessions (``tries_per_event``), which no noise hides.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from layerflow.flow import Flow
from layerflow.flow.commands import Command, Submit, WakeAt
from layerflow.flow.events import (
    BatchDone,
    Event,
    FrontierReached,
    LayersComputed,
    LayerShape,
    Limits,
    Part,
    SessionOpened,
    StepClosed,
    StepOpened,
)
from layerflow_cli.output import records_table, tables

BLOCK_BYTES = 64 << 10
BLOCKS_PER_PART = 2
STEPS = 15
SESSIONS = (1, 10, 100, 1000)
SHARED_LAYERS = 32
SHARED_BLOCKS = 32
SHARED_EVENTS = 60_000  # of the steps of all sessions, so that many take no longer than few
WORST_EVENT_MS = 20.0
UNCAPPED = Limits(
    max_transfer_blocks=1 << 30, max_transfer_bytes=1 << 44, max_granted_bytes=1 << 46, save_backlog_bytes=1 << 60
)


def measure(
    requests: Sequence[int] = (8, 64, 512),
    layers: int = 61,
    sessions: Sequence[int] = SESSIONS,
    shared_events: int = SHARED_EVENTS,
) -> dict[str, Any]:
    """Drive loading and saving steps, answering every batch with its completion.

    :param requests: batch sizes to compare; each request loads and saves one part.
    :param layers: layers of the model, all in one group.
    :param sessions: numbers of sessions to compare, under the default caps; each has one step open at a time.
    :param shared_events: of the steps of all sessions.
    :returns: ``events_per_s`` (of the largest batch, median step), ``us_per_event`` and
        ``commands_per_layer`` by number of requests; ``by_sessions``: by number of sessions ``us_per_event``,
        ``tries_per_event``, ``worst_event_ms`` and ``events``; ``sessions_ratio``: ``us_per_event`` of the most ÷ the
        fewest sessions.
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
    by_sessions = {str(count): _share(count, shared_events) for count in sessions}
    costs = [by_sessions[str(count)]["us_per_event"] for count in sorted(sessions)]
    return {
        "events_per_s": 1e6 / us_per_event[str(max(requests))],
        "us_per_event": us_per_event,
        "commands_per_layer": commands_per_layer,
        "by_sessions": by_sessions,
        "sessions_ratio": costs[-1] / costs[0] if costs else None,
    }


def present(result: Mapping[str, Any]) -> list[Table]:
    """The sessions as rows, beside their targets."""
    core = {name: value for name, value in result.items() if name not in ("by_sessions", "sessions_ratio")}
    rows = [{"sessions": name, **figures} for name, figures in result["by_sessions"].items()]
    targets = {"sessions": "target", "us_per_event": "<= 2 x", "tries_per_event": "<= 1"}
    rows.append(targets | {"worst_event_ms": f"<= {WORST_EVENT_MS:g}", "events": ""})
    return [*tables("flow", core), records_table("flow: sessions under the default caps", rows)]


def _share(sessions: int, events: int) -> dict[str, float]:
    """Each session has one step at a time, which loads and saves a part; their phases differ."""
    flow = Flow(Limits())
    for number in range(sessions):
        flow.handle(SessionOpened(number, (LayerShape(0, BLOCK_BYTES),) * SHARED_LAYERS), 0.0)
    phases = SHARED_LAYERS + 2
    ticks = max(2, events // (sessions * SHARED_LAYERS * 4)) * phases
    held: list[list[Submit]] = [[] for _ in range(sessions)]
    handled, spent, worst = 0, 0.0, 0.0
    ready: deque[Event] = deque()
    gc.collect()
    gc.disable()
    try:
        for tick in range(ticks):
            for number in range(sessions):
                step, phase = divmod(tick + number, phases)
                if step == number // phases:
                    continue  # its first step began before the first tick
                ready.extend(_phase(number, step, phase))
                while ready:
                    event = ready.popleft()
                    # Processor time: of the worst of many thousand events the clock tells what else the machine does.
                    start = time.thread_time()
                    commands = flow.handle(event, float(tick))
                    seconds = time.thread_time() - start
                    handled, spent, worst = handled + 1, spent + seconds, max(worst, seconds)
                    for command in commands:
                        if isinstance(command, Submit):
                            held[command.session].append(command)
                    # A save moves once its layer is computed, a load at once.
                    for batch in [batch for batch in held[number] if batch.gate < phase]:
                        held[number].remove(batch)
                        ready.append(BatchDone(number, batch.batch))
    finally:
        gc.enable()
    return {
        "us_per_event": spent / handled * 1e6,
        "tries_per_event": flow.statistics().tries / handled,
        "worst_event_ms": worst * 1e3,
        "events": handled,
    }


def _phase(session: int, step: int, phase: int) -> list[Event]:
    """What a session says in this phase of a step: it opens, each layer is reached and computed, it is closed."""
    if phase == 0:
        part = (Part("request", 0, SHARED_BLOCKS),)
        return [StepOpened(session, step, step * 1e3 + 1e6, step * 1e3 + 1e6, part, part)]
    if phase <= SHARED_LAYERS:
        return [FrontierReached(session, step, phase - 1), LayersComputed(session, step, phase)]
    return [StepClosed(session, step, ok=True)]


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
