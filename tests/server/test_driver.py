"""How many messages the core's commands become."""

from __future__ import annotations

from typing import Any

from layerflow.flow.events import BatchDone, FrontierReached, LayerShape, Limits, Part, SessionOpened, StepOpened
from layerflow.observe.metrics import Metrics
from layerflow.server.driver import FIRST_BATCHES, Driver
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
