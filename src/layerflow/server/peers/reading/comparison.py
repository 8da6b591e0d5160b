"""Whether the models of peers are those of this server: where they are not, nothing of theirs can ever hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from layerflow.server.peers.reading.attachment import Attachment
from layerflow.spec import ModelSpec
from layerflow.wire import messages as wire

log = structlog.get_logger("layerflow.server.peers")


class Comparison:
    """What differs, told once and shown in status.

    :param models: the specs that workers here are attached with.
    """

    def __init__(self, models: Callable[[], Sequence[ModelSpec]]) -> None:
        self._models = models
        self._asked: dict[int, tuple[Attachment, ModelSpec]] = {}
        self._numbers = 0
        self.differences: dict[str, dict[str, str]] = {}  #: by peer and model, the first fact that differs

    def peer_up(self, peer: Attachment) -> None:
        """Compare all models with those of a peer."""
        for spec in self._models():
            self.compare(peer, spec)

    def compare(self, peer: Attachment, spec: ModelSpec) -> None:
        """Compare one."""
        self._numbers += 1
        if peer.send(wire.PeerCompare(self._numbers, spec)):
            self._asked[self._numbers] = peer, spec

    def lost(self, peer: Attachment) -> None:
        """It answers no more."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0] is not peer}

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
