"""One engine worker: its load lane with the window that agents obey, its save lane, and the links that both pass."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layerflow.flow.commands import Submit
from layerflow.flow.cost import LinkCost
from layerflow.flow.events import LayerShape
from layerflow.flow.window import (
    BatchCaps,
    LayerBatch,
    LayerCursor,
    PlannedLayer,
    Sampling,
    Stagger,
    Window,
    WindowCaps,
)
from layerflow.sim.clock import VirtualClock
from layerflow.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """What one direction of a link takes for a batch.

    :param cost: of its bytes. Latencies of batches behind each other overlap.
    :param batch_seconds: that a batch takes, whatever it carries. :param block_seconds: and for each of its blocks.
    :param beside: so many times as long a batch takes that begins while the other direction moves something.
    :param lane_batch_seconds: that the lane's thread takes for a batch which has passed an emulated link, one after the
        other; the link goes on meanwhile.
    """

    cost: LinkCost
    batch_seconds: float = 0.0
    block_seconds: float = 0.0
    beside: float = 1.0
    lane_batch_seconds: float = 0.0

    def passing(self, nbytes: int, blocks: int) -> float:
        """Seconds for which a batch has the link to itself."""
        return self.batch_seconds + blocks * self.block_seconds + nbytes / self.cost.bandwidth


class SimulatedLink:
    """One direction of a link: batches pass one after the other; latencies overlap.

    :ivar busy: seconds in which something passed. :ivar free_at: when all that was sent has passed.
    :ivar lane_free_at: when the lane's thread has handled all of it.
    :ivar other: the other direction, which may slow this one down.
    """

    def __init__(self, times: LinkTimes) -> None:
        self.times = times
        self.free_at = self.lane_free_at = 0.0
        self.busy = 0.0
        self.other: SimulatedLink | None = None

    def handled(self, arrives: float, late: float) -> float:
        """When the lane's thread has handled a batch.

        :param late: so much longer than the link's figures say it takes; seconds, below 0 = less.
        """
        self.lane_free_at = max(arrives, self.lane_free_at) + max(0.0, self.times.lane_batch_seconds + late)
        return self.lane_free_at

    def send(self, nbytes: int, blocks: int, now: float, slowdown: float = 1.0) -> float:
        """When the last byte of a batch that is sent now has arrived.

        :param slowdown: so many times as long it takes as the link's figures say, its latency as its passing.
        """
        begins = max(now, self.free_at)
        took = self.times.passing(nbytes, blocks) * slowdown
        if self.other is not None and self.other.free_at > begins:
            took *= self.times.beside
        self.free_at = begins + took
        self.busy += took
        return self.free_at + self.times.cost.latency * slowdown


def by_layer(values: Mapping[int, float], missing: float) -> array[float]:
    """Values by number of the layer: 8 bytes each, and `missing` where there is none."""
    return array("d", (values.get(layer, missing) for layer in range(max(values, default=-1) + 1)))


@dataclass(slots=True, eq=False)
class LoadNoise:
    """What was one step's own on its rank: how its loads went beside what is fitted. By layer, see :func:`by_layer`.

    :param slowdown: so many times as long as fitted its batches take; where none is told, as long.
    :param late: so many seconds longer than fitted the lane's thread takes for the first of them.
    :param begins: while it is calibrated: when its first batch began, in seconds behind the step's opening.

    :ivar lags: how much later than it could its first batch begins: the lane came late.
    """

    slowdown: Sequence[float] = ()
    late: Sequence[float] = ()
    begins: Sequence[float] = ()
    lags: array[float] = field(default_factory=lambda: array("d"))

    def slower(self, layer: int) -> float:
        """How many times as long as fitted a batch of the layer takes."""
        return self.slowdown[layer] if layer < len(self.slowdown) else 1.0

    def later(self, layer: int) -> float:
        """How much longer than fitted the lane's thread takes for the layer's first batch."""
        return self.late[layer] if layer < len(self.late) else 0.0

    def lag(self, layer: int, could: float, opened: float) -> float:
        """How long the layer's first batch, which could begin now, is still to wait."""
        if layer < len(self.begins) and not math.isnan(self.begins[layer]):
            if not self.lags:
                self.lags = array("d", [0.0]) * len(self.begins)
            self.lags[layer] = max(0.0, opened + self.begins[layer] - could)
        return self.lags[layer] if layer < len(self.lags) else 0.0


