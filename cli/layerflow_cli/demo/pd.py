"""The demo of prefill and decode apart: two reference engines over one server, in every cache shape.

The decode engine is asked at the same moment as the prefill engine. It follows the prefiller's saves layer by layer,
or, for comparison, begins to load once all of them are stored.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from layerflow.errors import LayerflowError
from layerflow.observe.logs import configure as configure_logs
from layerflow.observe.timeline import render as render_timeline
from layerflow.observe.trace import StepTrace
from layerflow.observe.trace import render as render_perfetto
from layerflow_cli.bench.harness import serving
from layerflow_cli.demo.checks import wrong_bytes
from layerflow_cli.demo.engines import KvBytes, answer, spoil
from layerflow_cli.demo.outcome import differing
from layerflow_cli.demo.report import EXIT_WRONG
from layerflow_cli.demo.workload import MAX_NEW_TOKENS, Workload, chosen_shapes, suitable_link
from layerflow_cli.output import console, progress, write_json
from layerflow_cli.output_file import write_all, write_folder
from layerflow_engine import Engine
from layerflow_engine.glue import attach
from layerflow_engine.handoff import DecodeConnection, PrefillConnection

WAIT_S = 120.0
DEFAULT_RUNS = 3

RequestRoute = Literal["follow", "whole"]
Pipe = multiprocessing.connection.Connection


@dataclass(slots=True)
class Shape:
    """What one cache shape's hand-offs came to; times in seconds, from the moment at which both engines were asked."""

    workload: Workload
    single: list[float] = field(default_factory=list)
    first_token: dict[RequestRoute, list[float]] = field(default_factory=lambda: {"follow": [], "whole": []})
    wrong_tokens: int = 0
    compared_tokens: int = 0
    wrong_bytes: int = 0
    compared_bytes: int = 0
    loaded: set[int] = field(default_factory=set)
    restarts: int = 0
    trace: StepTrace | None = None

    def to_dict(self) -> dict[str, Any]:
        """The shape's part of the JSON file; times in ms."""
        return {
            "prompt_tokens": self.workload.prompt_tokens,
            "loaded_tokens": sorted(self.loaded),
            "ttft_ms": {
                "single": statistics.median(self.single) * 1e3,
                **{way: statistics.median(seconds) * 1e3 for way, seconds in self.first_token.items()},
            },
            "tokens_identical": not self.wrong_tokens,
            "wrong_tokens": self.wrong_tokens,
            "compared_tokens": self.compared_tokens,
            "wrong_bytes": self.wrong_bytes,
            "compared_bytes": self.compared_bytes,
            "restarts": self.restarts,
        }

    @property
    def faulty(self) -> bool:
        """Is something as it must never be?"""
        own = {self.workload.handed_tokens}
        return bool(self.wrong_tokens or self.wrong_bytes or self.restarts or self.loaded != own)


def run_pd_demo(
    *,
    json_file: Path | None = None,
    out: Path = Path("out"),
    link_gbps: float | None = None,
    shapes: Sequence[str] = (),
    runs: int | None = None,
    quick: bool = False,
) -> int:
    """Run it, show it, write it.

    :param link_gbps: emulated link in GB/s (10^9 bytes), on both ways; 0 = none; None = one that suits the machine.
    :returns: the exit code: 1 if a token or a byte is wrong, or was not handed over.
    :raises ConfigError: unknown shapes, or files that cannot be written.
    """
    chosen = chosen_shapes(shapes)
    configure_logs("error", "console")
    torch.set_num_threads(1)
    runs = runs or (1 if quick else DEFAULT_RUNS)
    found = [Shape(Workload.of(shape, quick)) for shape in chosen]
    with progress(len(found) * runs * 3 + 1, console()) as advance:
        link_gbps = _serve_shapes(found, link_gbps, runs, advance)
    figures = {
        "link": {"emulated": link_gbps > 0, "gbps": link_gbps},
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "torch": torch.__version__},
        "runs": runs,
        "quick": quick,
        "servers": 1,
        "shapes": {shape.workload.shape: shape.to_dict() for shape in found},
    }
    return _report(found, figures, json_file, out)


