"""What a recording costs: processor time for each event, and whether lookups notice it.

Events are those of a busy server: batches granted and done, frontiers, layers. Counted is the processor time of the
loop's thread for them, and of the thread that encodes, compresses and writes. Lookups are asked of a real server, in
turns with and without a recording.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from layerflow.agent import Control
from layerflow.errors import LayerflowError
from layerflow.flow.commands import Command, Submit
from layerflow.flow.events import LOAD, BatchDone, Event, FrontierReached, LayersComputed
from layerflow.recording.format import LEAST_BYTES
from layerflow.server.recorder import MOST_NOTES, RecordingThread
from layerflow.system.garbage import keep_collections_short
from layerflow_cli.bench.harness import LoopClock, Worker, percentiles, serving

MAY_BE_ZERO = ("lookups",)
LAYERS = 60
MAX_BYTES = 64 * LEAST_BYTES
LAYER_EVENTS = 4
"""Of one layer in :func:`_burst`, which makes whole ones."""
BURST = MOST_NOTES // 16 * LAYER_EVENTS


def measure(events: int = 1_000_000, tokens: int = 32_768, lookups: int = 1200) -> dict[str, Any]:
    """Count, then ask.

    :param events: of the core, counted with the commands that are recorded with them; rounded up to whole layers, which
        have 4.
    :param tokens: of the prompt that is looked up. :param lookups: half of them while recording.
    :returns: microseconds of processor time for each event, ``cpu_us_per_event`` of both threads and
        ``loop_us_per_event`` of the loop's; ``bytes_per_event`` of the file, ``dropped`` events; and by
        ``without`` and ``recording``: ``wall_us`` and ``loop_cpu_us`` of lookups, p50 and p99.
    """
    torch.set_num_threads(1)
    counted = asyncio.run(_count(math.ceil(events / LAYER_EVENTS) * LAYER_EVENTS))
    return counted | (_ask(tokens, lookups) if lookups else {})


async def _count(events: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="layerflow-bench-") as folder:
        recording = RecordingThread(Path(folder) / "bench.lfr", MAX_BYTES)
        recording.start()
        await recording.opened()
        writer_clock = _clock_of("layerflow-record")
        done, loop_s, writer_s = 0, 0.0, 0.0
        while done < events:
            burst = _burst(done, min(BURST, events - done))
            keep_collections_short()  # as a server does: what is made here is not the recording's
            began = time.thread_time()
            for at, event, commands in burst:
                recording.core(at, event, commands)
            loop_s += time.thread_time() - began
            done += sum(1 + len(commands) for _, _, commands in burst)
            await asyncio.to_thread(_await_records, recording, done)
            writer_s = time.clock_gettime(writer_clock)
        recording.end()
        await recording.closed()
        if recording.failure:
            raise LayerflowError(recording.failure)
        return {
            "events": done,
            "cpu_us_per_event": round((loop_s + writer_s) / done * 1e6, 3),
            "loop_us_per_event": round(loop_s / done * 1e6, 3),
            "bytes_per_event": round(recording.nbytes / done, 1),
            "dropped": recording.dropped,
        }


def _clock_of(name: str) -> int:
    """The clock of a thread's processor time."""
    (ident,) = (thread.ident for thread in threading.enumerate() if thread.name == name)
    assert ident is not None
    return time.pthread_getcpuclockid(ident)


def _burst(first: int, count: int) -> list[tuple[float, Event, Sequence[Command]]]:
    burst: list[tuple[float, Event, Sequence[Command]]] = []
    for number in range(first // LAYER_EVENTS, (first + count) // LAYER_EVENTS):
        step, layer, at = number // LAYERS, number % LAYERS, number * 1e-4
        submit = Submit(1, step, number, LOAD, layer, 0, 128, 0, 0, 128 << 14, layer - 2, True)
        burst.append((at, FrontierReached(1, step, layer), (submit,)))
        burst.append((at, LayersComputed(1, step, layer), ()))
        burst.append((at, BatchDone(1, number), ()))
    return burst


def _await_records(recording: RecordingThread, records: int) -> None:
    """Wait until the thread has taken what it has; it looks ten times a second."""
    until = time.monotonic() + 30.0
    while recording.records < records and not recording.failure and time.monotonic() < until:
        time.sleep(0.02)


def _ask(tokens: int, lookups: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layerflow-bench-")))
        server = stack.enter_context(serving(pool__size="1GiB"))
        worker = Worker(server.endpoint, 1, tokens, 2 * tokens, requests=1)
        stack.callback(worker.close)
        control = Control(server.endpoint, "bench")
        stack.callback(control.close)
        chain = worker.prompt()
        worker.store(chain)
        clock = LoopClock(server.process.pid)
        wall: dict[str, list[int]] = {"without": [], "recording": []}
        loop: dict[str, list[int]] = {"without": [], "recording": []}
        rounds = max(1, min(8, lookups // 2))
        for turn in range(2 * rounds):
            how = ("without", "recording")[turn % 2]
            if how == "recording":
                control.record(folder / "bench.lfr", 3600, MAX_BYTES)
            for number in range(lookups // (2 * rounds)):
                name = f"lookup-{turn}-{number}"
                time.sleep(2e-3)
                before, began = clock(), time.perf_counter_ns()
                worker.agent.lookup(name, chain)
                wall[how].append(time.perf_counter_ns() - began)
                time.sleep(2e-3)
                loop[how].append(clock() - before)
                worker.agent.drop_lease(name)
            if how == "recording":
                control.end_recording()
        return {
            how: {"wall_us": percentiles(wall[how]), "loop_cpu_us": percentiles(loop[how])}
            for how in ("without", "recording")
        }
