"""What a worker tells vLLM, and the scheduler's side, of loads that have failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import structlog

from layerflow.agent import FailedBlocks, LoadResult
from layerflow.agent.descriptors import PartDescriptor
from layerflow.connectors.vllm.plan.plan import UnkeptLoad

log = structlog.get_logger("layerflow.vllm")


class FailedLoads:
    """Since each was last taken.

    With one cache group vLLM is told blocks. With several block ids do not tell it which request is meant: it is told
    the requests whose background loads have failed, and :mod:`..scheduler.recovery` those whose step's loads have.

    :ivar restarts: a background load that fails is told as a whole with one group too: its request starts over.
    :ivar shares: requests of which a load has failed, with the share of its blocks that has.
    """

    def __init__(self, *, several_groups: bool) -> None:
        self._several_groups = several_groups
        self._blocks: set[int] = set()
        self._waiting: set[str] = set()
        self._lost: set[str] = set()
        self.restarts = False
        self.shares: dict[str, float] = {}

    @property
    def in_step(self) -> bool:
        """Has a load of a running step failed, that was not told yet?"""
        return bool(self._blocks or self._lost)

    def add(self, parts: Iterable[PartDescriptor], outcome: LoadResult, *, background: bool) -> None:
        """Loads that ended so.

        :param parts: all of them, those that are well too.
        :param background: its request waits for it, and computes nothing meanwhile.
        """
        block_ids = {
            (part.request, part.group, number): int(part.table[number])
            for part in parts
            for piece in part.pieces
            for number in piece.blocks
        }
        blocks_of = Counter(request for request, _, _ in block_ids)
        for failed in outcome.failed:
            log.warning("load_failed", request=failed.request, blocks=len(failed.blocks), reason=failed.reason)
            share = len(failed.blocks) / blocks_of[failed.request]
            self.shares[failed.request] = max(share, self.shares.get(failed.request, 0.0))
            if not (self._several_groups or (background and self.restarts)):
                self._blocks.update(block_ids[failed.request, failed.group, block] for block in failed.blocks)
            elif background:
                self._waiting.add(failed.request)
            else:
                self._lost.add(failed.request)

    def unkept(self, request: str, load: UnkeptLoad) -> None:
        """A load that vLLM was promised, and that could not be planned."""
        log.warning("load_failed", request=request, blocks=len(load.blocks), reason="it could not be planned")
        self.shares[request] = 1.0
        if not (self._several_groups or (load.background and self.restarts)):
            self._blocks.update(load.blocks)
        else:
            (self._waiting if load.background else self._lost).add(request)

    def take_blocks(self) -> set[int]:
        """Block ids that hold no valid bytes."""
        taken, self._blocks = self._blocks, set()
        return taken

    def take_waiting(self) -> set[str]:
        """Requests whose background loads have failed."""
        taken, self._waiting = self._waiting, set()
        return taken

    def take_lost(self) -> frozenset[str]:
        """Requests whose loads in the step have failed."""
        taken, self._lost = frozenset(self._lost), set()
        return taken

    def take_shares(self) -> dict[str, float]:
        """See :attr:`shares`."""
        taken, self.shares = self.shares, {}
        return taken


def all_failed(parts: Iterable[PartDescriptor], reason: str) -> LoadResult:
    """Nothing of these loads is of use."""
    lost: dict[tuple[str, int], list[int]] = {}
    for part in parts:
        lost.setdefault((part.request, part.group), []).extend(block for piece in part.pieces for block in piece.blocks)
    return LoadResult(tuple(FailedBlocks(*of, tuple(blocks), reason) for of, blocks in lost.items()))
