"""Hits of models with several cache groups: which are loaded in the step, and what of them must not wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm_fakes import BLOCK, FULL, hooked, request, spec_of

from layerflow.agent.hit_plan import PinnedPlaces
from layerflow.agent.values import Hit
from layerflow.connectors.vllm.plan import StepPlan, WorkerLayout, WorkerReport
from layerflow.connectors.vllm.scheduler.loads import StepLoads, plan_load
from layerflow.connectors.vllm.scheduler.requests import RequestState
from layerflow.errors import SpecError
from layerflow.keys import Chain, root_digest
from layerflow.spec import GroupSpec, ModelSpec, Plane

WINDOW = 2 * BLOCK
SLIDING = GroupSpec("sliding", BLOCK, (2, 3), FULL.planes, WINDOW)
STATE = GroupSpec("state", 2 * BLOCK, (2, 3), (Plane("kv", "uint8", (64,)),))
RESIDENT = Hit(128, plan=PinnedPlaces(1, 1, np.zeros((2, 2, 1, 2), np.uint64), -1))


def layout(spec: ModelSpec) -> WorkerLayout:
    return WorkerLayout(msgspec.msgpack.encode(spec), tuple(range(len(spec.groups))), "ipc:///nowhere")


class TestWhere:
    @pytest.mark.parametrize(
        ("groups", "recovers", "hit", "allowed"),
        [
            (1, False, Hit(128), True),
            (2, True, RESIDENT, True),
            (2, True, Hit(128), False),
            (2, False, RESIDENT, False),
        ],
    )
    def test_in_the_step(self, groups: int, recovers: bool, hit: Hit, allowed: bool) -> None:
        loads = StepLoads([BLOCK] * groups, recovers=recovers)
        loads.meet_workers([layout(spec_of()), layout(spec_of())])
        loads.seen(hooked(spec_of()))
        assert loads.may(hit, 200) is allowed
        assert loads.needs_answer is (groups > 1 and recovers)

    @pytest.mark.parametrize(("groups", "hit"), [(1, Hit(128)), (2, RESIDENT)])
    def test_never_where_a_worker_may_fail_and_take_its_report_with_it(self, groups: int, hit: Hit) -> None:
        """vLLM's ``--enable-fault-tolerance``: what has failed to load would stay in vLLM's own prefix cache."""
        loads = StepLoads([BLOCK] * groups, recovers=True, keeps_reports=False)
        loads.meet_workers([layout(spec_of())])
        loads.seen(hooked(spec_of()))
        assert not loads.may(hit, 200)

    @pytest.mark.parametrize(
        ("tokens", "ahead", "free", "allowed"),
        [
            (150, 0, 9, True),
            (150, 0, 8, False),
            (161, 0, 9, False),
            (150, 3, 12, True),
            (150, 3, 11, False),
            (158, 3, 13, True),
            (158, 3, 12, False),
        ],
    )
    def test_with_recurrent_state_only_where_blocks_are_left(
        self, tokens: int, ahead: int, free: int, allowed: bool
    ) -> None:
        """vLLM counts a block less of each group of states than it takes."""
        loads = StepLoads([BLOCK] * 2, recovers=True)
        loads.meet_workers([layout(spec_of(FULL, STATE))])
        loads.seen(hooked(spec_of(FULL, STATE)))
        assert loads.may(RESIDENT, tokens), "vLLM has not told how many there are"
        loads.meet_blocks(lambda: free, ahead)
        assert loads.may(RESIDENT, tokens) is allowed

    def test_other_groups_are_counted_by_vllm(self) -> None:
        loads = StepLoads([BLOCK] * 2, recovers=True)
        loads.meet_workers([layout(spec_of(FULL, SLIDING))])
        loads.seen(hooked(spec_of(FULL, SLIDING)))
        loads.meet_blocks(lambda: 0, 0)
        assert loads.may(RESIDENT, 150)

    def test_groups_that_are_not_moved_take_blocks_too(self) -> None:
        """A left-out draft's, of blocks twice as long: two of them for 100 tokens, beside four of the model's."""
        loads = StepLoads([BLOCK, BLOCK, 2 * BLOCK], recovers=True)
        loads.meet_workers([layout(spec_of(FULL, STATE))])
        loads.seen(hooked(spec_of(FULL, STATE)))
        for free, background, in_the_step in ((6, False, False), (7, True, False), (9, True, False), (10, True, True)):
            loads.meet_blocks(lambda free=free: free, 0)
            assert loads.has_blocks(100) is background
            assert loads.may(RESIDENT, 100) is in_the_step


class TestWhoseLoadsHaveFailed:
    def planned(self) -> StepLoads:
        loads = StepLoads([BLOCK] * 2, recovers=True)
        loads.planned(7, "r", 32, ([1, 2], [3, 4]))
        return loads

    def told(self, *lost: str) -> Any:
        return SimpleNamespace(kv_connector_worker_meta=WorkerReport(lost=frozenset(lost)))

    def test_with_where_they_went(self) -> None:
        loads = self.planned()
        assert loads.failed(None) == loads.failed(self.told()) == {}
        (arrival,) = loads.failed(self.told("r"))["r"]
        assert (arrival.number, arrival.start, arrival.tables) == (7, 32, ([1, 2], [3, 4]))

    def test_of_one_that_has_ended_its_last_blocks(self) -> None:
        loads = self.planned()
        assert loads.finished("r", ([1, 2, 9], [3, 4, 10])) is True
        (arrival,) = loads.failed(self.told("r"))["r"]
        assert (arrival.tables, arrival.last) == (([1, 2], [3, 4]), ([1, 2, 9], [3, 4, 10]))
        assert loads.ended({6}) == []
        assert loads.ended({7}) == ["r"]
        assert loads.finished("r", ()) is False

    @pytest.mark.parametrize(
        ("last", "known"),
        [
            (([1, 2], [3, 4]), True),
            (([1, 2, 9], [0, 4, 10]), True),
            (([1, 2, 9], [0, 0, 0]), False),
            (([1, 2, 9], [3, 8, 10]), False),
            (([], []), False),
            ((), False),
        ],
        ids=["the same", "and more", "some left the window since", "others", "preempted", "not told"],
    )
    def test_all_blocks_of_one_that_has_ended(self, last: Any, known: bool) -> None:
        loads = self.planned()
        (arrival,) = loads.failed(self.told("r"))["r"]
        assert not arrival.has_all_blocks, "it runs"
        loads.finished("r", last)
        assert arrival.has_all_blocks is known

    def test_of_one_that_was_preempted_and_runs_again_some_are_not_known(self) -> None:
        loads = self.planned()
        loads.allocated("r")
        loads.finished("r", ([1, 2], [3, 4]))
        assert not loads.failed(self.told("r"))["r"][0].has_all_blocks

    def test_through_a_multi_connector(self) -> None:
        loads = self.planned()
        metadata = (None, WorkerReport(lost=frozenset({"r"})))
        output = SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(metadata=metadata))
        assert loads.failed(output).keys() == {"r"}


def chain_of(spec: ModelSpec, tokens: int = 150) -> Chain:
    return Chain(root_digest(spec.fingerprint), list(range(tokens)), spec.chunk_tokens, model=spec.fingerprint)


def planned(spec: ModelSpec, hit: Hit, tables: list[list[int]], tokens: int, start: int = 0) -> StepPlan:
    tracked = RequestState(request("r", 150), chain_of(spec), True, True, hit=hit)
    tracked.load = (start, hit.tokens)
    plan = StepPlan()
    loaded = plan_load(spec, tracked, [np.array(table, dtype=np.int64) for table in tables], tokens, plan=plan)
    assert loaded == hit.tokens - start
    return plan


def blocks(parts: Any) -> list[tuple[int, list[int], list[int]]]:
    return [(part.group, part.engine_blocks().tolist(), [piece.index for piece in part.pieces]) for part in parts]


class TestWhatCannotWait:
    def test_a_hit_that_ends_with_a_block_has_no_such_part(self) -> None:
        plan = planned(spec_of(FULL, SLIDING), Hit(128), [[1, 2, 3, 4, 5], [-1, -1, 13, 14, 15]], 22)
        assert blocks(plan.loads) == [(0, [1, 2, 3, 4], [0, 0]), (1, [13, 14], [0])]
        assert plan.tails == []

    def test_each_group_splits_at_its_own_block(self) -> None:
        spec = spec_of(FULL, SLIDING)
        chain = chain_of(spec)
        chunk = spec.chunk_tokens
        number, rest = divmod(140, chunk)
        hit = Hit(140, number, rest, chain.partial(number, rest))
        plan = planned(spec, hit, [[1, 2, 3, 4, 5], [-1, -1, 13, 14, 15]], 10)
        assert [(group, ids) for group, ids, _ in blocks(plan.loads)] == [(0, [1, 2, 3, 4]), (1, [13, 14])]
        assert [(group, ids) for group, ids, _ in blocks(plan.tails)] == [(0, [5]), (1, [15])]
        assert all(part.parent for part in plan.tails), "they end in the stored tail"
        assert not any(part.parent for part in plan.loads)

    @pytest.mark.parametrize(("tokens", "current"), [(1, 2), (22, 2), (64, 2), (65, 3)])
    def test_state_goes_where_the_hit_ends_and_where_the_step_goes_on(self, tokens: int, current: int) -> None:
        plan = planned(spec_of(FULL, STATE), Hit(128), [[1, 2, 3, 4, 5, 6, 7], [-1, 22, 23, 24]], tokens)
        assert [group for group, _, _ in blocks(plan.loads)] == [0]
        assert blocks(plan.tails) == [(1, [22], [0]), (1, [21 + current], [0])]
        assert plan.tails[0].pieces[0].digest == plan.tails[1].pieces[0].digest

    def test_without_a_block_to_go_on_in(self) -> None:
        with pytest.raises(SpecError, match="no block 2"):
            planned(spec_of(FULL, STATE), Hit(128), [[1, 2, 3, 4, 5], [-1, 22]], 22)
