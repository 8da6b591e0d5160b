"""A step's outline: which objects each request loads and saves, and the engine blocks they cover.

Pure arithmetic over tokens, chunks and blocks. The server answers with the objects' places
(:class:`layerflow.wire.messages.Plan`); :func:`number_blocks` then numbers the blocks as the core does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import msgspec
import numpy as np

from layerflow.agent.hit_plan import PartPlaces
from layerflow.agent.values import Hit, StepRequest
from layerflow.errors import LayerflowError, SpecError
from layerflow.keys import DIGEST_BYTES
from layerflow.places import NOWHERE
from layerflow.spec import GroupSpec, ModelSpec
from layerflow.wire.messages import LoadPart, PlanPart, SavePart
from layerflow.wire.packing import pack_u32, unpack_u32, unpack_u64


class ObjectDescriptor(msgspec.Struct, frozen=True):
    """One object of a part.

    :param blocks: positions in the request's block table.
    :param index: which of the object's blocks the first of them is.
    :param block_digests: saves of the first group: see :meth:`layerflow.keys.Chain.block_digests`.
    """

    digest: bytes
    blocks: range
    index: int
    tokens: int
    block_digests: bytes = b""


@dataclass(frozen=True, slots=True)
class PartDescriptor:
    """One request's objects of one group, in one direction.

    Pickles without the part of the table that no piece names, so that a scheduler can make outlines for its workers.

    :param table: the request's int64 block table of this group; where no piece looks, anything.
    :param parent: digest before a partial last object, else empty.
    :param places: loads: where the objects lie; None = the server is to be asked.
    """

    request: str
    group: int
    table: np.ndarray
    pieces: tuple[ObjectDescriptor, ...]
    parent: bytes = b""
    places: PartPlaces | None = field(default=None, compare=False)

    def load_message(self) -> LoadPart:
        """As the protocol has it."""
        tail = self.pieces[-1].tokens if self.parent else 0
        plan, more = (self.places.plan, self.places.more) if self.places is not None else (0, False)
        return LoadPart(self.request, self.group, self._digests(), self._counts(), tail, self.parent, plan, more)

    def save_message(self) -> SavePart:
        """As the protocol has it."""
        tokens = pack_u32([piece.tokens for piece in self.pieces])
        blocks = b"".join(piece.block_digests for piece in self.pieces)
        return SavePart(self.request, self.group, self._digests(), self._counts(), tokens, self.parent, blocks)

    def engine_blocks(self) -> np.ndarray:
        """Engine block ids of all pieces, one after the other: int64, shape ``(n,)``."""
        return np.concatenate([self.table[piece.blocks.start : piece.blocks.stop] for piece in self.pieces])

    def __reduce__(self) -> tuple[object, ...]:
        rows = [(piece.blocks.start, len(piece.blocks), piece.index, piece.tokens) for piece in self.pieces]
        blocks = self.engine_blocks().astype("<i8", copy=False).tobytes()
        return _unpickled, (
            self.request, self.group, self._digests(), pack_u32(rows), blocks, self.parent,
            tuple(piece.block_digests for piece in self.pieces), self.places,
        )  # fmt: skip

    def _digests(self) -> bytes:
        return b"".join(piece.digest for piece in self.pieces)

    def _counts(self) -> bytes:
        return pack_u32([len(piece.blocks) for piece in self.pieces])


@dataclass(frozen=True, slots=True)
class Numbered:
    """The blocks of one direction and group in the core's numbering; all arrays int64, shape ``(n,)``.

    :param engine_blocks: block ids in engine memory.
    :param object_offsets: arena offset of the header of the object that holds the block.
    :param object_blocks: blocks per layer in that object.
    :param index: the block's position in it.
    :param numbers: the block's position in its request's table.
    :param part: its part, by position in the outline.
    """

    engine_blocks: np.ndarray
    object_offsets: np.ndarray
    object_blocks: np.ndarray
    index: np.ndarray
    numbers: np.ndarray
    part: np.ndarray


def describe_loads(spec: ModelSpec, requests: Sequence[StepRequest]) -> list[PartDescriptor]:
    """What each request loads of each group.

    :raises SpecError: a load beyond the hit, or into a block that the table does not have.
    """
    parts = []
    for request in requests:
        check_name(request.request)
        start, stop = request.load
        if start >= stop:
            continue
        if start < 0 or stop > min(request.hit.tokens, len(request.chain)):
            raise SpecError(
                f"request {request.request!r}: loads tokens {start} to {stop}, its hit has {request.hit.tokens} of "
                f"{len(request.chain)} tokens"
            )
        _check_hit(spec, request, stop)
        for number, group in enumerate(spec.groups if request.hit.drafts else spec.own.groups):
            if spec.shard.draft_of(number) and not _can_end(group, request.hit, stop, spec.chunk_tokens):
                continue
            pieces = tuple(_load_pieces(spec, group, request, start, stop))
            if pieces:
                ends_partial = pieces[-1].tokens != spec.chunk_tokens
                parent = request.chain.parent(request.hit.tail_chunk) if ends_partial else b""
                table, places = _table(request, number, pieces), _places(spec, number, request.hit, pieces)
                parts.append(PartDescriptor(request.request, number, table, pieces, parent, places))
    return parts


def loads_drafts(spec: ModelSpec, hit: Hit, stop: int) -> bool:
    """Does a load up to `stop` bring what every draft group reads behind it? True without such groups."""
    drafts = [group for number, group in enumerate(spec.groups) if spec.shard.draft_of(number)]
    return not drafts or (hit.drafts and all(_can_end(group, hit, stop, spec.chunk_tokens) for group in drafts))


def describe_saves(spec: ModelSpec, requests: Sequence[StepRequest], partial: bool) -> list[PartDescriptor]:
    """What each request saves of each group: the chunks that this step completes.

    :param partial: keep partial tails too.
    """
    parts = []
    for request in requests:
        start, stop = request.save
        if start >= stop:
            continue
        if start < 0:
            raise SpecError(f"request {request.request!r}: saves from token {start}; tokens count from 0")
        for number, group in enumerate(spec.groups):
            pieces, parent = _save_pieces(spec, group, request, partial)
            table = _column(request, number)
            if pieces and pieces[-1].blocks.stop > len(table):
                raise SpecError(
                    f"request {request.request!r}, group {number}: it saves up to token {stop}, its block table has "
                    f"{len(table)} blocks of {group.block_size} tokens; allocate first"
                )
            kept = tuple(
                piece
                for piece in pieces
                # A windowed group may have recycled blocks of an earlier chunk, recurrent state may not have been kept
                # there: then this group has nothing to save of it.
                if (table[piece.blocks.start : piece.blocks.stop] >= 0).all()
            )
            if kept:
                before = parent if kept[-1].tokens != spec.chunk_tokens else b""
                if not number and spec.block_tokens:
                    kept = tuple(_with_block_digests(spec, request, piece) for piece in kept)
                parts.append(PartDescriptor(request.request, number, table, kept, before))
    return parts


def without_tails(parts: Sequence[PartDescriptor]) -> list[PartDescriptor]:
    """Saves without partial last objects."""
    whole = [replace(part, pieces=part.pieces[:-1], parent=b"") if part.parent else part for part in parts]
    return [part for part in whole if part.pieces]


def with_more(parts: Sequence[PartDescriptor]) -> list[PartDescriptor]:
    """Return these loads, marked: their plans are used once more, in a step that each worker opens later."""
    return [
        replace(part, places=replace(part.places, more=True)) if part.places is not None else part for part in parts
    ]


def check_blocks(parts: Sequence[PartDescriptor], num_blocks: Sequence[int]) -> None:
    """Refuse block ids that registered memory does not have.

    :param num_blocks: blocks of each group.
    :raises SpecError: naming the request.
    """
    for part in parts:
        if not 0 <= part.group < len(num_blocks) or part.pieces[-1].blocks.stop > len(part.table):
            raise SpecError(
                f"request {part.request!r}, group {part.group}: its outline is one of another model, or was cut short; "
                f"this one has {len(num_blocks)} groups"
            )
        # From the first to the last block in one go: what a windowed group skips in between is negative.
        span = part.table[part.pieces[0].blocks.start : part.pieces[-1].blocks.stop]
        if span.max(initial=-1) >= num_blocks[part.group]:
            raise SpecError(
                f"request {part.request!r}, group {part.group}: block {span.max()} in its block table, but registered "
                f"memory has {num_blocks[part.group]} blocks"
            )


def number_blocks(parts: Sequence[PartDescriptor], plans: Sequence[PlanPart], loading: bool) -> dict[int, Numbered]:
    """Per group: the blocks that will move, numbered as the core numbers them.

    :raises LayerflowError: the plan does not fit the outline.
    """
    if len(parts) != len(plans):
        raise LayerflowError(f"the server planned {len(plans)} parts where {len(parts)} were asked for")
    groups: dict[int, list[Numbered]] = {}
    for position, (part, plan) in enumerate(zip(parts, plans, strict=True)):
        offsets = unpack_u64(plan.offsets, len(part.pieces), "plan offsets")
        rows = np.array([(piece.blocks.start, len(piece.blocks), piece.index) for piece in part.pieces], np.int64)
        held = unpack_u32(plan.stored, len(part.pieces), "plan stored") if loading else rows[:, 1]
        there = offsets != NOWHERE
        if not there.all():
            rows, held, offsets = rows[there], held[there], offsets[there]
        if len(rows):
            groups.setdefault(part.group, []).append(_numbered(position, part.table, rows, held, offsets))
    return {group: _joined(columns) for group, columns in groups.items()}


def _numbered(position: int, table: np.ndarray, rows: np.ndarray, held: np.ndarray, offsets: np.ndarray) -> Numbered:
    """One part's pieces that have a place: first number, blocks and index of each."""
    starts, counts, indices = rows.T
    before = counts.cumsum() - counts
    columns = np.array([starts - before, indices - starts, offsets.astype(np.int64), held]).repeat(counts, axis=1)
    shift, at, object_offsets, object_blocks = columns
    numbers = np.arange(columns.shape[1]) + shift
    part = np.empty(columns.shape[1], np.int64)
    part[:] = position
    return Numbered(table[numbers], object_offsets, object_blocks, numbers + at, numbers, part)


