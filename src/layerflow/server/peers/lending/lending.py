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
from collections.abc import Callable, Mapping, Sequence

import structlog

from layerflow._version import __version__
from layerflow.config.settings import Settings
from layerflow.errors import LayerflowError, ProtocolError
from layerflow.observe.log_limit import LogLimit
from layerflow.pool.base import Pool
from layerflow.server.clients.account import Accounts, Refused
from layerflow.server.clients.sessions import Address
from layerflow.server.clients.turns import Turns, Work
from layerflow.server.handoffs.contents import first_difference
from layerflow.server.handoffs.follows import Follows
from layerflow.server.handoffs.handoff import Handoff, HandoffStatus
from layerflow.server.handoffs.registry import Handoffs
from layerflow.server.peers.lending.exporting import Exporting
from layerflow.server.peers.lending.items import LentItem, found_of, lent, open_item, whole_item
from layerflow.server.peers.lending.open_objects import OpenObjects
from layerflow.server.peers.lending.readers import Lease, OwnSizes, Reader
from layerflow.spec import ModelSpec
from layerflow.system.numbers import ascending
from layerflow.wire import messages as wire
from layerflow.wire.host_messages import Extend, Withdraw, split_keys
from layerflow.wire.messages import Message
from layerflow.wire.peer_link import LINK_KEY_BYTES
from layerflow.wire.rights import Rights

KEYS_PER_SLICE = 256
"""Keys of a lookup that are pinned before another client may get its turn."""

