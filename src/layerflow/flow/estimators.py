"""What the link and the model's compute cost, learned from what was observed. Pure: no clock.

Both forget: a link that slows down or a model that is recompiled shows within tens of observations.
Both say when they know nothing yet.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MIN_OBSERVATIONS = 3
DEFAULT_FORGETTING = 0.97
_TOKENS, _PAIRS = 1e3, 1e6  # keep the regressors near 1
_PRIOR = 1e6
_MAX_UNCERTAINTY = 1e9  # forgetting pauses here: directions that are never excited must not blow up


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A batch of `n` bytes takes ``latency + n / bandwidth`` seconds.

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


class LinkModel:
    """Latency and bandwidth by least squares over exponentially weighted sums.

    :param forgetting: weight of the past at each observation, below 1.
    """

    __slots__ = ("_count", "_forgetting", "_min", "_w", "_x", "_xx", "_xy", "_y")

    def __init__(
        self, *, forgetting: float = DEFAULT_FORGETTING, min_observations: int = DEFAULT_MIN_OBSERVATIONS
    ) -> None:
        self._forgetting, self._min, self._count = forgetting, min_observations, 0
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        """A batch of `nbytes` took `seconds`. Observations that cannot be are ignored."""
        if nbytes <= 0 or not 0.0 < seconds < float("inf"):
            return
        keep, x = self._forgetting, float(nbytes)
        self._count += 1
        self._w = keep * self._w + 1.0
        self._x = keep * self._x + x
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + x * x
        self._xy = keep * self._xy + x * seconds

    @property
    def estimate(self) -> LinkCost | None:
        """What is known; None before enough was observed."""
        if self._count < self._min:
            return None
        mean_x, mean_y = self._x / self._w, self._y / self._w
        spread = self._xx / self._w - mean_x * mean_x
        slope = (self._xy / self._w - mean_x * mean_y) / spread if spread > 1e-6 * mean_x * mean_x else 0.0
        latency = mean_y - slope * mean_x
        if slope <= 0.0 or latency < 0.0:
            # All of one size, or noise larger than the signal: the mean rate is all that is known.
            return LinkCost(mean_x / mean_y, 0.0)
        return LinkCost(1.0 / slope, latency)


class ComputeModel:
    """Recursive least squares over ``1, tokens, pairs``, of the *relative* error.

    Relative, so that short steps count as much as long ones, and a step that took absurdly long (a
    compilation, a pause) weighs next to nothing.

    :param forgetting: weight of the past at each observation, below 1.
    """

    __slots__ = ("_count", "_covariance", "_forgetting", "_min", "_theta")

    def __init__(
        self, *, forgetting: float = DEFAULT_FORGETTING, min_observations: int = DEFAULT_MIN_OBSERVATIONS
    ) -> None:
        self._forgetting, self._min, self._count = forgetting, min_observations, 0
        self._theta = [0.0, 0.0, 0.0]
        self._covariance = [[_PRIOR if row == column else 0.0 for column in range(3)] for row in range(3)]

    def observe(self, new_tokens: int, context_tokens: int, seconds: float) -> None:
        """One *layer* of `new_tokens` over `context_tokens` took `seconds`. What cannot be is ignored."""
        if new_tokens <= 0 or context_tokens < 0 or not 0.0 < seconds < float("inf"):
            return
        pairs = attention_pairs(new_tokens, context_tokens)
        x = (1.0 / seconds, new_tokens / _TOKENS / seconds, pairs / _PAIRS / seconds)
        matrix = self._covariance
        px = [sum(row[i] * x[i] for i in range(3)) for row in matrix]
        spread = sum(x[i] * px[i] for i in range(3))
        keep = self._forgetting if sum(matrix[i][i] for i in range(3)) < _MAX_UNCERTAINTY else 1.0
        gain = [value / (keep + spread) for value in px]
        error = 1.0 - sum(self._theta[i] * x[i] for i in range(3))
        self._theta = [self._theta[i] + gain[i] * error for i in range(3)]
        self._covariance = [
            [(matrix[row][column] - gain[row] * px[column]) / keep for column in range(3)] for row in range(3)
        ]
        self._count += 1

    @property
    def estimate(self) -> ComputeCost | None:
        """What is known; None before enough was observed. No coefficient is negative."""
        if self._count < self._min:
            return None
        fixed, token, pair = (max(0.0, value) for value in self._theta)
        return ComputeCost(fixed, token / _TOKENS, pair / _PAIRS)
