"""What a lookup asks of the tier behind the arena: how many keys, in how many questions, and that no hit is missed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerflow.agent.presence import hit_of as hit_of_prompt
from layerflow.agent.presence import lookup_of
from layerflow.config.settings import PoolSettings
from layerflow.hits import BlockDigests, find_hit
from layerflow.keys import Chain, object_key
from layerflow.pool.arena import Arena as PoolArena
from layerflow.pool.base import SharedChunk, StoredTail
from layerflow.pool.chunk_index import NO_CHUNKS, ChunkIndex
from layerflow.pool.memory import MemoryPool
from layerflow.server.account import Accounts, Allowance, Charge
from layerflow.server.incoming import IncomingObjects
from layerflow.server.mailboxes import Mailboxes
from layerflow.server.search import FEW_CHUNKS, ask_tier, view_of_tier
from layerflow.server.sources import ObjectSources
from layerflow.server.tier import tier as real
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard
from layerflow.wire.host_messages import Ask, Present, split_keys
from layerflow.wire.messages import MAX_PEER_KEYS

ROOT = b"r" * 16
BLOCK, CHUNK = 2, 4
STATE = -1
_KINDS = {0: "full", STATE: "state"}


def told_by(question: Coroutine[Any, Any, frozenset[bytes]]) -> frozenset[bytes]:
    """Its answer, all slices one after the other. What it asks is answered at once."""
    while True:
        try:
            assert question.send(None) is None
        except StopIteration as ended:
            return ended.value


def charge() -> Charge:
    return Accounts(lambda: Allowance(1 << 30, 1 << 30)).of(1).charge("a lookup that waits")


class Arena:
    """Objects that are there, and nothing else of a pool."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self.keys = frozenset(keys)

    def covering(self, spec: ModelSpec) -> None:
        return None

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.keys for key in keys]

    def tails(self, parent: bytes, most: int, *, undigested: bool) -> list[StoredTail]:
        return []

    def sharing(self, own: bytes) -> Iterator[SharedChunk]:
        return iter(())


class Tier(Arena):
    """Answers `answers` questions and then none."""

    chunks = NO_CHUNKS
    settings = SimpleNamespace(lookup_timeout_ms=60_000)  # no machine is so busy

    def __init__(self, keys: Sequence[bytes] = (), answers: int = 99) -> None:
        super().__init__(keys)
        self.answers, self.asked = answers, list[int]()
        self.until = list[float]()

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    async def ask(self, packed: bytes, charge: Charge, until: float) -> frozenset[bytes]:
        keys = split_keys(packed)
        assert len(set(keys)) == len(keys)
        self.until.append(until)
        if keys:
            self.asked.append(len(keys))
        self.answers -= 1
        return self.keys & frozenset(keys) if self.answers >= 0 else frozenset()


def spec_of(windows: Sequence[int], shards: int = 1) -> ModelSpec:
    """One group per window, 0 = full attention, STATE = recurrent state."""
    plane = (Plane("kv", "uint8", (1,)),)
    groups = tuple(
        GroupSpec(_KINDS.get(window, "sliding"), BLOCK, (layer,), plane, window=max(0, window))
        for layer, window in enumerate(windows)
    )
    return ModelSpec("m", "c", groups, Shard(0, shards), chunk_tokens=CHUNK)


def keys_of(spec: ModelSpec, digests: Sequence[bytes]) -> list[bytes]:
    groups, shards = range(len(spec.groups)), spec.shard.peers()
    return [object_key(digest, group, shard) for digest in digests for group in groups for shard in shards]