def _serve_shapes(found: list[Shape], link_gbps: float | None, runs: int, advance: Callable[[str], None]) -> float:
    """Each shape by one engine and by two; the link's speed, GB/s."""
    truths = [_alone(shape, runs, advance) for shape in found]
    if link_gbps is None:
        link_gbps = suitable_link([(shape.workload, statistics.median(shape.single)) for shape in found])
    advance("starting layerflow run")
    size = f"{sum(shape.workload.stored_bytes for shape in found) * runs * 4 // (1 << 20) + 256}MiB"
    with serving(pool__size=size, pool__link_gbps=link_gbps) as server:
        for shape, truth in zip(found, truths, strict=True):
            _hand_over(shape, truth, server.endpoint, runs, advance)
    return link_gbps


Truth = list[tuple[tuple[int, ...], KvBytes]]


def _alone(shape: Shape, runs: int, advance: Callable[[str], None]) -> Truth:
    """What a single engine that computes everything answers, and the KV it computes."""
    engine = Engine(shape.workload.config)
    spoil(engine)
    truth: Truth = []
    for run in range(runs):
        advance(f"{shape.workload.shape}: one engine, passage {run + 1}")
        made = answer(engine, shape.workload, shape.workload.prompt(run, 0), "", shape.workload.handed_tokens)
        shape.single.append(made.result.ttft_s)
        truth.append((made.result.tokens, made.kv))
    return truth


def _hand_over(shape: Shape, truth: Truth, endpoint: str, runs: int, advance: Callable[[str], None]) -> None:
    workload = shape.workload
    # Each prefill engine is forked from one process that has imported torch, which takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipe, theirs = context.Pipe()
    prefiller = context.Process(target=prefill, args=(theirs, endpoint, workload), daemon=True)
    prefiller.start()
    theirs.close()
    engine = Engine(workload.config)
    spoil(engine)
    connection = attach(
        engine,
        endpoint,
        f"decode-{workload.shape}",
        mode="layerwise",
        chunk_tokens=workload.sizes.chunk,
        connect=lambda agent, mode: DecodeConnection(agent, mode, patience_s=WAIT_S),
        lookup_timeout_s=WAIT_S,
    )
    try:
        _hear(pipe)
        if not connection.agent.wait_warm(WAIT_S):
            raise LayerflowError(f"{endpoint}: the arena was not mapped within {WAIT_S:g} s")
        for run in range(runs):
            for number, way in enumerate(("follow", "whole")):
                name, prompt = f"{workload.shape}-{run}-{way}", workload.prompt(run, 0)
                advance(f"{workload.shape}: two engines, {way}, passage {run + 1}")
                if number:
                    connection.agent.control.purge(WAIT_S)
                _one(shape, truth[run], engine, connection, pipe, name, prompt, way)
        pipe.send(None)
    finally:
        connection.close()
        pipe.close()
        prefiller.join(WAIT_S)


def _one(
    shape: Shape,
    truth: tuple[tuple[int, ...], KvBytes],
    engine: Engine,
    connection: Any,
    pipe: Pipe,
    name: str,
    prompt: str,
    way: str,
) -> None:
    agent = connection.agent
    known = len(agent.traces)
    began = time.perf_counter()
    pipe.send((name, prompt))
    if way == "whole":
        state = agent.control.watch_handoff(name, WAIT_S)
        if state.state != "complete":
            raise LayerflowError(f"hand-off {name!r} is {state.state}: {state.reason}")
    waited = time.perf_counter() - began
    made = answer(engine, shape.workload, prompt, name, shape.workload.handed_tokens)
    engine.drain(WAIT_S)
    theirs = [StepTrace.from_dict(trace) for trace in _hear(pipe)]
    shape.first_token["follow" if way == "follow" else "whole"].append(waited + made.result.ttft_s)
    tokens, kv = truth
    shape.wrong_tokens += differing(tokens, made.result.tokens)
    shape.compared_tokens += len(tokens)
    shape.wrong_bytes += wrong_bytes(kv, made.kv)
    shape.compared_bytes += sum(plane.size for plane in kv.values())
    shape.loaded.add(made.result.cached_tokens)
    shape.restarts += made.result.restarts
    if way == "follow":
        mine = [trace for trace in list(agent.traces)[known:] if trace.lane("load")]
        spans = [span for trace in (*theirs, *mine) for span in trace.spans]
        label = f"{shape.workload.shape.upper()}: prefiller's compute and saves, then decoder's loads"
        shape.trace = StepTrace(0, 0, label, sorted(spans, key=lambda span: span.start))


