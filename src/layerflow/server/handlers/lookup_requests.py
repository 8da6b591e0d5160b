"""What a lookup asks for, checked."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from layerflow.config.settings import ServerSettings
from layerflow.errors import ProtocolError
from layerflow.hits import (
    LISTED_BYTES,
    NO_BLOCKS,
    BlockDigests,
    HitLength,
    LookupSource,
    search_bytes,
    search_hit,
)
from layerflow.keys import DIGEST_BYTES
from layerflow.places import PLACE
from layerflow.server.account import Charge, Refused
from layerflow.server.clients import ClientSession
from layerflow.server.leases import PINNED_BYTES
from layerflow.server.mailboxes import Slices, in_slices
from layerflow.spec import ModelSpec
from layerflow.wire import codec
from layerflow.wire import messages as wire

T = TypeVar("T")

RUNNING_BYTES = 256 << 10
"""What a client's lookup may build however much is kept for it: of all its lookups one runs at a time.

A prompt of usual length is searched, and its hit told, for a client that may lease no more.
"""

LOCATED_BYTES = 2 * PLACE.size
"""What a lookup keeps of an object of its hit until it is answered, in bytes: its place, twice as these are joined."""


class Replaced(Exception):
    """The engine's weights were replaced while a lookup waited: its keys are those of the old ones."""


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """A checked lookup of a client.

    :param resets: how often its engine's weights had been replaced when the server began with it.
    """

    message: wire.Lookup
    digests: list[bytes]
    blocks: BlockDigests
    resets: int


async def unreplaced(session: ClientSession, awaited: Awaitable[T]) -> T:
    """What a lookup waits for.

    :raises Replaced: nothing may be brought, leased or found for it any more.
    """
    resets = session.resets
    told = await awaited
    if session.resets != resets:
        raise Replaced
    return told


def waiting(message: wire.Lookup) -> str:
    """What a client is charged for while its lookup waits."""
    return f"request {message.request!r}: a lookup that waits"


def until_of(message: wire.Lookup, limits: ServerSettings) -> float:
    """By when a lookup's hand-off is to be followed, monotonic seconds.

    :raises ProtocolError: it cannot be asked so.
    """
    most_ms = int(limits.max_deadline_s * 1e3)
    if not 0 < message.follow_ms <= most_ms:
        raise ProtocolError(
            f"request {message.request!r}: follow_ms must be 1 to {most_ms}, which is server.max_deadline_s"
        )
    return time.monotonic() + message.follow_ms / 1e3


def kept_bytes(message: wire.Lookup) -> int:
    """What a lookup that waits keeps."""
    texts = (message.request, message.handoff, *message.servers)
    return len(message.digests) + len(message.block_digests) + sum(map(len, texts))


def asking_bytes(message: wire.Lookup) -> int:
    """What a lookup that waits for an answer about its chunks keeps: their digests, and which are asked for, too."""
    return kept_bytes(message) + _chunks_of(message) * 2 * LISTED_BYTES


def searching_bytes(spec: ModelSpec, message: wire.Lookup) -> int:
    """What a lookup keeps while it searches for its hit."""
    return kept_bytes(message) + search_bytes(spec, _chunks_of(message))


def running(session: ClientSession, spec: ModelSpec, message: wire.Lookup) -> Charge:
    """Count what a lookup that has come builds until it is answered, or waits.

    :raises Refused: its client may not make the server keep what a search for its hit takes.
    """
    nbytes = searching_bytes(spec, message)
    what = f"request {message.request!r}: a lookup of {_chunks_of(message)} chunks"
    return session.account.charge(what, nbytes, always=nbytes <= RUNNING_BYTES)


def running_on(session: ClientSession, spec: ModelSpec, message: wire.Lookup, more: int = 0) -> Charge:
    """As :func:`running`, of a lookup that has run, or has waited: it is answered.

    One of a client runs at a time, so that what its share does not hold is one search.

    :param more: bytes besides, of what has been found for it: they had to fit when they were found.
    """
    return session.account.charge("", searching_bytes(spec, message) + more, always=True)


def count_pins(
    charge: Charge, message: wire.Lookup, lease: tuple[Charge | None, int], *, pinned: int, located: int
) -> None:
    """Count what a lookup that runs pins of its hit, and where that lies.

    :param charge: of :func:`running_on`, as it is without pins.
    :param lease: the charge of the lease that the request has, whose place these pins take next, and for how many
        objects it is: only what is more has to fit.
    :param pinned: objects. :param located: objects whose places are kept, there or not.
    :raises Refused: its client may not make the server keep that.
    """
    nbytes = pinned * PINNED_BYTES + located * LOCATED_BYTES
    always = charge.nbytes + nbytes <= RUNNING_BYTES
    giver, leased = lease
    given = min(nbytes, leased * (PINNED_BYTES + LOCATED_BYTES))
    charge.extend(f"request {message.request!r}: the pins of a hit", nbytes, always=always, giver=giver, given=given)


