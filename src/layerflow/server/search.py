"""Where hits are searched, in the arena and behind it, and what is brought for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from layerflow.boxes import Box
from layerflow.hits import NO_BLOCKS, SLICE_KEYS, BlockDigests, HitLength, LookupSource, search_hit, sharing_chunks
from layerflow.keys import DIGEST_BYTES, KEY_BYTES, object_keys
from layerflow.objects import HEADER_BYTES, layer_bytes, object_bytes
from layerflow.pool import base
from layerflow.pool.base import Covering, NewObject, Pool
from layerflow.pool.chunk_index import ANY_LENGTH, NO_CHUNKS, ChunkIndex, merged_sharing, merged_tails, renamed
from layerflow.server.account import Charge, Refused
from layerflow.server.mailboxes import Answer, in_slices, next_turn
from layerflow.server.sources import ObjectSources
from layerflow.server.tier.tier import ASKED_KEYS
from layerflow.spec import ModelSpec, Shard
from layerflow.wire.host_messages import split_keys
from layerflow.wire.messages import MAX_PEER_KEYS

if TYPE_CHECKING:
    from layerflow.server.peers.source import PeerSource
    from layerflow.server.tier.tier import Tier


@dataclass(frozen=True, slots=True)
class LookupView:
    """What a hit is searched in: the arena, and what can be loaded although it is not there, as one.

    :param here: the arena; None = it does not matter.
    :param also: which of these keys can be loaded from elsewhere, or will be here; asked of keys that are not here.
    :param elsewhere: chunks of these.
    :param covering: objects of other partitions may stand in for those that are not there. Of the arena's the pool
        knows by itself.
    """

    here: Pool | None
    also: Callable[[Sequence[bytes]], list[bool]]
    elsewhere: ChunkIndex = NO_CHUNKS
    covering: Covering | None = None

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which objects can be loaded."""
        there = self._each(keys)
        if self.covering is not None and not all(there):
            missing = [key for key, found in zip(keys, there, strict=True) if not found]
            others = list({other for key in missing for other in self.covering.overlapping_keys(key)})
            have = {other for other, found in zip(others, self._each(others), strict=True) if found}
            for at, key in enumerate(keys):
                there[at] = there[at] or bool(self.covering.sources(key, have.__contains__))
        return there

    def _each(self, keys: Sequence[bytes]) -> list[bool]:
        if self.here is None:
            return self.also(keys)
        there = self.here.lookup(keys)
        if all(there):
            return there
        more = iter(self.also([key for key, here in zip(keys, there, strict=True) if not here]))
        return [here or next(more) for here in there]

    def tails(self, parent: bytes, most: int = ANY_LENGTH, *, undigested: bool = False) -> Iterator[base.StoredTail]:
        """Partial chunks that follow `parent`; parameters and order as of :meth:`.ChunkIndex.tails`."""
        others = self.covering.overlapping_keys(parent) if self.covering is not None else ()
        return merged_tails(
            self.here.tails(parent, most, undigested=undigested) if self.here is not None else (),
            self.elsewhere.tails(parent, most, undigested=undigested),
            *(renamed(self.elsewhere.tails(other, most, undigested=undigested), parent) for other in others),
        )

    def sharing(self, prompt_blocks: bytes) -> Iterator[base.SharedChunk]:
        """Chunks that share leading blocks with a prompt; order as of :meth:`.ChunkIndex.sharing`."""
        here = self.here.sharing(prompt_blocks) if self.here is not None else ()
        return merged_sharing(here, self.elsewhere.sharing(prompt_blocks))


def view_of_tier(
    pool: Pool | None,
    tier: Tier | ObjectSources,
    found: frozenset[bytes] = frozenset(),
    unavailable: frozenset[bytes] = frozenset(),
    *,
    covering: Covering | None = None,
) -> LookupView:
    """The arena and the tier behind it, as one.

    :param pool: None = the tier alone, for workers whose bytes do not pass through the arena.
    :param found: what the tier was asked for and has.
    :param unavailable: what the tier has and cannot be brought now.
    :param covering: see :class:`LookupView`.
    """

    def behind(keys: Sequence[bytes]) -> list[bool]:
        held = tier.holds(keys)
        return [(there or key in found) and key not in unavailable for key, there in zip(keys, held, strict=True)]

    return LookupView(pool, behind, tier.chunks, covering)


