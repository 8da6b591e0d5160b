"""Batches that one call copies: each layer is ready as it lands, and whoever cuts them off waits for one batch only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from e2e.known import KnownWorker, eventually, small_spec
from msgspec import structs

from layerflow.agent.step.in_flight import CoalescedCopy
from layerflow.agent.step.transfers import LOAD, SAVE
from layerflow.ops import base
from layerflow.server import EmbeddedServer
from layerflow.wire.messages import Batch

from .scene import BLOCKS, Scene, waiting

Embed = Callable[..., EmbeddedServer]
PATIENCE_S = 10.0


def in_flight(scene: Scene) -> CoalescedCopy:
    """All of the step's batches have set out."""
    copy = CoalescedCopy(LOAD, scene.batches)
    assert scene.step.begin_copy(copy)
    return copy


def land(copy: CoalescedCopy, position: int) -> None:
    copy.progress.completed_at[position] = time.monotonic()


def halted(copy: CoalescedCopy) -> bool:
    return bool(copy.progress.halted[0])


def test_a_layer_is_ready_before_the_lane_is_back() -> None:
    scene = Scene()
    copy = in_flight(scene)
    first, told = waiting(scene.step, 0)
    land(copy, 0)
    first.join(PATIENCE_S)
    assert told[0].ready
    second, told = waiting(scene.step, 1)
    land(copy, 1)
    second.join(PATIENCE_S)
    assert told[0].ready and scene.step.loading
    scene.step.end_copy(copy, 2)
    assert scene.step.is_ready(0) and scene.step.is_ready(1) and not scene.step.loading


def test_a_layer_that_has_landed_waits_for_no_lock() -> None:
    scene = Scene()
    copy = in_flight(scene)
    land(copy, 0)
    with scene.step._condition:
        first, told = waiting(scene.step, 0)
        first.join(PATIENCE_S)
        assert told[0].ready and scene.step.is_ready(0) and not scene.step.is_ready(1)
    scene.step.load_failed(0, 0, 1, "gone")
    assert not scene.step.is_ready(0), "there is something to tell"


def test_a_lane_that_comes_in_while_somebody_looks_is_not_counted_twice() -> None:
    """Half of the layer is copied when the call is halted: what has landed there is what has ended."""
    scene = Scene(granted=False)
    whole = scene.batches[0]
    half, rest = (structs.replace(whole, batch=number, seals=number == 2) for number in (1, 2))
    for batch in (half, rest):
        scene.step.granted(batch)
    copy = CoalescedCopy(LOAD, [half, rest])
    assert scene.step.begin_copy(copy)
    land(copy, 0)

    def landed(layer: int) -> int:
        scene.step.end_copy(copy, 1)
        return 1

    copy.landed = landed  # type: ignore[method-assign]
    assert not scene.step.is_ready(0)


def test_a_failure_that_comes_while_somebody_looks_is_told() -> None:
    """The layer is sealed because what remained of it has failed."""
    scene = Scene(granted=False)
    batch = structs.replace(scene.batches[0], seals=False)
    scene.step.granted(batch)
    copy = CoalescedCopy(LOAD, [batch])
    assert scene.step.begin_copy(copy)
    land(copy, 0)

    def landed(layer: int) -> int:
        scene.step.load_failed(0, 0, 4, "gone")
        scene.step.sealed(layer)
        return 1

    copy.landed = landed  # type: ignore[method-assign]
    assert not scene.step.is_ready(0)


def test_what_has_landed_is_read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered: list[float] = []
    copy = CoalescedCopy(LOAD, Scene().batches)
    monkeypatch.setattr(base, "acquire", lambda: ordered.append(copy.progress.completed_at[0]))
    land(copy, 0)
    assert copy.landed(0) == 1 and copy.landed(1) == 0
    assert len(ordered) == 2 and ordered[0] > 0.0


def test_who_waits_already_when_it_sets_out_sees_it_land() -> None:
    scene = Scene()
    thread, told = waiting(scene.step, 0)
    assert eventually(lambda: scene.step.frontier == 0)
    land(in_flight(scene), 0)
    thread.join(PATIENCE_S)
    assert told[0].ready