ENDING = (wire.PeerRelease, wire.PeerEndHandoff, wire.PeerReleaseHandoff, wire.Bye)
"""Small messages that end something: they are taken however much a reader keeps."""

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
        accounts: Accounts,
        turns: Turns,
    ) -> None:
        self._settings, self._pool, self._view, self._send, self._models = settings, pool, view, send, models
        self._turns = turns
        self._arena_bytes = arena[1]
        self.incarnation = secrets.token_bytes(wire.INCARNATION_BYTES)
        self.readers: dict[Address, Reader] = {}
        self._handoffs, self._accounts = handoffs, accounts
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
        self._log_limit = LogLimit()
        self._readers = itertools.count(-1, -1)
        self._numbers = ascending()
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
        account = self._accounts.of(address)
        reader = Reader(address, next(self._readers), message.name, message.pid, account, time.monotonic(), rights)
        self.readers[address] = reader
        log.info("peer_reader", reader=reader.name, pid=reader.pid, door=address[0])
        self._welcome(reader)
        for told in self._sizes.all():
            self._send(address, told)

    def learn(self, spec: ModelSpec) -> None:
        """A worker of this model has attached: readers of other sizes can use what it stores."""
        self._sizes.learn(spec)

    def hear(self, reader: Reader, message: wire.ToServer, work: Work, nbytes: int) -> None:
        """A reader has said something: do `work` for it, behind what it has asked before.

        :param nbytes: of the message.
        """
        reader.heard = time.monotonic()
        if isinstance(message, wire.PeerBeat):  # it waits for nothing: silence is what it is to tell from
            for _ in self._guarded(reader, message, work):
                pass
            return
        self.start(reader, message, work, nbytes, always=isinstance(message, ENDING))

    def start(
        self, reader: Reader, message: wire.ToServer, work: Work, nbytes: int = 0, *, always: bool = False
    ) -> None:
        """Do work for a reader's message in its turn; what cannot be done is answered, and costs it nothing else."""
        try:
            self._turns.start(reader.account, self._guarded(reader, message, work), nbytes, always=always)
        except Refused as error:
            self.refuse(reader, message, error)

    def _guarded(self, reader: Reader, message: wire.ToServer, work: Work) -> Work:
        try:
            reader.rights.check(message)
            yield from work
        except LayerflowError as error:
            self.refuse(reader, message, error)
        except Exception as error:
            if self._log_limit.admit(time.monotonic()) is not None:
                log.exception("peer_message_failed", reader=reader.name, kind=type(message).__name__)
            self.refuse(reader, message, error)

    def refuse(self, reader: Reader, message: wire.ToServer, error: Exception) -> None:
        """Tell a reader that its message cannot be done."""
        why = str(error) if isinstance(error, LayerflowError) else f"{type(error).__name__}: {error}"
        self.tell(reader, wire.Problem(getattr(message, "id", -1), "refused", why))

    def handle(self, reader: Reader, message: wire.ToServer) -> Work:
        """A message of a reader, in slices.

        :raises ProtocolError: it cannot be done; nothing has changed.
        """
        match message:
            case wire.PeerLookup():
                yield from self._look_up(reader, message)
            case wire.PeerRelease():
                lease = reader.leases.get(message.lease)
                if lease is not None:
                    self._end(lease)
            case wire.PeerBeat():
                numbers = dict.fromkeys(message.renew)
                renewed = [lease for number in numbers if (lease := reader.leases.get(number)) is not None]
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
        self._turns.forget(reader.account)
        self._accounts.close(reader.address)
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

    def _look_up(self, reader: Reader, message: wire.PeerLookup) -> Work:
        peers, server = self._settings().peers, self._settings().server
        if message.incarnation != self.incarnation:
            raise ProtocolError("this lookup is for a server that was here before; attach again")
        if not 0 < message.lease_ms <= server.max_deadline_s * 1e3:
            raise ProtocolError(f"lease_ms = {message.lease_ms} should be 1 to server.max_deadline_s")
        if len(reader.leases) >= peers.max_leases:
            raise ProtocolError(f"peers.max_leases = {peers.max_leases} leases are held; release some")
        reader.lookups += 1
        if not message.handoff:
            yield from self._lend(reader, message, None, "")
        elif not 0 < message.wait_ms <= server.max_deadline_s * 1e3:
            raise ProtocolError(f"wait_ms = {message.wait_ms} should be 1 to server.max_deadline_s")
        else:
            until = time.monotonic() + message.wait_ms / 1e3
            yield from self._hand_off(reader, message, until)

    def _hand_off(self, reader: Reader, message: wire.PeerLookup, until: float, told: Handoff | None = None) -> Work:
        """Answer once the hand-off is more than announced.

        :param told: the hand-off that was waited for; None = it is looked for by its name.
        """
        now = time.monotonic()
        # Counted before anything is kept: a name that is announced is.
        charge = reader.account.charge(
            f"a lookup that waits for hand-off {message.handoff!r}",
            len(message.keys) + len(message.handoff),
            always=now >= until,
        )
        handoff = told or self._handoffs.announce(message.handoff, until)
        if handoff.status is HandoffStatus.ANNOUNCED and now < until:

            def go_on(told: Handoff) -> None:
                self.start(reader, message, self._hand_off(reader, message, until, told), always=True)

            self._handoffs.wait(message.handoff, until, go_on, charge)
            return
        charge.release()
        if handoff.status.readable:
            self._handoffs.claim(handoff, now, message.lease_ms / 1e3)
            yield from self._lend(reader, message, handoff.spec, "")
        else:
            yield from self._lend(reader, message, None, handoff.story(), failed=True)

    def _lend(
        self, reader: Reader, message: wire.PeerLookup, storing: ModelSpec | None, reason: str, *, failed: bool = False
    ) -> Work:
        """Lend what is there, and answer.

        :param storing: of the engine whose objects are lent before they are whole, too.
        """
        lease = Lease(next(self._numbers), reader, message.lease_ms / 1e3)
        try:
            yield from self._take(lease, message, storing, reason, failed=failed)
        except BaseException:
            # Whatever went wrong, a reader that was not answered has nothing.
            if lease.number in reader.leases:
                self._end(lease)
            else:
                self._free(lease)
            raise

    def _take(
        self, lease: Lease, message: wire.PeerLookup, storing: ModelSpec | None, reason: str, *, failed: bool
    ) -> Work:
        keys = split_keys(message.keys)
        items = list(map(LentItem, keys, itertools.repeat(wire.MISSING)))
        why = ""
        coming: dict[bytes, int] = {}
        if not self.exporting.address:
            why = "no exporter"
        else:
            wanted: dict[bytes, int] = {}  # a key that is named again is lent once
            for start in range(0, len(keys), KEYS_PER_SLICE):
                part = range(start, min(start + KEYS_PER_SLICE, len(keys)))
                few = {keys[at]: at for at in part if wanted.setdefault(keys[at], at) == at}
                why = self._pin(few, lease, items) or why
                if storing is not None:
                    missing = [key for key, at in few.items() if items[at].state == wire.MISSING]
                    coming |= {key: few[key] for key in missing if self._pool.writer(key) is not None}
                yield
        # From here on in one go: what is told of objects that are being stored has to be so when it is told.
        if storing is not None and coming:
            for key, pending in self._open.lend(lease, coming, storing).items():
                items[coming[key]] = open_item(key, pending)
            stored = {key: at for key, at in coming.items() if items[at].state == wire.MISSING}
            why = self._pin(stored, lease, items) or why
        lent_objects = sum(item.state != wire.MISSING for item in items)
        token = secrets.token_bytes(wire.PEER_TOKEN_BYTES) if lent_objects else b""
        lease_key = secrets.token_bytes(LINK_KEY_BYTES) if lent_objects else b""
        number = lease.number if lent_objects else 0
        told = lent(number, token, lease_key, items)
        answer = found_of(message, number, token, items, reason or why, failed, lease_key)
        if lent_objects:
            lease.reader.leases[lease.number] = lease
            self._set_timer(lease)
            self.lent_objects += lent_objects
            self.exporting.send(told)
        self._send(lease.reader.address, answer)

    def _pin(self, wanted: Mapping[bytes, int], lease: Lease, items: list[LentItem]) -> str:
        """Pin what is whole here, as far as the share allows; why something that is there was left out.

        :param wanted: by key, its position. :param items: of all keys of the lookup; those that are lent are put there.
        """
        room = self._settings().peers.lease_share * self._arena_bytes
        places = self._pool.acquire(list(wanted), lease.asked, math.inf)
        reason, mine = "", []
        for (key, at), place in zip(wanted.items(), places, strict=True):
            if place is None or place.pieces:
                continue  # what lies in pieces of another partition is lent piece by piece, by their own names
            item = whole_item(self._view, key, place)
            if self._lent_bytes + item.nbytes > room:
                reason = "peers.lease_share is lent"
                self.refused_objects += 1
                continue
            mine.append(key)
            items[at] = item
            lease.nbytes += item.nbytes
            self._lent_bytes += item.nbytes
        if mine:
            self._pool.share(lease.asked, mine, lease.owner)
        self._pool.release(lease.asked)
        return reason

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
            self._free(lease)

    def _free(self, lease: Lease) -> None:
        """Give back what a lease keeps here, which nobody reads."""
        self._lent_bytes -= lease.nbytes
        self._open.drop(lease)
        self._pool.release(lease.owner)
        self._pool.release(lease.asked)

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
