"""One engine worker: its load lane with the window that agents obey, its save lane, and the links that both pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layerflow.flow.commands import Submit
from layerflow.flow.cost import LinkCost
from layerflow.flow.events import LayerShape
from layerflow.flow.window import BatchCaps, LayerBatch, LayerCursor, PlannedLayer, Stagger, Window, WindowCaps
from layerflow.sim.clock import VirtualClock
from layerflow.spec import ModelSpec


class SimulatedLink:
    """One direction of a link: batches pass one after the other; latencies overlap.

    :param batch_seconds: what a lane spends on a batch, whatever it carries.

    :ivar busy: seconds in which something passed. :ivar free_at: when all that was sent has passed.
    """

    def __init__(self, cost: LinkCost, batch_seconds: float) -> None:
        self._cost, self._batch_seconds = cost, batch_seconds
        self.free_at = 0.0
        self.busy = 0.0

    def send(self, nbytes: int, now: float) -> float:
        """When the last byte of a batch that is sent now has arrived."""
        took = self._batch_seconds + nbytes / self._cost.bandwidth
        self.free_at = max(now, self.free_at) + took
        self.busy += took
        return self.free_at + self._cost.latency


@dataclass(slots=True, eq=False)
class SimulatedLoads:
    """A step's loads, as :class:`layerflow.flow.window.PlannedLoads`.

    :param over: told once nothing of them moves any more: bytes in place.
    :param layer_ready: told of each layer that is in place.

    :ivar ready: layers below this one are in place, or have nothing to load.
    """

    step: int
    cursor: LayerCursor
    deadline: float
    over: Callable[[SimulatedLoads], None]
    layer_ready: Callable[[], None]
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
        self._saves_move = False

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
    ) -> SimulatedLoads:
        """Begin to load so many blocks of each group."""
        layers = [layer for layer in self._layers if blocks.get(layer.group)]
        loads = SimulatedLoads(step, LayerCursor(layers, blocks), deadline, over, layer_ready)
        self._loading[step] = loads
        self._window.add(loads)
        self._pump()
        return loads

    def advance(self, loads: SimulatedLoads, layer: int) -> None:
        """The engine has reached a layer."""
        loads.frontier = layer
        self._pump()

    def cut_off(self, step: int) -> None:
        """Nothing of a step's loads is wanted any more."""
        loads = self._loading.get(step)
        if loads is not None and not loads.cut_off:
            loads.cut_off = True
            loads.layer_ready()
            self._pump()

    def _pump(self) -> None:
        while self._take():
            """As a lane does: what has just begun leaves before more is cut."""

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
                arrives = self.loads.send(batch.extent.nbytes, begin)
                self._clock.at(arrives, _Landing(self, loads, batch))
        for loads in exhausted:
            self._end(loads)
        return bool(taken)

    def landed(self, loads: SimulatedLoads, batch: LayerBatch) -> None:
        """A batch is in place."""
        loads.in_flight -= 1
        loads.moved += batch.extent.nbytes
        self._window.landed(batch.extent.nbytes)
        if batch.seals:
            loads.ready = batch.layer + 1
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
        if self._saves_move:
            return
        for saves in self._saving.values():
            if saves.waiting and saves.waiting[0].layer < saves.computed:
                batch = saves.waiting.popleft()
                self._saves_move = True
                self._clock.at(self.saves.send(batch.nbytes, self._clock.now), _Saved(self, batch))
                return

    def stored(self, batch: Submit) -> None:
        """A save has arrived."""
        self._saves_move = False
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
