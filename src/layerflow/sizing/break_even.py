"""From which length on loading a prompt's KV is quicker than computing it."""

from __future__ import annotations

from dataclasses import dataclass

from layerflow.flow.cost import ComputeCost, Forecast, LinkCost, ModeInputs, forecast
from layerflow.sizing.capacity import Capacity


@dataclass(frozen=True, slots=True)
class Race:
    """Loading against computing.

    :param tokens: from so many hit tokens on, loading is quicker; None = up to the longest prompt it is not.
    :param longest: the times at the longest prompt.
    """

    tokens: int | None
    longest: Forecast


def compute_cost(capacity: Capacity, flops: float, active_params: float) -> ComputeCost:
    """Return what one layer costs by a device's speed.

    A token takes two operations for each weight that it passes (multiply and add), and for each query-key pair what
    :attr:`layerflow.sizing.shapes.Shape.pair_flops` says: ``2 N + 2 n_layer n_ctx d_attn`` for a causal context in
    Kaplan et al., "Scaling Laws for Neural Language Models" (arXiv 2001.08361), table 1. The tensor ranks share both.

    :param flops: operations a second that one device reaches in prefill, not its peak.
    :param active_params: weights that one token passes, embeddings left out.
    """
    per_layer = flops * capacity.stages[0].shard.tp_size * capacity.shape.layers
    return ComputeCost(fixed=0.0, token=2.0 * active_params / per_layer, pair=capacity.shape.pair_flops / per_layer)


def race(capacity: Capacity, link: LinkCost, compute: ComputeCost, longest: int, max_transfer_bytes: int) -> Race:
    """Return from how many hit tokens on a request is quicker with a load, by the forecast of ``transfer.mode`` auto.

    Behind the hit a chunk of new tokens is computed. Lengths are whole chunks. Pipeline stages count one after the
    other, for links as for computing; each worker has a link of its own.

    :param longest: tokens of the longest prompt.
    :param max_transfer_bytes: of one copy.
    """
    chunk = capacity.chunk_tokens

    def times(chunks: int) -> Forecast:
        hit, layers = chunks * chunk, capacity.shape.layers
        loaded = capacity.load_bytes(hit) * len(capacity.stages)
        found = forecast(
            ModeInputs(
                hit_tokens=hit,
                new_tokens=chunk,
                layers=layers,
                bytes_per_token=loaded / layers / hit,
                link=link,
                compute=compute,
                max_transfer_bytes=max_transfer_bytes,
            )
        )
        assert found is not None, "link and compute are given"
        return found

    def quicker(chunks: int) -> bool:
        told = times(chunks)
        return min(told.layerwise, told.bulk) < told.recompute

    # Computing grows with the square of the length and loading at most in proportion, so that one border parts them.
    low, high = 1, max(1, longest // chunk)
    if not quicker(high):
        return Race(None, times(high))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if quicker(middle) else (middle + 1, high)
    return Race(low * chunk, times(max(1, longest // chunk)))
