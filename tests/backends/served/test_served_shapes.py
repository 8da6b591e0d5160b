"""Every shape of cache and every parallel size, from what is behind the arena: whole hits, and hits to the block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from backends.served.house import Served, engine, reload, save
from backends.served.kinds import KINDS, Kind, Redis
from e2e.known import eventually
from e2e.partitions import BLOCK, CHUNK, TOKENS, everyone, leave, load_all, save_all
from knobs.passage import spec_of
from redis_server import program

PATIENCE_S = 30.0
SHAPES = ("gqa", "mla", "hybrid", "compressed")
SIZES = [((2, (6,)), (1, (6,))), ((1, (6,)), (4, (6,))), ((3, (6,)), (2, (2, 4)))]
PATIENT = {"pool__lookup_timeout_ms": 10_000}


@pytest.fixture(params=(*KINDS, Redis), ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    if request.param is Redis and program() is None:
        pytest.skip("there is no redis-server")
    made: Kind = request.param()
    made.open()
    yield made
    made.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_hits_to_its_block(kind, start, shape):
    served = start(kind)
    spec = spec_of(shape)
    with engine(served, spec) as worker:
        prompt = worker.prompt(8 * CHUNK + 3)
        longer = worker.prompt(8 * CHUNK + 1, prompt, 8 * CHUNK)
        parting = worker.prompt(120, prompt, 4 * CHUNK + 9)
        save(worker, prompt)
        served.empty_arena()
        runs = [reload(worker, [chain])[0] for chain in (longer, parting)]
    whole = shape in ("gqa", "mla")
    # A window's blocks are kept for a chunk's end; compressed rows, for whole blocks of them.
    inside = {"gqa": 4 * CHUNK + 8, "mla": 4 * CHUNK + 8, "hybrid": 4 * CHUNK + 8, "compressed": 4 * CHUNK}[shape]
    assert runs[0].hit.tokens == 8 * CHUNK
    assert runs[1].hit.tokens == inside or (not whole and runs[1].hit.tokens == 4 * CHUNK)


@pytest.mark.parametrize(("writing", "reading"), SIZES)
def test_other_sizes_hit_what_is_behind_the_arena(kind, start, writing, reading):
    """On the node that wrote, after its restart, and on another node that never saw the writers."""
    content = f"sizes-{np.random.default_rng().integers(1 << 60)}"
    served = start(kind, **PATIENT)
    writers = everyone(served.endpoint, *writing, content)
    save_all(writers)
    served.settle()
    spec = writers[0].spec
    if kind.tiered:
        assert eventually(lambda: noted(served, spec), PATIENCE_S), "the writers' size was not noted"
    leave(writers)
    servers = [served]
    if kind.shared:
        servers.append(start(kind, **PATIENT))
    for number, server in enumerate(servers):
        readers = everyone(server.endpoint, *reading, content, lookup_timeout_s=10.0)
        for attempt in range(2 if kind.tiered else 1):
            server.empty_arena()
            # Another node learns of the writers' size a moment after its own workers came.
            assert eventually(
                lambda name=f"{number}-{attempt}", ranks=readers: probe(ranks, name) == TOKENS - 1, PATIENCE_S, 0.1
            )
            server.empty_arena()
            wipe(readers)
            assert load_all(readers, f"r{number}-{attempt}") == TOKENS - 1
        prompt = np.concatenate([np.arange(2 * CHUNK + 2 * BLOCK), np.arange(1000, 1030)])
        hit = readers[0].agent.lookup(f"parts-{number}", readers[0].agent.chain(prompt))
        # Stores that list nothing are hit inside a chunk on the server that wrote it.
        assert hit.tokens == 2 * CHUNK + 2 * BLOCK or number
        leave(readers)


def probe(readers, name: str) -> int:
    """Tokens that a lookup finds; what it leased is given back."""
    tokens = readers[0].agent.lookup(f"probe-{name}", readers[0].agent.chain(np.arange(TOKENS))).tokens
    readers[0].agent.drop_lease(f"probe-{name}")
    return int(tokens)


def wipe(readers) -> None:
    for reader in readers:
        for planes in reader.memory.values():
            for plane in planes.values():
                plane.zero_()


def noted(served: Served, spec) -> bool:
    """The server has said so in its status."""
    return any(fingerprint == spec.fingerprint.hex() for fingerprint in served.tier["noted"])
