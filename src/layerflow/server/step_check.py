"""A step's message, checked against itself and the session's spec. Nothing is changed by it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from layerflow.errors import ProtocolError
from layerflow.hits import SLICE_KEYS
from layerflow.keys import DIGEST_BYTES, covered_by, object_key
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject
from layerflow.spec import GroupSpec, ModelSpec
from layerflow.wire import codec
from layerflow.wire.messages import LoadPart, OpenStep, SavePart
from layerflow.wire.packing import unpack_u32

MAX_STEP_S = 86_400.0


@dataclass(slots=True)
class CheckedPart:
    """A checked part of an OpenStep; of loads also whether the last object is a tail, and what it follows (a key)."""

    request: str
    group: int
    keys: list[bytes]
    counts: np.ndarray
    tail: int = 0
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """An OpenStep that agrees with itself and with the session's spec.

    :param nbytes: bytes that it asks to be loaded and saved.
    """

    loads: list[CheckedPart]
    saves: list[tuple[CheckedPart, list[NewObject]]]
    nbytes: int


def check_step(spec: ModelSpec, message: OpenStep) -> Generator[None, None, CheckedStep]:
    """In slices: it stops every so many objects, and returns the checked step. Changes nothing.

    :raises ProtocolError: the message contradicts itself or the session's spec.
    """
    loads, saves = [], []
    nbytes = since = 0
    for part in message.loads:
        loads.append(check_load(part, spec))
        nbytes += _moved(spec, loads[-1])
        since += len(loads[-1].keys)
        if since >= SLICE_KEYS:
            yield
            since = 0
    for saved in message.saves:
        wanted = check_part(saved, spec)
        objects = yield from new_objects(saved, spec)
        saves.append((wanted, objects))
        nbytes += _moved(spec, wanted)
        since += len(objects)
        if since >= SLICE_KEYS:
            yield
            since = 0
    return CheckedStep(loads, saves, nbytes)


def count_objects(message: OpenStep) -> int:
    """Objects that the message names, repeats included."""
    nbytes = sum(len(part.digests) for part in message.loads) + sum(len(part.digests) for part in message.saves)
    return nbytes // DIGEST_BYTES


def _moved(spec: ModelSpec, wanted: CheckedPart) -> int:
    group = spec.groups[wanted.group]
    return int(wanted.counts.sum()) * group.bytes_per_block * len(group.layers)


def check_deadlines(message: OpenStep, now: float, most_s: float) -> None:
    """:raises ProtocolError: they are not in order, or more than `most_s` seconds ahead of `now`, or a day past."""
    if not now - MAX_STEP_S < message.deadline <= message.save_deadline <= now + most_s:
        raise ProtocolError(
            f"step {message.step}: deadlines {message.deadline}, {message.save_deadline} must be ascending seconds on "
            f"CLOCK_MONOTONIC, at most server.max_deadline_s = {most_s:g} ahead of now = {now:.3f}"
        )


def check_part(part: LoadPart | SavePart, spec: ModelSpec) -> CheckedPart:
    """:raises ProtocolError: no such group, or objects without a size that they can have."""
    where = _place(part, spec)
    digests = codec.split_digests(part.digests, where)
    counts = unpack_u32(part.counts, len(digests), f"{where}, counts")
    most = spec.chunk_tokens // spec.groups[part.group].block_size
    if not digests or counts.min() < 1 or counts.max() > most:
        raise ProtocolError(f"{where}: a part has at least one object, and each 1 to {most} blocks")
    return CheckedPart(part.request, part.group, [object_key(d, part.group, spec.shard) for d in digests], counts)


def check_load(part: LoadPart, spec: ModelSpec) -> CheckedPart:
    """:raises ProtocolError: as of :func:`check_part`, or a tail that is none."""
    wanted = check_part(part, spec)
    if len(part.parent) != (DIGEST_BYTES if part.tail else 0) or not 0 <= part.tail < spec.chunk_tokens:
        raise ProtocolError(
            f"request {part.request!r}, group {part.group}: a tail of {part.tail} tokens after a parent of "
            f"{len(part.parent)} bytes; a tail has 1 to {spec.chunk_tokens - 1} tokens and a parent of "
            f"{DIGEST_BYTES} bytes, or there is neither"
        )
    if part.tail:
        wanted.tail, wanted.parent = part.tail, object_key(part.parent, part.group, spec.shard)
    return wanted


def new_objects(part: SavePart, spec: ModelSpec) -> Generator[None, None, list[NewObject]]:
    """In slices, as :func:`check_step`.

    :raises ProtocolError: token counts that a chunk cannot have, or a tail without its parent."""
    where = _place(part, spec)
    group: GroupSpec = spec.groups[part.group]
    digests = codec.split_digests(part.digests, where)
    tokens = unpack_u32(part.tokens, len(digests), f"{where}, tokens")
    counts = unpack_u32(part.counts, len(digests), f"{where}, counts")
    if len(part.parent) not in (0, DIGEST_BYTES):
        raise ProtocolError(f"{where}: parent must be empty or {DIGEST_BYTES} bytes")
    unit = spec.block_tokens
    sizes = [held // unit * DIGEST_BYTES if unit else 0 for held in tokens.tolist()]
    if part.block_digests and len(part.block_digests) != sum(sizes):
        raise ProtocolError(
            f"{where}: {len(part.block_digests)} bytes of block digests; {sum(sizes)} belong to its objects, or none"
        )
    # Found by those of the first group and shard, or of a rank that holds the same; the others' would say the same.
    named = covered_by(0, spec.shard) == covered_by(0, spec.shard.peers()[0])
    indexed = bool(part.block_digests) and not part.group and named
    at = 0
    objects = []
    for position, (digest, held, blocks) in enumerate(zip(digests, tokens.tolist(), counts.tolist(), strict=True)):
        if position % SLICE_KEYS == SLICE_KEYS - 1:
            yield
        partial = held != spec.chunk_tokens
        last = position == len(digests) - 1
        if held > spec.chunk_tokens or held < 1 or (partial and not (last and part.parent)):
            raise ProtocolError(
                f"{where}, object {position}: {held} tokens; every chunk but a last one with a parent holds "
                f"{spec.chunk_tokens}"
            )
        if blocks != len(group.rules.keep(held)):
            raise ProtocolError(
                f"{where}, object {position}: {blocks} blocks for {held} tokens, a {group.kind} group keeps "
                f"{len(group.rules.keep(held))}"
            )
        parent = object_key(part.parent, part.group, spec.shard) if partial else b""
        own = part.block_digests[at : at + sizes[position]] if indexed else b""
        at += sizes[position]
        key = object_key(digest, part.group, spec.shard)
        objects.append(NewObject(key, object_bytes(group, blocks), blocks, held, parent, own))
    return objects


def _place(part: LoadPart | SavePart, spec: ModelSpec) -> str:
    """How errors name a part.

    :raises ProtocolError: there is no such group.
    """
    where = f"request {part.request!r}, group {part.group}"
    if not 0 <= part.group < len(spec.groups):
        raise ProtocolError(f"{where}: the session's spec has groups 0 to {len(spec.groups) - 1}")
    return where
