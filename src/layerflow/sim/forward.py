"""A forward pass on its way through the layers of an engine's ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from layerflow.sim.clock import VirtualClock
from layerflow.sim.worker import SimulatedLoads, SimulatedWorker

NO_NOTICE: Mapping[int, float] = MappingProxyType({})
"""A waiting engine goes on at once."""


class ForwardPass:
    """Computes layer after layer, each once its loads are in place on all ranks.

    :param number: the step's, at every rank. :param layer_s: compute time of each layer.
    :param notices: by layer, how long after its bytes are in place a waiting engine goes on; of others, at once.
    :param whole: no layer computes before all are loaded.
    :param exposed: told how long a layer was waited for. :param computed: told once the last layer is computed.

    :ivar opened: ranks on which the step is open. :ivar loads: what it loads, by rank.
    :ivar exposed_s: how long it has waited.
    """

    def __init__(
        self,
        clock: VirtualClock,
        number: int,
        layer_s: Sequence[float],
        *,
        notices: Mapping[int, float] = NO_NOTICE,
        whole: bool = False,
        exposed: Callable[[float], None],
        computed: Callable[[], None],
    ) -> None:
        self.number = number
        self.opened: list[SimulatedWorker] = []
        self.loads: list[tuple[SimulatedWorker, SimulatedLoads]] = []
        self.exposed_s = 0.0
        self._clock, self._layer_s, self._notices, self._whole = clock, layer_s, notices, whole
        self._exposed, self._computed = exposed, computed
        self._layer = 0
        self._asked_at = 0.0
        self._waits = False

    def begin(self) -> None:
        """Come to the first layer, now."""
        self._reach()

    def look(self) -> None:
        """Go on, if the layer that is waited for is in place, or will never be."""
        last = len(self._layer_s) - 1 if self._whole else self._layer
        if not self._waits or any(loads.ready <= last and not loads.cut_off for _, loads in self.loads):
            return
        self._waits = False
        waited = self._clock.now - self._asked_at
        notice = self._notices.get(last, 0.0) if waited else 0.0
        waited += notice
        if waited:
            self.exposed_s += waited
            self._exposed(waited)
        self._clock.at(self._clock.now + notice + self._layer_s[self._layer], self._layer_computed)

    def _reach(self) -> None:
        """The next layer, which may have to wait for its loads."""
        self._asked_at, self._waits = self._clock.now, True
        frontier = len(self._layer_s) - 1 if self._whole else self._layer
        for worker, loads in self.loads:
            worker.advance(loads, frontier)
        self.look()

    def _layer_computed(self) -> None:
        self._layer += 1
        for worker in self.opened:
            worker.computed(self.number, self._layer)
        if self._layer < len(self._layer_s):
            self._reach()
        else:
            self._computed()
