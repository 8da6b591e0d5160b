"""A whole simulation: a machine, a configuration and a trace in, figures out."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from layerflow.config.settings import Settings
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
from layerflow.sim.trace import RequestTrace
from layerflow.sim.worker import LinkTimes, SimulatedLink, SimulatedWorker
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

EVICTIONS: dict[str, Callable[[], EvictionPolicy[DirectoryEntry]]] = {"car": AdaptiveClock, "lru": Lru}
"""Orders of eviction by name: layerflow's, and one to compare it with."""


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
            ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
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


def simulate(
    machine: Machine, settings: Settings, trace: RequestTrace, *, seed: int = 0, validate: bool = False
) -> Outcome:
    """Run a trace to its end. Equal arguments, equal outcomes.

    :param seed: of what is drawn: which engine a request goes to where several have as little to do.
    :param validate: check the core's and the pool's invariants as it goes; slow.
    :raises ConfigError: the model's caches are not simulated.
    """
    refuse_kinds(machine.spec)
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
    engines = [_engine(machine, settings, clock, server, ended.append) for _ in range(machine.engines)]
    draws = random.Random(seed)  # noqa: S311 - no secret
    for purge in trace.purges:
        clock.at(purge, server.purge)
    for request in trace.requests:
        clock.at(request.at, lambda request=request: _least(engines, draws).submit(request))  # type: ignore[misc]
    clock.run()
    if validate:
        pool.validate()
    return Outcome(_figures(ended, server, engines), ended)


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
    requests: Sequence[RunningRequest], server: SimulatedServer, engines: Sequence[SimulatedEngine]
) -> Figures:
    pool, flow = server.pool.statistics(), server.flow.statistics()
    workers = [worker for engine in engines for worker in engine.workers]
    seconds = max([each.ended_at for each in requests], default=0.0)
    passed = [link.free_at for worker in workers for link in (worker.loads, worker.saves)]
    share = len(workers) * max(seconds, *passed) or 1.0
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
        full=pool.full,
        failed_loads=server.failed_loads,
        events=server.events,
    )


def _least(engines: Sequence[SimulatedEngine], draws: random.Random) -> SimulatedEngine:
    """One of the engines that have least to do."""
    least = min(engine.load for engine in engines)
    return draws.choice([engine for engine in engines if engine.load == least])


def one_group_spec(*, layers: int, bytes_per_token: int, chunk_tokens: int, block_size: int, tp: int) -> ModelSpec:
    """A model whose layers all have one kind of cache.

    :param bytes_per_token: of one layer on one worker.
    :raises SpecError: sizes that cannot be.
    """
    plane = Plane("kv", "uint8", (bytes_per_token,))
    group = GroupSpec("full", block_size, tuple(range(layers)), (plane,))
    return ModelSpec("simulated", "simulated", (group,), Shard(tp_size=tp), chunk_tokens=chunk_tokens)
