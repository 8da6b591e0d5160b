"""What stands for a machine and its engines, where nothing was recorded of them."""

from __future__ import annotations

from dataclasses import dataclass

from layerflow.flow.cost import ComputeCost, LinkCost
from layerflow.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What stands for hardware and engines.

    :param spec: of the model on one worker; its shard says how many there are.
    :param engines: that share the server. :param load: a worker's link from the arena. :param save: and to it.
    :param arena_bytes: of the pool.
    :param compute: of one layer on one worker.
    :param batch_seconds: what a lane spends on a batch beside its bytes.
    :param max_batched_tokens: of one step of an engine. :param max_running: requests at once.
    :param cache_tokens: that an engine's own memory holds, prompts of ended requests among them; 0 = as many as it
        runs, and nothing of a request that has ended.
    :param step_seconds: of a step, beside its layers. :param loading_seconds: of a step that loads, more.
    :param eviction: a name of :data:`layerflow.sim.simulation.EVICTIONS`.
    """

    spec: ModelSpec
    arena_bytes: int
    load: LinkCost
    save: LinkCost
    compute: ComputeCost
    engines: int = 1
    max_batched_tokens: int = 8192
    max_running: int = 256
    cache_tokens: int = 0
    step_seconds: float = 0.0
    loading_seconds: float = 0.0
    batch_seconds: float = 0.0
    eviction: str = "car"
