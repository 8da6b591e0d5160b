"""A router's belief against real hits: two engines share a pool, and everything else may restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import structlog
from connectors.router_world import CHUNK, ROOT, DirectControl, World, hashes_of
from connectors.routers import LlmdIndexer

from layerflow.agent.control import Control
from layerflow.connectors.common import announcer
from layerflow.connectors.common.block_ledger import BlockEvent
from layerflow.errors import VersionMismatch
from layerflow.keys import Chain
from layerflow.wire.messages import ChunkChange, ChunkChanges, ChunkDescription


@pytest.mark.parametrize("seed", range(3))
def test_belief_is_what_can_be_hit(seed: int) -> None:
    World(seed).live(300)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_events(seed: int) -> None:
    World(1000 + seed).live(2500)


def test_both_pods_are_credited_and_nothing_is_skipped_after_a_restart_of_the_indexer() -> None:
    world = World(1)
    chain = Chain(ROOT, list(range(3 * CHUNK)), CHUNK)
    raw = chain.tokens.astype("uint32").tobytes()
    world.engines["one"].stored(lambda: world.describe(chain, len(chain)))
    world.heartbeat()
    for digest in chain.digests[:2]:
        world.server.change(world.server.arena, digest, True)
    world.heartbeat()
    assert [world.indexers[0].blocks(pod, raw, world.size) for pod in world.pods] == [8, 8]
    world.indexers[0] = LlmdIndexer()
    for channel in world.channels.values():
        channel.news = True
    world.heartbeat()
    world.server.change(world.server.arena, chain.digests[2], True)
    world.heartbeat()
    assert [world.indexers[0].blocks(pod, raw, world.size) for pod in world.pods] == [12, 12]
    assert world.indexers[0].skipped == 0
    # A router that counts, and has been there all the time, has each block once.
    world.server.change(world.server.arena, chain.digests[0], False)
    world.heartbeat()
    assert [world.dynamo[0].blocks(pod, raw) for pod in world.pods] == [0, 0]
    assert [world.indexers[0].blocks(pod, raw, world.size) for pod in world.pods] == [0, 0]


def test_one_chunk_that_cannot_be_read_costs_no_other() -> None:
    world = World(4)
    chain = Chain(ROOT, list(range(3 * CHUNK)), CHUNK)
    good = Chain(ROOT, list(range(100, 100 + 2 * CHUNK)), CHUNK)
    raw, good_raw = (each.tokens.astype("uint32").tobytes() for each in (chain, good))

    def hash_units(before: bytes | None, chunk: ChunkChange) -> list[bytes]:
        if chunk.digest == chain.digests[1]:
            raise IndexError("one key for two units")
        hashes: list[bytes] = hashes_of("one")(before, chunk)
        return hashes

    world.ledgers["one"]._hash_units = hash_units
    for each in (chain, good):
        world.engines["one"].stored(lambda each=each: world.describe(each, len(each)))  # type: ignore[misc]
    world.heartbeat()
    with structlog.testing.capture_logs() as logs:
        for digest in reversed([*chain.digests, *good.digests]):  # the first comes last, and brings the others
            world.server.change(world.server.arena, digest, True)
        world.heartbeat()
        world.server.change(world.server.arena, good.digests[1], False)
        world.heartbeat()
    assert [each["event"] for each in logs] == ["chunk_not_read"]
    assert [world.dynamo[0].blocks("one", each) for each in (raw, good_raw)] == [4, 4]
    assert [world.dynamo[0].blocks("two", each) for each in (raw, good_raw)] == [12, 4]
    world.ledgers["one"].validate()


def test_what_a_router_raises_on_is_handed_to_it_again() -> None:
    world = World(5)
    chain = Chain(ROOT, list(range(3 * CHUNK)), CHUNK)
    engine, channel = world.engines["one"], world.channels["one"]
    publish, raises = channel.publish, [False]

    def sometimes(events: Sequence[BlockEvent]) -> None:
        if raises[0]:
            raise RuntimeError("its queue is full")
        publish(events)

    channel.publish = sometimes  # type: ignore[method-assign]
    engine.stored(lambda: world.describe(chain, len(chain)))
    engine.turn()

    def fails(act: Callable[[], object]) -> int:
        """Blocks that are told after an act, of whose telling the first try fails."""
        act()
        raises[0] = True
        with pytest.raises(RuntimeError):
            engine.turn()
        raises[0] = False
        engine.turn()
        return len({prefix for _, prefix, _ in world.places.of("one")})

    def store(there: bool) -> None:
        for digest in chain.digests:
            world.server.change(world.server.arena, digest, there)

    assert fails(lambda: store(True)) == 12
    assert fails(lambda: setattr(world.dynamo[0], "counts", {}) or setattr(channel, "news", True)) == 12
    assert fails(lambda: store(False)) == 0
    assert fails(lambda: store(True)) == 12
    assert fails(lambda: setattr(world.server, "up", False)) == 0
    assert engine._lost_chunks, "what was known is described to the server that comes"
    assert not world.dynamo[0].dropped


def test_a_restart_between_two_heartbeats_loses_nothing_that_is_on_disk() -> None:
    world = World(2)
    chain = Chain(ROOT, list(range(3 * CHUNK)), CHUNK)
    raw = chain.tokens.astype("uint32").tobytes()
    world.engines["one"].stored(lambda: world.describe(chain, len(chain)))
    world.heartbeat()
    for digest in chain.digests:
        world.server.change(world.server.arena, digest, True)
        world.server.change(world.server.disk, digest, True)
    world.heartbeat()
    world.server = world.new_server(world.server.disk)
    world.heartbeat()
    assert [world.indexers[0].blocks(pod, raw, world.size) for pod in world.pods] == [12, 12]


def test_a_server_of_the_version_before_is_told_nothing_until_it_is_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    class OlderControl(DirectControl):
        def describe_chunks(self, chunks: Sequence[ChunkDescription], timeout_s: float) -> None:
            raise VersionMismatch("the server speaks protocol 1, which has no DescribeChunks")

        def read_chunks(self, epoch: int, after: int, begun: int, timeout_s: float) -> ChunkChanges:
            raise VersionMismatch("the server speaks protocol 1, which has no ReadChunks")

    monkeypatch.setattr(announcer, "UPGRADE_S", 0.0)
    world = World(3)
    chain = Chain(ROOT, list(range(CHUNK)), CHUNK)
    raw = chain.tokens.astype("uint32").tobytes()
    engine = world.engines["one"]
    engine._connect = lambda: cast(Control, OlderControl(world))
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            engine.stored(lambda: world.describe(chain, len(chain)))
            engine.turn()
    assert [each["event"] for each in logs] == ["routers_not_told"]
    assert not engine._waiting
    engine._connect = lambda: cast(Control, DirectControl(world))
    world.server.change(world.server.arena, chain.digests[0], True)
    engine.found(lambda: world.describe(chain, len(chain)))
    engine.turn()
    assert world.indexers[0].blocks("one", raw, world.size) == 4
