"""A step's saves are published only if no load before it, on any rank, had failed when it was planned."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from layerflow.connectors.vllm.plan import LOST_AFTER, RanPlans, SaveApprovals

DEPTH = 3  # steps that are planned before the output of the first has come


@dataclass
class Step:
    """One plan, as vLLM and its workers live through it.

    :param tainted: its forward pass reads what a failed load has left, or what was computed from that.
    """

    number: int
    loads: bool
    saves: bool
    fails: bool
    unsure: bool
    tainted: bool


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(1, DEPTH)), max_size=40))
def test_garbage_is_never_published_and_nothing_waits_for_ever(
    steps: list[tuple[bool, bool, bool, int]],
) -> None:
    """vLLM keeps up to `depth` steps in flight; a failure taints all that were planned before it was heard."""
    verdicts = SaveApprovals()
    flying: list[Step] = []
    held: dict[int, Step] = {}

    def hear() -> None:
        step = flying.pop(0)
        verdicts.record_output({step.number} if step.unsure else set(), failed=step.fails)
        if step.fails:  # the scheduler takes back what was computed: what it plans from now on is clean
            for later in flying:
                later.tainted = True

    def judge() -> None:
        for number, sound in verdicts.take():
            step = held.pop(number)
            assert not (sound and step.tainted), "garbage was published"

    for number, (loads, saves, fails, depth) in enumerate(steps, 1):
        while len(flying) >= depth:
            hear()
        judge()
        unsure = verdicts.concerns(loads=loads, saves=saves)
        step = Step(number, loads, saves, loads and fails, unsure, loads and fails)
        if unsure:
            verdicts.planned(number, loads=loads, saves=saves)
            if saves:
                held[number] = step
        flying.append(step)
        # What is published at once must stay clean: nothing that is still in flight before it may fail.
        assert unsure or not saves or not any(other.loads for other in flying[:-1])
    while flying:
        hear()
    judge()
    assert not held
    assert not verdicts.concerns(loads=False, saves=True)


def test_a_step_behind_a_failed_one_is_given_up_and_the_one_after_the_news_is_not() -> None:
    verdicts = SaveApprovals()
    verdicts.planned(1, loads=True, saves=True)
    assert verdicts.concerns(loads=False, saves=True)
    verdicts.planned(2, loads=False, saves=True)
    verdicts.record_output({1}, failed=True)
    assert verdicts.take() == ((1, False), (2, False))
    assert not verdicts.concerns(loads=False, saves=True), "it is planned after vLLM took the tokens back"
    verdicts.record_output({2}, failed=False)
    assert verdicts.take() == ()


def test_a_step_is_sound_once_every_load_before_it_has_ended() -> None:
    verdicts = SaveApprovals()
    verdicts.planned(1, loads=True, saves=True)
    verdicts.planned(2, loads=True, saves=True)
    verdicts.planned(3, loads=False, saves=True)
    verdicts.record_output({1}, failed=False)
    assert verdicts.take() == ((1, True),)
    verdicts.record_output({2}, failed=False)
    assert verdicts.take() == ((2, True), (3, True))


def test_an_output_that_never_comes_is_a_failure_and_not_the_end_of_all_saves() -> None:
    verdicts = SaveApprovals()
    verdicts.planned(1, loads=True, saves=True)
    taken: dict[int, bool] = {}
    for number in range(2, 2 * LOST_AFTER):
        if verdicts.concerns(loads=number % 2 == 0, saves=True):
            verdicts.planned(number, loads=number % 2 == 0, saves=True)
        verdicts.record_output([number], failed=False)
        taken.update(verdicts.take())
    assert taken[1] is False
    assert taken[2 * LOST_AFTER - 2] is True


def test_a_plan_has_run_once_every_rank_has_told() -> None:
    """A load may still fail on the rank that has not: its copies end later, or its step ends behind its report."""
    ran = RanPlans()
    assert ran.record({1: 1}, of=2) == set()
    assert ran.record({2: 2, 1: 1}, of=2) == {1, 2}
    assert ran.record({}, of=2) == set()


def test_a_rank_whose_report_is_lost_ends_the_waiting_for_its_plan() -> None:
    """vLLM goes on without what a worker that failed in its step has reported (``--enable-fault-tolerance``)."""
    ran, verdicts = RanPlans(), SaveApprovals()
    taken: dict[int, bool] = {}
    for number in range(1, 2 * LOST_AFTER):
        verdicts.planned(number, loads=number == 1, saves=True)
        verdicts.record_output(ran.record({number: 1 if number == 1 else 2}, of=2), failed=False)
        taken.update(verdicts.take())
    assert taken[1] is False
    assert taken[2 * LOST_AFTER - 1] is True
    assert not ran._ranks
