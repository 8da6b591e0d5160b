"""One replay of a recorded run: each engine's passes in their order, each with what was its own, in virtual time."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import statistics
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.flow.cost import ComputeCost, LinkCost, Mode, ModeInputs, attention_pairs, choose
from layerflow.flow.window import BatchCaps, WindowCaps
from layerflow.keys import object_keys
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject, ReserveStatus
from layerflow.pool.memory import MemoryPool
from layerflow.recording.format import PartSeen
from layerflow.server.terms import limits_of, terms_of
from layerflow.sim.arena import SimulatedArena, SimulatedHeaders
from layerflow.sim.clock import VirtualClock
from layerflow.sim.fit import (
    MovedBatch,
    Reach,
    compute_reach,
    emulated_link,
    fit_compute,
    fit_link,
    lateness,
    layer_shares,
    slowdowns,
)
from layerflow.sim.forward import ForwardPass
from layerflow.sim.recorded import RecordedEngine, RecordedPass, RecordedPrompt, RecordedRun, digests, last_pass
from layerflow.sim.server import ROOT, Failed, SimulatedServer, WantedLoad, blocks_of
from layerflow.sim.simulation import Distribution
from layerflow.sim.trace import numbered_digest
from layerflow.sim.worker import LinkTimes, LoadNoise, SimulatedLink, SimulatedLoads, SimulatedWorker, by_layer
from layerflow.spec import ModelSpec

UNTOLD: Final = 0.01
"""Where so large a share of some times rests on guesses, their p99 is not told."""
MEDIAN_UNTOLD: Final = 0.05
"""Nor their median. A mean is not told from the first guess on."""

_COLD: Final = 1 << 48
"""Numbers of chunks from here on stand for what nobody asks for."""


class Sample(NamedTuple):
    """One value.

    :param at: when what it is of was recorded, in seconds of the recording: the same in each replay.
    """

    at: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFigures:
    """What became of a recording's prompts: as it was, or as replayed. Samples are in the order of their times.

    Of passes and prompts whose times are recorded only: a worker tells those of its last 64 steps once a second.

    :param exposed_s: of each pass that has loaded something, how long it waited for its loads; seconds.
    :param prefill_s: of each prompt, from its lookup's answer to the end of the last step that computed some of it:
        what a recording can know of the time to the first token. Decoding, sampling and what an engine does before it
        looks up are not in it. Of a prompt whose client knew by itself that it misses, from its first step. Seconds.
    :param hit_tokens: of each prompt, the tokens that could be loaded. :param tokens: of all prompts together.
    :param evictions: between the recording's first and last look at the pool.
    :param sheds: saves given up because too much waited. :param failed_loads: loads that were computed instead.
    :param full: objects that were not saved because there was no room; None = not recorded.
    :param guessed: timed prompts in a pass of which it is not known what it takes, or that waited for one.
    :param guessed_steps: steps with loads among such passes. :param guessed_tokens: the most that one of them computed.
    """

    exposed_s: tuple[Sample, ...]
    prefill_s: tuple[Sample, ...]
    hit_tokens: tuple[Sample, ...]
    tokens: int
    evictions: int
    sheds: int
    failed_loads: int
    full: int | None
    guessed: int = 0
    guessed_steps: int = 0
    guessed_tokens: int = 0

    @property
    def prefill_guesses(self) -> float:
        """The share of the prompts with times that rest on guesses."""
        return self.guessed / len(self.prefill_s) if self.prefill_s else 0.0

    @property
    def exposed_guesses(self) -> float:
        """The same of the steps with loads."""
        return self.guessed_steps / len(self.exposed_s) if self.exposed_s else 0.0

    @property
    def hits(self) -> int:
        """Tokens that could be loaded, of all prompts."""
        return int(sum(sample.value for sample in self.hit_tokens))

    @property
    def hit_rate(self) -> float:
        """Of all prompts' tokens."""
        return self.hits / self.tokens if self.tokens else 0.0

    @property
    def exposed(self) -> Distribution:
        """Of the passes that have loaded something."""
        return Distribution.of([sample.value for sample in self.exposed_s])

    @property
    def prefill(self) -> Distribution:
        """Of the prompts."""
        return Distribution.of([sample.value for sample in self.prefill_s])


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a run's machine was found to take.

    :param begin: zero of the virtual clock, in seconds of the recording's.
    :param load: what a load takes; :param save: and a save. One that was never seen is as the other.
    :param loads_seen: loads were.
    :param compute: of the mean layer; None = not known.
    :param reach: what `compute` can be asked.
    :param shares: by layer, what it computes, as a share of the mean one.
    :param noise: by engine, rank and pass, how its loads went beside that; see :meth:`calibrate`.
    :param notice_s: how long after a layer's last byte a wait for it ends, where none was recorded.
    :param lag_s: from a pass's opening to its first load, where none was recorded.
    :param before: chunks that were hit and not saved before: they were in the pool already. In their order.
    """

    begin: float
    load: LinkTimes
    save: LinkTimes
    loads_seen: bool
    compute: ComputeCost | None
    reach: Reach
    shares: tuple[float, ...]
    noise: Mapping[tuple[int, int], Mapping[int, LoadNoise]]
    notice_s: float
    lag_s: float
    before: tuple[int, ...]

    @classmethod
    def of(cls, run: RecordedRun) -> Fitted:
        """Fit them.

        :raises ConfigError: nothing of it can be timed.
        """
        lanes = {
            (engine.number, rank): _RankLanes(engine, rank) for engine in run.engines for rank in sorted(engine.ranks)
        }
        emulated = emulated_cost(run.settings)
        every = max(1, math.ceil(sum(each.spans for each in lanes.values()) / MOST_FITTED))
        load, save = (
            fit_link(batches) if emulated is None else emulated_link(emulated, batches)
            for batches in (
                [[batch for _, of in each.loads(every) for batch in of] for each in lanes.values()],
                [[batch for _, of in each.saves(every) for batch in of] for each in lanes.values()],
            )
        )
        known = load or save
        if known is None:
            raise ConfigError(f"{run.name}: no step with times is in it, so none can be simulated; record for longer")
        passes = [each for engine in run.engines for each in engine.passes]
        loads_seen = load is not None
        load = load or known
        noise: dict[tuple[int, int], dict[int, LoadNoise]] = {}
        lags = array("d")
        for engine in run.engines:
            for rank in engine.ranks:
                of_rank = noise[engine.number, rank] = {}
                for number, batches in lanes[engine.number, rank].loads():
                    opened = engine.passes[number].opened
                    of_rank[number] = _noise(load, batches, opened)
                    lags.append(min(batch.began for batch in batches) - opened)
        notices = array("d", (seconds for each in passes for seconds in each.times.notice_s))
        computed = [(*each.work, each.layer_s) for each in passes]
        compute = fit_compute(computed)
        return cls(
            min([prompt.at for prompt in run.prompts] + [each.opened for each in passes]),
            load,
            save or known,
            loads_seen,
            compute,
            compute_reach(computed, compute),
            layer_shares((each.layers for each in passes[::every]), run.spec.num_layers),
            noise,
            statistics.median(notices) if notices else 0.0,
            statistics.median(lags) if lags else 0.0,
            _known_before(run),
        )

    def calibrate(self, run: RecordedRun) -> None:
        """Find out how late lanes came, by a replay of the configuration that was recorded; once, before any other."""
        Rerun(run, self, run.settings, link=None, residuals=True, validate=False).figures()
        for noises in self.noise.values():
            for noise in noises.values():
                noise.begins = ()


def _noise(load: LinkTimes, batches: Sequence[MovedBatch], opened: float) -> LoadNoise:
    begins: dict[int, float] = {}
    for batch in batches:
        begins[batch.layer] = min(begins.get(batch.layer, math.inf), batch.began - opened)
    if all(batch.emulated for batch in batches):
        return LoadNoise(late=by_layer(lateness(load, batches), 0.0), begins=by_layer(begins, math.nan))
    return LoadNoise(slowdown=by_layer(slowdowns(load, batches), 1.0), begins=by_layer(begins, math.nan))


def emulated_cost(settings: Settings) -> LinkCost | None:
    """What a link takes that agents emulate under these settings; None = they emulate none."""
    pool = settings.pool
    return LinkCost(pool.link_gbps * 1e9, pool.link_latency_us * 1e-6) if pool.link_gbps else None


class OtherLink(NamedTuple):
    """A link instead of the fitted one, of loads and of saves.

    :param bandwidth: bytes per second; :param latency: seconds. None = the fitted one's.
    """

    bandwidth: float | None = None
    latency: float | None = None

    def of(self, times: LinkTimes) -> LinkTimes:
        """What a direction takes then."""
        cost = times.cost
        bandwidth = cost.bandwidth if self.bandwidth is None else self.bandwidth
        latency = cost.latency if self.latency is None else self.latency
        return dataclasses.replace(times, cost=LinkCost(bandwidth, latency))


MOST_FITTED: Final = 200_000
"""Batches that a fit reads, about: of more, every so many passes tell as much."""


class _RankLanes:
    """What has passed a rank's lanes, unpacked pass by pass.

    :ivar spans: how many they are, and others.
    """

    def __init__(self, engine: RecordedEngine, rank: int) -> None:
        self._steps = [each.ranks.get(rank) for each in engine.passes]
        self.spans = sum(step.span_count for step in self._steps if step is not None)
        busy: dict[str, tuple[array[float], array[float]]] = {
            lane: (array("d"), array("d")) for lane in ("load", "save")
        }
        for step in self._steps:
            lanes = step.spans() if step is not None else {}
            for lane, (starts, stops) in busy.items():
                starts.extend(span.start for span in lanes.get(lane, ()))
                stops.extend(span.stop for span in lanes.get(lane, ()))
        self._busy = {lane: _merged(*intervals) for lane, intervals in busy.items()}

    def loads(self, every: int = 1) -> Iterator[tuple[int, list[MovedBatch]]]:
        """By the number of its pass, what was loaded in one; of every so many passes."""
        return self._moved("load", "save", every)

    def saves(self, every: int = 1) -> Iterator[tuple[int, list[MovedBatch]]]:
        """As :meth:`loads`, what was saved."""
        return self._moved("save", "load", every)

    def _moved(self, lane: str, other: str, every: int) -> Iterator[tuple[int, list[MovedBatch]]]:
        busy = self._busy[other]
        for number in range(0, len(self._steps), max(1, every)):
            step = self._steps[number]
            batches = [
                MovedBatch(
                    span.start,
                    span.stop,
                    span.nbytes,
                    span.blocks,
                    span.layer,
                    _overlaps(busy, span.start, span.stop),
                    span.emulated,
                )
                for span in (step.spans()[lane] if step is not None else ())
            ]
            if batches:
                yield number, batches


class _Intervals(NamedTuple):
    """Times that do not overlap, in order."""

    starts: array[float]
    stops: array[float]


def _merged(starts: array[float], stops: array[float]) -> _Intervals:
    merged = _Intervals(array("d"), array("d"))
    order = np.lexsort((stops, starts))
    for start, stop in zip(np.array(starts)[order].tolist(), np.array(stops)[order].tolist(), strict=True):
        if merged.stops and start <= merged.stops[-1]:
            merged.stops[-1] = max(stop, merged.stops[-1])
        else:
            merged.starts.append(start)
            merged.stops.append(stop)
    return merged


def _overlaps(merged: _Intervals, start: float, stop: float) -> bool:
    """Does more than half of this lie within them?"""
    at = max(0, bisect.bisect_right(merged.starts, start) - 1)
    covered = 0.0
    while at < len(merged.starts) and merged.starts[at] < stop:
        covered += max(0.0, min(stop, merged.stops[at]) - max(start, merged.starts[at]))
        at += 1
    return covered > (stop - start) / 2


def _known_before(run: RecordedRun) -> tuple[int, ...]:
    happened: list[tuple[float, Sequence[int], bool]] = []
    for engine in run.engines:
        for each in engine.passes:
            for step in each.ranks.values():
                happened += [(step.opened, part.chunks, True) for part in step.saves]
        for prompt in engine.prompts:
            held = -(-prompt.hit // run.spec.chunk_tokens)
            happened.append((prompt.answered, prompt.numbers[:held], False))
    found: dict[int, None] = {}
    saved: set[int] = set()
    for _, chunks, saves in sorted(happened, key=lambda each: each[0]):
        if saves:
            saved.update(chunks)
        else:
            found.update(dict.fromkeys(chunk for chunk in chunks if chunk not in saved))
    return tuple(found)


class Rerun:
    """One replay under way: a server, and the engines of a run.

    :param link: instead of the fitted one.
    :param residuals: each step keeps what its own layers, copies and waits took beside the fit.
    :param validate: check the core's and the pool's invariants as it goes; slow.

    :ivar one_by_one: one client has waited for each of its prompts, and purges between them, too.
    """

    def __init__(
        self,
        run: RecordedRun,
        fitted: Fitted,
        settings: Settings,
        *,
        link: OtherLink | None,
        residuals: bool,
        validate: bool,
    ) -> None:
        self.residuals = residuals
        self.recorded, self.fitted, self.settings = run, fitted, settings
        self.clock = VirtualClock()
        arena_bytes = settings.pool.size
        self.pool = MemoryPool(
            SimulatedArena(arena_bytes), lease_share=settings.pool.lease_share, headers=SimulatedHeaders()
        )
        self.server = SimulatedServer(
            self.clock,
            limits_of(settings, arena_bytes),
            self.pool,
            settings,
            validate=validate,
        )
        emulated = emulated_cost(settings)
        if link is None and emulated is not None and emulated != emulated_cost(run.settings):
            link = OtherLink(emulated.bandwidth, emulated.latency)
        link = link or OtherLink()
        self.times = (link.of(fitted.load), link.of(fitted.save))
        self.exposed: list[Sample] = []
        self.prefill: list[Sample] = []
        self.hits: list[Sample] = []
        self.guessed = self.guessed_steps = self.guessed_tokens = 0
        self.loads_known = fitted.loads_seen or link != OtherLink()
        self._evictions: list[int] = []
        self._validate = validate
        self.one_by_one = len(run.engines) == 1 and run.engines[0].one_by_one
        count = sum(len(engine.ranks) for engine in run.engines)
        terms = terms_of(settings, count)
        self.engines = [
            _ReplayedEngine(
                self,
                engine,
                {
                    rank: SimulatedWorker(
                        self.clock,
                        _of_rank(run.spec, rank),
                        session=self.server.number(),
                        caps=BatchCaps(terms.max_transfer_blocks, terms.max_transfer_bytes),
                        window=WindowCaps(terms.window_bytes, terms.prefetch_layers),
                        stagger_us=terms.stagger_us,
                        links=(SimulatedLink(self.times[0]), SimulatedLink(self.times[1])),
                        saved=self.server.saved,
                    )
                    for rank in sorted(engine.ranks)
                },
            )
            for engine in run.engines
        ]

    def figures(self) -> ReplayFigures:
        """Run it to its end."""
        self._fill()
        samples = self.recorded.samples
        for sample in samples[:1] + samples[-1:]:
            self.clock.at(
                sample.at - self.fitted.begin, lambda: self._evictions.append(self.pool.statistics().evictions)
            )
        if not self.one_by_one:
            for at in self.recorded.purges:
                self.clock.at(at - self.fitted.begin, self.server.purge)
        for engine in self.engines:
            engine.begin()
        self.clock.run()
        if self._validate:
            self.pool.validate()
        return ReplayFigures(
            exposed_s=tuple(sorted(self.exposed)),
            prefill_s=tuple(sorted(self.prefill)),
            hit_tokens=tuple(sorted(self.hits)),
            tokens=sum(prompt.tokens for prompt in self.recorded.prompts),
            evictions=self._evictions[-1] - self._evictions[0] if self._evictions else 0,
            sheds=self.server.flow.statistics().shed_parts,
            failed_loads=self.server.failed_loads,
            full=self.server.full,
            guessed=self.guessed,
            guessed_steps=self.guessed_steps,
            guessed_tokens=self.guessed_tokens,
        )

    def _fill(self) -> None:
        """Put into the pool what was there before: other objects, and those that are hit before they are saved."""
        run = self.recorded
        spec, chunk = run.spec, run.spec.chunk_tokens
        shards = [_of_rank(spec, rank).shard for rank in sorted({rank for each in run.engines for rank in each.ranks})]
        blocks = [len(group.rules.keep(chunk)) for group in spec.groups]
        sizes = [object_bytes(group, count) for group, count in zip(spec.groups, blocks, strict=True)]
        known = len(self.fitted.before) * sum(sizes) * len(shards)
        used = run.samples[0].used_bytes - known if run.samples else 0
        others = range(max(0, used // (sum(sizes) * max(1, len(shards)))))
        cold = [numbered_digest(_COLD + other) for other in others]
        for digest in [*cold, *map(numbered_digest, self.fitted.before)]:
            for group, (count, nbytes) in enumerate(zip(blocks, sizes, strict=True)):
                keys = object_keys([digest], (group,), shards or [spec.shard])
                objects = [NewObject(key, nbytes, count, chunk) for key in keys]
                found = self.pool.reserve(objects, "before")
                there = [
                    new.key for new, room in zip(objects, found, strict=True) if room.outcome is ReserveStatus.RESERVED
                ]
                self.pool.commit(there, "before")


def _of_rank(spec: ModelSpec, rank: int) -> ModelSpec:
    return msgspec.structs.replace(spec, shard=msgspec.structs.replace(spec.shard, tp_rank=rank))


# One engine of it.


@dataclass(slots=True, eq=False)
class ReplayedPrompt:
    """A prompt, and what becomes of it.

    :param start: tokens that its engine had itself, as far as is known. :param loaded: tokens of its hit that were
        loaded, those before included; 0 = nothing was.
    :param ranges: the passes that computed some of it, and from which token to which.
    :param ahead: the pass that loaded it ahead; None = none did. :param last: the pass behind which it is computed.

    :ivar hit: tokens that are loaded now, likewise. :ivar asked_at: when its lookup was answered; nan = not yet.
    :ivar awaits: its loads are on their way, ahead of its first pass. :ivar load_pass: the pass that loads its hit.
    """

    recorded: RecordedPrompt
    start: int
    loaded: int
    ranges: dict[RecordedPass, tuple[int, int]]
    ahead: RecordedPass | None
    last: RecordedPass | None
    hit: int = 0
    asked_at: float = math.nan
    arrived_at: float = -math.inf
    awaits: bool = False
    load_pass: RecordedPass | None = None
    failed: bool = False

    @property
    def have(self) -> int:
        """Tokens that are not computed."""
        return max(self.start, self.hit)

    @property
    def had(self) -> int:
        """Tokens that were not computed."""
        return max(self.start, self.loaded)

    def left(self, place: RecordedPass) -> tuple[int, int]:
        """The tokens that a pass computes now, of those that it has computed: from which one to which."""
        begin, end = self.ranges[place]
        return min(end, max(begin, self.have)), end

    def more(self, place: RecordedPass) -> tuple[int, int]:
        """The tokens that it computes besides, because they are not loaded."""
        return (self.have, self.had) if self.have < self.had and place is next(iter(self.ranges), None) else (0, 0)

    def whole_again(self, place: RecordedPass, chunk: int) -> slice:
        """The chunks that it computes to their end there and did not compute from their beginning."""
        first, behind = self.more(place)
        return slice(first // chunk, self.left(place)[1] // chunk) if behind else slice(0)


def _prompt_of(prompt: RecordedPrompt, spec: ModelSpec) -> ReplayedPrompt:
    chunk = spec.chunk_tokens
    places = {number: place for place, number in enumerate(prompt.numbers)}
    loaded, start = 0, 0
    ahead: RecordedPass | None = None
    ends: dict[RecordedPass, int] = {}
    begins: list[int] = []
    last = last_pass(prompt)
    for each in prompt.passes:
        end = 0
        for step in each.ranks.values():
            for part in step.loads:
                if part.request == prompt.number and part.chunks:
                    first, behind = _places(part, places, chunk)
                    if not loaded and not spec.groups[part.group].rules.windowed:
                        start = first
                    loaded = max(loaded, prompt.hit if prompt.asked else behind)
                    ahead = each if each.ahead else ahead
            for part in step.saves:
                if part.request == prompt.number and any(number in places for number in part.chunks):
                    first, behind = _places(part, places, chunk)
                    begins.append(first)
                    end = max(end, behind)
        if not each.ahead and (last is None or each.opened <= last.opened):
            ends[each] = min(end, prompt.tokens)
    if not loaded and begins:
        start = min(begins)
    ranges: dict[RecordedPass, tuple[int, int]] = {}
    tokens = _tokens(prompt)
    at = min(max(start, loaded), tokens)
    for each, end in ends.items():
        upto = tokens if each is last else max(at, end)
        ranges[each] = at, upto
        at = upto
    return ReplayedPrompt(prompt, start, loaded, ranges, ahead, last)


def _tokens(prompt: RecordedPrompt) -> int:
    """Of a prompt. One that was never asked is known as far as it was loaded or saved; one more token is computed."""
    return prompt.tokens + (not prompt.asked)


def _places(part: PartSeen, places: Mapping[int, int], chunk: int) -> tuple[int, int]:
    """The first token of a part's chunks in their prompt, and the one behind them."""
    found = [places[number] for number in part.chunks if number in places]
    return (min(found) * chunk, (max(found) + 1) * chunk) if found else (0, 0)


