"""The contract of a link: what an importer and an exporter do over it.

Whatever moves the bytes, an importer connects to its exporter over TCP first: there both greet each other, requests
show the token of their lease, and the exporter says of each object whether its bytes count, with a tag that covers
them.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Sequence

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus
from layerflow.hosts.peer.grants import ReadGrant
from layerflow.wire.peer_link import ALTERED, GONE, READ, STATUS_WORDS, Origin

STALL_S = 2.0
"""Of a link on which nothing comes for so long nothing more is expected, in seconds."""
Items = Sequence[tuple[int, int, int]]
"""Position in the lease, first byte within the object, bytes."""
_OUTCOMES = {GONE: ObjectStatus.EXPIRED, ALTERED: ObjectStatus.BROKEN}


class LinkFailed(Exception):
    """Nothing more comes over this link, and nothing that it was asked for will be written any more."""


class PeerLink(abc.ABC):
    """The importer's end, connected to one exporter. For one thread."""

    @abc.abstractmethod
    def read(
        self, origin: Origin, places: Sequence[ObjectLocation], lo: int, hi: int, until: float
    ) -> list[ObjectResult]:
        """Layers `lo` to `hi` of these, into the reader's arena.

        :raises LinkFailed: none of it counts.
        """

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Has the other end hung up while nothing was asked for?"""

    @abc.abstractmethod
    def close(self) -> None:
        """Hang up."""


class LentLink(abc.ABC):
    """The exporter's end of one connection. For one thread."""

    def introduce(self, connection: socket.socket) -> None:  # noqa: B027 - most have nothing to say
        """After the greeting: what the reader has to know of the data plane."""

    @abc.abstractmethod
    def send(self, connection: socket.socket, grant: ReadGrant, heads: Sequence[bytes], items: Items, turn: int) -> int:
        """Answer a request of which something may be read.

        :param heads: of all that was asked for. :param items: of that, what may be read.
        :returns: bytes that were given.
        """

    def close(self) -> None:  # noqa: B027 - nor to give back
        """The connection has ended."""


class Lender(abc.ABC):
    """The exporter's end of a kind of link, for all connections."""

    @abc.abstractmethod
    def open(self, incarnation: bytes) -> LentLink:
        """For a new connection; any thread.

        :param incarnation: of this exporter.
        :raises LinkFailed: there is no room for more.
        """


def result_of(place: ObjectLocation, status: int) -> ObjectResult:
    """What a status of :mod:`layerflow.wire.peer_link` says of an object."""
    if status == READ:
        return OK
    why = STATUS_WORDS.get(status, f"status {status}")
    return ObjectResult(_OUTCOMES.get(status, ObjectStatus.FAILED), f"object {place.key.hex()[:8]}: {why}")
