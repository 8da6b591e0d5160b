"""How hits are used: in the step, in the background or not at all; and that every lease is given back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from structlog.testing import capture_logs
from vllm_fakes import BLOCK, FULL, FakeLookups, hooked, output, pieces, request, spec_of

from layerflow.agent.values import MISS, Hit
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.pd.side import HandoffSide
from layerflow.connectors.vllm.plan import NOT_NAMED, WorkerLayout, WorkerReport
from layerflow.connectors.vllm.scheduler import scheduler, search
from layerflow.connectors.vllm.scheduler.scheduler import SchedulerSide
from layerflow.content import renewed_content
from layerflow.errors import SessionError
from layerflow.flow.cost import LinkCost, Mode
from layerflow.keys import root_digest
from layerflow.spec import GroupSpec, Shard

BLOCKS = [11, 12, 13, 14, 15]


class FakeControl:
    """Tells the server of resets, or cannot."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.resets = 0
        self.open_steps: list[int] = []
        self.released: list[tuple[str, tuple[str, ...]]] = []
        self.away = self.closed = False

    def reset(self, timeout_s: float) -> dict[str, int]:
        if self.away:
            raise SessionError("nobody is there")
        self.resets += 1
        return {"steps": self.open_steps.pop(0) if self.open_steps else 0, "leases": 0}

    def release_handoff(self, handoff: str, servers: Sequence[str] = ()) -> None:
        self.released.append((handoff, tuple(servers)))

    def close(self) -> None:
        self.closed = True


class FakeAdvisor:
    """Says what it was told to."""

    def __init__(self, *_: Any) -> None:
        self.mode = Mode.LAYERWISE
        self.adopted: tuple[Any, ...] = ()

    def compute_seconds(self, tokens: int) -> float | None:
        return None

    def advise(self, *_: Any) -> Mode:
        return self.mode

    def adopt(self, *costs: Any) -> None:
        self.adopted = costs


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fake in (("Lookups", FakeLookups), ("Control", FakeControl), ("LoadPolicy", FakeAdvisor)):
        monkeypatch.setattr(scheduler, name, fake)
    monkeypatch.setattr(FakeLookups, "wait_connected", lambda *_: True, raising=False)
    # A busy machine may let seconds pass between two calls.
    monkeypatch.setattr(search, "STALE_S", 600.0)


class House:
    """A scheduler's side whose workers have registered; `groups` are layerflow's and vLLM's."""

    def __init__(
        self,
        *groups: GroupSpec,
        ranks: int = 1,
        fails: bool = True,
        content: str = "weights",
        handoffs: HandoffSide | None = None,
        drafts: tuple[str, ...] = (),
        siblings: tuple[str, ...] | None = None,
        **options: Any,
    ) -> None:
        spec = msgspec.structs.replace(spec_of(*groups, content=content), shard=Shard(drafts=drafts))
        count = len(spec.groups)
        sizes = [group.block_size for group in spec.groups]
        self.side = SchedulerSide(
            Options(**options), "engine", sizes, can_fail_in_background=fails, handoffs=handoffs, num_blocks=100
        )
        layout = WorkerLayout(msgspec.msgpack.encode(spec), tuple(range(count)), "ipc:///nowhere", siblings)
        self.side.meet_workers([layout] * ranks)
        self.side.step_loads.seen(hooked(spec, ranks))
        self.tables = tuple([*BLOCKS] for _ in spec.groups)
        self.requests: dict[str, SimpleNamespace] = {}

    @property
    def lookups(self) -> FakeLookups:
        return self.side._lookups  # type: ignore[return-value]

    @property
    def control(self) -> FakeControl:
        return self.side._control  # type: ignore[return-value]

    @property
    def advisor(self) -> FakeAdvisor:
        return self.side._advisor  # type: ignore[return-value]

    def arrive(self, name: str = "r", tokens: int = 150, hit: Hit | None = None, **changed: Any) -> SimpleNamespace:
        """A request comes in; its lookup is answered with `hit`, None = not yet."""
        made = self.requests[name] = request(name, tokens, **changed)
        if hit is not None:
            self.lookups.answers[name] = hit
        self.side.arrived(made)
        return made

    def admit(self, made: SimpleNamespace, external: int) -> None:
        """vLLM gives the request its blocks."""
        self.side.allocated(made, SimpleNamespace(get_block_ids=lambda: self.tables), external)

    def plan(self, name: str = "r", scheduled: int = 22, computed: int = 128) -> Any:
        """A step that computes the rest."""
        self.requests[name].num_computed_tokens = computed
        return self.side.plan(output({name: scheduled}, new=[(name, self.tables, computed)]))

    def hear(
        self, news: WorkerReport | None, invalid: frozenset[int] = frozenset(), arrived: set[str] | None = None
    ) -> None:
        """What the workers say."""
        self.side.update_from_output(
            SimpleNamespace(
                invalid_block_ids=invalid,
                kv_connector_worker_meta=news,
                finished_recving=arrived,
                finished_sending=None,
            )
        )


