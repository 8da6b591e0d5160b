"""Lookups of a scheduler: what is asked and what need not be, and a server that is slow, forgetful or gone."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from e2e.known import eventually, layerflow_threads, small_spec
from server.support import Embed

from layerflow.agent import client
from layerflow.agent import lookups as lookups_module
from layerflow.agent.client import Inquiry
from layerflow.agent.lookups import Lookups
from layerflow.agent.values import MISS, Hit
from layerflow.config.settings import Settings
from layerflow.errors import LayerflowError
from layerflow.keys import Chain, object_key, root_digest
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject
from layerflow.server import EmbeddedServer
from layerflow.server.clients import ClientSession
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.wire import messages as wire

SPEC = small_spec()
CHUNK = SPEC.chunk_tokens
SLIDING = ModelSpec("s", "c", (GroupSpec("sliding", 4, (0,), (Plane("k", "uint8", (8,)),), window=8),), chunk_tokens=16)
PATIENCE_S = 20.0

Dial = Callable[..., Lookups]


def prompt(tokens: int, seed: int = 0, spec: ModelSpec = SPEC) -> Chain:
    ids = np.random.default_rng(seed).integers(0, 1 << 40, tokens)
    return Chain(root_digest(spec.fingerprint), ids, spec.chunk_tokens)


def store(server: EmbeddedServer, chain: Chain, spec: ModelSpec = SPEC) -> None:
    """Publish all of a prompt, its tail too, as a worker's save does; when this returns it can be found."""
    objects = []
    for group_number, group in enumerate(spec.groups):
        for chunk in range(-(-len(chain) // CHUNK)):
            tokens = min(CHUNK, len(chain) - chunk * CHUNK)
            blocks = len(group.rules.keep(tokens))
            key = object_key(chain.partial(chunk, tokens), group_number, spec.shard)
            parent = object_key(chain.parent(chunk), group_number, spec.shard) if tokens < CHUNK else b""
            objects.append(NewObject(key, object_bytes(group, blocks), blocks, tokens, parent))

    def publish() -> None:
        server.server.pool.reserve(objects, "writer")
        assert server.server.pool.commit([each.key for each in objects], "writer") == len(objects)

    server.call(publish)


def heard_by(server: EmbeddedServer) -> list[wire.ToServer]:
    """Every message that attached clients send from now on, as the server takes them."""
    handlers = server.server._handlers
    handle, heard = handlers.handle, []

    def noted(session: Any, message: wire.ToServer, nbytes: int = 0) -> None:
        heard.append(message)
        handle(session, message, nbytes)

    handlers.handle = noted  # type: ignore[method-assign]
    return heard


def asked(heard: list[wire.ToServer]) -> list[str]:
    return [message.request for message in heard if isinstance(message, wire.Lookup)]


def answer(lookups: Lookups, request: str, chain: Chain) -> Hit | None:
    inquiry = lookups.ask(request, chain)
    return lookups.wait(inquiry, PATIENCE_S)


@pytest.fixture
def dial() -> Iterator[Dial]:
    made: list[Lookups] = []

    def start(server: EmbeddedServer, spec: ModelSpec = SPEC, **more: Any) -> Lookups:
        more = {"timeout_s": PATIENCE_S, **more}
        made.append(Lookups(server.endpoint, "engine", spec, context=server.context, **more))
        assert made[-1].wait_connected(PATIENCE_S)
        return made[-1]

    yield start
    for lookups in made:
        lookups.close()


# -- what need not be asked -----------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, 5 * CHUNK + 3])
def test_a_prompt_never_seen_is_known_at_once_and_sends_nothing(embed: Embed, dial: Dial, tokens: int) -> None:
    server = embed()
    store(server, prompt(3 * CHUNK + 5))
    lookups, heard = dial(server), heard_by(server)
    for seed in range(1, 51):
        assert lookups.ask(f"new-{seed}", prompt(tokens, seed)).hit is MISS
    known = prompt(3 * CHUNK)
    assert answer(lookups, "known", known) == Hit(3 * CHUNK - 1)
    assert asked(heard) == ["known"], "messages of one client come in order: nothing was sent for the others"


def test_other_prompts_tails_are_no_reason_to_ask(embed: Embed, dial: Dial) -> None:
    server = embed()
    for seed in range(1, 9):
        store(server, prompt(CHUNK // 2, seed))
    lookups, heard = dial(server), heard_by(server)
    for seed in range(101, 121):
        assert lookups.ask(f"new-{seed}", prompt(CHUNK // 2, seed)).hit is MISS
        assert lookups.ask(f"long-{seed}", prompt(2 * CHUNK, seed)).hit is MISS
    assert answer(lookups, "known", prompt(CHUNK // 2, 3)) == Hit(
        CHUNK // 2 - 1, 0, CHUNK // 2, prompt(CHUNK // 2, 3).partial(0, CHUNK // 2)
    )
    assert asked(heard) == ["known"]


def test_unasked_lookups_are_counted(embed: Embed, dial: Dial) -> None:
    server = embed()
    lookups, heard = dial(server), heard_by(server)
    for seed in range(1, 51):
        lookups.ask("new", prompt(40, seed))
    lookups.close()
    assert eventually(lambda: any(isinstance(message, wire.Bye) for message in heard))
    told = [message for message in heard if isinstance(message, wire.Missed)]
    assert (sum(each.requests for each in told), sum(each.tokens for each in told)) == (50, 2000)
    assert len(told) < 50
    figures = server.server.metrics.summary()
    assert figures["lookups_total"] == 50
    assert figures["lookup_miss_tokens_total"] == 2000


@pytest.mark.parametrize(
    "tokens, hit", [(1, 0), (CHUNK // 2, CHUNK // 2 - 1), (CHUNK, CHUNK - 1), (2 * CHUNK + 3, 2 * CHUNK + 2)]
)
def test_what_is_published_is_found_at_once(embed: Embed, dial: Dial, tokens: int, hit: int) -> None:
    """A prompt that was a certain miss is none as soon as it is stored, and one again once it is gone."""
    server = embed()
    lookups, chain = dial(server), prompt(tokens)
    assert lookups.ask("before", chain).hit is MISS
    store(server, chain)
    found = answer(lookups, "after", chain)
    assert found is not None and found.tokens == hit
    lookups.drop_lease("after")
    server.call(server.server.pool.clear)
    assert lookups.ask("purged", chain).hit is MISS


def test_a_tail_alone_is_found(embed: Embed, dial: Dial) -> None:
    """A stored prompt shorter than a chunk, and a longer one that goes on from it."""
    server = embed()
    lookups = dial(server)
    longer = prompt(3 * CHUNK)
    short = Chain(root_digest(SPEC.fingerprint), longer.tokens[:5], CHUNK)
    store(server, short)
    found = answer(lookups, "longer", longer)
    assert found == Hit(5, 0, 5, short.partial(0, 5))


def test_where_no_group_reads_every_token_the_server_is_asked(embed: Embed, dial: Dial) -> None:
    server = embed()
    lookups, heard = dial(server, SLIDING), heard_by(server)
    assert answer(lookups, "new", prompt(40, spec=SLIDING)) == MISS
    assert asked(heard) == ["new"]


def test_a_table_that_is_none_is_refused_and_everything_asked(
    embed: Embed, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:

    fetch = client.fetch_presence

    def fetched(*place: Any) -> Any:
        connection, fd, nbytes = fetch(*place)
        return connection, fd, 2 * nbytes

    monkeypatch.setattr(client, "fetch_presence", fetched)
    server = embed()
    store(server, prompt(40))
    lookups, heard = dial(server), heard_by(server)
    assert answer(lookups, "new", prompt(40, seed=1)) == MISS
    assert answer(lookups, "known", prompt(40)) is not None
    assert asked(heard) == ["new", "known"]


def test_a_restarted_server_brings_its_own_table(dial: Dial) -> None:
    with tempfile.TemporaryDirectory(prefix="layerflow-") as folder:
        endpoint = f"ipc://{folder}/control"
        settings = Settings(pool={"size": "4MiB"}, server={"drain_timeout_s": 0.1})
        old, new = prompt(40, seed=1), prompt(40, seed=2)
        with EmbeddedServer(settings, endpoint) as first:
            store(first, old)
            lookups = Lookups(endpoint, "engine", SPEC, timeout_s=PATIENCE_S)
            assert lookups.wait_connected(PATIENCE_S)
            assert answer(lookups, "old", old) == Hit(39, 2, 8, old.partial(2, 8))
        with EmbeddedServer(settings, endpoint) as second:
            store(second, new)
            assert eventually(lambda: answer(lookups, "new", new) != MISS)
            heard = heard_by(second)
            assert lookups.ask("old", old).hit is MISS, "the table of the server that is gone"
            assert answer(lookups, "again", new) != MISS
            assert asked(heard) == ["again"]
            lookups.close()


# -- answers --------------------------------------------------------------------------------------


def muted(server: EmbeddedServer) -> Callable[[], None]:
    """The server takes lookups and keeps its answers to itself until the returned function is called."""
    handlers, kept = server.server._handlers, []
    lookup = handlers._lookups.look_up

    async def keep(session: ClientSession, message: wire.Lookup) -> None:
        kept.append((session, message))

    handlers._lookups.look_up = keep  # type: ignore[method-assign]

    def go_on() -> None:
        handlers._lookups.look_up = lookup  # type: ignore[method-assign]
        for session, message in kept:
            server.server.mailboxes.start(session.account, lookup(session, message))

    return lambda: server.call(go_on)  # type: ignore[return-value]


def test_at_sight_nobody_waits_for_the_answer_and_the_lease_follows(
    embed: Embed, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups_module, "PROMPT_S", PATIENCE_S)
    server = embed()
    store(server, prompt(40))
    lookups = dial(server, at_sight=True)
    go_on = muted(server)
    inquiry = lookups.ask("seen", prompt(40))
    assert inquiry.hit is None
    assert lookups.wait(inquiry, 0.0) == inquiry.seen == Hit(39, 2, 8, prompt(40).partial(2, 8))
    go_on()
    assert eventually(lambda: server.server.pool.statistics().pinned == 3)
    assert lookups.ask("unseen", prompt(40, seed=1)).hit is MISS

    def asked_on() -> bool:
        lookups.ask("next", prompt(40))
        return inquiry.hit == inquiry.seen

    assert eventually(asked_on), "answers that nobody waits for are taken with a later question"


def test_a_server_that_owes_an_answer_is_not_believed_at_sight(
    embed: Embed, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed()
    store(server, prompt(40))
    lookups = dial(server, at_sight=True)
    go_on = muted(server)
    old = lookups.ask("old", prompt(40))
    monkeypatch.setattr(lookups_module, "PROMPT_S", -1.0)
    assert lookups.wait(old, 0.0) is None, "what was seen is out of date"
    assert lookups.ask("new", prompt(40)).seen is None
    go_on()
    assert lookups.wait(old, PATIENCE_S) == Hit(39, 2, 8, prompt(40).partial(2, 8))


def test_answers_reach_the_inquiry_they_belong_to(embed: Embed, dial: Dial) -> None:
    server = embed()
    chains = [prompt(tokens, seed=tokens) for tokens in (20, 33, 50)]
    for chain in chains:
        store(server, chain)
    lookups = dial(server)
    inquiries = [lookups.ask(f"request-{len(chain)}", chain) for chain in chains]
    hits = [lookups.wait(inquiry, PATIENCE_S) for inquiry in reversed(inquiries)]
    assert [hit.tokens for hit in hits if hit is not None] == [49, 32, 19]


def test_an_answer_that_is_late_is_not_waited_for_and_still_taken(embed: Embed, dial: Dial) -> None:
    server = embed()
    store(server, prompt(40))
    lookups = dial(server)
    go_on = muted(server)
    inquiry = lookups.ask("late", prompt(40))
    for patience in (-1.0, 0.0, 0.01):
        assert lookups.wait(inquiry, patience) is None
    go_on()
    assert lookups.wait(inquiry, PATIENCE_S) == inquiry.hit == Hit(39, 2, 8, prompt(40).partial(2, 8))


def test_a_server_that_does_not_answer_in_time_has_nothing(embed: Embed, dial: Dial) -> None:
    """All open lookups are misses then, and a new connection is made."""
    server = embed()
    store(server, prompt(40))
    lookups = dial(server, timeout_s=0.0)
    go_on = muted(server)
    inquiries = [lookups.ask(name, prompt(40)) for name in "ab"]
    assert lookups.wait(inquiries[0], 0.0) == MISS
    assert inquiries[1].hit == MISS
    go_on()
    assert lookups.wait_connected(PATIENCE_S)
    assert answer(lookups, "again", prompt(40)) != MISS
    assert eventually(lambda: len(server.server.sessions) == 1)


def test_a_refused_lookup_is_a_miss_and_nothing_else_is_lost(
    embed: Embed, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed()
    store(server, prompt(40))
    lookups = dial(server)

    async def refuse(session: Any, message: wire.Lookup) -> None:
        raise LayerflowError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(server.server._handlers._lookups, "look_up", refuse)
        assert answer(lookups, "refused", prompt(40)) == MISS
    connection = lookups.connection
    assert answer(lookups, "next", prompt(40)) != MISS
    assert lookups.connection is connection


def test_a_server_that_has_forgotten_the_client_is_greeted_again(embed: Embed, dial: Dial) -> None:
    server = embed()
    store(server, prompt(40))
    lookups = dial(server)
    [session] = server.server.sessions
    server.call(server.server._handlers.lose, session, "test")
    assert answer(lookups, "stranger", prompt(40)) == MISS
    assert lookups.wait_connected(PATIENCE_S)
    assert answer(lookups, "again", prompt(40)) != MISS


def test_the_lease_of_a_lookup_under_way_is_dropped(embed: Embed, dial: Dial) -> None:
    server = embed()
    store(server, prompt(40))
    lookups = dial(server)
    pinned = lambda: server.server.pool.statistics().pinned  # noqa: E731
    assert answer(lookups, "kept", prompt(40)) != MISS
    assert pinned() == 3
    lookups.drop_lease("kept")
    inquiry = lookups.ask("dropped", prompt(40))
    lookups.drop_lease("dropped")
    assert lookups.wait(inquiry, PATIENCE_S) != MISS
    assert eventually(lambda: pinned() == 0)


def test_a_dead_server_ends_the_wait(embed: Embed, dial: Dial) -> None:
    """By the fd server: nothing here waits for the lookup's own time."""
    server = embed()
    store(server, prompt(40))
    lookups = dial(server)
    muted(server)
    inquiry = lookups.ask("cut off", prompt(40))
    server.close()
    assert lookups.wait(inquiry, 1e6) == MISS
    assert lookups.ask("nobody", prompt(40)).hit == MISS


def test_without_a_server_everything_misses_and_closing_works(embed: Embed) -> None:
    server = embed()
    lookups = Lookups(server.endpoint + "-nowhere", "engine", SPEC, context=server.context)
    assert not lookups.wait_connected(0.01)
    inquiry = lookups.ask("nobody", prompt(40))
    assert isinstance(inquiry, Inquiry) and inquiry.hit is MISS
    assert lookups.wait(inquiry, 1e6) is MISS
    lookups.drop_lease("nobody")
    lookups.close()


def test_closing_leaves_nothing(embed: Embed) -> None:
    server = embed()
    before = Counter(layerflow_threads())
    lookups = Lookups(server.endpoint, "engine", SPEC, context=server.context)
    assert lookups.wait_connected(PATIENCE_S)
    lookups.close()
    assert lookups.ask("closed", prompt(40)).hit is MISS
    lookups.close()
    assert not Counter(layerflow_threads()) - before, "threads of earlier tests may end meanwhile"
    assert eventually(lambda: not len(server.server.sessions))
    assert server.server.metrics.summary().get("protocol_errors_total", {}) == {}