@dataclass(slots=True, eq=False)
class SimulatedLoads:
    """A step's loads, as :class:`layerflow.flow.window.PlannedLoads`.

    :param over: told once nothing of them moves any more: bytes in place.
    :param layer_ready: told of each layer that is in place.
    :param next_layer: of each layer with something to load, the next such layer; behind the last, the number of layers.
    :param opened: when they were asked for. :param noise: of these loads alone.

    :ivar ready: layers below this one are in place, or have nothing to load.
    """

    step: int
    cursor: LayerCursor
    deadline: float
    over: Callable[[SimulatedLoads], None]
    layer_ready: Callable[[], None]
    next_layer: Mapping[int, int]
    opened: float = 0.0
    noise: LoadNoise = field(default_factory=LoadNoise)
    frontier: int = -1
    ready: int = 0
    moved: int = 0
    in_flight: int = 0
    cut_off: bool = False
    ended: bool = False
    began: int = -1

    @property
    def left(self) -> bool:
        """Is there a batch to cut? Of what was cut off, none."""
        return not self.cursor.exhausted and not self.cut_off


@dataclass(slots=True)
class SimulatedSaves:
    """A step's saves: the layers that are computed, and its batches that wait for theirs."""

    computed: int = 0
    waiting: deque[Submit] = field(default_factory=deque)


