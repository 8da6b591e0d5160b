"""Inside the engine's process: the agent, its steps and lanes, and the control client for schedulers.

:class:`Agent` and the steps need torch; they are imported when first asked for, so that a tool which
only looks at a server does not pay for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from layerflow.agent.connection.control import Control
from layerflow.agent.connection.handshake import ClientKeys
from layerflow.agent.values import MISS, READY, Ended, FailedBlocks, Follow, Handoff, Hit, LoadResult, StepRequest
from layerflow.flow.cost.policy import Mode

if TYPE_CHECKING:
    from layerflow.agent.agent import Agent
    from layerflow.agent.aio import AsyncAgent, AsyncStep
    from layerflow.agent.step.no_step import NoStep
    from layerflow.agent.step.step import Step

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


_HOME_OF = {"Agent": "agent", "AsyncAgent": "aio", "AsyncStep": "aio", "NoStep": "step.no_step", "Step": "step.step"}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
