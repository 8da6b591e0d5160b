"""What is lent while it is being stored: readers are told of each layer, and of objects that will not be whole.

The core follows the save for them (:class:`layerflow.server.handoffs.follows.Follows`), and keeps the room of what is
given up until the exporter has said that it reads nothing of the lease any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerflow.keys import DIGEST_BYTES, covered_by
from layerflow.objects import HEADER_BYTES, object_bytes
from layerflow.pool.base import Pool
from layerflow.server.handoffs.follows import Follows
from layerflow.spec import GroupSpec, ModelSpec
from layerflow.wire import messages as wire
from layerflow.wire.host_messages import Extend
from layerflow.wire.messages import Message
from layerflow.wire.packing import pack_u32, pack_u64

if TYPE_CHECKING:
    from layerflow.server.peers.lending.readers import Lease


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
        pool: Pool,
        follows: Follows,
        models: Callable[[], Sequence[ModelSpec]],
        *,
        extend: Callable[[Extend], object],
        tell: Callable[[Lease, Message], object],
        end: Callable[[Lease], None],
    ) -> None:
        self._pool, self._follows, self._models = pool, follows, models
        self._extend, self._tell, self._end = extend, tell, end
        self._lent: dict[bytes, dict[Lease, tuple[int, OpenObject]]] = {}
        follows.listener = self

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, lease: Lease, wanted: dict[bytes, int], spec: ModelSpec) -> dict[bytes, OpenObject]:
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
        found: dict[bytes, OpenObject] = {}
        saves: dict[object, int] = {}
        for end, keys in by_end.items():
            number, group = ends[end]
            for key, pending in zip(keys, self._follows.lend(keys, number, group.layers), strict=True):
                if pending is None:
                    continue
                # What no step saves yet is stored by whichever steps come: each object on its own.
                save = saves.setdefault(key if pending.job.promised else pending.job, len(saves))
                nbytes = object_bytes(group, pending.blocks)
                found[key] = OpenObject(pending.offset, pending.blocks, nbytes, pending.job.stored, save, group)
                self._lent.setdefault(key, {})[lease] = wanted[key], found[key]
        return found

    def drop(self, lease: Lease) -> None:
        """Nothing of the lease is read any more."""
        gone = [key for key, leases in self._lent.items() if leases.pop(lease, None) is not None and not leases]
        for key in gone:
            del self._lent[key]
        self._follows.give_back(gone)

    def lent_stored(self, keys: Sequence[bytes], layers: int) -> None:
        """So many leading layers of these are stored."""
        for lease, mine in self._by_lease(keys).items():
            self._more(lease, mine, layers)
            self._tell(lease, wire.PeerProgress(lease.number, pack_u32([position for position, _ in mine]), layers))

    def lent_whole(self, keys: Sequence[bytes]) -> None:
        """These are complete: pinned for the lease."""
        for lease, mine in self._by_lease(keys).items():
            whole = [key for key in keys if lease in self._lent.get(key, ())]
            self._pool.hold(whole, lease.owner, math.inf)
            layers = len(mine[0][1].group.layers)
            self._more(lease, mine, layers)
            positions = pack_u32([position for position, _ in mine])
            self._tell(lease, wire.PeerProgress(lease.number, positions, layers, committed=True))

    def lent_lost(self, keys: Sequence[bytes], reason: str) -> None:
        """These will not be whole: the lease ends, so that their room is free once nothing of it is read."""
        for lease, mine in self._by_lease(keys).items():
            positions = pack_u32([position for position, _ in mine])
            self._tell(lease, wire.PeerProgress(lease.number, positions, 0, reason=reason or "its save was given up"))
            self._end(lease)

    def _more(self, lease: Lease, mine: Sequence[tuple[int, OpenObject]], layers: int) -> None:
        positions = pack_u32([position for position, _ in mine])
        self._extend(Extend(lease.number, positions, pack_u64([one.bytes_of(layers) for _, one in mine])))

    def _by_lease(self, keys: Sequence[bytes]) -> dict[Lease, list[tuple[int, OpenObject]]]:
        found: dict[Lease, list[tuple[int, OpenObject]]] = {}
        for key in keys:
            for lease, lent in self._lent.get(key, {}).items():
                found.setdefault(lease, []).append(lent)
        return found
