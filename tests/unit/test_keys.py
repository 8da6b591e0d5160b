"""Chained keys: every byte-changing fact changes them, nothing else does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerflow.errors import BadKey
from layerflow.keys import KEY_BYTES, Chain, HashedChain, Media, describe_key, object_key, root_digest
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

FINGERPRINT = bytes(range(16))
ROOT = root_digest(FINGERPRINT)
TOKENS = st.lists(st.integers(0, 300), max_size=200)
HASHES = st.lists(st.binary(min_size=1, max_size=64), max_size=20, unique=True)


@given(TOKENS, TOKENS, st.integers(1, 32))
def test_two_prompts_share_exactly_their_common_chunks(one: list[int], other: list[int], chunk: int) -> None:
    first, second = Chain(ROOT, one, chunk), Chain(ROOT, other, chunk)
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    for index, (a, b) in enumerate(zip(first.digests, second.digests, strict=False)):
        assert (a == b) == ((index + 1) * chunk <= common)


@given(TOKENS, TOKENS, st.integers(1, 32))
def test_extending_a_chain_is_hashing_it_whole(prompt: list[int], generated: list[int], chunk: int) -> None:
    chain = Chain(ROOT, prompt, chunk)
    chain.extend(generated)
    whole = Chain(ROOT, prompt + generated, chunk)
    assert chain.digests == whole.digests
    assert len(chain) == len(whole)
    assert chain.parent(len(chain.digests)) == whole.parent(len(whole.digests))


def test_a_partial_tail_is_found_by_a_prompt_that_continues_it() -> None:
    short, long = Chain(ROOT, list(range(40)), 16), Chain(ROOT, list(range(60)), 16)
    assert short.partial(2, 8) == long.partial(2, 8)
    assert short.partial(2, 8) != long.partial(2, 7)
    assert short.partial(1, 8) != short.partial(2, 8)


@pytest.mark.parametrize(
    "other",
    [
        root_digest(FINGERPRINT, adapter="lora-a"),
        root_digest(FINGERPRINT, salt="tenant"),
        root_digest(FINGERPRINT[::-1]),
        root_digest(FINGERPRINT, adapter="a", salt="bc"),
        root_digest(FINGERPRINT, adapter="ab", salt="c"),
    ],
)
def test_what_changes_the_bytes_changes_every_key(other: bytes) -> None:
    tokens = list(range(64))
    assert not set(Chain(ROOT, tokens, 16).digests) & set(Chain(other, tokens, 16).digests)


def test_an_adapter_and_a_salt_are_not_confused() -> None:
    assert root_digest(FINGERPRINT, adapter="a", salt="bc") != root_digest(FINGERPRINT, adapter="ab", salt="c")


def test_media_change_the_chunks_they_touch_and_what_follows() -> None:
    tokens = [7] * 64
    plain = Chain(ROOT, tokens, 16)
    cat, dog = (Chain(ROOT, tokens, 16, [Media(20, 4, content)]) for content in (b"cat", b"dog"))
    assert plain.digests[0] == cat.digests[0] == dog.digests[0]
    for later in range(1, 4):
        assert len({plain.digests[later], cat.digests[later], dog.digests[later]}) == 3


def test_media_across_a_chunk_border_belong_to_both_chunks() -> None:
    one, other = (Chain(ROOT, [7] * 32, 16, [Media(12, 8, content)]) for content in (b"1", b"2"))
    assert one.partial(0, 12) == other.partial(0, 12)
    assert one.partial(0, 13) != other.partial(0, 13)


@pytest.mark.parametrize(
    "bad",
    [
        *([1.5], [[1, 2]], ["a"], "ab", [1, -1], [2**63], [2**64]),
        *(np.zeros(3, dtype=bool), np.zeros((1, 2), dtype=int), np.array([1, -1]), np.array([2**63], np.uint64)),
    ],
)
def test_what_is_no_token_list_is_refused(bad: object) -> None:
    with pytest.raises(BadKey, match="token ids"):
        Chain(ROOT, bad, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [np.arange(4), array("q", range(4))])
def test_a_chain_has_tokens_of_its_own(tokens: Any) -> None:
    chain = Chain(ROOT, tokens, 2)
    tokens[0] = 99
    assert chain.tokens[0] == 0


def test_hashing_a_long_prompt_keeps_the_interpreter() -> None:
    """An engine hashes while it schedules; any other thread that runs Python would keep it for 5 ms each time."""
    tokens, turns, over = list(range(50_000)), 0, False

    def run() -> None:
        nonlocal turns
        while not over:
            turns += 1
            time.sleep(0)  # lets go by itself

    thread, interval = threading.Thread(target=run), sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # so long nobody is made to let go, on a machine that stands still for seconds neither
    try:
        thread.start()
        before = turns
        for _ in range(10):  # who lets go for a moment only need not lose it
            Chain(ROOT, tokens, 256)
        assert turns == before
    finally:
        over = True
        sys.setswitchinterval(interval)
        thread.join()


def test_object_keys_differ_by_group_and_rank() -> None:
    digest = Chain(ROOT, [1] * 16, 16).digests[0]
    keys = {object_key(digest, group, shard) for group in range(3) for shard in Shard(tp_size=2, pp_size=2).peers()}
    assert len(keys) == 12
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert describe_key(object_key(digest, 2, Shard(1, 2))).endswith("/g2/layer0/head1")


def test_keys_do_not_depend_on_the_process() -> None:
    program = (
        "from layerflow.keys import *; from layerflow.spec import *;"
        "s = ModelSpec('m', 'c', (GroupSpec('full', 16, (0, 1), (Plane('k', 'float16', (2, 8)),)),));"
        "print(Chain(root_digest(s.fingerprint), list(range(600)), s.chunk_tokens).digests[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "12345")
    }
    spec = ModelSpec("another name", "c", (GroupSpec("full", 16, (0, 1), (Plane("k", "float16", (2, 8)),)),))
    here = Chain(root_digest(spec.fingerprint), list(range(600)), spec.chunk_tokens).digests[-1].hex()
    assert seen == {here + "\n"}


@given(HASHES, st.integers(2, 64))
def test_a_page_has_a_digest_of_its_own_hash_and_the_root(hashes: list[bytes], page: int) -> None:
    chain = HashedChain(ROOT, hashes, page)
    assert chain.digests == [digest for each in hashes for digest in HashedChain(ROOT, [each], page).digests]
    assert len(set(chain.digests)) == len(hashes)
    assert not set(chain.digests) & set(HashedChain(FINGERPRINT, hashes, page).digests)


@given(HASHES, st.integers(2, 64), st.data())
def test_hashes_may_begin_at_any_page(hashes: list[bytes], page: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(hashes)))
    assert HashedChain(ROOT, hashes[first:], page).digests == HashedChain(ROOT, hashes, page).digests[first:]


@given(HASHES, st.integers(2, 64))
def test_only_whole_pages_have_digests(hashes: list[bytes], page: int) -> None:
    chain = HashedChain(ROOT, hashes, page)
    for number, digest in enumerate(chain.digests):
        assert chain.partial(number, page) == digest
        assert chain.parent(number + 1) == digest
        assert {chain.partial(number, tokens) for tokens in range(1, page)} == {b""}
        assert chain.block_digests(number, 1) == b""
    assert chain.partial(len(hashes), page) == b""
    assert chain.tail == b""


@given(HASHES, st.integers(1, 64))
def test_a_hit_may_end_with_the_last_page(hashes: list[bytes], page: int) -> None:
    """A hit leaves a token to compute; the engine has left that one out already."""
    chain = HashedChain(ROOT, hashes, page)
    assert len(chain) == len(hashes) * page + 1
    assert len(chain.digests) == len(chain) // page


@given(HASHES)
def test_the_token_behind_pages_of_one_token_is_no_page(hashes: list[bytes]) -> None:
    chain = HashedChain(ROOT, hashes, 1)
    *pages, left = chain.digests
    assert left not in pages
    assert left == HashedChain(ROOT, [], 1).digests[0]
    assert left != HashedChain(FINGERPRINT, [], 1).digests[0]


def test_page_hashes_cannot_be_extended_and_tell_no_tokens() -> None:
    chain = HashedChain(ROOT, [b"one"], 16)
    with pytest.raises(BadKey, match="make another one of more hashes"):
        chain.extend([1])
    with pytest.raises(BadKey, match="no tokens"):
        _ = chain.tokens
    with pytest.raises(BadKey, match="at least 1"):
        HashedChain(ROOT, [], 0)


@given(TOKENS, st.integers(1, 16))
def test_a_chain_of_tokens_and_one_of_hashes_never_meet(tokens: list[int], page: int) -> None:
    """Not even where an engine hands over as hashes what the other chain hashes, or its very digests."""
    chain = Chain(ROOT, tokens, page)
    ids = [np.array(tokens[at : at + page], np.int64).tobytes() for at in range(0, len(tokens) - page + 1, page)]
    for hashes in (ids, chain.digests):
        assert not set(chain.digests) & set(HashedChain(ROOT, [each[:64] for each in hashes], page).digests)
