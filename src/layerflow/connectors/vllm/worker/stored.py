"""Which chunks a worker's saves have published, for :mod:`.events`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from layerflow.agent import NoStep, Step
from layerflow.agent.descriptors import ObjectDescriptor
from layerflow.connectors.vllm.plan.plan import ChunkKey


class StoredChunks:
    """Follows a worker's steps until their saves have ended. Whole chunks only: a tail's hash is no block's.

    :param chunk_tokens: of a whole chunk.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._open: dict[str, list[Step]] = {}
        self._stored: dict[ChunkKey, int] = {}

    def opened(self, step: Step | NoStep) -> None:
        """A step that may save something."""
        if isinstance(step, Step):
            for request in {part.request for part in step.saves}:
                self._open.setdefault(request, []).append(step)

    def over(self, busy: Callable[[str], bool]) -> list[str]:
        """Requests that no open step touches any more; ask before the agent is polled, which tells what failed.

        :param busy: :meth:`layerflow.agent.Agent.busy`.
        """
        return [request for request in self._open if not busy(request)]

    def settle(self, over: Iterable[str], failed: Iterable[str]) -> None:
        """What requests have saved is published.

        :param over: from :meth:`over`.
        :param failed: requests of which some save has failed: it is not known which chunk, so none of them counts.
        """
        for request in failed:
            self._open.pop(request, None)
        for request in over:
            for step in self._open.pop(request, ()):
                self._stored.update(dict.fromkeys(self._placed(step, request), 1))

    def take(self) -> dict[ChunkKey, int]:
        """Chunks published since the last call, each stored by one rank: this one."""
        taken, self._stored = self._stored, {}
        return taken

    def _placed(self, step: Step, request: str) -> Iterable[ChunkKey]:
        for position, part in enumerate(step.saves):
            if part.request == request:
                placed = set(step.reads.placed(position).tolist())
                yield from ((part.group, piece.digest) for piece in part.pieces if self._is_whole(piece, placed))

    def _is_whole(self, piece: ObjectDescriptor, placed: set[int]) -> bool:
        return piece.tokens == self._chunk_tokens and piece.blocks.start in placed
