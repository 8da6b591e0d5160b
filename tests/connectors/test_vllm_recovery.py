"""What vLLM's scheduler is made to take back when a load of the running step has failed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from test_vllm_scheduler import BLOCKS, House, fakes
from test_vllm_step_loads import layout
from vllm_fakes import FULL, hooked, output

from layerflow.agent.hit_plan import PinnedPlaces
from layerflow.agent.values import Hit
from layerflow.connectors.vllm.plan import WorkerReport
from layerflow.connectors.vllm.scheduler.loads import PendingLoad, StepLoads
from layerflow.connectors.vllm.scheduler.recovery import preempt_dependents
from layerflow.connectors.vllm.worker.outcome import FailedLoads, all_failed

__all__ = ["fakes"]

BLOCK = 32


class FakeScheduler:
    """As much of vLLM's as is asked; two cache groups.

    :param holders: block tables by request, a table a group; those named "w…" wait for a background load.
    """

    def __init__(
        self, holders: dict[str, tuple[list[int], ...]], *, recompute: bool = True, blocks: int = 200, parts: int = 1
    ) -> None:
        sizes = SimpleNamespace(tensor_parallel_size=parts, decode_context_parallel_size=parts)
        self.vllm_config = SimpleNamespace(parallel_config=sizes)
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK, dcp_sharded=True))
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group, group])
        self.holders = holders
        requests = [SimpleNamespace(request_id=name, status=self.status(name)) for name in holders]
        self.running = [each for each in requests if each.status.name == "RUNNING"]
        self.kv_holding_waiting = [each for each in requests if each.status.name != "RUNNING"]
        self.evicted: set[int] = set()
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: self.holders[name],
            evict_blocks=self.evicted.update,
            block_pool=SimpleNamespace(blocks=range(blocks)),
        )
        self.prev_step_scheduled_req_ids = set(holders)
        self.encoder_cache_mismatch_reqs: set[str] = set()
        self.recompute_kv_load_failures = recompute
        self.preempted: list[str] = []
        self.restarted: set[str] = set()

    @staticmethod
    def status(name: str) -> Any:
        return SimpleNamespace(name="WAITING_FOR_REMOTE_KVS" if name.startswith("w") else "RUNNING")

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        assert drop_stale_output
        assert request not in self.running
        self.preempted.append(request.request_id)

    def _handle_failed_recving(self, names: set[str]) -> None:
        self.restarted |= names


def arrival(tables: tuple[list[int], ...], start: int = 0) -> list[PendingLoad]:
    return [PendingLoad(1, start, tables)]


def test_a_block_stands_for_as_many_tokens_as_its_ranks_have_rows() -> None:
    """Two ranks: the load begins with the second block, in which the other request ends."""
    failed = ([1, 2, 3], [11, 12, 13])
    scheduler = FakeScheduler({"a": failed, "b": ([1, 2], [11, 14]), "c": ([1, 4], [11, 15])}, parts=2)
    assert preempt_dependents(scheduler, {"a": arrival(failed, start=2 * BLOCK)}) == {"a", "b"}
    assert scheduler.evicted == {2, 3, 12, 13, 14}


def test_the_request_and_those_that_go_on_from_its_blocks() -> None:
    failed = ([1, 2, 3, 4], [0, 0, 13, 14])
    scheduler = FakeScheduler(
        {
            "a": failed,
            "b": ([1, 2, 5], [0, 16, 17]),  # shares what vLLM had itself, before the load
            "c": ([1, 2, 3, 6], [0, 0, 18, 19]),
            "d": ([20, 21], [22, 23]),
            "w1": ([1, 2, 3, 30], [0, 0, 13, 31]),
            "w2": ([24], [25]),
        }
    )
    assert preempt_dependents(scheduler, {"a": arrival(failed, start=2 * BLOCK)}) == {"a", "c", "w1"}
    assert scheduler.preempted == ["c", "a"], "each is put before the others: the first comes first again"
    assert scheduler.restarted == {"w1"}
    assert [each.request_id for each in scheduler.running] == ["b", "d"]
    assert scheduler.evicted >= {3, 4, 13, 14, 6, 18, 19}
    assert not scheduler.evicted & {0, 1, 2, 5, 16, 17, 20, 21, 22, 23, 24, 25}
    assert scheduler.prev_step_scheduled_req_ids == {"b", "d", "w1", "w2"}
    assert not scheduler.encoder_cache_mismatch_reqs


def test_before_032_vllm_keeps_those_that_wait_in_two_other_queues() -> None:
    scheduler = FakeScheduler({"a": ([1, 2], [11, 12]), "w1": ([1, 3], [11, 13]), "w2": ([24], [25])})
    first, second = scheduler.kv_holding_waiting
    del scheduler.kv_holding_waiting
    scheduler.waiting, scheduler.skipped_waiting = [second], [first]  # type: ignore[attr-defined]
    assert preempt_dependents(scheduler, {"a": arrival(([1, 2], [11, 12]))}) == {"a", "w1"}
    assert scheduler.restarted == {"w1"}


def test_what_was_computed_on_what_was_computed() -> None:
    """A third request shares only what the second has computed behind a failed block."""
    scheduler = FakeScheduler({"a": ([1, 2], [11, 12]), "b": ([1, 3, 4], [11, 13, 14]), "c": ([9, 3, 8], [15, 13, 16])})
    assert preempt_dependents(scheduler, {"a": arrival(([1, 2], [11, 12]))}) == {"a", "b", "c"}


def test_a_request_that_has_ended_meanwhile_leaves_nothing_of_its_own_in_the_prefix_cache() -> None:
    scheduler = FakeScheduler({"b": ([1, 3], [11, 13]), "c": ([5], [15]), "d": ([20], [22])})
    failed = arrival(([1, 2], [11, 12]))
    failed[0].last = ([1, 2, 5], [0, 12, 15])
    assert preempt_dependents(scheduler, {"a": failed}) == {"b", "c"}
    assert scheduler.evicted == {1, 2, 3, 5, 11, 12, 13, 15}


def test_a_request_that_was_preempted_meanwhile_leaves_nothing_in_the_prefix_cache() -> None:
    scheduler = FakeScheduler({"b": ([1, 3], [11, 13]), "d": ([20], [22])})
    assert preempt_dependents(scheduler, {"a": arrival(([1, 2], [11, 12]))}) == {"b"}
    assert scheduler.evicted == set(range(200))


def test_of_a_request_whose_load_is_not_known_nothing_counts() -> None:
    scheduler = FakeScheduler({"a": ([1, 2], [11, 12]), "b": ([1, 3], [11, 13]), "d": ([20], [22])})
    assert preempt_dependents(scheduler, {"a": ()}) == {"a", "b"}
    assert scheduler.evicted == {1, 2, 3, 11, 12, 13}
    assert preempt_dependents(scheduler, {"x": ()}) == set()
    assert scheduler.evicted == set(range(200))


def test_where_vllm_is_to_fail_them_they_end_with_an_error() -> None:
    scheduler = FakeScheduler({"a": ([1], [11]), "d": ([20], [22])}, recompute=False)
    preempt_dependents(scheduler, {"a": arrival(([1], [11]))})
    assert scheduler.encoder_cache_mismatch_reqs == {"a"}


@pytest.mark.parametrize("seed", range(20))
def test_nobody_keeps_a_spoilt_block_and_nobody_else_is_touched(seed: int) -> None:
    """Against a search that goes token by token."""
    source = random.Random(seed)
    tree: dict[tuple[int, ...], tuple[int, int]] = {}
    holders: dict[str, tuple[list[int], ...]] = {}
    for number in range(30):
        path = tuple(source.randrange(2) for _ in range(source.randrange(1, 7)))
        prefixes = [path[: end + 1] for end in range(len(path))]
        for prefix in prefixes:
            tree.setdefault(prefix, (2 * len(tree) + 1, 2 * len(tree) + 2))
        holders[f"r{number}"] = ([tree[prefix][0] for prefix in prefixes], [tree[prefix][1] for prefix in prefixes])
    scheduler = FakeScheduler(holders)
    start = source.randrange(len(holders["r0"][0]))
    spoilt = set(holders["r0"][0][start:])
    while True:
        more = {
            block
            for tables in holders.values()
            for at, block in enumerate(tables[0])
            if spoilt & set(tables[0][: at + 1])
        }
        if more <= spoilt:
            break
        spoilt |= more
    wanted = {name for name, tables in holders.items() if spoilt & set(tables[0])}
    assert preempt_dependents(scheduler, {"r0": arrival(holders["r0"], start * BLOCK)}) == wanted
    assert spoilt <= scheduler.evicted


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


HIT, PREFIX = 128, 32


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("part", "method"), [("_search", "take"), ("_saves", "fresh"), ("_saves", "step")])
def test_a_promised_load_that_no_plan_has_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, part: str, method: str, groups: int
) -> None:
    """From vLLM's hooks on the scheduler's side, by the workers' report, to its scheduler."""
    made = House(*[FULL, msgspec.structs.replace(FULL, layers=(2, 3))][:groups], mode="layerwise")
    made.side.step_loads = StepLoads([BLOCK] * groups, recovers=True)
    made.side.step_loads.meet_workers([layout(made.side.spec)])
    made.side.step_loads.seen(hooked(made.side.spec))
    asked = made.arrive("r", 150, Hit(HIT, plan=PinnedPlaces(1, 1, np.zeros((2, 2, 1, 2), np.uint64), -1)))
    assert made.side.matched(asked, PREFIX) == (HIT - PREFIX, False)
    made.admit(asked, HIT - PREFIX)
    with monkeypatch.context() as patch:
        patch.setattr(getattr(made.side, part), method, fail)
        plan = made.plan("r")
    assert not plan.loads and plan.depends_on_load
    failures = FailedLoads(several_groups=groups > 1, taken_back=True)
    for request, load in plan.unkept.items():
        failures.unkept(request, load)
    report = WorkerReport(lost=failures.take_lost(), ran={plan.number: 1})
    failed = made.side.step_loads.failed(SimpleNamespace(kv_connector_worker_meta=report))
    first, second, *_, other = BLOCKS
    scheduler = FakeScheduler(
        {"r": made.tables, "s": ([first, second, 90],) * groups, "t": ([first, 91],) * groups, "u": ([92],) * groups}
    )
    assert preempt_dependents(scheduler, failed) == {"r", "s"}, "the first block was vLLM's own"
    assert scheduler.preempted == ["s", "r"]
    assert {second, 90, other} <= scheduler.evicted and not scheduler.evicted & {first, 91, 92}


