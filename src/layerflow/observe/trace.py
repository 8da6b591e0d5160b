"""What a step did, as spans on lanes, and how much of its transfer was hidden behind compute."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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


# Spans as bytes, for messages and recordings.

_ROW = struct.Struct("<BBhIIQI")
"""Place of the lane in :data:`LANES`, 1 if emulated, layer, start and length in microseconds, bytes, blocks."""

SPAN_BYTES = _ROW.size

MOST_SPANS = 4096
"""Of one step, packed; what began later is left out."""


def pack_spans(trace: StepTrace) -> bytes:
    """A step's spans by start, 24 bytes each, little-endian; times from :attr:`StepTrace.origin`."""
    spans = sorted(trace.spans, key=lambda span: span.start)[:MOST_SPANS]
    origin = spans[0].start if spans else 0.0
    return b"".join(
        _ROW.pack(
            LANES.index(span.lane),
            span.emulated,
            span.layer,
            min(_MOST_US, round((span.start - origin) * 1e6)),
            min(_MOST_US, round(span.seconds * 1e6)),
            span.nbytes,
            min(_MOST_US, span.blocks),
        )
        for span in spans
    )


def unpack_spans(packed: bytes, origin: float) -> list[Span]:
    """The inverse of :func:`pack_spans`, to the microsecond.

    :raises ProtocolError: these are no packed spans.
    """
    if len(packed) % _ROW.size:
        raise ProtocolError(f"{len(packed)} bytes are no whole number of spans of {_ROW.size} bytes")
    spans = []
    for lane, emulated, layer, start_us, length_us, nbytes, blocks in _ROW.iter_unpack(packed):
        if lane >= len(LANES):
            raise ProtocolError(f"a span on lane {lane}; there are {len(LANES)}")
        start = origin + start_us / 1e6
        spans.append(Span(LANES[lane], layer, start, start + length_us / 1e6, nbytes, blocks, bool(emulated)))
    return spans


_MOST_US = 2**32 - 1


class StepFigures(NamedTuple):
    """How well one direction of a step's transfer was hidden.

    :param transfer_ms: time during which at least one batch was moving.
    :param exposed_ms: time that the engine stood still for it (load) or that it outlasted compute (save).
    :param hidden_ms: ``max(0, transfer - exposed)``.
    :param overlap: ``hidden / transfer``, 0 to 1; 0.0 where nothing moved.
    :param bytes: bytes moved.
    :param layers: layers moved.
    :param bound: the highest overlap that this transfer could reach next to this compute, `overlap` to 1.
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

    and the bound from each layer's own transfer and compute, see :func:`_least_exposed`::

        bound = 1 - least exposed / T

    For equal layers that follow each other without a pause it is :func:`overlap_bound`.
    """
    moved = trace.lane(direction)
    compute = trace.lane("compute")
    total = _union(moved)
    exposed = _exposed_save(trace, moved) if direction == "save" else _exposed_load(trace)
    least = exposed
    if moved and compute:
        least = _least_exposed(*(_saves_backwards if direction == "save" else _loads)(trace, compute, moved))
    whole = any(span.layer == WHOLE_STEP for span in moved)
    hidden = max(0.0, total - exposed)
    return StepFigures(
        transfer_ms=total * 1e3,
        exposed_ms=exposed * 1e3,
        hidden_ms=hidden * 1e3,
        overlap=hidden / total if total > 0 else 0.0,
        bytes=sum(span.nbytes for span in moved),
        layers=max(1, _layers(compute)) if whole else _layers(moved),
        bound=max(0.0, 1.0 - least / total) if total > 0 else 0.0,
    )


def overlap_bound(transfer: float, layers: int, compute_per_layer: float) -> float:
    """The highest share of a transfer of equal layers that can hide behind compute, 0 to 1.

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
    """Seconds covered by at least one of `spans`."""
    return _measure((span.start, span.stop) for span in spans)


class _Moved(NamedTuple):
    """One transfer, or a layer's part of one that carried all layers."""

    layer: int
    start: float
    stop: float
    weight: float


_Interval = tuple[float, float]


def _loads(
    trace: StepTrace, compute: list[Span], moved: list[Span]
) -> tuple[list[_Moved], dict[int, float], list[_Interval]]:
    """What :func:`_least_exposed` needs of loads: a layer's load ends before the layer's compute starts."""
    due: dict[int, float] = {}
    for span in compute:  # by start time
        due.setdefault(span.layer, span.start)
    waits = [(span.start, span.stop) for span in trace.lane("wait")]
    return _by_layer(moved, due, 1), due, waits


def _saves_backwards(
    trace: StepTrace, compute: list[Span], moved: list[Span]
) -> tuple[list[_Moved], dict[int, float], list[_Interval]]:
    """What :func:`_least_exposed` needs of saves, as loads under a clock that runs backwards.

    A layer's save starts after the layer's compute has ended, and the wait is from the end of compute to the last save.
    """
    ends: dict[int, float] = {}
    for span in compute:
        ends[span.layer] = max(ends.get(span.layer, span.stop), span.stop)
    due = {layer: -end for layer, end in sorted(ends.items(), key=lambda item: -item[1])}
    waits = [(-max(span.stop for span in moved), -max(ends.values()))]
    return _by_layer(moved, due, -1), due, waits


