"""What a shape's runs came to: the figures of the JSON file, the checks, the steps to draw."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from layerflow.observe.trace import StepFigures, StepTrace, figures
from layerflow_cli.demo.engines import Answer
from layerflow_cli.demo.workload import SHAPES, Workload

OF_BOUND = 0.9
"""A layer-wise load should reach so much of the overlap that its schedule allows."""


@dataclass(slots=True)
class Outcome:
    """One cache shape.

    :ivar loads: the lane whose spans are what a load takes: ``load`` (arena to engine), or ``link``: from the step's
        opening, when its objects are on their way already, to the end of its last copy.
    :ivar answers: per way (``without`` layerflow, ``cold``, ``bulk``, ``layerwise``) every prompt answered.
    :ivar wrong_tokens: tokens that differ from an engine's that computed everything.
    :ivar control_tokens: wrong tokens after one loaded layer had been spoilt on purpose.
    """

    workload: Workload
    loads: Literal["load", "link"] = "load"
    answers: dict[str, list[Answer]] = field(
        default_factory=lambda: {"without": [], "cold": [], "bulk": [], "layerwise": []}
    )
    wrong_tokens: int = 0
    wrong_bytes: int = 0
    compared_tokens: int = 0
    compared_bytes: int = 0
    control_tokens: int = 0
    control_bytes: int = 0

    def ttft_ms(self, way: str) -> float:
        """Median time from submission to the first token."""
        return statistics.median(made.result.ttft_s for made in self.answers[way]) * 1e3

    def typical(self, way: str) -> tuple[StepTrace, StepFigures]:
        """The loading step with the median exposed time; cold: the last saving step of the last prompt."""
        if way == "cold":
            trace = [trace for trace in self.answers["cold"][-1].traces if trace.lane("save")][-1]
            return trace, figures(trace, "save")
        steps = [trace for made in self.answers[way] for trace in made.traces if trace.lane("load")]
        steps.sort(key=lambda trace: figures(trace, self.loads).exposed_ms)
        trace = steps[(len(steps) - 1) // 2]
        return trace, figures(trace, self.loads)

    def traces(self) -> list[StepTrace]:
        """What the timeline shows, labelled."""
        shape = self.workload.shape.upper()
        cold, bulk, layerwise = (self.typical(way)[0] for way in ("cold", "bulk", "layerwise"))
        cold.label, bulk.label, layerwise.label = (
            f"{shape}: cold, save",
            f"{shape}: bulk load",
            f"{shape}: layer-wise load",
        )
        return [cold, bulk, layerwise]

    def to_dict(self) -> dict[str, Any]:
        """The shape's part of the JSON file; times in ms, overlaps 0 to 1."""
        measured = self.typical("layerwise")[1]
        sizes = self.workload.sizes
        return {
            "model": SHAPES[self.workload.shape],
            "layers": self.workload.config.num_layers,
            "prompt_tokens": self.workload.prompt_tokens,
            "loaded_tokens": sizes.prefix,
            "tokens_identical": not self.wrong_tokens,
            "wrong_tokens": self.wrong_tokens,
            "compared_tokens": self.compared_tokens,
            "wrong_bytes": self.wrong_bytes,
            "compared_bytes": self.compared_bytes,
            "ttft_ms": {way: self.ttft_ms(way) for way in ("without", "cold", "bulk", "layerwise")},
            "bytes": measured.bytes,
            "transfer_ms": measured.transfer_ms,
            "hidden_ms": measured.hidden_ms,
            "exposed_ms": measured.exposed_ms,
            "overlap": measured.overlap,
            "overlap_bound": measured.bound,
            "overlap_of_bound": self.of_bound,
            "bulk": _direction(self.typical("bulk")[1]),
            "save": _direction(self.typical("cold")[1]),
            "control_changes_tokens": self.control_tokens > 0,
            "control_wrong_bytes": self.control_bytes,
        }

    @property
    def of_bound(self) -> float:
        """The layer-wise load's share of the overlap that its schedule allows."""
        measured = self.typical("layerwise")[1]
        return measured.overlap / measured.bound if measured.bound > 0 else 0.0

    def faults(self) -> list[str]:
        """What must never happen, one line each."""
        found = []
        if self.wrong_tokens:
            found.append(f"{self.wrong_tokens} of {self.compared_tokens:,} tokens differ")
        if self.wrong_bytes:
            found.append(f"{self.wrong_bytes:,} of {self.compared_bytes:,} loaded KV bytes differ")
        if not self.control_tokens or not self.control_bytes:
            found.append("one layer's KV was spoilt on purpose and the check did not see it")
        return found

    def shortfalls(self) -> list[str]:
        """Times that are not as they should be, one line each; a busy machine can cause them."""
        found = []
        if self.of_bound < OF_BOUND:
            found.append(f"overlap is {self.of_bound:.0%} of its bound, below {OF_BOUND:.0%}")
        if self.ttft_ms("layerwise") > self.ttft_ms("cold"):
            found.append("the first token comes later than cold")
        return found


def differing(expected: Sequence[int], found: Sequence[int]) -> int:
    """Tokens that differ, missing ones included."""
    pairs = sum(one != other for one, other in zip(expected, found, strict=False))
    return pairs + abs(len(expected) - len(found))


def _direction(measured: StepFigures) -> dict[str, Any]:
    return {
        "bytes": measured.bytes,
        "transfer_ms": measured.transfer_ms,
        "hidden_ms": measured.hidden_ms,
        "exposed_ms": measured.exposed_ms,
        "overlap": measured.overlap,
    }
