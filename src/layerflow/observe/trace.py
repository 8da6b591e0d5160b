"""What a step did, as spans on lanes, and how much of its transfer was hidden behind compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast

import msgspec

from layerflow.errors import ProtocolError

Lane = Literal["compute", "wait", "load", "save", "link"]
LANES: tuple[Lane, ...] = ("compute", "wait", "load", "save", "link")
WHOLE_STEP = -1


class Span(msgspec.Struct, frozen=True, gc=False):
    """One thing that took time.

    :param lane: ``compute`` (a layer's forward), ``wait`` (the engine held until a layer is ready),
        ``load`` and ``save`` (a batch between arena and engine memory), ``link`` (a batch on the way
        between the arena and a slower tier or another host).
    :param layer: the model's layer number, or :data:`WHOLE_STEP` where one span covers all layers.
    :param start: monotonic seconds.
    :param stop: monotonic seconds, not before `start`.
    :param nbytes: bytes moved.
    :param blocks: blocks moved.
    :param emulated: the duration was imposed by a link emulation, not by hardware.
    """

    lane: Lane
    layer: int
    start: float
    stop: float
    nbytes: int = 0
    blocks: int = 0
    emulated: bool = False

    @property
    def seconds(self) -> float:
        """How long it took; never negative."""
        return max(0.0, self.stop - self.start)


class StepTrace(msgspec.Struct):
    """The spans of one step, in no particular order.

    Engine thread, copy lanes and pollers add to one trace without a lock: an append to a list is atomic.

    :param step: the step's number within its session.
    :param session: the session's number.
    :param label: for people, e.g. ``"GQA: layer-wise load"``.
    """

    step: int
    session: int
    label: str
    spans: list[Span] = []

    def add(
        self,
        lane: Lane,
        layer: int,
        start: float,
        stop: float,
        *,
        nbytes: int = 0,
        blocks: int = 0,
        emulated: bool = False,
    ) -> None:
        """Append a span; see :class:`Span`. May be called from any thread."""
        self.spans.append(Span(lane, layer, start, stop, nbytes, blocks, emulated))

    @property
    def origin(self) -> float:
        """Monotonic seconds at which the first span starts; 0.0 without spans."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def duration(self) -> float:
        """Seconds from the first start to the last stop."""
        return max((span.stop for span in self.spans), default=0.0) - self.origin

    @property
    def compute_end(self) -> float | None:
        """Monotonic seconds at which the last layer was computed; None without compute spans."""
        return max((span.stop for span in self.spans if span.lane == "compute"), default=None)

    def lane(self, lane: Lane) -> list[Span]:
        """The spans of one lane by start time."""
        return sorted((span for span in self.spans if span.lane == lane), key=lambda span: (span.start, span.stop))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, ready for JSON or msgpack."""
        return cast(dict[str, Any], msgspec.to_builtins(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepTrace:
        """The inverse of :meth:`to_dict`.

        :raises ProtocolError: naming the field that is missing or of the wrong type.
        """
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"not a step trace: {error}; write traces with StepTrace.to_dict") from error


class StepFigures(NamedTuple):
    """How well one direction of a step's transfer was hidden.

    :param transfer_ms: time during which at least one batch was moving.
    :param exposed_ms: time that the engine stood still for it (load) or that it outlasted compute (save).
    :param hidden_ms: ``max(0, transfer - exposed)``.
    :param overlap: ``hidden / transfer``, 0 to 1; 0.0 where nothing moved.
    :param bytes: bytes moved.
    :param layers: layers moved.
    :param bound: the highest overlap that this transfer could reach next to this compute, 0 to 1.
    """

    transfer_ms: float
    exposed_ms: float
    hidden_ms: float
    overlap: float
    bytes: int
    layers: int
    bound: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second of transfer; 0.0 where nothing moved."""
        return self.bytes / (self.transfer_ms * 1e6) if self.transfer_ms > 0 else 0.0


def figures(trace: StepTrace, direction: Literal["load", "save", "link"] = "load") -> StepFigures:
    """Measure one direction of a step.

    With T = the union of the direction's spans (concurrent batches count once) and L layers::

        load, link:  exposed = sum of the wait spans
        save:  exposed = stop of the last save span - stop of the last compute span, at least 0
        hidden  = max(0, T - exposed)
        overlap = hidden / T

    and the bound, see :func:`overlap_bound`, with c = measured compute time ÷ layers computed.
    """
    moved = trace.lane(direction)
    compute = trace.lane("compute")
    total = _union(moved)
    exposed = _exposed_save(trace, moved) if direction == "save" else _exposed_load(trace)
    computed = _layers(compute)
    layers = max(1, computed) if any(span.layer == WHOLE_STEP for span in moved) else _layers(moved)
    hidden = max(0.0, total - exposed)
    return StepFigures(
        transfer_ms=total * 1e3,
        exposed_ms=exposed * 1e3,
        hidden_ms=hidden * 1e3,
        overlap=hidden / total if total > 0 else 0.0,
        bytes=sum(span.nbytes for span in moved),
        layers=layers,
        bound=overlap_bound(total, layers, _union(compute) / computed if computed else 0.0),
    )


def overlap_bound(transfer: float, layers: int, compute_per_layer: float) -> float:
    """The highest share of a transfer that can hide behind compute, 0 to 1.

    The first layer's load has no compute before it (the last layer's save none behind it), and each
    further layer hides at most one layer of compute. With T = `transfer` and L = `layers`::

        t = T / L
        exposed_min = t + max(0, t - c) * (L - 1)        c = compute_per_layer
        bound = 1 - exposed_min / T, clamped to 0..1

    :param transfer: seconds for all layers.
    :param compute_per_layer: seconds.
    """
    if transfer <= 0 or layers <= 0:
        return 0.0
    per_layer = transfer / layers
    exposed_min = per_layer + max(0.0, per_layer - compute_per_layer) * (layers - 1)
    return min(1.0, max(0.0, 1.0 - exposed_min / transfer))


def rows(spans: Iterable[Span], slack: float = 0.0) -> list[list[Span]]:
    """Share spans out over as few rows as possible so that no two of a row overlap.

    :param slack: seconds by which they may: a batch's end is noticed a little after the next one began to pass.
    """
    shared: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        for row in shared:
            if row[-1].stop <= span.start + slack:
                row.append(span)
                break
        else:
            shared.append([span])
    return shared


def _exposed_load(trace: StepTrace) -> float:
    return sum(span.seconds for span in trace.spans if span.lane == "wait")


def _exposed_save(trace: StepTrace, saves: list[Span]) -> float:
    """Without compute spans nothing hid the saves: all of it is exposed, from the first save's start."""
    if not saves:
        return 0.0
    end = trace.compute_end
    return max(0.0, max(span.stop for span in saves) - (saves[0].start if end is None else end))


def _layers(spans: list[Span]) -> int:
    return len({span.layer for span in spans})


def _union(spans: list[Span]) -> float:
    """Seconds covered by at least one of `spans`, which are sorted by start."""
    covered, reached = 0.0, float("-inf")
    for span in spans:
        covered += max(0.0, span.stop - max(span.start, reached))
        reached = max(reached, span.stop)
    return covered
