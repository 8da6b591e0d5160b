"""A simulated lane sees how far an engine is as a real one does."""

from collections.abc import Callable

import pytest

from layerflow.flow.commands import Submit
from layerflow.flow.cost import LinkCost
from layerflow.flow.events import SAVE
from layerflow.flow.window import LONGEST_SAMPLE_S, BatchCaps, WindowCaps
from layerflow.sim.clock import VirtualClock
from layerflow.sim.simulation import one_group_spec
from layerflow.sim.worker import LinkTimes, SimulatedLink, SimulatedLoads, SimulatedWorker

LAYERS, BLOCKS, LAYER_BYTES = 4, 4, 4096
PASSES_S = 1e-3
REACHED_S = 1.0


def worker_over(
    clock: VirtualClock, saves: SimulatedLink, saved: Callable[..., object] = lambda *_: None
) -> SimulatedWorker:
    """A worker whose loads pass a link like that of its saves."""
    spec = one_group_spec(layers=LAYERS, bytes_per_token=16, chunk_tokens=256, block_size=64, tp=1)
    links = SimulatedLink(saves.times), saves
    return SimulatedWorker(
        clock, spec, session=1, caps=BatchCaps(), window=WindowCaps(1 << 20, 1), stagger_us=0, links=links, saved=saved
    )


def loading(clock: VirtualClock) -> tuple[SimulatedWorker, SimulatedLoads, list[float]]:
    """A worker that loads one layer ahead of its engine, and when its layers are in place."""
    worker = worker_over(clock, SimulatedLink(LinkTimes(LinkCost(LAYER_BYTES / PASSES_S, 0.0))))
    ready: list[float] = []
    loads = worker.load(7, {0: BLOCKS}, 60.0, over=lambda _: None, layer_ready=lambda: ready.append(clock.now))
    return worker, loads, ready


def test_saves_pass_while_latencies_of_others_last() -> None:
    clock, stored = VirtualClock(), []
    link = SimulatedLink(LinkTimes(LinkCost(LAYER_BYTES / PASSES_S, 10 * PASSES_S)))
    worker = worker_over(clock, link, lambda *_: stored.append(clock.now))
    worker.computed(7, LAYERS)
    for layer in range(LAYERS):
        worker.submit(Submit(1, 7, layer, SAVE, layer, 0, BLOCKS, 0, 0, LAYER_BYTES, layer, True))
    clock.run()
    assert stored == pytest.approx([(11 + layer) * PASSES_S for layer in range(LAYERS)])
    assert link.busy == pytest.approx(LAYERS * PASSES_S)


def test_an_engine_that_computes_is_looked_at_now_and_then() -> None:
    clock = VirtualClock()
    worker, loads, ready = loading(clock)
    clock.at(REACHED_S, lambda: worker.advance(loads, 0))
    clock.run()
    assert ready[0] == pytest.approx(PASSES_S)
    late = ready[1] - PASSES_S - REACHED_S
    assert 0.0 < late <= LONGEST_SAMPLE_S, "the layer behind begins at the lane's next look"
    assert len(ready) == 2, "and no layer is further ahead"


def test_an_engine_that_has_to_wait_wakes_the_lane() -> None:
    clock = VirtualClock()
    worker, loads, ready = loading(clock)
    clock.at(REACHED_S, lambda: worker.advance(loads, 1))
    clock.run()
    assert ready[1:] == [pytest.approx(REACHED_S + PASSES_S), pytest.approx(REACHED_S + 2 * PASSES_S)]


def test_what_lands_lets_the_lane_look_at_once() -> None:
    clock = VirtualClock()
    worker, loads, ready = loading(clock)
    clock.at(PASSES_S / 2, lambda: worker.advance(loads, 0))
    clock.run()
    assert ready == [pytest.approx(PASSES_S), pytest.approx(2 * PASSES_S)]
