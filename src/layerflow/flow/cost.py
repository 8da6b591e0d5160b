"""Layer by layer, in bulk, or not at all: which way a request's cached tokens reach it soonest.

With `h` hit tokens, `n` new ones, `L` layers, `b` bytes of a token in a layer, link latency `l` and
bandwidth `B`, and the compute model's layer time `C(n, h)`::

    t = h*b / B                                   transfer of one layer
    c = C(n, h)                                   compute of one layer of the new tokens
    layerwise = L*c + (l + t) + (L-1) * max(0, t - c) + step + L*m*batch
    bulk      = L*t + l + L*c + step + ceil(L*h*b / cap)*batch
    recompute = L * C(h + n, 0)

Layerwise exposes the first layer and, where the link is slower than compute, what each further layer
arrives late; bulk exposes the whole transfer but pays the per-batch overhead once per `cap` bytes
instead of at least once per layer (`m = ceil(h*b / cap)`).
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# What the link and the model's compute cost, learned from what was observed. Pure: no clock.
#
# Both are least squares of the *relative* error: short work counts as much as long work, and what took absurdly
# long (a compilation, a pause) weighs next to nothing. Both forget: a link that slows down or a model that is
# recompiled shows within tens of observations. But a thousand decisions about short prompts do not wash out what
# is known of long ones: observations are kept as one weighted mean per shape (sizes within a factor of two), and
# no shape weighs more than :data:`_MOST` observations. Where the latest observations contradict that, their level
# is believed, for shapes not seen lately too. Both say when they know nothing yet.


DEFAULT_MIN_OBSERVATIONS = 3
DEFAULT_FORGETTING = 0.97
_MOST, _LEAST = 8.0, 0.02  # a shape's weight, in observations
_FORGOTTEN = 1e-9
_LATEST = 12  # observations
_CONTRADICTION = 1.25  # how far off, as a factor, the median of the latest must be
_ALIKE = 1e-6  # regressors whose directions differ by less are one


@dataclass(frozen=True, slots=True)
class LinkCost:
    """`n` bytes take ``latency + n / bandwidth`` seconds.

    :param bandwidth: bytes per second.
    :param latency: seconds.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """One layer of `n` new tokens over `h` of context: ``fixed + n * token + attention_pairs(n, h) * pair`` seconds."""

    fixed: float
    token: float
    pair: float

    def layer_seconds(self, new_tokens: int, context_tokens: int) -> float:
        """Compute time of one layer, in seconds."""
        return self.fixed + new_tokens * self.token + attention_pairs(new_tokens, context_tokens) * self.pair


def attention_pairs(new_tokens: int, context_tokens: int) -> float:
    """Query-key pairs of causal attention: every new token sees the context, and itself and the new ones before it."""
    return new_tokens * context_tokens + new_tokens * (new_tokens + 1) / 2


