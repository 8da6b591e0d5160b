"""Impossible events raise with the step's story and change nothing; late ones are counted."""

from __future__ import annotations

import pytest
from flow_world import World, submits

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import StepDone
from layerflow.flow.events import (
    BatchDone,
    FetchFailed,
    FrontierReached,
    LayersComputed,
    LayersFetched,
    LayerShape,
    Limits,
    Part,
    RequestAborted,
    SessionOpened,
    StepClosed,
    StepOpened,
    Tick,
)

LAYERS = (LayerShape(0, 10), LayerShape(1, 10))


def opened():
    world = World(Limits(prefetch_layers=1))
    world.open_session(0, [(0, 10), (1, 10)])
    world.open_session(1, [(0, 10)])
    world.open(0, 1, [Part("a", 0, 1), Part("b", 1, 1, 4), Part("c", 1, 1, 5)])
    world.fetched(0, 1, 5, 1, group=1)
    return world


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (SessionOpened(0, LAYERS), "twice"),
        (SessionOpened(2, ()), "at least one layer"),
        (SessionOpened(2, (LayerShape(0, 0),)), "positive block size"),
        (StepOpened(9, 1, 1e6, 1e6), "never opened"),
        (RequestAborted(9, "a"), "never opened"),
        (StepOpened(0, 1, 1e6, 1e6), "twice"),
        (StepOpened(0, 2, float("nan"), 1e6), "not a number"),
        (StepOpened(0, 2, 1e6, 1e6, (Part("a", 0, 1), Part("a", 0, 0))), "load part 1"),
        (StepOpened(0, 2, 1e6, 1e6, (), (Part("a", 7, 1),)), "save part 0"),
        (LayersFetched(0, 1, 9, 1, 1), "arrival 9"),
        (LayersFetched(0, 1, 4, 0, 1), "arrival 4, group 0"),
        (LayersFetched(0, 1, 0, 0, 1), "arrival 0"),
        (LayersFetched(0, 1, 4, 1, 2), "2 layers of group 1, which has 1"),
        (LayersFetched(0, 1, 4, 1, -1), "-1 layers"),
        (FetchFailed(0, 1, (1, 3), "gone"), "load part 3"),
        (FetchFailed(0, 1, (1, 0), "gone"), "load part 0 after"),
        (FetchFailed(0, 1, (1, 2), "gone"), "load part 2 after"),
        (FrontierReached(0, 1, 2), "layer 2"),
        (FrontierReached(0, 1, -1), "layer -1"),
        (LayersComputed(0, 1, 3), "3 layers"),
        (BatchDone(0, 99), "never granted"),
        (BatchDone(1, 1), "session 1 reported batch 1"),
    ],
)
def test_impossible_events_raise_and_change_nothing(event, words):
    world = opened()
    before = world.flow.statistics()
    with pytest.raises(InvalidTransition, match=words):
        world.flow.handle(event, world.now)
    assert world.flow.statistics() == before
    world.flow.validate()
    world.drain()


def test_the_story_tells_what_happened_to_the_step():
    world = opened()
    world.send(FrontierReached(0, 1, 0))
    with pytest.raises(InvalidTransition) as caught:
        world.flow.handle(FrontierReached(0, 1, 5), world.now)
    assert caught.value.story[0].startswith("StepOpened(3 loads, 0 saves")
    assert caught.value.story[-1] == "FrontierReached(session=0, step=1, layer=5)"


def test_late_events_are_ignored_and_counted():
    world = World()
    world.open_session(0, [(0, 10)])
    (load,) = submits(world.open(0, 1, [Part("a", 0, 1)]))
    world.done(load)
    assert any(isinstance(c, StepDone) for c in world.send(StepClosed(0, 1, True)))
    late = [BatchDone(0, load.batch), FrontierReached(0, 1, 0), LayersComputed(0, 1, 1), StepClosed(0, 1, True)]
    for event in late:
        assert world.flow.handle(event, world.now) == []
    assert world.flow.statistics().late_reports == len(late)


def test_a_tick_alone_does_nothing():
    world = opened()
    assert world.send(Tick()) == []