def _joined(columns: Sequence[Numbered]) -> Numbered:
    if len(columns) == 1:
        return columns[0]
    return Numbered(*(np.concatenate([getattr(each, at.name) for each in columns]) for at in fields(Numbered)))


def _unpickled(  # noqa: PLR0917 - pickle gives them in their order
    request: str,
    group: int,
    digests: bytes,
    rows: bytes,
    blocks: bytes,
    parent: bytes,
    block_digests: Sequence[bytes],
    places: PartPlaces | None,
) -> PartDescriptor:
    pieces = []
    for number, (start, count, index, tokens) in enumerate(np.frombuffer(rows, "<u4").reshape(-1, 4).tolist()):
        digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        pieces.append(ObjectDescriptor(digest, range(start, start + count), index, tokens, block_digests[number]))
    table = np.full(pieces[-1].blocks.stop, -1, dtype=np.int64)
    table[np.concatenate([np.arange(piece.blocks.start, piece.blocks.stop) for piece in pieces])] = np.frombuffer(
        blocks, "<i8"
    )
    return PartDescriptor(request, group, table, tuple(pieces), parent, places)


def check_name(request: object) -> None:
    """:raises SpecError: no request can have this id."""
    try:
        assert isinstance(request, str)
        request.encode()
    except (AssertionError, UnicodeEncodeError):
        raise SpecError(f"request id {ascii(request)[:200]}: must be a string that UTF-8 can encode") from None


