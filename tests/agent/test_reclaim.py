"""Blocks that an engine recycles while saves read them: waited for, or cut off; never published from other bytes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from e2e.known import KnownWorker, Run, eventually, small_spec, step_of

from layerflow.agent import Step
from layerflow.agent.descriptors import describe_saves, number_blocks
from layerflow.agent.step.transfers import LOAD, SAVE, PendingReads
from layerflow.agent.values import StepRequest
from layerflow.errors import SpecError
from layerflow.keys import Chain
from layerflow.places import NOWHERE
from layerflow.server import EmbeddedServer
from layerflow.wire.messages import Batch, PlanPart
from layerflow.wire.packing import pack_u64

Embed = Callable[..., EmbeddedServer]
LONG_S = 20.0
OVERWRITTEN = 0x77


class Gate:
    """Holds a lane inside its next copy until opened."""

    def __init__(self, worker: KnownWorker, direction: int = SAVE) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        self._copier: Any = worker.agent._dispatcher.access.copiers[direction]  # type: ignore[union-attr]
        name = "save" if direction == SAVE else "load"
        self._calls = {called: getattr(self._copier, called) for called in (name, f"{name}_batches")}
        for called, copy in self._calls.items():
            setattr(self._copier, called, functools.partial(self._held, copy))

    def _held(self, copy: Callable[..., Any], *arguments: Any) -> Any:
        self.entered.set()
        assert self._open.wait(LONG_S)
        return copy(*arguments)

    def open(self) -> None:
        self._open.set()
        for called, copy in self._calls.items():
            setattr(self._copier, called, copy)


@pytest.fixture
def worker(embed: Embed) -> KnownWorker:
    server = embed()
    return KnownWorker(server.endpoint, context=server.context)


def computed(worker: KnownWorker, run: Run) -> Step:
    """A closed step whose saves are under way."""
    step = step_of(worker.agent.open_step([run.request()]))
    with step:
        worker.forward(step, [run])
    return step


def reclaiming(worker: KnownWorker, run: Run, timeout_s: float) -> tuple[threading.Thread, list[int]]:
    """Take a request's blocks back on another thread, and overwrite them."""
    cut: list[int] = []

    def reclaim() -> None:
        cut.append(worker.agent.reclaim(run.tables, timeout_s))
        overwrite(worker, run)

    thread = threading.Thread(target=reclaim)
    thread.start()
    return thread, cut


def overwrite(worker: KnownWorker, run: Run) -> None:
    for layer in range(worker.spec.num_layers):
        worker.fill(run, layer, range(len(run.tables[0])), OVERWRITTEN)


def test_saves_that_end_in_time_are_waited_for(worker: KnownWorker) -> None:
    run, gate = worker.admit(worker.prompt(60)), Gate(worker)
    computed(worker, run)
    assert gate.entered.wait(LONG_S)
    thread, cut = reclaiming(worker, run, LONG_S)
    thread.join(0.05)
    assert thread.is_alive(), "blocks were handed out while a save read them"
    assert worker.agent.saving(run.name)
    gate.open()
    thread.join(LONG_S)
    assert cut == [0]
    assert worker.agent.wait_idle(run.name, LONG_S)
    assert not worker.agent.saving(run.name)
    assert worker.serve(run.chain).hit.tokens == 59
    worker.agent.close()


def test_a_save_in_mid_copy_ends_first_and_nothing_of_it_is_published(worker: KnownWorker) -> None:
    run, gate = worker.admit(worker.prompt(60)), Gate(worker)
    step = computed(worker, run)
    assert gate.entered.wait(LONG_S)
    thread, cut = reclaiming(worker, run, 0.0)
    assert eventually(lambda: step.saves_cancelled)
    thread.join(0.05)
    assert thread.is_alive(), "blocks were handed out while a save read them"
    gate.open()
    thread.join(LONG_S)
    assert cut == [1]
    assert worker.agent.wait_idle(run.name, LONG_S)
    assert not worker.agent.saving(run.name)
    assert run.name in dict(worker.agent.poll().failed_saves)
    assert worker.serve(run.chain).hit.tokens == 0, "half of it was stored from overwritten blocks"
    worker.agent.close()


def test_only_what_waits_behind_another_step_is_cut_off(worker: KnownWorker) -> None:
    first, second = worker.admit(worker.prompt(60)), worker.admit(worker.prompt(60))
    gate = Gate(worker)
    computed(worker, first)
    assert gate.entered.wait(LONG_S)
    computed(worker, second)
    assert worker.agent.reclaim(second.tables, 0.0) == 1, "nothing of it was being copied: it is cut off at once"
    overwrite(worker, second)
    assert worker.agent.saving(first.name)
    assert worker.agent.reclaim(second.tables, 0.0) == 0, "it is cut off once"
    gate.open()
    for run, hit in ((first, 59), (second, 0)):
        assert worker.agent.wait_idle(run.name, LONG_S)
        assert worker.serve(run.chain).hit.tokens == hit
    worker.agent.close()


