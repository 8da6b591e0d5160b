"""What this server lends of its arena: leases, and the pins that these are.

A lease is a pin from the moment it is answered. It ends when its reader gives it back or falls silent, or its time is
over; its pins go once the exporter has said that nothing of it is read any more, or is dead.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import structlog

from layerflow._version import __version__
from layerflow.config.fields import is_loopback
from layerflow.config.settings import Settings
from layerflow.errors import LayerflowError, ProtocolError
from layerflow.expiring import ExpiryHeap
from layerflow.keys import DIGEST_BYTES, KEY_BYTES, covered_by
from layerflow.links import links
from layerflow.lives import Life
from layerflow.objects import HEADER_BYTES, object_bytes, payload_bytes
from layerflow.observe.logs import LogRateLimiter
from layerflow.pool.base import Located, Owner, Pool
from layerflow.server.account import Charge, Refused
from layerflow.server.clients import Address, Reader, Sessions, first_to_go, principal_of
from layerflow.server.handoffs.handoff import HandoffRecord, HandoffStatus, model_mismatch
from layerflow.server.handoffs.registry import Handoffs
from layerflow.server.incoming import IncomingSaves
from layerflow.server.mailboxes import Answer, Mailboxes, Work, at_once, next_turn
from layerflow.server.share import LeaseShare
from layerflow.server.tier.host import HostProcess
from layerflow.spec import GroupSpec, ModelSpec, Shard
from layerflow.system.numbers import ascending
from layerflow.wire import messages as wire
from layerflow.wire.host_messages import Extend, Lend, ToServer, Up, Withdraw, Withdrawn, split_keys
from layerflow.wire.messages import INCARNATION_BYTES, Message, PeerEndpoint
from layerflow.wire.packing import pack_u32, pack_u64
from layerflow.wire.peer_link import LINK_KEY_BYTES, reader_key_of
from layerflow.wire.rights import Rights


class PeerLeaseState(enum.Enum):
    """Where a lease is; :data:`PEER_LEASE_LIFE` says what each means."""

    ASKED = "asked"
    LENT = "lent"
    WITHDRAWN = "withdrawn"
    OVER = "over"


PEER_LEASE_LIFE = Life(
    "a lease of a peer",
    {
        PeerLeaseState.ASKED: (
            "its objects are being pinned; neither the reader nor the exporter has been told of it",
            (PeerLeaseState.LENT, PeerLeaseState.OVER),
        ),
        PeerLeaseState.LENT: ("its reader may begin to read", (PeerLeaseState.WITHDRAWN,)),
        PeerLeaseState.WITHDRAWN: (
            "given back, expired, or its reader is gone: no read of it begins, those under way may not have ended",
            (PeerLeaseState.OVER,),
        ),
        PeerLeaseState.OVER: ("it pins nothing", ()),
    },
)


@dataclass(slots=True, eq=False)
class PeerLease:
    """What a reader was lent with one answer.

    :param lease_s: it ends so long after it was lent or last renewed.
    :param nbytes: that it pins.
    :param charge: to its reader's account, until nothing of it is kept; None = nothing is lent yet.
    """

    number: int
    reader: Reader
    lease_s: float
    nbytes: int = 0
    charge: Charge | None = None
    state: PeerLeaseState = PeerLeaseState.ASKED

    @property
    def owner(self) -> tuple[str, int]:
        """The owner of the lease's pins."""
        return ("peer", self.number)

    @property
    def asked(self) -> tuple[str, int]:
        """The owner of the pins of what was asked for, until it is known which of it is lent."""
        return ("peer_asked", self.number)

    def enter(self, state: PeerLeaseState) -> None:
        """:raises InvalidTransition: where its life does not allow it."""
        PEER_LEASE_LIFE.check(self.state, state, f"{self.number} of {self.reader.name!r}")
        self.state = state


# What is lent while it is being stored: readers are told of each layer, and of objects that will not be whole.
#
# The core follows the save for them (:class:`layerflow.server.incoming.IncomingSaves`), and keeps the room of what is
# given up until the exporter has said that it reads nothing of the lease any more.


