"""Reference engines of the demo: fresh ones with a spoilt cache, and one prompt answered and looked into."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from layerflow.agent import Agent
from layerflow.errors import LayerflowError
from layerflow.observe.trace import WHOLE_STEP, StepTrace
from layerflow_cli.demo.workload import MAX_NEW_TOKENS, Workload
from layerflow_engine import Engine, Result, StepReport
from layerflow_engine.cache import NULL_BLOCK
from layerflow_engine.connection import StepHooks
from layerflow_engine.glue import LayerflowConnection, attach
from layerflow_engine.request import TokenSpan

SETTLE_TIMEOUT_S = 60.0
SPOILT_BYTE = 0x55

Mode = Literal["layerwise", "bulk"]
KvBytes = dict[tuple[int, str], np.ndarray]
"""By layer and plane: the bytes of the prefix's blocks, uint8."""


@dataclass(slots=True)
class Answer:
    """One prompt's way through an engine.

    :ivar prefill: the forward passes up to the first token.
    :ivar kv: the prefix's KV as the engine had it when the first token came.
    :ivar traces: the steps that moved anything, with the compute of each layer.
    """

    result: Result
    prefill: list[StepReport]
    kv: KvBytes
    traces: list[StepTrace] = field(default_factory=list)


class Noting(LayerflowConnection):
    """Remembers when steps were opened, in monotonic seconds: the first moment at which a fetch delays an engine."""

    def __init__(self, honest: LayerflowConnection) -> None:
        super().__init__(honest.agent, honest.mode)
        self._opened: list[float] = []

    def open_step(self, spans: Sequence[TokenSpan]) -> StepHooks:
        """See :class:`LayerflowConnection`."""
        self._opened.append(time.monotonic())
        return super().open_step(spans)

    def note(self, trace: StepTrace) -> None:
        """Add to a loading step's trace how long its objects took: from its opening to the end of its last copy."""
        loads = trace.lane("load")
        if loads:
            begun = min(span.start for span in trace.spans if span.lane in ("wait", "compute"))
            opened = max(moment for moment in self._opened if moment <= begun)
            nbytes = sum(span.nbytes for span in loads)
            trace.add("link", WHOLE_STEP, opened, max(span.stop for span in loads), nbytes=nbytes)


@dataclass(slots=True)
class Served:
    """An engine connected to a server."""

    engine: Engine
    agent: Agent
    connection: Noting


@contextlib.contextmanager
def served(workload: Workload, endpoint: str, name: str, mode: Mode, device: str = "cpu") -> Iterator[Served]:
    """A fresh engine that knows nothing but its weights, attached for the length of a with-block.

    :param device: of its cache.
    :raises LayerflowError: the server cannot be reached, or keeps what the demo needs to be absent.
    """
    engine = Engine(workload.config, device=device)
    spoil(engine)
    # A busy machine may answer a lookup late; a miss for that would be no fault of what is shown here.
    attached = attach(
        engine,
        endpoint,
        f"demo-{workload.shape}-{name}",
        mode=mode,
        chunk_tokens=workload.sizes.chunk,
        lookup_timeout_s=SETTLE_TIMEOUT_S,
        wait_s=SETTLE_TIMEOUT_S,
    )
    connection = Noting(attached)
    engine.connect(connection)
    try:
        agent = connection.agent
        terms = agent.terms
        if terms is None:
            raise LayerflowError(f"{endpoint}: no server took the demo's engine; is `layerflow run` up there?")
        if terms.save_partial:
            raise LayerflowError(
                f"{endpoint}: the server also stores partial chunks, then a hit leaves nothing to compute; "
                "write `layerflow run --set transfer.discard_partial_chunks=true`, or set "
                "transfer.discard_partial_chunks = true in its file, which it takes while it runs"
            )
        if not agent.wait_warm(SETTLE_TIMEOUT_S):
            raise LayerflowError(f"{endpoint}: the arena was not mapped within {SETTLE_TIMEOUT_S:g} s")
        yield Served(engine, agent, connection)
    finally:
        connection.close()


def spoil(engine: Engine) -> None:
    """Fill the cache with rubbish: a byte that never arrives is seen, and no copy pays for untouched pages."""
    for planes in engine.cache.tensors.values():
        for plane in planes.values():
            rubbish = float("nan") if plane.is_floating_point() else SPOILT_BYTE
            rest = plane[NULL_BLOCK + 1 :]
            rest.copy_(torch.full(rest.shape, rubbish, dtype=rest.dtype))


def answer(engine: Engine, workload: Workload, prompt: str, request_id: str = "", loaded: int = 0) -> Answer:
    """Submit, and step until the answer is there.

    :param loaded: keep the KV that a hit of so many tokens loads; 0 = of the prefix.
    """
    request = engine.submit(prompt, MAX_NEW_TOKENS, request_id)
    prefill: list[StepReport] = []
    while not prefill or prefill[-1].spans[0].stop < workload.prompt_tokens:
        if not engine.step() or engine.last_step is None:
            raise LayerflowError(f"{workload.shape}: the engine could not compute the demo's prompt")
        prefill.append(engine.last_step)
    # Now and not later: the answer's tokens may take over blocks that slid out of a window.
    kv = _kv_of(engine, workload, prefill[-1], loaded)
    engine.run()
    return Answer(engine.results.pop(request), prefill, kv)


def answer_served(served: Served, workload: Workload, prompt: str) -> Answer:
    """Like :func:`answer`; returns once everything is stored and every trace is in.

    :raises LayerflowError: a step's end was not reported.
    """
    agent = served.agent
    known = len(agent.traces)
    made = answer(served.engine, workload, prompt)
    served.engine.drain(SETTLE_TIMEOUT_S)
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while agent.statistics().open_steps:
        if time.monotonic() > deadline:
            raise LayerflowError(f"{workload.shape}: a step is still open after {SETTLE_TIMEOUT_S:g} s")
        time.sleep(0.001)
    traces = sorted(list(agent.traces)[known:], key=lambda trace: trace.step)
    made.traces = traces[: len(made.prefill)]
    return made


def _kv_of(engine: Engine, workload: Workload, report: StepReport, loaded: int) -> KvBytes:
    tables = report.spans[0].request.tables
    kept: KvBytes = {}
    for layer, planes in engine.cache.tensors.items():
        numbers = workload.loaded_blocks(layer, loaded)
        blocks = torch.from_numpy(tables[engine.cache.group_of[layer]][numbers.start : numbers.stop])
        for name, plane in planes.items():
            kept[layer, name] = engine.cache.read(plane, blocks).view(torch.uint8).numpy()
    return kept
