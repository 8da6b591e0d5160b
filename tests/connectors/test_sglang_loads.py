"""Loads of SGLang's batches over a real server: exact bytes in the right slots, or each request that failed and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from e2e.known import eventually
from sglang_fakes import PAGE, PoolWorker, crawl, page_hashes

from layerflow.agent import LoadResult, Step
from layerflow.connectors.sglang import loads as module
from layerflow.connectors.sglang.breaker import FAILURES
from layerflow.connectors.sglang.loads import AVOID_S, LOST, STALE_S
from layerflow.server import EmbeddedServer

Embed = Callable[..., EmbeddedServer]
Workers = Callable[..., PoolWorker]


@pytest.fixture
def workers() -> Iterator[Workers]:
    with ExitStack() as closed:
        yield lambda server, *args, **more: closed.enter_context(PoolWorker(server, *args, **more))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of what loads remember; deadlines have the real one."""
    time = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.now))
    return time


def found(worker: PoolWorker, request: str, hashes: list[str]) -> list[int]:
    """What a lookup answers once what was saved can be found."""
    answer: list[int] = []

    def is_there() -> bool:
        worker.loads._found.pop(request, None)
        answer[:] = worker.loads.look_up(request, hashes)
        return bool(answer)

    eventually(is_there)
    return answer


def load(worker: PoolWorker, request: str, hashes: list[str], pages: int | None = None) -> dict[str, str]:
    """A whole batch of one request; what has failed. Its bytes are compared where nothing has."""
    pages = len(hashes) if pages is None else pages
    slots = worker.slots(pages)
    assert worker.loads.queue(request, pages, slots)
    number = worker.loads.start()
    worker.forward(number)
    if worker.loads.finish(number):
        assert worker.wrong_bytes(hashes[:pages], slots) == 0
        assert worker.changed_bytes(slots) == 0
    return worker.loads.failures


@pytest.mark.parametrize("kind", ["mha", "mla", "one-head", "swa", "hybrid", "hybrid-mla", "mha-draft"])
def test_what_one_engine_has_saved_another_loads_slot_for_slot(embed: Embed, workers: Workers, kind: str) -> None:
    server = embed()
    hashes = page_hashes(5)
    workers(server, kind, engine="left").save(hashes)
    right = workers(server, kind, engine="right")
    answer = found(right, "r", hashes)
    assert answer == (list(range(1, 6)) if kind in ("mha", "mla", "one-head", "mha-draft") else [5])
    assert load(right, "r", hashes) == {}


@pytest.mark.parametrize("kind", ["mha", "mla", "one-head", "mha-draft"])
@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1), (2, 2)])
def test_engines_of_other_tensor_sizes_load_it(
    embed: Embed, workers: Workers, kind: str, saving: int, loading: int
) -> None:
    server = embed()
    hashes = page_hashes(4)
    left = [workers(server, kind, rank, saving, engine="left") for rank in range(saving)]
    for worker in left:
        worker.save(hashes, wait=False)
    assert eventually(lambda: all(worker.saves.ended() for worker in left))
    right = [workers(server, kind, rank, loading, engine="right") for rank in range(loading)]
    for worker in right:
        assert found(worker, "r", hashes) == [1, 2, 3, 4]
    for worker in right:
        assert load(worker, "r", hashes) == {}


def test_states_are_found_by_engines_of_their_own_tensor_size_only(embed: Embed, workers: Workers) -> None:
    server = embed()
    hashes = page_hashes(3)
    left = [workers(server, "hybrid", rank, 2, engine="left") for rank in range(2)]
    for worker in left:
        worker.save(hashes, wait=False)
    assert eventually(lambda: all(worker.saves.ended() for worker in left))
    right = [workers(server, "hybrid", rank, 2, engine="right") for rank in range(2)]
    assert [found(worker, "r", hashes) for worker in right] == [[3], [3]]
    assert [load(worker, "r", hashes) for worker in right] == [{}, {}]
    assert workers(server, "hybrid", engine="one").loads.look_up("r", hashes) == []


def test_a_hit_may_be_loaded_in_part(embed: Embed, workers: Workers) -> None:
    server = embed()
    hashes = page_hashes(6)
    worker = workers(server)
    worker.save(hashes)
    other = workers(server, engine="other")
    assert found(other, "r", hashes) == list(range(1, 7))
    assert load(other, "r", hashes, pages=2) == {}