class _Costs:
    """Coefficients, none negative, of ``seconds = sum(coefficient * amount)``, from weighted means by shape.

    While the shapes seen do not tell the amounts apart, the second is believed in: bytes, or new tokens.
    """

    __slots__ = ("_age", "_forgetting", "_latest", "_means", "_min", "_solution")

    def __init__(self, forgetting: float, min_observations: int) -> None:
        self._forgetting, self._min = forgetting, min_observations
        self._age = 0
        # By shape: age when last seen, weight, and the weighted sums of amount ÷ seconds.
        self._means: dict[Hashable, tuple[int, float, tuple[float, ...]]] = {}
        self._latest: deque[tuple[float, ...]] = deque(maxlen=_LATEST)
        self._solution: tuple[float, ...] | None = None

    def observe(self, shape: Hashable, amounts: Sequence[float], seconds: float) -> None:
        self._age += 1
        self._solution = None
        last, weight, sums = self._means.pop(shape, (0, 0.0, (0.0,) * len(amounts)))
        keep = self._forgetting ** (self._age - last)
        row = tuple(amount / seconds for amount in amounts)
        self._latest.append(row)
        sums = tuple(keep * total + value for total, value in zip(sums, row, strict=True))
        self._means[shape] = (self._age, keep * weight + 1.0, sums)
        oldest = next(iter(self._means))
        if self._forgetting ** (self._age - self._means[oldest][0]) < _FORGOTTEN:
            del self._means[oldest]

    def solution(self) -> tuple[float, ...] | None:
        """None before enough was observed."""
        if self._age < self._min:
            return None
        if self._solution is None:
            self._solution = self._levelled(self._solve())
        return self._solution

    def _levelled(self, solution: tuple[float, ...]) -> tuple[float, ...]:
        level = statistics.median(sum(map(operator.mul, solution, row)) for row in self._latest)
        if level <= 0.0 or 1 / _CONTRADICTION < level < _CONTRADICTION:
            return solution
        return tuple(value / level for value in solution)

    def _solve(self) -> tuple[float, ...]:
        rows = []
        for last, weight, sums in self._means.values():
            now = self._forgetting ** (self._age - last) * weight
            share = math.sqrt(min(_MOST, max(_LEAST, now)))
            rows.append((share, *(share * total / weight for total in sums)))
        columns = list(zip(*rows, strict=True))
        # Columns are scaled to a length of 1, so that a pivot says how far one is from the span of the others.
        scale = [math.sqrt(sum(value * value for value in column)) for column in columns]
        gram = [
            [sum(map(operator.mul, one, other)) / a / b for other, b in zip(columns, scale, strict=True)]
            for one, a in zip(columns, scale, strict=True)
        ]
        amounts = range(1, len(columns))
        subsets: list[tuple[int, ...]] = [(2,)]
        for count in amounts:
            subsets += itertools.combinations(amounts, count)
        best, least = (0.0,) * len(amounts), math.inf
        for subset in subsets:
            found = _solved([[gram[i][j] for j in subset] + [gram[i][0]] for i in subset])
            if found is None or min(found) < 0.0:
                continue
            unexplained = 1.0 - sum(value * gram[i][0] for value, i in zip(found, subset, strict=True))
            if unexplained < least - _ALIKE:
                values = dict(zip(subset, found, strict=True))
                best = tuple(values.get(i, 0.0) * scale[0] / scale[i] for i in amounts)
                least = unexplained
        return best


def _solved(matrix: list[list[float]]) -> list[float] | None:
    """The solution of symmetric equations, right-hand sides in the last column; None if some say the same."""
    size = len(matrix)
    for i in range(size):
        if matrix[i][i] < _ALIKE:
            return None
        for below in range(i + 1, size):
            factor = matrix[below][i] / matrix[i][i]
            matrix[below] = [x - factor * y for x, y in zip(matrix[below], matrix[i], strict=True)]
    values = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * values[j] for j in range(i + 1, size))
        values[i] = (matrix[i][size] - rest) / matrix[i][i]
    return values


class LinkModel:
    """Latency and bandwidth.

    :param forgetting: weight of the past at each observation, below 1.
    """

    __slots__ = ("_costs",)

    def __init__(
        self, *, forgetting: float = DEFAULT_FORGETTING, min_observations: int = DEFAULT_MIN_OBSERVATIONS
    ) -> None:
        self._costs = _Costs(forgetting, min_observations)

    def observe(self, nbytes: int, seconds: float) -> None:
        """`nbytes` took `seconds`. Observations that cannot be are ignored."""
        if nbytes > 0 and 0.0 < seconds < math.inf:
            self._costs.observe(nbytes.bit_length(), (1.0, float(nbytes)), seconds)

    @property
    def estimate(self) -> LinkCost | None:
        """What is known; None before enough was observed. Batches of one size only tell the rate."""
        found = self._costs.solution()
        if found is None:
            return None
        latency, per_byte = found
        return LinkCost(1.0 / per_byte if per_byte > 0.0 else math.inf, latency)


