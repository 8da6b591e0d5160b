"""An error in a hook of a worker ends no engine: the loads of its step have failed, and the next step is well."""

from __future__ import annotations

from typing import Any

import pytest
from device.simulated import Machine
from device.streaming import HERE, LAYERS, PATIENCE_S, SPEC, TOKENS
from e2e.known import eventually
from test_vllm_landing import BLOCKS, Worker, machine, worker

from layerflow import StepRequest
from layerflow.agent.descriptors import describe_loads, describe_saves
from layerflow.connectors.vllm.plan import LazySaves, StepPlan, UnkeptLoad

__all__ = ["machine", "worker"]


def _fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


def _told(worker: Worker) -> Any:
    """What vLLM hears of request ``two``: its blocks, or its name where there are several groups."""
    blocks, news = worker.report()
    return blocks or news.lost


def _expected(worker: Worker) -> Any:
    return frozenset({"two"}) if worker.side._failures._several_groups else BLOCKS


@pytest.mark.parametrize(
    ("part", "method"),
    [("_agent", "open_descriptors"), ("_order", "begin"), ("_hooks", "ask"), ("_hooks", "end"), ("_runner", "bound")],
)
def test_a_step_goes_on_and_its_loads_have_failed(
    machine: Machine, worker: Worker, monkeypatch: pytest.MonkeyPatch, part: str, method: str
) -> None:
    parts = describe_loads(SPEC, [worker.engine.request("two")])
    with machine.running():
        with monkeypatch.context() as patch:
            patch.setattr(getattr(worker.side, part), method, _fails)
            worker.run(StepPlan(number=1, loads=parts, depends_on_load=True))
        assert _told(worker) == _expected(worker)
        assert eventually(lambda: len(worker.engine.seen) == LAYERS, PATIENCE_S)
        worker.engine.seen.clear()
        worker.run(
            StepPlan(number=2, loads=describe_loads(SPEC, [worker.engine.request("three")]), depends_on_load=True)
        )
        worker.engine.assert_saw_all()
        assert eventually(lambda: 2 in worker.report()[1].ran, PATIENCE_S)