class SimulatedWorker:
    """One tensor-parallel rank.

    :param spec: with its shard.
    :param session: its number at the server.
    :param saved: told of each save batch that has ended.
    """

    def __init__(
        self,
        clock: VirtualClock,
        spec: ModelSpec,
        *,
        session: int,
        caps: BatchCaps,
        window: WindowCaps,
        stagger_us: int,
        links: tuple[SimulatedLink, SimulatedLink],
        saved: Callable[[SimulatedWorker, Submit, int], None],
    ) -> None:
        self.spec, self.session = spec, session
        self.loads, self.saves = links
        self.loads.other, self.saves.other = self.saves, self.loads
        self._clock = clock
        self._caps = caps
        self._window = Window[SimulatedLoads](window)
        self._stagger = Stagger(spec.shard.tp_rank, spec.shard.tp_size, stagger_us)
        self._saved = saved
        self._layers = [
            PlannedLayer(layer, group, spec.groups[group].bytes_per_block)
            for layer, (group, _) in enumerate(spec.layer_places())
        ]
        self._loading: dict[int, SimulatedLoads] = {}
        self._saving: dict[int, SimulatedSaves] = {}
        # The lane looks at how far engines are when a batch has landed, and with nothing on its way in intervals.
        self._sampling = Sampling()
        self._looks_at = 0.0
        self._will_look = False

    def shapes(self) -> tuple[LayerShape, ...]:
        """What the core is told of its layers."""
        return tuple(LayerShape(layer.group, layer.block_bytes) for layer in self._layers)

    # Loads ---------------------------------------------------------------------------------------

    def load(
        self,
        step: int,
        blocks: Mapping[int, int],
        deadline: float,
        *,
        over: Callable[[SimulatedLoads], None],
        layer_ready: Callable[[], None],
        noise: LoadNoise | None = None,
        lag: float = 0.0,
    ) -> SimulatedLoads:
        """Begin to load so many blocks of each group, `lag` seconds from now."""
        layers = [layer for layer in self._layers if blocks.get(layer.group)]
        numbers = [layer.layer for layer in layers]
        next_layer = dict(zip(numbers, [*numbers[1:], len(self._layers)], strict=True))
        loads = SimulatedLoads(step, LayerCursor(layers, blocks), deadline, over, layer_ready, next_layer)
        loads.opened, loads.ready = self._clock.now, numbers[0]
        if noise is not None:
            loads.noise = noise
        self._loading[step] = loads
        if lag > 0.0:
            self._clock.at(self._clock.now + lag, lambda: self._enter(loads))
        else:
            self._enter(loads)
        return loads

    def _enter(self, loads: SimulatedLoads) -> None:
        self._window.add(loads)
        self._pump()

    def advance(self, loads: SimulatedLoads, layer: int) -> None:
        """The engine has reached a layer. It wakes the lane where it has to wait; else that looks by itself."""
        loads.frontier = layer
        if loads.ready <= layer:
            self._pump()
        elif self._window and not (self._window.moves or self._will_look):
            now = self._clock.now
            while self._looks_at < now:
                self._sampling.missed()
                self._looks_at += self._sampling.interval
            self._will_look = True
            self._clock.at(self._looks_at, self._look)

    def _look(self) -> None:
        self._will_look = False
        if not self._window.moves:
            self._pump()

    def cut_off(self, step: int) -> None:
        """Nothing of a step's loads is wanted any more."""
        loads = self._loading.get(step)
        if loads is not None and not loads.cut_off:
            loads.cut_off = True
            loads.layer_ready()
            self._pump()
            self._end(loads)  # what has not begun is in no window yet

    def _pump(self) -> None:
        while self._take() and not self._window.full:
            """As a lane does: what has just begun leaves before more is cut."""
        if not self._window.moves:
            self._sampling.moved()
            self._looks_at = self._clock.now + self._sampling.interval

    def _take(self) -> bool:
        """Send what may move now; False: nothing may."""
        taken, exhausted = self._window.take(self._caps)
        now = self._clock.now
        for loads, cut in taken:
            for batch in cut:
                begin = now
                if self._stagger.on and batch.layer != loads.began:
                    loads.began = batch.layer
                    left = (loads.deadline - now) / (self.spec.num_layers - batch.layer + 1)
                    begin = self._stagger.begin(batch.layer, now, left)
                loads.in_flight += 1
                extent = batch.extent
                noise = loads.noise
                slower = noise.slower(batch.layer)
                late = 0.0
                if not (extent.lo or extent.byte_lo):
                    late = noise.later(batch.layer)
                    begin = max(begin, self.loads.free_at)
                    begin += noise.lag(batch.layer, begin, loads.opened)
                arrives = self.loads.send(extent.nbytes, extent.hi - extent.lo, begin, slower)
                handled = self.loads.handled(arrives, late)
                self._clock.at(handled, _Landing(self, loads, batch))
        for loads in exhausted:
            self._end(loads)
        return bool(taken)

    def landed(self, loads: SimulatedLoads, batch: LayerBatch) -> None:
        """A batch is in place."""
        loads.in_flight -= 1
        loads.moved += batch.extent.nbytes
        self._window.landed(batch.extent.nbytes)
        if batch.seals:
            loads.ready = loads.next_layer[batch.layer]
            loads.layer_ready()
        self._pump()
        self._end(loads)

    def _end(self, loads: SimulatedLoads) -> None:
        if not (loads.ended or loads.left or loads.in_flight):
            loads.ended = True
            del self._loading[loads.step]
            loads.over(loads)

    # Saves ---------------------------------------------------------------------------------------

    def submit(self, batch: Submit) -> None:
        """A save was granted; it leaves once its layer is computed."""
        self._saving.setdefault(batch.step, SimulatedSaves()).waiting.append(batch)
        self._move_saves()

    def computed(self, step: int, layers: int) -> None:
        """So many layers of a step are computed."""
        self._saving.setdefault(step, SimulatedSaves()).computed = layers
        self._move_saves()

    def computed_of(self, step: int) -> int:
        """So many layers of a step are computed, as far as its saves are not done."""
        saves = self._saving.get(step)
        return saves.computed if saves is not None else self.spec.num_layers

    def drop_saves(self, step: int) -> Sequence[Submit]:
        """Take back what of a step's saves has not begun to move."""
        saves = self._saving.get(step)
        if saves is None:
            return ()
        dropped = list(saves.waiting)
        saves.waiting.clear()
        return dropped

    def forget_saves(self, step: int) -> None:
        """A step is done."""
        self._saving.pop(step, None)

    def _move_saves(self) -> None:
        link = self.saves
        if self._clock.now < link.free_at:
            return
        for saves in self._saving.values():
            if saves.waiting and saves.waiting[0].layer < saves.computed:
                batch = saves.waiting.popleft()
                arrives = link.send(batch.nbytes, batch.hi - batch.lo, self._clock.now)
                if arrives > link.free_at:  # the next one passes while this one's latency lasts
                    self._clock.at(link.free_at, self._move_saves)
                self._clock.at(link.handled(arrives, 0.0), _Saved(self, batch))
                return

    def stored(self, batch: Submit) -> None:
        """A save has arrived."""
        self._saved(self, batch, self.computed_of(batch.step))
        self._move_saves()


@dataclass(slots=True, eq=False)
class _Landing:
    worker: SimulatedWorker
    loads: SimulatedLoads
    batch: LayerBatch

    def __call__(self) -> None:
        self.worker.landed(self.loads, self.batch)


@dataclass(slots=True, eq=False)
class _Saved:
    worker: SimulatedWorker
    batch: Submit

    def __call__(self) -> None:
        self.worker.stored(self.batch)