class _Coming(NamedTuple):
    """A prompt's lookup was answered, or, without a prompt, the arena was emptied."""

    at: float
    prompt: RecordedPrompt | None


Story = Generator[float | None, None, None]
"""What an engine does: yields when it goes on, or None until it is told to."""


class _ReplayedEngine:
    """An engine: its lookups and passes, one behind the other."""

    def __init__(self, rerun: Rerun, engine: RecordedEngine, workers: Mapping[int, SimulatedWorker]) -> None:
        self._rerun, self._engine, self._workers = rerun, engine, workers
        self._clock, self._server, self._fitted = rerun.clock, rerun.server, rerun.fitted
        self._spec, self._settings = rerun.recorded.spec, rerun.settings
        self._as_recorded = rerun.settings.transfer.mode == rerun.recorded.settings.transfer.mode
        for worker in workers.values():
            self._server.attach(worker)
        self._one_by_one = engine.one_by_one
        self._guessed_until = -math.inf  # of a pass whose end is a guess, and so is that of all who waited for it
        self._prompts = {prompt: _prompt_of(prompt, self._spec) for prompt in engine.prompts}
        ranges = (each for prompt in self._prompts.values() for each in prompt.ranges.values())
        computes = any(end - begin >= self._spec.chunk_tokens for begin, end in ranges)
        saves = any(step.saves for each in engine.passes for step in each.ranks.values())
        self._stores = saves or not computes
        self._numbers = 0
        self._ended = 0.0
        self._awaits_loads = False
        self._story: Story = self._live()

    def begin(self) -> None:
        """Let it live."""
        self._clock.at(0.0, self._go_on)

    def _go_on(self) -> None:
        when = next(self._story, None)
        if when is not None:
            self._clock.at(when, self._go_on)

    def _await_loads(self, prompts: Sequence[ReplayedPrompt]) -> Story:
        """Wait until what is loaded ahead is in place."""
        while any(prompt.awaits for prompt in prompts):
            self._awaits_loads = True
            yield None

    def _live(self) -> Story:
        begin = self._fitted.begin
        places = {id(each): number for number, each in enumerate(self._engine.passes)}
        passes = [each for each in self._engine.passes if not each.ahead and not math.isnan(each.ended)]
        comes = [_Coming(prompt.heard, prompt) for prompt in self._engine.prompts if prompt.asked]
        if self._rerun.one_by_one:
            comes += [_Coming(at, None) for at in self._rerun.recorded.purges]
        comes.sort(key=lambda coming: coming.at)
        before = 0  # so many have come
        ended = begin  # when the pass before had ended, as recorded
        for each in passes:
            ready, ready_now = ended, -math.inf
            while before < len(comes) and comes[before].at <= each.opened:
                yield from self._come(comes[before], ended)
                before += 1
            mine = [self._prompts[prompt] for prompt in each.prompts]
            if not any(_amount(prompt, each) for prompt in mine if each in prompt.ranges) and any(
                each in prompt.ranges for prompt in mine
            ):
                ended = each.ended
                continue  # all of it is loaded
            yield from self._await_loads(mine)
            for prompt in mine:
                if next(iter(prompt.ranges), None) is not each:
                    continue
                ready = max(ready, self._ready(prompt, each))
                ready_now = max(ready_now, self._ready_now(prompt, each))
            gap = max(0.0, each.opened - max(ended, ready))
            opens = max(self._ended + gap, ready_now + gap)
            yield max(opens, self._clock.now)
            before = self._later(comes, before, each)
            yield from self._compute(each, places[id(each)], mine)
            ended, self._ended = each.ended, self._clock.now
        for coming in comes[before:]:
            yield from self._come(coming, ended)

    def _come(self, coming: _Coming, ended: float) -> Story:
        """What came after a pass had ended, as recorded."""
        since = self._ended + max(0.0, coming.at - ended) if self._one_by_one else coming.at - self._fitted.begin
        yield max(since, self._clock.now)
        self._happen(coming)

    def _happen(self, coming: _Coming) -> None:
        if coming.prompt is None:
            self._server.purge()
        else:
            self._look_up(self._prompts[coming.prompt])

    def _ready(self, prompt: ReplayedPrompt, place: RecordedPass) -> float:
        """When a prompt could be computed first, as recorded."""
        if prompt.ahead is not None:
            return prompt.ahead.ended
        if prompt.recorded.asked:
            return prompt.recorded.heard
        return -math.inf if self._one_by_one else place.opened

    def _ready_now(self, prompt: ReplayedPrompt, place: RecordedPass) -> float:
        """When it can be now."""
        if not prompt.recorded.asked:
            return -math.inf if self._one_by_one else place.opened - self._fitted.begin
        return max(prompt.asked_at, prompt.arrived_at)

    def _later(self, comes: Sequence[_Coming], before: int, each: RecordedPass) -> int:
        """What comes in the middle of a pass stays there; how many have come then."""
        opened = self._clock.now
        while before < len(comes) and comes[before].at < each.ended:
            coming = comes[before]
            before += 1
            at = opened + coming.at - each.opened
            if coming.prompt is not None:
                self._prompts[coming.prompt].asked_at = at
            self._clock.at(at, functools.partial(self._happen, coming))
        return before

    # Lookups -------------------------------------------------------------------------------------

    def _look_up(self, prompt: ReplayedPrompt) -> None:
        recorded, server, spec = prompt.recorded, self._server, self._spec
        prompt.asked_at = self._clock.now
        chunks, tail = digests(recorded)
        found = server.longest_hit(spec, chunks, _tokens(recorded), tail)
        self._rerun.hits.append(Sample(recorded.at - self._fitted.begin, found))
        way = self._way(prompt, found)
        if way is Mode.RECOMPUTE:
            return
        prompt.hit = found
        server.lease(_lease(self, prompt), self._keys(prompt))
        remaining = [each for each in prompt.ranges if prompt.left(each)[0] < prompt.left(each)[1]]
        if way is Mode.LAYERWISE and remaining:
            prompt.load_pass = remaining[0]
        elif way is Mode.BULK:
            self._load_ahead(prompt)
        else:  # nothing of it is computed: whoever asked did not come
            prompt.hit = 0

    def _way(self, prompt: ReplayedPrompt, found: int) -> Mode:
        """How what was found is used: as it was, where nothing says otherwise."""
        recorded = prompt.recorded
        if found <= prompt.start or (not prompt.ranges and prompt.ahead is None):
            return Mode.RECOMPUTE
        if self._as_recorded and (prompt.loaded or recorded.hit > prompt.start):
            if not prompt.loaded:
                return Mode.RECOMPUTE
            return Mode.BULK if prompt.ahead is not None else Mode.LAYERWISE
        mode = self._settings.transfer.mode
        if mode != "auto":
            return Mode(mode)
        spec, times = self._spec, self._rerun.times[0]
        return choose(
            ModeInputs(
                hit_tokens=found,
                new_tokens=max(1, recorded.tokens - found),
                layers=spec.num_layers,
                bytes_per_token=sum(
                    len(group.layers) * group.bytes_per_block / group.block_size for group in spec.groups
                )
                / spec.num_layers,
                link=times.cost,
                compute=self._fitted.compute,
                max_transfer_bytes=self._settings.transfer.byte_cap,
            )
        )

    def _keys(self, prompt: ReplayedPrompt) -> list[bytes]:
        keys: list[bytes] = []
        for rank in self._workers:
            for load in self._wanted(prompt, rank):
                keys += load.keys
        return keys

    def _wanted(self, prompt: ReplayedPrompt, rank: int) -> list[WantedLoad]:
        """What one rank loads of a prompt's hit."""
        recorded, spec, shard = prompt.recorded, self._spec, self._workers[rank].spec.shard
        chunk, numbers = spec.chunk_tokens, recorded.numbers
        wanted = []
        parts = _recorded_loads(recorded, rank) if prompt.hit == prompt.loaded else []
        if parts:
            for part in parts:
                keys = object_keys(map(numbered_digest, part.chunks), (part.group,), (shard,))
                wanted.append(self._load(prompt, part.group, keys, sum(part.blocks)))
            return wanted
        for number, group in enumerate(spec.groups):
            begin = max(group.rules.first_token(prompt.hit), prompt.start)
            at = range(begin // chunk, min(-(-prompt.hit // chunk), len(numbers)))
            keys = object_keys([numbered_digest(numbers[place]) for place in at], (number,), (shard,))
            first = begin // group.block_size
            blocks = 0
            for place in at:
                base = place * chunk // group.block_size
                kept = group.rules.keep(min(chunk, prompt.hit - place * chunk))
                blocks += sum(base + block >= first for block in kept)
            if blocks:
                wanted.append(self._load(prompt, number, keys, blocks))
        return wanted

    def _load(self, prompt: ReplayedPrompt, group: int, keys: Sequence[bytes], blocks: int) -> WantedLoad:
        return WantedLoad(_name(prompt), _lease(self, prompt), group, tuple(keys), blocks)

    def _load_ahead(self, prompt: ReplayedPrompt) -> None:
        """Load a hit before its prompt's first pass."""
        delay = max(0.0, prompt.ahead.opened - prompt.recorded.heard) if prompt.ahead is not None else 0.0
        prompt.awaits = True
        self._clock.at(self._clock.now + delay, lambda: self._begin_ahead(prompt))

    def _begin_ahead(self, prompt: ReplayedPrompt) -> None:
        self._numbers += 1
        number, pending = self._numbers, 1

        def over(worker: SimulatedWorker, loads: SimulatedLoads) -> None:
            self._server.loads_over(worker, loads)
            one_less()

        def one_less() -> None:
            nonlocal pending
            pending -= 1
            if not pending:
                prompt.awaits, prompt.arrived_at = False, self._clock.now
                if self._awaits_loads:
                    self._awaits_loads = False
                    self._go_on()

        for rank, worker in self._workers.items():
            wanted, failed = self._wanted(prompt, rank), _marking([prompt])
            there = self._server.open_step(worker, number, loads=wanted, saves=(), failed=failed)
            if there:
                pending += 1
                place = self._engine.passes.index(prompt.ahead) if prompt.ahead is not None else -1
                loads = self._start(worker, rank, number, there, place=place, over=over, layer_ready=_nothing)
                worker.advance(loads, self._spec.num_layers)
                self._server.close_step(worker, number)
        self._server.release(_lease(self, prompt))
        one_less()

    # Passes --------------------------------------------------------------------------------------

    def _compute(self, each: RecordedPass, place: int, mine: Sequence[ReplayedPrompt]) -> Story:
        """One pass, from its opening to its end."""
        for prompt in mine:
            if not prompt.recorded.asked and math.isnan(prompt.asked_at):
                self._look_up(prompt)
        yield from self._await_loads(mine)
        self._numbers += 1
        loading = [prompt for prompt in mine if prompt.load_pass is each]
        forward = ForwardPass(
            self._clock,
            self._numbers,
            self._layers(each, mine),
            notices=dict.fromkeys(range(self._spec.num_layers), self._fitted.notice_s)
            | (each.notices if self._rerun.residuals else {}),
            whole=each.whole and self._as_recorded,
            exposed=_ignored,
            computed=self._go_on,
        )
        failed = _marking(loading)
        for rank, worker in self._workers.items():
            loads = [load for prompt in loading for load in self._wanted(prompt, rank)]
            saves = self._saves(each, rank, mine)
            there = self._server.open_step(worker, forward.number, loads=loads, saves=saves, failed=failed)
            if there is not None:
                forward.opened.append(worker)
            if there:
                moving = self._start(
                    worker,
                    rank,
                    forward.number,
                    there,
                    place=place,
                    over=self._server.loads_over,
                    layer_ready=forward.look,
                )
                forward.loads.append((worker, moving))
        for prompt in loading:
            self._server.release(_lease(self, prompt))
        yield self._clock.now + max(0.0, each.began - each.opened)
        forward.begin()
        yield None
        lost = [prompt for prompt in mine if prompt.failed]
        waits_guessed = self._is_guess(each, mine, ()) or bool(forward.loads and not self._rerun.loads_known)
        guessed = waits_guessed or self._is_guess(each, mine, lost)
        again = sum(map(self._recomputed, lost))
        if again:
            yield self._clock.now + again
        if guessed:
            self._guessed_until = self._clock.now
        for worker in forward.opened:
            self._server.close_step(worker, forward.number)
        if forward.loads and each.timed:
            self._rerun.exposed.append(Sample(each.opened - self._fitted.begin, forward.exposed_s))
            self._rerun.guessed_steps += waits_guessed
        for prompt in mine:
            if prompt.last is each and prompt.recorded.timed:
                took = self._clock.now - prompt.asked_at
                self._rerun.prefill.append(Sample(prompt.recorded.at - self._fitted.begin, took))
                self._rerun.guessed += prompt.asked_at <= self._guessed_until

    def _layers(self, each: RecordedPass, mine: Sequence[ReplayedPrompt]) -> list[float]:
        """How long each layer computes: as it did, for as many tokens more or less as hits are shorter or longer."""
        count = self._spec.num_layers
        layers = each.layers
        if len(layers) != count:
            layer_s = each.layer_s or max(0.0, each.ended - each.began) / count
            layers = [layer_s] * count
        tokens, context = each.work
        pairs = attention_pairs(tokens, context)
        here = [prompt for prompt in mine if each in prompt.ranges]
        if not tokens:
            was = [prompt.ranges[each] for prompt in here]
            tokens = sum(end - begin for begin, end in was)
            pairs = sum(attention_pairs(end - begin, begin) for begin, end in was)
        cost = self._fitted.compute
        if cost is None or not tokens:
            return layers if self._rerun.residuals else self._by_shares(sum(layers) / count)
        now_tokens, now_pairs = float(tokens), pairs
        for prompt in here:
            begin, _ = prompt.ranges[each]
            left, _ = prompt.left(each)
            now_tokens -= left - begin
            now_pairs -= attention_pairs(left - begin, begin)
            first, behind = prompt.more(each)
            now_tokens += behind - first
            now_pairs += attention_pairs(behind - first, first)
        was_s = cost.fixed + tokens * cost.token + pairs * cost.pair
        now_s = cost.fixed + max(1.0, now_tokens) * cost.token + max(1.0, now_pairs) * cost.pair
        if not self._rerun.residuals and each.work[0]:
            return self._by_shares(now_s)
        if now_s > was_s or not was_s:
            more = self._by_shares(now_s - was_s)
            return [seconds + added for seconds, added in zip(layers, more, strict=True)]
        return [seconds * now_s / was_s for seconds in layers]

    def _by_shares(self, mean_s: float) -> list[float]:
        """How long each layer computes where the mean one takes so long."""
        return [mean_s * share for share in self._fitted.shares]

    def _is_guess(self, each: RecordedPass, mine: Sequence[ReplayedPrompt], lost: Sequence[ReplayedPrompt]) -> bool:
        """Does a pass compute more or less than it did, and it is not known what that takes?

        :param lost: those whose hit is computed because its load has failed.
        """
        here = [prompt for prompt in mine if each in prompt.ranges]
        again = sum(prompt.hit - prompt.start for prompt in lost)
        tokens = sum(_amount(prompt, each) for prompt in here) + again
        if tokens == sum(end - begin for begin, end in (prompt.ranges[each] for prompt in here)):
            return False
        context = max(prompt.recorded.tokens for prompt in (*here, *lost))
        if self._fitted.reach.tells(tokens, context):
            return False
        self._rerun.guessed_tokens = max(self._rerun.guessed_tokens, tokens)
        return True

    def _recomputed(self, prompt: ReplayedPrompt) -> float:
        """How long it takes to compute a hit whose load has failed."""
        prompt.failed = False
        cost, tokens = self._fitted.compute, prompt.hit - prompt.start
        return self._spec.num_layers * cost.layer_seconds(tokens, prompt.start) if cost is not None else 0.0

    def _saves(
        self, each: RecordedPass, rank: int, mine: Sequence[ReplayedPrompt]
    ) -> list[tuple[str, int, list[NewObject]]]:
        """What a rank saves in a pass: what it did, less what is hit now, and what is not hit any more.

        An engine that has computed whole chunks and saved nothing goes on so.
        """
        step = each.ranks.get(rank)
        spec, shard = self._spec, self._workers[rank].spec.shard
        chunk = spec.chunk_tokens
        recorded = {(part.request, part.group): part for part in step.saves} if step is not None else {}
        saves: list[tuple[str, int, list[NewObject]]] = []
        for prompt, place in itertools.product(mine if self._stores else (), range(len(spec.groups))):
            part = recorded.get((prompt.recorded.number, place))
            numbers, group = prompt.recorded.numbers, spec.groups[place]
            places = {number: at for at, number in enumerate(numbers)}
            again, full = prompt.whole_again(each, chunk), len(group.rules.keep(chunk))
            rows = [
                row
                for row in (zip(part.chunks, part.blocks, part.tokens, strict=True) if part is not None else ())
                if places.get(row[0], len(numbers)) * chunk >= prompt.have - prompt.have % chunk
            ]
            did = {row[0] for row in rows}
            rows[:0] = [(number, full, chunk) for number in numbers[again] if number not in did]
            objects = []
            for number, blocks, tokens in rows:
                at = places.get(number, 0)
                above = numbered_digest(numbers[at - 1]) if at else ROOT
                key, parent = object_keys((numbered_digest(number), above), (place,), (shard,))
                nbytes = object_bytes(group, blocks)
                objects.append(NewObject(key, nbytes, blocks, tokens, parent if tokens < chunk else b""))
            if objects:
                saves.append((_name(prompt), place, objects))
        return saves

    def _start(
        self,
        worker: SimulatedWorker,
        rank: int,
        number: int,
        loads: Sequence[WantedLoad],
        *,
        place: int,
        over: Callable[[SimulatedWorker, SimulatedLoads], None],
        layer_ready: Callable[[], None],
    ) -> SimulatedLoads:
        """Let a rank move what a step loads.

        :param place: of the pass among the recorded ones; -1 = there was none.
        """
        noise = self._fitted.noise[self._engine.number, rank].get(place) if self._rerun.residuals else None
        return worker.load(
            number,
            blocks_of(loads),
            self._server.load_deadline,
            over=lambda over_now: over(worker, over_now),
            layer_ready=layer_ready,
            noise=noise,
            lag=self._fitted.lag_s if noise is None else 0.0,
        )


def _recorded_loads(prompt: RecordedPrompt, rank: int) -> list[PartSeen]:
    """What a rank has loaded of a prompt, in the first pass that did."""
    for each in prompt.passes:
        step = each.ranks.get(rank)
        parts = [part for part in step.loads if part.request == prompt.number] if step is not None else []
        if parts:
            return parts
    return []


def _amount(prompt: ReplayedPrompt, place: RecordedPass) -> int:
    """Tokens of it that a pass computes."""
    (begin, end), (first, behind) = prompt.left(place), prompt.more(place)
    return end - begin + behind - first


def _lease(engine: _ReplayedEngine, prompt: ReplayedPrompt) -> tuple[str, int, int]:
    return ("hit", id(engine), id(prompt))


def _name(prompt: ReplayedPrompt) -> str:
    return str(prompt.recorded.number)


def _marking(loading: Sequence[ReplayedPrompt]) -> Failed:
    """Note on each of these prompts whose load has failed that it has."""
    names = {_name(prompt): prompt for prompt in loading}

    def failed(request: str) -> None:
        names[request].failed = True

    return failed


def _nothing() -> None:
    """Nobody waits for a layer of a load ahead."""


def _ignored(_: float) -> None:
    """The pass adds its waits up itself."""
