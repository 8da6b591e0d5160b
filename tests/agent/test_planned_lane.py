"""What the load lane cuts itself: within the caps of a batch, the window and the layers ahead; nearest layer first."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.agent.lanes.load import WorkerDrivenLoads, WorkerDrivenQueue
from layerflow.agent.lanes.task import CopyTask, EmulatedLink
from layerflow.agent.step.transfers import CANCELLED
from layerflow.flow.window import TURN, BatchCaps, PlannedLayer, WindowCaps


class FakeStep:
    """What planned loads ask a step for."""

    def __init__(self, number: int = 1, deadline: float = 1.0) -> None:
        self.number, self.deadline = number, deadline
        self.frontier, self.fenced = -1, False
        self.granted: list[Any] = []

    def grant(self, batches: list[Any]) -> None:
        self.granted += batches

    def group_of(self, layer: int) -> int:
        return 0


def loads(
    step: FakeStep, layers: int, blocks: int, size: int, over: list[WorkerDrivenLoads] | None = None
) -> WorkerDrivenLoads:
    told = over if over is not None else []
    shape = [PlannedLayer(layer, 0, size) for layer in range(layers)]
    return WorkerDrivenLoads(step, shape, {0: blocks}, copier=None, link=EmulatedLink(0, 0), over=told.append)  # type: ignore[arg-type]


def end(queue: WorkerDrivenQueue, tasks: list[CopyTask], failure: str = "") -> None:
    for task in tasks:
        assert task.ended is not None
        task.ended(task, failure)
        queue.landed(task.batch.nbytes)


@settings(deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 20), st.integers(1, 40), st.integers(1, 8), st.integers(1, 100),
    st.integers(1, 200), st.integers(0, 3), st.randoms(),
)  # fmt: skip
def test_every_byte_once_within_all_caps(layers, blocks, size, most, nbytes, window, depth, random):
    step, over = FakeStep(), []
    queue = WorkerDrivenQueue(WindowCaps(window, depth))
    planned = loads(step, layers, blocks, size, over)
    queue.add(planned)
    seen: dict[int, list[int]] = {layer: [0] * blocks for layer in range(layers)}
    sealed, flying = [], []
    for _ in range(layers * blocks * size + layers + 5):
        flying += queue.take(BatchCaps(most, nbytes))
        assert sum(task.batch.nbytes for task in flying) <= window
        for task in flying:
            batch = task.batch
            assert batch.hi - batch.lo <= most and batch.nbytes <= nbytes
            assert not depth or batch.layer - step.frontier <= depth
        if not flying:
            if over:
                break
            step.frontier += 1
            continue
        task = flying.pop(random.randrange(len(flying)))
        batch = task.batch
        for block in range(batch.lo, batch.hi):
            seen[batch.layer][block] += batch.byte_hi - batch.byte_lo if batch.byte_hi else size
        sealed += [batch.layer] * batch.seals
        end(queue, [task])
    assert over == [planned] and planned.moved == layers * blocks * size
    assert all(row == [size] * blocks for row in seen.values())
    assert sorted(sealed) == list(range(layers))
    assert not queue


def test_the_nearest_layer_goes_first_whoever_came_first():
    queue = WorkerDrivenQueue(WindowCaps(1000, 0))
    far, near = FakeStep(1), FakeStep(2)
    queue.add(loads(far, 4, 1, 100))
    queue.take(BatchCaps(10, 100))  # two layers leave at once
    queue.add(loads(near, 2, 1, 100))
    order = [(task.step.number, task.batch.layer) for _ in range(2) for task in queue.take(BatchCaps(10, 100))]
    assert order == [(2, 0), (2, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("steps", [1, 3])
def test_small_batches_leave_a_few_at_a_time_and_a_calls_worth_at_once(steps):
    for call, most in ((10, TURN), (10_000, 10_000)):
        queue = WorkerDrivenQueue(WindowCaps(1_000_000, 0))
        for number in range(steps):
            queue.add(loads(FakeStep(number), 100, 1, 10))
        turns = []
        while queue:
            turns.append(len(queue.take(BatchCaps(1, call))))
        assert sum(turns) == steps * 100 and max(turns) <= most
        assert len(turns) <= 3 * steps or call == 10


def test_what_is_cut_off_ends_once_nothing_of_it_moves():
    step, over = FakeStep(), []
    queue = WorkerDrivenQueue(WindowCaps(1000, 0))
    planned = loads(step, 4, 1, 100, over)
    queue.add(planned)
    taken = queue.take(BatchCaps(10, 100))
    step.fenced = True
    assert queue.take(BatchCaps(10, 100)) == [] and not queue and not over
    end(queue, taken, CANCELLED)
    assert over == [planned] and not planned.lost
    planned.finish_if_done()
    assert over == [planned], "told once"


def test_a_batch_that_failed_is_told_with_its_blocks():
    step, over = FakeStep(), []
    queue = WorkerDrivenQueue(WindowCaps(1000, 0))
    planned = loads(step, 1, 4, 10, over)
    queue.add(planned)
    end(queue, queue.take(BatchCaps(10, 100)), "broken: no")
    assert over == [planned] and planned.moved == 0
    assert [(lost.lo, lost.hi, lost.reason) for lost in planned.lost] == [(0, 4, "broken: no")]


def test_room_is_made_by_whichever_thread_ends_a_batch():
    step = FakeStep()
    queue = WorkerDrivenQueue(WindowCaps(100, 0))
    queue.add(loads(step, 3, 1, 100))
    [first] = queue.take(BatchCaps(10, 100))
    assert queue.take(BatchCaps(10, 100)) == []
    thread = threading.Thread(target=end, args=(queue, [first]))
    thread.start()
    thread.join()
    assert len(queue.take(BatchCaps(10, 100))) == 1


def test_what_may_not_move_yet_holds_nobody_up():
    ahead, behind = FakeStep(1), FakeStep(2, deadline=9.0)
    queue = WorkerDrivenQueue(WindowCaps(1000, 1))
    queue.add(loads(ahead, 3, 1, 10))
    assert [task.batch.layer for task in queue.take(BatchCaps(10, 100))] == [0]
    assert queue.take(BatchCaps(10, 100)) == []
    queue.add(loads(behind, 3, 1, 10))
    assert [(task.batch.step, task.batch.layer) for task in queue.take(BatchCaps(10, 100))] == [(2, 0)]
    assert queue.take(BatchCaps(10, 100)) == []
    behind.frontier = 0
    assert [(task.batch.step, task.batch.layer) for task in queue.take(BatchCaps(10, 100))] == [(2, 1)]
    ahead.frontier = behind.frontier = 1
    taken = [(task.batch.step, task.batch.layer) for task in queue.take(BatchCaps(10, 100))]
    assert taken == [(1, 1), (1, 2), (2, 2)]


def test_a_window_has_room_for_several_batches_so_that_a_link_never_waits_for_one_to_be_seen():
    step = FakeStep()
    queue = WorkerDrivenQueue(WindowCaps(1000, 0))
    queue.add(loads(step, 1, 100, 10))
    flying = queue.take(BatchCaps(1000, 1000))
    flying += queue.take(BatchCaps(1000, 1000))
    assert [task.batch.nbytes for task in flying] == [250] * 4


def test_no_block_is_cut_for_that():
    step = FakeStep()
    queue = WorkerDrivenQueue(WindowCaps(1000, 0))
    queue.add(loads(step, 1, 4, 400))
    flying = queue.take(BatchCaps(1000, 1000))
    assert [task.batch.nbytes for task in flying] == [400] * 2


def test_a_step_is_not_over_while_batches_are_cut_whose_copies_are_yet_to_be_made():
    """A device's poller may end the batch in flight just then."""
    over: list[WorkerDrivenLoads] = []
    planned = loads(FakeStep(), 2, 1, 10, over)
    [first] = planned.tasks(planned.cursor.cut(BatchCaps(1, 10), 10, 0))
    cut = planned.cursor.cut(BatchCaps(1, 10), 10, 1)
    assert not planned.left
    planned.ended(first, "")
    assert not over
    [last] = planned.tasks(cut)
    planned.ended(last, "")
    assert over == [planned]


def test_a_step_that_is_cut_off_while_the_window_looks_is_told_over():
    step, over = FakeStep(), []
    queue = WorkerDrivenQueue(WindowCaps(1000, 0))
    planned = loads(step, 2, 1, 10, over)
    looks = 0

    class CutOff(WorkerDrivenLoads):
        @property
        def left(self) -> bool:
            nonlocal looks
            looks += 1
            step.fenced = looks > 1  # by another thread, just after the first look
            return looks == 1

    planned.__class__ = CutOff
    queue.add(planned)
    for task in [task for _ in range(3) for task in queue.take(BatchCaps(10, 100))]:
        planned.ended(task, CANCELLED)
    queue.take(BatchCaps(10, 100))
    assert over == [planned] and not queue