def _chunks_of(message: wire.Lookup) -> int:
    return len(message.digests) // DIGEST_BYTES


async def read_digests(message: wire.Lookup) -> list[bytes]:
    """A lookup's chunks. One that waits keeps only its message meanwhile, and is read again afterwards."""
    return await in_slices(codec.split_in_slices(message.digests, f"request {message.request!r}"))


async def read_lookup(spec: ModelSpec, message: wire.Lookup, resets: int) -> LookupRequest:
    """What a checked lookup asks for; `resets` as of :class:`LookupRequest`."""
    return LookupRequest(message, await read_digests(message), _blocks_of(message, spec), resets)


def search_prompt(view: LookupSource, spec: ModelSpec, asked: LookupRequest) -> Slices[HitLength]:
    """The longest hit of a lookup in `view`."""
    message = asked.message
    return search_hit(
        view, spec, message.root, asked.digests, message.tokens, tail_digest=message.tail, blocks=asked.blocks
    )


def check_lookup(session: ClientSession, message: wire.Lookup, limits: ServerSettings) -> ModelSpec:
    """May the client ask for this? Its digests are not looked at one by one; see :func:`read_digests`.

    :returns: the spec that it asks with.
    :raises ProtocolError: it cannot be asked so.
    """
    if session.spec is None:
        raise Refused("not_attached", "attach a spec before looking up")
    spec = session.spec
    asked_for = (len(message.digests) // DIGEST_BYTES + 1) * len(spec.groups)
    asked_for *= len(spec.shard.peers())
    if asked_for > limits.max_lookup_objects:
        raise Refused(
            "quota",
            f"request {message.request!r}: chunks x groups x shards are {asked_for} objects, "
            f"server.max_lookup_objects is {limits.max_lookup_objects}; look up a shorter prompt",
        )
    chunks = message.tokens // spec.chunk_tokens
    if len(message.root) != DIGEST_BYTES or message.tokens < 0 or len(message.digests) != chunks * DIGEST_BYTES:
        raise ProtocolError(
            f"request {message.request!r}: {len(message.digests)} bytes of digests and a root of {len(message.root)} "
            f"bytes for {message.tokens} tokens; {chunks} digests and {DIGEST_BYTES} bytes belong"
        )
    if len(message.tail) not in (0, DIGEST_BYTES) or (message.tail and not message.tokens % spec.chunk_tokens):
        raise ProtocolError(
            f"request {message.request!r}: a tail digest of {len(message.tail)} bytes for {message.tokens} tokens; "
            f"{DIGEST_BYTES} bytes where the full chunks leave tokens, else none"
        )
    most_ms = int(limits.max_deadline_s * 1e3)
    if not 0 < message.lease_ms <= most_ms:
        raise ProtocolError(
            f"request {message.request!r}: lease_ms must be 1 to {most_ms}, which is server.max_deadline_s"
        )
    if not 0 <= message.written_ms <= most_ms:
        raise ProtocolError(f"request {message.request!r}: written_ms must be 0 to {most_ms}")
    _blocks_of(message, spec)
    return spec


def check_leases(session: ClientSession, request: str, most: int) -> None:
    """:raises Refused: the client holds so many leases already."""
    leases = session.hit_leases
    if request in leases or len(leases) < most:
        return
    now = time.monotonic()
    for name in [name for name, until in leases.items() if until <= now]:
        del leases[name]
    if len(leases) >= most:
        raise Refused(
            "quota",
            f"request {request!r}: this client holds server.max_leases = {most} leases; drop those that are not "
            "needed, or look up with a shorter lease_ms",
        )


def _blocks_of(message: wire.Lookup, spec: ModelSpec) -> BlockDigests:
    """The prompt's block digests, as far as the client has sent them.

    :raises ProtocolError: more than the prompt has, or none that a hit could end at.
    """
    if not message.block_digests:
        return NO_BLOCKS
    unit = spec.block_tokens
    left = message.tokens - message.blocks_from * spec.chunk_tokens
    count, rest = divmod(len(message.block_digests), DIGEST_BYTES)
    if not unit or rest or message.blocks_from < 0 or count * unit > left:
        raise ProtocolError(
            f"request {message.request!r}: {len(message.block_digests)} bytes of block digests from chunk "
            f"{message.blocks_from} on, of {message.tokens} tokens; {DIGEST_BYTES} bytes for each {unit or 'no'} "
            "tokens belong"
        )
    return BlockDigests(message.blocks_from, message.block_digests, spec.chunk_tokens // unit)
