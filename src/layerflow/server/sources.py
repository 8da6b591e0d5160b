"""Where objects come from that are not in the arena: the tier behind it, and peers. One for those who look up and load.

An object that the tier and a peer both have is read from the tier. Saves are written to the tier only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from layerflow.config.settings import PoolSettings
from layerflow.flow.events import WriteOpened
from layerflow.pool.base import NewObject
from layerflow.pool.chunk_index import NO_CHUNKS, ChunkIndex
from layerflow.server.account import Charge
from layerflow.server.incoming import IncomingObject, StepKey
from layerflow.server.tier.tier import Tier
from layerflow.server.tier.writes import WriteCommand
from layerflow.wire.host_messages import Cleared

if TYPE_CHECKING:
    from layerflow.server.peers.source import PeerSource


class ObjectSources:
    """What :class:`layerflow.server.tier.tier.Tier` does, over both.

    :param tier: None = nothing lies behind the arena. :param peers: None = this server reads from no other.
    """

    def __init__(self, settings: PoolSettings, tier: Tier | None, peers: PeerSource | None) -> None:
        self.settings = settings
        self.tier, self.peers = tier, peers

    # Lookups -------------------------------------------------------------------------------------

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` they certainly have, without asking."""
        behind = self.tier.holds(keys) if self.tier is not None else [False] * len(keys)
        if self.peers is None:
            return behind
        return [any(pair) for pair in zip(behind, self.peers.holds(keys), strict=True)]

    async def ask(self, keys: bytes, charge: Charge, until: float) -> frozenset[bytes]:
        """Ask the tier, and no peer, which of `keys` can be brought; parameters as of :meth:`.Tier.ask`."""
        return await self.tier.ask(keys, charge, until) if self.tier is not None else frozenset()

    def worth_fetching(self, found: frozenset[bytes], compute_s: float, objects: int) -> frozenset[bytes]:
        """Less what peers have, where reading it would take longer than computing it.

        :param compute_s: what computing the whole prompt takes. :param objects: that are the whole prompt's.
        """
        if self.peers is None:
            return found
        slower_than_compute = self.peers.slower_than_compute(found, compute_s, objects)
        self.peers.decline(list(slower_than_compute))
        return found - slower_than_compute

    def hide(self, keys: Sequence[bytes]) -> int:
        """Reading these has failed: they are not offered for a while. How many there are."""
        return self.tier.hide(keys) if self.tier is not None else 0

    def expire(self, now: float) -> None:
        """Offer again what was hidden for long enough. `now`: monotonic seconds."""
        if self.tier is not None:
            self.tier.expire(now)

    @property
    def chunks(self) -> ChunkIndex:
        """Chunks that the tier has, as far as it is known; of what peers have, nothing is."""
        return self.tier.chunks if self.tier is not None else NO_CHUNKS

    # Loads ---------------------------------------------------------------------------------------

    def bring(self, objects: Sequence[NewObject], layers: Sequence[int], engine: str) -> None:
        """Fetch objects of one group that are not in the arena, as far as that can be; see :meth:`coming`."""
        left = list(objects)
        if self.peers is not None:
            lent = [new for new in left if self.peers.offered(new.key) is not None]
            if self.tier is not None and lent:
                held = self.tier.holds([new.key for new in lent])
                lent = [new for new, there in zip(lent, held, strict=True) if not there]
            if lent:
                self.peers.bring(lent, layers, engine)
                keys = {new.key for new in lent}
                left = [new for new in left if new.key not in keys]
        if left and self.tier is not None:
            self.tier.bring(left, layers, engine)

    def coming(self, key: bytes) -> IncomingObject | None:
        """An object's room in the arena while it is on its way from one of them."""
        behind = self.tier.coming(key) if self.tier is not None else None
        return behind or (self.peers.fetches.coming(key) if self.peers is not None else None)

    # Saves: the tier's ---------------------------------------------------------------------------

    def plan(
        self,
        step: StepKey,
        source: str,
        group: int,
        *,
        layers: int,
        placed: Sequence[tuple[NewObject, int]],
        parts: Sequence[int],
    ) -> list[WriteOpened]:
        """A step is about to save these at these places. What to tell the core then."""
        return (
            self.tier.plan(step, source, group, layers=layers, placed=placed, parts=parts)
            if self.tier is not None
            else []
        )

    def committed(self, step: StepKey, keys: Sequence[bytes]) -> None:
        """Note that these are whole in the arena."""
        if self.tier is not None:
            self.tier.committed(step, keys)

    def revoke_writes(self, reason: str) -> int:
        """What is on its way to the tier is not published there. How many objects."""
        return self.tier.revoke_writes(reason) if self.tier is not None else 0

    def obey(self, command: WriteCommand) -> None:
        """What the core wants done on the way to the tier."""
        assert self.tier is not None
        self.tier.obey(command)

    def withheld(self) -> AbstractContextManager[None]:
        """Meanwhile the tier offers and brings nothing."""
        return self.tier.withheld() if self.tier is not None else nullcontext()

    async def clear(self, keys: Sequence[bytes], timeout_s: float) -> Cleared | None:
        """Remove what the tier holds; None = there is none."""
        return await self.tier.clear(keys, timeout_s) if self.tier is not None else None
