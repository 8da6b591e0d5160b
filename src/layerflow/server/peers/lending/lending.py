"""What this server lends of its arena: readers, their leases, and the pins that these are.

A lease is a pin from the moment it is answered. It ends when its reader gives it back or falls silent, or its time is
over; its pins go once the exporter has said that nothing of it is read any more, or is dead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import secrets
import time
from collections.abc import Callable, Sequence

import structlog

from layerflow._version import __version__
from layerflow.config.settings import Settings
from layerflow.errors import ProtocolError
from layerflow.objects import HEADER_BYTES, payload_bytes
from layerflow.pool.base import Located, Pool
from layerflow.server.clients.sessions import Address
from layerflow.server.handoffs.contents import first_difference
from layerflow.server.handoffs.follows import Follows
from layerflow.server.handoffs.handoff import Handoff, HandoffStatus
from layerflow.server.handoffs.registry import Handoffs
from layerflow.server.peers.lending.exporting import Exporting
from layerflow.server.peers.lending.items import found_of, lent, lent_item
from layerflow.server.peers.lending.open_objects import OpenObjects
from layerflow.server.peers.lending.readers import Lease, OwnSizes, Reader
from layerflow.spec import ModelSpec
from layerflow.wire import messages as wire
from layerflow.wire.host_messages import Extend, Withdraw, split_keys
from layerflow.wire.messages import Message
from layerflow.wire.peer_link import LINK_KEY_BYTES
from layerflow.wire.rights import Rights

log = structlog.get_logger("layerflow.server.peers")


class Lending:
    """All readers and leases.

    :param arena: descriptor and size. :param view: its bytes.
    :param models: the specs that workers here are attached with.
    :param send: to a client of the control sockets.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        pool: Pool,
        arena: tuple[int, int],
        view: memoryview,
        models: Callable[[], Sequence[ModelSpec]],
        send: Callable[[Address, Message], object],
        handoffs: Handoffs,
        follows: Follows,
    ) -> None:
        self._settings, self._pool, self._view, self._send, self._models = settings, pool, view, send, models
        self._arena_bytes = arena[1]
        self.incarnation = secrets.token_bytes(wire.INCARNATION_BYTES)
        self.readers: dict[Address, Reader] = {}
        self._handoffs = handoffs
        self._sizes = OwnSizes(self._tell_all)
        self._open = OpenObjects(
            pool,
            follows,
            models,
            extend=self._extend,
            tell=lambda lease, message: self._send(lease.reader.address, message),
            end=self._end,
        )
        self._ending: dict[int, Lease] = {}
        self._readers = itertools.count(-1, -1)
        self._numbers = 0
        self._lent_bytes = 0
        self.lent_objects = self.refused_objects = self.expired_leases = 0
        self.exporting = Exporting(
            settings(), arena, changed=self._welcome_all, withdrawn=self._withdrawn, lost=self._exporter_lost
        )

    @property
    def leases(self) -> int:
        """That pin something, those included that are being ended."""
        return sum(len(reader.leases) for reader in self.readers.values()) + len(self._ending)

    def hello(self, address: Address, message: wire.PeerHello, rights: Rights) -> None:
        """A server introduces itself.

        :raises ProtocolError: there is no room for more.
        """
        most = self._settings().peers.max_readers
        if len(self.readers) >= most:
            raise ProtocolError(f"peers.max_readers = {most} servers read here already")
        reader = Reader(address, next(self._readers), message.name, message.pid, time.monotonic(), rights)
        self.readers[address] = reader
        log.info("peer_reader", reader=reader.name, pid=reader.pid, door=address[0])
        self._welcome(reader)
        for told in self._sizes.all():
            self._send(address, told)

    def learn(self, spec: ModelSpec) -> None:
        """A worker of this model has attached: readers of other sizes can use what it stores."""
        self._sizes.learn(spec)

    def handle(self, reader: Reader, message: wire.ToServer) -> None:
        """A message of a reader.

        :raises ProtocolError: it cannot be done; nothing has changed.
        """
        reader.heard = time.monotonic()
        match message:
            case wire.PeerLookup():
                self._look_up(reader, message)
            case wire.PeerRelease():
                lease = reader.leases.get(message.lease)
                if lease is not None:
                    self._end(lease)
            case wire.PeerBeat():
                renewed = [lease for number in message.renew if (lease := reader.leases.get(number)) is not None]
                for lease in renewed:
                    self._set_timer(lease)
                self._send(reader.address, wire.PeerBeat(message.sent, [lease.number for lease in renewed]))
            case wire.PeerCompare():
                known = [spec for spec in self._models() if spec.name == message.spec.name]
                found = [first_difference(message.spec, spec) for spec in known]
                why = found[0] if found and all(found) else ""
                self._send(reader.address, wire.PeerCompared(message.id, why))
            case wire.Bye():
                self.lose(reader, "bye")
            case _:
                raise ProtocolError(f"{type(message).__name__} from a server that reads; it may look up and release")

    def tell(self, reader: Reader, message: Message) -> None:
        """Say something to a reader, if it is still there."""
        if self.readers.get(reader.address) is reader:
            self._send(reader.address, message)

    def lose_silent(self, now: float, limit_s: float) -> None:
        """Readers of which nothing was heard for so long are gone."""
        for reader in list(self.readers.values()):
            if now - reader.heard > limit_s:
                self.lose(reader, "silent")

    def lose(self, reader: Reader, why: str) -> None:
        """It is gone, with its leases."""
        log.info("peer_reader_lost", reader=reader.name, pid=reader.pid, why=why, leases=len(reader.leases))
        self.readers.pop(reader.address, None)
        self._handoffs.lose_session(reader.number, "the server that opened it is gone")
        for lease in list(reader.leases.values()):
            self._end(lease)

    def close(self) -> None:
        """The exporter is dead."""
        for reader in list(self.readers.values()):
            self.lose(reader, "shutdown")
        for number in list(self._ending):
            self._withdrawn(number)

    def counts(self) -> dict[str, int]:
        """By the names of :class:`layerflow.observe.metrics.peers.PeerStatistics`."""
        return {
            "readers": len(self.readers),
            "lent_leases": self.leases,
            "lent_bytes": self._lent_bytes,
            "lent_objects": self.lent_objects,
            "refused_objects": self.refused_objects,
            "expired_leases": self.expired_leases,
        }

    def status(self) -> dict[str, object]:
        """JSON-ready."""
        now = time.monotonic()
        exporter = self.exporting.host
        return {
            "leases": self.leases,
            **self.counts(),
            "endpoints": self.exporting.shown,
            "exporter": dataclasses.asdict(exporter.state),
            "exporter_figures": dict(exporter.statistics),
            "who": [
                {
                    "reader": reader.name,
                    "door": reader.address[0],
                    "leases": len(reader.leases),
                    "lookups": reader.lookups,
                    "heard_s_ago": round(now - reader.heard, 3),
                }
                for reader in self.readers.values()
            ],
        }

    # Leases --------------------------------------------------------------------------------------

    def _look_up(self, reader: Reader, message: wire.PeerLookup) -> None:
        peers, server = self._settings().peers, self._settings().server
        if message.incarnation != self.incarnation:
            raise ProtocolError("this lookup is for a server that was here before; attach again")
        if not 0 < message.lease_ms <= server.max_deadline_s * 1e3:
            raise ProtocolError(f"lease_ms = {message.lease_ms} should be 1 to server.max_deadline_s")
        if len(reader.leases) >= peers.max_leases:
            raise ProtocolError(f"peers.max_leases = {peers.max_leases} leases are held; release some")
        reader.lookups += 1
        if not message.handoff:
            self._lend(reader, message, None, "")
        elif not 0 < message.wait_ms <= server.max_deadline_s * 1e3:
            raise ProtocolError(f"wait_ms = {message.wait_ms} should be 1 to server.max_deadline_s")
        else:
            until = time.monotonic() + message.wait_ms / 1e3
            self._hand_off(reader, message, self._handoffs.announce(message.handoff, until), until)

    def _hand_off(self, reader: Reader, message: wire.PeerLookup, handoff: Handoff, until: float) -> None:
        """Answer once the hand-off is more than announced."""
        if handoff.status is HandoffStatus.ANNOUNCED and time.monotonic() < until:
            loop = asyncio.get_running_loop()

            def changed(told: Handoff) -> None:
                timer.cancel()
                self._handoffs.unwatch(handoff, changed)
                if self.readers.get(reader.address) is reader:
                    self._hand_off(reader, message, told, until)

            timer = loop.call_later(max(0.0, until - time.monotonic()), changed, handoff)
            self._handoffs.watch(handoff, changed)
            return
        if handoff.status.readable:
            self._handoffs.claim(handoff, time.monotonic(), message.lease_ms / 1e3)
            self._lend(reader, message, handoff.spec, "")
        else:
            self._lend(reader, message, None, handoff.story(), failed=True)

    def _lend(
        self, reader: Reader, message: wire.PeerLookup, storing: ModelSpec | None, reason: str, *, failed: bool = False
    ) -> None:
        """Lend what is there, and answer.

        :param storing: of the engine whose objects are lent before they are whole, too.
        """
        keys = split_keys(message.keys)
        lease = Lease(self._numbers + 1, reader, message.lease_ms / 1e3)
        whole, why = self._pin(keys, lease) if self.exporting.address else ([None] * len(keys), "no exporter")
        still = {key: at for at, key in enumerate(keys) if whole[at] is None}
        pending = self._open.lend(lease, still, storing) if storing is not None and self.exporting.address else {}
        items = [lent_item(self._view, key, place, pending.get(key)) for key, place in zip(keys, whole, strict=True)]
        token = lease_key = b""
        if any(item.state != wire.MISSING for item in items):
            self._numbers += 1
            self._set_timer(lease)
            reader.leases[lease.number] = lease
            self.lent_objects += sum(item.state != wire.MISSING for item in items)
            token, lease_key = secrets.token_bytes(wire.PEER_TOKEN_BYTES), secrets.token_bytes(LINK_KEY_BYTES)
            self.exporting.send(lent(lease.number, token, lease_key, items))
        found = found_of(message, lease.number if token else 0, token, items, reason or why, failed, lease_key)
        self._send(reader.address, found)

    def _pin(self, keys: Sequence[bytes], lease: Lease) -> tuple[list[Located | None], str]:
        """Pin what is whole here, as far as the share allows; what was left out, and why."""
        room = self._settings().peers.lease_share * self._arena_bytes
        there = self._pool.lookup(keys)
        found = iter(
            self._pool.acquire([k for k, here in zip(keys, there, strict=True) if here], lease.owner, math.inf)
        )
        places: list[Located | None] = [next(found) if here else None for here in there]
        reason, over, cut = "", [], 0
        for at, place in enumerate(places):
            if place is None:
                continue
            nbytes = HEADER_BYTES + payload_bytes(self._view, place.offset)
            if place.pieces or self._lent_bytes + nbytes > room:
                # What lies in pieces of another partition is lent piece by piece, by their own names.
                cut += bool(place.pieces)
                reason = reason if place.pieces else "peers.lease_share is lent"
                over.append(keys[at])
                places[at] = None
                continue
            lease.nbytes += nbytes
            self._lent_bytes += nbytes
        self.refused_objects += len(over) - cut
        if not any(places):
            self._pool.release(lease.owner)
        elif over:
            self._pool.release(lease.owner, over)
        return places, reason

    def _set_timer(self, lease: Lease) -> None:
        if lease.timer is not None:
            lease.timer.cancel()
        lease.timer = asyncio.get_running_loop().call_later(lease.lease_s, self._expire, lease)

    def _expire(self, lease: Lease) -> None:
        self.expired_leases += 1
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        """No read of it may begin any more; its pins go when none is under way."""
        if lease.timer is not None:
            lease.timer.cancel()
        if lease.reader.leases.pop(lease.number, None) is None:
            return
        self._ending[lease.number] = lease
        if not self.exporting.send(Withdraw(lease.number)) and not self.exporting.alive:
            self._withdrawn(lease.number)

    def _withdrawn(self, number: int) -> None:
        """Nothing of it is read any more."""
        lease = self._ending.pop(number, None)
        if lease is not None:
            self._lent_bytes -= lease.nbytes
            self._open.drop(lease)
            self._pool.release(lease.owner)

    def _exporter_lost(self) -> None:
        for reader in self.readers.values():
            for lease in list(reader.leases.values()):
                self._end(lease)
        for number in list(self._ending):
            self._withdrawn(number)

    def _extend(self, message: Extend) -> None:
        self.exporting.send(message)

    # Welcome -------------------------------------------------------------------------------------

    def _tell_all(self, message: wire.PeerPartitions) -> None:
        for address in self.readers:
            self._send(address, message)

    def _welcome_all(self) -> None:
        for reader in self.readers.values():
            self._welcome(reader)

    def _welcome(self, reader: Reader) -> None:
        server = self._settings().server
        self._send(
            reader.address,
            wire.PeerWelcome(
                __version__,
                self.incarnation,
                server.heartbeat_ms,
                server.liveness_ms,
                self._arena_bytes,
                self.exporting.endpoints(reader.link_name),
            ),
        )