def prompt_of(tokens: int) -> tuple[list[bytes], int, bytes]:
    """Digests, tokens, digest of the tail."""
    digests = [f"{at:016d}".encode() for at in range(tokens // CHUNK)]
    own = b"tail".ljust(16, b".") if tokens % CHUNK else b""
    return digests, tokens, own


def found_by(arena: Arena, tier: Tier, spec: ModelSpec, tokens: int) -> frozenset[bytes]:
    return told_by(ask_tier(arena, tier, spec, prompt_of(tokens), charge()))  # type: ignore[arg-type]


def hit_of(arena: Arena, tier: Tier, spec: ModelSpec, found: frozenset[bytes], tokens: int) -> int:
    digests, _, own = prompt_of(tokens)
    return find_hit(view_of_tier(arena, tier, found), spec, ROOT, digests, tokens, tail_digest=own).tokens  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stored", "keys", "questions"),
    [
        (0, 8 * 10, 1),  # of 4096
        (1, 8 * 10, 1),  # the first chunk was asked for already
        (100, 8 * (10 + 127 - 7), 2),
        (512, 8 * 512, 2),
    ],
)
def test_128_k_tokens_at_tp_8(stored, keys, questions):
    spec = spec_of([0], shards=8)
    digests, tokens, _ = prompt_of(512 * CHUNK)
    tier = Tier(keys_of(spec, digests[:stored]))
    found = found_by(Arena(), tier, spec, tokens)
    assert (sum(tier.asked), len(tier.asked)) == (keys, questions)
    assert hit_of(Arena(), tier, spec, found, tokens) == min(stored * CHUNK, tokens - 1)


def test_a_short_prompt_and_what_the_arena_has_not_are_one_question():
    spec = spec_of([0], shards=8)
    for chunks, here in ((FEW_CHUNKS, 0), (512, 512 - FEW_CHUNKS)):
        digests, tokens, _ = prompt_of(chunks * CHUNK + 1)
        tier, arena = Tier(keys_of(spec, digests)), Arena(keys_of(spec, digests[:here]))
        found = found_by(arena, tier, spec, tokens)
        assert tier.asked == [8 * (FEW_CHUNKS + 1)], "and its tail"
        assert hit_of(arena, tier, spec, found, tokens) == chunks * CHUNK


def test_an_answer_that_does_not_come_ends_it():
    spec = spec_of([0])
    digests, tokens, _ = prompt_of(100 * CHUNK)
    for answers, hit in ((0, 0), (1, 2 * CHUNK)):  # of the first question chunks 0, 1, 3, 7, ... have come
        tier = Tier(keys_of(spec, digests), answers)
        found = found_by(Arena(), tier, spec, tokens)
        assert hit_of(Arena(), tier, spec, found, tokens) == hit
        assert len(set(tier.until)) == 1 and tier.until[0] <= time.monotonic() + 60, "one deadline for both"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0, STATE, 3, 9, 1000]), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 60 * CHUNK),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 60),
    st.randoms(use_true_random=False),
)
def test_no_hit_is_missed(windows, shards, tokens, here, there, stored, rng: random.Random):
    """Whatever is missing where: as if every object had been asked for."""
    spec = spec_of(windows, shards)
    digests, _, own = prompt_of(tokens)
    everything = keys_of(spec, [*digests, own] if own else digests)
    whole = set(keys_of(spec, digests[:stored]))
    arena = Arena([key for key in everything if rng.random() < here * 0.3])
    tier = Tier([key for key in everything if key in whole or rng.random() < there])
    found = found_by(arena, tier, spec, tokens)
    assert found <= tier.keys
    best = hit_of(arena, tier, spec, tier.keys, tokens)
    assert hit_of(arena, tier, spec, found, tokens) == best
    assert len(tier.asked) <= 2 and sum(tier.asked) <= len(everything)


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[real.Tier, list[Ask]]]:
    """A tier whose host only listens."""
    sent: list[Ask] = []
    with contextlib.closing(PoolArena(1 << 20)) as arena:
        pool, settings = MemoryPool(arena), PoolSettings()
        incoming = IncomingObjects(pool, lambda events: None)
        tier = real.Tier(
            "disk",
            {},
            settings,
            pool=pool,
            arena=(arena.fd, arena.nbytes),
            emit=lambda events: None,
            incoming=incoming,
            changed=lambda key: None,
            turned=lambda: None,
        )
        monkeypatch.setattr(tier._questions, "_send", lambda ask: sent.append(ask) or True)
        tier.up = True
        yield tier, sent


def ask(tier: real.Tier, keys: Sequence[bytes], answers: list[frozenset[bytes]], within_s: float = 60.0) -> Mailboxes:
    """Ask in a client's message: the mailboxes where it goes on once it has been answered."""

    async def told() -> None:
        answers.append(await tier.ask(b"".join(keys), kept, time.monotonic() + within_s))

    kept = charge()
    mailboxes = Mailboxes()
    mailboxes.start(kept.account, told())
    return mailboxes


