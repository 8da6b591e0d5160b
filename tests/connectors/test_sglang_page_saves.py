"""Pages are saved while a batch computes them, once each. Their node has ended when nothing reads them any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from e2e.known import eventually
from sglang_fakes import PAGE, PoolWorker, crawl, layout, page_hashes
from test_sglang_saves import HandMadeAgent

from layerflow.connectors.sglang.batch_saves import BatchSaves
from layerflow.connectors.sglang.layout import KV, MAMBA, SWA
from layerflow.connectors.sglang.page_saves import ComputedPages, PageSaves
from layerflow.connectors.sglang.saves import Saves
from layerflow.server import EmbeddedServer

Embed = Callable[..., EmbeddedServer]
Workers = Callable[..., PoolWorker]
Slots = dict[str, np.ndarray]
KINDS = ["mha", "mla", "one-head", "swa", "hybrid", "hybrid-mla", "mha-draft"]
SLOW_GBPS = 5e-6
"""As it is, a node of two pages takes 0.3 s."""


@pytest.fixture
def workers() -> Iterator[Workers]:
    with ExitStack() as closed:
        yield lambda server, *args, **more: closed.enter_context(PoolWorker(server, *args, **more))


def of(request: str, hashes: Sequence[str], slots: Slots, *, loads: bool = False) -> ComputedPages:
    return ComputedPages(request, hashes, slots[KV], loads)


def begin(worker: PoolWorker, *parts: tuple[ComputedPages, Slots]) -> None:
    """A forward pass over requests, each of which makes these pages whole, up to its last layer."""
    worker.pages.begin([pages for pages, _ in parts])
    for pages, slots in parts:
        worker.compute(pages.hashes, slots)
    for layer in range(worker.agent.spec.num_layers):
        worker.batches.layer_done(layer)


def run(worker: PoolWorker, *parts: tuple[ComputedPages, Slots]) -> None:
    """The same to its end."""
    begin(worker, *parts)
    worker.pages.end()


def saved_bytes(worker: PoolWorker) -> int:
    return worker.agent.statistics().saved_bytes


def bytes_of(worker: PoolWorker, slots: Slots) -> int:
    """What a node of these slots has in all layers."""
    total = 0
    for number, group in enumerate(worker.layout.groups):
        rows = len(slots.get(group.pool, ())) // (PAGE if group.blocks_are_pages else 1)
        total += rows * worker.agent.spec.groups[number].bytes_per_block * len(worker.agent.spec.groups[number].layers)
    return total


def taken(worker: PoolWorker) -> bool:
    assert eventually(lambda: worker.saves.ended() == 1)
    return worker.saves.take()


def check_loaded(reader: PoolWorker, hashes: Sequence[str]) -> None:
    """All of it is hit, and its bytes are those that were computed."""
    assert eventually(lambda: reader.loads.look_up("r", hashes)[-1:] == [len(hashes)] or reader.loads._found.clear())
    slots = reader.slots(len(hashes))
    assert reader.loads.queue("r", len(hashes), slots)
    number = reader.loads.start()
    reader.forward(number)
    assert reader.loads.finish(number), reader.loads.failures
    assert reader.wrong_bytes(hashes, slots) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_whose_pages_are_stored_moves_only_what_they_are_not(embed: Embed, workers: Workers, kind: str) -> None:
    """States, and the pages of windows, come with the node."""
    server = embed()
    worker, reader = workers(server, kind), workers(server, kind, engine="other")
    hashes = page_hashes(4)
    slots = worker.slots(4)
    run(worker, (of("a", hashes, slots), slots))
    assert eventually(lambda: not worker.pages.under_way())
    assert saved_bytes(worker) == bytes_of(worker, {KV: slots[KV]})
    worker.saves.begin(hashes, slots, allowed=True)
    assert taken(worker)
    assert saved_bytes(worker) == bytes_of(worker, slots)
    check_loaded(reader, hashes)


@pytest.mark.parametrize("kind", ["mha", "hybrid", "swa"])
def test_a_node_that_comes_while_its_pages_are_saved_waits_for_them(embed: Embed, workers: Workers, kind: str) -> None:
    server = embed()
    worker, reader = workers(server, kind), workers(server, kind, engine="other")
    hashes = page_hashes(4)
    slots = worker.slots(4)
    begin(worker, (of("a", hashes, slots), slots))
    worker.saves.begin(hashes[:2], {KV: slots[KV][: 2 * PAGE]}, allowed=True)
    worker.saves.begin(hashes[2:], {**slots, KV: slots[KV][2 * PAGE :]}, allowed=True)
    assert worker.saves.ended() == 0
    assert worker.batches.reads
    worker.pages.end()
    assert eventually(lambda: worker.saves.ended() == 2)
    assert not worker.batches.reads
    assert [worker.saves.take(), worker.saves.take()] == [True, True]
    assert saved_bytes(worker) == bytes_of(worker, slots)
    check_loaded(reader, hashes)


def test_what_could_not_be_saved_early_is_saved_with_its_node(embed: Embed, workers: Workers) -> None:
    server = embed()
    worker, reader = workers(server), workers(server, engine="other")
    hashes = page_hashes(4)
    slots = worker.slots(4)
    begin(worker, (of("a", hashes, slots), slots))
    worker.saves.begin(hashes, slots, allowed=True)
    worker.agent.revoke("for a test")
    worker.pages.end()
    assert taken(worker)
    check_loaded(reader, hashes)


@pytest.mark.parametrize("sound", [True, False])
def test_what_is_computed_on_a_load_is_published_once_that_was_in_place(
    embed: Embed, workers: Workers, sound: bool
) -> None:
    server = embed()
    worker, reader = workers(server), workers(server, engine="other")
    loading, other = page_hashes(3, 1), page_hashes(3, 2)
    mine, its = {KV: np.arange(3 * PAGE)}, {KV: np.arange(20 * PAGE, 23 * PAGE)}
    begin(worker, (of("a", loading, mine, loads=True), mine), (of("b", other, its), its))
    worker.pages.end([] if sound else ["a", "b"])
    assert eventually(lambda: not worker.pages.under_way())
    check_loaded(reader, other)
    reader.loads.reset()
    assert len(reader.loads.look_up("later", loading)) == 3 * sound


def test_a_batch_that_was_not_ended_publishes_nothing_that_it_computed_on_a_load(
    embed: Embed, workers: Workers
) -> None:
    server = embed()
    worker = workers(server)
    hashes, slots = page_hashes(3), worker.slots(3)
    worker.pages.begin([of("a", hashes, slots, loads=True)])
    worker.compute(hashes, slots)
    worker.pages.begin([])
    assert not worker.batches.running
    assert eventually(lambda: not worker.pages.under_way())
    assert worker.loads.look_up("later", hashes) == []


def test_a_page_that_two_requests_compute_is_saved_once(embed: Embed, workers: Workers) -> None:
    """In one batch, or while the first one's is under way; of what both compute only the rest is."""
    server = embed(pool__link_gbps=0.2)
    worker, reader = workers(server), workers(server, engine="other")
    crawl(worker.agent, server, gbps=SLOW_GBPS)
    hashes = page_hashes(3)
    short = {KV: np.arange(2 * PAGE)}
    two, three = ({KV: np.arange(at * PAGE, (at + 3) * PAGE)} for at in (8, 16))
    run(worker, (of("a", hashes[:2], short), short), (of("b", hashes, two), two))
    assert len(worker.pages.under_way(hashes)) == 2
    assert len(worker.pages.under_way(hashes[:2])) == 1
    run(worker, (of("c", hashes, three), three))
    assert len(worker.pages.under_way()) == 2, "nothing was begun"
    assert eventually(lambda: not worker.pages.under_way())
    assert saved_bytes(worker) == bytes_of(worker, two)
    check_loaded(reader, hashes)