def test_background_loads_that_were_not_opened_have_failed_and_blocks_are_given_back(
    machine: Machine, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = describe_loads(SPEC, [worker.engine.request("two")])
    with machine.running():
        with monkeypatch.context() as patch:
            patch.setattr(worker.side._agent, "open_descriptors", _fails)
            worker.run(StepPlan(background={"two": parts}, leaving=("over",), restarts=True))
        assert worker.side.transfers(forward=True) == ({"over"}, {"two"}, {"two"})
        assert worker.side.transfers(forward=True) == (set(), set(), set()), "once"


def test_one_background_load_that_cannot_be_asked_does_not_keep_the_others(
    machine: Machine, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = {name: describe_loads(SPEC, [worker.engine.request(name)]) for name in ("two", "three")}
    with machine.running():
        worker.run(StepPlan(background=background, restarts=True))
        monkeypatch.setattr(
            worker.side, "_outdated_or", lambda request, _, outcome: _fails() if request == "two" else outcome
        )
        arrived: set[str] = set()
        failed: set[str] = set()

        def ended() -> bool:
            _, more, lost = worker.side.transfers(forward=True)
            arrived.update(more)
            failed.update(lost)
            return arrived == {"two", "three"}

        assert eventually(ended, PATIENCE_S)
        assert failed == {"two"}


@pytest.mark.parametrize(("part", "method"), [("_agent", "reclaim"), ("_order", "begin")])
def test_what_a_broken_hook_has_reported_as_failed_is_not_opened_behind_it(
    machine: Machine, worker: Worker, monkeypatch: pytest.MonkeyPatch, part: str, method: str
) -> None:
    """vLLM may give the blocks of a load that has failed to another request at once."""
    plan = StepPlan(
        number=1,
        loads=describe_loads(SPEC, [worker.engine.request("two")]),
        background={"three": describe_loads(SPEC, [worker.engine.request("three")])},
        fresh=(tuple(HERE.tolist()),),
        leaving=("over",),
        restarts=True,
    )
    opened: list[object] = []
    open_ = worker.side._agent.open_descriptors
    monkeypatch.setattr(
        worker.side._agent, "open_descriptors", lambda *given, **named: opened.append(given) or open_(*given, **named)
    )
    with machine.running():
        with monkeypatch.context() as patch:
            patch.setattr(getattr(worker.side, part), method, _fails)
            worker.run(plan)
        assert not opened
        assert _told(worker) == _expected(worker)
        assert worker.side.transfers(forward=True) == ({"over"}, {"three"}, {"three"})
        worker.run(StepPlan())
        assert worker.side.transfers(forward=True) == (set(), set(), set()), "once"
        assert worker.report()[0] == set()


def test_loads_that_have_ended_are_told_behind_a_broken_report(
    machine: Machine, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine.running():
        plan = StepPlan(unkept={"two": UnkeptLoad(True, tuple(BLOCKS))}, leaving=("over",), restarts=True)
        worker.run(plan)
        with monkeypatch.context() as patch:
            patch.setattr(worker.side._agent, "saving", _fails)
            assert worker.side.transfers(forward=True) == (set(), set(), set())
        assert worker.side.transfers(forward=True) == ({"over"}, {"two"}, {"two"})


def test_a_load_that_could_not_be_planned_is_told(machine: Machine, worker: Worker) -> None:
    with machine.running():
        worker.run(StepPlan(unkept={"two": UnkeptLoad(False, tuple(BLOCKS))}))
        assert _told(worker) == _expected(worker)
        worker.run(StepPlan(unkept={"two": UnkeptLoad(True, tuple(BLOCKS))}, restarts=True))
        assert worker.side.transfers(forward=True) == (set(), {"two"}, {"two"})


def test_an_abort_that_crosses_the_end_of_a_load_is_not_kept(machine: Machine, worker: Worker) -> None:
    """vLLM may give the name to another request, whose load would be cut off."""
    with machine.running():
        for _ in range(2):
            parts = describe_loads(SPEC, [worker.engine.request("two")])
            worker.run(StepPlan(background={"two": parts}))
            assert eventually(lambda: worker.side.transfers(forward=True)[1] == {"two"}, PATIENCE_S)
            worker.run(StepPlan(aborted=("two",)))
            assert worker.report()[0] == set()
        worker.run(StepPlan(background={"two": describe_loads(SPEC, [worker.engine.request("two")])}))
        assert not worker.side._cancelled


def test_once_the_cache_is_let_go_nothing_reads_it(machine: Machine, worker: Worker) -> None:
    asked = StepRequest("save", worker.engine.agent.chain(TOKENS[::-1]), (HERE,), save=(0, len(TOKENS)))
    parts = describe_saves(SPEC, [asked], True)
    worker.run(StepPlan(number=1, saves=LazySaves(["save"], [[HERE.tolist()]], lambda: parts)))
    with machine.running():
        worker.side.let_go()
    before = len(machine.calls)
    with machine.running():
        assert worker.engine.agent.wait_idle("save", PATIENCE_S)
    assert len(machine.calls) == before


def test_while_the_cache_is_let_go_no_step_touches_it_and_later_ones_do(machine: Machine, worker: Worker) -> None:
    asked = StepRequest("save", worker.engine.agent.chain(TOKENS[::-1]), (HERE,), save=(0, len(TOKENS)))
    parts = describe_saves(SPEC, [asked], True)
    loads = describe_loads(SPEC, [worker.engine.request("two")])
    with machine.running():
        for _ in range(2):
            worker.side.let_go()
        before = len(machine.calls)
        saves = LazySaves(["save"], [[HERE.tolist()]], lambda: parts)
        worker.run(StepPlan(number=1, loads=loads, saves=saves, depends_on_load=True))
        assert _told(worker) == _expected(worker)
        assert not worker.engine.agent.busy("save")
        assert len(machine.calls) == before
        assert eventually(lambda: len(worker.engine.seen) == LAYERS, PATIENCE_S)
        for _ in range(2):
            worker.side.take_up()
        worker.engine.seen.clear()
        worker.run(
            StepPlan(number=2, loads=describe_loads(SPEC, [worker.engine.request("three")]), depends_on_load=True)
        )
        worker.engine.assert_saw_all()


def test_saves_that_the_step_did_not_begin_keep_nobody_waiting(machine: Machine, worker: Worker) -> None:
    """The scheduler counts saves under way by what the workers tell."""
    asked = StepRequest("save", worker.engine.agent.chain(TOKENS[::-1]), (HERE,), save=(0, len(TOKENS)))
    parts = describe_saves(SPEC, [asked], True)
    with machine.running():
        worker.side.let_go()
        worker.run(StepPlan(number=1, saves=LazySaves(["save"], [[HERE.tolist()]], lambda: parts)))
        assert worker.report()[1].drained == {("save", 1): 1}
