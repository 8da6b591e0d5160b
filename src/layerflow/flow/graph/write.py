"""A transfer from the arena to the backend: what one step saves of one group, behind the saves themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerflow.flow.graph.host_transfer import CallExtent, HostTransfer
from layerflow.flow.host_events import Hop

if TYPE_CHECKING:
    from layerflow.flow.graph.step import Transfer


@dataclass(slots=True, eq=False)
class WriteTransfer(HostTransfer):
    """Objects on their way to the backend.

    :param parts: by object, its position among the step's saves.
    :param save: what stores them in the arena; None once that is committed, or nothing of it is left.
    :param nbytes: of all objects: what it takes of the backlog.
    :param begun: the host knows of it.
    :param publishing: the host has been asked to publish what is left of it.
    """

    hop: Hop = Hop.WRITE
    parts: tuple[int, ...] = ()
    save: Transfer | None = None
    nbytes: int = 0
    begun: bool = False
    publishing: bool = False

    def urgency(self) -> tuple[float, float]:
        """First come, first served: an older write is nearer to being readable."""
        return (0.0, 0.0)

    @property
    def permitted(self) -> bool:
        """A batch of it may move now, or it may be published."""
        left = len(self.lost) < len(self.objects)
        return left and (self.index < self.limit or self._publishable)

    def next_extent(self, most_blocks: int, most_bytes: int) -> CallExtent:
        """The next batch under the caps; without layers, once all is at the backend and committed in the arena."""
        if self._publishable:
            return CallExtent(0, len(self.objects), self.layers, self.layers, 0)
        return HostTransfer.next_extent(self, most_blocks, most_bytes)

    def advance(self, extent: CallExtent) -> None:
        """Move the cursor past `extent`."""
        self.publishing = extent.layer_lo == self.layers
        HostTransfer.advance(self, extent)

    @property
    def _publishable(self) -> bool:
        return self.index == self.layers and not self.calls and self.save is None and not self.publishing