class ComputeModel:
    """A layer's fixed cost, and its costs per token and per query-key pair.

    :param forgetting: weight of the past at each observation, below 1.
    """

    __slots__ = ("_costs",)

    def __init__(
        self, *, forgetting: float = DEFAULT_FORGETTING, min_observations: int = DEFAULT_MIN_OBSERVATIONS
    ) -> None:
        self._costs = _Costs(forgetting, min_observations)

    def observe(self, new_tokens: int, context_tokens: int, seconds: float) -> None:
        """One *layer* of `new_tokens` over `context_tokens` took `seconds`. What cannot be is ignored."""
        if new_tokens > 0 and context_tokens >= 0 and 0.0 < seconds < math.inf:
            shape = (new_tokens.bit_length(), context_tokens.bit_length())
            amounts = (1.0, float(new_tokens), attention_pairs(new_tokens, context_tokens))
            self._costs.observe(shape, amounts, seconds)

    @property
    def estimate(self) -> ComputeCost | None:
        """What is known; None before enough was observed. No coefficient is negative."""
        found = self._costs.solution()
        return ComputeCost(*found) if found is not None else None


DEFAULT_MARGIN = 0.02
"""Where two modes are as good as equal, layerwise leaves the cores to others. A wider one would cost more than what is
estimated badly: a mode slower by 5 % would be kept."""


class Mode(enum.Enum):
    """How a hit is used."""

    LAYERWISE = "layerwise"
    BULK = "bulk"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeInputs:
    """One request's hit and what is known of the machine.

    :param bytes_per_token: bytes of one token in one layer (the mean over layers).
    :param link: None = nothing measured yet.
    :param compute: None = nothing measured yet.
    :param step_seconds: fixed cost of loading anything in a step.
    :param batch_seconds: fixed cost of one batch, whatever it carries.
    :param max_transfer_bytes: the cap on one batch.
    """

    hit_tokens: int
    new_tokens: int
    layers: int
    bytes_per_token: float
    link: LinkCost | None
    compute: ComputeCost | None
    step_seconds: float = 0.0
    batch_seconds: float = 0.0
    max_transfer_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds to the first token from when the request is scheduled, by mode."""

    layerwise: float
    bulk: float
    recompute: float


def forecast(inputs: ModeInputs) -> Forecast | None:
    """The three times; None while the link or the compute is unknown."""
    if inputs.link is None or inputs.compute is None:
        return None
    layers, batch = inputs.layers, inputs.batch_seconds
    layer_bytes = inputs.hit_tokens * inputs.bytes_per_token
    transfer = layer_bytes / inputs.link.bandwidth
    compute = inputs.compute.layer_seconds(inputs.new_tokens, inputs.hit_tokens)
    per_layer = math.ceil(layer_bytes / inputs.max_transfer_bytes)
    in_bulk = math.ceil(layers * layer_bytes / inputs.max_transfer_bytes)
    fixed = inputs.link.latency + inputs.step_seconds
    return Forecast(
        layerwise=layers * compute
        + transfer
        + (layers - 1) * max(0.0, transfer - compute)
        + fixed
        + layers * per_layer * batch,
        bulk=layers * (transfer + compute) + fixed + in_bulk * batch,
        recompute=layers * inputs.compute.layer_seconds(inputs.hit_tokens + inputs.new_tokens, 0),
    )


def choose(inputs: ModeInputs, *, margin: float = DEFAULT_MARGIN) -> Mode:
    """The quickest mode; layerwise unless another is quicker by `margin` (a share), or nothing is known.

    No hit is nothing to load: RECOMPUTE.
    """
    if inputs.hit_tokens <= 0:
        return Mode.RECOMPUTE
    times = forecast(inputs)
    if times is None:
        return Mode.LAYERWISE
    best, mode = times.layerwise * (1.0 - margin), Mode.LAYERWISE
    if times.bulk < best:
        best, mode = times.bulk, Mode.BULK
    if times.recompute < best:
        mode = Mode.RECOMPUTE
    return mode
