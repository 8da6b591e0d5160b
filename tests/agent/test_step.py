"""One step, driven by hand: what a wait says when failures, fences and aborts meet it half-way."""

from __future__ import annotations

import asyncio
import threading

import pytest
from e2e.known import eventually

from layerflow.agent.aio import AsyncStep
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.wire.messages import Batch

from .scene import BLOCKS, Scene, some_batch, waiting


def test_ready_once_every_batch_has_landed() -> None:
    scene = Scene()
    assert not scene.step.is_ready(0)
    thread, outcomes = waiting(scene.step, 0)
    scene.copy(0)
    thread.join(10)
    assert outcomes[0].ready
    assert scene.step.is_ready(0) and not scene.step.is_ready(1)
    scene.copy(1)
    assert scene.step.wait_all().ready
    assert not scene.step.loading


def test_a_wait_during_a_fence_hears_what_failed() -> None:
    """A batch is being copied when the server is lost: until it has ended nobody may conclude anything."""
    scene = Scene()
    scene.copy(0)
    assert scene.step.begin(some_batch(LOAD))
    fence = threading.Thread(target=scene.step.fence, args=("the server is gone",))
    fence.start()
    assert eventually(lambda: scene.step.fenced)  # the fence has begun, and waits for the copy
    assert not scene.step.begin(some_batch(LOAD))
    thread, outcomes = waiting(scene.step, 1)
    thread.join(0.1)
    assert not outcomes, "a wait has ended while a copy into its blocks was under way"
    scene.step.end(scene.batches[1], "broken: half of it")
    thread.join(10)
    fence.join(10)
    assert not outcomes[0].ready
    assert {failed.request: set(failed.blocks) for failed in outcomes[0].failed} == {
        "a": set(range(BLOCKS)),
        "b": set(range(BLOCKS)),
    }


def test_two_fences_are_one() -> None:
    scene = Scene()
    assert scene.step.begin(some_batch(LOAD))
    fences = [threading.Thread(target=scene.step.fence, args=(f"reason {n}",)) for n in range(2)]
    for fence in fences:
        fence.start()
    assert eventually(lambda: scene.step.fenced)
    assert not scene.step.begin(some_batch(LOAD))
    scene.step.end(scene.batches[0])
    for fence in fences:
        fence.join(10)
    assert len(scene.fenced) == 1
    assert {failed.reason for failed in scene.step.failed} == set(scene.fenced)


def test_a_deadline_is_one_fence_and_touches_no_other_step() -> None:
    scene = Scene(timeout_s=0.0)
    assert [scene.step.wait_layer(layer).ready for layer in (0, 1, 0, 1)] == [False] * 4
    assert len(scene.fenced) == 1
    assert not scene.step.begin(some_batch(LOAD))
    assert scene.step.begin(some_batch(SAVE)), "a fence of the loads has cut the saves off"


def test_what_has_arrived_before_the_fence_is_not_reported() -> None:
    """Blocks whose every layer is in place have not failed."""
    scene = Scene()
    scene.copy(0, 1)
    scene.step.fence("the server is gone")
    assert scene.step.wait_all().ready
    assert scene.fenced == []


def test_a_failed_batch_names_its_blocks_in_every_wait_to_come() -> None:
    scene = Scene()
    assert scene.step.begin(some_batch(LOAD))
    scene.step.end(scene.batches[0], "broken: no")
    assert {failed.request for failed in scene.step.wait_layer(0).failed} == {"a", "b"}
    scene.copy(1)
    assert not scene.step.wait_layer(1).ready


def test_an_object_that_is_gone_fails_its_own_request_only() -> None:
    scene = Scene(missing=True)
    scene.copy(0, 1)
    outcome = scene.step.wait_layer(0)
    assert [(failed.request, failed.blocks) for failed in outcome.failed] == [("a", (4, 5, 6, 7))]


def test_an_aborted_request_fails_nobody() -> None:
    scene = Scene()
    scene.step.abort("a")
    scene.step.load_failed(0, 0, BLOCKS, "deadline")
    scene.copy(0, 1)
    assert scene.step.wait_layer(0).ready
    scene.step.abort("b")
    assert not scene.step.failed


@pytest.mark.parametrize("how", ["close", "exception", "all done"])
def test_closing(how: str) -> None:
    scene = Scene()
    if how == "exception":
        with pytest.raises(RuntimeError), scene.step:
            raise RuntimeError("the model failed")
    elif how == "all done":
        with scene.step:
            scene.step.layer_done(0)
            scene.step.layer_done(1)
    else:
        scene.step.close(False)
    assert scene.closed == [how == "all done"]
    scene.step.close()
    assert len(scene.closed) == 1, "closed twice"
    assert bool(scene.step.saves_cancelled) == (how != "all done")


