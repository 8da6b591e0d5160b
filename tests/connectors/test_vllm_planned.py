"""A step's saves on their way to the workers: outlined when somebody reads them, alike in every process."""

from __future__ import annotations

import pickle

import pytest
from vllm_fakes import BLOCK, BlockState, output, pieces, request, spec_of, tracked

from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.plan import LazySaves, StepPlan
from layerflow.connectors.vllm.scheduler import saves

BLOCKS = [11, 12, 13, 14, 15]


def planned() -> LazySaves:
    """What a prompt of 150 tokens saves; its fifth block holds the last 22."""
    planner = saves.SavePlanner(spec_of(), [0], [BLOCK], Options())
    planner.open(tracked(request("r", 150), spec_of()))
    plan = StepPlan()
    planner.step(output({"r": 150}, state=BlockState({"r": (list(BLOCKS),)})), plan)
    return plan.saves


def test_nothing_is_outlined_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    outline = saves.describe_saves
    monkeypatch.setattr(saves, "describe_saves", lambda *given: (made.append(1), outline(*given))[1])
    held = planned()
    assert held and held.requests == ("r",) and held.read_any([BLOCKS]) and not made
    assert held.parts is held.parts and made == [1]


def test_another_process_gets_the_same() -> None:
    held = planned()
    there = pickle.loads(pickle.dumps(held))
    assert pieces(there.parts) == pieces(held.parts)
    assert there.requests == held.requests and there


@pytest.mark.parametrize("travelled", [False, True])
def test_it_knows_the_blocks_that_it_reads(travelled: bool) -> None:
    held = pickle.loads(pickle.dumps(planned())) if travelled else planned()
    assert held.read_any([[7, 13]])
    assert held.read_any([{15}, (1, 2)])  # type: ignore[list-item]
    assert not held.read_any([[7, 8], BLOCKS])
    assert not held.read_any([[]])


def test_no_saves_are_nothing() -> None:
    nothing = LazySaves()
    assert not nothing and not nothing.parts and not nothing.read_any([BLOCKS])
    assert not pickle.loads(pickle.dumps(nothing))