@dataclass(frozen=True, slots=True)
class OpenObject:
    """One object that is lent while it is being stored.

    :param nbytes: of the whole object. :param layers: so many leading ones are stored.
    :param save: those of one number are stored together; it means nothing outside its lease.
    """

    offset: int
    blocks: int
    nbytes: int
    layers: int
    save: int
    group: GroupSpec

    def bytes_of(self, layers: int) -> int:
        """Leading bytes that hold so many layers; the header is not among what is read."""
        return HEADER_BYTES + layers * ((self.nbytes - HEADER_BYTES) // len(self.group.layers))


class OpenObjects:
    """All of them.

    :param models: the specs that workers here are attached with.
    :param extend: to the exporter. :param tell: to a lease's reader. :param end: ends a lease.
    """

    def __init__(
        self,
        follows: IncomingSaves,
        models: Callable[[], Sequence[ModelSpec]],
        *,
        extend: Callable[[Extend], object],
        tell: Callable[[PeerLease, Message], object],
        end: Callable[[PeerLease], None],
    ) -> None:
        self._follows, self._models = follows, models
        self._extend, self._tell, self._end = extend, tell, end
        # By the owner of a lease: what it is lent, and where in the lease.
        self._lent: dict[Owner, tuple[PeerLease, dict[bytes, tuple[int, OpenObject]]]] = {}
        follows.listener = self

    def lend(self, lease: PeerLease, wanted: dict[bytes, int], spec: ModelSpec) -> dict[bytes, OpenObject]:
        """Lend what is being stored, or has room to be, of these keys.

        :param wanted: by key, its position in the lease.
        :param spec: of the engine that stores them.
        """
        ends = {covered_by(number, one.shard): (number, one.groups[number]) for one in self._models()
                if one.fingerprint == spec.fingerprint for number in range(len(one.groups))}  # fmt: skip
        by_end: dict[bytes, list[bytes]] = {}
        for key in wanted:
            if key[DIGEST_BYTES:] in ends:
                by_end.setdefault(key[DIGEST_BYTES:], []).append(key)
        mine: dict[bytes, tuple[int, OpenObject]] = {}
        saves: dict[object, int] = {}
        for end, keys in by_end.items():
            number, group = ends[end]
            lent = self._follows.lend(keys, number, group.layers, lease.owner)
            for key, followed in zip(keys, lent, strict=True):
                if followed is None:
                    continue
                coming, job = followed
                # What no step saves yet is stored by whichever steps come: each object on its own.
                save = saves.setdefault(key if job.unclaimed else job, len(saves))
                nbytes = object_bytes(group, coming.blocks)
                found = OpenObject(coming.offset, coming.blocks, nbytes, job.stored, save, group)
                mine[key] = wanted[key], found
        if mine:
            self._lent[lease.owner] = lease, mine
        return {key: found for key, (_, found) in mine.items()}

    def drop(self, lease: PeerLease) -> None:
        """Nothing of the lease is read any more."""
        if self._lent.pop(lease.owner, None) is not None:
            self._follows.stop_lending(lease.owner)

    def lent_stored(self, owner: Owner, keys: Sequence[bytes], layers: int) -> None:
        """Let so many leading layers of these be read."""
        if owner in self._lent:  # else it is about to be lent, and the answer tells what is stored
            lease, positions = self._extended(owner, keys, layers)
            self._tell(lease, wire.PeerProgress(lease.number, positions, layers))

    def lent_whole(self, owner: Owner, keys: Sequence[bytes]) -> None:
        """Let all of these be read."""
        layers = len(self._lent[owner][1][keys[0]][1].group.layers)
        lease, positions = self._extended(owner, keys, layers)
        self._tell(lease, wire.PeerProgress(lease.number, positions, layers, committed=True))

    def lent_lost(self, owner: Owner, keys: Sequence[bytes], reason: str) -> None:
        """End the lease, so that the room of these is free once nothing of it is read."""
        lease, mine = self._lent[owner]
        positions = pack_u32([mine[key][0] for key in keys])
        self._tell(lease, wire.PeerProgress(lease.number, positions, 0, reason=reason or "its save was given up"))
        self._end(lease)

    def _extended(self, owner: Owner, keys: Sequence[bytes], layers: int) -> tuple[PeerLease, bytes]:
        """Tell the exporter how much of these may be read; their lease, and their positions in it."""
        lease, mine = self._lent[owner]
        positions = pack_u32([mine[key][0] for key in keys])
        self._extend(Extend(lease.number, positions, pack_u64([mine[key][1].bytes_of(layers) for key in keys])))
        return lease, positions


# The objects of one lease, as the exporter and the reader are told of them.


class LentItem(NamedTuple):
    """One key of a lookup, as it is lent; sizes in bytes. :param stored: of these so many may be read."""

    state: int
    offset: int
    nbytes: int
    blocks: int
    tokens: int
    layers: int
    save: int
    stored: int


_ITEM = np.dtype(list(zip(LentItem._fields, ("u1", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4", "<u8"), strict=True)))
LENT_BYTES = 384
"""What the lease of one object takes here and in the exporter, in bytes; tracemalloc has 37 and 302."""


def no_items(count: int) -> np.ndarray:
    """A row for each key of a lookup, by the fields of :class:`LentItem`: none of them is lent."""
    return np.zeros(count, _ITEM)


def whole_item(view: memoryview, place: Located) -> LentItem:
    """An object that is whole."""
    nbytes = HEADER_BYTES + payload_bytes(view, place.offset)
    return LentItem(wire.STORED, place.offset, nbytes, place.blocks, place.tokens, 0, 0, nbytes)


def open_item(pending: OpenObject) -> LentItem:
    """An object that is being stored."""
    stored = pending.bytes_of(pending.layers)
    return LentItem(wire.OPEN, pending.offset, pending.nbytes, pending.blocks, 0, pending.layers, pending.save, stored)


def lent(lease: int, token: bytes, lease_key: bytes, keys: bytes, items: np.ndarray) -> Lend:
    """What the exporter is told: of what is lent alone, with its positions among all keys."""
    positions = np.flatnonzero(items["state"])
    mine = items[positions]
    return Lend(
        lease,
        token,
        pack_u32(positions),
        np.frombuffer(keys, f"V{KEY_BYTES}")[positions].tobytes(),
        mine["offset"].tobytes(),
        mine["nbytes"].tobytes(),
        pack_u32(np.where(mine["state"] == wire.STORED, mine["blocks"], 0)),
        mine["stored"].tobytes(),
        lease_key,
    )


def found_of(
    message: wire.PeerLookup,
    lease: int,
    token: bytes,
    *,
    lease_s: float,
    items: np.ndarray,
    reason: str,
    failed: bool,
    lease_key: bytes,
) -> wire.PeerFound:
    return wire.PeerFound(
        message.id,
        lease,
        token,
        round(lease_s * 1e3) if lease else 0,
        items["state"].tobytes(),
        items["nbytes"].tobytes(),
        items["blocks"].tobytes(),
        items["tokens"].tobytes(),
        items["layers"].tobytes(),
        items["save"].tobytes(),
        reason,
        failed,
        lease_key,
    )


# The exporter of a server: its process, and the leases that it was told of.


EXPORTER = "layerflow.hosts.peer.exporter"
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - recognised, not listened on

log = structlog.get_logger("layerflow.server.peers")


def listen_address(settings: Settings) -> tuple[str, int]:
    """Where the exporter listens: host and port, 0 = any."""
    given = settings.peers.link_address
    if not given:
        host = settings.server.tcp_endpoint.removeprefix("tcp://").rpartition(":")[0]
        return {"*": "0.0.0.0", "": "127.0.0.1"}.get(host, host.strip("[]")), 0  # noqa: S104 - where control listens
    host, _, port = given.rpartition(":")
    return host.strip("[]"), int(port)


class Exporting:
    """Keeps an exporter running.

    :param arena: descriptor and size.
    :param changed: told that its endpoints have changed.
    :param withdrawn: told of each lease that was withdrawn, once nothing of it is read any more.
    :param lost: told that the process is dead: nothing of any lease is read any more, and all of them are over.
    """

    def __init__(
        self,
        settings: Settings,
        arena: tuple[int, int],
        *,
        changed: Callable[[], None],
        withdrawn: Callable[[int], None],
        lost: Callable[[], None],
    ) -> None:
        self._changed, self._withdrawn, self._lost = changed, withdrawn, lost
        host, port = listen_address(settings)
        self._link, self._advertise = settings.peers.link, settings.peers.link_advertise
        shown = self._advertise.rpartition(":")[0].strip("[]") or ("" if host in WILDCARDS else host)
        self._options: dict[str, Any] = {"host": host, "port": port, "link": self._link, "shown": shown}
        self._renew()
        mapped = links()[self._link].maps_arena
        self.host = HostProcess("exporter", self._options, *arena, self, module=EXPORTER, mapped=mapped)
        self.address = ""  #: where it is reached; "" = there is none

    def start(self) -> None:
        """Start the process, on the running loop."""
        self.host.start()

    async def close(self) -> bool:
        """Whether it is dead."""
        return await self.host.close()

    def send(self, message: Lend | Extend | Withdraw) -> bool:
        """False: there is no process, and so nobody who reads."""
        return self.host.send(message)

    def endpoints(self, reader: bytes) -> list[PeerEndpoint]:
        """Where a reader of this name on the link reads; none while there is no exporter."""
        if not self.address:
            return []
        incarnation, key = (bytes.fromhex(self._options[name]) for name in ("incarnation", "key"))
        return [PeerEndpoint(self._link, self.address, incarnation, reader, reader_key_of(key, reader))]

    @property
    def shown(self) -> list[str]:
        """For people: ``link://host:port``."""
        return [f"{self._link}://{self.address}"] if self.address else []

    @property
    def alive(self) -> bool:
        """There is a process, which may be reading."""
        return self.host.state.pid != 0

    def _renew(self) -> None:
        """The next process is another exporter: who looks for the one before must not read from it."""
        self._options["incarnation"] = secrets.token_hex(INCARNATION_BYTES)
        self._options["key"] = secrets.token_hex(LINK_KEY_BYTES)

    def host_said(self, message: ToServer) -> None:
        """News from the process."""
        match message:
            case Up():
                host = str(self._options["host"])
                shown = "" if host in WILDCARDS else host
                where = f"[{shown}]:{message.details['port']}" if ":" in shown else f"{shown}:{message.details['port']}"
                where = self._advertise or where
                self.address = where
                log.info("exporter_up", link=self._link, address=where, loopback=is_loopback(where))
                self._changed()
            case Withdrawn():
                self._withdrawn(message.lease)
            case _:
                pass

    def host_stuck(self, why: str) -> None:
        """The exporter was killed and does not die; what it may read stays as it is until it does."""
        self.address = ""
        self._changed()

    def host_lost(self, why: str) -> None:
        """The exporter is dead."""
        self.address = ""
        self._renew()
        self._lost()
        self._changed()


class LocalPartitions:
    """In which partitions workers store here: told to readers.

    :param tell: every reader that is here.
    """

    def __init__(self, tell: Callable[[wire.PeerPartitions], None]) -> None:
        self._tell = tell
        self._models: dict[bytes, list[Shard]] = {}

    def add_partition(self, spec: ModelSpec) -> None:
        """A worker of this model has attached."""
        first, known = spec.shard.peers()[0], self._models.get(spec.fingerprint, [])
        if not spec.shard.shareable or (known and known[-1] == first):
            return
        known = [*(shard for shard in known if shard != first), first][-wire.MAX_PEER_PARTITIONS :]
        self._models[spec.fingerprint] = known
        self._tell(wire.PeerPartitions(spec.fingerprint, known))

    def all(self) -> list[wire.PeerPartitions]:
        """The partitions of every model."""
        return [wire.PeerPartitions(model, shards) for model, shards in self._models.items()]


KEYS_PER_SLICE = 256
"""Keys of a lookup that are pinned before another client may get its turn."""

ROOM_S = 0.025
"""How long a lookup waits for leases that end to make room for it: half of what readers wait for its answer."""

ALL_LENT, PART_LENT = "peers.lease_share is lent", "an equal part of peers.lease_share is lent, and others want some"
MAKES_ROOM = "it ended early: its readers lease more than an equal part of peers.lease_share, and others want some"

Handle = Callable[[Reader, wire.ToServer], Work]
ENDING = (wire.PeerRelease, wire.PeerEndHandoff, wire.PeerReleaseHandoff, wire.Bye)
"""Small messages that end something: they are taken however much a reader keeps."""


class Lending:
    """All leases.

    :param arena: descriptor and size. :param view: its bytes.
    :param models: the specs that workers here are attached with.
    :param send: to whoever is at an address of the control sockets. :param give_up: ends a reader's session.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        pool: Pool,
        arena: tuple[int, int],
        *,
        view: memoryview,
        models: Callable[[], Sequence[ModelSpec]],
        send: Callable[[Address, Message], object],
        give_up: Callable[[Reader, str], None],
        handoffs: Handoffs,
        follows: IncomingSaves,
        sessions: Sessions,
        mailboxes: Mailboxes,
    ) -> None:
        self._settings, self._pool, self._view, self._send, self._models = settings, pool, view, send, models
        self._mailboxes, self._give_up = mailboxes, give_up
        self._arena_bytes = arena[1]
        self.incarnation = secrets.token_bytes(wire.INCARNATION_BYTES)
        self._handoffs, self._sessions = handoffs, sessions
        self._partitions = LocalPartitions(self._tell_all)
        self._open = OpenObjects(
            follows,
            models,
            extend=self._extend,
            tell=lambda lease, message: self._send(lease.reader.address, message),
            end=self._end,
        )
        self._leases: dict[int, PeerLease] = {}  #: those that are lent, and those withdrawn
        self._ends: ExpiryHeap[PeerLease] = ExpiryHeap()  #: of those that are lent
        self._log_limit = LogRateLimiter()
        self._numbers = ascending()
        self._share = LeaseShare(lambda: self._settings().peers.lease_share * self._arena_bytes)
        self._room_waited_for: dict[Callable[[None], None], None] = {}  # who waits for leases that end, in order
        self.lent_objects = self.refused_objects = self.expired_leases = 0
        self.exporting = Exporting(
            settings(), arena, changed=self._welcome_all, withdrawn=self._withdrawn, lost=self.exporter_dead
        )

    @property
    def leases(self) -> int:
        """How many leases pin something, those included that are withdrawn."""
        return len(self._leases)

    def hello(self, address: Address, message: wire.PeerHello, rights: Rights) -> None:
        """A server introduces itself.

        :raises ProtocolError: there is no room for more.
        """
        self._make_room_for_reader(principal_of(rights, message.pid))
        now = time.monotonic()
        reader = self._sessions.open_reader(address, message.name, message.pid, now, rights, message.version)
        log.info("peer_reader", reader=reader.name, pid=reader.pid, version=reader.version, door=address[0])
        self._welcome(reader)
        for told in self._partitions.all():
            self._send(address, told)

    def _make_room_for_reader(self, comer: str) -> None:
        """Past ``peers.max_readers`` one of whoever has most makes room, and is told so, for one who has fewer.

        :param comer: the principal of the new one.
        :raises ProtocolError: nobody has more than it would have then: readers that are at work do not take turns.
        """
        most, readers = self._settings().peers.max_readers, self._sessions.readers()
        if len(readers) < most:
            return
        counts = Counter(reader.principal for reader in readers)
        gone = first_to_go(readers, comer)
        if gone is None or counts[gone.principal] <= counts[comer] + 1:
            raise ProtocolError(f"peers.max_readers = {most} servers read here already")
        why = f"peers.max_readers = {most} servers read here, most of them of one key: this one makes room for another"
        self.tell(gone, wire.Problem(-1, "too_many", why))
        self._give_up(gone, "too_many")

    def add_partition(self, spec: ModelSpec) -> None:
        """A worker of this model has attached: readers of other sizes can use what it stores."""
        self._partitions.add_partition(spec)

    def receive(self, reader: Reader, message: wire.ToServer, handle: Handle, nbytes: int) -> None:
        """Let `handle` do what a reader's message asks, behind what it has asked before.

        What cannot be done is answered, and costs it nothing else.

        :param nbytes: of the message.
        """
        guarded = self._guarded(reader, message, handle)
        if isinstance(message, wire.PeerBeat):  # it waits for nothing: silence is what it is to tell from
            at_once(guarded)
            return
        try:
            self._mailboxes.start(reader.account, guarded, nbytes, always=isinstance(message, ENDING))
        except Refused as error:
            self.refuse(reader, message, error)

    async def _guarded(self, reader: Reader, message: wire.ToServer, handle: Handle) -> None:
        try:
            reader.rights.check(message)
            await handle(reader, message)
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

    async def handle(self, reader: Reader, message: wire.ToServer) -> None:
        """Do what a reader asks for.

        :raises ProtocolError: it cannot be done; nothing has changed.
        """
        match message:
            case wire.PeerLookup():
                await self._look_up(reader, message)
            case wire.PeerRelease():
                if message.lease in reader.leases:
                    self._end(self._leases[message.lease])
            case wire.PeerBeat():
                most = max(self._settings().peers.max_leases, len(reader.leases))  # more it cannot mean
                renewed = [number for number in dict.fromkeys(message.renew[:most]) if number in reader.leases]
                for number in renewed:
                    self._renew(self._leases[number])
                    self._share.renew(reader.principal, number)
                self._send(reader.address, wire.PeerBeat(message.sent, renewed))
            case wire.PeerCompare():
                known = [spec for spec in self._models() if spec.name == message.spec.name]
                found = [model_mismatch(message.spec, spec) for spec in known]
                why = found[0] if found and all(found) else ""
                self._send(reader.address, wire.PeerCompared(message.id, why))
            case _:
                raise ProtocolError(f"{type(message).__name__} from a server that reads; it may look up and release")

    def tell(self, reader: Reader, message: Message) -> None:
        """Say something to a reader, if it is still there."""
        if self._sessions.at(reader.address) is reader:
            self._send(reader.address, message)

    def lose(self, reader: Reader, why: str) -> None:
        """End the leases of a reader that is gone."""
        log.info("peer_reader_lost", reader=reader.name, pid=reader.pid, why=why, leases=len(reader.leases))
        for number in list(reader.leases):
            self._end(self._leases[number])

    def expire(self, now: float) -> None:
        """End the leases that were not renewed in time."""
        for lease in self._ends.expire(now):
            self.expired_leases += 1
            self._end(lease)

    def exporter_dead(self) -> None:
        """End every lease at once: nothing of them is read any more."""
        for lease in list(self._leases.values()):
            self._end(lease)
            self._withdrawn(lease.number)

    def counts(self) -> dict[str, int]:
        """By the names of :class:`layerflow.observe.collectors.PeerStatistics`."""
        return {
            "readers": len(self._sessions.readers()),
            "lent_leases": self.leases,
            "lent_bytes": self._share.nbytes,
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
                    "version": reader.version,
                    "door": reader.address[0],
                    "leases": len(reader.leases),
                    "lookups": reader.lookups,
                    "heard_s_ago": round(now - reader.heard_at, 3),
                }
                for reader in self._sessions.readers()
            ],
        }

    # Leases --------------------------------------------------------------------------------------

    async def _look_up(self, reader: Reader, message: wire.PeerLookup) -> None:
        server = self._settings().server
        if message.incarnation != self.incarnation:
            raise ProtocolError("this lookup is for a server that was here before; attach again")
        if not 0 < message.lease_ms <= server.max_deadline_s * 1e3:
            raise ProtocolError(f"lease_ms = {message.lease_ms} should be 1 to server.max_deadline_s")
        self._check_leases(reader)
        reader.lookups += 1
        if not message.handoff:
            await self._lend(reader, message, None, "")
        elif not 0 < message.wait_ms <= server.max_deadline_s * 1e3:
            raise ProtocolError(f"wait_ms = {message.wait_ms} should be 1 to server.max_deadline_s")
        else:
            until = time.monotonic() + message.wait_ms / 1e3
            await self._hand_off(reader, message, until)

    def _lease_s(self, message: wire.PeerLookup) -> float:
        """How long what is found is leased: as asked for, and no longer than what nobody reads is kept."""
        return min(message.lease_ms, self._settings().peers.lease_ms) / 1e3

    def _check_leases(self, reader: Reader) -> None:
        """:raises ProtocolError: the reader holds so many leases already."""
        most = self._settings().peers.max_leases
        if len(reader.leases) >= most:
            raise ProtocolError(f"peers.max_leases = {most} leases are held; release some")

    async def _hand_off(self, reader: Reader, message: wire.PeerLookup, until: float) -> None:
        """Answer once the hand-off is more than announced."""
        what = f"a lookup that waits for hand-off {message.handoff!r}"
        charge = functools.partial(reader.account.charge, what, len(message.keys) + len(message.handoff))
        handoff = await self._handoffs.outlast(message.handoff, _is_announced, until, charge)
        if handoff.status.readable:
            self._handoffs.claim(handoff, time.monotonic(), self._lease_s(message))
            await self._lend(reader, message, handoff.spec, "")
        else:
            await self._lend(reader, message, None, handoff.story(), failed=True)

    async def _lend(
        self, reader: Reader, message: wire.PeerLookup, storing: ModelSpec | None, reason: str, *, failed: bool = False
    ) -> None:
        """Lend what is there, and answer.

        :param storing: of the engine whose objects are lent before they are whole, too.
        """
        lease = PeerLease(next(self._numbers), reader, self._lease_s(message))
        try:
            await self._take(lease, message, storing, reason, failed=failed)
        except BaseException:
            # Whatever went wrong, a reader that was not answered has nothing.
            if lease.state is PeerLeaseState.LENT:
                self._end(lease)
            elif lease.state is PeerLeaseState.ASKED:
                self._free(lease)
            raise

    async def _take(
        self, lease: PeerLease, message: wire.PeerLookup, storing: ModelSpec | None, reason: str, *, failed: bool
    ) -> None:
        count, rest = divmod(len(message.keys), KEY_BYTES)
        if rest:
            raise ProtocolError(f"{len(message.keys)} bytes are no whole number of {KEY_BYTES}-byte keys")
        items = no_items(count)
        states, why = items["state"], ""
        room_until = time.monotonic() + ROOM_S
        coming: dict[bytes, int] = {}
        if not self.exporting.address:
            why = "no exporter"
        else:
            wanted: dict[bytes, int] = {}  # a key that is named again is lent once
            for start in range(0, count, KEYS_PER_SLICE):
                keys = split_keys(message.keys[start * KEY_BYTES : (start + KEYS_PER_SLICE) * KEY_BYTES])
                few = {key: at for at, key in enumerate(keys, start) if wanted.setdefault(key, at) == at}
                left_out = self._pin(few, lease, items)
                if left_out and await self._make_room(lease, left_out, room_until):
                    left_out = self._pin({key: few[key] for key in left_out}, lease, items)
                    self._room_is_free()  # what others wait for may be left
                why = self._refuse_objects(lease, left_out) or why
                if storing is not None:
                    missing = [key for key, at in few.items() if states[at] == wire.MISSING]
                    coming |= {key: few[key] for key in missing if self._pool.writer(key) is not None}
                await next_turn()
        # From here on in one go: what is told of objects that are being stored has to be so when it is told.
        if storing is not None and coming:
            for key, pending in self._open.lend(lease, coming, storing).items():
                items[coming[key]] = open_item(pending)
            stored = {key: at for key, at in coming.items() if states[at] == wire.MISSING}
            why = self._refuse_objects(lease, self._pin(stored, lease, items)) or why
        lent_objects = int(np.count_nonzero(states))
        token = secrets.token_bytes(wire.PEER_TOKEN_BYTES) if lent_objects else b""
        lease_key = secrets.token_bytes(LINK_KEY_BYTES) if lent_objects else b""
        number = lease.number if lent_objects else 0
        answer = found_of(
            message, number, token, lease_s=lease.lease_s, items=items, reason=reason or why, failed=failed,
            lease_key=lease_key,
        )  # fmt: skip
        if lent_objects:
            # Many lookups may have waited for one hand-off: each lease is counted where it is made.
            self._check_leases(lease.reader)
            lease.charge = lease.reader.account.charge(f"lease {number}", lent_objects * LENT_BYTES)
            told = lent(number, token, lease_key, message.keys, items)
            lease.enter(PeerLeaseState.LENT)
            self._leases[lease.number] = lease
            lease.reader.leases.add(lease.number)
            self._share.lend(lease.reader.principal, lease.number, lease.nbytes)
            self._renew(lease)
            self.lent_objects += lent_objects
            self.exporting.send(told)
        self._send(lease.reader.address, answer)

    def _pin(self, wanted: Mapping[bytes, int], lease: PeerLease, items: np.ndarray) -> dict[bytes, int]:
        """Pin what is whole here, as far as the share allows; the sizes of what is there and was left out.

        :param wanted: by key, its position. :param items: of all keys of the lookup; those that are lent are put there.
        """
        left = self._share.left(lease.reader.principal, time.monotonic())
        places = self._pool.acquire(list(wanted), lease.asked, math.inf)
        left_out: dict[bytes, int] = {}
        mine, nbytes = [], 0
        for (key, at), place in zip(wanted.items(), places, strict=True):
            if place is None or place.pieces:
                continue  # what lies in pieces of another partition is lent piece by piece, by their own names
            item = whole_item(self._view, place)
            if nbytes + item.nbytes > left:
                left_out[key] = item.nbytes
                continue
            mine.append(key)
            items[at] = item
            nbytes += item.nbytes
        if mine:
            lease.nbytes += nbytes
            self._share.pin(lease.reader.principal, nbytes)
            self._pool.copy_pins(lease.asked, mine, lease.owner)
            if not left_out:
                self._share.content(lease.reader.principal)
        self._pool.release(lease.asked)
        return left_out

    def _refuse_objects(self, lease: PeerLease, left_out: Mapping[bytes, int]) -> str:
        """Count objects that are there and not lent; why, else empty."""
        self.refused_objects += len(left_out)
        if not left_out:
            return ""
        room = self._share.room_left >= min(left_out.values())
        return PART_LENT if room else ALL_LENT

    async def _make_room(self, lease: PeerLease, left_out: Mapping[bytes, int], until: float) -> bool:
        """End leases of whoever has more than an equal part of the share, and wait for their room, at most until then.

        :param left_out: the sizes of what is to be lent. False = the reader's part has no room for any of it.
        """
        reader, share = lease.reader, self._share
        kept_until = time.monotonic() + self._settings().peers.lease_ms / 1e3
        wanted = share.want(reader.principal, left_out.values(), kept_until)
        if not wanted:
            return False
        with reader.account.charge("a lookup that waits for room", len(left_out) * KEY_BYTES) as charge:
            while (number := share.next_to_end(reader.principal, wanted)) is not None:
                self._end_early(self._leases[number])
                await next_turn()
            while share.room_left < wanted and share.leaving and time.monotonic() < until:
                answer = Answer[None](charge)
                self._room_waited_for[answer.tell] = None
                try:
                    await answer.by(until, None)
                finally:
                    self._room_waited_for.pop(answer.tell, None)
        if share.room_left >= wanted:
            share.content(reader.principal)
        return True

    def _room_is_free(self) -> None:
        """Let the first lookup that waits for room look again."""
        told = next(iter(self._room_waited_for), None)
        if told is not None:
            del self._room_waited_for[told]
            told(None)

    def _end_early(self, lease: PeerLease) -> None:
        """End a lease whose room others want, and tell its reader, which brings nothing of it any more."""
        self.tell(lease.reader, wire.PeerProgress(lease.number, b"", 0, reason=MAKES_ROOM))
        self._end(lease)

    def _renew(self, lease: PeerLease) -> None:
        self._ends.set(lease, time.monotonic() + lease.lease_s)

    def _end(self, lease: PeerLease) -> None:
        """No read of it may begin any more; its pins go when none is under way."""
        if lease.state is not PeerLeaseState.LENT:
            return
        lease.enter(PeerLeaseState.WITHDRAWN)
        self._ends.discard(lease)
        lease.reader.leases.discard(lease.number)
        self._share.withdraw(lease.reader.principal, lease.number)
        if not self.exporting.send(Withdraw(lease.number)) and not self.exporting.alive:
            self._withdrawn(lease.number)

    def _withdrawn(self, number: int) -> None:
        """Nothing of it is read any more."""
        lease = self._leases.get(number)
        if lease is not None and lease.state is PeerLeaseState.WITHDRAWN:
            del self._leases[number]
            self._free(lease)

    def _free(self, lease: PeerLease) -> None:
        """Give back what a lease keeps here, which nobody reads."""
        withdrawn = lease.state is PeerLeaseState.WITHDRAWN
        lease.enter(PeerLeaseState.OVER)
        self._share.free(lease.reader.principal, lease.nbytes, withdrawn=withdrawn)
        self._open.drop(lease)
        self._pool.release(lease.owner)
        self._pool.release(lease.asked)
        if lease.charge is not None:
            lease.charge.release()
        self._room_is_free()

    def _extend(self, message: Extend) -> None:
        self.exporting.send(message)

    # Welcome -------------------------------------------------------------------------------------

    def _tell_all(self, message: wire.PeerPartitions) -> None:
        for reader in self._sessions.readers():
            self._send(reader.address, message)

    def _welcome_all(self) -> None:
        for reader in self._sessions.readers():
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


def _is_announced(handoff: HandoffRecord) -> bool:
    return handoff.status is HandoffStatus.ANNOUNCED
