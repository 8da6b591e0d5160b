"""Too little room: in the arena, behind it, or for one object. What is not kept is counted; what is loaded is right."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from backends.served.house import LOOKUP_S, Served, attempt, engine, objects_of, reload, save, skip_unless
from backends.served.kinds import MIB
from e2e.known import KnownWorker, small_spec

from layerflow.agent import Control
from layerflow.keys import Chain
from layerflow.spec import ModelSpec

LAYERS, CHUNK = 6, 16
LARGE = {"layers": 16, "block_size": 16, "chunk_tokens": 64, "row": 1024}  # objects of 2 MiB
SMALLEST = 16 * MIB  # segment that Mooncake takes


def offer(worker: KnownWorker, chain: Chain) -> None:
    """Save a prompt for which there may be no room: that costs nobody anything."""
    run = worker.admit(chain, look=False)
    assert not attempt(worker, [run], save=True)
    worker.retire(run)


def accounted(served: Served, spec: ModelSpec, chains: list[Chain]) -> dict[str, int]:
    """Prompts that were saved once each: their objects are written, or counted under what became of them."""
    served.settle()
    status = served.status()
    tier, pool = status["tier"], status["pool"]
    lost = {name: count for name, count in tier["failures"].items() if name.startswith("write_")}
    lost |= {"shed": tier["shed_objects"], "no room in the arena": pool["full"]}
    assert tier["written_objects"] + sum(lost.values()) == sum(objects_of(spec, len(chain)) for chain in chains), status
    return {name: count for name, count in lost.items() if count}


def test_an_arena_that_is_much_smaller_than_what_is_in_use(kind, start):
    served = start(kind, pool__size="512KiB", pool__write_backlog="1MiB", pool__lease_ms=300)
    spec = small_spec(LAYERS, window=40)
    with engine(served, spec) as worker:
        chains = [worker.prompt(tokens) for tokens in range(100, 220, 3)]
        for chain in chains:
            offer(worker, chain)
            if kind.tiered:
                served.settle()
        if kind.tiered:
            lost = accounted(served, spec, chains)
            assert not lost, lost
        hits = 0
        for chain in [*chains, *reversed(chains)]:
            [run] = reload(worker, [chain])
            hits += run.hit.tokens == len(chain) - 1
        status = served.status()
        assert status["pool"]["evictions"] > 0
        if kind.tiered:
            assert hits == 2 * len(chains), "all of it is behind the arena"
        else:
            assert hits < 2 * len(chains)


def test_many_at_once_in_a_small_arena(kind, start):
    """Rooms are taken by loads and saves of four engines; what finds none is left out, and counted."""
    served = start(kind, pool__size="512KiB", pool__lease_ms=300)
    spec = small_spec(LAYERS, window=40)
    workers = [engine(served, spec, name=f"engine-{number}") for number in range(4)]
    chains = [workers[0].prompt(tokens) for tokens in range(100, 180, 5)]

    def work(worker: KnownWorker, begin: int) -> set[str]:
        reasons: set[str] = set()
        for at in range(2 * len(chains)):
            runs = [worker.admit(chains[(begin + step * at) % len(chains)]) for step in (1, 3)]
            reasons |= attempt(worker, runs, save=True)
            for run in runs:
                worker.retire(run)
        return reasons

    try:
        with ThreadPoolExecutor() as threads:
            reasons = set().union(*threads.map(work, workers, range(0, 16, 4)))
        gone = ("no longer in the pool", "it is not there")  # the latter from a store whose lease of 300 ms ran out
        assert all(any(why in reason for why in gone) for reason in reasons), reasons
    finally:
        for worker in workers:
            worker.agent.close()
    served.settle()
    served.wait_quiet()
    assert served.status()["pool"]["evictions"] > 0


@contextmanager
def full_arena(served: Served, worker: KnownWorker) -> Iterator[list[Chain]]:
    """Prompts that fill the arena, pinned to the end of the with-block; the last did not fit whole."""
    with closing(Control(served.endpoint, "holder", worker.spec, lookup_timeout_s=LOOKUP_S)) as holder:
        held: list[Chain] = []
        while not served.status()["pool"]["full"]:
            chain = worker.prompt(160)
            offer(worker, chain)
            holder.lookup(f"held-{len(held)}", chain)
            held.append(chain)
        yield held
        for number in range(len(held)):
            holder.drop_lease(f"held-{number}")
        served.settle()
        served.wait_quiet()


def test_what_is_pinned_is_not_pushed_out(kind, start):
    served = start(kind, pool__size="512KiB", pool__lease_ms=60_000, pool__lease_share=1.0)
    with engine(served, small_spec(LAYERS)) as worker:
        late = worker.prompt(160)
        with full_arena(served, worker) as held:
            offer(worker, late)
            assert worker.serve(late).hit.tokens == 0
            assert [run.hit.tokens for run in reload(worker, held[:-1])] == [159] * (len(held) - 1)
        save(worker, late)
        assert reload(worker, [late])[0].hit.tokens == 159


def test_no_room_in_the_arena_for_what_is_behind_it(make_kind, start):
    skip_unless(make_kind.of.tiered, make_kind.of, "nothing is behind the arena")
    served = start(make_kind(), pool__size="512KiB", pool__lease_ms=60_000, pool__lease_share=1.0)
    with engine(served, small_spec(LAYERS)) as worker:
        wanted = worker.prompt(160)
        save(worker, wanted)
        served.empty_arena()
        with full_arena(served, worker):
            [run] = reload(worker, [wanted])
            assert run.hit.tokens < 159, "there is no room to bring it to"
            assert served.tier["fetches_without_room"]
        assert reload(worker, [wanted])[0].hit.tokens == 159


def test_a_full_pool_makes_room(make_kind, start):
    skip_unless(make_kind.of.tiered, make_kind.of, "nothing is behind the arena")
    kind = make_kind(capacity=SMALLEST, lease_ms=200)
    served = start(kind, pool__size="24MiB", pool__write_backlog="64MiB")
    spec = small_spec(**LARGE)
    with engine(served, spec, blocks=64) as worker:
        chains = [worker.prompt(64) for _ in range(16)]  # 32 MiB
        for chain in chains:
            offer(worker, chain)
            served.settle()
        lost = accounted(served, spec, chains)
        assert set(lost) <= {"write_full"}, lost
        served.empty_arena()
        hits = [reload(worker, [chain])[0].hit.tokens for chain in chains]
        assert set(hits) == {0, 63}, hits
        assert sum(map(bool, hits)) <= SMALLEST // (2 * MIB)
        save(worker, last := worker.prompt(64))
        assert reload(worker, [last])[0].hit.tokens == 63


@pytest.mark.parametrize("too_large_for", ["arena", "tier"])
def test_objects_that_are_too_large(make_kind, start, too_large_for):
    of = make_kind.of
    skip_unless(of.tiered or too_large_for == "arena", of, "nothing is behind the arena")
    kind = make_kind(capacity=SMALLEST)
    served = start(kind, pool__size="16MiB" if too_large_for == "arena" else "64MiB")
    spec = small_spec(**(LARGE | {"chunk_tokens": 576}))  # 18 MiB
    with engine(served, spec, blocks=64) as worker:
        large, small = worker.prompt(577), worker.prompt(64)
        offer(worker, large)
        served.settle()
        if too_large_for == "arena":
            assert reload(worker, [large])[0].hit.tokens == 0
            assert served.status()["figures"]["full_saves_total"] == 1
        else:
            assert served.tier["failures"] == {"write_too_large": 1}
            assert reload(worker, [large])[0].hit.tokens == 576, "the arena has it"
        save(worker, small)
        served.empty_arena()
        assert [run.hit.tokens for run in reload(worker, [small, large])] == [63, 0]
