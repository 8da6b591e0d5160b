"""Chunks by the one that they follow and by their blocks: against a look at every one of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from layerflow.keys import DIGEST_BYTES, leading_blocks
from layerflow.pool.base import SharedChunk, StoredTail
from layerflow.pool.chunk_index import MOST_NEAR, ChunkIndex, merged_sharing, merged_tails

BLOCKS = st.lists(st.integers(0, 2), max_size=4)
PARENTS = st.sampled_from([b"", b"one", b"two"])


def digests_of(blocks: list[int]) -> bytes:
    """Chained as real ones are: each tells all blocks before it."""
    return b"".join(bytes(blocks[: end + 1]).ljust(DIGEST_BYTES, b"\xff") for end in range(len(blocks)))


def key_of(number: int) -> bytes:
    return number.to_bytes(24, "little")


class IndexMachine(RuleBasedStateMachine):
    """An index, and what was added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex()
        self.known: dict[bytes, tuple[int, bytes, bytes]] = {}

    @rule(number=st.integers(0, 20), more=st.integers(0, 1), parent=PARENTS, blocks=BLOCKS)
    def add(self, number: int, more: int, parent: bytes, blocks: list[int]) -> None:
        key = key_of(number)
        self.discard(number)
        self.known[key] = 2 * len(blocks) + more, parent, digests_of(blocks)
        self.index.add(key, *self.known[key])

    @rule(number=st.integers(0, 20))
    def discard(self, number: int) -> None:
        told = self.known.pop(key_of(number), None)
        if told is not None:
            self.index.discard(key_of(number), *told)

    @rule(own=BLOCKS.map(digests_of))
    def sharing(self, own: bytes) -> None:
        newest = list(reversed(self.known))
        found = [
            SharedChunk(shared, tokens, key, len(digests) // DIGEST_BYTES)
            for key, (tokens, _, digests) in self.known.items()
            if (shared := leading_blocks(own, digests))
        ]
        found.sort(key=lambda chunk: (-chunk.shared, chunk.shared < chunk.blocks, newest.index(chunk.key)))
        assert list(self.index.sharing(own)) == found

    @rule(parent=PARENTS.filter(bool), most=st.integers(0, 9), undigested=st.booleans())
    def tails(self, parent: bytes, most: int, undigested: bool) -> None:
        found = [
            StoredTail(tokens, key)
            for key, (tokens, before, digests) in self.known.items()
            if before == parent and tokens <= most and not (undigested and digests)
        ]
        listed = list(self.index.tails(parent, most, undigested=undigested))
        assert sorted(listed) == sorted(found)
        assert [tail.tokens for tail in listed] == sorted((tail.tokens for tail in found), reverse=True)

    @rule(block=BLOCKS.filter(bool))
    def begins(self, block: list[int]) -> None:
        first = digests_of(block)[:DIGEST_BYTES]
        assert self.index.begins(first) == any(told[2].startswith(first) for told in self.known.values())

    @invariant()
    def consistent(self) -> None:
        self.index.validate()
        assert set(self.index.tail_keys()) == {key for key, told in self.known.items() if told[1]}


TestIndex = IndexMachine.TestCase


@given(st.integers(1, 400), BLOCKS.filter(bool))
def test_of_many_that_share_as_much_a_few_are_offered_the_newest_first(stored: int, blocks: list[int]) -> None:
    """And one that shares more, before them, wherever it is."""
    index, own = ChunkIndex(), digests_of(blocks)
    for number in range(stored):
        other = own + bytes([1, number % 256, number // 256]).ljust(DIGEST_BYTES, b".")
        index.add(key_of(number), 0, block_digests=other)
    offered = [int.from_bytes(chunk.key, "little") for chunk in index.sharing(own)]
    assert len(offered) == min(stored, MOST_NEAR) and offered == sorted(offered, reverse=True)
    prompt = own + bytes([1, 1, 0]).ljust(DIGEST_BYTES, b".")
    best = next(index.sharing(prompt))
    assert best.shared == len(blocks) + (stored > 1)
    if stored > 1:
        assert best.key == key_of(1)


def test_of_the_digested_the_oldest_are_forgotten_beyond_so_many() -> None:
    index = ChunkIndex(3)
    for number in (0, 1, 2, 0, 3):
        index.add(key_of(number), 2, block_digests=digests_of([number % 2]))
    assert index.first_blocks().keys() == {key_of(2), key_of(0), key_of(3)}
    assert [chunk.key for chunk in index.sharing(digests_of([0]))] == [key_of(0), key_of(2)]
    index.discard(key_of(1), 2, block_digests=digests_of([1]))  # forgotten already
    index.validate()


def test_several_places_are_one_in_their_order_and_each_chunk_once() -> None:
    one, other = ChunkIndex(), ChunkIndex()
    one.add(b"a", 6, b"p", digests_of([0, 0, 1]))
    one.add(b"b", 2, b"p", digests_of([0]))
    other.add(b"b", 2, b"p", digests_of([0]))
    other.add(b"c", 5, b"p", digests_of([0, 0]))
    own = digests_of([0, 0])
    assert [chunk.key for chunk in merged_sharing(one.sharing(own), other.sharing(own))] == [b"c", b"a", b"b"]
    assert [tail.key for tail in merged_tails(one.tails(b"p"), other.tails(b"p"))] == [b"a", b"c", b"b"]
