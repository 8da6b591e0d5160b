"""Long work of one client takes turns with others': each piece of it is small, whoever asks for how much."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from e2e.known import eventually, small_spec

from layerflow.errors import REASON_CHARS
from layerflow.flow.events import BatchFailed, Event, LoadsFenced, LoadsLost, LoadsMoved
from layerflow.hits import HitLength
from layerflow.keys import object_keys
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject
from layerflow.server import EmbeddedServer, search
from layerflow.server.handlers import remote, steps
from layerflow.server.handlers.forget import KEYS_PER_SLICE, purge
from layerflow.server.handlers.lookup_requests import read_lookup
from layerflow.server.handlers.steps import ITEMS_PER_SLICE
from layerflow.spec import Shard
from layerflow.wire import codec
from layerflow.wire import messages as wire
from server.raw import RawClient
from server.support import Embed, observe

SPEC = small_spec(2, content="turns")
Clients = Callable[[EmbeddedServer], RawClient]


@pytest.fixture
def client_of() -> Iterator[Clients]:
    made: list[RawClient] = []

    def make(server: EmbeddedServer) -> RawClient:
        made.append(RawClient(server.context, server.endpoint, SPEC))
        return made[-1]

    yield make
    for client in made:
        client.close()


def pieces(work: Coroutine[Any, Any, Any], look: Callable[[], Any]) -> list[Any]:
    """What `look` sees wherever the work lets others have their turn, and at its end."""
    seen = []
    try:
        while True:
            assert work.send(None) is None
            seen.append(look())
    except StopIteration:
        return [*seen, look()]


def asked(chunks: int, **more: Any) -> wire.Lookup:
    """A lookup of whole chunks."""
    return wire.Lookup(1, "r", bytes(16), os.urandom(16 * chunks), chunks * SPEC.chunk_tokens, 60_000, b"", **more)


def test_a_purge_forgets_few_objects_at_a_time(embed: Embed, client_of: Clients) -> None:
    server = embed()
    client = client_of(server)
    group, count = SPEC.groups[0], 3 * KEYS_PER_SLICE

    def left() -> list[int]:
        """Objects that are left after each piece of the purge."""
        pool, session = server.server.pool, server.server.sessions.get(client.number)
        assert session is not None
        objects = [NewObject(os.urandom(24), object_bytes(group, 1), 1, group.block_size) for _ in range(count)]
        assert all(room.offset >= 0 for room in pool.reserve(objects, "writer"))
        assert pool.commit([each.key for each in objects], "writer") == count
        work = purge(server.server._server_context, session, tier=False)
        return pieces(work, lambda: pool.statistics().objects)

    there = [count, *server.call(left)]
    assert there[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(there)) <= KEYS_PER_SLICE


def test_a_report_is_told_few_items_at_a_time_with_its_reasons_cut() -> None:
    long = "cut off: " + "x" * wire.MAX_REASON
    told: list[tuple[Event, ...]] = []
    driver = SimpleNamespace(handle=lambda *events: told.append(events), time_batches=lambda *_: None)
    context: Any = SimpleNamespace(
        driver=driver, plans=Mock(), log_limit=Mock(admit=lambda _: None), recorder=SimpleNamespace(current=None)
    )
    report = wire.Report(
        done=list(range(3 * ITEMS_PER_SLICE)),
        failed=[wire.Failure(1, long)],
        fenced=[wire.Fence(2, long)],
        moved=[wire.Moved(step, 0, [wire.LostBlocks(0, 0, 1, long)] * ITEMS_PER_SLICE) for step in range(5)],
    )
    pieces(steps.report(context, SimpleNamespace(number=1), report), lambda: None)  # type: ignore[arg-type]
    events = [event for few in told for event in few]
    assert max(len(few) for few in told) <= ITEMS_PER_SLICE
    assert max(sum(isinstance(event, LoadsMoved) for event in few) for few in told) == 1
    assert len(events) == 3 * ITEMS_PER_SLICE + 2 + 5
    reasons = {event.reason for event in events if isinstance(event, BatchFailed | LoadsFenced)}
    reasons |= {lost.reason for event in events if isinstance(event, LoadsMoved) for lost in event.failed}
    assert reasons == {f"{long[: REASON_CHARS - 3]}..."}


def test_what_a_step_has_lost_is_told_few_ranges_at_a_time_before_its_end() -> None:
    told: list[tuple[Event, ...]] = []
    driver = SimpleNamespace(handle=lambda *events: told.append(events), time_batches=lambda *_: None)
    context: Any = SimpleNamespace(driver=driver, plans=Mock(), recorder=SimpleNamespace(current=None))
    lost = [wire.LostBlocks(0, at, at + 1, "gone") for at in range(3 * ITEMS_PER_SLICE + 1)]
    report = wire.Report(moved=[wire.Moved(7, 10, lost)], closed=[wire.Closed(7, True)])
    pieces(steps.report(context, SimpleNamespace(number=1), report), lambda: None)  # type: ignore[arg-type]
    kinds = [[type(event).__name__ for event in few] for few in told]
    assert kinds == [["LoadsLost"], ["LoadsLost"], ["LoadsLost"], ["LoadsMoved", "StepClosed"]]
    parts = [event for few in told for event in few if isinstance(event, LoadsLost | LoadsMoved)]
    assert max(len(event.failed) for event in parts) == ITEMS_PER_SLICE
    assert [each.lo for event in parts for each in event.failed] == list(range(len(lost)))
    end = parts[-1]
    assert isinstance(end, LoadsMoved) and (end.nbytes, end.lost_ranges) == (10, 3 * ITEMS_PER_SLICE)


def test_the_digests_of_a_prompt_are_read_some_at_a_time() -> None:
    chunks = 4 * codec.DIGESTS_PER_SLICE
    assert len(pieces(read_lookup(SPEC, asked(chunks), 0), lambda: None)) == 4


def test_what_other_servers_are_to_be_asked_for_is_listed_some_at_a_time() -> None:
    chunks, looked = 4 * remote.DIGESTS_PER_SLICE, list[int]()

    class Pool:
        def lookup(self, keys: Sequence[bytes]) -> list[bool]:
            looked.append(len(keys))
            return [False] * len(keys)

        def covering(self, spec: object) -> None:
            return None

    context, session = SimpleNamespace(pool=Pool()), SimpleNamespace(spec=SPEC)
    pieces(remote._lacking(context, session, asked(chunks), set()), lambda: None)  # type: ignore[arg-type]
    each = len(SPEC.groups) * len(SPEC.shard.peers())
    assert looked == [remote.DIGESTS_PER_SLICE * each] * 4


def test_a_lookup_behind_a_tier_makes_few_keys_at_a_time_and_counts_the_rest(
    embed: Embed, client_of: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a long prompt takes to compute is compared with its fetch by the number of its objects, not their list."""
    made, worth = list[int](), list[tuple[float, int]]()
    object_keys = search.object_keys

    def counting(*parts: Any) -> list[bytes]:
        keys = object_keys(*parts)
        made.append(len(keys))
        return keys

    monkeypatch.setattr(search, "object_keys", counting)
    server = embed(pool__backend="disk", pool__disk={"path": str(tmp_path / "disk")})
    control = observe(server)
    assert eventually(lambda: control.status()["tier"]["up"])
    control.close()
    sources = server.server._server_context.sources
    assert sources is not None
    monkeypatch.setattr(sources, "worth_fetching", lambda found, *rest: (worth.append(rest), found)[1])
    client, chunks = client_of(server), 4096
    client.say(asked(chunks, compute_ms=500))
    found = client.hear(wire.Found)
    assert isinstance(found, wire.Found) and found.tokens == 0
    assert worth == [(0.5, chunks * len(SPEC.groups) * len(SPEC.shard.peers()))]
    assert max(made) <= search.SLICE_KEYS