def prefill(pipe: Pipe, endpoint: str, workload: Workload) -> None:
    """The prefill engine's process: prompts come as (hand-off, text); answers go as the traces of its steps."""
    torch.set_num_threads(1)
    configure_logs("error", "console")
    engine = Engine(workload.config)
    spoil(engine)
    connection = attach(
        engine,
        endpoint,
        f"prefill-{workload.shape}",
        mode="layerwise",
        chunk_tokens=workload.sizes.chunk,
        connect=PrefillConnection,
        # A busy machine may answer late; a hand-off that is not opened for that would be no fault of what is shown.
        lookup_timeout_s=WAIT_S,
    )
    agent = connection.agent
    agent.wait_warm(WAIT_S)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        name, prompt = job
        known = len(agent.traces)
        engine.submit(prompt, 1, name)
        engine.run(WAIT_S)
        engine.drain(WAIT_S)
        engine.results.pop(name)
        pipe.send([trace.to_dict() for trace in list(agent.traces)[known:]])
    connection.close()


def _hear(pipe: Pipe) -> Any:
    try:
        if pipe.poll(WAIT_S):
            return pipe.recv()
    except (EOFError, OSError):
        raise LayerflowError("the prefill engine's process has ended; what it said last stands above") from None
    raise LayerflowError("the prefill engine's process does not answer")


def _report(found: Sequence[Shape], figures: dict[str, Any], json_file: Path | None, out: Path) -> int:
    screen = console()
    table = Table(title="layerflow demo: prefill and decode apart", title_justify="left")
    table.add_column("")
    for shape in found:
        table.add_column(shape.workload.shape.upper(), justify="right")
    told = [shape.to_dict() for shape in found]
    for name, way in (("a single engine", "single"), ("followed", "follow"), ("loaded when complete", "whole")):
        table.add_row(f"first token, {name} [dim](ms)[/]", *(f"{one['ttft_ms'][way]:,.0f}" for one in told))
    table.add_row("loaded tokens", *(", ".join(map(str, one["loaded_tokens"])) for one in told))
    table.add_row("of the prompt's", *(str(one["prompt_tokens"]) for one in told))
    table.add_row("wrong tokens", *(f"{one['wrong_tokens']} of {one['compared_tokens']}" for one in told))
    table.add_row("wrong KV bytes", *(f"{one['wrong_bytes']:,}" for one in told))
    screen.print(table)
    traces = [shape.trace for shape in found if shape.trace is not None]
    notes = [
        "Both engines are asked at the same moment, and one clock shows both: the prefiller computes and saves, "
        "the decoder loads each layer as it is stored, and computes the last token.",
        f"{MAX_NEW_TOKENS} tokens are decoded. One server; the link between engines and arena is emulated, both ways.",
    ]
    page = render_timeline(traces, "layerflow demo: a decoder follows a prefiller's saves", notes)
    trace = json.dumps(render_perfetto(traces))
    write_all(
        lambda: write_folder("--out", out, page, trace),
        lambda: write_json(json_file, figures),
    )
    for path, what in (("timeline.html", "timeline, for a browser"), ("trace.json", "trace, for ui.perfetto.dev")):
        screen.print(f"{out / path}  ({what})", soft_wrap=True, highlight=False)
    faulty = [shape.workload.shape for shape in found if shape.faulty]
    if faulty:
        console(stderr=True).print(f"layerflow: demo: wrong or not handed over: {', '.join(faulty)}", style="red")
        return EXIT_WRONG
    screen.print(
        "every token and every KV byte identical; all that can be loaded of a prompt was handed over", style="bold"
    )
    return 0
