"""Which way a hit is used: learns this worker's link and compute from finished steps, and applies the core's policy."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence

from layerflow.agent.values import Hit, StepRequest
from layerflow.flow.estimators import ComputeModel, LinkModel, attention_pairs
from layerflow.flow.policy import Inputs, Mode, choose
from layerflow.observe.trace import StepTrace
from layerflow.spec import ModelSpec

STEP_SECONDS = 1.5e-3
"""From opening a step to its first batch: two messages, a plan, some wake-ups (``layerflow bench overlap``)."""


class Advisor:
    """One worker's figures. Thread-safe: steps finish on one thread, requests are judged on another."""

    def __init__(self, spec: ModelSpec) -> None:
        self._layers = spec.num_layers
        payload = sum(len(group.layers) * group.bytes_per_block / group.block_size for group in spec.groups)
        self._bytes_per_token = payload / self._layers
        self._link = LinkModel()
        self._compute = ComputeModel()
        self._lock = threading.Lock()

    def observe(self, trace: StepTrace, work: tuple[int, int] | None) -> None:
        """A step has finished.

        :param work: its new tokens and their context, see :func:`work_of`; None = not known.
        """
        with self._lock:
            for span in trace.spans:
                if span.lane == "load":
                    self._link.observe(span.nbytes, span.seconds)
            # The first layer's span also holds what came before it; the median layer is the honest one.
            layers = [span.seconds for span in trace.spans if span.lane == "compute"]
            if work is not None and len(layers) == self._layers:
                self._compute.observe(*work, statistics.median(layers))

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
            inputs = Inputs(
                hit_tokens=hit.tokens,
                new_tokens=prompt_tokens - hit.tokens,
                layers=self._layers,
                bytes_per_token=self._bytes_per_token,
                link=self._link.estimate,
                compute=self._compute.estimate,
                step_seconds=STEP_SECONDS,
            )
        return choose(inputs)


def work_of(requests: Sequence[StepRequest]) -> tuple[int, int] | None:
    """New tokens of a step, and the context that makes its attention cost the same as one request's."""
    tokens = sum(stop - start for start, stop in (request.save for request in requests))
    if tokens <= 0:
        return None
    pairs = sum(attention_pairs(stop - start, start) for start, stop in (request.save for request in requests))
    return tokens, max(0, round((pairs - tokens * (tokens + 1) / 2) / tokens))
