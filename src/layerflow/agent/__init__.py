"""Inside the engine's process: the agent, its steps and lanes, and the control client for schedulers.

Names are imported when first asked for: what needs torch, or the core, costs only those who use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerflow._lazy import attribute

if TYPE_CHECKING:
    from layerflow.agent.agent import Agent
    from layerflow.agent.aio import AsyncAgent, AsyncStep
    from layerflow.agent.control import Control
    from layerflow.agent.handshake import ClientKeys
    from layerflow.agent.step.step import NoStep, Step
    from layerflow.agent.values import MISS, READY, Ended, FailedBlocks, Follow, Handoff, Hit, LoadResult, StepRequest
    from layerflow.flow.cost import Mode

__all__ = [
    "MISS",
    "READY",
    "Agent",
    "AsyncAgent",
    "AsyncStep",
    "ClientKeys",
    "Control",
    "Ended",
    "FailedBlocks",
    "Follow",
    "Handoff",
    "Hit",
    "LoadResult",
    "Mode",
    "NoStep",
    "Step",
    "StepRequest",
]


_HOMES = {
    "layerflow.agent.agent": ("Agent",),
    "layerflow.agent.aio": ("AsyncAgent", "AsyncStep"),
    "layerflow.agent.control": ("Control",),
    "layerflow.agent.handshake": ("ClientKeys",),
    "layerflow.agent.step.step": ("NoStep", "Step"),
    "layerflow.agent.values": (
        "MISS",
        "READY",
        "Ended",
        "FailedBlocks",
        "Follow",
        "Handoff",
        "Hit",
        "LoadResult",
        "StepRequest",
    ),
    "layerflow.flow.cost": ("Mode",),
}


def __getattr__(name: str) -> object:
    return attribute(__name__, _HOMES, name)