async def test_equal_questions_under_way_are_one(tier):
    asked, sent = tier
    answers: list[frozenset[bytes]] = []
    one, two = bytes(24), b"2" * 24
    first, equal, other = (ask(asked, keys, answers) for keys in ([one, two], [one, two], [one]))
    assert [len(ask.keys) // 24 for ask in sent] == [2, 1]
    asked.host_said(Present(sent[0].id, b"\1\0"))
    await asked_for(sent, first, equal)
    assert answers == [frozenset([one])] * 2
    last = ask(asked, [one, two], answers)
    assert len(sent) == 3, "what was answered is asked anew"
    asked.host_lost("for a test")
    await asked_for(sent, other, last)
    assert answers[2:] == [frozenset()] * 2
    assert (asked.statistics().lookups, asked.statistics().lookup_keys) == (3, 5)


async def test_a_question_past_its_deadline_is_not_asked(tier):
    asked, sent = tier
    answers: list[frozenset[bytes]] = []
    ask(asked, [bytes(24)], answers, within_s=0.0)
    assert answers == [frozenset()] and not sent


async def asked_for(sent: list[Ask], *mailboxes: Mailboxes) -> list[bytes]:
    """What the host is asked for, once nobody has anything to do but wait for its answer."""
    while any(each.busy for each in mailboxes):  # noqa: ASYNC110 - the mailboxes' turns are what is tested
        await asyncio.sleep(0)
    return [ask.keys for ask in sent]


async def test_a_short_prompt_of_many_objects_is_asked_for_in_turns_with_other_clients(tier):
    """Recurrent state and 1000 ranks: no group needs the prompt's beginning, and each chunk is 1000 objects."""
    asked, sent = tier
    asked.settings = PoolSettings(lookup_timeout_ms=600_000)
    mailboxes, accounts = Mailboxes(), Accounts(lambda: Allowance(1 << 30, 1 << 30))
    answers: list[frozenset[bytes]] = []

    async def look(client: int, spec: ModelSpec, tokens: int) -> None:
        with accounts.of(client).charge("a lookup that waits") as kept:
            answers.append(await ask_tier(Arena(), asked, spec, prompt_of(tokens), kept))  # type: ignore[arg-type]

    wide, narrow = spec_of([STATE], shards=1000), spec_of([STATE])
    for tokens in (20 * CHUNK, 21 * CHUNK):
        mailboxes.start(accounts.of(1), look(1, wide, tokens))
    [first] = await asked_for(sent, mailboxes)
    assert len(first) == 24 * real.ASKED_KEYS
    assert first[:24] == object_key(prompt_of(20 * CHUNK)[0][-1], 0, wide.shard), "the longest hit goes first"
    assert accounts.of(1).nbytes >= 2 * len(first), "all that is asked for is counted"
    mailboxes.start(accounts.of(2), look(2, narrow, CHUNK))
    assert len(await asked_for(sent, mailboxes)) == 2
    asked.host_said(Present(sent[1].id, b"\1"))
    await asked_for(sent, mailboxes)
    assert answers == [frozenset(keys_of(narrow, prompt_of(CHUNK)[0]))], "before the first one's have all been asked"

    answered = {sent[1].id}
    while len(answers) < 3:
        [under_way] = [ask for ask in sent if ask.id not in answered]
        answered.add(under_way.id)
        asked.host_said(Present(under_way.id, b"\1" * (len(under_way.keys) // 24)))
        await asked_for(sent, mailboxes)
    assert answers[1] == frozenset(keys_of(wide, prompt_of(20 * CHUNK)[0]))
    assert answers[2] == frozenset(keys_of(wide, prompt_of(21 * CHUNK)[0]))
    assert max(len(ask.keys) for ask in sent) <= 24 * real.ASKED_KEYS
    assert accounts.of(1).nbytes == 0 and not asked._questions._askers


async def test_a_question_whose_client_waits_past_its_deadline_is_not_sent(tier):
    asked, sent = tier
    answers: list[frozenset[bytes]] = []
    many = [number.to_bytes(24) for number in range(real.ASKED_KEYS)]
    client = charge()
    told = anyio.Event()

    async def question(keys: Sequence[bytes], within_s: float) -> None:
        answers.append(await asked.ask(b"".join(keys), client, time.monotonic() + within_s))
        told.set()

    mailboxes = Mailboxes()
    mailboxes.start(client.account, question(many, 600.0))
    mailboxes.start(client.account, question([b"k" * 24], 0.001))
    await told.wait()
    assert answers == [frozenset()] and len(sent) == 1
    asked.host_said(Present(sent[0].id, b"\1" * len(many)))
    await asked_for(sent, mailboxes)
    assert answers[1] == frozenset(many) and len(sent) == 1


async def test_lookups_that_wait_keep_little_of_what_they_ask_for(tier):
    """A pass of the engine looks up all its waiting requests: none is refused for what the others ask for."""
    asked, sent = tier
    asked.settings = PoolSettings(lookup_timeout_ms=600_000)
    mailboxes, accounts = Mailboxes(), Accounts(lambda: Allowance(64 << 20, 1 << 30))
    spec, answers = spec_of([STATE], shards=256), list[frozenset[bytes]]()
    lookups, chunks = 200, real.ASKED_KEYS // 256

    async def look(number: int) -> None:
        digests = [f"{number:08d}{at:08d}".encode() for at in range(chunks)]
        with accounts.of(1).charge("a lookup that waits") as kept:
            answers.append(await ask_tier(Arena(), asked, spec, (digests, chunks * CHUNK, b""), kept))  # type: ignore[arg-type]

    for number in range(lookups):
        mailboxes.start(accounts.of(1), look(number))
    assert len(await asked_for(sent, mailboxes)) == 1 and len(asked._questions._pending) == lookups
    assert accounts.of(1).nbytes < 32 << 20
    asked.host_lost("for a test")
    await asked_for(sent, mailboxes)
    assert answers == [frozenset()] * lookups and not accounts.of(1).nbytes


@pytest.mark.parametrize("pieces", [0, 1, 2])
async def test_a_client_that_may_keep_no_more_is_told_what_has_been_found_by_then(tier, pieces: int):
    asked, sent = tier
    asked.settings = PoolSettings(lookup_timeout_ms=600_000)
    mailboxes, allowed = Mailboxes(), [1 << 30]
    accounts = Accounts(lambda: Allowance(allowed[0], 1 << 30))
    spec, answers = spec_of([STATE], shards=1000), list[frozenset[bytes]]()
    digests, tokens, _ = prompt_of(20 * CHUNK)

    async def look() -> None:
        with accounts.of(1).charge("a lookup that waits") as kept:
            allowed[0] = allowed[0] if pieces else kept.nbytes
            answers.append(await ask_tier(Arena(), asked, spec, (digests, tokens, b""), kept))  # type: ignore[arg-type]

    mailboxes.start(accounts.of(1), look())
    for piece in range(1, pieces + 1):
        await asked_for(sent, mailboxes)
        allowed[0] = 1 << 30 if piece < pieces else accounts.of(1).nbytes
        asked.host_said(Present(sent[-1].id, b"\1" * real.ASKED_KEYS))
    await asked_for(sent, mailboxes)
    longest = keys_of(spec, digests[::-1])
    assert answers == [frozenset(longest[: pieces * real.ASKED_KEYS])]
    assert len(sent) == pieces and not accounts.of(1).nbytes


class Peers:
    """They lend nothing of their own accord: what they are asked waits for the test."""

    def __init__(self) -> None:
        self.asked: list[Sequence[bytes]] = []
        self.waiting: list[Callable[[frozenset[bytes]], None]] = []
        self.declined: list[bytes] = []

    def able_peers(self, now: float) -> list[str]:
        return ["silent"]

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def ask(self, keys: Sequence[bytes], on_done: Callable[[frozenset[bytes]], None], until: float) -> None:
        self.asked.append(keys)
        self.waiting.append(on_done)

    def decline(self, keys: Sequence[bytes]) -> None:
        self.declined += keys


@pytest.mark.parametrize("chunks", [300, 300 + MAX_PEER_KEYS // 16])
async def test_a_silent_peer_keeps_nothing_from_being_asked_of_the_tier(chunks: int) -> None:
    """However long a peer is silent, a lookup waits for it once a round, and not for each of the tier's pieces."""
    spec = spec_of([0, 1000], shards=8)
    digests, tokens, _ = prompt_of(chunks * CHUNK)
    every = keys_of(spec, digests)
    behind, peers, answers = Tier(every[:-1]), Peers(), list[frozenset[bytes]]()
    behind.settings = SimpleNamespace(lookup_timeout_ms=600_000)
    sources = ObjectSources(behind.settings, behind, peers)  # type: ignore[arg-type]
    mailboxes, accounts = Mailboxes(), Accounts(lambda: Allowance(1 << 30, 1 << 30))

    async def look() -> None:
        with accounts.of(1).charge("a lookup that waits") as kept:
            answers.append(await ask_tier(Arena(), sources, spec, (digests, tokens, b""), kept))  # type: ignore[arg-type]

    mailboxes.start(accounts.of(1), look())
    await asked_for([], mailboxes)
    [probed] = behind.asked
    peers.waiting.pop()(frozenset())
    await asked_for([], mailboxes)
    assert sum(behind.asked) == len(every), "the tier is asked for everything while the peer is silent"
    assert max(behind.asked) == real.ASKED_KEYS and len(peers.asked) == 2
    first = set(peers.asked[0])
    assert len(first) == probed
    left = [key for key in every if key not in first]
    assert list(peers.asked[1][:MAX_PEER_KEYS]) == left[:MAX_PEER_KEYS], "all that one question takes"
    assert accounts.of(1).nbytes > 100 * len(peers.asked[1]), "what peers are asked for is counted"
    peers.waiting.pop()(frozenset(every[-2:]))
    await asked_for([], mailboxes)
    assert answers == [frozenset(every)] and not accounts.of(1).nbytes
    assert set(peers.declined) == set(every[:-1]), "what the tier has too is read from there"


class Remembering(Tier):
    """Lists nothing, and remembers what it was given."""

    def __init__(self, spec: ModelSpec, stored: Sequence[Chain]) -> None:
        self.chunks = ChunkIndex(100)
        keys = []
        for chain in stored:
            keys += keys_of(spec, [*chain.digests, chain.tail] if chain.tail else chain.digests)
            for chunk, digest in enumerate(chain.digests):
                key = object_key(digest, 0, spec.shard)
                self.chunks.add(key, CHUNK, block_digests=chain.block_digests(chunk, BLOCK))
        super().__init__(keys)


@pytest.mark.parametrize("chunks", [2, 60])
@pytest.mark.parametrize("gone", [False, True])
def test_of_a_pool_that_lists_nothing_hits_end_at_blocks_of_what_was_written(chunks: int, gone: bool) -> None:
    """With no more questions, and not of what the pool has evicted since."""
    spec = spec_of([0], shards=2)
    stored = Chain(ROOT, range((chunks + 1) * CHUNK), CHUNK)
    prompt = Chain(ROOT, [*range(chunks * CHUNK + BLOCK + 1), 10**6, 10**6], CHUNK)
    tier = Remembering(spec, [stored])
    if gone:
        tier.keys -= {object_key(stored.digests[-1], 0, Shard(1, 2))}
    asked = lookup_of(1, "r", prompt, lease_ms=1, block_tokens=spec.block_tokens)
    blocks = BlockDigests(asked.blocks_from, asked.block_digests, CHUNK // BLOCK)
    told = prompt.digests, len(prompt), prompt.tail
    answer = told_by(ask_tier(Arena(), tier, spec, told, charge(), blocks=blocks))  # type: ignore[arg-type]
    there = view_of_tier(Arena(), tier, answer)  # type: ignore[arg-type]
    found = find_hit(there, spec, ROOT, prompt.digests, len(prompt), tail_digest=prompt.tail, blocks=blocks)
    assert hit_of_prompt(found, prompt, spec).tokens == chunks * CHUNK + (0 if gone else BLOCK)
    assert len(tier.asked) == (1 if chunks < FEW_CHUNKS else 2)