def _load_pieces(
    spec: ModelSpec, group: GroupSpec, request: StepRequest, start: int, stop: int
) -> list[ObjectDescriptor]:
    rules, size, chunk = group.rules, group.block_size, spec.chunk_tokens
    first = max(start, rules.first_token(stop))
    pieces: list[ObjectDescriptor] = []
    if first >= stop:
        return pieces
    full = rules.keep(chunk)
    for number in range(first // chunk, -(-stop // chunk)):
        base = number * chunk
        tail = number == request.hit.tail_chunk
        held = request.hit.tail_tokens if tail else chunk
        digest = request.hit.tail_digest if tail else request.chain.digests[number]
        kept = rules.keep(held) if tail else full
        if rules.exact and stop != base + held:
            raise SpecError(
                f"request {request.request!r}: a load up to token {stop} needs the {group.kind} after exactly that "
                f"many tokens, the object of chunk {number} has the one after {base + held}; load up to the hit's "
                f"{request.hit.tokens} tokens"
            )
        lo, hi = (max(first, base) - base) // size, -(-(min(stop, base + held) - base) // size)
        if lo < kept.start:
            raise SpecError(
                f"request {request.request!r}: a load up to token {stop} needs tokens that a {group.kind} group "
                f"does not keep of chunk {number}; load up to the hit's {request.hit.tokens} tokens or to a chunk's end"
            )
        blocks = range(base // size + lo, base // size + hi)
        pieces.append(ObjectDescriptor(digest, blocks, lo - kept.start, held))
    return pieces


def _can_end(group: GroupSpec, hit: Hit, stop: int, chunk: int) -> bool:
    """Does a draft group keep enough for a load up to `stop`? Where hits end, the model's own groups say."""
    number = (stop - 1) // chunk
    held = hit.tail_tokens if number == hit.tail_chunk else chunk
    return group.rules.inside(held, stop - number * chunk)


def _check_hit(spec: ModelSpec, request: StepRequest, stop: int) -> None:
    """A hit of another prompt must not be loaded into this one."""
    hit, chain, chunk = request.hit, request.chain, spec.chunk_tokens
    last = (stop - 1) // chunk
    tail = hit.tail_chunk >= 0 and last >= hit.tail_chunk
    fits = last <= len(chain.digests) if tail else last < len(chain.digests)
    if tail and fits:
        shared, digest = hit.tail_shared, hit.shared_digest
        if not shared:
            shared, digest = hit.tail_tokens, hit.tail_digest
        fits = last == hit.tail_chunk and chain.partial(hit.tail_chunk, shared) == digest
        fits = fits and stop <= hit.stored(chunk) and spec.inside(hit.tail_tokens, shared)
    if not fits:
        raise SpecError(f"request {request.request!r}: its hit is not one of this chain; look the chain up itself")


def _places(spec: ModelSpec, group: int, hit: Hit, pieces: Sequence[ObjectDescriptor]) -> PartPlaces | None:
    if hit.plan is None:
        return None
    size = spec.groups[group].block_size
    chunks = [piece.blocks.start * size // spec.chunk_tokens for piece in pieces]
    return hit.plan.part(group, chunks, hit.tail_chunk)


def _save_pieces(
    spec: ModelSpec, group: GroupSpec, request: StepRequest, partial: bool
) -> tuple[list[ObjectDescriptor], bytes]:
    (start, stop), chunk, chain = request.save, spec.chunk_tokens, request.chain
    stop = min(stop, len(chain))
    pieces, parent = [], b""
    for number in range(start // chunk, stop // chunk):
        pieces.append(_whole(spec, group, number, chunk, chain.digests[number]))
    rest = stop % chunk
    if partial and request.tail and rest:
        number = stop // chunk
        parent = chain.parent(number)
        pieces.append(_whole(spec, group, number, rest, chain.partial(number, rest)))
    return pieces, parent


def _with_block_digests(spec: ModelSpec, request: StepRequest, piece: ObjectDescriptor) -> ObjectDescriptor:
    """So that hits of other prompts may end at any of its blocks."""
    chunk = piece.blocks.start * spec.groups[0].block_size // spec.chunk_tokens
    return msgspec.structs.replace(
        piece, block_digests=request.chain.block_digests(chunk, spec.block_tokens, piece.tokens)
    )


def _whole(spec: ModelSpec, group: GroupSpec, number: int, tokens: int, digest: bytes) -> ObjectDescriptor:
    kept = group.rules.keep(tokens)
    base = number * spec.chunk_tokens // group.block_size
    return ObjectDescriptor(digest, range(base + kept.start, base + kept.stop), 0, tokens)


def _table(request: StepRequest, group: int, pieces: Sequence[ObjectDescriptor]) -> np.ndarray:
    # A copy: the engine goes on writing its table while the server plans.
    table = _column(request, group)
    span = table[pieces[0].blocks.start : pieces[-1].blocks.stop]
    if len(table) >= pieces[-1].blocks.stop and (span >= 0).all():
        return table
    for piece in pieces:  # a windowed group has no blocks for what it skips in between
        held = table[piece.blocks.start : piece.blocks.stop]
        if len(held) != len(piece.blocks) or (held < 0).any():
            raise SpecError(
                f"request {request.request!r}, group {group}: the hit needs blocks {piece.blocks.start} to "
                f"{piece.blocks.stop - 1}, its block table of {len(table)} does not have them all; allocate first"
            )
    return table


def _column(request: StepRequest, group: int) -> np.ndarray:
    """The request's block table of one group, copied: the engine may recycle entries while blocks still move."""
    try:
        table = np.array(request.blocks[group])
    except (LookupError, ValueError) as error:
        raise SpecError(f"request {request.request!r}: no block table for group {group}: {error}") from None
    if table.ndim != 1 or (table.size and table.dtype.kind not in "iu"):
        raise SpecError(
            f"request {request.request!r}, group {group}: a block table is one list of integers, not "
            f"{table.dtype} of shape {table.shape}"
        )
    return table.astype(np.int64, copy=False)
