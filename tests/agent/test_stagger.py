"""Each layer begins in its rank's slot of a turn of its own, on a clock that all ranks of a machine share."""

from __future__ import annotations

import contextlib
import math
import time

import pytest
from device.simulated import Machine
from e2e.known import KnownWorker, small_spec, step_of
from hypothesis import given
from hypothesis import strategies as st
from server.support import Embed

from layerflow.device.accelerator import BatchCopied, Int64
from layerflow.flow.window import Stagger
from layerflow.spec import Shard

LAYERS = 6
PATIENCE_S = 20.0


@given(
    st.integers(2, 8),
    st.integers(1, 1_000_000),
    st.floats(0, 1e7),
    st.lists(st.tuples(st.integers(0, 100), st.floats(0, 3)), min_size=1, max_size=20),
)
def test_every_layer_has_its_ranks_slot_of_a_later_turn(
    tp_size: int, stagger_us: int, now: float, layers: list[tuple[int, float]]
) -> None:
    slot_s = stagger_us * 1e-6
    ranks = [Stagger(rank, tp_size, stagger_us) for rank in range(tp_size)]
    last = [-1] * tp_size
    for layer, took in layers:
        begins = [stagger.begin(layer, now, math.inf) for stagger in ranks]
        assert min(begins) >= now, "before it could"
        slots = [round(begin / slot_s) for begin in begins]
        assert [slot % tp_size for slot in slots] == [(rank + layer) % tp_size for rank in range(tp_size)]
        assert all(abs(slot * slot_s - begin) < 1e-2 * slot_s for slot, begin in zip(slots, begins, strict=True))
        turns = [slot // tp_size for slot in slots]
        assert all(turn > before for turn, before in zip(turns, last, strict=True)), "two layers in one turn"
        last, now = turns, max(begins) + took


def test_layers_that_could_begin_at_once_take_one_turn_each() -> None:
    stagger = Stagger(1, 4, 1000)
    begins = [stagger.begin(layer, 10.0, 1.0) for layer in range(5)]
    assert begins == pytest.approx([10.001, 10.006, 10.011, 10.012, 10.017])


def test_a_slot_that_is_too_far_off_is_not_waited_for_and_takes_no_turn() -> None:
    stagger = Stagger(1, 4, 1000)
    assert stagger.begin(0, 10.0, 0.5e-3) == 10.0
    assert stagger.begin(0, 10.0, 2e-3) == pytest.approx(10.001)


@pytest.mark.parametrize(("size", "stagger_us", "on"), [(1, 100, False), (4, 0, False), (2, 1, True)])
def test_it_is_off_for_one_rank_or_without_a_distance(size: int, stagger_us: int, on: bool) -> None:
    assert Stagger(0, size, stagger_us).on is on


Slots = dict[int, list[float]]


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    """By rank: when each layer was told to begin, in the order of its loads."""
    told: Slots = {}
    begin = Stagger.begin

    def noted(self: Stagger, layer: int, now: float, patience_s: float) -> float:
        told.setdefault(self._rank, []).append(begin(self, layer, now, patience_s))
        return told[self._rank][-1]

    monkeypatch.setattr(Stagger, "begin", noted)
    return told


def assert_in_slots(rank: int, ranks: int, slot_s: float, told: list[float], began: list[float]) -> None:
    """Each layer has its rank's slot of a later turn, and did not begin before it; how late is the machine's."""
    numbers = [round(when / slot_s) for when in told]
    assert [number % ranks for number in numbers] == [(rank + layer) % ranks for layer in range(LAYERS)]
    turns = [(number - (rank + layer) % ranks) // ranks for layer, number in enumerate(numbers)]
    assert turns == sorted(set(turns)), "two layers in one turn"
    assert all(at >= when for at, when in zip(began, told, strict=True)), "before its slot"


def test_layers_granted_at_once_begin_in_turns_of_their_own(embed: Embed, slots: Slots) -> None:
    spacing_us = 2000
    server = embed(transfer__h2d_stagger_us=spacing_us)
    specs = [small_spec(LAYERS, shard=Shard(rank, 2)) for rank in range(2)]
    workers = [KnownWorker(server.endpoint, spec, context=server.context) for spec in specs]
    try:
        chain = workers[0].prompt(60)
        for worker in workers:
            run = worker.admit(chain, look=False)
            with step_of(worker.agent.open_step([run.request()])) as step:
                worker.forward(step, [run])
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
        for rank, worker in enumerate(workers):
            run = worker.admit(chain)
            with step_of(worker.agent.open_step([run.request(save=False)])) as step:
                assert step.wait_all()
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
            spans = [span for span in worker.agent.traces[-1].spans if span.lane == "load"]
            assert [span.layer for span in spans] == list(range(LAYERS))
            assert_in_slots(rank, 2, spacing_us * 1e-6, slots[rank], [span.start for span in spans])
    finally:
        for worker in workers:
            worker.agent.close()


class Rank(Machine):
    """The device of one rank, which notes when it is given a load's copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.submitted_at: list[float] = []

    def copy_batch(self, dst: Int64, src: Int64, nbytes: Int64, stream: int, to_device: bool) -> BatchCopied:
        if to_device:
            self.submitted_at.append(time.monotonic())
        return super().copy_batch(dst, src, nbytes, stream, to_device)


def test_ranks_of_a_devices_link_submit_real_copies_in_their_slots(
    embed: Embed, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, each by a lane of its own, and none before its slot."""
    spacing_us, ranks = 4000, 3
    server = embed(transfer__h2d_stagger_us=spacing_us, transfer__step_timeout_ms=60_000)
    machines = [Rank(seed) for seed in range(ranks)]
    devices = iter([machine.accelerator() for machine in machines])
    monkeypatch.setattr("layerflow.agent.agent.device_for", lambda _: next(devices))
    specs = [small_spec(LAYERS, shard=Shard(rank, ranks)) for rank in range(ranks)]
    workers = [KnownWorker(server.endpoint, spec, context=server.context) for spec in specs]
    with contextlib.ExitStack() as stack:
        for machine, worker in zip(machines, workers, strict=True):
            stack.callback(worker.agent.close)
            stack.enter_context(machine.running())
        chain = workers[0].prompt(60)
        for worker in workers:
            assert worker.agent.wait_warm(PATIENCE_S)
            run = worker.admit(chain, look=False)
            with step_of(worker.agent.open_step([run.request()])) as step:
                worker.forward(step, [run])
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
        runs = [worker.admit(chain) for worker in workers]
        opened = [
            step_of(worker.agent.open_step([run.request(save=False)]))
            for worker, run in zip(workers, runs, strict=True)
        ]
        for rank, (worker, run, step) in enumerate(zip(workers, runs, opened, strict=True)):
            with step:
                assert step.wait_all()
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
            when = machines[rank].submitted_at
            assert len(when) == LAYERS, "a layer is one call"
            assert_in_slots(rank, ranks, spacing_us * 1e-6, slots[rank], when)
            for layer in range(LAYERS):
                assert not worker.wrong_bytes(run, layer, 0, run.hit.tokens)
