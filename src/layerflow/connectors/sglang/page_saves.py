"""Saves of pages while a batch computes them, before SGLang has made a node of them: layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from layerflow.agent.values import StepRequest
from layerflow.connectors.sglang.batch_saves import BatchSaves, Begun, pages_to_save
from layerflow.connectors.sglang.layout import KV, PoolLayout

if TYPE_CHECKING:
    from layerflow.agent import Agent


@dataclass(frozen=True, slots=True)
class ComputedPages:
    """Pages of one request that are whole once a batch has run.

    :param hashes: of these pages, as the radix cache's nodes will have them.
    :param slots: int64, of the pool of full attention.
    :param loads: the batch loads some of the request. Whether what it computes is sound is known once that has ended.
    """

    request: str
    hashes: Sequence[str]
    slots: np.ndarray
    loads: bool = False


class PageSaves:
    """Of one worker, on its scheduler's thread.

    Only pages of full attention are saved here: which of a window's pages stay, and where a state is kept, is known
    with the node. What such a save does not store :class:`.saves.Saves` does, once SGLang hands it the node.

    :ivar _saves: by name: page hashes of a save that has not ended. :ivar _by_page: by page hash: its save.
    :ivar _loading: by request of the running batch that loads: its save.
    """

    def __init__(self, agent: Agent, layout: PoolLayout, batches: BatchSaves) -> None:
        self._agent = agent
        self._layout = layout
        self._batches = batches
        self._saves: dict[str, Sequence[str]] = {}
        self._by_page: dict[str, str] = {}
        self._loading: dict[str, str] = {}
        self._numbers = itertools.count()

    def begin(self, computed: Iterable[ComputedPages]) -> None:
        """A batch is about to run. A page that is being saved already, of whichever request, is not saved twice.

        :param computed: asked for as :meth:`.BatchSaves.begin` says.
        :raises SpecError: slots that the pool does not have.
        """
        self._forget_ended()
        self._loading.clear()
        self._batches.begin(lambda: self._requests(computed))

    def end(self, failed: Collection[str] = ()) -> None:
        """The batch has run, or has been given to the device.

        :param failed: requests whose loads have failed on some rank: nothing that was computed on them is published.
        """
        self._batches.end(lambda: {save for request, save in self._loading.items() if request in failed})
        self._loading.clear()

    def under_way(self, pages: Iterable[str] | None = None) -> set[str]:
        """Names of the saves of these pages, or of all, that have not ended."""
        self._forget_ended()
        if pages is None:
            return set(self._saves)
        return {self._by_page[page] for page in pages if page in self._by_page}

    def _requests(self, computed: Iterable[ComputedPages]) -> Begun:
        requests, held = [], []
        for pages in computed:
            left = [at for at, page in enumerate(pages.hashes) if page not in self._by_page]
            if not left:
                continue
            request = self._request([pages.hashes[at] for at in left], pages.slots.reshape(len(pages.hashes), -1)[left])
            if pages.loads:
                self._loading[pages.request] = request.request
                held.append(request)
            else:
                requests.append(request)
        return requests, held

    def _request(self, hashes: Sequence[str], slots: np.ndarray) -> StepRequest:
        name = f"pages-{next(self._numbers)}"
        request = pages_to_save(self._agent, self._layout, name, hashes, {KV: slots.reshape(-1)})
        self._saves[name] = hashes
        self._by_page |= dict.fromkeys(hashes, name)
        return request

    def _forget_ended(self) -> None:
        for name in [name for name in self._saves if not self._agent.busy(name)]:
            for page in self._saves.pop(name):
                self._by_page.pop(page, None)