class Brought:
    """An arena, and a tier that brings whatever it is asked for by the next turn."""

    def __init__(self) -> None:
        self.there, self.on_the_way = set[bytes](), set[bytes]()
        self.brought: list[list[bytes]] = []

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.there for key in keys]

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def bring(self, objects: Sequence[NewObject], layers: Sequence[int], engine: str) -> None:
        self.brought.append([new.key for new in objects])
        self.on_the_way.update(self.brought[-1])

    def coming(self, key: bytes) -> object:
        return key if key in self.on_the_way else None

    def come(self) -> None:
        self.there |= self.on_the_way
        self.on_the_way.clear()

    def turns(self, work: Generator[None, None, Any]) -> list[int]:
        """Objects brought in each turn."""
        each = [0]
        for _ in work:
            each.append(sum(map(len, self.brought)))
            self.come()
        return [after - before for before, after in itertools.pairwise(each)]


def test_what_a_hit_lacks_in_the_arena_is_brought_some_at_a_time() -> None:
    digests, shards = [os.urandom(16) for _ in range(search.BROUGHT_PER_SLICE)], [Shard(rank, 3) for rank in range(3)]
    hit, stuck, world = HitLength(len(digests) * SPEC.chunk_tokens, ()), list[frozenset[bytes]](), Brought()

    def bring() -> Generator[None, None, None]:
        parts = {"shards": shards, "digests": digests, "hit": hit, "engine": "e"}
        stuck.append((yield from search._bring(world, world, SPEC, **parts)))  # type: ignore[arg-type]

    assert max(world.turns(bring())) <= search.BROUGHT_PER_SLICE
    brought = [key for keys in world.brought for key in keys]
    assert sorted(brought) == sorted(object_keys(digests, [0], shards)), "each once"
    assert stuck == [frozenset()], "what has come meanwhile is there"


def test_objects_of_other_sizes_are_brought_some_at_a_time() -> None:
    digests, world = [os.urandom(16) for _ in range(3 * search.BROUGHT_PER_SLICE)], Brought()
    covering = SimpleNamespace(sources=lambda key, there: [(SPEC.box(0), key[:16] + b"another.")])
    hit = HitLength(len(digests) * SPEC.chunk_tokens, ())
    parts = {"covering": covering, "prompt": (bytes(16), digests), "hit": hit, "found": frozenset(), "engine": "e"}
    turns = world.turns(search.bring_pieces(world, world, SPEC, **parts))  # type: ignore[arg-type]
    assert sum(turns) == len(digests) and max(turns) <= search.BROUGHT_PER_SLICE


def test_what_a_client_that_is_gone_is_told_is_not_logged_each_time(
    embed: Embed, client_of: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed()
    client, told, lines = client_of(server), 1000, list[dict[str, Any]]()
    session = server.call(lambda: server.server.sessions.get(client.number))
    assert session is not None
    monkeypatch.setattr(
        server.server, "_log", SimpleNamespace(warning=lambda event, **more: lines.append({"event": event} | more))
    )
    with monkeypatch.context() as patch:
        patch.setattr(server.server._doors[session.address[0]], "send", lambda *_: False)
        server.call(lambda: [server.server._send(session, wire.Beat(1.0)) for _ in range(told)])
    assert {line["event"] for line in lines} == {"message_undeliverable"} and lines[0]["kind"] == "Beat"
    assert len(lines) < told / 2, "some a second"
    assert len(lines) + sum(line["unlogged"] for line in lines) <= told
