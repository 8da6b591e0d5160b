"""Inside the engine's process: the agent, its steps and lanes, and the control client for schedulers."""

from layerflow.agent.agent import Agent
from layerflow.agent.control import Control
from layerflow.agent.handshake import ClientKeys
from layerflow.agent.step import NoStep, Step
from layerflow.agent.values import MISS, READY, Ended, FailedBlocks, Hit, Outcome, StepRequest

__all__ = [
    "MISS",
    "READY",
    "Agent",
    "ClientKeys",
    "Control",
    "Ended",
    "FailedBlocks",
    "Hit",
    "NoStep",
    "Outcome",
    "Step",
    "StepRequest",
]
