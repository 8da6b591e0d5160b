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
import math
from dataclasses import dataclass

from layerflow.flow.cost.estimators import ComputeCost, LinkCost

DEFAULT_MARGIN = 0.02
"""Where two modes are as good as equal, layerwise leaves the cores to others. A wider one would cost more than what is
estimated badly: a mode slower by 5 % would be kept."""


class Mode(enum.Enum):
    """How a hit is used."""

    LAYERWISE = "layerwise"
    BULK = "bulk"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
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


def forecast(inputs: Inputs) -> Forecast | None:
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


def choose(inputs: Inputs, *, margin: float = DEFAULT_MARGIN) -> Mode:
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
