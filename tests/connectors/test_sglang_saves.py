"""Saves of SGLang's nodes are reported in the order in which they were begun, and each of them is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from e2e.known import eventually
from hypothesis import given
from hypothesis import strategies as st
from sglang_fakes import PAGE, PoolWorker, crawl, layout, page_hashes

from layerflow.agent.step.step import NO_STEP
from layerflow.agent.values import Ended
from layerflow.connectors.sglang import saves as module
from layerflow.connectors.sglang.batch_saves import BatchSaves
from layerflow.connectors.sglang.layout import KV
from layerflow.connectors.sglang.page_saves import PageSaves
from layerflow.connectors.sglang.saves import Saves
from layerflow.keys import HashedChain
from layerflow.server import EmbeddedServer

Embed = Callable[..., EmbeddedServer]
Workers = Callable[..., PoolWorker]


@pytest.fixture
def workers() -> Iterator[Workers]:
    with ExitStack() as closed:
        yield lambda server, *args, **more: closed.enter_context(PoolWorker(server, *args, **more))


class HandMadeAgent:
    """An agent whose saves end when a test says so."""

    attached = True

    def __init__(self) -> None:
        self.spec = layout("mha").spec
        self.reading: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.layers: dict[str, list[int]] = {}
        self.refuses = self.silent = False

    def hashed_chain(self, hashes: list[bytes]) -> HashedChain:
        return HashedChain(bytes(16), hashes, PAGE)

    def open_step(self, requests: list[Any]) -> Any:
        if self.refuses:
            raise RuntimeError("no room for a step")
        if self.silent:
            return NO_STEP
        (request,) = requests
        self.reading.append(request.request)
        self.layers[request.request] = []
        return HandMadeStep(self.layers[request.request])

    def busy(self, name: str) -> bool:
        return name in self.reading

    def poll(self) -> Ended:
        failed, self.failed = self.failed, []
        return Ended(failed_saves=tuple(failed))


class HandMadeStep:
    """Notes the layers that are done."""

    def __init__(self, done: list[int]) -> None:
        self._done = done

    def __enter__(self) -> HandMadeStep:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def layer_done(self, layer: int, event: object) -> None:
        self._done.append(layer)


def saves_of(agent: Any) -> Saves:
    shape = layout("mha")
    batches = BatchSaves(agent, shape, written=lambda: None, passed=lambda: None)
    return Saves(agent, shape, PageSaves(agent, shape, batches), written=lambda: None)


SLOTS = {KV: np.arange(2 * PAGE)}
BEGUN, REFUSED, RAISING = "begun", "refused", "raising"


@given(
    st.lists(
        st.one_of(
            st.sampled_from([BEGUN, REFUSED, RAISING]), st.tuples(st.booleans(), st.integers(0, 30)), st.just("take")
        ),
        max_size=40,
    )
)
def test_saves_are_told_in_their_order_whichever_ends_first(moves: list[Any]) -> None:
    """A model beside it: what has begun, and how each has ended; None = it has not."""
    agent = HandMadeAgent()
    saves = saves_of(agent)
    waiting: deque[tuple[str, bool | None]] = deque()
    for move in moves:
        if move in (BEGUN, REFUSED, RAISING):
            agent.refuses = move == RAISING
            saves.begin(["a", "b"], SLOTS, allowed=move != REFUSED)
            waiting.append((agent.reading[-1], None) if move == BEGUN else ("", False))
        elif move == "take":
            if saves.ended():
                assert saves.take() == waiting.popleft()[1]
        elif agent.reading:
            stored, which = move
            name = agent.reading.pop(which % len(agent.reading))
            if not stored:
                agent.failed.append((name, "for a test"))
            waiting = deque((each, stored if each == name else ended) for each, ended in waiting)
        leading = 0
        while leading < len(waiting) and waiting[leading][1] is not None:
            leading += 1
        assert saves.ended() == leading


def test_every_layer_of_a_node_leaves_with_it() -> None:
    agent = HandMadeAgent()
    saves = saves_of(agent)
    saves.begin(["a", "b"], SLOTS, allowed=True)
    assert list(agent.layers.values()) == [[0, 1, 2]]


def test_nodes_are_stored_in_their_order(embed: Embed, workers: Workers) -> None:
    worker = workers(embed())
    for seed in range(4):
        slots = worker.slots(3)
        worker.compute(page_hashes(3, seed), slots)
        worker.saves.begin(page_hashes(3, seed), slots, allowed=seed != 2)
    assert eventually(lambda: worker.saves.ended() == 4)
    assert [worker.saves.take() for _ in range(4)] == [True, True, False, True]
    assert worker.saves.ended() == 0


def test_a_node_without_a_state_is_stored_and_no_hit_ends_there(embed: Embed, workers: Workers) -> None:
    """SGLang splits nodes: the first part keeps no state."""
    server = embed()
    worker = workers(server, "hybrid")
    hashes = page_hashes(4)
    slots = worker.slots(4)
    worker.compute(hashes, slots)
    worker.saves.begin(hashes[:2], {KV: slots[KV][: 2 * PAGE]}, allowed=True)
    worker.saves.begin(hashes[2:], {KV: slots[KV][2 * PAGE :], "mamba": slots["mamba"]}, allowed=True)
    assert eventually(lambda: worker.saves.ended() == 2)
    assert [worker.saves.take(), worker.saves.take()] == [True, True]
    other = workers(server, "hybrid", engine="other")
    assert eventually(lambda: other.loads.look_up("whole", hashes) == [4] or other.loads._found.clear())
    assert other.loads.look_up("first", hashes[:2]) == []


def test_a_node_that_cannot_be_read_fails_in_its_turn(embed: Embed, workers: Workers) -> None:
    worker = workers(embed())
    worker.saves.begin(page_hashes(2), {KV: np.arange(10_000, 10_000 + 2 * PAGE)}, allowed=True)
    assert worker.saves.ended() == 1
    assert not worker.saves.take()


def test_without_a_server_nodes_fail_at_once(embed: Embed, workers: Workers) -> None:
    server = embed()
    worker = workers(server)
    server.close()
    assert eventually(lambda: not worker.agent.attached)
    worker.saves.begin(page_hashes(2), worker.slots(2), allowed=True)
    assert worker.saves.ended() == 1
    assert not worker.saves.take()


def test_a_node_without_room_is_not_stored(embed: Embed, workers: Workers) -> None:
    server = embed(pool__size="64KiB")
    worker = workers(server)
    pool = server.server.pool
    told = []
    for seed in range(40):  # of 4 pages, some 3 KiB
        worker.saves.begin(page_hashes(4, seed), worker.slots(4), allowed=True)
        assert eventually(lambda: worker.saves.ended() == 1)
        told.append(worker.saves.take())
        server.call(lambda: pool.hold(pool.keys(), "a test", math.inf))
    stored = [len(worker.loads.look_up(f"r{seed}", page_hashes(4, seed))) == 4 for seed in range(40)]
    assert told == stored
    assert told[0] and not told[-1]


def test_while_the_server_is_silent_nodes_fail_at_once() -> None:
    agent = HandMadeAgent()
    agent.silent = True
    saves = saves_of(agent)
    saves.begin(["a", "b"], SLOTS, allowed=True)
    assert saves.ended() == 1
    assert not saves.take()


def test_a_server_that_is_lost_unlocks_every_node(embed: Embed, workers: Workers) -> None:
    server = embed(pool__link_gbps=0.2)
    worker = workers(server)
    crawl(worker.agent, server)
    for seed in range(3):
        worker.saves.begin(page_hashes(8, seed), worker.slots(8), allowed=True)
    assert worker.saves.ended() == 0
    server.close()
    assert eventually(lambda: worker.saves.ended() == 3)
    assert [worker.saves.take() for _ in range(3)] == [False] * 3


def test_a_flush_cuts_off_what_still_reads_and_forgets_all(
    embed: Embed, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.05)
    server = embed(pool__link_gbps=0.2)
    worker = workers(server)
    crawl(worker.agent, server)
    hashes = page_hashes(8)
    worker.saves.begin(hashes, worker.slots(8), allowed=True)
    worker.saves.begin(hashes, worker.slots(8), allowed=False)
    worker.saves.reset()
    assert worker.saves.ended() == 0
    assert worker.loads.look_up("r", hashes) == []


def test_a_flush_waits_for_what_ends_soon(embed: Embed, workers: Workers) -> None:
    worker = workers(embed())
    hashes = page_hashes(3)
    slots = worker.slots(3)
    worker.compute(hashes, slots)
    worker.saves.begin(hashes, slots, allowed=True)
    worker.saves.reset()
    assert worker.saves.ended() == 0
    assert eventually(lambda: worker.loads.look_up("r", hashes) == [1, 2, 3] or worker.loads._found.clear())
