"""The objects of one lease, as the exporter and the reader are told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from layerflow.objects import HEADER_BYTES, payload_bytes
from layerflow.pool.base import Located
from layerflow.server.peers.lending.open_objects import OpenObject
from layerflow.wire import messages as wire
from layerflow.wire.host_messages import Lend
from layerflow.wire.packing import pack_u32, pack_u64


class LentItem(NamedTuple):
    """One key of a lookup, as it is lent; sizes in bytes. :param stored: of these so many may be read."""

    key: bytes
    state: int
    offset: int = 0
    nbytes: int = 0
    blocks: int = 0
    tokens: int = 0
    layers: int = 0
    save: int = 0
    stored: int = 0


def whole_item(view: memoryview, key: bytes, place: Located) -> LentItem:
    """An object that is whole."""
    nbytes = HEADER_BYTES + payload_bytes(view, place.offset)
    return LentItem(key, wire.STORED, place.offset, nbytes, place.blocks, place.tokens, 0, 0, nbytes)


def open_item(key: bytes, pending: OpenObject) -> LentItem:
    """An object that is being stored."""
    stored = pending.bytes_of(pending.layers)
    return LentItem(
        key, wire.OPEN, pending.offset, pending.nbytes, pending.blocks, 0, pending.layers, pending.save, stored
    )


def lent(lease: int, token: bytes, lease_key: bytes, items: Sequence[LentItem]) -> Lend:
    """What the exporter is told: of all keys, so that positions are those of the lookup."""
    return Lend(
        lease,
        token,
        b"".join(item.key for item in items),
        pack_u64([item.offset for item in items]),
        pack_u64([item.nbytes for item in items]),
        pack_u32([item.blocks if item.state == wire.STORED else 0 for item in items]),
        pack_u64([item.stored for item in items]),
        lease_key,
    )


def found_of(
    message: wire.PeerLookup,
    lease: int,
    token: bytes,
    items: Sequence[LentItem],
    reason: str,
    failed: bool,
    lease_key: bytes,
) -> wire.PeerFound:
    return wire.PeerFound(
        message.id,
        lease,
        token,
        message.lease_ms if lease else 0,
        bytes(item.state for item in items),
        pack_u64([item.nbytes for item in items]),
        pack_u32([item.blocks for item in items]),
        pack_u32([item.tokens for item in items]),
        pack_u32([item.layers for item in items]),
        pack_u32([item.save for item in items]),
        reason,
        failed,
        lease_key,
    )
