"""Servers that read from this one's arena, and what they lease there."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from layerflow.server.account import Account
from layerflow.server.clients import Address
from layerflow.spec import ModelSpec, Shard
from layerflow.wire import messages as wire
from layerflow.wire.peer_link import READER_BYTES
from layerflow.wire.rights import Rights


@dataclass(slots=True, eq=False)
class Lease:
    """What a reader was lent with one answer.

    :param lease_s: it ends so long after it was lent or last renewed.
    :param nbytes: that it pins.
    """

    number: int
    reader: Reader
    lease_s: float
    nbytes: int = 0

    @property
    def owner(self) -> tuple[str, int]:
        """Who has its pins."""
        return ("peer", self.number)

    @property
    def asked(self) -> tuple[str, int]:
        """Who has the pins of what was asked for, until it is known which of it is lent."""
        return ("peer_asked", self.number)


@dataclass(slots=True, eq=False)
class Reader:
    """A server that reads here.

    :param number: below 0: those of sessions are above.
    :param account: what it makes this server keep.
    :param heard: when it last said anything, monotonic seconds.
    :param rights: what it may do. :param link_name: of it on the link.
    """

    address: Address
    number: int
    name: str
    pid: int
    account: Account
    heard: float
    rights: Rights
    leases: dict[int, Lease] = field(default_factory=dict)
    lookups: int = 0
    link_name: bytes = field(default_factory=lambda: secrets.token_bytes(READER_BYTES))


class OwnSizes:
    """In which partitions workers store here: told to readers.

    :param tell: every reader that is here.
    """

    def __init__(self, tell: Callable[[wire.PeerPartitions], None]) -> None:
        self._tell = tell
        self._models: dict[bytes, list[Shard]] = {}

    def learn(self, spec: ModelSpec) -> None:
        """A worker of this model has attached."""
        first, known = spec.shard.peers()[0], self._models.get(spec.fingerprint, [])
        if not spec.shard.shareable or (known and known[-1] == first):
            return
        known = [*(shard for shard in known if shard != first), first][-wire.MAX_PEER_PARTITIONS :]
        self._models[spec.fingerprint] = known
        self._tell(wire.PeerPartitions(spec.fingerprint, known))

    def all(self) -> list[wire.PeerPartitions]:
        """Of every model."""
        return [wire.PeerPartitions(model, shards) for model, shards in self._models.items()]
