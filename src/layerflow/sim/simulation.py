"""A whole simulation: a machine, a configuration and a trace in, figures out."""

from __future__ import annotations

import bisect
import functools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.flow.window import BatchCaps, WindowCaps
from layerflow.pool.directory import DirectoryEntry
from layerflow.pool.eviction import AdaptiveClock, EvictionPolicy
from layerflow.pool.memory import MemoryPool
from layerflow.server.terms import limits_of, terms_of
from layerflow.sim.arena import SimulatedArena, SimulatedHeaders
from layerflow.sim.clock import VirtualClock
from layerflow.sim.engine import RunningRequest, SimulatedEngine
from layerflow.sim.kinds import refuse_kinds
from layerflow.sim.lru import Lru
from layerflow.sim.machine import Machine
from layerflow.sim.server import SimulatedServer
from layerflow.sim.trace import RequestTrace, TracedRequest
from layerflow.sim.worker import LinkTimes, SimulatedLink, SimulatedWorker
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

EVICTIONS: dict[str, Callable[[], EvictionPolicy[DirectoryEntry]]] = {"car": AdaptiveClock, "lru": Lru}
"""Orders of eviction by name: layerflow's, and one to compare it with."""


MOST_WORKERS: Final = 4096
"""The most that ``server.max_sessions`` may be."""