def test_a_layer_is_not_ready_while_a_batch_of_it_is_missing() -> None:
    scene = Scene()
    more = Batch(1, 3, LOAD, 0, 0, BLOCKS, 0, 0, 1, -1, True)
    scene.step.granted(more)
    copy = CoalescedCopy(LOAD, [scene.batches[0], more])
    assert scene.step.begin_copy(copy)
    thread, told = waiting(scene.step, 0)
    land(copy, 0)
    thread.join(0.1)
    assert not told
    land(copy, 1)
    thread.join(PATIENCE_S)
    assert told[0].ready


def test_a_fence_halts_it_and_waits_until_it_is_back() -> None:
    scene = Scene()
    copy = in_flight(scene)
    land(copy, 0)
    fence = threading.Thread(target=scene.step.fence, args=("the server is gone",))
    fence.start()
    assert eventually(lambda: halted(copy))
    fence.join(0.1)
    assert fence.is_alive(), "the fence has ended while a batch may still be copied"
    scene.step.end_copy(copy, 1)
    fence.join(PATIENCE_S)
    assert not scene.step.wait_all()
    assert scene.step.failed and not scene.step.begin_copy(CoalescedCopy(LOAD, scene.batches[1:]))


def test_what_a_fence_finds_landed_has_arrived() -> None:
    scene = Scene()
    copy = in_flight(scene)
    fence = threading.Thread(target=scene.step.fence, args=("the server is gone",))
    fence.start()
    assert eventually(lambda: halted(copy))
    scene.step.end_copy(copy, 2)
    fence.join(PATIENCE_S)
    assert scene.step.wait_all().ready and not scene.step.failed


def test_a_failure_halts_it_and_the_rest_goes_one_by_one() -> None:
    scene = Scene()
    copy = in_flight(scene)
    scene.step.load_failed(0, 0, 4, "broken: by somebody else")
    assert halted(copy)
    scene.step.end_copy(copy, 1)
    assert not scene.step.begin_copy(CoalescedCopy(LOAD, scene.batches[1:])), (
        "blocks that have failed would be written again"
    )
    assert scene.step.live(scene.batches[1]) == [(4, 2 * BLOCKS)]
    scene.copy(1)
    assert {failed.request: failed.blocks for failed in scene.step.wait_all().failed} == {"a": (0, 1, 2, 3)}


def test_a_wait_does_not_tell_of_a_failure_before_it_is_back() -> None:
    scene = Scene()
    copy = in_flight(scene)
    land(copy, 0)
    scene.step.load_failed(0, 0, 4, "broken: by somebody else")
    thread, told = waiting(scene.step, 0)
    thread.join(0.1)
    assert not told, "a copy into those blocks may still be under way"
    scene.step.end_copy(copy, 2)
    thread.join(PATIENCE_S)
    assert {failed.request for failed in told[0].failed} == {"a"}


def test_cutting_saves_halts_them_and_waits_until_they_are_back() -> None:
    scene = Scene()
    copy = CoalescedCopy(SAVE, [Batch(1, 9, SAVE, 0, 0, 1, 0, 0, 1, -1, True)])
    loads = in_flight(scene)
    assert scene.step.begin_copy(copy)
    cut = threading.Thread(target=scene.step.fence_saves, args=("its blocks were reclaimed",))
    cut.start()
    assert eventually(lambda: halted(copy))
    cut.join(0.1)
    assert cut.is_alive()
    scene.step.end_copy(copy, 0)
    cut.join(PATIENCE_S)
    assert not cut.is_alive() and not halted(loads)
    assert not scene.step.begin_copy(CoalescedCopy(SAVE, copy.batches))


@pytest.mark.parametrize("way", ["load_batches", "save_batches"])
def test_what_cannot_be_copied_together_is_copied_one_by_one(
    embed: Embed, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    server = embed()
    with KnownWorker(server.endpoint, small_spec(12), context=server.context) as worker:
        refused: list[str] = []

        def refuse(*_: object) -> int:
            refused.append(way)
            raise ValueError("not like this")

        assert worker.agent._dispatcher.access is not None
        for copier in worker.agent._dispatcher.access.copiers:
            monkeypatch.setattr(copier, way, refuse)
        saved = worker.serve(worker.prompt(60))
        assert worker.serve(saved.chain).hit.tokens == 59
        assert refused
