"""From what the server says of a job's objects to places in this process's mapping of the arena."""

from __future__ import annotations

from layerflow.errors import ExtentError, ProtocolError
from layerflow.hosts.backend import Place
from layerflow.hosts.messages import Objects, split_keys, unpack_u32, unpack_u64
from layerflow.keys import KEY_BYTES
from layerflow.memfd import SharedMemory


def places_of(objects: Objects, arena: SharedMemory) -> list[Place]:
    """The objects of a job, in its order.

    :raises ProtocolError: the arrays do not fit together.
    :raises ExtentError: an object would leave the arena.
    """
    keys = split_keys(objects.keys)
    try:
        offsets, sizes = unpack_u64(objects.offsets), unpack_u64(objects.layer_bytes)
        blocks, tokens = unpack_u32(objects.blocks), unpack_u32(objects.tokens)
    except ValueError as error:
        raise ProtocolError(f"the objects of a job do not fit together: {error}") from None
    if {len(offsets), len(sizes), len(blocks), len(tokens)} != {len(keys)} or objects.layers < 1:
        raise ProtocolError(
            f"a job of {len(keys)} keys, {len(offsets)} offsets, {len(sizes)} sizes, {len(blocks)} block counts and "
            f"{len(tokens)} token counts over {objects.layers} layers"
        )
    parents = dict(objects.parents)
    if any(not 0 <= at < len(keys) or len(parent) != KEY_BYTES for at, parent in parents.items()):
        raise ProtocolError(f"a job of {len(keys)} keys with a parent at no position of it, or of the wrong size")
    base = arena.address
    places = [
        Place(key, offset, base + offset, size, objects.layers, count, length, parents.get(at, b""))
        for at, (key, offset, size, count, length) in enumerate(zip(keys, offsets, sizes, blocks, tokens, strict=True))
    ]
    for place in places:
        if place.offset + place.nbytes > arena.nbytes or not place.blocks or not place.layer_bytes:
            raise ExtentError(
                f"object {place.key.hex()} of {place.blocks} blocks at bytes {place.offset} to "
                f"{place.offset + place.nbytes} of an arena of {arena.nbytes}"
            )
    return places


def count_of(objects: Objects) -> int:
    """How many objects a job names, whatever else is wrong with it."""
    return len(objects.keys) // KEY_BYTES