class TestArrival:
    def test_a_prompt_is_looked_up_at_once(self) -> None:
        house = House()
        house.arrive()
        assert [inquiry.request for inquiry in house.lookups.asked] == ["r"]

    @pytest.mark.parametrize(
        "changed",
        [
            {"prompt_embeds": object()},
            {"kv_transfer_params": {"layerflow": {"load": False}}},
            {"skip_reading_prefix_cache": True},
        ],
        ids=["embeddings", "opted out", "scored"],
    )
    def test_not_what_may_not_be_loaded(self, changed: dict[str, Any]) -> None:
        house = House()
        made = house.arrive(**changed)
        assert house.lookups.asked == []
        assert house.side.matched(made, 0) == (0, False)
        assert house.lookups.asked == []

    def test_not_what_a_producer_serves(self) -> None:
        house = House(load=False)
        house.arrive()
        assert house.lookups.asked == []

    def test_not_where_a_failed_load_could_not_be_told(self) -> None:
        house = House(FULL, msgspec.structs.replace(FULL, layers=(2, 3)), fails=False)
        house.arrive()
        assert house.lookups.asked == []

    def test_an_adapter_that_cannot_be_read_is_not_cached(self) -> None:
        house = House()
        lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/nowhere", load_inplace=False)
        made = house.arrive(lora_request=lora)
        assert house.side.matched(made, 0) == (0, False)
        assert house.side.finished(made) == (False, None)


class TestDraftLayers:
    @pytest.mark.parametrize(("drafts", "saved"), [(True, {0, 1}), (False, {0})], ids=["loaded", "not there"])
    def test_are_saved_where_those_of_all_tokens_before_are_there(self, drafts: bool, saved: set[int]) -> None:
        house = House(FULL, msgspec.structs.replace(FULL, layers=(2, 3)), drafts=("", "eagle"))
        made = house.arrive(hit=Hit(128, drafts=drafts))
        assert house.side.matched(made, 0) == (128, True)
        house.admit(made, 128)
        assert set(house.side.plan(output({})).background) == {"r"}
        house.hear(None, arrived={"r"})
        assert {part.group for part in house.plan().saves.parts} == saved

    def test_are_saved_where_nothing_was_loaded(self) -> None:
        house = House(FULL, msgspec.structs.replace(FULL, layers=(2, 3)), drafts=("", "eagle"))
        made = house.arrive(hit=MISS)
        assert house.side.matched(made, 0) == (0, False)
        house.admit(made, 0)
        assert {part.group for part in house.plan(scheduled=150, computed=0).saves.parts} == {0, 1}


