"""How many messages the core's commands become."""

from __future__ import annotations

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
)
from layerflow.observe.metrics import Metrics
from layerflow.server.driver import FIRST_BATCHES, Driver
from layerflow.server.planner import StepRecord, step_owner
from layerflow.wire.messages import Grant, Message

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
