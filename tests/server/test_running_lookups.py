"""A lookup that runs: what it builds is counted for its client, and each of its turns is short."""

from __future__ import annotations

import gc
import itertools
import os
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from e2e.known import eventually, small_spec

from layerflow import hits
from layerflow.config.settings import ServerSettings
from layerflow.hits import SLICE_KEYS, search_bytes
from layerflow.pool.memory import MemoryPool
from layerflow.server import EmbeddedServer
from layerflow.server.account import ENTRY_BYTES, Accounts, Allowance, Refused
from layerflow.server.handlers import lookup_requests
from layerflow.server.handlers.lookup_requests import (
    LOCATED_BYTES,
    RUNNING_BYTES,
    asking_bytes,
    check_lookup,
    running,
    running_on,
    search_prompt,
    waiting,
)
from layerflow.server.handlers.lookups import LookupHandler
from layerflow.server.leases import PINNED_BYTES
from layerflow.server.search import hit_keys
from layerflow.spec import ModelSpec, Shard
from layerflow.wire import codec
from layerflow.wire import messages as wire
from server.raw import RawClient
from server.support import Embed, Memory, worker_on

SPEC = small_spec(2, content="running")
SHARE = 1 << 20
SMALL = {"server__max_client_bytes": SHARE, "server__max_message_bytes": 256 << 10}


def asked(spec: ModelSpec, chunks: int) -> wire.Lookup:
    """A lookup of so many chunks that nobody has stored."""
    return wire.Lookup(1, "r", bytes(16), os.urandom(16 * chunks), chunks * spec.chunk_tokens, 60_000, b"")


def searching(spec: ModelSpec, message: wire.Lookup) -> Iterator[None]:
    """Read and search a prompt, a turn at a time, as its lookup does."""
    digests = yield from codec.split_in_slices(message.digests, "r")
    request = lookup_requests.LookupRequest(message, digests, hits.NO_BLOCKS, 0)
    yield from search_prompt(MemoryPool(Memory(1 << 16)), spec, request)