def test_a_prompt_that_goes_on_differently_shares_its_leading_pages(embed: Embed, workers: Workers) -> None:
    server = embed()
    hashes = page_hashes(6)
    workers(server).save(hashes)
    other = workers(server, engine="other")
    fork = hashes[:3] + page_hashes(3, seed=1)
    assert found(other, "r", fork) == [1, 2, 3]
    assert load(other, "r", fork, pages=3) == {}


def test_states_are_loaded_where_they_were_saved_and_nowhere_else(embed: Embed, workers: Workers) -> None:
    server = embed()
    hashes = page_hashes(6)
    worker = workers(server, "hybrid")
    worker.save(hashes[:4])
    other = workers(server, "hybrid", engine="other")
    assert found(other, "r", hashes) == [4]
    assert load(other, "r", hashes[:4]) == {}
    assert other.loads.look_up("shorter", hashes[:3]) == []


def test_the_rest_behind_what_the_device_has_is_found_by_its_own_hashes(embed: Embed, workers: Workers) -> None:
    server = embed()
    hashes = page_hashes(6)
    workers(server).save(hashes)
    other = workers(server, engine="other")
    assert found(other, "r", hashes[2:]) == [1, 2, 3, 4]
    assert load(other, "r", hashes[2:]) == {}


def test_several_requests_of_a_batch_are_loaded_together(embed: Embed, workers: Workers) -> None:
    server = embed()
    worker, other = workers(server), workers(server, engine="other")
    prompts = [page_hashes(3, seed) for seed in range(3)]
    for hashes in prompts:
        worker.save(hashes)
    free = other.slots(9)["kv"]
    slots = [{"kv": free[each * 3 * PAGE : (each + 1) * 3 * PAGE]} for each in range(3)]
    for number, hashes in enumerate(prompts):
        assert found(other, f"r{number}", hashes) == [1, 2, 3]
    for number in range(3):
        assert other.loads.queue(f"r{number}", 3, slots[number])
    batch = other.loads.start()
    other.forward(batch)
    assert other.loads.finish(batch)
    assert [other.wrong_bytes(*each) for each in zip(prompts, slots, strict=True)] == [0, 0, 0]
    assert other.changed_bytes({"kv": free}) == 0


def test_an_answer_is_used_for_a_second(embed: Embed, workers: Workers, clock: SimpleNamespace) -> None:
    worker = workers(embed())
    hashes = page_hashes(3)

    def asked() -> int:
        return worker.agent.statistics().lookups

    assert worker.loads.look_up("r", hashes) == []
    assert asked() == 1
    clock.now += STALE_S * 0.99
    worker.loads.look_up("r", list(hashes))
    assert asked() == 1
    worker.loads.look_up("r", hashes[:2])  # some of it is on the device now
    assert asked() == 2
    worker.loads.look_up("other", hashes[:2])
    assert asked() == 3
    clock.now += STALE_S * 1.01
    worker.loads.look_up("r", hashes[:2])
    assert asked() == 4


def test_nothing_queued_is_no_batch(embed: Embed, workers: Workers) -> None:
    assert workers(embed()).loads.start() == -1


def test_a_request_that_leaves_before_its_batch_is_not_loaded(embed: Embed, workers: Workers) -> None:
    server = embed()
    hashes = page_hashes(3)
    worker = workers(server)
    worker.save(hashes)
    other = workers(server, engine="other")
    assert found(other, "r", hashes)
    assert other.loads.queue("r", 3, other.slots(3))
    assert other.loads.cancel("r")
    assert not other.loads.cancel("r")
    assert other.loads.start() == -1
    assert other.changed_bytes({}) == 0


