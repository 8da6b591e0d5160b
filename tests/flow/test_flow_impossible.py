"""Impossible events raise with the step's story and change nothing; late ones are counted."""

from __future__ import annotations

import sys

import pytest
from flow_world import World, coming, submits

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import StepDone
from layerflow.flow.events import (
    BatchDone,
    BatchFailed,
    CallDone,
    FailedRange,
    FetchOpened,
    FrontierReached,
    Hop,
    IncomingLeased,
    Item,
    LayersComputed,
    LayerShape,
    Limits,
    LoadsFenced,
    LoadsLost,
    LoadsMoved,
    Need,
    Part,
    RequestAborted,
    SessionOpened,
    StepClosed,
    StepOpened,
    Tick,
)
from layerflow.flow.graph import STORY_CHARS, STORY_EVENTS

LAYERS = (LayerShape(0, 10), LayerShape(1, 10))


def opened():
    world = World(Limits(prefetch_layers=1))
    world.open_session(0, [(0, 10), (1, 10)])
    world.open_session(1, [(0, 10)])
    world.bring(4, (1,))
    world.bring(5, (1,))
    world.open(0, 1, [Part("a", 0, 1), coming("b", 1, 1, 4), coming("c", 1, 1, 5)])
    world.fetched(5, 1)
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
        (StepOpened(0, 2, 1e6, 1e6, (coming("a", 1, 1, 9),)), "object 0 of fetch 9, which is not on its way"),
        (StepOpened(0, 2, 1e6, 1e6, (coming("a", 1, 1, 5),)), "fetch 5, which is not on its way"),
        (StepOpened(0, 2, 1e6, 1e6, (coming("a", 0, 1, 4),)), "other layers"),
        (StepOpened(0, 2, 1e6, 1e6, (coming("a", 1, 1, 4, item=1),)), "object 1 of fetch 4"),
        (StepOpened(0, 2, 1e6, 1e6, (Part("a", 1, 1, (Need(4, 0, 0, 2),)),)), "blocks 0 to 2 of 1"),
        (FetchOpened(5, "e", (0,), (Item(1, 1),)), "numbers ascend"),
        (FetchOpened(6, "e", (), (Item(1, 1),)), "no layers"),
        (FetchOpened(6, "e", (0,), (Item(0, 1),)), "without bytes"),
        (IncomingLeased(6, True), "never opened"),
        (CallDone(Hop.FETCH, 3), "never given"),
        (CallDone(Hop.FETCH, 1, ((1, "gone"),)), "does not have"),
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


def story_of(world, impossible):
    """The story that an impossible event is refused with. Nothing of the refusal is left then."""
    try:
        world.flow.handle(impossible, world.now)
    except InvalidTransition as error:
        return error.story
    raise AssertionError(f"{impossible} was possible")


def test_a_story_keeps_no_list_of_an_event_and_tells_counts():
    world = opened()
    lost = tuple(FailedRange(0, 0, 1, "gone") for _ in range(1000))
    held = sys.getrefcount(lost)
    assert story_of(world, LoadsLost(0, 1, lost))[-1] == "LoadsLost(1000 failed ranges)"
    stories = [story_of(world, LoadsMoved(0, 1, 7, lost)) for _ in range(2 * STORY_EVENTS)]
    assert stories[-1] == ("LoadsMoved(7 bytes, 1000 failed ranges)",) * STORY_EVENTS
    assert sys.getrefcount(lost) == held


@pytest.mark.parametrize("long", [LoadsFenced(0, 1, "x" * 65_536), BatchFailed(0, 1, "x" * 65_536)])
def test_a_story_is_short_whatever_an_event_says(long):
    world = opened()
    world.flow.handle(long, world.now)
    assert story_of(world, FrontierReached(0, 1, 5))[-2] == f"{repr(long)[: STORY_CHARS - 3]}..."


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
