"""Requests that wait and hold blocks: a vLLM that does not let them run first may never run anything again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


class BlockHolders:
    """For vLLM before 0.31, which takes waiting requests in one order, whether they hold blocks or not.

    A request whose prompt was loaded in the background holds its blocks and waits to run. If one before it in the order
    needs more blocks than are free, vLLM looks no further. When nothing runs that could give blocks back, nothing ever
    will. So a request that does not fit is asked about again later, and vLLM goes on to those behind it.
    """

    def __init__(self) -> None:
        self._loading: set[str] = set()
        self._loaded: set[str] = set()
        self._idle = False

    def loading(self, request: str) -> None:
        """A load in the background has its blocks."""
        self._loading.add(request)

    def loaded(self, request: str) -> None:
        """It has ended: the request can run."""
        if request in self._loading:
            self._loading.discard(request)
            self._loaded.add(request)

    def planned(self, scheduled: Collection[str]) -> None:
        """A scheduling pass has ended.

        :param scheduled: requests that run.
        """
        self._idle = not scheduled
        self._loaded.difference_update(scheduled)

    def finished(self, request: str) -> None:
        """It is over."""
        self._loading.discard(request)
        self._loaded.discard(request)

    def go_first(self, request: Any, has_blocks: Callable[[int], bool]) -> bool:
        """Must others run before this request, which holds no blocks?

        :param has_blocks: are blocks free for so many tokens?
        """
        waiting = self._idle and bool(self._loaded) and request.request_id not in self._loaded
        return waiting and not has_blocks(request.num_tokens)