class TestMatch:
    def test_a_hit_in_the_step(self) -> None:
        house = House()
        assert house.side.matched(house.arrive(hit=Hit(128)), 0) == (128, False)

    def test_only_what_vllm_lacks(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(128))
        assert house.side.matched(made, BLOCK) == (96, False)
        assert house.side.matched(made, 128) == (0, False)
        assert house.side.matched(made, 140) == (0, False)

    def test_bulk_is_in_the_background(self) -> None:
        house = House()
        house.advisor.mode = Mode.BULK
        assert house.side.matched(house.arrive(hit=Hit(128)), 0) == (128, True)

    def test_several_groups_are_in_the_background(self) -> None:
        house = House(FULL, msgspec.structs.replace(FULL, layers=(2, 3)))
        assert house.side.matched(house.arrive(hit=Hit(128)), 0) == (128, True)

    @pytest.mark.parametrize(
        ("siblings", "background"),
        [
            ((), False),
            (("NixlConnector", "MooncakeConnectorV1"), False),
            (("NixlConnector", "OffloadingConnector"), True),
        ],
    )
    def test_beside_who_stores_what_a_step_computes_in_the_background(
        self, siblings: tuple[str, ...], background: bool
    ) -> None:
        house = House(siblings=siblings)
        assert house.side.matched(house.arrive(hit=Hit(128)), 0) == (128, background)

    def test_a_prompt_that_another_connector_has_shortened_is_looked_up_anew(self) -> None:
        house = House(siblings=("NixlConnector",))
        made = house.arrive(tokens=129, hit=Hit(128))
        made.prompt_token_ids.pop(), made.all_token_ids.pop()
        made.num_tokens = made.num_prompt_tokens = 128
        house.lookups.answers["r"] = Hit(64)
        assert house.side.matched(made, 0) == (64, False)
        assert [len(inquiry.chain) for inquiry in house.lookups.asked] == [129, 128]
        assert house.lookups.dropped == ["r"]

    def test_recompute_is_a_miss(self) -> None:
        house = House()
        house.advisor.mode = Mode.RECOMPUTE
        assert house.side.matched(house.arrive(hit=Hit(128)), 0) == (0, False)

    def test_no_answer_yet_asks_vllm_to_come_again(self) -> None:
        house = House()
        made = house.arrive()
        assert house.side.matched(made, 0) == (None, False)
        house.lookups.asked[0].hit = Hit(64)
        assert house.side.matched(made, 0) == (64, False)
        assert len(house.lookups.asked) == 1

    def test_requests_of_one_pass_share_one_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        house = House(lookup_wait_s=0.002)
        clock = iter(range(100))
        monkeypatch.setattr(search.time, "monotonic", lambda: next(clock) * 1e-3)
        for name in "ab":
            house.side.matched(house.arrive(name), 0)
        assert house.lookups.waits == pytest.approx([0.002, 0.001])
        house.plan("a", 150, 0)
        house.side.matched(house.arrive("c"), 0)
        assert house.lookups.waits[-1] == pytest.approx(0.002), "a new pass has a wait of its own"

    def test_an_old_answer_is_asked_for_again(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(128))
        house.lookups.asked[0].asked_at -= search.STALE_S + 1
        house.lookups.answers["r"] = Hit(64)
        assert house.side.matched(made, 0) == (64, False)
        assert len(house.lookups.asked) == 2

    def test_a_preempted_request_is_looked_up_with_its_output(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(128))
        house.side.matched(made, 0)
        house.admit(made, 128)
        house.plan()
        made.all_token_ids += [7] * 50
        made.num_tokens += 50
        house.side.matched(made, 0)
        assert len(house.lookups.asked[1].chain) == 200


class TestPlan:
    def admitted(self, house: House, hit: Hit) -> None:
        made = house.arrive(hit=hit)
        house.admit(made, house.side.matched(made, 0)[0] or 0)

    def test_a_hit_in_the_step_is_loaded_once(self) -> None:
        house = House()
        self.admitted(house, Hit(128))
        plan = house.plan()
        assert pieces(plan.loads) == [("r", 0, [([11, 12], 64), ([13, 14], 64)])]
        assert (plan.tails, plan.background) == ([], {})
        assert pieces(plan.saves.parts) == [("r", 0, [([15], 22)])]
        assert house.plan().loads == []

    def test_the_block_that_a_hit_ends_in_comes_first(self) -> None:
        house = House()
        made = house.arrive()
        chain = house.lookups.asked[0].chain
        house.lookups.asked[0].hit = Hit(140, 2, 12, chain.partial(2, 12))
        assert house.side.matched(made, 0) == (140, False)
        house.admit(made, 140)
        plan = house.plan(scheduled=10, computed=140)
        assert pieces(plan.loads) == [("r", 0, [([11, 12], 64), ([13, 14], 64)])]
        assert pieces(plan.tails) == [("r", 0, [([15], 12)])]

    def test_a_hit_in_the_background(self) -> None:
        house = House()
        house.advisor.mode = Mode.BULK
        self.admitted(house, Hit(128))
        plan = house.side.plan(output({}))
        assert pieces(plan.background["r"]) == [("r", 0, [([11, 12], 64), ([13, 14], 64)])]
        assert plan.idle, "the request waits: nothing of it is in the step"
        assert house.plan().background == {}

    def test_a_miss_is_only_saved(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(0))
        house.side.matched(made, 0)
        house.admit(made, 0)
        plan = house.plan(scheduled=150, computed=0)
        assert plan.loads == []
        assert pieces(plan.saves.parts) == [("r", 0, [([11, 12], 64), ([13, 14], 64), ([15], 22)])]

    def test_before_the_workers_are_there_nothing_moves(self) -> None:
        side = SchedulerSide(Options(), "engine", [BLOCK], can_fail_in_background=True)
        side.arrived(request("r", 10))
        assert side.plan(output({"r": 10})).idle