def p99_place(count: int) -> int:
    """Where p99 is among so many ordered values: the first that 99 % of them reach at most (nearest rank)."""
    return -(-99 * count // 100) - 1


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of many values, in the unit of their name."""

    p50: float
    p99: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """Of no values: zeros."""
        if not values:
            return cls(0.0, 0.0, 0.0)
        ordered = sorted(values)
        return cls(
            statistics.median(ordered),
            ordered[p99_place(len(ordered))],
            statistics.fmean(ordered),
        )

    def in_ms(self) -> dict[str, float]:
        """Of seconds: in milliseconds, by names that say so."""
        return {"p50_ms": self.p50 * 1e3, "p99_ms": self.p99 * 1e3, "mean_ms": self.mean * 1e3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What became of a trace.

    :param hit_tokens: that were loaded from the pool. :param local_tokens: that the engines had themselves.
    :param pool_tokens: that the pool had when they were asked for, local and not worth loading ones among them.
    :param link_busy: share of the time in which a worker's loads, and its saves, passed their link.
    :param sheds: saves that were given up because too much waited already.
    :param full: objects that found no room.
    """

    requests: int
    tokens: int
    seconds: float
    hit_tokens: int
    local_tokens: int
    pool_tokens: int
    ttft_s: Distribution
    exposed_s: Distribution
    exposed_total_s: float
    link_busy: tuple[float, float]
    evictions: int
    sheds: int
    full: int
    failed_loads: int
    events: int

    @property
    def hit_rate(self) -> float:
        """Share of all prompts' tokens that were loaded or local."""
        return (self.hit_tokens + self.local_tokens) / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trace, together and request by request, in the order in which they ended."""

    figures: Figures
    requests: Sequence[RunningRequest]


class EngineLoads:
    """Chooses one of the engines that have least to do; by their numbers, how many requests each has.

    :param draws: which one, where several have as little.
    """

    def __init__(self, engines: int, draws: random.Random) -> None:
        self._draws = draws
        self._loads = [0] * engines
        self._by_load: list[list[int]] = [list(range(engines))]  # of each load the engines that have it, in order

    def take(self) -> int:
        """The engine of one more request."""
        number = self._draws.choice(next(filter(None, self._by_load)))
        self._move(number, 1)
        return number

    def give_back(self, number: int) -> None:
        """A request of an engine has ended."""
        self._move(number, -1)

    def _move(self, number: int, by: int) -> None:
        before, self._loads[number] = self._loads[number], self._loads[number] + by
        of = self._by_load[before]
        del of[bisect.bisect_left(of, number)]
        if before + by == len(self._by_load):
            self._by_load.append([])
        bisect.insort(self._by_load[before + by], number)


def simulate(
    machine: Machine,
    settings: Settings,
    trace: RequestTrace,
    *,
    seed: int = 0,
    validate: bool = False,
    tell: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a trace to its end. Equal arguments, equal outcomes.

    :param seed: of what is drawn: which engine a request goes to where several have as little to do.
    :param tell: called at the end of each request.
    :param validate: check the core's and the pool's invariants as it goes; slow.
    :raises ConfigError: the model's caches are not simulated, or so many workers are more than a server takes.
    """
    refuse_kinds(machine.spec)
    workers = machine.engines * machine.spec.shard.tp_size
    if workers > MOST_WORKERS:
        raise ConfigError(f"{workers:,} workers are more than a server takes, {MOST_WORKERS:,}; simulate fewer engines")
    clock, arena = VirtualClock(), SimulatedArena(machine.arena_bytes)
    pool = MemoryPool(
        arena,
        lease_share=settings.pool.lease_share,
        headers=SimulatedHeaders(),
        policy=EVICTIONS[machine.eviction](),
    )
    limits = limits_of(settings, arena.nbytes)
    server = SimulatedServer(clock, limits, pool, settings, validate=validate)
    ended: list[RunningRequest] = []
    loads = EngineLoads(machine.engines, random.Random(seed))  # noqa: S311 - no secret
    engines: dict[int, SimulatedEngine] = {}

    def submit(request: TracedRequest) -> None:
        number = loads.take()
        if number not in engines:  # most of many engines may never have anything to do
            engines[number] = _engine(machine, settings, clock, server, functools.partial(end, number))
        engines[number].submit(request)

    def end(number: int, request: RunningRequest) -> None:
        loads.give_back(number)
        ended.append(request)
        tell()

    for purge in trace.purges:
        clock.at(purge, server.purge)
    for request in trace.requests:
        clock.at(request.at, functools.partial(submit, request))
    clock.run()
    if validate:
        pool.validate()
    return Outcome(_figures(ended, server, list(engines.values()), machine), ended)


def _engine(
    machine: Machine,
    settings: Settings,
    clock: VirtualClock,
    server: SimulatedServer,
    ended: Callable[[RunningRequest], None],
) -> SimulatedEngine:
    shard = machine.spec.shard
    terms = terms_of(settings, machine.engines * shard.tp_size)
    workers = []
    for rank in range(shard.tp_size):
        worker = SimulatedWorker(
            clock,
            msgspec.structs.replace(machine.spec, shard=msgspec.structs.replace(shard, tp_rank=rank)),
            session=server.number(),
            caps=BatchCaps(terms.max_transfer_blocks, terms.max_transfer_bytes),
            window=WindowCaps(terms.window_bytes, terms.prefetch_layers),
            stagger_us=terms.stagger_us,
            links=(
                SimulatedLink(LinkTimes(machine.load, machine.batch_seconds)),
                SimulatedLink(LinkTimes(machine.save, machine.batch_seconds)),
            ),
            saved=server.saved,
        )
        server.attach(worker)
        workers.append(worker)
    return SimulatedEngine(clock, server, machine, settings.transfer, workers=workers, ended=ended)


def _figures(
    requests: Sequence[RunningRequest], server: SimulatedServer, engines: Sequence[SimulatedEngine], machine: Machine
) -> Figures:
    pool, flow = server.pool.statistics(), server.flow.statistics()
    workers = [worker for engine in engines for worker in engine.workers]
    seconds = max([each.ended_at for each in requests], default=0.0)
    passed = [link.free_at for worker in workers for link in (worker.loads, worker.saves)]
    share = machine.engines * machine.spec.shard.tp_size * max([seconds, *passed]) or 1.0
    return Figures(
        requests=len(requests),
        tokens=sum(each.request.tokens for each in requests),
        seconds=seconds,
        hit_tokens=sum(max(0, each.hit - each.local) for each in requests),
        local_tokens=sum(each.local for each in requests),
        pool_tokens=sum(each.hit_at_all for each in requests),
        ttft_s=Distribution.of([each.first_token_at - each.request.at for each in requests]),
        exposed_s=Distribution.of([each.exposed_s for each in requests if each.hit]),
        exposed_total_s=sum(engine.exposed_s for engine in engines),
        link_busy=(
            sum(worker.loads.busy for worker in workers) / share,
            sum(worker.saves.busy for worker in workers) / share,
        ),
        evictions=pool.evictions,
        sheds=flow.shed_parts,
        full=server.full,
        failed_loads=server.failed_loads,
        events=server.events,
    )


def one_group_spec(*, layers: int, bytes_per_token: int, chunk_tokens: int, block_size: int, tp: int) -> ModelSpec:
    """A model whose layers all have one kind of cache.

    :param bytes_per_token: of one layer on one worker.
    :raises SpecError: sizes that cannot be.
    """
    plane = Plane("kv", "uint8", (bytes_per_token,))
    group = GroupSpec("full", block_size, tuple(range(layers)), (plane,))
    return ModelSpec("simulated", "simulated", (group,), Shard(tp_size=tp), chunk_tokens=chunk_tokens)
