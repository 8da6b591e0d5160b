"""A batch's saves, layer by layer: begun before its pass, told of each layer by a hook, ended behind the pass.

Slots that a save reads are not locked in SGLang. It may free them at any time, and says so beforehand: see
:meth:`BatchSaves.let_go`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from layerflow.agent.step.step import NoStep, Step
from layerflow.agent.values import StepRequest
from layerflow.connectors.sglang.layout import KV, PoolLayout

if TYPE_CHECKING:
    from layerflow.agent import Agent

DRAIN_S = 1.0
"""How long slots that are given to other requests wait for what still reads or writes them; then that is cut off."""

ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "NPUPagedTokenToKVPoolAllocator")
"""SGLang's allocators that give pages back through the functions that :mod:`.plugin` hooks."""


def full_attention_allocator(allocator: Any) -> Any:
    """Who gives the pages of full attention: with sliding windows an allocator of SGLang's has one for each."""
    return getattr(allocator, "full_attn_allocator", allocator)


def frees_are_seen(allocator: Any) -> bool:
    """Are its pages given back through the functions that :mod:`.plugin` hooks?"""
    return type(allocator).__name__ in ALLOCATORS


def layers_are_told(server_args: Any) -> bool:
    """Does the hook on a layer tell that all of it is written?

    With two-batch overlap each layer is called once for each half of the batch, and a hook does not know which it is.
    """
    return not server_args.enable_two_batch_overlap


class BatchSaves:
    """Of one worker, on its scheduler's thread.

    :param written: makes an event behind what the calling thread has enqueued: a layer's hook runs with the pass's own
        stream as the current one. None on the cpu.
    :param passed: makes an event behind all that the forward pass has been given, whose stream is not the scheduler's
        where SGLang overlaps them.
    :param by_layer: the hook on a layer tells when all of it is written. Else it is known at the batch's end only.

    :ivar _steps: the running batch's. :ivar _held: those among them, by the request's name in its step, that publish
        nothing before the batch has ended.
    :ivar _reading: names of requests whose saves may not have ended.
    """

    def __init__(
        self,
        agent: Agent,
        layout: PoolLayout,
        *,
        written: Callable[[], object],
        passed: Callable[[], object],
        by_layer: bool = True,
    ) -> None:
        self._agent = agent
        self._layout = layout
        self._written = written
        self.passed = passed
        self.by_layer = by_layer
        self._steps: list[Step | NoStep] = []
        self._held: dict[str, Step] = {}
        self._seen: set[int] = set()
        self._reading: set[str] = set()

    @property
    def running(self) -> bool:
        """Does the batch that runs save anything?"""
        return bool(self._steps)

    def begin(self, requests: Sequence[StepRequest], held: Sequence[StepRequest] = ()) -> None:
        """A batch is about to run.

        :param requests: what it saves.
        :param held: what it saves of requests of which it loads some, each in a step of its own: nothing of that is
            published before :meth:`end` tells whether the load was in place.
        :raises SpecError: a block table does not fit.
        """
        self.end(self._held)  # one that was not ended: whether its loads were in place is not known
        self._reading = self._busy()
        if requests:
            self._open(requests)
        for request in held:
            step = self._open([request])
            if isinstance(step, Step):
                step.hold_saves()
                self._held[request.request] = step

    def layer_done(self, layer: int) -> None:
        """The batch has written a layer's new keys and values, or its state.

        :param layer: SGLang's number.
        """
        if not self._steps or not self.by_layer:
            return
        own = self._layout.layers.get(layer)
        if own is not None and own not in self._seen:
            self._seen.add(own)
            event = self._written()
            for step in self._steps:
                step.layer_done(own, event)

    def end(self, unsound: Collection[str] = ()) -> None:
        """The batch has run, or has been given to the device. Layers that no hook has told of are saved now.

        :param unsound: names of requests whose loads have failed on some rank: what was computed on them is given up.
        """
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        held, self._held = self._held, {}
        left = [own for own in range(self._agent.spec.num_layers) if own not in self._seen]
        self._seen.clear()
        event = self.passed() if left else None
        for step in steps:
            for own in left:
                step.layer_done(own, event)
            step.close()
        for name, step in held.items():
            self._agent.release_saves(step, sound=name not in unsound)

    @property
    def reads(self) -> bool:
        """May a save of any batch read any slot now?"""
        if self._reading:
            self._reading = self._busy()
        return bool(self._reading)

    def let_go(self, pages: Sequence[Any]) -> int:
        """SGLang gives pages of full attention to other requests: when this returns no save of a batch reads them.

        Two requests may compute the same pages in one batch. SGLang keeps the first one's and frees the other's at
        once, while that request's save may be reading them. A save that does not end in :data:`DRAIN_S` is cut off.

        :param pages: tensors of page numbers, on the device.
        :returns: of how many batches saves were cut off.
        """
        if not self.reads:  # else the numbers are fetched from the device, which the caller's stream waits for
            return 0
        page = self._layout.spec.chunk_tokens
        numbers = torch.cat([each.reshape(-1) for each in pages]).to("cpu", torch.int64).numpy()
        slots = (numbers[:, None] * page + np.arange(page)).reshape(-1)
        tables = self._layout.tables(len(numbers), {KV: slots})
        return self._agent.reclaim(self._layout.blocks(tables), DRAIN_S)

    def _open(self, requests: Sequence[StepRequest]) -> Step | NoStep:
        step = self._agent.open_step(requests)
        self._steps.append(step)
        self._reading.update(request.request for request in requests)
        return step

    def _busy(self) -> set[str]:
        return {name for name in self._reading if self._agent.busy(name)}