class TestIntroduction:
    def test_what_the_connector_is_stands_once_in_the_log(self) -> None:
        with capture_logs() as logs:
            side = House(mode="bulk").side
            side.meet_workers([WorkerLayout(b"", (0,), "ipc:///other")])
        (told,) = [entry for entry in logs if entry["event"] == "connector_ready"]
        spec = side.spec
        assert spec is not None
        assert (told["engine"], told["engine_id"], told["model"]) == ("engine", "engine", spec.name)
        assert (told["server"], told["connected"], told["embedded"]) == ("ipc:///nowhere", True, True)
        assert (told["mode"], told["loads"], told["saves"]) == ("bulk", True, True)
        assert told["chunk_tokens"] == spec.chunk_tokens and len(told["groups"]) == len(spec.groups)

    def test_what_is_not_supported_is_named(self) -> None:
        with capture_logs() as logs:
            side = SchedulerSide(Options(), "0b8f", [BLOCK] * 2, name="llama/host/dp0", can_fail_in_background=False)
            side.meet_workers([WorkerLayout(msgspec.msgpack.encode(spec_of()), (0,), "ipc:///nowhere")])
        (told,) = [entry for entry in logs if entry["event"] == "connector_ready"]
        assert (told["engine"], told["loads"]) == ("llama/host/dp0", False)
        assert "loads" in {why.partition(",")[0] for why in told["not_supported"]}


class TestLeases:
    def test_a_hit_that_vllm_does_not_take(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(128))
        house.side.matched(made, 0)
        house.admit(made, 0)
        assert house.lookups.dropped == ["r"]
        house.side.finished(made)
        assert house.lookups.dropped == ["r"]

    @pytest.mark.parametrize("hit", [None, Hit(128)], ids=["unanswered", "answered"])
    def test_a_request_that_ends_before_anybody_asked(self, hit: Hit | None) -> None:
        house = House()
        house.side.finished(house.arrive(hit=hit))
        assert house.lookups.dropped == ["r"]

    def test_a_request_that_ends_before_its_load(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(128))
        house.side.matched(made, 0)
        house.admit(made, 128)
        house.side.finished(made)
        assert house.lookups.dropped == ["r"]
        assert house.side.plan(output({})).loads == []

    def test_a_miss_holds_none(self) -> None:
        house = House()
        house.side.finished(house.arrive(hit=Hit(0)))
        assert house.lookups.dropped == []

    def test_what_a_load_did_not_need_goes_with_the_request(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(128))
        house.side.matched(made, 0)
        house.admit(made, 128)
        plan = house.plan()
        house.hear(WorkerReport(ran={plan.number: 1}))
        assert house.lookups.dropped == []
        house.side.finished(made)
        assert house.lookups.dropped == ["r"]

    def test_a_lookup_that_was_asked_again_and_finds_nothing_any_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        house = House()
        made = house.arrive(hit=Hit(128))
        later = time.monotonic() + search.STALE_S + 1
        monkeypatch.setattr(search.time, "monotonic", lambda: later)
        house.lookups.answers["r"] = MISS
        assert house.side.matched(made, 0) == (0, False)
        house.side.finished(made)
        assert house.lookups.dropped == ["r"]

    def test_a_load_under_way_in_its_step_keeps_it_past_the_request(self) -> None:
        """vLLM has the blocks in its own prefix cache since it allocated them: others go on from them."""
        house = House()
        made = house.arrive(hit=Hit(128))
        house.side.matched(made, 0)
        house.admit(made, 128)
        plan = house.plan()
        house.side.finished(made)
        house.hear(WorkerReport(ran={plan.number + 1: 1}))
        assert house.lookups.dropped == []
        house.hear(WorkerReport(ran={plan.number: 1}))
        assert house.lookups.dropped == ["r"]


