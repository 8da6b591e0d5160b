"""Saves of SGLang's cache nodes: begun when a node is inserted, reported in the order in which they were begun."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import structlog

from layerflow.agent import NoStep
from layerflow.agent.values import StepRequest
from layerflow.connectors.common.guard import tell
from layerflow.connectors.sglang.batch_saves import pages_to_save
from layerflow.connectors.sglang.layout import PoolLayout
from layerflow.connectors.sglang.page_saves import PageSaves

if TYPE_CHECKING:
    from layerflow.agent import Agent

QUIET_S = 2.0
"""How long a flush waits for saves that still read; then they are cut off."""

log = structlog.get_logger("layerflow.sglang")


@dataclass(slots=True, eq=False)
class _Save:
    """A node's.

    :param request: what is to be saved; None = nothing is, it has failed at once.
    :param event: behind the pass that has computed it.
    :param behind: saves of its pages that had not ended when it was begun: it is opened behind them.
    :param opened: a step has it.
    """

    name: str
    request: StepRequest | None = None
    event: object = None
    behind: Collection[str] = ()
    opened: bool = False


class Saves:
    """Of one worker, on its scheduler's thread.

    SGLang counts the saves that have ended on every rank and takes so many from each, so every rank begins each of
    them, be it to fail, and reports them in their order. A node's slots stay locked until its save has ended.

    Pages that are stored already are not read again: the server gives them no room. Those that are being stored, see
    :class:`.page_saves.PageSaves`, are waited for first. So nothing reads the slots of a node that has ended, and
    pages that could not be stored are saved then.

    :param pages: saves of pages before they belong to a node.
    :param written: makes an event behind all that has been given to the forward pass; None on the cpu.
    """

    def __init__(self, agent: Agent, layout: PoolLayout, pages: PageSaves, *, written: Callable[[], object]) -> None:
        self._agent = agent
        self._layout = layout
        self._pages = pages
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
        save = _Save(f"node-{next(self._numbers)}")
        self._waiting.append(save)
        if allowed and self._agent.attached:
            try:
                save.request = pages_to_save(self._agent, self._layout, save.name, hashes, slots)
                save.event = self._written()
                save.behind = self._pages.under_way(hashes)
            except Exception as error:  # noqa: BLE001 - told, and the node is reported as not stored
                save.request = None
                tell("offload", save.name, error)
            self._open_waiting()

    def ended(self) -> int:
        """How many, from the oldest on, have ended."""
        self._open_waiting()
        count = sum(1 for _ in itertools.takewhile(self._has_ended, self._waiting))
        for name, reason in self._agent.poll().failed_saves:
            self._failed[name] = reason
        known = {save.name for save in self._waiting} if self._failed else ()
        for name in [name for name in self._failed if name not in known]:  # of pages: their node is saved again
            log.debug("save_failed", node=name, reason=self._failed.pop(name))
        return count

    def take(self) -> bool:
        """Whether the oldest one, which has ended, is stored."""
        save = self._waiting.popleft()
        reason = self._failed.pop(save.name, "" if save.opened else "not begun")
        if reason:
            log.debug("save_failed", node=save.name, reason=reason)
        return not reason

    def settle(self) -> None:
        """Wait until nothing reads any more, for a moment; then cut off what still does. What has not begun, fails."""
        for save in self._waiting:
            save.request = None
        until = time.monotonic() + QUIET_S
        for name in [*self._pages.under_way(), *(save.name for save in self._waiting if save.opened)]:
            if not self._agent.wait_idle(name, max(0.0, until - time.monotonic())):
                cut = self._agent.revoke("the engine needs its cache")
                log.info("saves_cut_off", steps=cut)
                return

    def reset(self) -> None:
        """As :meth:`settle`. Forget all."""
        self.settle()
        self._agent.poll()
        self._waiting.clear()
        self._failed.clear()

    def _open_waiting(self) -> None:
        """Open what waits for nothing any more."""
        for save in self._waiting:
            if save.request is None or any(self._agent.busy(name) for name in save.behind):
                continue
            request, save.request = save.request, None
            try:
                save.opened = self._open(request, save.event)
            except Exception as error:  # noqa: BLE001 - told, and the node is reported as not stored
                tell("offload", save.name, error)

    def _open(self, request: StepRequest, event: object) -> bool:
        """Whether anything is being saved: nothing is while the server is silent."""
        step = self._agent.open_step([request])
        with step:
            for layer in range(self._agent.spec.num_layers):
                step.layer_done(layer, event)
        return not isinstance(step, NoStep)

    def _has_ended(self, save: _Save) -> bool:
        return save.request is None and not (save.opened and self._agent.busy(save.name))
