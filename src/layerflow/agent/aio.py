"""The agent for asyncio engines: the same agent, its waits off the event loop.

What is ready returns without leaving the loop; what is not waits on a worker thread, under the step's
own deadline.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import TracebackType

import anyio.to_thread
import numpy as np

from layerflow.agent.agent import Agent
from layerflow.agent.client import DEFAULT_HANDOFF_TIMEOUT_S, DEFAULT_LEASE_S
from layerflow.agent.step.step import NoStep, Step
from layerflow.agent.values import Follow, Handoff, Hit, LoadResult, StepRequest
from layerflow.device.base import DeviceEvent
from layerflow.keys import Chain
from layerflow.spec import ModelSpec


class AsyncStep:
    """An open step; ``async with`` closes it."""

    def __init__(self, step: Step | NoStep) -> None:
        self.step = step

    async def wait_layer(self, layer: int) -> LoadResult:
        """As :meth:`layerflow.agent.step.step.Step.wait_layer`.

        Cancelling the caller does not cancel the loads; abort their requests for that.
        """
        if self.step.is_ready(layer):
            return self.step.wait_layer(layer)
        outcome = await anyio.to_thread.run_sync(self.step.await_layer, layer, abandon_on_cancel=True)
        self.step.order(layer)  # here: it is this thread's stream that computes
        return outcome

    async def wait_all(self) -> LoadResult:
        """All layers at once (bulk loading)."""
        outcome = await anyio.to_thread.run_sync(self.step.await_all, abandon_on_cancel=True)
        for layer in range(self.step.num_layers):
            self.step.order(layer)
        return outcome

    def layer_done(self, layer: int, event: object = None) -> None:
        """As :meth:`layerflow.agent.step.step.Step.layer_done`: a few plain stores."""
        self.step.layer_done(layer, event)

    def close(self, ok: bool | None = None) -> None:
        """The forward pass ended."""
        self.step.close(ok)

    async def __aenter__(self) -> AsyncStep:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.step.close(None if kind is None else False)


class AsyncAgent:
    """Wraps an :class:`~layerflow.agent.Agent`; its other methods never wait and are used as they are."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    async def lookup(self, request: str, chain: Chain, follow: Follow | None = None) -> Hit:
        """As :meth:`Agent.lookup`."""
        return await anyio.to_thread.run_sync(self.agent.lookup, request, chain, follow, abandon_on_cancel=True)

    async def open_handoff(
        self,
        handoff: str,
        chain: Chain,
        tokens: int,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        timeout_s: float = DEFAULT_HANDOFF_TIMEOUT_S,
        servers: Sequence[str] = (),
    ) -> Handoff:
        """As :meth:`layerflow.agent.Control.open_handoff`."""
        ask = functools.partial(self.agent.control.open_handoff, lease_s=lease_s, timeout_s=timeout_s, servers=servers)
        return await anyio.to_thread.run_sync(ask, handoff, chain, tokens, abandon_on_cancel=True)

    async def end_handoff(self, handoff: str, *, tokens: int, reason: str = "") -> None:
        """As :meth:`layerflow.agent.Control.end_handoff`."""
        await anyio.to_thread.run_sync(
            functools.partial(self.agent.control.end_handoff, handoff, tokens=tokens, reason=reason)
        )

    async def release_handoff(self, handoff: str, servers: Sequence[str] = ()) -> None:
        """As :meth:`layerflow.agent.Control.release_handoff`."""
        await anyio.to_thread.run_sync(self.agent.control.release_handoff, handoff, servers)

    def open_step(
        self, requests: Sequence[StepRequest], timeout_s: float | None = None, *, after: DeviceEvent | None = None
    ) -> AsyncStep:
        """As :meth:`Agent.open_step`, which returns at once."""
        return AsyncStep(self.agent.open_step(requests, timeout_s, after=after))

    async def wait_idle(self, request: str, timeout_s: float) -> bool:
        """As :meth:`Agent.wait_idle`."""
        return await anyio.to_thread.run_sync(self.agent.wait_idle, request, timeout_s, abandon_on_cancel=True)

    async def reset(self, model_content: str = "") -> ModelSpec:
        """As :meth:`layerflow.agent.Agent.reset`."""
        return await anyio.to_thread.run_sync(self.agent.reset, model_content)

    async def reclaim(self, group_blocks: Sequence[np.ndarray], timeout_s: float) -> int:
        """As :meth:`Agent.reclaim`."""
        return await anyio.to_thread.run_sync(self.agent.reclaim, group_blocks, timeout_s)

    async def close(self) -> None:
        """Detach."""
        await anyio.to_thread.run_sync(self.agent.close)
