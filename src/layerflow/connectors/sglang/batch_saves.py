"""A batch's saves, layer by layer: begun with its pass, told of each layer by a hook, ended behind the pass.

Slots that a save reads are not locked in SGLang. It may free them at any time, and says so beforehand: see
:meth:`BatchSaves.let_go`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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

Begun = tuple[Sequence[StepRequest], Sequence[StepRequest]]
"""What a batch saves, and what it saves of requests of which it loads some."""

ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "NPUPagedTokenToKVPoolAllocator")
"""SGLang's allocators that give pages back through the functions that :mod:`.plugin` hooks."""


def full_attention_allocator(allocator: Any) -> Any:
    """Who gives the pages of full attention: with sliding windows an allocator of SGLang's has one for each."""
    return getattr(allocator, "full_attn_allocator", allocator)


def frees_are_seen(allocator: Any) -> bool:
    """Are its pages given back through the functions that :mod:`.plugin` hooks?"""
    return type(allocator).__name__ in ALLOCATORS


def untold_layers(server_args: Any) -> str:
    """Why no hook on a layer tells when all of it is written; "" = it does.

    With two-batch overlap each layer is called once for each half of the batch, with elastic expert parallelism again
    behind a pass in which a rank has died: a hook does not know which call it is.
    """
    for flag, is_on in (
        ("--enable-two-batch-overlap", server_args.enable_two_batch_overlap),
        ("--elastic-ep-backend", server_args.elastic_ep_backend is not None),
    ):
        if is_on:
            return f"with {flag} it is not known when a layer is written"
    return ""


def pages_to_save(
    agent: Agent, layout: PoolLayout, name: str, hashes: Sequence[str], slots: Mapping[str, np.ndarray]
) -> StepRequest:
    """A save of a chain of pages.

    :param slots: by pool: of its last pages, see :meth:`.layout.PoolLayout.tables`.
    """
    chain = agent.hashed_chain([each.encode() for each in hashes])
    tables = layout.tables(len(hashes), slots)
    return StepRequest(name, chain, tables, save=(0, len(hashes) * chain.chunk_tokens))


class BatchSaves:
    """Of one worker, on its scheduler's thread.

    :param written: makes an event behind what the calling thread has enqueued: a layer's hook runs with the pass's own
        stream as the current one. None on the cpu.
    :param passed: makes an event behind all that the forward pass has been given, whose stream is not the scheduler's
        where SGLang overlaps them.
    :param by_layer: the hook on a layer tells when all of it is written. Else it is known at the batch's end only.
    :param computes_at_once: layers are computed while they are told of, as on a CPU. Else the calling thread is ahead
        of the device, and what a batch saves is asked for behind its last layer: the answer comes from the device,
        behind the pass before, which SGLang waits for next in any case.
    :param drain_s: how long :meth:`let_go` waits.

    :ivar _steps: the running batch's. :ivar _held: those among them, by the request's name in its step, that publish
        nothing before the batch has ended.
    :ivar _asked: tells what the running batch saves, until it is asked. :ivar _told: events of its layers so far.
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
        computes_at_once: bool = True,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._agent = agent
        self._layout = layout
        self._written = written
        self.passed = passed
        self.by_layer = by_layer
        self._at_once = computes_at_once
        self._drain_s = drain_s
        self._asked: Callable[[], Begun] | None = None
        self._told: dict[int, object] = {}
        self._steps: list[Step | NoStep] = []
        self._held: dict[str, Step] = {}
        self._reading: set[str] = set()

    @property
    def running(self) -> bool:
        """Does the batch that runs save anything?"""
        return bool(self._steps) or self._asked is not None

    def begin(self, saves: Callable[[], Begun]) -> None:
        """A batch is about to run.

        :param saves: tells what it saves; asked once, here or in :meth:`end`. What it saves of requests of which it
            loads some is in steps of their own: nothing of that is published before :meth:`end` tells whether the load
            was in place.
        :raises SpecError: a block table does not fit.
        """
        self.drop()
        self._reading = self._busy()
        self._asked = saves
        if self._at_once:
            self._open_all()

    def layer_done(self, layer: int | None) -> None:
        """The batch has written a layer's new keys and values, or its state.

        :param layer: layerflow's number; None = it has no cache.
        """
        if not self.running or not self.by_layer:
            return
        if layer is not None and layer not in self._told:
            event = self._told[layer] = self._written()
            for step in self._steps:
                step.layer_done(layer, event)

    def end(self, unsound: Callable[[], Collection[str]] = frozenset) -> None:
        """The batch has run, or has been given to the device. Layers that no hook has told of are saved now.

        :param unsound: tells names of requests whose loads have failed on some rank: what was computed on them is given
            up. Asked behind what :meth:`begin` was given.
        """
        if not self.running:
            return
        if self._asked is not None:
            self._open_all()
            for step in self._steps:
                for own, event in self._told.items():
                    step.layer_done(own, event)
        steps, self._steps = self._steps, []
        held, self._held = self._held, {}
        left = [own for own in range(self._agent.spec.num_layers) if own not in self._told]
        self._told.clear()
        event = self.passed() if left and steps else None
        for step in steps:
            for own in left:
                step.layer_done(own, event)
            step.close()
        failed = unsound() if held else ()
        for name, step in held.items():
            self._agent.release_saves(step, sound=name not in failed)

    def drop(self) -> None:
        """Give up what a batch saves that will not be ended: which of its layers are computed is not known."""
        steps, self._steps, self._asked = self._steps, [], None
        held, self._held = self._held, {}
        self._told.clear()
        for step in steps:
            step.close(ok=False)
        for step in held.values():
            self._agent.release_saves(step, sound=False)

    @property
    def reads(self) -> bool:
        """May a save of any batch read any slot now?"""
        if self._reading:
            self._reading = self._busy()
        return bool(self._reading)

    def let_go(self, pages: Sequence[Any]) -> int:
        """SGLang gives pages of full attention to other requests: when this returns no save of a batch reads them.

        Two requests may compute the same pages in one batch. SGLang keeps the first one's and frees the other's at
        once, while that request's save may be reading them. A save that does not end soon is cut off.

        :param pages: tensors of page numbers, on the device.
        :returns: of how many batches saves were cut off.
        """
        if not self.reads:  # else the numbers are fetched from the device, which the caller's stream waits for
            return 0
        page = self._layout.spec.chunk_tokens
        numbers = torch.cat([each.reshape(-1) for each in pages]).to("cpu", torch.int64).numpy()
        slots = (numbers[:, None] * page + np.arange(page)).reshape(-1)
        tables = self._layout.tables(len(numbers), {KV: slots})
        return self._agent.reclaim(self._layout.blocks(tables), self._drain_s)

    def _open_all(self) -> None:
        assert self._asked is not None
        asked, self._asked = self._asked, None
        requests, held = asked()
        if requests:
            self._open(requests)
        for request in held:
            step = self._open([request])
            if isinstance(step, Step):
                step.hold_saves()
                self._held[request.request] = step

    def _open(self, requests: Sequence[StepRequest]) -> Step | NoStep:
        step = self._agent.open_step(requests)
        self._steps.append(step)
        self._reading.update(request.request for request in requests)
        return step

    def _busy(self) -> set[str]:
        return {name for name in self._reading if self._agent.busy(name)}
