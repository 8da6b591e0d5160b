"""Hits of several cache groups of which all, or some, or nothing lies in the arena, and the rest behind it.

One group is a draft model's: no hit needs it, and a plan has it where it can be loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e.known import KnownWorker, Run, eventually, small_spec
from e2e.stopping import stopped
from msgspec.structs import replace

from layerflow.agent import Control
from layerflow.agent.lookups import Lookups
from layerflow.keys import Chain, object_key
from layerflow.server import EmbeddedServer
from layerflow.spec import GroupSpec, ModelSpec, Shard
from server.support import Embed, observe, worker_on

BLOCK, CHUNK, WINDOW = 4, 16, 20
FULL, SLIDING, DRAFT = 0, 1, 2
PATIENCE_S = 30.0
PATIENT = {"transfer__step_timeout_ms": 60_000, "pool__lookup_timeout_ms": 10_000, "pool__lease_ms": 60_000}


def spec_of(rank: int = 0, ranks: int = 1) -> ModelSpec:
    """A full and a sliding group, and a sliding one of a draft model's one layer."""
    own = small_spec(4, BLOCK, CHUNK, row=8, window=WINDOW)
    draft = GroupSpec("sliding", BLOCK, (4,), own.groups[SLIDING].planes, WINDOW)
    return replace(own, groups=(*own.groups, draft), shard=Shard(rank, ranks, drafts=("", "", "draft")))


class World:
    """Workers of such a model, one per rank, over an arena with a disk behind it."""

    def __init__(self, server: EmbeddedServer, workers: Sequence[KnownWorker], control: Control) -> None:
        self.server = server
        self.workers = workers
        self.worker = workers[0]
        self._control = control

    def stored(self, tokens: int, like: Chain | None = None, shared: int = 0) -> Chain:
        """A prompt that all ranks have stored, in the arena and on the disk."""
        chain = self.worker.prompt(tokens, like, shared)
        for worker in self.workers:
            worker.serve(worker.agent.chain(chain.tokens), look=False)
        assert eventually(lambda: self._tier["written_objects"] and not self._tier["backlog_bytes"], PATIENCE_S)
        return chain

    def only_on_disk(self, digests: Sequence[bytes], group: int, rank: int = 0) -> None:
        """These chunks' objects leave the arena."""
        keys = [object_key(digest, group, self.workers[rank].spec.shard) for digest in digests]
        assert self.server.call(lambda: self.server.server.pool.hide(keys)) == len(keys)

    def empty_arena(self) -> None:
        """All that is stored is left on the disk alone."""
        self._control.purge()

    def run(self, chain: Chain) -> Run:
        """Look the prompt up; nothing comes from the disk before there is an answer."""
        with stopped(self._tier["host"]["pid"]):
            return self.worker.admit(chain)

    def load(self, run: Run) -> bool:
        """Load and check it; did it begin without asking the server?

        :raises AssertionError: a wrong byte, or a block that failed.
        """
        with self.worker.agent.open_step([run.request(save=False)], PATIENCE_S) as step:
            begun = step.residents is not None  # type: ignore[union-attr]
            assert self.worker.forward(step, [run]) == 0
            assert not run.failed
        assert self.worker.agent.wait_idle(run.name, PATIENCE_S)
        return begun

    def come(self) -> bool:
        """Nothing is on its way into the arena any more."""
        return eventually(lambda: not self._tier["fetching_jobs"], PATIENCE_S)

    @property
    def pinned(self) -> int:
        found: int = self.server.call(lambda: self.server.server.pool.statistics().pinned)  # type: ignore[assignment]
        return found

    @property
    def _tier(self) -> dict[str, Any]:
        found: dict[str, Any] = self._control.status()["tier"]
        return found


def planned(run: Run, tokens: int) -> bool:
    """Is there a plan for its hit?

    :raises AssertionError: it is one of other than `tokens` tokens, or without the draft model's layer.
    """
    assert (run.hit.tokens, run.hit.drafts) == (tokens, True)
    return run.hit.plan is not None


def load_twice(world: World, chain: Chain, tokens: int, *, placed: bool) -> None:
    """Load a hit, of which at first all or not all is `placed`; what was brought is there for the next one."""
    run = world.run(chain)
    assert planned(run, tokens) is placed
    assert world.load(run) is placed
    assert world.come()
    again = world.run(chain)
    assert planned(again, tokens)
    assert world.load(again)


@contextmanager
def worlds(embed: Embed, folder: Path, ranks: int = 1) -> Iterator[World]:
    server = embed(**PATIENT, pool__disk={"path": str(folder)})
    workers = []
    try:
        for rank in range(ranks):
            workers.append(worker_on(server, spec=spec_of(rank, ranks), blocks=512, lookup_timeout_s=PATIENCE_S))
        with closing(observe(server)) as control:
            assert eventually(lambda: control.status()["tier"]["up"], PATIENCE_S)
            yield World(server, workers, control)
    finally:
        for worker in workers:
            worker.agent.close()


