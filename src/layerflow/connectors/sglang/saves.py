"""Saves of SGLang's cache nodes: begun when a node is inserted, reported in the order in which they were begun."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog

from layerflow.agent import NoStep
from layerflow.agent.values import StepRequest
from layerflow.connectors.common.guard import tell
from layerflow.connectors.sglang.layout import PoolLayout

if TYPE_CHECKING:
    from layerflow.agent import Agent

QUIET_S = 2.0
"""How long a flush waits for saves that still read; then they are cut off."""

log = structlog.get_logger("layerflow.sglang")


class _Save(NamedTuple):
    """:param begun: else it has failed at once."""

    name: str
    begun: bool


class Saves:
    """Of one worker, on its scheduler's thread.

    SGLang counts the saves that have ended on every rank and takes so many from each, so every rank begins each of
    them, be it to fail, and reports them in their order. A node's slots stay locked until its save has ended.

    :param written: makes an event behind all that has been given to the forward pass; None on the cpu.
    """

    def __init__(self, agent: Agent, layout: PoolLayout, *, written: Callable[[], object]) -> None:
        self._agent = agent
        self._layout = layout
        self._written = written
        self._waiting: deque[_Save] = deque()
        self._failed: dict[str, str] = {}
        self._numbers = itertools.count()

    def begin(self, hashes: Sequence[str], slots: Mapping[str, np.ndarray], *, allowed: bool) -> None:
        """Save a node.

        :param hashes: of its pages.
        :param slots: by pool: of its last pages, see :meth:`.layout.PoolLayout.tables`.
        :param allowed: else it fails at once.
        """
        name = f"node-{next(self._numbers)}"
        begun = False
        if allowed and self._agent.attached:
            try:
                begun = self._open(name, hashes, slots)
            except Exception as error:  # noqa: BLE001 - told, and the node is reported as not stored
                tell("offload", name, error)
        self._waiting.append(_Save(name, begun))

    def ended(self) -> int:
        """How many, from the oldest on, have ended."""
        busy = self._agent.busy
        count = sum(1 for _ in itertools.takewhile(lambda save: not save.begun or not busy(save.name), self._waiting))
        for name, reason in self._agent.poll().failed_saves:
            self._failed[name] = reason
        return count

    def take(self) -> bool:
        """Whether the oldest one, which has ended, is stored."""
        save = self._waiting.popleft()
        reason = self._failed.pop(save.name, "" if save.begun else "not begun")
        if reason:
            log.debug("save_failed", node=save.name, reason=reason)
        return not reason

    def reset(self) -> None:
        """Wait until nothing reads any more, for a moment; then cut off what still does. Forget all."""
        until = time.monotonic() + QUIET_S
        for save in self._waiting:
            if save.begun and not self._agent.wait_idle(save.name, max(0.0, until - time.monotonic())):
                cut = self._agent.revoke("the engine has emptied its cache")
                log.info("saves_cut_off", steps=cut)
                break
        self._agent.poll()
        self._waiting.clear()
        self._failed.clear()

    def _open(self, name: str, hashes: Sequence[str], slots: Mapping[str, np.ndarray]) -> bool:
        """Whether anything is being saved: nothing is while the server is silent."""
        chain = self._agent.hashed_chain([each.encode() for each in hashes])
        tables = self._layout.tables(len(hashes), slots)
        request = StepRequest(name, chain, tables, save=(0, len(hashes) * chain.chunk_tokens))
        step = self._agent.open_step([request])
        with step:
            event = self._written()
            for layer in range(self._agent.spec.num_layers):
                step.layer_done(layer, event)
        return not isinstance(step, NoStep)
