"""How many messages the core's commands become."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any
from unittest.mock import Mock

from layerflow.flow.events import (
    BatchDone,
    FrontierReached,
    LayerShape,
    Limits,
    Part,
    SessionLost,
    SessionOpened,
    StepClosed,
    StepOpened,
    Tick,
)
from layerflow.objects import HEADER_BYTES
from layerflow.observe.metrics import Metrics
from layerflow.pool.base import NewObject, ReserveStatus
from layerflow.pool.memory import MemoryPool
from layerflow.server.driver import FIRST_BATCHES, REVOKED_PER_TURN, Driver
from layerflow.server.planner import StepRecord, step_owner
from layerflow.wire.messages import Grant, Message
from server.support import Memory

BATCHES = 8 * FIRST_BATCHES
"""Of each layer."""


async def test_a_load_begins_with_a_few_batches_and_goes_on_with_one_grant_a_report() -> None:
    """The forward pass reaches a layer, and a whole layer's batches may be granted at once."""
    sent: list[Message] = []
    limits = Limits(prefetch_layers=1, max_transfer_bytes=1, max_granted_bytes=12 * BATCHES)
    pool: Any = None
    driver = Driver(pool, limits, Metrics(), lambda _, message: sent.append(message), lambda _: None)
    try:
        driver.handle(SessionOpened(1, (LayerShape(0, 1),) * 16))
        driver.handle(StepOpened(1, 1, 1e9, 1e9, (Part("request", 0, BATCHES),)))
        first, rest = sent
        assert isinstance(first, Grant)
        assert isinstance(rest, Grant)
        assert len(first.batches) == FIRST_BATCHES
        layer = [batch.batch for grant in (first, rest) for batch in grant.batches if batch.layer == 0]
        sent.clear()
        driver.handle(*(BatchDone(1, batch) for batch in layer), FrontierReached(1, 1, 2))
        (refill,) = sent
        assert isinstance(refill, Grant)
        assert len(refill.batches) > FIRST_BATCHES
    finally:
        driver.close()


async def test_the_pins_of_a_session_that_is_lost_end_behind_its_turn() -> None:
    """However many steps it has open; those of a step that ends by itself end with it."""
    pool = Mock(spec=["release", "drop_owner"])
    driver = Driver(pool, Limits(), Metrics(), lambda *_: None, lambda _: None)
    driver.let_go = Mock()
    try:
        driver.handle(SessionOpened(1, (LayerShape(0, 1),)))
        for step in range(100):
            driver.open((1, step), StepRecord(step_owner(1, step)))
            driver.handle(StepOpened(1, step, 1e9, 1e9, (Part("request", 0, 1),)))
        driver.handle(BatchDone(1, 1), StepClosed(1, 0, True))
        assert pool.release.called and not driver.let_go.called
        pool.release.reset_mock()
        driver.handle(SessionLost(1))
        assert not pool.release.called and not driver.open_steps
        assert {call.args[0] for call in driver.let_go.call_args_list} == {
            step_owner(1, step) for step in range(1, 100)
        }
    finally:
        driver.close()


async def test_what_a_lost_session_was_saving_is_given_back_in_turns() -> None:
    """One step saves much, others little; until its turn nobody has the room, nor may save the same."""
    pool = MemoryPool(Memory(1 << 20))
    driver = Driver(pool, Limits(), Metrics(), lambda *_: None, lambda _: None)
    driver.let_go = pool.let_go
    handoffs: Any = Mock()
    handoffs.lost.side_effect = lambda *_: driver.emit([Tick()])  # as where a hand-off's room is given up for it
    driver.handoffs = handoffs
    sizes = [4 * REVOKED_PER_TURN, *[8] * 100]
    steps = [[f"{step:04}{number:020}".encode() for number in range(size)] for step, size in enumerate(sizes)]
    try:
        for session in (1, 2):
            driver.handle(SessionOpened(session, (LayerShape(0, 1),)))
        for step, keys in enumerate([*steps, [b"another session's".ljust(24)]]):
            session = 1 if step < len(steps) else 2
            owner = step_owner(session, step)
            objects = [NewObject(key, HEADER_BYTES + 8, 1, 1) for key in keys]
            assert {place.outcome for place in pool.reserve(objects, owner)} == {ReserveStatus.RESERVED}
            driver.open((session, step), StepRecord(owner, save_parts=[0], save_keys=[keys]))
            driver.handle(StepOpened(session, step, 1e9, 1e9, saves=(Part("request", 0, 1),)))
        left = [pool.statistics().half_written]
        driver.handle(SessionLost(1))
        assert driver.open_steps == 1
        left.append(pool.statistics().half_written)
        again = pool.reserve([NewObject(steps[-1][0], HEADER_BYTES + 8, 1, 1)], "another step")
        assert [place.outcome for place in again] == [ReserveStatus.BUSY]
        while left[-1] != left[-2]:
            await asyncio.sleep(0)
            left.append(pool.statistics().half_written)
        assert left[-1] == 1, "the other session's"
        assert max(before - after for before, after in itertools.pairwise(left)) == REVOKED_PER_TURN
        told = [key for call in handoffs.lost.call_args_list for key in call.args[0]]
        assert sorted(told) == sorted(itertools.chain(*steps))
        assert not any(step_owner(1, step) in pool.owners() for step in range(len(steps)))
        pool.validate()
    finally:
        driver.close()