class TestNews:
    def saving(self, house: House) -> SimpleNamespace:
        made = house.arrive(hit=Hit(0))
        house.admit(made, 0)
        assert house.plan(scheduled=150, computed=0).number == 1
        return made

    def test_blocks_stay_while_a_rank_saves(self) -> None:
        house = House(ranks=2)
        made = self.saving(house)
        house.hear(WorkerReport(drained={("r", 1): 1}))
        delayed, told = house.side.finished(made)
        assert (delayed, told) == (True, {"layerflow": {"hit_tokens": 0}})
        assert house.side.plan(output({})).leaving == ("r",)
        assert house.side.plan(output({})).leaving == ()

    def test_they_do_not_where_another_connector_loads_into_new_ones(self) -> None:
        """Its load's end frees them, if the request is over by then; vLLM ends where a second sign comes."""
        house = House(siblings=("OffloadingConnector",))
        made = self.saving(house)
        made.num_computed_tokens = 0
        house.side.matched(made, 0)
        house.admit(made, 0)  # preempted, and another connector has it
        assert house.side.plan(output({})).fresh
        assert house.side.finished(made)[0] is False

    @pytest.mark.parametrize(
        ("siblings", "told", "waits"),
        [
            (("OffloadingConnector",), None, True),
            (("OffloadingConnector",), False, False),
            (("OffloadingConnector",), True, True),
            (("NixlConnector",), None, False),
            (None, None, False),
        ],
    )
    @pytest.mark.parametrize("tells", [True, False])
    def test_saves_wait_for_the_outputs_of_steps_in_which_another_connector_may_load(
        self, siblings: tuple[str, ...] | None, told: bool | None, waits: bool, tells: bool
    ) -> None:
        """Not each of vLLM-Ascend's schedulers tells."""
        house = House(siblings=siblings)
        if not tells:
            house.side._tells_loads = False
            waits = siblings == ("OffloadingConnector",)
        house.arrive(hit=MISS)
        step = output({"r": 150}, new=[("r", house.tables, 0)])
        if told is not None:
            step.has_sync_kv_loads = told
        plan = house.side.plan(step)
        assert plan.saves.requests == ("r",)
        assert plan.depends_on_load is waits

    def test_where_a_plan_could_not_be_made_no_save_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the step overwrites, they may read it."""
        house = House()
        self.saving(house)
        monkeypatch.setattr(house.side._saves, "fresh", Mock(side_effect=KeyError("r")))
        assert house.side.plan(output({})).fresh == (tuple(range(1, 100)),)
        monkeypatch.undo()
        assert house.side.plan(output({})).fresh == ()

    def test_what_another_connector_loads_into_is_no_source_any_more(self) -> None:
        house = House(siblings=("OffloadingConnector",))
        self.saving(house)
        other = request("embedded", 90, prompt_embeds=object())
        house.side.arrived(other)
        house.side.matched(other, BLOCK)
        house.side.allocated(other, SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],)), 0)
        assert [set(ids) for ids in house.side.plan(output({})).fresh] == [{8, 9}]
        assert house.side.plan(output({})).fresh == ()

    def test_they_go_when_all_ranks_have_saved(self) -> None:
        house = House(ranks=2)
        made = self.saving(house)
        house.hear(WorkerReport(drained={("r", 1): 1}).aggregate(WorkerReport(drained={("r", 1): 1})))
        assert house.side.finished(made)[0] is False
        assert house.side.plan(output({})).leaving == ()

    def test_an_earlier_plans_news_does_not_count(self) -> None:
        house = House()
        made = self.saving(house)
        house.hear(WorkerReport(drained={("r", 0): 1}))
        assert house.side.finished(made)[0] is True

    def test_a_request_is_told_its_overlap(self) -> None:
        house = House()
        made = self.saving(house)
        house.hear(WorkerReport(overlaps={"r": (0.3, 0.4), "gone": (1.0, 1.0)}, drained={("r", 1): 1}))
        assert house.side.finished(made) == (False, {"layerflow": {"hit_tokens": 0, "overlap": 0.75}})

    def test_costs_are_those_of_the_slowest_rank(self) -> None:
        house = House()
        fast, slow = LinkCost(2e9, 0.0), LinkCost(1e9, 0.0)
        house.hear(WorkerReport(costs=(fast, None)).aggregate(WorkerReport(costs=(slow, None))))
        assert house.advisor.adopted == (slow, None)

    def test_after_a_failed_load_the_request_is_computed_and_saved_not_loaded_again(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(128))
        house.side.matched(made, 0)
        house.admit(made, 128)
        house.plan()
        house.hear(WorkerReport(failed={"r": 0.9, "gone": 0.9}), frozenset({11}))
        assert house.side.matched(made, 0) == (0, False)
        plan = house.plan(scheduled=150, computed=0)
        assert pieces(plan.saves.parts) == [("r", 0, [([11, 12], 64), ([13, 14], 64), ([15], 22)])]


class TestFailedLoads:
    """One broken object does not make the whole of a long prompt be computed; a slow link is not tried for ever."""

    def failed(self, house: House, share: float) -> SimpleNamespace:
        """A request whose load has failed."""
        made = house.arrive(hit=Hit(128))
        house.advisor.mode = Mode.BULK
        assert house.side.matched(made, 0) == (128, True)
        house.admit(made, 128)
        house.side.plan(output({}))
        house.hear(WorkerReport(failed={"r": share}), arrived={"r"})
        return made

    def test_a_small_part_is_looked_up_once_more(self) -> None:
        house = House(FULL, msgspec.structs.replace(FULL, layers=(2, 3)))
        made = self.failed(house, 0.01)
        house.lookups.answers["r"] = Hit(64)  # without the object that failed
        assert house.side.matched(made, 0) == (64, True)
        assert len(house.lookups.asked) == 2
        house.admit(made, 64)
        house.side.plan(output({}))
        house.hear(WorkerReport(failed={"r": 0.01}), arrived={"r"})
        assert house.side.matched(made, 0) == (0, False), "once"
        assert len(house.lookups.asked) == 2

    def test_what_mostly_failed_is_computed(self) -> None:
        house = House()
        assert house.side.matched(self.failed(house, 0.5), 0) == (0, False)
        assert len(house.lookups.asked) == 1

    def test_the_rank_that_lost_most_counts(self) -> None:
        news = WorkerReport(failed={"r": 0.1, "a": 0.2}).aggregate(WorkerReport(failed={"r": 0.6, "b": 0.3}))
        assert news.failed == {"r": 0.6, "a": 0.2, "b": 0.3}


class TestLateLayouts:
    """In a MultiConnector the workers' layouts come with the first step's report, not with the handshake."""

    def side(self, ranks: int = 1) -> tuple[SchedulerSide, list[WorkerLayout]]:
        side = SchedulerSide(Options(), "engine", [BLOCK], can_fail_in_background=True)
        spec = msgspec.structs.replace(spec_of(), shard=Shard(0, ranks))
        side.meet_workers([])  # what another connector has handed out
        return side, [WorkerLayout(msgspec.msgpack.encode(spec), (0,), "ipc:///nowhere")] * ranks

    def hear(self, side: SchedulerSide, news: WorkerReport | None) -> None:
        side.update_from_output(
            SimpleNamespace(
                invalid_block_ids=set(), kv_connector_worker_meta=news, finished_recving=None, finished_sending=None
            )
        )

    def test_the_first_prompt_waits_for_them_and_is_looked_up(self) -> None:
        side, layouts = self.side()
        made = request("r", 150)
        side.arrived(made)
        assert side.matched(made, 0) == (None, False)
        assert side.plan(output({})).empty
        self.hear(side, WorkerReport(layouts=tuple(layouts)))
        inquiry = side._lookups.asked[0]  # type: ignore[union-attr]
        inquiry.hit = Hit(128)  # type: ignore[misc]
        assert side.matched(made, 0) == (128, True), "nor have they seen a layer ask for its loaded blocks"

    def test_all_ranks_must_have_told(self) -> None:
        side, layouts = self.side(ranks=2)
        one = WorkerReport(layouts=tuple(layouts[:1]))
        self.hear(side, one.aggregate(one))
        assert side.spec is not None

    @pytest.mark.parametrize("slow", [0, 1])
    def test_a_handshake_that_has_one_place_for_several_ranks(self, slow: int) -> None:
        """VLLM's has where ranks share a prompt's computation: whoever told it last stands for both."""
        side, layouts = self.side(ranks=2)
        made = request("r", 150)
        side.meet_workers(layouts[:1])
        side.arrived(made)
        assert side.spec is None and side.matched(made, 0) == (None, False), "a step brings the others'"
        told = [WorkerReport(layouts=(NOT_NAMED if rank == slow else layouts[rank],)) for rank in range(2)]
        self.hear(side, told[0].aggregate(told[1]))
        assert side.spec is None and side.matched(made, 0) == (0, False), "one rank's weights have no digest yet"
        self.hear(side, WorkerReport(layouts=(layouts[slow],)))
        assert side.spec is not None

    def test_a_worker_that_tells_nothing_costs_one_step(self) -> None:
        side, layouts = self.side()
        made = request("r", 150)
        side.arrived(made)
        self.hear(side, None)
        assert side.matched(made, 0) == (0, False)
        self.hear(side, WorkerReport(layouts=tuple(layouts)))
        later = request("later", 150)
        side.arrived(later)
        assert side._lookups.asked[0].request == "later"  # type: ignore[union-attr]

    def test_a_request_that_ends_before_is_forgotten(self) -> None:
        side, layouts = self.side()
        made = request("r", 150)
        side.arrived(made)
        assert side.finished(made) == (False, None)
        self.hear(side, WorkerReport(layouts=tuple(layouts)))
        assert side._lookups.asked == []  # type: ignore[union-attr]


class TestUnnamedWeights:
    """Until the digest of its weights is known, an engine runs as it would without layerflow."""

    side, hear = TestLateLayouts.side, TestLateLayouts.hear

    @pytest.mark.parametrize("by", ["handshake", "report"])
    def test_no_request_waits_for_it(self, by: str) -> None:
        side, layouts = self.side()
        first = request("first", 150)
        if by == "report":
            side.arrived(first)
            self.hear(side, WorkerReport(layouts=(NOT_NAMED,)))
        else:
            side.meet_workers([NOT_NAMED])
            side.arrived(first)
        assert side.matched(first, 0) == (0, False)
        self.hear(side, None)
        again = request("again", 150)
        side.arrived(again)
        assert side.matched(again, 0) == (0, False)
        self.hear(side, WorkerReport(layouts=tuple(layouts)))
        later = request("later", 150)
        side.arrived(later)
        assert [inquiry.request for inquiry in side._lookups.asked] == ["later"]  # type: ignore[union-attr]

    def test_all_ranks_must_have_theirs(self) -> None:
        side, layouts = self.side(ranks=2)
        side.meet_workers([layouts[0], NOT_NAMED])
        self.hear(side, WorkerReport(layouts=tuple(layouts[:1])))
        assert side.spec is None
        self.hear(side, WorkerReport(layouts=tuple(layouts[1:])))
        assert side.spec is not None

    def test_weights_that_are_replaced_before_are_not_those_of_the_digest(self) -> None:
        side, layouts = self.side()
        side.meet_workers([NOT_NAMED])
        assert side.reset()
        self.hear(side, WorkerReport(layouts=tuple(layouts)))
        assert side.spec is not None and side.spec.content != spec_of().content

    def test_an_engine_that_may_not_reuse_asks_nobody(self) -> None:
        side = SchedulerSide(Options(), "engine", [BLOCK], can_fail_in_background=True, reuses=False)
        side.meet_workers([])
        made = request("r", 150)
        side.arrived(made)
        assert side.matched(made, 0) == (0, False)
        assert side.plan(output({"r": 150})).empty
        self.hear(side, None)
        assert side.finished(made) == (False, None)
        assert side.reset()


class TestReset:
    @pytest.mark.parametrize("away", [False, True], ids=["server", "no server"])
    def test_a_waiting_request_asks_for_other_keys(self, away: bool) -> None:
        house = House()
        made = house.arrive(hit=Hit(128))
        before = house.lookups.asked[0].chain
        house.side._control.away = away  # type: ignore[union-attr]
        assert house.side.reset(), "safe without the server"
        assert house.lookups.dropped == ["r"]
        house.lookups.answers["r"] = Hit(0)
        assert house.side.matched(made, 0) == (0, False)
        after = house.lookups.asked[1].chain
        assert not {before.parent(0), before.tail, *before.digests} & {after.parent(0), after.tail, *after.digests}

    def test_the_same_prompt_has_the_same_keys_until_the_next_reset(self) -> None:
        house = House()
        house.side.reset()
        for name in "ab":
            house.arrive(name)
        house.side.reset()
        house.arrive("c")
        one, two, three = (inquiry.chain.digests for inquiry in house.lookups.asked)
        assert one == two
        assert not set(one) & set(three)

    def test_a_running_request_saves_nothing_until_it_starts_anew(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(0))
        house.side.matched(made, 0)
        house.admit(made, 0)
        made.num_computed_tokens = 64
        house.side.reset()
        plan = house.plan(scheduled=86, computed=64)
        assert plan.replaced
        assert not plan.saves, "half of it was computed with the old weights"
        house.hear(WorkerReport(failed={"r": 1.0}), frozenset({11}))
        assert not house.plan(scheduled=86, computed=64).saves, "nor after a load of it that failed"
        house.side.matched(made, 0)  # preempted, and started anew
        again = house.plan(scheduled=150, computed=0)
        assert not again.replaced
        assert [part[0] for part in pieces(again.saves.parts)] == ["r"]

    @pytest.mark.parametrize("held_by", ["a running request", "a save"])
    def test_what_vllm_could_not_forget_is_not_saved_either(self, held_by: str) -> None:
        house = House()
        made = house.arrive("old", hit=Hit(0))
        house.side.matched(made, 0)
        house.admit(made, 0)
        house.plan("old", 150, 0)
        made.num_computed_tokens = 150
        if held_by == "a save":
            assert house.side.finished(made)[0]
        house.side.reset()
        late = house.arrive("new", hit=Hit(0))
        assert house.side.matched(late, 64) == (0, False)
        house.admit(late, 0)
        assert not house.plan("new", 86, 64).saves, "vLLM's own cache has given it old KV"
        whole = house.arrive("whole", hit=Hit(0))
        house.side.matched(whole, 0)
        house.admit(whole, 0)
        assert house.plan("whole", 150, 0).saves

    @pytest.mark.parametrize("emptied", [True, False])
    def test_whether_vllm_could_follow_a_reset_is_seen(self, emptied: bool) -> None:
        """A request without keys, which is not followed here, may have held its blocks."""
        house = House()
        table: list[object] = [object()]
        house.side.own_cache.meet(lambda: table[0])
        house.side.plan(output({}))
        if emptied:
            table[0] = object()
        house.side.reset()
        made = house.arrive(hit=Hit(0))
        house.side.matched(made, 64)
        house.admit(made, 0)
        assert bool(house.plan(scheduled=86, computed=64).saves) == emptied

    def test_after_a_reset_that_vllm_could_follow_its_own_hits_are_saved_on(self) -> None:
        house = House()
        house.side.reset()
        made = house.arrive(hit=Hit(0))
        house.side.matched(made, 64)
        house.admit(made, 0)
        assert house.plan(scheduled=86, computed=64).saves

    def test_weights_that_workers_have_seen_change_get_other_keys(self) -> None:
        house = House()
        made = house.arrive(hit=Hit(0))
        house.side.matched(made, 0)
        house.admit(made, 0)
        step = house.plan(scheduled=150, computed=0).step
        made.num_computed_tokens = 150
        house.hear(WorkerReport(changed={step: "written"}))
        assert house.control.resets == 1
        later = house.arrive("later", hit=Hit(0))
        house.side.matched(later, 0)
        assert not {*house.lookups.asked[0].chain.digests} & {*house.lookups.asked[-1].chain.digests}
        house.admit(later, 0)
        plan = house.plan("later", 150, 0)
        assert plan.replaced
        assert [part[0] for part in pieces(plan.saves.parts)] == ["later"], "the one that ran is not saved"
        house.side.matched(house.arrive("next", hit=Hit(0)), 0)
        house.admit(house.requests["next"], 0)
        assert not house.plan("next", 150, 0).replaced

    @pytest.mark.parametrize("emptied", ["before", "too early", "never"])
    def test_what_vllm_may_have_of_the_old_weights_is_not_saved(self, emptied: str) -> None:
        house = House()
        table: list[object] = [object()]
        house.side.own_cache.meet(lambda: table[0])

        def serve(name: str, local: int = 0) -> Any:
            made = house.arrive(name, hit=Hit(0))
            house.side.matched(made, local)
            house.admit(made, 0)
            return house.plan(name, 150 - local, local)

        serve("old")
        if emptied == "too early":
            table[0] = object()
            serve("between")
        if emptied == "before":
            table[0] = object()
        house.hear(WorkerReport(changed={serve("new").step: "written"}))
        assert serve("whole").saves
        assert bool(serve("found", 64).saves) == (emptied == "before")
        table[0] = object()
        serve("another")
        assert serve("found again", 64).saves, "vLLM's cache holds nothing of before any more"

    def test_weights_that_change_before_the_workers_are_known(self) -> None:
        side = SchedulerSide(Options(), "engine", [BLOCK], can_fail_in_background=True)
        layout = WorkerLayout(msgspec.msgpack.encode(spec_of()), (0,), "ipc:///nowhere")
        side.reset()
        side.meet_workers([layout])
        assert side.plan(output({})).replaced, "workers accept the weights that they have"

    def test_a_plan_that_could_not_be_made_says_all_the_same_that_the_weights_are_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        house = House()
        house.side.reset()
        monkeypatch.setattr(house.side._saves, "fresh", Mock(side_effect=KeyError("r")))
        assert house.side.plan(output({"r": 1})).replaced

    def test_engines_that_name_their_weights_share_again(self, tmp_path: Path) -> None:
        file = tmp_path / "weights"
        file.write_text("step-1\n")
        started = renewed_content("", "step-1")
        sides = [House(model_content=f"@{file}", content=started) for _ in range(2)]
        for house in sides:
            house.side.reset()
            house.arrive("paused")
        file.write_text("step-2\n")
        roots = []
        for house in sides:
            for name in ("paused", "later"):
                house.side.matched(house.requests.get(name) or house.arrive(name), 0)
                roots.append(house.lookups.asked[-1].chain.parent(0))
        fresh = House(model_content=f"@{file}", content=renewed_content("", "step-2"))
        fresh.arrive("started with it")
        assert {*roots, fresh.lookups.asked[0].chain.parent(0)} == {roots[0]}

    @pytest.mark.parametrize("named", ["step-1", "", None], ids=["the old name", "no name", "no file"])
    @pytest.mark.parametrize("resets", [1, 2])
    def test_without_a_name_of_its_own_nobody_shares(self, tmp_path: Path, named: str | None, resets: int) -> None:
        file = tmp_path / "weights"
        started = renewed_content("", "step-1")
        roots = {root_digest(spec_of(content=started).fingerprint)}
        for _ in range(2):
            file.write_text("step-1")
            house = House(model_content=f"@{file}", content=started)
            for _ in range(resets):
                house.side.reset()
            file.write_text(named) if named is not None else file.unlink()
            house.side.matched(house.arrive(), 0)
            roots.add(house.lookups.asked[-1].chain.parent(0))
        assert len(roots) == 3

    def test_closing_hangs_up(self) -> None:
        house = House()
        house.side.close()
        assert house.lookups.closed
        assert house.side._control.closed  # type: ignore[union-attr]
