"""What the loads of a step come after, on the stream that vLLM computes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from layerflow.connectors.vllm.plan import StepPlan
from layerflow.connectors.vllm.versions import release
from layerflow.device.base import DeviceEvent


class LoadOrder:
    """Remembers where in the engine's stream its last steps begin. The engine's thread only.

    vLLM gives a block to a load once it has seen the output of every step that used it. Of the steps before that it may
    have a few in flight: these touch none of the load's blocks, and the load need not wait for them.

    :param record: an event behind all that the engine's stream has been given; None on the cpu.
    :param in_flight: the most steps that vLLM has planned and not seen the output of, the one that it is about to run
        among them; None = it reuses blocks earlier than that.
    """

    def __init__(self, record: Callable[[], DeviceEvent | None], in_flight: int | None) -> None:
        self._record = record
        self._begins: deque[DeviceEvent] = deque(maxlen=in_flight or 0)

    def begin(self, plan: StepPlan) -> None:
        """A step is about to be prepared: what has been enqueued until now is of the steps before it."""
        most = self._begins.maxlen
        if most == 0 or (most == 1 and not plan.loads_something):
            return
        event = self._record()
        if event is not None:
            self._begins.append(event)

    def is_known(self, plan: StepPlan) -> bool:
        """May the plan's loads begin before vLLM has prepared the step?"""
        return bool(self._begins) and not plan.rewritten

    def after(self, plan: StepPlan) -> DeviceEvent | None:
        """What the plan's loads come after; None = all that the engine has enqueued when they are opened."""
        return self._begins[0] if self.is_known(plan) else None


class RunnerOrder:
    """Whether vLLM's runner asks the connector before it prepares a step, or behind that; as it was seen.

    The first model runner calls ``handle_preemptions``, prepares the step (zeroes new blocks, copies), and binds the
    plan inside the pass's forward context. The second one prepares, then calls both hooks one behind the other: with
    whole graphs both outside of any forward context, else both inside.

    :ivar asks_first: the first one's order, and no other was seen. Until a step was seen it is not known to be that.
    """

    def __init__(self) -> None:
        self.asks_first = False
        self._other = False
        self._outside = False

    def arrived(self, *, inside: bool) -> None:
        """A plan has arrived.

        :param inside: a forward context is set.
        """
        self._outside = not inside
        if inside:
            self._other, self.asks_first = True, False

    def bound(self, *, inside: bool) -> None:
        """The plan is bound. Parameter as of :meth:`arrived`."""
        if not inside:
            self._other, self.asks_first = True, False
        elif self._outside and not self._other:
            self.asks_first = True


def steps_in_flight(vllm_config: Any, version: str, *, overlap: bool, consumer: bool) -> int | None:
    """How many steps vLLM may have planned whose output it has not seen; for :class:`LoadOrder`.

    Where steps overlap, vLLM's own scheduler gives a block free only after the output of the last step that used it
    (``Scheduler.defer_block_free``, 0.32), and only for a connector that may load.

    :param version: of vLLM.
    :param overlap: a step is planned before the one before it has ended.
    :param consumer: vLLM knows that this connector loads.
    """
    if not overlap:
        return 1
    if release(version) < (0, 32) or vllm_config.scheduler_config.scheduler_cls is not None or not consumer:
        return None
    return int(vllm_config.max_concurrent_batches)
