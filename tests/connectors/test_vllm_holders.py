"""vLLM before 0.31: a request that does not fit lets those run first that hold blocks, where nothing else runs."""

from __future__ import annotations

from types import SimpleNamespace

from test_vllm_scheduler import FakeControl, House, fakes
from vllm_fakes import BLOCK, output

from layerflow.agent.values import Hit
from layerflow.connectors.vllm.scheduler import scheduler
from layerflow.connectors.vllm.scheduler.requests import BlockHolders
from layerflow.flow.cost import Mode

__all__ = ["fakes"]

HIT, PROMPT = 128, 150
IDLE = output({})


def house(free: int) -> House:
    made = House(mode="bulk")
    made.side._holders = BlockHolders()
    made.advisor.mode = Mode.BULK
    made.side.step_loads.meet_blocks(lambda: free, 0)
    return made


def load(made: House, name: str) -> SimpleNamespace:
    asked = made.arrive(name, PROMPT, Hit(HIT))
    assert made.side.matched(asked, 0) == (HIT, True)
    made.admit(asked, HIT)
    made.side.plan(IDLE)
    return asked


def test_a_request_that_does_not_fit_is_asked_about_again() -> None:
    made = house(free=PROMPT // BLOCK)
    parked = made.arrive("parked", PROMPT, Hit(0))
    loaded = load(made, "loaded")
    assert made.side.matched(parked, 0) == (0, False), "while its load is under way that one cannot run either"
    made.hear(None, arrived={"loaded"})
    made.side.plan(IDLE)
    assert made.side.matched(parked, 0) == (None, False)
    made.plan("loaded")
    assert made.side.matched(parked, 0) == (0, False), "it runs, and gives its blocks back"
    made.side.finished(loaded)
    made.side.plan(IDLE)
    assert made.side.matched(parked, 0) == (0, False)


def test_where_there_is_room_nobody_waits() -> None:
    made = house(free=100)
    load(made, "loaded")
    made.hear(None, arrived={"loaded"})
    made.side.plan(IDLE)
    assert made.side.matched(made.arrive("parked", PROMPT, Hit(0)), 0) == (0, False)


def test_a_holder_that_is_aborted_is_waited_for_no_longer() -> None:
    made = house(free=0)
    loaded = load(made, "loaded")
    made.hear(None, arrived={"loaded"})
    made.side.finished(loaded)
    made.side.plan(IDLE)
    assert made.side.matched(made.arrive("parked", PROMPT, Hit(0)), 0) == (0, False)


def test_a_reset_waits_until_no_worker_touches_its_memory(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    made = House()
    monkeypatch.setattr(scheduler, "QUIET_LOOK_S", 0.0)
    made.admit(made.arrive("r", PROMPT), 0)
    made.plan("r", PROMPT, 0)
    control: FakeControl = made.control
    control.open_steps = [2, 1, 0, 1, 0, 0]
    assert made.side.reset()
    assert control.resets == 6, "until two answers in a row say that none is open"
    control.open_steps = [1] * 1_000_000
    monkeypatch.setattr(scheduler, "QUIET_S", 0.01)
    assert not made.side.reset()
