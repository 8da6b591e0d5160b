"""The agent's switch past the arena: a :class:`~layerflow.agent.direct.lane.DirectLane`, or nothing.

Imports nothing of the pool's before a server offers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from layerflow.agent.step.step import Step
from layerflow.device.base import Device
from layerflow.ops.base import Copier
from layerflow.ops.paged import PagedMemory
from layerflow.wire.messages import Batch, OpenStep

if TYPE_CHECKING:
    from layerflow.agent.direct.lane import DirectLane

log = structlog.get_logger("layerflow.agent")


class DirectLaneSwitch:
    """Which steps go past the arena is decided when they are opened, by the attachment."""

    def __init__(self, memory: PagedMemory, device: Device) -> None:
        self._memory = memory
        self._device = device
        self._direct: DirectLane | None = None

    def possible(self, options: str) -> bool:
        """Can this worker reach the pool that a server offers? The first time it makes a client; that takes seconds.

        :param options: of the Welcome.
        """
        from layerflow.agent.direct.client import suits  # noqa: PLC0415
        from layerflow.agent.direct.lane import DirectLane  # noqa: PLC0415 - only where a server offers it
        from layerflow.hosts.backend import BackendError  # noqa: PLC0415

        if not suits(self._device):
            return False
        if self._direct is not None and self._direct.options != options:
            log.warning("direct_unavailable", error="the pool's options have changed; restart the engine to take them")
            return False
        try:
            self._direct = self._direct or DirectLane(options, self._memory)
        except BackendError as error:
            log.warning("direct_unavailable", error=f"{error}; bytes go through the arena until the next attachment")
        except Exception:
            # Whatever a native library does here, the arena is still there.
            log.exception("direct_unavailable", error="bytes go through the arena until the next attachment")
        return self._direct is not None

    @property
    def stuck(self) -> bool:
        """Does the pool not answer?"""
        return self._direct is not None and self._direct.stuck

    def open(self, step: Step, send: Callable[[Step, OpenStep], bool], save_failed: Callable[[str, str], None]) -> None:
        """See :meth:`DirectLane.open`."""
        assert self._direct is not None
        self._direct.open(step, send, save_failed)

    def once_announced(self, steps: Sequence[Step], tell: Callable[[], None]) -> None:
        """Tell the server something of these steps: now, or once all of them have been announced to it."""
        if self._direct is None or all([step.announced for step in steps]):
            tell()
        else:
            self._direct.put(tell)

    def copier(self, step: Step, batch: Batch) -> Copier | None:
        """For a batch of the step, if its bytes go past the arena."""
        return self._direct.copier(step, batch) if step.leases is not None and self._direct is not None else None

    def ended_load(self, step: Step) -> None:
        """A load batch of the step has ended."""
        if step.leases is not None and self._direct is not None and not step.loading:
            self._direct.loads_over(step)

    def publish(self, step: Step, positions: Sequence[int], told: Callable[[int, str], None]) -> None:
        """See :meth:`DirectLane.publish`."""
        assert self._direct is not None
        self._direct.publish(step, positions, told)

    def after_direct_work(self, step: Step, work: Callable[[], None]) -> None:
        """Do this now; for a step past the arena, behind what the direct lane has been given so far."""
        if step.leases is not None and self._direct is not None:
            self._direct.put(work)
        else:
            work()

    def over(self, step: Step) -> None:
        """The step has ended."""
        if step.leases is not None and self._direct is not None:
            self._direct.over(step)

    def close(self) -> None:
        """Close the client, if there is one."""
        if self._direct is not None:
            self._direct.close()
