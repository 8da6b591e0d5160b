"""What the core costs: commands per layer, and memory that knows neither layers nor blocks."""

from __future__ import annotations

import gc
import sys

import pytest
from flow_world import World

from layerflow.flow import Flow
from layerflow.flow.commands import Submit
from layerflow.flow.events import (
    Direction,
    LayersComputed,
    LayerShape,
    Limits,
    Part,
    RequestAborted,
    SessionLost,
    SessionOpened,
    StepClosed,
    StepOpened,
)
from layerflow_cli.bench.flow import measure


@pytest.mark.parametrize("requests", [8, 64, 512])
def test_a_few_commands_per_layer_however_many_requests(requests):
    world = World(validate=False)
    world.open_session(0, [(0, 64)] * 61)
    parts = [Part(f"r{i}", 0, 2) for i in range(requests)]
    commands = list(world.open(0, 1, parts, parts))
    commands += world.send(LayersComputed(0, 1, 61))
    while world.flying:
        commands += world.done(next(iter(world.flying.values())))
    commands += world.send(StepClosed(0, 1, True))
    assert not world.live
    assert len(commands) <= 4 * 61
    assert len([c for c in commands if isinstance(c, Submit)]) == 2 * 61


def reachable(root) -> int:
    """Bytes of everything the core holds of its steps, the caller's own events left out."""
    seen: set[int] = set()
    todo, total = [root], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | Direction) or type(one).__module__ == "layerflow.flow.events":
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset) or type(one).__name__ == "deque":
            todo += list(one)
        else:
            todo += [getattr(one, name) for name in getattr(one, "__slots__", ()) if hasattr(one, name)]
    return total


def held(requests: int, layers: int, blocks: int) -> int:
    """Bytes held in the middle of a step with room for 4 layers, less what the session's shape takes."""
    world = World(Limits(max_transfer_blocks=1 << 40, max_granted_bytes=4 * requests * blocks), validate=False)
    world.open_session(0, [(0, 1)] * layers)
    shape = reachable(world.flow._state)
    world.open(0, 1, [Part("r", 0, blocks) for _ in range(requests)])
    assert len(world.flying) == 4
    return reachable(world.flow._state) - shape


def test_memory_does_not_grow_with_layers_or_blocks():
    small = held(8, 10, 2)
    assert held(8, 1000, 2) <= small + 200
    assert held(8, 10, 20_000) <= small + 500  # larger integers


def test_memory_grows_by_one_number_per_part():
    assert held(512, 61, 2) - held(8, 61, 2) <= 504 * 48


def test_finished_steps_leave_nothing():
    world = World(validate=False)
    world.open_session(0, [(0, 8)] * 8)

    def step(number):
        parts = [Part(f"r{i}", 0, 2) for i in range(16)]
        world.open(0, number, parts, parts)
        world.drain()
        return reachable(world.flow._state)

    first = [step(number) for number in range(3)][-1]
    assert [step(number) for number in range(3, 40)][-1] <= first + 64


def test_a_step_that_is_over_leaves_nothing_for_the_garbage_collector():
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        measure(requests=(2,), layers=3, sessions=())
        flow = Flow(Limits())
        flow.handle(SessionOpened(0, (LayerShape(0, 10),) * 2), 0.0)
        part = (Part("r", 0, 1),)
        flow.handle(StepOpened(0, 1, 10.0, 10.0, part, part), 0.0)
        flow.handle(SessionLost(0), 0.0)  # with batches in flight
        flow.handle(SessionOpened(1, (LayerShape(0, 10),) * 2), 0.0)
        flow.handle(StepOpened(1, 1, 10.0, 10.0, part, part), 0.0)
        flow.handle(StepClosed(1, 1, ok=False), 0.0)
        flow.handle(RequestAborted(1, "r"), 0.0)
        flow.handle(SessionLost(1), 0.0)
        del flow
        gc.collect()
        left = [type(item).__name__ for item in gc.garbage if type(item).__module__.startswith("layerflow.flow")]
        assert [name for name in left if name in ("Step", "TransferJob", "Transfer", "Cursor", "InFlightBatch")] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
