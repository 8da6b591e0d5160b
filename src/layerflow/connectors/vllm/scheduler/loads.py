"""A hit's part of a step: which objects it loads into which blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerflow.agent.descriptors import PartDescriptor, describe_loads
from layerflow.agent.values import StepRequest
from layerflow.connectors.vllm.scheduler.requests import Tracked
from layerflow.spec import ModelSpec


def describe_hit(
    spec: ModelSpec, tracked: Tracked, tables: Sequence[np.ndarray], load: tuple[int, int]
) -> list[PartDescriptor]:
    """The parts of one request's load; none where `load` is empty.

    :param tables: int64 block ids per layerflow group; negative = no block.
    :param load: tokens ``[start, stop)``.
    """
    if load[0] >= load[1]:
        return []
    return describe_loads(spec, [StepRequest(tracked.id, tracked.chain, tables, load, tracked.hit)])
