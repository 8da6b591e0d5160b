"""Inside the engine's process: the agent, its steps and lanes, and the control client for schedulers.

:class:`Agent` and the steps need torch, :class:`Mode` the core; they are imported when first asked for, so that a tool
which only looks at a server does not pay for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from layerflow.agent.connection.control import Control
from layerflow.agent.connection.handshake import ClientKeys
from layerflow.agent.values import MISS, READY, Ended, FailedBlocks, Follow, Handoff, Hit, LoadResult, StepRequest

if TYPE_CHECKING:
    from layerflow.agent.agent import Agent
    from layerflow.agent.aio import AsyncAgent, AsyncStep
    from layerflow.agent.step.no_step import NoStep
    from layerflow.agent.step.step import Step
    from layerflow.flow.cost.policy import Mode

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


_HOME_OF = {
    "Agent": "layerflow.agent.agent",
    "AsyncAgent": "layerflow.agent.aio",
    "AsyncStep": "layerflow.agent.aio",
    "Mode": "layerflow.flow.cost.policy",
    "NoStep": "layerflow.agent.step.no_step",
    "Step": "layerflow.agent.step.step",
}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
