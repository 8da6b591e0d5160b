"""Which chunks a step saves: final tokens only, each chunk once, tails at the prompt's end, states at boundaries."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm_fakes import (
    BLOCK,
    CHUNK,
    FULL,
    BlockState,
    OlderBlockState,
    allocation,
    decode,
    output,
    pieces,
    request,
    spec_of,
    tracked,
)

from layerflow.agent.values import Hit
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.plan import StepPlan
from layerflow.connectors.vllm.scheduler.requests import RequestState
from layerflow.connectors.vllm.scheduler.saves import SavePlanner
from layerflow.spec import GroupSpec, Plane

STATE = GroupSpec("state", CHUNK, (2,), (Plane("ssm", "uint8", (8,)),))
BLOCKS = [11, 12, 13, 14, 15, 16]
DAY_S = 86_400.0


class Following:
    """One request, followed from step to step by a planner of its own."""

    def __init__(self, tokens: int, options: Options | None = None, hit: Hit | None = None, **changed: Any) -> None:
        self.planner = SavePlanner(spec_of(), [0], [BLOCK], options or Options(), num_blocks=40)
        self.vllm = request("r", tokens, **changed)
        self.tracked: RequestState = tracked(self.vllm, spec_of())
        self.planner.open(self.tracked)
        if hit is not None:
            self.tracked.hit = hit
            self.planner.know(self.tracked)

    def step(self, scheduled: int) -> list[tuple[list[int], int]]:
        """Compute so many tokens; what is saved of them: (engine blocks, tokens) of each chunk."""
        plan = StepPlan()
        self.planner.step(output({"r": scheduled}, state=BlockState({"r": (BLOCKS,)})), plan)
        self.vllm.num_computed_tokens += scheduled
        return [piece for _, _, saved in pieces(plan.saves.parts) for piece in saved]


def test_chunks_of_a_prompt_that_is_computed_in_pieces() -> None:
    following = Following(150)
    assert following.step(100) == [([11, 12], 64)]
    assert following.step(20) == []
    assert following.step(30) == [([13, 14], 64), ([15], 22)]
    decode(following.vllm)
    assert following.step(1) == []


def test_tails_can_be_left_out() -> None:
    assert Following(150, Options(save_partial=False)).step(150) == [([11, 12], 64), ([13, 14], 64)]


def test_a_short_prompt_is_its_tail() -> None:
    assert Following(40).step(40) == [([11, 12], 40)]
    assert Following(40, Options(save_partial=False)).step(40) == []


def test_speculated_tokens_are_not_final() -> None:
    following = Following(60, Options(save_decode=True, save_partial=False))
    assert following.step(60) == []
    decode(following.vllm)
    assert following.step(4) == [], "four tokens are computed, one of them is known"
    following.vllm.num_computed_tokens = 61
    decode(following.vllm, 3)
    assert following.step(3) == [([11, 12], 64)]


def test_chunks_that_fill_up_while_decoding() -> None:
    following = Following(100, Options(save_decode=True))
    assert following.step(100) == [([11, 12], 64), ([13, 14], 36)]
    saved = []
    for _ in range(30):
        decode(following.vllm)
        saved += following.step(1)
    assert saved == [([13, 14], 64)]
    assert len(following.tracked.chain) == 128


@pytest.mark.parametrize(
    ("hit", "saved"),
    [
        (Hit(128), [([15], 22)]),
        (Hit(140, 2, 12, b""), [([15], 22)]),
        (Hit(149, 2, 22, b""), []),
        (Hit(64), [([13, 14], 64), ([15], 22)]),
    ],
    ids=["chunks", "a shorter tail", "all of it", "the first"],
)
def test_what_a_hit_has_is_not_saved_again(hit: Hit, saved: list[tuple[list[int], int]]) -> None:
    following = Following(150, hit=hit, num_computed_tokens=hit.tokens)
    assert following.step(150 - hit.tokens) == saved


def test_after_a_failed_load_everything_is_saved_again() -> None:
    following = Following(150, hit=Hit(128), num_computed_tokens=128)
    following.step(22)
    following.planner.again([following.tracked])
    following.vllm.num_computed_tokens = 0
    assert following.step(150) == [([11, 12], 64), ([13, 14], 64), ([15], 22)]


def test_who_may_not_save_is_not_followed() -> None:
    following = Following(150)
    following.planner.close(following.tracked)
    following.tracked.may_save = False
    following.planner.open(following.tracked)
    assert following.step(150) == []


def test_plans_that_save_are_numbered() -> None:
    following = Following(150)
    numbers = []
    for scheduled in (70, 10, 70):
        plan = StepPlan()
        following.planner.step(output({"r": scheduled}, state=BlockState({"r": (BLOCKS,)})), plan)
        following.vllm.num_computed_tokens += scheduled
        numbers.append(plan.number)
    assert numbers == [1, 0, 2]


def test_a_request_is_read_until_all_ranks_have_ended_the_saves_of_its_last_plan() -> None:
    following = Following(150)
    following.step(70)
    following.step(80)
    assert following.planner.reading("r")
    following.planner.drained("r", 1, ranks=2, of=2)
    assert following.planner.reading("r"), "a later plan saves for it"
    following.planner.drained("r", 2, ranks=1, of=2)
    assert following.planner.reading("r")
    following.planner.drained("r", 2, ranks=1, of=2)
    assert not following.planner.reading("r")


class TestTablesWithoutVllmsOwn:
    """vLLM 0.27 offers no block tables: they are followed from what each step brings."""

    def test_new_then_more(self) -> None:
        following = Following(150)
        plan = StepPlan()
        following.planner.step(output({"r": 70}, new=[("r", ([21, 22, 23],), 0)]), plan)
        assert pieces(plan.saves.parts) == [("r", 0, [([21, 22], 64)])]
        following.vllm.num_computed_tokens = 70
        plan = StepPlan()
        following.planner.step(output({"r": 80}, cached=[("r", ([24, 25],), 70, False)]), plan)
        assert pieces(plan.saves.parts) == [("r", 0, [([23, 24], 64), ([25], 22)])]

    def test_as_vllm_0_29_tells_them(self) -> None:
        """Those of requests that get blocks."""
        following = Following(150)
        state = OlderBlockState({"r": ([21, 22, 23, 24, 25],)})
        following.planner.step(output({"r": 70}, state=state), StepPlan())
        following.vllm.num_computed_tokens = 70
        plan = StepPlan()
        following.planner.step(output({"r": 80}, state=OlderBlockState({})), plan)
        assert pieces(plan.saves.parts) == [("r", 0, [([23, 24], 64), ([25], 22)])]

    def test_nothing_new_keeps_them(self) -> None:
        following = Following(150)
        following.planner.step(output({"r": 70}, new=[("r", ([21, 22, 23, 24, 25],), 0)]), StepPlan())
        following.vllm.num_computed_tokens = 70
        plan = StepPlan()
        following.planner.step(output({"r": 80}, cached=[("r", None, 70, False)]), plan)
        assert pieces(plan.saves.parts) == [("r", 0, [([23, 24], 64), ([25], 22)])]

    def test_resumed_after_preemption_starts_over(self) -> None:
        following = Following(150)
        following.planner.step(output({"r": 70}, new=[("r", ([21, 22, 23],), 0)]), StepPlan())
        plan = StepPlan()
        following.planner.step(output({"r": 150}, cached=[("r", ([31, 32, 33, 34, 35],), 0, True)]), plan)
        assert pieces(plan.saves.parts) == [("r", 0, [([33, 34], 64), ([35], 22)])]


class TestRecurrentState:
    """A state is saved where vLLM keeps it, with the blocks of all other groups up to there."""

    def plan(self, tokens: int, scheduled: int, offers: list[tuple[int, int, int]], options: Options | None = None):
        spec = spec_of(FULL, STATE)
        planner = SavePlanner(spec, [0, 1], [group.block_size for group in spec.groups], options or Options())
        self.tracked = tracked(request("r", tokens), spec)
        planner.open(self.tracked)
        plan = StepPlan()
        state = BlockState({"r": (BLOCKS, [0, 0, 41])}, {"r": offers})
        planner.step(output({"r": scheduled}, state=state), plan)
        return pieces(plan.saves.parts)

    def test_at_a_chunks_end(self) -> None:
        saved = self.plan(150, 130, [(1, 42, 128)])
        assert saved == [("r", 0, [([11, 12], 64), ([13, 14], 64)]), ("r", 1, [([42], 64)])]
        assert self.tracked.saved == 128

    def test_several_boundaries_of_one_step(self) -> None:
        saved = self.plan(150, 130, [(1, 43, 128), (1, 42, 64)])
        assert saved == [
            ("r", 0, [([11, 12], 64)]), ("r", 1, [([42], 64)]), ("r", 0, [([13, 14], 64)]), ("r", 1, [([43], 64)]),
        ]  # fmt: skip

    def test_beyond_what_is_computed(self) -> None:
        assert self.plan(150, 100, [(1, 42, 128)]) == []

    def test_between_blocks(self) -> None:
        assert self.plan(150, 130, [(1, 42, 100)]) == []

    def test_of_another_group_only(self) -> None:
        assert self.plan(150, 130, [(0, 42, 128)]) == []

    def test_without_offers(self) -> None:
        assert self.plan(150, 130, []) == []


class TestFreshBlocks:
    """Blocks that a step overwrites, which no save may still read."""

    def planner(self) -> SavePlanner:
        following = Following(150)
        following.step(150)
        return following.planner

    def test_none_where_nothing_was_saved(self) -> None:
        planner = SavePlanner(spec_of(), [0], [BLOCK], Options())
        assert planner.fresh(output({}, new=[("a", ([1, 2],), 0)]), []) == ()

    def test_until_every_rank_has_ended_its_saves_however_long_they_take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        planner = self.planner()
        new = output({}, new=[("a", ([1, 2],), 0)])
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + DAY_S)  # the longest `transfer.save_timeout_ms`
        for _ in range(2):
            assert [set(ids) for ids in planner.fresh(new, [])] == [{1, 2}]
        planner.drained("r", 1, ranks=1, of=2)
        assert [set(ids) for ids in planner.fresh(new, [])] == [{1, 2}]
        planner.drained("r", 1, ranks=1, of=2)
        assert planner.fresh(new, []) == ()

    def test_of_new_requests_behind_what_is_computed(self) -> None:
        fresh = self.planner().fresh(output({}, new=[("a", ([1, 2, 3],), 2 * BLOCK), ("b", ([4, 0],), 0)]), [])
        assert [set(ids) for ids in fresh] == [{3, 4}]

    def test_of_running_and_resumed_requests(self) -> None:
        cached = [("a", ([5],), 100, False), ("b", ([6, 7, 8],), BLOCK, True), ("c", None, 10, False)]
        assert [set(ids) for ids in self.planner().fresh(output({}, cached=cached), [])] == [{5, 7, 8}]

    def test_of_hits_about_to_be_loaded_by_whichever_connector(self) -> None:
        allocated = [allocation("l", ([1, 2, 3, 4],), 2 * BLOCK), allocation("m", ([5, 0],))]
        assert [set(ids) for ids in self.planner().fresh(output({}), allocated)] == [{3, 4, 5}]

    def test_of_hits_in_blocks_that_vllm_shows_to_the_connector_alone_that_loads(self) -> None:
        """As vLLM-Ascend's MultiConnector does."""
        state = BlockState({}, allocated={"l": ([1, 2, 3, 4],)})
        fresh = self.planner().fresh(output({}, state=state), [allocation("l", ([],), 2 * BLOCK)])
        assert [set(ids) for ids in fresh] == [{3, 4}]

    @pytest.mark.parametrize("state", [None, OlderBlockState({})])
    def test_every_block_where_vllm_cannot_tell_the_hidden_ones(self, state: OlderBlockState | None) -> None:
        """Before 0.30."""
        fresh = self.planner().fresh(output({}, state=state), [allocation("l", ([],), 2 * BLOCK)])
        assert fresh == (tuple(range(1, 40)),)

    def test_what_one_group_has_freed_is_another_ones_next_block(self) -> None:
        """VLLM lays its groups over one memory."""
        spec = spec_of(FULL, STATE)
        planner = SavePlanner(spec, [0, 1], [group.block_size for group in spec.groups], Options())
        vllm = request("r", 150)
        planner.open(tracked(vllm, spec))
        state = BlockState({"r": (BLOCKS, BLOCKS)}, {"r": [(1, 7, 128)]})
        planner.step(output({"r": 150}, state=state), StepPlan())
        fresh = planner.fresh(output({}, new=[("a", ([1, 2], [3, 0]), 0)]), [])
        assert [set(ids) for ids in fresh] == [{1, 2, 3}] * 2

    def test_of_a_group_that_is_not_moved(self) -> None:
        """A draft that is left out has a group of its own where its blocks have another length."""
        planner = SavePlanner(spec_of(), [0], [BLOCK, 2 * BLOCK], Options())
        planner.open(tracked(request("r", 150), spec_of()))
        planner.step(output({"r": 150}, new=[("r", (BLOCKS, [41, 42, 43]), 0)]), StepPlan())
        new = output({}, new=[("a", ([1, 2, 3], [4, 5]), 2 * BLOCK)])
        assert [set(ids) for ids in planner.fresh(new, [])] == [{3, 5}]
        grown = output({}, cached=[("a", ([], [7]), 100, False)])
        assert [set(ids) for ids in planner.fresh(grown, [])] == [{7}]

    def test_nothing_is_overwritten(self) -> None:
        assert self.planner().fresh(output({}, cached=[("a", None, 100, False)]), []) == ()
