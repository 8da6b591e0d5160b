"""The engine's own publisher of KV cache events: taken over as the engine makes it, and watched for who connects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from layerflow.connectors.common.block_ledger import BlockEvent

log = structlog.get_logger("layerflow.events")


class WatchedPublisher:
    """Sees who connects, and what the engine itself says. Goes before the engine's ZMQ publisher among the bases.

    :cvar forgetting: the engine's event that has routers forget everything.
    :ivar cleared: the engine has published it.
    """

    forgetting: type
    cleared = False
    connections: Any
    _pub: Any

    def _socket_setup(self) -> None:
        super()._socket_setup()  # type: ignore[misc]
        self.connections = self._pub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def publish(self, events: Any) -> None:
        """Send a batch."""
        if any(isinstance(event, self.forgetting) for event in events.events):
            self.cleared = True
        super().publish(events)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Stop."""
        if self._pub is not None:
            self._pub.disable_monitor()
        self.connections.close(0)
        super().shutdown()  # type: ignore[misc]


class EnginePublisher(ABC):
    """Where the announcer's events go: the next publisher that the engine makes in this process.

    :param registry: of the engine: what makes a publisher, by kind.
    :param kind: of publisher, by the engine's configuration.
    :param watched: takes the place of the engine's class among its bases.
    """

    def __init__(
        self, registry: MutableMapping[str, Callable[..., Any]], kind: str, watched: type[WatchedPublisher]
    ) -> None:
        self._publisher: Any = None
        self._greeted = False
        self._unsaid = False  #: events came before there was a publisher
        made = registry[kind]

        def make(*args: Any, **kwargs: Any) -> Any:
            registry[kind] = made
            is_watched = made in watched.__bases__
            self._publisher = (watched if is_watched else made)(*args, **kwargs)
            if not is_watched:
                log.warning("routers_not_watched", publisher=kind, effect="a router that starts late learns from hits")
            return self._publisher

        registry[kind] = make

    @abstractmethod
    def batch(self, events: Sequence[BlockEvent]) -> Any:
        """The engine's own batch of these events."""

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Send events as one batch."""
        publisher = self._publisher
        if publisher is None:
            self._unsaid = self._unsaid or bool(events)
        elif events and getattr(publisher, "_running", True):
            publisher.publish(self.batch(events))

    def missed(self) -> bool:
        """Has a subscriber connected before the last call, or has the engine had everything forgotten?

        One that has only now connected is told with the next call: its subscription follows its greeting.
        """
        publisher = self._publisher
        if publisher is None:
            return False
        missed, self._greeted, self._unsaid = self._greeted or self._unsaid, False, False
        if not isinstance(publisher, WatchedPublisher):
            return missed
        if publisher.cleared:
            publisher.cleared, missed = False, True
        while not publisher.connections.closed and publisher.connections.poll(0):
            parse_monitor_message(publisher.connections.recv_multipart())
            self._greeted = True
        return missed