def test_pages_that_are_freed_are_read_to_the_end_before(embed: Embed, workers: Workers) -> None:
    """Their request was aborted, or has finished; or another one's stand in the cache instead."""
    server = embed(pool__link_gbps=0.2)
    worker, reader = workers(server), workers(server, engine="other")
    crawl(worker.agent, server, gbps=SLOW_GBPS)
    hashes = page_hashes(2)
    slots = {KV: np.arange(3 * PAGE, 5 * PAGE)}
    run(worker, (of("a", hashes, slots), slots))
    assert worker.batches.reads
    assert worker.batches.let_go([torch.tensor([7, 8])]) == 0, "of others nothing is waited for"
    assert worker.batches.reads
    assert worker.batches.let_go([torch.tensor([3]), torch.tensor([4])]) == 0
    for tensors in worker.layout.tensors.values():
        for tensor in tensors.values():
            tensor[3 * PAGE : 5 * PAGE] = 0
    check_loaded(reader, hashes)


def test_a_save_that_does_not_end_is_cut_off_where_its_pages_are_freed(
    embed: Embed, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed(pool__link_gbps=0.2)
    worker = workers(server)
    monkeypatch.setattr(worker.batches, "_drain_s", 0.01)
    crawl(worker.agent, server)
    hashes, slots = page_hashes(8), {KV: np.arange(8 * PAGE)}
    run(worker, (of("a", hashes, slots), slots))
    assert worker.batches.let_go([torch.tensor([5])]) == 1
    assert worker.loads.look_up("later", hashes) == []


def test_a_flush_waits_for_pages_too(embed: Embed, workers: Workers) -> None:
    server = embed(pool__link_gbps=0.2)
    worker, reader = workers(server), workers(server, engine="other")
    crawl(worker.agent, server, gbps=SLOW_GBPS)
    hashes, slots = page_hashes(2), worker.slots(2)
    run(worker, (of("a", hashes, slots), slots))
    worker.saves.reset()
    assert not worker.pages.under_way()
    assert worker.saves.ended() == 0
    check_loaded(reader, hashes)


def test_a_server_that_is_lost_unlocks_the_nodes_that_wait_for_their_pages(embed: Embed, workers: Workers) -> None:
    server = embed(pool__link_gbps=0.2)
    worker = workers(server)
    crawl(worker.agent, server)
    hashes, slots = page_hashes(4), worker.slots(4)
    run(worker, (of("a", hashes, slots), slots))
    worker.saves.begin(hashes, slots, allowed=True)
    assert worker.saves.ended() == 0
    server.close()
    assert not taken(worker)
    assert not worker.batches.reads
    run(worker, (of("b", hashes, slots), slots))
    assert not worker.batches.reads


class StepByStepAgent(HandMadeAgent):
    """One that takes steps of several requests, and says which layers of each were told of."""

    def open_step(self, requests: list[Any]) -> Any:
        steps = [super(StepByStepAgent, self).open_step([request]) for request in requests]
        return steps[0]


def test_nodes_are_opened_behind_their_pages_and_told_in_their_order() -> None:
    agent, shape = StepByStepAgent(), layout("mha")
    batches = BatchSaves(agent, shape, written=lambda: None, passed=lambda: None)  # type: ignore[arg-type]
    pages = PageSaves(agent, shape, batches)  # type: ignore[arg-type]
    saves = Saves(agent, shape, pages, written=lambda: None)  # type: ignore[arg-type]
    slots = {KV: np.arange(2 * PAGE)}
    pages.begin([of("a", ["a", "b"], slots), of("c", ["c", "d"], slots)])
    batches._steps.clear()  # they are the agent's business here
    assert agent.reading == ["pages-0", "pages-1"]
    saves.begin(["a", "b"], slots, allowed=True)
    saves.begin(["x", "y"], slots, allowed=True)
    saves.begin(["d", "e"], slots, allowed=True)
    assert agent.reading == ["pages-0", "pages-1", "node-1"]
    agent.reading.remove("node-1")
    assert saves.ended() == 0, "the first one is not even opened"
    agent.reading.remove("pages-0")
    agent.failed.append(("pages-0", "for a test"))
    assert saves.ended() == 0
    assert agent.reading == ["pages-1", "node-0"]
    agent.reading.remove("node-0")
    assert saves.ended() == 2
    assert [saves.take(), saves.take()] == [True, True], "what failed early was saved with the node"
    agent.reading.remove("pages-1")
    assert saves.ended() == 0
    agent.reading.remove("node-2")
    agent.failed.append(("node-2", "for a test"))
    assert saves.ended() == 1
    assert not saves.take()
    assert not saves._failed


def test_a_windows_pages_and_states_are_no_pages_of_full_attention() -> None:
    agent, shape = HandMadeAgent(), layout("swa")
    agent.spec = shape.spec
    asked: list[Any] = []
    agent.open_step = asked.extend  # type: ignore[assignment,method-assign]
    batches = BatchSaves(agent, shape, written=lambda: None, passed=lambda: None)  # type: ignore[arg-type]
    PageSaves(agent, shape, batches).begin([of("a", ["a", "b"], {KV: np.arange(2 * PAGE)})])  # type: ignore[arg-type]
    tables = dict(zip([group.pool for group in shape.groups], asked[0].blocks, strict=True))
    assert tables[KV].tolist() == list(range(2 * PAGE))
    assert (tables[SWA] == -1).all()
    assert MAMBA not in tables