def test_blocks_that_failed_are_left_out_of_every_later_batch() -> None:
    scene = Scene()
    step, (first, second) = scene.step, scene.batches
    assert step.live(second) == [(0, 16)]
    assert step.begin(some_batch(LOAD))
    step.load_failed(0, 2, 5, "gone")
    step.end(first)
    assert step.live(second) == [(0, 2), (5, 16)]
    step.load_failed(0, 0, 2, "gone")
    step.load_failed(0, 15, 16, "gone")
    assert step.live(second) == [(5, 15)]
    step.load_failed(0, 0, 16, "gone")
    assert step.live(second) == []


def test_a_wait_does_not_tell_of_a_failure_while_a_batch_may_still_write_those_blocks() -> None:
    scene = Scene()
    step = scene.step
    scene.copy(0)
    assert step.begin(some_batch(LOAD))  # layer 1's batch is being copied
    step.load_failed(0, 0, 8, "gone")
    thread, outcomes = waiting(step, 0)
    thread.join(0.05)
    assert thread.is_alive()
    assert not outcomes
    step.end(scene.batches[1])
    thread.join(20)
    assert [failed.request for failed in outcomes[0].failed] == ["a"]


class Enqueued:
    """A device event that only notes who waited for it."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_cutting_saves_waits_for_what_they_have_enqueued_and_for_no_load() -> None:
    """On a device a copy has only been enqueued when the lane is done with it."""
    scene, load, save = Scene(), Enqueued(), Enqueued()
    step = scene.step
    assert step.begin(some_batch(LOAD)) and step.begin(some_batch(SAVE))
    step.end(scene.batches[0], event=load)  # type: ignore[arg-type]
    step.end(Batch(1, 9, SAVE, 0, 0, 4, 0, 0, 1, -1, True), event=save)  # type: ignore[arg-type]
    assert step.begin(some_batch(LOAD)), "a load that is being copied holds nobody up"
    assert step.fence_saves("reclaimed")
    assert (load.waited, save.waited) == (0, 1)
    assert not step.begin(some_batch(SAVE))
    assert not step.fence_saves("again")
    step.end(scene.batches[1])
    step.wait_idle()
    assert (load.waited, save.waited) == (1, 1)


def test_loads_begin_before_the_forward_pass_where_the_engine_lets_them() -> None:
    scene = Scene()
    asked = scene.attended
    assert not scene.step.begin_loads(0.0)
    assert scene.attended == asked, "everything is granted: there is nothing to hear"
    began: list[bool] = []
    thread = threading.Thread(target=lambda: began.append(scene.step.begin_loads(10.0)))
    thread.start()
    scene.copy(0)
    thread.join(10)
    assert began == [True]
    scene.copy(1)
    assert scene.step.begin_loads(0.0), "everything is in place"


def test_a_wait_first_hears_what_the_server_has_granted() -> None:
    scene = Scene(granted=False)

    def grant() -> None:
        for batch in scene.batches:
            scene.step.granted(batch)
        scene.copy(0, 1)

    scene.on_attend = grant
    assert scene.step.wait_layer(0).ready
    assert scene.attended == 1
    assert scene.step.wait_layer(1).ready
    assert scene.attended == 1


class Threads:
    """A device that notes which threads' streams wait for which events."""

    kind = "npu"

    def __init__(self) -> None:
        self.waited: list[tuple[object, int]] = []

    def record(self) -> Enqueued:
        return Enqueued()

    def wait(self, event: object) -> None:
        self.waited.append((event, threading.get_ident()))


@pytest.mark.parametrize("whole", [False, True])
def test_in_asyncio_it_is_the_engines_stream_that_waits_for_a_copy(whole: bool) -> None:
    device, events = Threads(), [Enqueued(), Enqueued()]
    scene = Scene(device=device)  # type: ignore[arg-type]
    for batch, event in zip(scene.batches, events, strict=True):
        assert scene.step.begin(batch)
        scene.step.end(batch, event=event)  # type: ignore[arg-type]

    async def engine() -> bool:
        step = AsyncStep(scene.step)
        if whole:
            return bool(await step.wait_all())
        return all([bool(await step.wait_layer(layer)) for layer in range(2)])

    assert asyncio.run(engine())
    assert device.waited == [(event, threading.get_ident()) for event in events]