def _by_layer(moved: list[Span], due: Mapping[int, float], clock: int) -> list[_Moved]:
    """The transfers of layers that were computed. One of all layers is taken as so many equal ones in their order.

    :param clock: 1, or -1 for a clock that runs backwards.
    """
    sized = any(span.nbytes for span in moved)
    parts = []
    for span in moved:
        weight = span.nbytes if sized else span.seconds
        start, stop = sorted((clock * span.start, clock * span.stop))
        if span.layer != WHOLE_STEP:
            parts.append(_Moved(span.layer, start, stop, weight))
            continue
        each = (stop - start) / len(due)
        parts += [
            _Moved(layer, start + number * each, start + (number + 1) * each, weight / len(due))
            for number, layer in enumerate(due)
        ]
    return parts


def _least_exposed(moved: list[_Moved], due: Mapping[int, float], waits: list[_Interval]) -> float:
    """Seconds that the engine had to wait, however well these transfers had been scheduled.

    Until a layer is due, the link has to carry it and the layers before it. That takes their part of the whole
    transfer by size, or the time that they did take where it is less. All other time since the first byte is slack, by
    which they could have come earlier. The engine's waits until then, less this slack, are what the layer costs.
    A layer's transfers count up to the moment when it is due, so that the slack is never negative: the result is at
    most the sum of the waits.

    :param due: when each layer's compute starts, in this order.
    """
    begin = min(part.start for part in moved)
    total = _measure([(part.start, part.stop) for part in moved])
    weights = sum(part.weight for part in moved)
    needed: dict[int, list[_Moved]] = {}
    for part in moved:
        needed.setdefault(part.layer, []).append(part)
    carried, weight, least = _Covered(), 0.0, 0.0
    waited, ahead = _Covered(), deque(sorted((max(start, begin), stop) for start, stop in waits if stop > begin))
    for layer, start in due.items():
        parts = needed.get(layer, [])
        carried.add((part.start, min(part.stop, start)) for part in parts)
        weight += sum(part.weight for part in parts)
        while ahead and ahead[0][0] < start:
            wait = ahead.popleft()
            waited.add([(wait[0], min(wait[1], start))])
            if wait[1] > start:
                ahead.appendleft((start, wait[1]))
                break
        at_least = min(carried.seconds, total * weight / weights if weights else 0.0)
        slack = max(0.0, start - begin) - at_least
        least = max(least, waited.seconds - slack)
    return least


class _Covered:
    """The union of intervals that come in the order of their starts, or nearly so.

    :ivar seconds: that at least one of them covers.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._intervals: list[_Interval] = []
        self._reached = float("-inf")

    def add(self, intervals: Iterable[_Interval]) -> None:
        """Intervals whose stop is not after their start cover nothing."""
        for start, stop in sorted(intervals):
            if stop <= start:
                continue
            if self._intervals and start < self._intervals[-1][0]:
                self._intervals.append((start, stop))
                self._intervals.sort()
                self.seconds = _measure(self._intervals)
            else:
                self._intervals.append((start, stop))
                self.seconds += max(0.0, stop - max(start, self._reached))
            self._reached = max(self._reached, stop)


def _measure(intervals: Iterable[_Interval]) -> float:
    """Seconds covered by at least one of them."""
    covered, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


# Step traces as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.
#
# Format: "Trace Event Format" (Google, 2016): complete events (``"ph": "X"``) with `ts` and `dur` in
# microseconds, names through metadata events (``"ph": "M"``).


def render(traces: Sequence[StepTrace]) -> dict[str, Any]:
    """The JSON object to dump: one process per trace, one thread per row of a lane.

    Every trace starts at 0, so that steps measured at different times lie below each other. A lane
    whose spans overlap (two copy threads) becomes several threads: complete events of one thread must nest.
    """
    events: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces, start=1):
        events.append(_name(pid, 0, "process_name", name=trace.label))
        events.append(_name(pid, 0, "process_sort_index", sort_index=pid))
        origin, tid = trace.origin, 0
        for lane in LANES:
            for number, row in enumerate(rows(trace.lane(lane)), start=1):
                tid += 1
                events.append(_name(pid, tid, "thread_name", name=lane if number == 1 else f"{lane} {number}"))
                events.append(_name(pid, tid, "thread_sort_index", sort_index=tid))
                events.extend(_complete(pid, tid, span, origin, trace) for span in row)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(pid: int, tid: int, what: str, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _complete(pid: int, tid: int, span: Span, origin: float, trace: StepTrace) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": span.lane,
        "name": "all layers" if span.layer == WHOLE_STEP else f"layer {span.layer}",
        "ts": round((span.start - origin) * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "args": {
            "layer": span.layer,
            "bytes": span.nbytes,
            "blocks": span.blocks,
            "emulated": span.emulated,
            "session": trace.session,
            "step": trace.step,
        },
    }
