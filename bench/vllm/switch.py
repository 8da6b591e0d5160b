"""Takes the connector out of a running vLLM and puts it back, so that one process is measured with it and without.

vLLM's engine loads this as its worker's extension (``--worker-extension-cls``); the benchmark calls it over
``/collective_rpc``, which vLLM serves in its development mode. While the connector is out, vLLM calls none of its
hooks and does nothing that it does for connectors: it is as if it had been started without, but for idle threads.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

Use = Literal["in", "out", "turns"]
FIRST, PERIOD = 9, 4
"""In turns: tokens of an answer before the first turn, beside which its prompt is saved, and tokens of a turn.

The machine's speed changes within tenths of a second: turns of four tokens are close enough to be compared.
"""
_OUT = (False, True, True, False)


def is_out(token: int, tokens: int) -> bool:
    """Is the connector out while this token of an answer is made, in turns? The last ones are made with it.

    :param token: counted from 0.
    :param tokens: of the whole answer.
    """
    turn = (token - FIRST) // PERIOD
    return token >= FIRST and turn < turns_of(tokens) and _OUT[turn % len(_OUT)]


def turns_of(tokens: int) -> int:
    """How many whole turns an answer has: each kind as often, in neighbouring pairs."""
    return (tokens - FIRST - 1) // (PERIOD * len(_OUT)) * len(_OUT)


class Switch:
    """Becomes part of vLLM's worker, in the engine's process. In a vLLM without a connector it changes nothing."""

    switched: Connectors | None = None

    def use_connector(self, use: Use) -> None:
        """From now on: with it, without it, or in turns within each answer. Call while no request is under way."""
        if self.switched is None:
            self.switched = Connectors(_scheduler())
        self.switched.use(use)


class Connectors:
    """Those of the scheduler and of the worker.

    :param scheduler: vLLM's; it has them switched in turns before each step.
    """

    def __init__(self, scheduler: Any) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: PLC0415 - the benchmark's Python has no vLLM

        self._scheduler, self._worker = scheduler, kv_transfer_state
        self._mine = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT, scheduler.connector_prefix_cache_stats
        self._use: Use = "in"
        self._schedule = scheduler.schedule
        scheduler.schedule = self._switch_and_schedule

    def use(self, use: Use) -> None:
        """See :meth:`Switch.use_connector`."""
        self._use = use
        self._set(out=use == "out")

    def _switch_and_schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._use == "turns":
            running = self._scheduler.running
            self._set(out=bool(running) and is_out(running[0].num_output_tokens, running[0].max_tokens))
        return self._schedule(*args, **kwargs)

    def _set(self, *, out: bool) -> None:
        ours, workers, statistics = (None, None, None) if out else self._mine
        self._scheduler.connector, self._scheduler.connector_prefix_cache_stats = ours, statistics
        self._worker._KV_CONNECTOR_AGENT = workers


def _scheduler() -> Any:
    """The engine's, which its worker is not given: the engine that calls the worker is among the callers."""
    frame = sys._getframe()
    while frame is not None:
        scheduler = getattr(frame.f_locals.get("self"), "scheduler", None)
        if scheduler is not None:
            return scheduler
        frame = frame.f_back
    raise RuntimeError("no scheduler among the callers: vLLM's engine and worker are not one process")
