"""New weights and purges over every kind of pool, on two nodes where the pool is shared: no old key is ever hit."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
from backends.served.house import Served, engine, reload, save
from e2e.known import KnownWorker, eventually, small_spec

from layerflow.keys import Chain
from layerflow.spec import ModelSpec

LAYERS, CHUNK = 6, 16
TOKENS = 5 * CHUNK + 7


@pytest.fixture
def attach() -> Iterator[Callable[[Sequence[Served], ModelSpec], list[KnownWorker]]]:
    """An engine on each server; all are detached at the end, before their servers stop."""
    with contextlib.ExitStack() as attached:
        yield lambda servers, spec: [
            attached.enter_context(engine(served, spec, name=f"engine-{number}"))
            for number, served in enumerate(servers)
        ]


def anew(worker: KnownWorker, chain: Chain) -> Chain:
    """The same prompt under the present weights."""
    return worker.agent.chain(chain.tokens)


def purge(served: Served, *options: str) -> tuple[int, dict[str, object]]:
    """``layerflow purge``, as an operator types it: its exit code and its answer."""
    command = [sys.executable, "-m", "layerflow_cli", "purge", "--endpoint", served.endpoint, "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, json.loads(ended.stdout)


def test_after_new_weights_no_node_hits_an_old_key(kind, start, attach):
    servers = [start(kind) for _ in range(1 + kind.shared)]
    spec = small_spec(LAYERS, window=40)
    workers = attach(servers, spec)
    old = [workers[0].prompt(TOKENS) for _ in range(4)]
    save(workers[0], *old)
    for served in servers:
        served.empty_arena()
    # Under way at the reset: a fetch of one prompt, and the save of another.
    loads = [worker.admit(old[0]) for worker in workers]
    assert all(run.hit.tokens for run in loads)
    running = workers[0].admit(workers[0].prompt(TOKENS))
    step = workers[0].agent.open_step([running.request()])
    for layer in range(LAYERS // 2):
        workers[0].compute(running, layer, 0, TOKENS)
        step.layer_done(layer)
    for worker in workers:
        worker.agent.reset()
    for layer in range(LAYERS // 2, LAYERS):
        workers[0].compute(running, layer, 0, TOKENS)
        step.layer_done(layer)
    step.close()
    for served in servers:
        served.settle()
    for worker, served in zip(workers, servers, strict=True):
        for chain in (*old, running.chain):
            assert worker.agent.lookup("old", chain).tokens == 0, "a chain of before"
            assert worker.agent.lookup("new", anew(worker, chain)).tokens == 0
        assert served.look(spec, running.chain) == 0, "what was being saved is published nowhere, under no weights"
    # Each engine on its own: nobody finds what another has computed with weights of which it knows nothing.
    save(workers[0], anew(workers[0], old[0]))
    for served in servers:
        served.empty_arena()
    hits = [worker.agent.lookup("again", anew(worker, old[0])).tokens for worker in workers]
    assert hits == [TOKENS - 1, *[0] * (len(workers) - 1)]
    # Who still has the old weights finds what they made.
    with engine(servers[-1], spec, name="old") as other:
        assert other.agent.lookup("kept", other.agent.chain(old[1].tokens)).tokens == TOKENS - 1


def test_engines_that_name_their_weights_share_them_over_nodes(kind, start, attach):
    servers = [start(kind) for _ in range(1 + kind.shared)]
    workers = attach(servers, small_spec(LAYERS))
    prompt = workers[0].prompt(TOKENS)
    for worker in workers:
        worker.agent.reset("step-7")
    save(workers[0], anew(workers[0], prompt))
    for served in servers:
        served.empty_arena()
    for worker in workers:
        [run] = reload(worker, [anew(worker, prompt)])
        assert run.hit.tokens == TOKENS - 1


@pytest.mark.parametrize("tier", [False, True])
def test_a_purge(kind, start, tier):
    served = start(kind)
    spec = small_spec(LAYERS)
    with engine(served, spec) as worker:
        chains = [worker.prompt(TOKENS) for _ in range(3)]
        save(worker, *chains)
        if kind.tiered:
            served.settle()
            served.wait(lambda tier: tier["written_objects"])
        code, told = purge(served, *(("--tier", "--yes") if tier else ()))
        assert told["purged"] == 3 * 6
        if not (tier and kind.tiered):
            assert code == 0 and "tier" not in told
        else:
            known = kind.name == "memcache"  # it lists nothing: what this server knew is removed, and it says so
            assert (code, bool(told["tier"]["reason"])) == ((2, True) if known else (0, False))
        left = kind.tiered and not tier
        for chain in chains:
            assert eventually(lambda chain=chain: served.look(spec, chain) == (TOKENS - 1 if left else 0), 10, 0.05)
        save(worker, *[worker.prompt(TOKENS)])
        assert worker.serve(chains[0]).hit.tokens == (TOKENS - 1 if left else 0)
        assert worker.serve(chains[0]).hit.tokens == TOKENS - 1, "it goes on as before"


def test_a_purge_of_a_shared_pool_is_one_of_all_nodes(kind, start, attach):
    if not kind.shared or kind.name == "memcache":
        pytest.skip(f"{kind.name}: not shared, or it lists nothing")
    servers = [start(kind) for _ in range(2)]
    spec = small_spec(LAYERS)
    workers = attach(servers, spec)
    mine, theirs = (workers[0].prompt(TOKENS) for _ in workers)
    save(workers[0], mine)
    save(workers[1], theirs)
    for served in servers:
        served.empty_arena()
    code, told = purge(servers[0], "--tier", "--yes")
    assert code == 0
    assert told["tier"] == {"backend": kind.name, "purged": 2 * 6, "reason": ""}
    for worker in workers:
        assert [worker.agent.lookup("gone", chain).tokens for chain in (mine, theirs)] == [0, 0]
