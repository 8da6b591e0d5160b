"""What moving and computing cost here, as measured, and whether a hit is worth loading."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence

from layerflow.agent.step.step import Step
from layerflow.agent.values import Hit, Measured, StepRequest
from layerflow.device.base import Device
from layerflow.flow.cost import (
    ComputeCost,
    ComputeModel,
    LinkCost,
    LinkModel,
    Mode,
    ModeInputs,
    attention_pairs,
    choose,
)
from layerflow.observe.trace import StepFigures, StepTrace, figures
from layerflow.spec import ModelSpec
from layerflow.wire.messages import Figures

STEP_SECONDS = 1.5e-3
"""From opening a step to its first batch: two messages, a plan, some wake-ups (``layerflow bench overlap``)."""

DOUBT = 0.01
"""How much better the link is believed to be for each recomputed hit since it was last seen, so that one that
has recovered is found out: where recomputing is 1.5 times as quick after some 40 hits, where 10 times after 230."""


class LoadPolicy:
    """One worker's figures. Thread-safe: steps finish on one thread, requests are judged on another."""

    def __init__(self, spec: ModelSpec) -> None:
        self._layers = spec.num_layers
        self._groups = [(group.rules, len(group.layers) * group.bytes_per_block) for group in spec.groups]
        self._link = LinkModel()
        self._compute = ComputeModel()
        # Worked out when a step has finished, not when an engine waits for advice.
        self._known: tuple[LinkCost | None, ComputeCost | None] = (None, None)
        self._recomputed = 0
        self._lock = threading.Lock()

    def observe(self, loaded: StepFigures, work: tuple[int, int] | None, layer_s: float | None) -> None:
        """A step has finished.

        :param loaded: its loads' figures.
        :param work: its new tokens and their context, see :func:`work_of`; None = not known.
        :param layer_s: compute time of one layer; None = not known.
        """
        with self._lock:
            # A step's loads as a whole: batches queue in the lane and overlap on the link, one by one they mislead.
            if loaded.bytes:
                self._link.observe(loaded.bytes, loaded.transfer_ms / 1e3)
                self._recomputed = 0
            if work is not None and layer_s is not None:
                self._compute.observe(*work, layer_s)
            self._known = (self._link.estimate, self._compute.estimate)

    @property
    def costs(self) -> tuple[LinkCost | None, ComputeCost | None]:
        """What is known of this worker's link and compute."""
        return self._known

    def compute_seconds(self, tokens: int) -> float | None:
        """How long computing a prompt of so many tokens takes; None = not known yet."""
        compute = self._known[1]
        return self._layers * compute.layer_seconds(tokens, 0) if compute is not None else None

    def adopt(self, link: LinkCost | None, compute: ComputeCost | None) -> None:
        """Take over what another worker of the same engine has learnt; a scheduler sees no transfer itself."""
        with self._lock:
            if self._known != (link, compute):
                self._known = (link, compute)
                self._recomputed = 0

    def advise(self, setting: str, hit: Hit, prompt_tokens: int) -> Mode:
        """How to use a hit.

        :param setting: ``transfer.mode``: ``"auto"``, ``"layerwise"`` or ``"bulk"``.
        :param prompt_tokens: of the whole prompt.
        """
        if hit.tokens <= 0:
            return Mode.RECOMPUTE
        if setting != "auto":
            return Mode(setting)
        with self._lock:
            link, compute = self._known
            inputs = ModeInputs(
                hit_tokens=hit.tokens,
                new_tokens=prompt_tokens - hit.tokens,
                layers=self._layers,
                bytes_per_token=self._loaded_bytes(hit.tokens) / hit.tokens / self._layers,
                link=_improved(link, (1.0 + DOUBT) ** self._recomputed) if link is not None else None,
                compute=compute,
                step_seconds=STEP_SECONDS,
            )
            mode = choose(inputs)
            self._recomputed += mode is Mode.RECOMPUTE
        return mode

    def _loaded_bytes(self, hit: int) -> int:
        """Return the bytes of a hit of `hit` tokens, all layers: a window or a state is no larger for a longer hit."""
        return sum(
            block * (-(-hit // rules.block_size) - rules.first_token(hit) // rules.block_size)
            for rules, block in self._groups
        )


def layer_seconds(trace: StepTrace) -> float | None:
    """Compute time of one layer: from one layer's KV to the next one's, waits not counted; None = not known.

    Not the compute spans' length: a layer's KV may be written before its attention begins, and what an
    engine does before the first layer is no layer's.
    """
    ends = sorted((span.layer, span.stop) for span in trace.spans if span.lane == "compute")
    if len(ends) < 2 or ends[-1][0] == ends[0][0]:
        return None
    (first, began), (last, ended) = ends[0], ends[-1]
    waited = sum(span.seconds for span in trace.spans if span.lane == "wait" and span.start >= began)
    return max(0.0, ended - began - waited) / (last - first)


def _improved(link: LinkCost, times: float) -> LinkCost:
    return dataclasses.replace(link, bandwidth=link.bandwidth * times, latency=link.latency / times)


def work_of(requests: Sequence[StepRequest]) -> tuple[int, int] | None:
    """New tokens of a step, and the context that makes its attention cost the same as one request's."""
    tokens = sum(stop - start for start, stop in (request.save for request in requests))
    if tokens <= 0:
        return None
    pairs = sum(attention_pairs(stop - start, start) for start, stop in (request.save for request in requests))
    return tokens, max(0, round((pairs - tokens * (tokens + 1) / 2) / tokens))


KEPT_STEPS = 64

PATIENCE_S = 1e-3
"""Working figures out takes the interpreter some 0.5 ms; the thread that waits for the step's end goes first."""


class Measures:
    """The last finished steps: their traces and their figures. Thread-safe.

    :param device: whose events say how long layers were computed. On the cpu the engine's spans do; on a device these
        are the times of enqueueing. The lanes' spans end where the copies have, on a device too.

    :ivar traces: oldest first.
    :ivar measured: oldest first; the reader takes them from the left.
    """

    def __init__(self, advisor: LoadPolicy, device: Device) -> None:
        self.traces: deque[StepTrace] = deque(maxlen=KEPT_STEPS)
        self.measured: deque[Measured] = deque(maxlen=KEPT_STEPS)
        self._policy = advisor
        self._device = device
        self._count = 0
        self._ended: deque[tuple[float, Step]] = deque()
        self._lock = threading.Lock()

    def ended(self, step: Step) -> None:
        """A step is over; call before its end is reported."""
        self._ended.append((time.monotonic(), step))

    @property
    def pending(self) -> bool:
        """Are there steps to be worked out?"""
        return bool(self._ended)

    def kept(self, after: int, since: float) -> tuple[int, list[StepTrace]]:
        """How many steps were measured so far, and the traces that are kept of those behind the first `after`.

        :param since: of steps that ended at this time or later, monotonic seconds.
        """
        with self._lock:
            count, traces = self._count, list(self.traces)
        new = traces[max(0, len(traces) - max(0, count - after)) :] if count > after else []
        return count, [trace for trace in new if trace.spans and trace.origin + trace.duration >= since]

    def work_out(self, until: float | None = None) -> list[Figures]:
        """The figures, for the server, of what has ended and was not worked out yet.

        :param until: of what had ended :data:`PATIENCE_S` before, monotonic seconds; None = of everything.
        """
        told = []
        with self._lock:
            while self._ended and (until is None or self._ended[0][0] + PATIENCE_S <= until):
                told.append(self._work_out(self._ended.popleft()[1]))
        return told

    def _work_out(self, step: Step) -> Figures:
        trace = step.finish_trace()
        load, save = figures(trace, "load"), figures(trace, "save")
        self.traces.append(trace)
        self._count += 1
        self.measured.append(Measured(step.number, load, save))
        layer_s = layer_seconds(trace) if self._device.kind == "cpu" else step.layer_seconds_on_device()
        self._policy.observe(load, step.work, layer_s)
        return Figures(
            step.number,
            load.bytes,
            load.transfer_ms / 1e3,
            load.exposed_ms / 1e3,
            save.bytes,
            save.transfer_ms / 1e3,
            save.exposed_ms / 1e3,
            *(step.work or (0, 0)),
            layer_s or 0.0,
        )
