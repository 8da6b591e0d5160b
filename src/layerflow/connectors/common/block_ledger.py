"""Which blocks a router is told of: chunks of the pool, cut into blocks of the engine, with its own hashes.

A router credits an engine with the leading blocks of a prompt that it knows of, so a chunk is told only while all that
is before it is there: what is told is what can be hit. Chunks that share blocks (they diverge inside of a chunk) tell
each block once, and take it back when the last of them has gone: with routers that count, a block told twice would
outlive its chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import structlog

from layerflow.wire.messages import ChunkChange

Hash = Any
"""The engine's own, of a block and all before it."""

TOKEN_BYTES = 4
MOST_REMOVED = 1024
"""Blocks of one event."""

log = structlog.get_logger("layerflow.events")


class BlockGroup(NamedTuple):
    """A cache group of the engine.

    :param number: the engine's. :param block_tokens: tokens of its blocks.
    :param sources: of layerflow's groups, those that hold its layers.
    :param whole: a hit needs all of its tokens.
    """

    number: int
    block_tokens: int
    sources: tuple[int, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive blocks that can be hit from now on.

    :param state: where, as of ChunkChange. :param parent: of the block before; None = there is none.
    :param tokens: theirs, uint32. :param extra: their chunk's, for its units from `first` on, `units` of each block.
    """

    group: int
    state: int
    hashes: list[Hash]
    parent: Hash | None
    tokens: bytes
    block_tokens: int
    extra: bytes
    first: int
    units: int


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks that cannot be hit there any more."""

    group: int
    state: int
    hashes: list[Hash]


BlockEvent = StoredBlocks | RemovedBlocks


@dataclass(slots=True, eq=False)
class _Told:
    """A chunk that was told.

    :param hashes: of its units. :param before: of the unit before; None = there is none.
    :param states: the chunk's, by group of the engine.
    """

    chunk: ChunkChange
    hashes: list[Hash]
    before: Hash | None
    states: tuple[int, ...]


class BlockLedger:
    """For one thread.

    :param groups: of the engine.
    :param unit: tokens that one of the engine's hashes covers; divides the groups' blocks and the chunks.
    :param hash_units: of a chunk's whole units, in order; given the hash before them. Another engine has described the
        chunk: where that cannot be read this raises, and the chunk is not told, nor is what follows it.

    :ivar unread: chunks that could not be read.
    """

    def __init__(
        self, groups: Sequence[BlockGroup], unit: int, hash_units: Callable[[Hash | None, ChunkChange], list[Hash]]
    ) -> None:
        self._groups = tuple(groups)
        self._unit = unit
        self._hash_units = hash_units
        self._whole = [at for at, group in enumerate(groups) if group.whole]
        self._told: dict[bytes, _Told] = {}  # a parent before its children
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._held: dict[bytes, ChunkChange] = {}  #: chunks that are there, and cannot be hit: one before them is not
        self._waiting: dict[bytes, dict[bytes, None]] = {}  #: of these, by parent
        self._counts: dict[tuple[int, int], dict[Hash, int]] = {}  #: by group and state: chunks that tell each block
        self.unread = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._told

    def __len__(self) -> int:
        return len(self._told)

    @property
    def blocks(self) -> int:
        """How many blocks are told, of all groups."""
        return sum(map(len, self._counts.values()))

    def known(self) -> set[bytes]:
        """Every chunk that is there, told or not."""
        return self._told.keys() | self._held.keys()

    def apply(self, change: ChunkChange) -> list[BlockEvent]:
        """A chunk has come, moved or gone: what routers are to be told."""
        events: list[BlockEvent] = []
        states = self._states(change.states)
        if (held := self._held.pop(change.digest, None)) is not None:
            self._unlink(self._waiting, held)
        if not self._is_there(states):
            self._remove(change.digest, events)
        elif change.digest in self._told:
            self._move(self._told[change.digest], change.states, events)
        elif change.parent and change.parent not in self._told:
            self._hold(change)
        else:
            self._tell(change, events)
        return events

    def gone(self, digest: bytes) -> list[BlockEvent]:
        """The chunk is not there any more."""
        return self.apply(ChunkChange(digest, b""))

    def clear(self) -> Iterator[list[BlockEvent]]:
        """Nothing is there any more; in pieces, of which the last need not be taken."""
        counts, self._counts = self._counts, {}
        for books in (self._told, self._children, self._held, self._waiting):
            books.clear()
        for (group, state), blocks in counts.items():
            for hashes in _in_pieces(list(blocks)):
                yield [RemovedBlocks(group, state, hashes)]

    def chunks(self) -> list[ChunkChange]:
        """Every chunk that is there, of those that are told a parent before its children."""
        return [*(told.chunk for told in self._told.values()), *self._held.values()]

    def again(self) -> Iterator[list[BlockEvent]]:
        """All that is told, for a router that has heard nothing of it; chunk by chunk, a parent before its children.

        Each block is taken back first: a router that knows it, and counts, counts one as before. What changes between
        two pieces is told as ever. A chunk that comes meanwhile may follow one that such a router has still to hear of,
        so it is part of this too.
        """
        seen: set[tuple[int, int, Hash]] = set()
        done: set[bytes] = set()
        while todo := [digest for digest in self._told if digest not in done]:
            for digest in todo:
                done.add(digest)
                if (told := self._told.get(digest)) is not None and (events := self._told_again(told, seen)):
                    yield events

    def _told_again(self, told: _Told, seen: set[tuple[int, int, Hash]]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for at, group in enumerate(self._groups):
            state = told.states[at]
            if not state:
                continue
            blocks = self._blocks_of(group, told.hashes)
            fresh = [(group.number, state, block) not in seen for block in blocks]
            seen.update((group.number, state, block) for block in blocks)
            if any(fresh):
                back = [block for block, new in zip(blocks, fresh, strict=True) if new]
                events.append(RemovedBlocks(group.number, state, back))
                events += self._stored(group, state, told, blocks, fresh)
        return events

    def validate(self) -> None:
        """Check every invariant, for tests."""
        counts: dict[tuple[int, int], dict[Hash, int]] = {}
        for digest, told in self._told.items():
            assert not told.chunk.parent or told.chunk.parent in self._told, "a chunk is told without its parent"
            assert digest not in self._held
            assert told.states == self._states(told.chunk.states), "a chunk is told where it is not"
            for at, group in enumerate(self._groups):
                if told.states[at]:
                    books = counts.setdefault((group.number, told.states[at]), {})
                    for block in self._blocks_of(group, told.hashes):
                        books[block] = books.get(block, 0) + 1
        assert counts == {place: books for place, books in self._counts.items() if books}
        assert {child for children in self._waiting.values() for child in children} == set(self._held)
        assert not any(held.parent in self._told for held in self._held.values()), "a chunk is held that can be hit"

    # What is told ----------------------------------------------------------------------------------

    def _states(self, states: bytes) -> tuple[int, ...]:
        """Of the engine's groups: the farthest place of those that hold its layers."""
        if not states:
            return (0,) * len(self._groups)
        found = []
        for group in self._groups:
            places = [states[source] for source in group.sources]
            found.append(max(places) if all(places) else 0)
        return tuple(found)

    def _is_there(self, states: Sequence[int]) -> bool:
        return all(states[at] for at in self._whole) if self._whole else any(states)

    def _tell(self, change: ChunkChange, events: list[BlockEvent]) -> None:
        """Tell a chunk, and those that have waited for it."""
        todo = [change]
        while todo:
            chunk = todo.pop()
            parent = self._told.get(chunk.parent)
            before = parent.hashes[-1] if parent is not None and parent.hashes else None
            hashes = self._hashes(before, chunk)
            if hashes is None:
                continue
            told = _Told(chunk, hashes, before, self._states(chunk.states))
            self._told[chunk.digest] = told
            if chunk.parent:
                self._children.setdefault(chunk.parent, {})[chunk.digest] = None
            for at in range(len(self._groups)):
                self._count_up(at, told.states[at], told, events)
            todo += [self._held.pop(child) for child in self._waiting.pop(chunk.digest, ())]

    def _hashes(self, before: Hash | None, chunk: ChunkChange) -> list[Hash] | None:
        """Of a chunk's units; None where its description cannot be read."""
        try:
            return self._hash_units(before, chunk)
        except Exception as error:  # noqa: BLE001 - another engine's bytes: what they lead to costs this chunk alone
            if not self.unread:
                log.warning(
                    "chunk_not_read",
                    chunk=chunk.digest.hex(),
                    reason=f"{type(error).__name__}: {error}",
                    effect="not told, nor what follows it; others like it are not logged",
                )
            self.unread += 1
            return None

    def _move(self, told: _Told, states: bytes, events: list[BlockEvent]) -> None:
        before, told.states = told.states, self._states(states)
        # The chunk is told from this again, once it was held. Its hashes are those of the tokens that it was told with.
        told.chunk = msgspec.structs.replace(told.chunk, states=states)
        for at, (old, new) in enumerate(zip(before, told.states, strict=True)):
            if old != new:  # first where it is, then where it was: there is no moment without it
                self._count_up(at, new, told, events)
                self._count_down([(at, old, told)], events)

    def _remove(self, digest: bytes, events: list[BlockEvent]) -> None:
        """The chunk cannot be hit any more; nor can those behind it, which wait for it from now on."""
        if digest not in self._told:
            return
        going = [digest]
        for each in going:
            going += self._children.pop(each, ())
        downs = []
        for each in reversed(going):
            told = self._told.pop(each)
            self._unlink(self._children, told.chunk)
            downs += [(at, state, told) for at, state in enumerate(told.states)]
            if each != digest:
                self._hold(told.chunk)
        self._count_down(downs, events)

    def _hold(self, chunk: ChunkChange) -> None:
        self._held[chunk.digest] = chunk
        self._waiting.setdefault(chunk.parent, {})[chunk.digest] = None

    def _unlink(self, books: dict[bytes, dict[bytes, None]], chunk: ChunkChange) -> None:
        siblings = books.get(chunk.parent, {})
        siblings.pop(chunk.digest, None)
        if not siblings:
            books.pop(chunk.parent, None)

    # Blocks ----------------------------------------------------------------------------------------

    def _blocks_of(self, group: BlockGroup, hashes: Sequence[Hash]) -> Sequence[Hash]:
        units = group.block_tokens // self._unit
        return hashes[units - 1 :: units]

    def _count_up(self, at: int, state: int, told: _Told, events: list[BlockEvent]) -> None:
        if not state:
            return
        group = self._groups[at]
        books = self._counts.setdefault((group.number, state), {})
        blocks, fresh = self._blocks_of(group, told.hashes), []
        for block in blocks:
            count = books.get(block, 0)
            books[block] = count + 1
            fresh.append(not count)
        events += self._stored(group, state, told, blocks, fresh)

    def _stored(
        self, group: BlockGroup, state: int, told: _Told, blocks: Sequence[Hash], fresh: Sequence[bool]
    ) -> Iterable[StoredBlocks]:
        """One event for each run of fresh blocks."""
        size, units = group.block_tokens * TOKEN_BYTES, group.block_tokens // self._unit
        at = 0
        while at < len(blocks):
            if not fresh[at]:
                at += 1
                continue
            end = at + 1
            while end < len(blocks) and fresh[end]:
                end += 1
            yield StoredBlocks(
                group.number,
                state,
                list(blocks[at:end]),
                blocks[at - 1] if at else told.before,
                told.chunk.tokens[at * size : end * size],
                group.block_tokens,
                told.chunk.extra,
                at * units,
                units,
            )
            at = end

    def _count_down(self, downs: Iterable[tuple[int, int, _Told]], events: list[BlockEvent]) -> None:
        removed: dict[tuple[int, int], list[Hash]] = {}
        for at, state, told in downs:
            if not state:
                continue
            group = self._groups[at]
            books = self._counts[group.number, state]
            for block in self._blocks_of(group, told.hashes):
                books[block] -= 1
                if not books[block]:
                    del books[block]
                    removed.setdefault((group.number, state), []).append(block)
        for (number, state), hashes in removed.items():
            events += [RemovedBlocks(number, state, piece) for piece in _in_pieces(hashes)]


def _in_pieces(hashes: list[Hash]) -> Iterator[list[Hash]]:
    for at in range(0, len(hashes), MOST_REMOVED):
        yield hashes[at : at + MOST_REMOVED]
