"""Who sees an object when: nobody before it is whole, everybody afterwards, whatever became of its writer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from backends.served.house import PATIENCE_S, Served, engine, objects_of, reload, save, skip_unless
from backends.served.writers import save_at_pace
from e2e.children import Child, tokens_of
from e2e.known import KnownWorker, eventually, small_spec

from layerflow.keys import Chain

LAYERS, CHUNK = 5, 16
TOKENS = 6 * CHUNK + 3
BY_LAYER = {"pool__link_gbps": 10.0}
"""For layers as small as here: a save over a link, however fast, waits for no other layer's."""


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def begin(*arguments: object) -> Child:
        children.append(Child(*arguments))
        return children[-1]

    yield begin
    for process in children:
        process.close()


def everywhere(kind, start, **settings: object) -> list[Served]:
    """A server, and a second one on the same pool where there can be one."""
    return [start(kind, **settings) for _ in range(1 + kind.shared)]


def seen(servers: list[Served], worker: KnownWorker, chain: Chain) -> list[int]:
    return [served.look(worker.spec, chain) for served in servers]


def stored_layers(served: Served, worker: KnownWorker, tokens: int, layers: int) -> None:
    """Until so many layers of the one step that saves are in the arena."""
    layer_bytes = -(-tokens // worker.block_size) * worker.spec.groups[0].bytes_per_block
    left = (worker.spec.num_layers - layers) * layer_bytes
    assert eventually(lambda: served.status()["flow"]["unsaved_bytes"] == left, PATIENCE_S), (served.status(), left)


def test_nothing_is_seen_before_the_last_layer(kind, start):
    servers = everywhere(kind, start, **BY_LAYER)
    first = servers[0]
    with engine(first, small_spec(LAYERS)) as worker:
        chain = worker.prompt(TOKENS)
        run = worker.admit(chain)
        with worker.agent.open_step([run.request()]) as step:
            for layer in range(LAYERS):
                assert seen(servers, worker, chain) == [0] * len(servers), f"before layer {layer}"
                worker.compute(run, layer, 0, TOKENS)
                step.layer_done(layer)
                if layer < LAYERS - 1:  # behind the last one it may be published at any moment
                    stored_layers(first, worker, TOKENS, layer + 1)
                    if kind.tiered:
                        assert first.tier["writing_jobs"] == 1 and not first.tier["written_objects"]
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        first.settle()
        assert seen(servers, worker, chain) == [TOKENS - 1] * len(servers)
    for served in servers:
        served.empty_arena()
        with engine(served, small_spec(LAYERS)) as reader:
            [run] = reload(reader, [chain])
            assert run.hit.tokens == TOKENS - 1


def test_a_step_that_is_closed_unfinished_leaves_nothing(kind, start):
    servers = everywhere(kind, start, **BY_LAYER)
    first = servers[0]
    with engine(first, small_spec(LAYERS)) as worker:
        written = 0
        for layers in (0, 1, LAYERS - 1):
            chain = worker.prompt(TOKENS)
            run = worker.admit(chain)
            step = worker.agent.open_step([run.request()])
            for layer in range(layers):
                worker.compute(run, layer, 0, TOKENS)
                step.layer_done(layer)
            stored_layers(first, worker, TOKENS, layers)
            step.close(False)
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
            worker.retire(run)
            first.settle()
            first.wait_quiet()
            assert seen(servers, worker, chain) == [0] * len(servers), f"closed after {layers} layers"
            if kind.tiered:
                tier = first.tier
                assert tier["written_objects"] == written and not tier["failures"], tier
            # Nor is it in the way of the same prompt's next save.
            save(worker, chain)
            written += objects_of(worker.spec, TOKENS)
            first.empty_arena()
            assert reload(worker, [chain])[0].hit.tokens == TOKENS - 1


def test_writers_killed_at_every_layer(kind, start, child):
    servers = everywhere(kind, start, **BY_LAYER)
    first = servers[0]
    spec = small_spec(LAYERS, content="killed")
    with engine(first, spec) as worker:
        for layer in range(LAYERS + 1):
            chain = worker.agent.chain(tokens_of(layer, TOKENS))
            writer = child(save_at_pace, first.endpoint, LAYERS, "killed", TOKENS, layer)
            for _ in range(layer):
                writer.hear()
                writer.pipe.send("go")
            assert writer.hear() == layer
            if layer < LAYERS:
                assert seen(servers, worker, chain) == [0] * len(servers)
            writer.kill()
            first.wait_quiet()
            first.settle()
            hits = seen(servers, worker, chain)
            # The last layer may have been stored before the kill.
            assert set(hits) <= ({0} if layer < LAYERS else {0, TOKENS - 1}), f"killed before layer {layer}"
            run = worker.serve(chain)
            assert run.hit.tokens in (0, TOKENS - 1)
            first.empty_arena()
            [run] = reload(worker, [chain])
            assert run.hit.tokens == TOKENS - 1, f"a killed writer's objects are in the way (layer {layer})"
            assert seen(servers, worker, chain) == [TOKENS - 1] * len(servers)


def test_two_engines_write_one_prompt_at_once(kind, start):
    """On one server, or on two of the same pool."""
    servers = everywhere(kind, start)
    spec = small_spec(LAYERS)
    for seed, sides in enumerate(((servers[0], servers[0]), (servers[0], servers[-1]))):
        with engine(sides[0], spec, name="one") as one, engine(sides[1], spec, name="two") as two:
            chain = one.agent.chain(tokens_of(seed, TOKENS))
            runs = [worker.admit(chain, look=False) for worker in (one, two)]
            steps = [worker.agent.open_step([run.request()]) for worker, run in zip((one, two), runs, strict=True)]
            before = sum(served.tier["written_objects"] for served in servers) if kind.tiered else 0
            for layer in range(LAYERS):
                for worker, run, step in zip((one, two), runs, steps, strict=True):
                    worker.compute(run, layer, 0, TOKENS)
                    step.layer_done(layer)
            for worker, run, step in zip((one, two), runs, steps, strict=True):
                step.close()
                assert worker.agent.wait_idle(run.name, PATIENCE_S)
            for served in set(sides):
                served.settle()
            if kind.tiered:
                after = sum(served.tier["written_objects"] for served in servers)
                assert after - before == objects_of(spec, TOKENS), "each object once"
                assert all(set(served.tier["failures"]) <= {"write_exists"} for served in servers)
            for served, worker in zip(sides, (one, two), strict=True):
                served.empty_arena()
                assert reload(worker, [chain])[0].hit.tokens == TOKENS - 1


def test_readers_during_a_write(kind, start):
    servers = everywhere(kind, start)
    first, last = servers[0], servers[-1]
    spec = small_spec(LAYERS)
    stop, hits = threading.Event(), [0]
    with (
        ThreadPoolExecutor() as threads,
        engine(first, spec, name="writer") as writer,
        engine(last, spec, name="reader") as reader,
    ):
        chains = [writer.prompt(TOKENS)]
        for _ in range(11):
            chains.append(writer.prompt(TOKENS + 40, chains[-1], 50))

        def read() -> None:
            while not stop.is_set():
                for chain in chains:
                    [run] = reload(reader, [chain])
                    assert run.hit.tokens % CHUNK == 0 or run.hit.tokens == len(chain) - 1
                    hits.append(run.hit.tokens)

        reading = threads.submit(read)
        try:
            for chain in chains:
                save(writer, chain)
            first.settle()
            whole = len(hits) + 2 * len(chains)
            assert eventually(lambda: reading.done() or len(hits) >= whole, PATIENCE_S)
        finally:
            stop.set()
        reading.result()
        first.empty_arena()
        assert [run.hit.tokens for run in reload(reader, chains)] == [len(chain) - 1 for chain in chains]


def test_a_second_server_finds_what_the_first_has_stored(kind, start):
    skip_unless(kind.shared, kind, "every server has its own")
    one, two = everywhere(kind, start)
    spec = small_spec(LAYERS, window=40)
    with engine(one, spec) as writer, engine(two, spec) as reader:
        chains = [writer.prompt(tokens) for tokens in (20, 100, 131)]
        save(writer, *chains)
        one.settle()
        assert [run.hit.tokens for run in reload(reader, chains)] == [len(chain) - 1 for chain in chains]
        assert two.tier["fetched_objects"] and not two.tier["written_objects"]
        # And what the second adds, the first finds.
        more = reader.prompt(200, chains[2], 131)
        reader.serve(more)
        two.settle()
        assert reload(writer, [more])[0].hit.tokens == 199