def hit_keys(spec: ModelSpec, digests: list[bytes], hit: HitLength) -> Iterator[list[bytes]]:
    """Everything that a load of this hit (or of one of its tails) would read, there or not, in slices."""
    reach = max((tail.chunk * spec.chunk_tokens for tail in hit.tails), default=0)
    chunks = -(-max(hit.tokens, reach) // spec.chunk_tokens)
    groups, shards = range(len(spec.groups)), spec.shard.peers()
    width = len(shards)
    step = max(1, SLICE_KEYS // (len(groups) * width))
    made = hit.keys if len(groups) == 1 else ()
    for first in range(0, chunks, step):
        stop = min(first + step, chunks)
        if made:
            yield list(made[first * width : stop * width])
        else:
            yield object_keys(digests[first:stop], groups, shards)
    for first in range(0, len(hit.tails), step):
        yield object_keys([tail.digest for tail in hit.tails[first : first + step]], groups, shards)


def stored_object(spec: ModelSpec, group: int, key: bytes, tokens: int = 0, parent: bytes = b"") -> NewObject:
    """The shape of a stored object.

    :param tokens: of a partial chunk; 0 = a full one.
    :param parent: 24-byte key before a partial chunk.
    """
    tokens = tokens or spec.chunk_tokens
    blocks = len(spec.groups[group].rules.keep(tokens))
    return NewObject(key, object_bytes(spec.groups[group], blocks), blocks, tokens, parent)


BROUGHT_PER_SLICE = 256
"""Objects that find room and are fetched from now on before another client may get its turn, some 5 ms."""

FEW_CHUNKS = 16
"""Of so many chunks that only the tier can tell of, all are asked for without probing first."""

KEPT_KEY_BYTES = 192
"""What a key takes that was asked for or found, in bytes, unless it is packed with others, while an answer is waited
for."""


async def ask_tier(
    pool: Pool,
    tier: Tier | ObjectSources,
    spec: ModelSpec,
    prompt: tuple[list[bytes], int, bytes],
    charge: Charge,
    *,
    blocks: BlockDigests = NO_BLOCKS,
    direct: bool = False,
) -> frozenset[bytes]:
    """Ask for what the tier may add to a hit, in at most two rounds, each of as many questions as its keys take.

    A group that needs every chunk from the first on ends the hit at the first chunk that is missing. So of a long
    prompt some chunks at doubling distances are asked for first, and the others only up to the first of those that is
    missing: twice the hit's chunks at most, and a few where nothing is stored. All of a hit's chunks are asked for:
    what a pool evicts is not always the end of a prompt, and a hit that cannot be loaded costs more than keys. With the
    rest are asked for chunks of other prompts that begin as the prompt's next one, where this server knows some.

    :param prompt: digests of the full chunks, tokens, and the digest of its last, partial chunk (or ``b""``).
    :param charge: of the client that waits.
    :param blocks: the prompt's, to find these.
    :param direct: for workers to whom the arena does not matter.
    :returns: the keys that the tier has, as far as it has told within ``pool.lookup_timeout_ms``, and as far as the
        client may make the server keep what is asked for.
    """
    digests, tokens, tail_digest = prompt
    until = time.monotonic() + tier.settings.lookup_timeout_ms / 1e3
    every = range(len(spec.groups))
    prefixes = [group for group in every if not spec.groups[group].rules.first_token(tokens)]
    # The tier is asked in the same question for other partitions' objects that may stand in for what is not known.
    covering = None if direct else pool.covering(spec)
    known = view_of_tier(None if direct else pool, tier, covering=covering)
    lacking = await in_slices(lacking_chunks(known, spec, digests, prefixes))
    others = await in_slices(sharing_chunks(known, spec, digests, tokens, blocks))
    more = [digest for digest in (tail_digest, *others) if digest]
    inquiry = TierInquiry(tier, known, spec, covering, charge, until)
    if len(lacking) <= FEW_CHUNKS:
        # Where no group needs the prompt's beginning, hits end at any chunk: the longest are asked for first.
        await inquiry.ask([*digests, *more] if prefixes else [*reversed(more), *reversed(digests)], every)
        return frozenset(inquiry.found)
    probed = [lacking[at] for at in (*doubling(len(lacking) - 1), len(lacking) - 1)]
    await inquiry.ask([digests[chunk] for chunk in probed], prefixes)
    there = view_of_tier(pool, tier, frozenset(inquiry.found), covering=covering)
    end = len(digests)
    for chunk in probed:
        if await in_slices(lacking_chunks(there, spec, digests[chunk : chunk + 1], prefixes)):
            end = chunk
            break
    await inquiry.ask([*digests[:end], *(more if end == len(digests) else others)], every)
    return frozenset(inquiry.found)


@dataclass(slots=True)
class TierInquiry:
    """What one lookup asks the tier for: some keys at a time, so that it keeps and holds up little.

    Peers are asked for all of a round's keys at once: however long one of them is silent, it is waited for once.

    :param known: what need not be asked for.
    :param covering: objects of other partitions are asked for too that may stand in for what is not known.
    :param charge: of the client that waits.
    :param until: nothing is asked from then on, monotonic seconds.
    :param found: what the tier has.
    """

    tier: Tier | ObjectSources
    known: LookupSource
    spec: ModelSpec
    covering: Covering | None
    charge: Charge
    until: float
    found: set[bytes] = field(default_factory=set)

    async def ask(self, digests: Iterable[bytes], groups: Sequence[int]) -> None:
        """Ask for the objects of these chunks and groups, in this order, as far as there is time.

        Where the client may not make the server keep more, no more is asked, and what has been found counts.
        """
        slice_keys = SLICE_KEYS if self.covering is None else SLICE_KEYS // 8  # of each key others are looked for
        # All that may stand in for a chunk's objects of a group are of that chunk and group: none comes twice.
        slices = map(self._lacking, key_slices(self.spec, list(dict.fromkeys(digests)), groups, slice_keys))
        peers = self.tier.peers if isinstance(self.tier, ObjectSources) else None
        packed = bytearray()
        with ExitStack() as kept:
            lent = None
            if peers is not None and peers.able_peers(time.monotonic()):
                lent = await self._ask_peers(peers, slices, packed, kept)
            told = await self._ask_tier(slices, packed)
            self.found |= told
            if peers is not None and lent is not None:
                self.found |= await lent
                peers.decline(list(told))

    def _lacking(self, keys: Sequence[bytes]) -> bytes:
        """Those of `keys` that are to be asked for, and what may stand in for them, packed."""
        there = self.known.lookup(keys)
        lacking = [key for key, here in zip(keys, there, strict=True) if not here and key not in self.found]
        return b"".join(with_overlapping_keys(self.covering, lacking))

    async def _ask_peers(
        self, peers: PeerSource, slices: Iterator[bytes], packed: bytearray, kept: ExitStack
    ) -> Answer[frozenset[bytes]] | None:
        """Ask peers for as much of a round as one question takes; None = for nothing.

        :param packed: what is taken from `slices` is added here.
        :param kept: has the charge of what the question and its answer keep.
        """
        keys: list[bytes] = []
        while len(keys) < MAX_PEER_KEYS and time.monotonic() < self.until and (more := next(slices, None)) is not None:
            packed += more
            keys += split_keys(more)
            await next_turn()
        if not keys:
            return None
        what = "the keys that a lookup asks peers for"
        try:
            charge = kept.enter_context(self.charge.account.charge(what, len(keys) * KEPT_KEY_BYTES))
        except Refused:
            return None
        answer = Answer[frozenset[bytes]](self.charge)

        def answered(lent: frozenset[bytes]) -> None:
            charge.resize(len(lent) * KEPT_KEY_BYTES)
            answer.tell(lent)

        peers.ask(keys, answered, self.until)
        return answer

    async def _ask_tier(self, slices: Iterator[bytes], packed: bytearray) -> set[bytes]:
        """Ask the tier for a round's keys, those in `packed` first. What it has of them."""
        told: set[bytes] = set()
        piece_bytes = ASKED_KEYS * KEY_BYTES
        while True:
            while len(packed) < piece_bytes and (more := next(slices, None)) is not None:
                packed += more
                await next_turn()
                if time.monotonic() >= self.until:
                    return told
            if not packed or time.monotonic() >= self.until:
                return told
            piece = bytes(packed[:piece_bytes])
            del packed[:piece_bytes]
            kept = len(piece) + len(packed) + (len(self.found) + len(told)) * KEPT_KEY_BYTES
            try:
                charge = self.charge.account.charge("what a lookup asks the pool behind the arena for", kept)
            except Refused:
                return told
            with charge:
                told |= await self.tier.ask(piece, self.charge, self.until)


def with_overlapping_keys(covering: Covering | None, keys: Iterable[bytes]) -> list[bytes]:
    """Return these keys, each once, and after them those that may stand in for them."""
    asked = list(keys)
    if covering is None:
        return asked
    return list(dict.fromkeys([*asked, *(other for key in asked for other in covering.overlapping_keys(key))]))


def doubling(stop: int) -> Iterator[int]:
    """0, 1, 3, 7, ... below `stop`."""
    at = 0
    while at < stop:
        yield at
        at = 2 * at + 1


def prompt_keys(spec: ModelSpec, digests: Sequence[bytes]) -> list[bytes]:
    """The objects of these chunks, full or partial, of all groups and shards."""
    return object_keys(digests, range(len(spec.groups)), spec.shard.peers())


def prompt_objects(spec: ModelSpec, chunks: int) -> int:
    """How many :func:`prompt_keys` has of so many chunks."""
    return chunks * len(spec.groups) * len(spec.shard.peers())


def key_slices(
    spec: ModelSpec, digests: Sequence[bytes], groups: Sequence[int], slice_keys: int = SLICE_KEYS
) -> Iterator[list[bytes]]:
    """The objects of these chunks, of these groups and all shards, so many or one group's of a chunk at a time.

    They come by chunk, then by group, then by shard.
    """
    shards = spec.shard.peers()
    few = max(1, slice_keys // len(shards))
    step = max(1, few // max(1, len(groups)))
    for start in range(0, len(digests), step):
        for first in range(0, len(groups), few):
            yield object_keys(digests[start : start + step], groups[first : first + few], shards)


def lacking_chunks(
    known: LookupSource, spec: ModelSpec, digests: Sequence[bytes], groups: Sequence[int]
) -> Generator[None, None, list[int]]:
    """The chunks, by position, of which objects of these groups are not `known`. In slices."""
    each = len(groups) * len(spec.shard.peers())
    lacking: list[int] = []
    at = 0
    for keys in key_slices(spec, digests, groups):
        if at:
            yield
        there = known.lookup(keys)
        few = list(dict.fromkeys((at + key) // each for key, here in enumerate(there) if not here))
        # Keys come by chunk: the last one of a slice may go on in the next.
        lacking += few[1:] if few and lacking and few[0] == lacking[-1] else few
        at += len(keys)
    return lacking


def find_and_bring(
    pool: Pool,
    tier: Tier | ObjectSources,
    spec: ModelSpec,
    *,
    shards: Sequence[Shard],
    prompt: tuple[bytes, list[bytes], int, bytes],
    found: frozenset[bytes],
    engine: str,
    blocks: BlockDigests = NO_BLOCKS,
    direct: bool = False,
) -> Generator[None, None, HitLength]:
    """The longest hit in arena and tier together; what it needs is on its way into the arena. In slices, as above.

    Stored tails, and chunks that only begin as the prompt's, are brought by the step that loads them: most of those
    offered belong to other prompts.

    :param shards: whose objects this machine's workers load; of the others it suffices that they exist.
    :param prompt: root digest, digests of the full chunks, tokens, and the digest of its last, partial chunk.
    :param found: keys that the tier was asked for and has.
    :param engine: for whom.
    :param direct: some workers read the tier themselves: what only the arena has is no hit.
    """
    root, digests, tokens, tail_digest = prompt
    unavailable: frozenset[bytes] = frozenset()
    while True:
        there = view_of_tier(None if direct else pool, tier, found, unavailable)
        hit = yield from search_hit(there, spec, root, digests, tokens, tail_digest=tail_digest, blocks=blocks)
        stuck = yield from _bring(pool, tier, spec, shards=shards, digests=digests, hit=hit, engine=engine)
        if not stuck:
            return hit
        unavailable |= stuck  # no room in the arena, or it left the tier since: a shorter hit


def _bring(
    pool: Pool,
    tier: Tier | ObjectSources,
    spec: ModelSpec,
    *,
    shards: Sequence[Shard],
    digests: list[bytes],
    hit: HitLength,
    engine: str,
) -> Generator[None, None, frozenset[bytes]]:
    """Start fetching the full chunks that a hit needs; those that cannot be fetched."""
    stuck: set[bytes] = set()
    for number, group in enumerate(spec.groups if hit.drafts else spec.own.groups):
        need = group.rules.need(hit.tokens, spec.chunk_tokens) if hit.tokens else range(0)
        chunks = digests[need.start : need.stop]
        step = max(1, BROUGHT_PER_SLICE // max(1, len(shards)))
        for first in range(0, len(chunks), step):
            # Shards that hold the same heads have the same key.
            keys = list(dict.fromkeys(object_keys(chunks[first : first + step], (number,), shards)))
            missing = [key for key, there in zip(keys, pool.lookup(keys), strict=True) if not there]
            if missing:
                tier.bring([stored_object(spec, number, key) for key in missing], group.layers, engine)
                stuck.update(key for key in missing if tier.coming(key) is None)
            yield
    return frozenset(stuck)


# Objects of other partitions behind the arena: brought into it before a hit that they cover is told.


MOST_TAILS = 2
"""Of so many tails of a hit, the longest, pieces are brought."""


def bring_pieces(
    pool: Pool,
    tier: ObjectSources,
    spec: ModelSpec,
    *,
    covering: Covering,
    prompt: tuple[bytes, Sequence[bytes]],
    hit: HitLength,
    found: frozenset[bytes],
    engine: str,
) -> Generator[None, None, set[bytes]]:
    """Start fetching the objects of other partitions that a hit needs; those that are on their way. In slices.

    A step cannot wait for pieces of a block, each of other layers and heads, as it waits for whole objects; so a hit
    counts them once they are in the arena.

    :param prompt: root digest, and digests of the full chunks.
    :param hit: over what arena and tier have, of all partitions.
    :param found: keys that the tier was asked for and has.
    """
    root, digests = prompt
    coming: set[bytes] = set()
    for number, group in enumerate(spec.groups):
        need = group.rules.need(hit.tokens, spec.chunk_tokens) if hit.tokens else range(0)
        wanted = [(digest, spec.chunk_tokens, b"") for digest in digests[need.start : need.stop]]
        for tail in islice(hit.tails, MOST_TAILS):
            # A hit that goes on into a tail may need chunks before it that the shorter hit does not.
            need = group.rules.need(tail.chunk * spec.chunk_tokens + (tail.shared or tail.tokens), spec.chunk_tokens)
            wanted += [(digest, spec.chunk_tokens, b"") for digest in digests[need.start : min(need.stop, tail.chunk)]]
            before = digests[tail.chunk - 1] if tail.chunk else root
            wanted.append((tail.digest, tail.tokens, before if tail.tokens < spec.chunk_tokens else b""))
        chunks = list(dict.fromkeys(wanted))
        step = max(1, BROUGHT_PER_SLICE // len(spec.shard.peers()))
        for at in range(0, len(chunks), step):
            pieces: dict[tuple[int, int], dict[bytes, NewObject]] = {}
            for digest, tokens, parent in chunks[at : at + step]:
                keys = object_keys((digest,), (number,), spec.shard.peers())
                for told, source in _lacking(pool, tier, covering, keys, found):
                    box = told.of_layers(spec.depth_of(number))
                    new = _piece(spec, number, box, source=source, tokens=tokens, parent=parent)
                    pieces.setdefault((box.first_layer, box.end_layer), {})[source] = new
            for (first, end), objects in pieces.items():
                # The group's own numbers where it has as many layers, so that an equal worker's step can use them too.
                layers = group.layers if end - first == len(group.layers) else tuple(range(end - first))
                tier.bring(list(objects.values()), layers, engine)
                coming.update(key for key in objects if tier.coming(key) is not None)
            yield
    return coming


def _lacking(
    pool: Pool, tier: ObjectSources, covering: Covering, keys: Sequence[bytes], found: frozenset[bytes]
) -> Iterator[tuple[Box, bytes]]:
    """What is to be brought so that these are covered in the arena, where the tier does not have them themselves."""

    def there(key: bytes) -> bool:
        return key in found or pool.lookup([key])[0] or tier.holds([key])[0]

    for key, here in zip(keys, pool.lookup(keys), strict=True):
        if not here and key not in found and not tier.holds([key])[0]:
            for box, source in covering.sources(key, there):
                if not pool.lookup([source])[0]:
                    yield box, source


def _piece(spec: ModelSpec, number: int, box: Box, *, source: bytes, tokens: int, parent: bytes) -> NewObject:
    """An object of another partition: as many blocks, of its own layers and heads."""
    group = spec.groups[number]
    blocks = len(group.rules.keep(tokens))
    one_layer = layer_bytes(group, blocks) // spec.box(number).heads * box.heads
    before = parent + source[DIGEST_BYTES:] if parent else b""
    return NewObject(source, HEADER_BYTES + box.layers * one_layer, blocks, tokens, before)