def test_a_step_that_still_computes_is_not_waited_for(worker: KnownWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    run = worker.admit(worker.prompt(60))
    step = step_of(worker.agent.open_step([run.request()]))
    monkeypatch.setattr(step.reads, "wait", lambda *_: pytest.fail("waited for a layer that the caller computes"))
    worker.compute(run, 0, 0, 60)
    step.layer_done(0)
    assert worker.agent.reclaim(run.tables, LONG_S) == 1
    overwrite(worker, run)
    for layer in range(1, worker.spec.num_layers):
        step.layer_done(layer)
    step.close()
    assert worker.agent.wait_idle(run.name, LONG_S)
    assert worker.serve(run.chain).hit.tokens == 0
    worker.agent.close()


def test_other_blocks_and_ended_saves_are_nobodys_concern(worker: KnownWorker) -> None:
    run, gate = worker.admit(worker.prompt(60)), Gate(worker)
    others = np.setdiff1d(np.arange(worker.blocks), run.tables[0])
    assert worker.agent.reclaim([np.arange(worker.blocks)], LONG_S) == 0
    computed(worker, run)
    assert gate.entered.wait(LONG_S)
    assert worker.agent.reclaim([others], 0.0) == 0
    gate.open()
    assert worker.agent.wait_idle(run.name, LONG_S)
    assert worker.agent.reclaim([np.arange(worker.blocks)], 0.0) == 0
    assert worker.serve(run.chain).hit.tokens == 59
    worker.agent.close()


def test_what_was_read_is_not_cut_off_while_its_commit_waits(worker: KnownWorker) -> None:
    """An earlier step still loads for the request, so nothing of it is published yet; its saves have been read."""
    stored = worker.prompt(32)
    worker.serve(stored)
    run = worker.admit(worker.prompt(60, like=stored, shared=32))
    gate = Gate(worker, LOAD)
    loading = step_of(worker.agent.open_step([run.request(save=False)]))
    assert gate.entered.wait(LONG_S)
    with worker.agent.open_step([replace(run.request(), load=(0, 0))]) as step:
        for layer in range(worker.spec.num_layers):
            worker.compute(run, layer, 32, 60)
            step.layer_done(layer)
    assert eventually(lambda: not worker.agent.saving(run.name))
    assert worker.agent.busy(run.name)
    fresh = range(8, 15)  # the hit's blocks are still being loaded into
    assert worker.agent.reclaim([run.tables[0][list(fresh)]], 0.0) == 0
    for layer in range(worker.spec.num_layers):
        worker.fill(run, layer, fresh, OVERWRITTEN)
    gate.open()
    assert loading.wait_all()
    loading.close()
    assert worker.agent.wait_idle(run.name, LONG_S)
    assert worker.serve(run.chain).hit.tokens == 59
    worker.agent.close()


def test_what_the_server_gave_up_is_not_read(embed: Embed) -> None:
    server = embed(transfer__save_backlog_bytes=1)
    with KnownWorker(server.endpoint, context=server.context) as worker:
        run = worker.admit(worker.prompt(60))
        with worker.agent.open_step([run.request()]) as step:
            assert eventually(lambda: worker.agent.poll().shed)
            assert worker.agent.busy(run.name)
            assert not worker.agent.saving(run.name)
            assert worker.agent.reclaim(run.tables, 0.0) == 0
            worker.forward(step, [run])


def test_loads_are_no_saves(worker: KnownWorker) -> None:
    chain = worker.prompt(60)
    worker.serve(chain)
    run = worker.admit(chain)
    with worker.agent.open_step([run.request(save=False)]) as step:
        assert worker.agent.busy(run.name)
        assert not worker.agent.saving(run.name)
        assert worker.agent.reclaim(run.tables, 0.0) == 0
        assert worker.forward(step, [run]) == 0
    assert not run.failed
    worker.agent.close()


@pytest.mark.parametrize(("blocks", "timeout_s"), [(0, 1.0), (2, 1.0), (1, -1.0), (1, float("nan"))])
def test_what_cannot_be_reclaimed(worker: KnownWorker, blocks: int, timeout_s: float) -> None:
    with pytest.raises(SpecError, match=r"reclaimed|timeout_s"):
        worker.agent.reclaim([np.arange(3)] * blocks, timeout_s)
    worker.agent.close()


# -- what is still to be read, by hand ----------------------------------------------------------------

SPEC = small_spec(4, window=5)  # layers 0 and 2 are full attention, 1 and 3 sliding
LAYERS = [group for group, _ in SPEC.layer_places()]
WHOLE = [group.bytes_per_block for group in SPEC.groups]


class Saves:
    """Two requests of two chunks; the second one's first chunk gets no room."""

    def __init__(self, planned: bool = True) -> None:
        requests = [
            StepRequest(name, Chain(b"r" * 16, np.arange(32) + at, 16), (base, base + 50), save=(0, 32))
            for at, (name, base) in enumerate({"a": np.arange(8), "b": np.arange(8) + 20}.items())
        ]
        parts = describe_saves(SPEC, requests, partial=False)
        self.reads = PendingReads(parts, LAYERS, WHOLE)
        plans = [
            PlanPart(pack_u64([NOWHERE if part.request == "b" else 0, 4096]), b"") for part in parts
        ]  # parts: a full, a sliding, b full, b sliding
        self.numbered = number_blocks(parts, plans, loading=False)
        if planned:
            self.reads.number(self.numbered)

    def batch(self, layer: int, lo: int, hi: int, byte_lo: int = 0, byte_hi: int = 0) -> None:
        self.reads.ended(Batch(1, 1, SAVE, layer, lo, hi, byte_lo, byte_hi, 1, -1, True))

    def full(self, *blocks: int) -> bool:
        return self.reads.any_of([np.array(blocks, dtype=np.int64), np.array([], dtype=np.int64)])

    def sliding(self, *blocks: int) -> bool:
        return self.reads.any_of([np.array([], dtype=np.int64), np.array(blocks, dtype=np.int64)])


def test_before_the_plan_every_block_counts() -> None:
    saves = Saves(planned=False)
    assert saves.full(0) and saves.full(20)
    assert not saves.full(8) and not saves.sliding(0)
    assert saves.sliding(53) and not saves.sliding(51), "a sliding group keeps only its window"
    assert saves.reads.of("a") and saves.reads.of("b") and not saves.reads.of("c")


def test_a_block_is_read_when_every_layer_of_its_group_is() -> None:
    saves = Saves()
    assert not saves.full(20) and saves.full(24), "an object without room is not read"
    count = len(saves.numbered[0].numbers)
    saves.batch(0, 0, count)
    assert saves.full(0)
    saves.batch(2, 0, 8)
    assert not saves.full(*range(8)) and saves.full(24)
    saves.batch(2, 8, 9, 0, 10)
    assert saves.full(24)
    saves.batch(2, 8, 9, 10, WHOLE[0])
    assert not saves.full(24) and saves.full(25)
    assert saves.reads.of("a") and saves.sliding(53), "the sliding group has not moved yet"
    for layer in (1, 3):
        saves.batch(layer, 0, len(saves.numbered[1].numbers))
    assert not saves.reads.of("a") and saves.reads.of("b")


def test_what_was_given_up_is_not_read() -> None:
    saves = Saves()
    saves.reads.settled([0, 1])
    assert not saves.reads.of("a") and saves.reads.of("b")
    waited: list[bool] = []
    everything = [np.arange(100), np.arange(100)]
    thread = threading.Thread(target=lambda: waited.append(saves.reads.wait(everything, time.monotonic() + LONG_S)))
    thread.start()
    thread.join(0.02)
    assert thread.is_alive()
    saves.reads.stop()
    thread.join(LONG_S)
    assert waited == [True]
    assert not saves.reads.of("b")
    saves.batch(0, 0, 4)  # a report that comes late changes nothing
    assert not saves.full(*range(100))


def test_taking_back_blocks_of_a_step_without_a_plan(worker: KnownWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has not answered yet: whatever it will grant is cut off."""
    run = worker.admit(worker.prompt(60))
    held: list[object] = []
    original = worker.agent._dispatcher._planned
    monkeypatch.setattr(worker.agent._dispatcher, "_planned", held.append)
    step = step_of(worker.agent.open_step([replace(run.request(), load=(0, 0))]))
    assert eventually(lambda: held)
    assert worker.agent.reclaim(run.tables, 0.0) == 1
    original(held[0])  # type: ignore[arg-type]
    step.close()
    assert worker.agent.wait_idle(run.name, LONG_S)
    assert worker.serve(run.chain).hit.tokens == 0
    worker.agent.close()


@pytest.mark.parametrize("ask", ["wait_idle", "reclaim"])
def test_who_waits_for_saves_does_not_wait_for_a_pause_of_the_engine(
    worker: KnownWorker, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    monkeypatch.setattr("layerflow.agent.lanes.save.FAST_LAYER_S", LONG_S * 10)  # nothing leaves by itself
    run = worker.admit(worker.prompt(60))
    computed(worker, run)
    if ask == "wait_idle":
        assert worker.agent.wait_idle(run.name, LONG_S)
    else:
        assert worker.agent.reclaim(run.tables, LONG_S) == 0
        assert eventually(lambda: not worker.agent.busy(run.name))
    assert worker.serve(run.chain).hit.tokens == 59
    worker.agent.close()
