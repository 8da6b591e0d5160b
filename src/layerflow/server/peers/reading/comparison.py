"""Whether the models of peers are those of this server, and in which partitions they run there.

Where models differ, nothing of theirs can ever hit. Where only tensor or pipeline sizes do, the objects of other sizes
are asked for beside those of the reader's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import structlog

from layerflow.pool.base import Pool
from layerflow.server.peers.reading.attachment import Attachment
from layerflow.spec import ModelSpec, Shard
from layerflow.wire import messages as wire

MOST_MODELS = 256
"""Models whose sizes are remembered: those of which was told last."""

log = structlog.get_logger("layerflow.server.peers")


class Comparison:
    """What differs, told once and shown in status.

    :param models: the specs that workers here are attached with. :param numbers: of everything that peers are asked.
    """

    def __init__(self, models: Callable[[], Sequence[ModelSpec]], numbers: Iterator[int]) -> None:
        self._models, self._numbers = models, numbers
        self._asked: dict[int, tuple[Attachment, ModelSpec]] = {}
        self.differences: dict[str, dict[str, str]] = {}  #: by peer and model, the first fact that differs

    def peer_up(self, peer: Attachment) -> None:
        """Compare all models with those of a peer."""
        for spec in self._models():
            self.compare(peer, spec)

    def compare(self, peer: Attachment, spec: ModelSpec) -> None:
        """Compare one."""
        self._asked = {
            number: asked
            for number, asked in self._asked.items()
            if asked[0] is not peer or asked[1].fingerprint != spec.fingerprint
        }
        number = next(self._numbers)
        if peer.send(wire.PeerCompare(number, spec)):
            self._asked[number] = peer, spec

    def lost(self, peer: Attachment) -> None:
        """It answers no more."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0] is not peer}

    def forget(self, peer: Attachment) -> None:
        """It is attached no more."""
        self.lost(peer)
        self.differences.pop(peer.target.name, None)

    def answered(self, peer: Attachment, message: wire.PeerCompared) -> None:
        """It has compared."""
        known, spec = self._asked.pop(message.id, (None, None))
        if known is not peer or spec is None:
            return
        found = self.differences.setdefault(peer.target.name, {})
        if not message.difference:
            found.pop(spec.name, None)
        elif found.get(spec.name) != message.difference:
            found[spec.name] = message.difference
            log.warning("peer_differs", peer=peer.target.name, model=spec.name, difference=message.difference)


class PeerSizes:
    """In which partitions peers store: told to the pool, whose lookups count what covers an object."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._told: dict[bytes, list[Shard]] = {}

    def learn(self, spec: ModelSpec) -> None:
        """A worker of this model has attached here: what peers have told of it matters from now on."""
        for shard in self._told.get(spec.fingerprint, ()):
            self._pool.hear(spec.fingerprint, shard)

    def told(self, message: wire.PeerPartitions) -> None:
        """A peer tells."""
        known = self._told.pop(message.model, [])
        fresh = [*message.partitions, *(shard for shard in known if shard not in message.partitions)]
        self._told[message.model] = fresh[: wire.MAX_PEER_PARTITIONS]
        if len(self._told) > MOST_MODELS:
            del self._told[next(iter(self._told))]
        for shard in message.partitions:
            self._pool.hear(message.model, shard)