def test_what_is_computed_on_a_load_that_no_plan_has_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request of the step goes on from its blocks."""
    made = House(mode="layerwise")
    asked, beside = made.arrive("r", 150, Hit(HIT)), made.arrive("beside", 150)
    assert made.side.matched(asked, 0) == (HIT, False)
    made.admit(asked, HIT)
    made.admit(beside, 0)
    monkeypatch.setattr(made.side._search, "take", fail)
    beside.num_computed_tokens = HIT
    plan = made.side.plan(output({"r": 22, "beside": 22}, new=[(name, made.tables, HIT) for name in ("r", "beside")]))
    assert "beside" in plan.saves.requests and plan.depends_on_load
    made.hear(WorkerReport(lost=frozenset("r"), ran={plan.number: 1}))
    assert made.side.plan(output({})).verdicts == ((plan.number, False),)


def test_an_aborted_request_that_was_computed_without_layerflow_leaves_its_last_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = House(mode="layerwise")
    asked = made.arrive("r", 150, Hit(HIT))
    assert made.side.matched(asked, 0) == (HIT, False)
    made.admit(asked, HIT)
    monkeypatch.setattr(made.side._search, "take", fail)
    plan = made.plan("r")
    last = ([*BLOCKS, 99],)
    assert made.side.finished(asked, last) == (False, None)
    report = WorkerReport(lost=frozenset("r"), ran={plan.number: 1})
    failed = made.side.step_loads.failed(SimpleNamespace(kv_connector_worker_meta=report))
    scheduler = FakeScheduler({"d": ([200], [201])}, blocks=300)
    assert preempt_dependents(scheduler, failed) == set()
    assert scheduler.evicted == {*BLOCKS, 99}


def test_ranks_tell_together() -> None:
    both = WorkerReport(lost=frozenset("a")).aggregate(WorkerReport(lost=frozenset("b")))
    assert both.lost == {"a", "b"}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("taken_back", [False, True])
def test_with_one_group_vllm_is_told_blocks_unless_requests_are_taken_back(taken_back: bool, background: bool) -> None:
    failures = FailedLoads(several_groups=False, taken_back=taken_back)
    parts: Any = [SimpleNamespace(request="a", group=0, table=[7, 8], pieces=[SimpleNamespace(blocks=range(2))])]
    failures.add(parts, all_failed(parts, "it is a test"), background=background)
    by_request = taken_back and not background  # one that waits has computed nothing
    assert failures.take_lost() == ({"a"} if by_request else frozenset())
    assert failures.take_blocks() == (set() if by_request else {7, 8})
