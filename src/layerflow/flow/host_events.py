"""What the core is told of hosts: objects on their way between the arena and a backend, or from a peer's arena."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Hop(enum.IntEnum):
    """Which way a host moves objects: from the backend into the arena, to it, or from a peer's arena into this one.

    Transfers of :data:`FETCH` and :data:`PEER` are fetches alike; each hop has a host, calls and pace of its own.
    """

    FETCH = 0
    WRITE = 1
    PEER = 2


class Item(NamedTuple):
    """One object of a transfer between arena and backend: the bytes and blocks of each of its layers."""

    layer_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class FetchOpened:
    """Objects of one group are to be brought into the arena, where they have room.

    It runs until all of it has come, unless it was wanted (leased, or needed by a step's loads) and no longer is.

    :param fetch: numbers ascend and are never reused, on both hops together.
    :param source: who it is for; sources share the host evenly.
    :param layers: the model's layer numbers of the group, ascending.
    :param available: so many layers can be fetched now, more as :class:`FetchAvailable` says; -1 = all.
    :param hop: where from: the backend, or a peer.
    """

    fetch: int
    source: str
    layers: tuple[int, ...]
    objects: tuple[Item, ...]
    available: int = -1
    hop: Hop = Hop.FETCH


@dataclass(frozen=True, slots=True)
class FetchAvailable:
    """The first `layers` layers of all objects of a fetch can be fetched: its source has stored them."""

    fetch: int
    layers: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """These objects of a fetch, ``(position, why)``, will not come, whatever the host is doing with them."""

    fetch: int
    failed: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class FetchLeased:
    """Lookups lease objects of a fetch, or none does any more. News of a fetch that has ended is late."""

    fetch: int
    leased: bool


@dataclass(frozen=True, slots=True)
class WriteOpened:
    """Objects that a step saves of one group are to be written to the backend, layer by layer as they are stored.

    They are published there once they are committed in the arena; those of revoked parts are given up.

    :param write: numbers ascend and are never reused.
    :param source: who it is for; sources share the host evenly.
    :param parts: of each object, its position in ``StepOpened.saves``.
    """

    write: int
    source: str
    session: int
    step: int
    group: int
    objects: tuple[Item, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WritesRevoked:
    """Nothing that is on its way to the backend now may be published there, as far as the host hears of it in time."""

    reason: str


@dataclass(frozen=True, slots=True)
class CallDone:
    """The host has ended a call: its layers have moved, or its objects are published, but for those that failed.

    :param failed: positions in the transfer, of this call or not, with what happened.
    """

    hop: Hop
    call: int
    failed: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class FetchesRevoked:
    """Nothing that is on its way from the backend now may be published, whenever the host ends it.

    :param unwanted: only what no lease and no living load wants.
    """

    reason: str
    unwanted: bool = False


@dataclass(frozen=True, slots=True)
class HostLost:
    """The host process is dead: nothing of it touches the arena, and nothing that it carried will end.

    :param hops: what it moved.
    """

    reason: str
    hops: tuple[Hop, ...] = (Hop.FETCH, Hop.WRITE)
