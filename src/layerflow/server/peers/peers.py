"""Everything between this server and others: what it lends, and what it reads."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import zmq

from layerflow.config.peers import MAX_ATTACHED
from layerflow.config.settings import Settings
from layerflow.errors import ConfigError, LayerflowError, ProtocolError
from layerflow.flow.events import Event
from layerflow.observe.collectors import PeerStatistics
from layerflow.pool.base import Pool
from layerflow.server.clients import Address, Reader, Sessions
from layerflow.server.handoffs.registry import Handoffs
from layerflow.server.incoming import IncomingObjects, IncomingSaves
from layerflow.server.mailboxes import Mailboxes
from layerflow.server.peers.attachment import PeerAttachment, PeerTarget
from layerflow.server.peers.handoff_parts import HandoffParts
from layerflow.server.peers.handoffs import HandoffReading
from layerflow.server.peers.lending import Lending
from layerflow.server.peers.source import PeerSource
from layerflow.server.transport.security import read_keys
from layerflow.spec import ModelSpec
from layerflow.wire import messages as wire
from layerflow.wire.messages import INCARNATION_BYTES, Message
from layerflow.wire.rights import Rights

# What ``layerflow status`` shows of peers. JSON-ready; sizes in bytes.


def source_status(source: PeerSource) -> dict[str, Any]:
    """What is read, and from whom."""
    return {
        "leases": len(source.offers),
        "offers": source.offers.objects,
        "fetching_jobs": len(source.fetches),
        "fetches_without_room": source.fetches.refused,
        **source.counts(),
        "failures": dict(source.failures),
        "importer": dataclasses.asdict(source.host.state),
        "importer_figures": dict(source.host.statistics),
        "peers": [_peer(source, peer) for peer in source.peers.values()],
    }


def _peer(source: PeerSource, peer: PeerAttachment) -> dict[str, Any]:
    cost = source.costs.of(peer.target.name)
    return {
        "peer": peer.target.name,
        "address": peer.target.address,
        "link": peer.target.link,
        "state": peer.state.value,
        "reason": peer.reason or peer.unreadable,
        "attempts": peer.attempts,
        "differs": dict(source.compatibility.differences.get(peer.target.name, {})),
        "leases": sum(1 for _ in source.offers.leases(peer)),
        "gbps": round(cost.bandwidth / 1e9, 3) if cost is not None else None,
        "latency_ms": round(cost.latency * 1e3, 3) if cost is not None else None,
    }


log = structlog.get_logger("layerflow.server.peers")

AWAY_S, UNUSED_S = 180.0, 900.0
"""A server that a request has named is forgotten once it was away, or nobody has asked for it, for so long."""


class Peers:
    """Made where the settings lend the arena or name servers to read from.

    :param arena: descriptor and size. :param view: its bytes.
    :param models: the specs that workers here are attached with.
    :param send: to a client of the control sockets. :param give_up: ends a reader's session.
    :param emit: gives events to the core.
    :param incoming: what is on its way into the arena; what peers are asked has numbers of the same series.
    :param storing: hand-offs, and what is followed.
    :param sessions: of readers, among those of clients. :param mailboxes: likewise.
    :raises ConfigError: a tcp peer is named, and this server has no key of its own.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        context: zmq.Context[zmq.Socket[bytes]],
        pool: Pool,
        arena: tuple[int, int],
        view: memoryview,
        *,
        models: Callable[[], Sequence[ModelSpec]],
        send: Callable[[Address, Message], object],
        give_up: Callable[[Reader, str], None],
        emit: Callable[[Sequence[Event]], None],
        incoming: IncomingObjects,
        storing: tuple[Handoffs, IncomingSaves],
        sessions: Sessions,
        mailboxes: Mailboxes,
    ) -> None:
        self._settings, self._context, self._send = settings, context, send
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self.name = f"{socket.gethostname()}/{os.getpid()}"
        peers = settings().peers
        self.lending: Lending | None = None
        if peers.serve:
            self.lending = Lending(
                settings,
                pool,
                arena,
                view=view,
                models=models,
                send=send,
                give_up=give_up,
                handoffs=storing[0],
                follows=storing[1],
                sessions=sessions,
                mailboxes=mailboxes,
            )
        self.source: PeerSource | None = None
        self.reading: HandoffReading | None = None
        self.parts = HandoffParts(storing[0], incoming.numbers)
        self._targets = [
            PeerTarget(
                name=one.name, address=one.address, link=peers.link, keys=self._keys(one.address, one.server_key)
            )
            for one in peers.attach
        ]
        if self._targets or peers.learn:
            self.source = PeerSource(
                settings,
                pool,
                arena,
                emit=emit,
                incoming=incoming,
                attach=self._attachment,
                models=models,
                parts=self.parts,
            )
            self.reading = HandoffReading(settings, self.source)

    def start(self) -> None:
        """Start the processes and attach, on the running loop."""
        if self.lending is not None:
            self.lending.exporting.start()
        if self.source is not None:
            self.source.start()
            for target in self._targets:
                self.source.add(target)

    async def close(self) -> bool:
        """Leave. Whether nothing of it can touch the arena any more."""
        fenced = await self.source.close() if self.source is not None else True
        if self.lending is not None:
            fenced = await self.lending.exporting.close() and fenced
            self.lending.exporter_dead()
        return fenced

    # Readers -------------------------------------------------------------------------------------

    def hello(self, address: Address, message: wire.PeerHello, rights: Rights) -> None:
        """:raises ProtocolError: nothing is lent here, or not to this client, or there is no room."""
        rights.check(message)
        if self.lending is None:
            raise ProtocolError("this server lends nothing: set peers.serve = true there")
        self.lending.hello(address, message, rights)

    def expire(self, now: float) -> None:
        """End the leases of readers whose time is over."""
        if self.lending is not None:
            self.lending.expire(now)

    def check_liveness(self) -> None:
        """Now and then: forget learned servers that nobody needs."""
        now = time.monotonic()
        if self.source is not None:
            for peer in self._learned():
                away = now - peer.away_since > AWAY_S and not peer.up
                if (away or now - peer.used_at > UNUSED_S) and not self.source.needed(peer):
                    self.source.forget(peer)

    # Peers ---------------------------------------------------------------------------------------

    def attached(self, spec: ModelSpec) -> None:
        """A worker of this model has attached here."""
        if self.lending is not None:
            self.lending.add_partition(spec)
        if self.source is not None:
            self.source.compare(spec)

    def learn(self, address: str) -> PeerAttachment:
        """Attach to a server that a request names.

        :raises ConfigError: it is not known, and there is no key for it.
        """
        if self.source is None:
            raise ConfigError(
                f"this server reads from no other, and not from {address}: set peers.learn, or name it in peers.attach"
            )
        listed = next((target for target in self._targets if target.address == address), None)
        key = self._settings().peers.server_key
        if listed is None and not self._settings().peers.learn:
            raise ConfigError(f"{address} is not in peers.attach, and peers.learn is off")
        if listed is None and not (address.startswith("ipc:///") or (address.startswith("tcp://") and key)):
            raise ConfigError(f"{address} is neither ipc:// nor tcp:// with a peers.server_key")
        if listed is None:
            self._make_room(address)
            link = self._settings().peers.link
            listed = PeerTarget(name=address, address=address, link=link, keys=self._keys(address, key))
        return self.source.add(listed)

    def _learned(self) -> list[PeerAttachment]:
        """Servers that requests have named, those away first, and of these the one that was away longest."""
        assert self.source is not None
        named = {target.address for target in self._targets}
        learned = [peer for peer in self.source.peers.values() if peer.target.address not in named]
        return sorted(learned, key=lambda peer: (peer.up, peer.used_at if peer.up else peer.away_since))

    def _make_room(self, address: str) -> None:
        """For one more server.

        :raises ConfigError: all that are attached are needed.
        """
        assert self.source is not None
        if address in self.source.peers or len(self.source.peers) < MAX_ATTACHED:
            return
        for peer in self._learned():
            if not self.source.needed(peer):
                self.source.forget(peer)
                return
        raise ConfigError(f"{MAX_ATTACHED} servers are attached to already; {address} is one too many")

    def is_own(self, address: str) -> bool:
        """Is it one of this server's own control addresses?"""
        return address in (self._settings().server.endpoint, self._settings().server.tcp_endpoint)

    def release_handoff(self, name: str, addresses: Sequence[str]) -> None:
        """Release a hand-off: tell the servers that keep it, and give back what they have lent of it."""
        if self.reading is None:
            return
        servers: list[PeerAttachment] = []
        for address in dict.fromkeys(addresses):
            try:
                if not self.is_own(address):
                    servers.append(self.learn(address))
            except LayerflowError as error:
                log.warning("handoff_not_released", handoff=name, server=address, reason=str(error))
        self.reading.release(name, servers)

    def status(self) -> dict[str, object]:
        """For ``layerflow status``: readers and peers, one by one. Sizes in bytes."""
        lending, source = self.lending, self.source
        return {
            "incarnation": self.incarnation.hex(),
            "lends": None if lending is None else lending.status(),
            "reads": None if source is None else source_status(source),
        }

    def statistics(self) -> PeerStatistics:
        """A snapshot."""
        lending, source = self.lending, self.source
        lent = {} if lending is None else lending.counts()
        read = {} if source is None else source.counts()
        hosts = [lending.exporting.host] if lending is not None else []
        hosts += [source.host] if source is not None else []
        return PeerStatistics(
            **lent,
            **read,
            restarts=sum(host.state.restarts for host in hosts),
            failures={} if source is None else dict(source.failures),
        )

    def _keys(self, address: str, server_key: str) -> tuple[bytes, bytes, bytes] | None:
        if not address.startswith("tcp://"):
            return None
        path = self._settings().server.curve_secret_key_file
        if path is None:
            raise ConfigError(
                f"peer {address}: tcp needs server.curve_secret_key_file, this server's own key, and its public half "
                "on the peer's allow-list"
            )
        secret = read_keys(path)[0]
        return server_key.encode(), secret, zmq.curve_public(secret)

    def _attachment(self, target: PeerTarget, source: PeerSource) -> PeerAttachment:
        most = self._settings().server.max_message_bytes
        return PeerAttachment(target, self._context, self.incarnation, name=self.name, max_bytes=most, listener=source)
