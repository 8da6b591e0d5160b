"""A copy thread that fails, or a device that does not even say when a copy has ended, costs the steps that are open.

They fail at once, the agent attaches anew, and what comes then is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from device.simulated import Machine
from device.streaming import PATIENCE_S, TOKENS, Engine
from e2e.known import eventually

from layerflow import EmbeddedServer, Settings, StepRequest


@pytest.fixture
def machine() -> Machine:
    return Machine(seed=1)


@pytest.fixture
def engine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    device = machine.accelerator()
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: device)
    # A step that nobody ends would be waited for for longer than any test may take.
    patient = {"step_timeout_ms": 600_000, "save_timeout_ms": 600_000}
    with EmbeddedServer(Settings(pool={"size": "8MiB"}, transfer=patient)) as server:
        engine = Engine(machine, server)
        yield engine
        with machine.running():
            engine.agent.close()


class _Once:
    """Raises the first time that it is called in place of a function."""

    def __init__(self, instead_of: Callable[..., Any], error: BaseException) -> None:
        self._function, self._error = instead_of, error
        self.raised = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.raised:
            self.raised = True
            raise self._error
        return self._function(*args, **kwargs)


def _load(engine: Engine, machine: Machine, name: str) -> Any:
    with machine.stream(engine.stream), engine.agent.open_step([engine.request(name)]) as step:
        outcome = step.wait_layer(0)
        for layer in range(1, 4):
            step.wait_layer(layer)
    return outcome


def _attached_anew(engine: Engine) -> bool:
    return eventually(lambda: engine.agent.statistics().attachments == 2 and engine.agent.attached, PATIENCE_S)


def _loads_again(engine: Engine, machine: Machine) -> bool:
    return bool(eventually(lambda: engine.agent.lookup("again", engine.chain).tokens, PATIENCE_S)) and bool(
        _load(engine, machine, "again")
    )


def test_a_copier_whose_clean_up_fails_too(machine: Machine, engine: Engine) -> None:
    with machine.running():
        engine.save("one")
        copier: Any = engine.agent._dispatcher.access.copiers[0]  # type: ignore[union-attr]

        def refuses(*_: Any, **__: Any) -> Any:
            raise RuntimeError("the driver refused")

        copier.load = copier.drain = refuses
        outcome = _load(engine, machine, "two")
        assert {failed.request for failed in outcome.failed} == {"two"}
        assert _attached_anew(engine)


def test_the_load_lane_fails(machine: Machine, engine: Engine) -> None:
    with machine.running():
        engine.save("one")
        lane: Any = engine.agent._dispatcher.lanes.load
        lane._leaving = _Once(lane._leaving, RuntimeError("a bug"))
        _load(engine, machine, "two")
        assert lane._leaving.raised
        assert _attached_anew(engine)
        assert _loads_again(engine, machine)


def test_the_save_lane_fails(machine: Machine, engine: Engine) -> None:
    with machine.running():
        lane: Any = engine.agent._dispatcher.lanes.save
        lane._gate = _Once(lane._gate, SystemExit("a library ends the thread"))
        request = StepRequest("one", engine.chain, (range(8),), save=(0, len(TOKENS)))
        with machine.stream(engine.stream), engine.agent.open_step([request]) as step:
            for layer in range(4):
                step.wait_layer(layer)
                engine.compute(layer)
                step.layer_done(layer)
        assert engine.agent.wait_idle("one", PATIENCE_S), "its blocks are given back"
        assert [name for name, _ in engine.agent.poll().failed_saves] == ["one"]
        assert _attached_anew(engine)
        engine.save("two")
        assert _loads_again(engine, machine)


def test_the_poller_fails(machine: Machine, engine: Engine) -> None:
    with machine.running():
        engine.save("one")
        poller: Any = engine.agent._dispatcher.lanes.poller
        poller._fire_if_done = _Once(poller._fire_if_done, MemoryError("no memory for a list"))
        _load(engine, machine, "two")
        assert eventually(lambda: poller._fire_if_done.raised, PATIENCE_S)
        assert _attached_anew(engine)
        assert _loads_again(engine, machine)


def test_an_agent_that_gets_no_second_thread_leaves_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: machine.accelerator())
    no_thread = _Once(lambda *_: None, RuntimeError("can't start new thread"))
    monkeypatch.setattr("layerflow.agent.lanes.lanes.SaveLane", no_thread)
    before = set(threading.enumerate())
    with EmbeddedServer(Settings(pool={"size": "8MiB"})) as server:
        with pytest.raises(RuntimeError, match="new thread"):
            Engine(machine, server)
        mine = ("layerflow-load", "layerflow-poller")
        assert eventually(lambda: not [t for t in threading.enumerate() if t not in before and t.name in mine])