@pytest.fixture
def world(embed: Embed, tmp_path: Path) -> Iterator[World]:
    with worlds(embed, tmp_path / "tier") as one:
        yield one


def test_what_every_group_needs_is_in_the_arena(world: World) -> None:
    run = world.run(world.stored(10 * CHUNK + 3))
    assert planned(run, 10 * CHUNK + 2)
    assert world.load(run)


def test_nothing_is_in_the_arena(world: World) -> None:
    chain = world.stored(10 * CHUNK + 3)
    world.empty_arena()
    run = world.run(chain)
    assert not planned(run, 10 * CHUNK + 2)
    assert not world.load(run)


def test_what_the_window_has_passed_is_not_needed(world: World) -> None:
    """A load brings what it reads; the next hit lies in the arena, and its sliding group's first chunks do not."""
    chain = world.stored(10 * CHUNK + 3)
    world.empty_arena()
    world.load(world.run(chain))
    run = world.run(chain)
    assert planned(run, 10 * CHUNK + 2)
    assert world.load(run)


@pytest.mark.parametrize(
    ("group", "chunk", "needed"),
    [
        (FULL, 0, True), (FULL, 9, True), (SLIDING, 9, True), (SLIDING, 8, True), (SLIDING, 7, False),
        (DRAFT, 9, True), (DRAFT, 8, True), (DRAFT, 7, False),
    ],
)  # fmt: skip
def test_one_object_is_behind_the_arena(world: World, group: int, chunk: int, needed: bool) -> None:
    chain = world.stored(10 * CHUNK + 1)
    world.only_on_disk([chain.digests[chunk]], group)
    load_twice(world, chain, 10 * CHUNK, placed=not needed)


def test_the_arena_has_only_the_beginning(world: World) -> None:
    chain = world.stored(10 * CHUNK + 1)
    world.empty_arena()
    world.load(world.run(world.worker.prompt(4 * CHUNK + 1, chain, 4 * CHUNK)))
    run = world.run(chain)
    assert not planned(run, 10 * CHUNK)
    assert not world.load(run)


@pytest.mark.parametrize("group", [FULL, SLIDING, DRAFT])
def test_the_end_that_the_prompt_goes_on_with_is_behind_the_arena(world: World, group: int) -> None:
    chain = world.stored(4 * CHUNK + 6)
    world.only_on_disk([chain.tail], group)
    run = world.run(chain)
    assert not planned(run, 4 * CHUNK + 5)
    assert world.pinned == 14, "what is in the arena is leased all the same"
    assert not world.load(run)


def test_what_a_lookup_leases_of_such_a_hit_goes_with_its_request(world: World) -> None:
    chain = world.stored(4 * CHUNK + 6)
    world.only_on_disk([chain.tail], FULL)
    run = world.run(chain)
    assert world.pinned
    world.worker.agent.drop_lease(run.name)
    assert eventually(lambda: not world.pinned)


def test_a_scheduler_gives_up_a_plan_that_is_not_of_its_hit(world: World) -> None:
    """A shorter hit would have had one; what is here of the longer one stays leased."""
    chain = world.stored(4 * CHUNK + 6)
    world.only_on_disk([chain.tail], FULL)
    spec, endpoint = world.worker.spec, world.server.endpoint
    with closing(Lookups(endpoint, "e2e", spec, context=world.server.context, timeout_s=PATIENCE_S)) as lookups:
        assert lookups.wait_connected(PATIENCE_S)
        hit = lookups.wait(lookups.ask("r", chain), PATIENCE_S)
        assert hit is not None and (hit.tokens, hit.plan) == (4 * CHUNK + 5, None)
        assert eventually(lambda: not world.server.call(lambda: len(world.server.server._server_context.plans)))
        assert world.pinned == 14
        lookups.drop_lease("r")
        assert eventually(lambda: not world.pinned)


def test_one_ranks_object_is_behind_the_arena(embed: Embed, tmp_path: Path) -> None:
    with worlds(embed, tmp_path / "tier", ranks=2) as world:
        chain = world.stored(6 * CHUNK + 1)
        for rank in range(2):
            for group, chunk in ((FULL, 2), (SLIDING, 5), (DRAFT, 4)):
                world.only_on_disk([chain.digests[chunk]], group, rank)
                load_twice(world, chain, 6 * CHUNK, placed=False)


def test_another_prompts_end_is_behind_the_arena(world: World) -> None:
    """It is offered with the hit, and the prompt goes on otherwise."""
    chain = world.stored(4 * CHUNK + 6)
    other = world.worker.prompt(4 * CHUNK + 9, chain, 4 * CHUNK)
    world.only_on_disk([chain.tail], FULL)
    run = world.run(other)
    assert planned(run, 4 * CHUNK)
    assert world.load(run)