def test_a_hit_that_was_forgotten_is_computed_by_a_single_rank(
    embed: Embed, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed()
    hashes = page_hashes(3)
    worker = workers(server)
    worker.save(hashes)
    assert found(worker, "first", hashes)
    monkeypatch.setattr(module, "MOST_FOUND", 2)
    for request in ("second", "third"):
        assert worker.loads.look_up(request, hashes) == [1, 2, 3]
    assert not worker.loads.queue("first", 3, worker.slots(3))
    assert worker.loads.queue("third", 3, worker.slots(3))
    assert not worker.loads.queue("third", 3, worker.slots(3)), "a hit is used once"
    assert not worker.loads.queue("second", 4, worker.slots(4)), "more than was found"


def test_a_rank_among_several_always_queues_and_says_at_the_end_what_it_could_not(
    embed: Embed, workers: Workers
) -> None:
    """SGLang does not compare what ranks answer to a load: one that computes while the others load would hang them."""
    server = embed()
    hashes = page_hashes(3)
    ranks = [workers(server, "mha", rank, 2) for rank in range(2)]
    for worker in ranks:
        worker.save(hashes, wait=False)
    assert eventually(lambda: all(worker.saves.ended() for worker in ranks))
    for worker in ranks:
        assert found(worker, "r", hashes) == [1, 2, 3]
    ranks[1].loads._found.clear()
    slots = [worker.slots(3) for worker in ranks]
    assert [worker.loads.queue("r", 3, each) for worker, each in zip(ranks, slots, strict=True)] == [True, True]
    numbers = [worker.loads.start() for worker in ranks]
    assert numbers == [0, 0]
    for worker in ranks:
        worker.forward(0)
    assert [worker.loads.finish(0) for worker in ranks] == [True, False]
    assert ranks[1].loads.failures == {"r": LOST}
    assert ranks[0].wrong_bytes(hashes, slots[0]) == 0
    assert ranks[1].loads.queue("another", 3, ranks[1].slots(3))
    assert ranks[1].loads.cancel("another")
    assert ranks[1].loads.start() == -1


def test_each_layer_is_waited_for_once(embed: Embed, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks for keys and for values, and for layers that have no cache."""
    server = embed()
    hashes = page_hashes(3)
    worker = workers(server, "hybrid")
    worker.save(hashes)
    assert found(worker, "r", hashes)
    assert worker.loads.queue("r", 3, worker.slots(3))
    number = worker.loads.start()
    waited: list[int] = []
    wait_layer = Step.wait_layer

    def seen(step: Step, layer: int) -> LoadResult:
        waited.append(layer)
        return wait_layer(step, layer)

    monkeypatch.setattr(Step, "wait_layer", seen)
    worker.forward(number)
    assert waited == [0, 1, 2, 3]
    assert worker.loads.finish(number)


def test_a_batch_that_is_not_known_has_failed(embed: Embed, workers: Workers) -> None:
    loads = workers(embed()).loads
    loads.wait(7, 0)
    assert not loads.finish(7)
    assert loads.failures == {}


def test_a_load_that_cannot_be_begun_fails_at_its_batchs_end(
    embed: Embed, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed()
    worker = workers(server)
    for seed in range(2):
        worker.save(page_hashes(3, seed))
        assert found(worker, f"r{seed}", page_hashes(3, seed))
        assert worker.loads.queue(f"r{seed}", 3, worker.slots(3))

    def fail() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(worker.loads, "_after", fail)
    number = worker.loads.start()
    worker.forward(number)
    assert not worker.loads.finish(number)
    assert worker.loads.failures == dict.fromkeys(["r0", "r1"], "RuntimeError: the device is gone")


def test_a_server_that_is_gone_before_a_lookup_is_a_miss_and_before_a_load_computes(
    embed: Embed, workers: Workers
) -> None:
    server = embed()
    hashes = page_hashes(3)
    worker = workers(server)
    worker.save(hashes)
    assert found(worker, "r", hashes)
    server.close()
    assert eventually(lambda: not worker.agent.attached)
    assert not worker.loads.queue("r", 3, worker.slots(3))
    assert worker.loads.start() == -1
    assert worker.loads.look_up("next", hashes) == []


def under_way(worker: PoolWorker, server: EmbeddedServer, requests: int) -> list[int]:
    """Batches of a request each whose loads have begun and take a minute."""
    prompts = [page_hashes(8, seed) for seed in range(requests)]
    for hashes in prompts:
        worker.save(hashes)
    for number, hashes in enumerate(prompts):
        assert found(worker, f"r{number}", hashes)
    crawl(worker.agent, server)
    batches = []
    for number in range(requests):
        assert worker.loads.queue(f"r{number}", 8, worker.slots(8))
        batches.append(worker.loads.start())
    assert batches == list(range(requests))
    return batches


def test_a_server_that_is_lost_in_a_load_fails_its_request_and_loads_that_keep_failing_pause(
    embed: Embed, workers: Workers
) -> None:
    server = embed(pool__link_gbps=0.2)
    worker = workers(server)
    batches = under_way(worker, server, FAILURES)
    server.close()
    for number in batches:
        worker.forward(number)
        assert not worker.breaker.open
        assert not worker.loads.finish(number)
        assert list(worker.loads.failures) == [f"r{number}"]
        assert all(worker.loads.failures.values()), "a reason each"
    assert worker.breaker.open
    asked = worker.agent.statistics().lookups
    assert worker.loads.look_up("next", page_hashes(3, 50)) == []
    assert worker.agent.statistics().lookups == asked


def test_a_load_past_its_deadline_fails_and_its_prefix_is_computed_for_a_while(
    embed: Embed, workers: Workers, clock: SimpleNamespace
) -> None:
    server = embed(pool__link_gbps=0.2)
    worker = workers(server, timeout_s=0.2)
    (number,) = under_way(worker, server, 1)
    worker.forward(number)
    assert not worker.loads.finish(number)
    assert list(worker.loads.failures) == ["r0"]
    hashes = page_hashes(8)
    assert worker.loads.look_up("again", hashes) == []
    assert worker.loads.look_up("longer", hashes + page_hashes(1, 9)) == []
    assert worker.loads.look_up("shorter", hashes[:7]) == list(range(1, 8))
    clock.now += AVOID_S * 1.01
    assert worker.loads.look_up("again", hashes) == list(range(1, 9))


def test_a_flush_ends_what_is_under_way_and_forgets_what_was_found(embed: Embed, workers: Workers) -> None:
    server = embed(pool__link_gbps=0.2)
    worker = workers(server, timeout_s=0.2)
    (number,) = under_way(worker, server, 1)
    assert found(worker, "queued", page_hashes(8))
    assert worker.loads.queue("queued", 8, worker.slots(8))
    assert worker.loads.look_up("found", page_hashes(8))
    worker.loads.reset()
    assert not worker.loads.finish(number), "it has ended already"
    assert worker.loads.start() == -1
    assert not worker.loads.queue("found", 8, worker.slots(8))


def test_a_load_that_is_cut_off_has_failed(embed: Embed, workers: Workers) -> None:
    server = embed(pool__link_gbps=0.2)
    worker = workers(server)
    (number,) = under_way(worker, server, 1)
    worker.agent.revoke("for a test")
    worker.forward(number)
    assert not worker.loads.finish(number)
    assert list(worker.loads.failures) == ["r0"]


def test_a_chain_of_hashes_is_of_its_agents_model(embed: Embed, workers: Workers) -> None:
    server = embed()
    worker, other = workers(server), workers(server, "mla")
    hashes = [each.encode() for each in page_hashes(3)]
    chain = worker.agent.hashed_chain(hashes)
    assert (chain.model, chain.chunk_tokens, len(chain)) == (worker.agent.spec.fingerprint, PAGE, 3 * PAGE + 1)
    assert chain.digests == worker.agent.hashed_chain(hashes).digests
    others = [
        other.agent.hashed_chain(hashes),
        worker.agent.hashed_chain(hashes, adapter="lora"),
        worker.agent.hashed_chain(hashes, salt="tenant"),
    ]
    assert not any(set(chain.digests) & set(each.digests) for each in others)


def test_new_weights_make_other_chains_and_old_ones_miss(embed: Embed, workers: Workers) -> None:
    worker = workers(embed())
    hashes = page_hashes(3)
    worker.save(hashes)
    assert found(worker, "r", hashes)
    before = worker.agent.hashed_chain([each.encode() for each in hashes])
    worker.agent.reset("step-7")
    assert worker.agent.lookup("old", before).tokens == 0
    assert worker.loads.look_up("new", hashes) == []
    worker.save(hashes)
    assert found(worker, "again", hashes) == [1, 2, 3]
