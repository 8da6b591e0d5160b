"""Options that tell of a model and of a machine, and what they say of its links and its compute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerflow.errors import ConfigError

if TYPE_CHECKING:
    from layerflow.flow.cost import ComputeCost, LinkCost
    from layerflow.sizing import Capacity


ModelFolder = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="The model's folder with its config.json, or that file."),
]
TensorRanks = Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Tensor-parallel ranks of one engine.")]
Engines = Annotated[
    int, typer.Option(min=1, max=1024, metavar="N", help="Engines of this model that share the server.")
]
LinkRate = Annotated[
    str | None, typer.Option(metavar="RATE", help="What one worker's link to host memory moves, e.g. 25GB/s.")
]
LinkLatency = Annotated[float, typer.Option(min=0, max=1e9, metavar="US", help="What each load waits before it moves.")]
Flops = Annotated[
    float | None,
    typer.Option(
        min=1, max=1e20, metavar="X", help="Operations a second that one device reaches in prefill, e.g. 400e12."
    ),
]
ActiveParams = Annotated[
    float | None,
    typer.Option(min=1, max=1e15, metavar="N", help="With --flops: weights that a token passes, e.g. 22e9."),
]
LayerTime = Annotated[
    float | None,
    typer.Option(
        min=0, max=1e9, metavar="US", help="Instead of --flops: measured time of one layer for each new token."
    ),
]
KvDtype = Annotated[str, typer.Option(metavar="NAME", help="The engine's KV cache dtype: auto, fp8, bfloat16.")]


LEAST_LINK, MOST_LINK = 10**6, 10**15
_BITS_OR_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]i?)b(?:it|its|ps)?\s*")
"""Bytes that are written as bits are, a lower-case b behind a prefix, eight times as many."""


def link_cost(text: str | None, latency_us: float) -> LinkCost | None:
    """What ``--link 25GB/s`` says; None = nothing was said.

    :raises ConfigError: it is no rate.
    """
    from layerflow.config.fields import parse_size  # noqa: PLC0415
    from layerflow.flow.cost import LinkCost  # noqa: PLC0415

    if text is None:
        return None
    rate, per, unit = text.partition("/")
    if bits := _BITS_OR_BYTES.fullmatch(rate):
        number, prefix = float(bits[1]), bits[2][0].upper() + bits[2][1:]
        raise ConfigError(
            f"--link {text}: bits or bytes? Write {prefix}B/s for bytes; so many bits are {number / 8:g}{prefix}B/s"
        )
    if per and unit.strip() != "s":
        raise ConfigError(f"--link {text}: write bytes a second, e.g. 25GB/s")
    bandwidth = parse_size(rate)
    if not LEAST_LINK <= bandwidth <= MOST_LINK:
        raise ConfigError(f"--link {text}: a link moves 1MB to 1PB in a second")
    return LinkCost(float(bandwidth), latency_us * 1e-6)


def layer_cost(
    capacity: Capacity, flops: float | None, active_params: float | None, layer_us: float | None
) -> ComputeCost | None:
    """What ``--layer-us``, or ``--flops`` with ``--active-params``, say of one layer; None = nothing was said.

    :raises ConfigError: both, or half of one.
    """
    from layerflow.flow.cost import ComputeCost  # noqa: PLC0415
    from layerflow.sizing.break_even import compute_cost  # noqa: PLC0415

    if layer_us is not None:
        if flops is not None or active_params is not None:
            raise ConfigError("--layer-us and --flops tell the same; give one")
        return ComputeCost(0.0, layer_us * 1e-6, 0.0)
    if flops is None and active_params is None:
        return None
    if flops is None or active_params is None:
        raise ConfigError(
            "--flops and --active-params belong together: operations a second, and weights that a token passes"
        )
    return compute_cost(capacity, flops, active_params)