SPECS = {
    "one group": small_spec(2),
    "two groups": small_spec(2, window=32),
    "shards": small_spec(2, shard=Shard(0, 4)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("kept", [True, False], ids=["keys are kept", "too many keys"])
def test_what_a_search_keeps_between_its_turns_is_what_is_counted(
    monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, kept: bool
) -> None:
    if not kept:
        monkeypatch.setattr(hits, "KEPT_KEYS", 100)
    chunks = 20_000
    message = asked(spec, chunks)
    gc.collect()
    tracemalloc.start()
    try:
        before, most = tracemalloc.get_traced_memory()[0], 0
        for _ in searching(spec, message):
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    counted = search_bytes(spec, chunks)
    slice_bytes = SLICE_KEYS * 200  # of the keys in hand
    assert counted / 2 < most < counted + slice_bytes


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_what_a_prompt_lacks_is_counted_some_at_a_time(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec) -> None:
    summed = 0
    accumulate = itertools.accumulate

    def counting(parts: Any, **more: Any) -> Iterator[int]:
        nonlocal summed
        for each in accumulate(parts, **more):
            summed += 1
            yield each

    monkeypatch.setattr(hits, "accumulate", counting)
    chunks = 4 * SLICE_KEYS
    turns = [0, *(summed for _ in searching(spec, asked(spec, chunks))), summed]
    assert turns[-1] >= chunks * len(spec.groups)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= SLICE_KEYS + 1


def client_of(share: int) -> Any:
    """A client's session, as far as its charges go."""
    return SimpleNamespace(spec=None, account=Accounts(lambda: Allowance(share, 1 << 30)).of(1))


@pytest.mark.parametrize(("groups", "shards"), [(1, 16), (2, 8), (1, 1)])
def test_a_million_tokens_in_small_chunks_fit_into_what_a_client_may_keep(groups: int, shards: int) -> None:
    """16 tokens a chunk, and as many objects of each as `server.max_lookup_objects` lets one lookup have."""
    limits = ServerSettings()
    spec = small_spec(2, shard=Shard(0, shards), window=32 if groups == 2 else 0)
    message = asked(spec, 1_000_000 // spec.chunk_tokens)
    session = client_of(limits.max_client_bytes)
    session.spec = spec
    assert check_lookup(session, message, limits) is spec
    session.account.charge("the message, while others have their turn", len(message.digests))
    with running(session, spec, message):
        assert session.account.nbytes > search_bytes(spec, len(message.digests) // 16)
    with session.account.charge(waiting(message), asking_bytes(message)):
        pass


def test_a_lookup_past_its_client_s_share_is_refused_and_leaves_nothing() -> None:
    session, message = client_of(SHARE), asked(SPEC, SHARE // 64)
    with pytest.raises(Refused, match=r"a lookup of 16384 chunks of .* server\.max_client_bytes"):
        running(session, SPEC, message)
    assert not session.account.nbytes


def test_a_prompt_of_usual_length_is_looked_up_whatever_its_client_keeps() -> None:
    session = client_of(SHARE)
    session.account.charge("all that it may keep", SHARE, always=True)
    with running(session, SPEC, asked(SPEC, 512)):
        assert session.account.nbytes - SHARE - ENTRY_BYTES > search_bytes(SPEC, 512)
    with pytest.raises(Refused):
        running(session, SPEC, asked(SPEC, RUNNING_BYTES // 16))


def test_what_was_found_for_a_lookup_is_counted_and_refuses_it_no_more() -> None:
    session, message = client_of(SHARE), asked(SPEC, RUNNING_BYTES // 64)
    with running_on(session, SPEC, message, SHARE):
        assert session.account.nbytes > SHARE + search_bytes(SPEC, RUNNING_BYTES // 64) > SHARE + RUNNING_BYTES
    assert not session.account.nbytes


def test_a_lookup_too_long_for_its_client_is_answered_with_the_limit(embed: Embed) -> None:
    server = embed(**SMALL)
    client = RawClient(server.context, server.endpoint, SPEC)
    for number in range(3):
        client.say(client.lookup(f"r{number}", [os.urandom(16) for _ in range(12_000)]))
        refused = client.hear(wire.Found)
        assert isinstance(refused, wire.Problem) and refused.code == "quota"
        assert f"request 'r{number}'" in refused.message and "server.max_client_bytes" in refused.message
    client.say(client.lookup("short", [os.urandom(16)]))
    assert isinstance(client.hear(wire.Found), wire.Found)
    assert eventually(lambda: server.call(lambda: server.server.accounts.nbytes) == 0)
    client.close()


def test_a_lookup_that_runs_counts_what_it_searches_and_pins(embed: Embed) -> None:
    server = embed()
    worker = worker_on(server, spec=SPEC, blocks=512)
    chain = worker.prompt(64 * SPEC.chunk_tokens)
    worker.serve(chain)
    client = RawClient(server.context, server.endpoint, SPEC)
    context = server.server._server_context
    message = client.lookup("r", list(chain.digests))

    def run() -> list[tuple[int, int]]:
        session = server.server.sessions.get(client.number)
        assert session is not None
        work, seen = LookupHandler(context).look_up(session, message), []
        try:
            while True:
                work.send(None)
                seen.append((session.account.nbytes, context.pool.statistics().pinned))
        except StopIteration:
            return seen

    seen = server.call(run)
    least = ENTRY_BYTES + search_bytes(SPEC, 64)
    assert seen and all(nbytes >= least + pinned * (PINNED_BYTES + LOCATED_BYTES) for nbytes, pinned in seen)
    assert seen[-1][1] == 64
    assert kept(server, client) == 0, "all that it built is counted no more"
    client.close()
    worker.agent.close()


def kept(server: EmbeddedServer, client: RawClient) -> int:
    """Bytes that the server keeps for a client, besides the lease that its lookup has become."""
    session = server.call(lambda: server.server.sessions.get(client.number))
    assert session is not None
    leases = server.server._server_context.leases._charges.values()
    return int(server.call(lambda: session.account.nbytes - sum(charge.nbytes for charge in leases)))


def test_a_hit_whose_pins_do_not_fit_is_told_and_pins_nothing(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_requests, "RUNNING_BYTES", 0)
    server = embed(**SMALL)
    worker = worker_on(server, spec=SPEC, blocks=512)
    chain = worker.prompt(64 * SPEC.chunk_tokens)
    worker.serve(chain)
    client = RawClient(server.context, server.endpoint, SPEC)
    message = client.lookup("r", list(chain.digests))
    session = server.call(lambda: server.server.sessions.get(client.number))
    assert session is not None
    left = ENTRY_BYTES + lookup_requests.kept_bytes(message) + search_bytes(SPEC, 64)
    server.call(lambda: session.account.charge("most that it may keep", SHARE - left - ENTRY_BYTES))
    client.say(message)
    found = client.hear(wire.Found)
    assert isinstance(found, wire.Found) and found.tokens == 64 * SPEC.chunk_tokens and not found.plan
    assert eventually(lambda: server.call(lambda: server.server.pool.statistics().pinned) == 0)
    assert server.call(lambda: session.account.nbytes) == SHARE - left
    client.close()
    worker.agent.close()


def fill(server: EmbeddedServer, client: RawClient) -> None:
    """The client keeps all that it may."""

    def charge() -> None:
        session = server.server.sessions.get(client.number)
        assert session is not None
        share = server.server.settings.server.max_client_bytes
        session.account.charge("all that it may keep", share - session.account.nbytes - ENTRY_BYTES)
        with pytest.raises(Refused):
            session.account.charge("more")

    server.call(charge)


def test_a_lookup_that_has_waited_for_a_hand_off_is_answered_whatever_its_client_keeps(
    embed: Embed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_requests, "RUNNING_BYTES", 0)
    server = embed(**SMALL)
    clients = [RawClient(server.context, server.endpoint, SPEC) for _ in range(2)]
    digests = [os.urandom(16) for _ in range(64)]
    clients[0].say(clients[0].lookup("r", digests, handoff="h", follow_ms=60_000))
    assert eventually(lambda: server.call(lambda: server.server.handoffs.statistics().announced) == 1)
    fill(server, clients[0])
    clients[1].say(wire.ReleaseHandoff("h"))
    found = clients[0].hear(wire.Found)
    assert isinstance(found, wire.Found) and found.reason and not found.tokens
    for client in clients:
        client.close()


def test_a_lookup_that_has_waited_for_writes_is_answered_whatever_its_client_keeps(
    embed: Embed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lookup_requests, "RUNNING_BYTES", 0)
    server = embed(**SMALL, pool__disk={"path": str(tmp_path / "tier")})
    # One that has many shards is searched for longer than it is asked for.
    client = RawClient(server.context, server.endpoint, small_spec(2, shard=Shard(0, 4), content="running"))
    assert server.server.tier is not None
    waiting_for: list[Callable[[], None]] = []

    def when_written(_: object, told: Callable[[], None]) -> Callable[[], None]:
        waiting_for.append(told)
        return lambda: None

    monkeypatch.setattr(server.server.tier, "when_written", when_written)
    client.say(client.lookup("r", [os.urandom(16) for _ in range(64)], written_ms=60_000))
    assert eventually(lambda: len(waiting_for) == 1)
    fill(server, client)
    server.call(waiting_for[0])
    found = client.hear(wire.Found)
    assert isinstance(found, wire.Found) and not found.tokens
    client.close()


def test_a_hit_of_more_keys_than_are_kept_leases_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [os.urandom(16) for _ in range(300)]

    class Everything:
        def lookup(self, keys: Sequence[bytes]) -> list[bool]:
            return [True] * len(keys)

        def tails(self, *_: object, **__: object) -> tuple[()]:
            return ()

        sharing = tails

    def leased() -> tuple[int, list[bytes]]:
        hit = hits.find_hit(Everything(), SPEC, bytes(16), digests, 300 * SPEC.chunk_tokens + 1)
        return len(hit.keys), [key for keys in hit_keys(SPEC, digests, hit) for key in keys]

    kept, keys = leased()
    monkeypatch.setattr(hits, "KEPT_KEYS", 299)
    assert leased() == (0, keys) and kept == len(keys) == 300
