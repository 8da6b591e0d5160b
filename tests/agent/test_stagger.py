"""Each layer begins in its rank's slot of a turn of its own, on a clock that all ranks of a machine share."""

from __future__ import annotations

import math

import pytest
from e2e.known import KnownWorker, small_spec, step_of
from hypothesis import given
from hypothesis import strategies as st
from server.support import Embed

from layerflow.agent.lanes.stagger import Stagger
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


def test_layers_granted_at_once_begin_in_turns_of_their_own(embed: Embed) -> None:
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
            slot_s = spacing_us * 1e-6
            turns = [math.floor((s.start - (rank + s.layer) % 2 * slot_s) / (2 * slot_s)) for s in spans]
            assert turns == sorted(set(turns)), "two layers in one turn, or one before its slot"
    finally:
        for worker in workers:
            worker.agent.close()
