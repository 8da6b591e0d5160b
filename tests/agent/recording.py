"""Records what every native call of every lane in this process moves, and what is on its way meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from layerflow.agent.dispatcher import Dispatcher
from layerflow.agent.lanes.lanes import Lanes
from layerflow.agent.lanes.load import WorkerDrivenQueue
from layerflow.agent.step.step import Step
from layerflow.wire.messages import Batch


@dataclass(frozen=True)
class Call:
    """One call of a copier.

    :param blocks: each layer's counted.
    :param frontier: of the step, when the call began.
    """

    direction: int
    layers: tuple[int, ...]
    blocks: int
    nbytes: int
    frontier: int


@dataclass
class Calls:
    """What lanes have done, in order of their calls' beginning.

    :ivar most_inflight: the most bytes, of both directions and all agents of this process, that had begun to move
        and whose end was not reported.
    :ivar most_granted: the most bytes that were handed to lanes, or cut there, and not reported.
    """

    calls: list[Call] = field(default_factory=list)
    most_inflight: int = 0
    most_granted: int = 0
    _moving: dict[tuple[int, int], int] = field(default_factory=dict)
    _granted: dict[tuple[int, int], int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def most_blocks(self) -> int:
        """The most blocks of one call."""
        return max(call.blocks for call in self.calls)

    @property
    def most_bytes(self) -> int:
        """The most bytes of one call."""
        return max(call.nbytes for call in self.calls)

    def of(self, direction: int) -> list[Call]:
        """The calls of one direction."""
        return [call for call in self.calls if call.direction == direction]

    def granted(self, owner: int, batch: Batch) -> None:
        """A lane was handed a batch, or has cut one."""
        with self._lock:
            self._granted[owner, batch.batch] = batch.nbytes
            self.most_granted = max(self.most_granted, sum(self._granted.values()))

    def began(self, step: Step, batches: Sequence[Batch]) -> None:
        """One call is about to move these."""
        with self._lock:
            layers = tuple(batch.layer for batch in batches)
            blocks, nbytes = (sum(b.hi - b.lo for b in batches), sum(b.nbytes for b in batches))
            self.calls.append(Call(batches[0].direction, layers, blocks, nbytes, step.frontier))
            self._moving.update({(id(step), batch.batch): batch.nbytes for batch in batches})
            self.most_inflight = max(self.most_inflight, sum(self._moving.values()))

    def ended(self, owner: int, batch: Batch) -> None:
        """A batch's end is about to be reported."""
        with self._lock:
            self._moving.pop((owner, batch.batch), None)
            self._granted.pop((owner, batch.batch), None)


@contextmanager
def recorded() -> Iterator[Calls]:
    """Records all agents of this process while it lasts; begin it before their steps are opened."""
    calls = Calls()
    began, begin_copy = Step.begin, Step.begin_copy
    start, take, ended = Dispatcher._start, WorkerDrivenQueue.take, Lanes._ended_batch

    def begin_one(step: Step, batch: Batch) -> bool:
        may = began(step, batch)
        if may:
            calls.began(step, [batch])
        return may

    def begin_many(step: Step, copy: Any) -> bool:
        may = begin_copy(step, copy)
        if may:
            calls.began(step, copy.batches)
        return may

    def grant(dispatcher: Dispatcher, batch: Batch) -> None:
        step = dispatcher._steps.get(batch.step)
        if step is not None:
            calls.granted(id(step), batch)
        start(dispatcher, batch)

    def cut(queue: WorkerDrivenQueue, caps: Any) -> Any:
        tasks = take(queue, caps)
        for task in tasks:
            calls.granted(id(task.step), task.batch)
        return tasks

    def end(lanes: Lanes, job: Any, failure: str) -> None:
        calls.ended(id(job.step), job.batch)
        ended(lanes, job, failure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "begin", begin_one)
        patch.setattr(Step, "begin_copy", begin_many)
        patch.setattr(Dispatcher, "_start", grant)
        patch.setattr(WorkerDrivenQueue, "take", cut)
        patch.setattr(Lanes, "_ended_batch", end)
        yield calls
