"""What happened, counted, and shown in Prometheus's text format."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from layerflow._version import __version__
from layerflow.expiring import ExpiringSet
from layerflow.observe.collectors import (
    CountsSeen,
    DescribedMetrics,
    DescribedStatistics,
    HandoffMetrics,
    HandoffsLike,
    PeerMetrics,
    PeerStatistics,
    RecorderLike,
    TierMetrics,
    TierStatistics,
)
from layerflow.observe.spread import Spread

if TYPE_CHECKING:
    from layerflow.flow.events import Limits
    from layerflow.flow.state import FlowStatistics
    from layerflow.pool.base import PoolStatistics
    from layerflow.wire.messages import Figures


# Counters labelled by engine and model, with a bound on how many pairs are shown.


EngineLabels = tuple[str, str]
"""An engine's name and its model's, as label values."""

LABELS: Final = ("engine", "model")
MAX_PAIRS: Final = 128
MAX_GONE: Final = 8
"""Engines whose series stay after they have gone: for the next scrape, and for the engine that is back by its name."""
MAX_LABEL_CHARS: Final = 96


class ByEngine:
    """Counters with the labels ``engine`` and ``model``.

    Engines name themselves, and a restarted one may have a new name. Of engines that have gone the series of the last
    :data:`MAX_GONE` stay; and past :data:`MAX_PAIRS` pairs the series of the pair that has counted nothing for longest
    are dropped, so that no peer can grow the exposition without end. What dropped series had counted is in
    :attr:`dropped`, so that sums over all engines never fall.

    :ivar dropped: by sample name and further label, what the series that are not shown any more had counted.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._counters: list[tuple[Counter, tuple[tuple[str, ...], ...]]] = []
        self.unlabelled: list[str] = []  #: names of those with no further label, without prefix
        self._pairs: OrderedDict[EngineLabels, EngineLabels] = OrderedDict()
        self._gone: ExpiringSet[str] = ExpiringSet(MAX_GONE)
        self.dropped: dict[tuple[str, str], float] = {}

    def counter(self, name: str, help_: str, *further: tuple[str, tuple[str, ...]]) -> Counter:
        """A counter ``layerflow_<name>_total`` by engine and model.

        :param further: at most one more label with its values.
        """
        names = tuple(label for label, _ in further)
        made = Counter(f"layerflow_{name}", help_, (*LABELS, *names), registry=self._registry)
        values = tuple((value,) for value in further[0][1]) if further else ((),)
        self._counters.append((made, values))
        if not further:
            self.unlabelled.append(f"{name}_total")
        return made

    def labels(self, pair: EngineLabels) -> EngineLabels:
        """The label values for this engine and model; the first time, all its series appear at 0."""
        self._gone.discard(pair[0])
        shown = self._pairs.get(pair)
        if shown is not None:
            self._pairs.move_to_end(pair)
            return shown
        engine, model = pair
        shown = self._pairs[pair] = engine[:MAX_LABEL_CHARS], model[:MAX_LABEL_CHARS]
        if len(self._pairs) > MAX_PAIRS:
            self._drop(next(iter(self._pairs)))
        for counter, values in self._counters:
            for value in values:
                counter.labels(*shown, *value)
        return shown

    def gone(self, engine: str) -> None:
        """Note that no client of this engine is connected any more."""
        if not any(name == engine for name, _ in self._pairs):
            return
        oldest = self._gone.add(engine)
        if oldest is not None:
            for pair in [pair for pair in self._pairs if pair[0] == oldest]:
                self._drop(pair)

    def _drop(self, pair: EngineLabels) -> None:
        shown = self._pairs.pop(pair)
        if shown in self._pairs.values():
            return
        own = dict(zip(LABELS, shown, strict=True))
        for counter, values in self._counters:
            for metric in counter.collect():
                for sample in metric.samples:
                    if sample.name.endswith("_total") and own.items() <= sample.labels.items():
                        further = next((value for label, value in sample.labels.items() if label not in LABELS), "")
                        key = sample.name, further
                        self.dropped[key] = self.dropped.get(key, 0.0) + sample.value
            for value in values:
                counter.remove(*shown, *value)


EXPOSED_BUCKETS_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
LOOKUP_BUCKETS_S: Final = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0)
BATCH_BUCKETS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
LAG_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
MAX_REASONS: Final = 32
MAX_REASON_CHARS: Final = 48
OTHER: Final = "other"


class WithoutCreated(Collector):
    """A registry without its ``_created`` series: one timestamp per counter that nothing here reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Metrics:
    """The counters of one server, in a registry of their own.

    Methods are named by what happened and are meant for the server's loop: 1 to 10 microseconds each.
    Two servers in one process do not share figures, and nothing enters the engine's own registry.

    :ivar exposed_load: of steps with loads, how long the engine stood still for them: finer than the histogram.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"layerflow_{name}", help_, labels, registry=registry)

        def gauge(name: str, help_: str, *labels: str) -> Gauge:
            return Gauge(f"layerflow_{name}", help_, labels, registry=registry)

        def histogram(name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"layerflow_{name}", help_, labels, buckets=buckets, registry=registry)

        self._by_engine = by_engine = ByEngine(registry)
        directions = "direction", ("load", "save")

        gauge("build_info", "1, labelled with the running version.", "version").labels(__version__).set(1)
        self._sessions = gauge("sessions", "Attached engine workers.")
        self._bound = gauge("bound_groups", "Cache groups that only engines of one tensor size can read.", "kind")

        self._opened = by_engine.counter("steps_opened", "Steps that engines opened.")
        self._steps = by_engine.counter("steps", "Steps of which nothing is left to do.")
        self._loaded = by_engine.counter("loaded_bytes", "Bytes copied from the arena into engine memory.")
        self._saved = by_engine.counter("saved_bytes", "Bytes copied from engine memory into the arena.")
        self._transfer = by_engine.counter(
            "transfer_seconds", "Time in which a step's batches were moving.", directions
        )
        self._hidden = by_engine.counter("hidden_seconds", "The part of it that overlapped compute.", directions)
        self._exposed = by_engine.counter(
            "exposed_seconds", "The part that held the engine or outlasted compute.", directions
        )
        self._exposed_load = histogram(
            "step_exposed_load_seconds",
            "Per step with loads: how long the engine stood still for them.",
            EXPOSED_BUCKETS_S,
        )
        self.exposed_load = Spread()
        self._batch = histogram(
            "batch_seconds", "From a batch's grant to its report; sampled, one a report.", BATCH_BUCKETS_S, "direction"
        )

        self._lookups = by_engine.counter("lookups", "Lookups answered.")
        self._hit_tokens = by_engine.counter("lookup_hit_tokens", "Tokens that a lookup found loadable.")
        self._miss_tokens = by_engine.counter("lookup_miss_tokens", "Tokens that a lookup did not find.")
        self._lookup_time = histogram(
            "lookup_seconds",
            "From a lookup's arrival to its answer, the store behind the arena included.",
            LOOKUP_BUCKETS_S,
        )

        self._open_steps = gauge("open_steps", "Steps of which something is left to do.")
        self._inflight = gauge("inflight_bytes", "Bytes granted and not yet reported.", "direction")
        self._inflight_batches = gauge("inflight_batches", "Batches granted and not yet reported.", "direction")
        self._unsaved = gauge("unsaved_bytes", "Bytes of open saves that are not stored yet.")
        self._flow_counters = {
            "expired_jobs": counter("expired", "Loads or saves of a step that were cut at their deadline."),
            "late_reports": counter("late_reports", "Reports about steps, batches or sessions that were gone."),
            "aborted_requests": counter("aborted_requests", "Requests that engines gave up."),
        }

        self._failed_loads = counter("failed_loads", "Load parts that the engine had to recompute.", "reason")
        self._failed_saves = counter("failed_saves", "Save parts that were revoked.", "reason")
        self._shed = counter("shed_saves", "Save parts dropped to keep out of the way.")
        self._full = counter("full_saves", "Objects not saved because the pool had no room.")

        self._commits = counter("commits", "Objects published.")
        self._revokes = counter("revokes", "Reserved objects given back unpublished.")
        self._evictions = counter("evictions", "Objects evicted.")
        self._evicted = counter("evicted_bytes", "Bytes of the objects evicted.")
        self._capacity = gauge("pool_capacity_bytes", "Size of the arena.")
        self._used = gauge("pool_used_bytes", "Arena bytes that hold objects.")
        self._warm = gauge("pool_warm_bytes", "Arena bytes already populated with pages.")
        self._objects = gauge("pool_objects", "Complete objects.")
        self._pinned = gauge("pool_pinned_objects", "Objects pinned by readers.")
        self._half_written = gauge("pool_half_written_objects", "Reserved objects not yet published.")
        self._seen = CountsSeen()

        self._tier = TierMetrics(registry)
        self._peers = PeerMetrics(registry)
        self._handoffs = HandoffMetrics(registry)
        self._described = DescribedMetrics(registry)

        self._recording = gauge("recording_up", "1 while what happens is being recorded.")
        self._recording_bytes = gauge("recording_bytes", "Size of the file that is being written.")
        self._recorded = counter("recorded_events", "Records written to recordings.")
        self._unrecorded = counter("unrecorded_events", "Events that recordings lack: their writer was behind.")

        self._protocol_errors = counter("protocol_errors", "Messages refused.", "code")
        self._housekeeping_failures = counter(
            "housekeeping_failures", "Rounds of the server's upkeep that failed; see its log."
        )
        self._lag = histogram("loop_lag_seconds", "How much later than asked the server's loop woke up.", LAG_BUCKETS_S)
        self._lag_max = gauge("loop_lag_max_seconds", "The largest loop lag since start.")
        self._largest_lag = 0.0

        self._limit_layers = gauge("limit_prefetch_layers", "Layers that loads may run ahead; 0 = bytes decide.")
        self._limit_blocks = gauge("limit_batch_blocks", "Blocks of one batch.")
        self._limit_bytes = gauge("limit_batch_bytes", "Bytes of one batch.")
        self._limit_inflight = gauge("limit_inflight_bytes", "Bytes granted and not yet reported.")
        self._limit_backlog = gauge("limit_save_backlog_bytes", "Unsaved bytes past which saves are shed.")
        self._limit_stagger = gauge("limit_stagger_seconds", "Distance of neighbouring stagger slots; 0 = off.")

        self._config = gauge("config_info", "1, labelled with the file whose settings hold.", "path", "sha256")
        self._config_applied = gauge("config_applied_timestamp_seconds", "When these were taken, Unix time.")
        self._config_refused = gauge(
            "config_refused_timestamp_seconds", "Since when the file is refused or gone, Unix time; 0 = it is not."
        )
        self._trial = gauge("trial_up", "1 while a client tries other settings than the file's.")
        self._config_refusals = counter("config_refusals", "Edits of the file that were refused.")

        self._reasons: dict[Counter, set[str]] = {}

    def sessions(self, count: int, bound: Mapping[str, int] = MappingProxyType({})) -> None:
        """Set how many engine workers are attached.

        :param bound: by kind, how many of their models' cache groups only workers of the same tensor size can read.
        """
        self._sessions.set(count)
        self._bound.clear()
        for kind, groups in bound.items():
            self._bound.labels(kind).set(groups)

    def engine_gone(self, engine: str) -> None:
        """No client of this engine, by its name, is connected any more."""
        self._by_engine.gone(engine)

    def step_opened(self, of: EngineLabels, *, full: int = 0, missing: int = 0) -> None:
        """A step was planned.

        :param of: the engine and its model.
        :param full: objects of its saves that found no room in the pool.
        :param missing: parts of its loads whose objects were gone; counted as failed loads.
        """
        self._opened.labels(*self._by_engine.labels(of)).inc()
        self._full.inc(full)
        if missing:
            self.load_failed("missing", missing)

    def step_done(self, of: EngineLabels, loaded_bytes: int, saved_bytes: int) -> None:
        """Nothing of a step is left to do; it moved so many bytes."""
        labels = self._by_engine.labels(of)
        self._steps.labels(*labels).inc()
        self._loaded.labels(*labels).inc(loaded_bytes)
        self._saved.labels(*labels).inc(saved_bytes)

    def batch_done(self, direction: str, seconds: float) -> None:
        """A batch was reported so long after its grant."""
        self._batch.labels(direction).observe(max(0.0, seconds))

    def step_measured(self, of: EngineLabels, measured: Figures) -> None:
        """An agent reported a finished step's times; see :func:`layerflow.observe.trace.figures`."""
        if measured.load_transfer_s > 0 or measured.load_exposed_s > 0:
            self._exposed_load.observe(measured.load_exposed_s)
            self.exposed_load.add(measured.load_exposed_s)
        labels = self._by_engine.labels(of)
        for direction, transfer, exposed in (
            ("load", measured.load_transfer_s, measured.load_exposed_s),
            ("save", measured.save_transfer_s, measured.save_exposed_s),
        ):
            self._transfer.labels(*labels, direction).inc(max(0.0, transfer))
            self._exposed.labels(*labels, direction).inc(max(0.0, exposed))
            self._hidden.labels(*labels, direction).inc(max(0.0, transfer - exposed))

    def lookup(self, of: EngineLabels, hit_tokens: int, miss_tokens: int, seconds: float) -> None:
        """A lookup found `hit_tokens` loadable and `miss_tokens` not, and was answered after so long."""
        labels = self._by_engine.labels(of)
        self._lookups.labels(*labels).inc()
        self._hit_tokens.labels(*labels).inc(max(0, hit_tokens))
        self._miss_tokens.labels(*labels).inc(max(0, miss_tokens))
        self._lookup_time.observe(max(0.0, seconds))

    def lookups_missed(self, of: EngineLabels, lookups: int, tokens: int) -> None:
        """A client knew without asking that so many lookups, of so many tokens together, would find nothing."""
        labels = self._by_engine.labels(of)
        self._lookups.labels(*labels).inc(lookups)
        self._miss_tokens.labels(*labels).inc(tokens)

    def load_failed(self, reason: str, parts: int = 1) -> None:
        """Load parts failed and the engine recomputes their blocks."""
        self._failed_loads.labels(self._bounded(self._failed_loads, reason)).inc(parts)

    def save_failed(self, reason: str, parts: int = 1) -> None:
        """Save parts were revoked for another reason than shedding."""
        self._failed_saves.labels(self._bounded(self._failed_saves, reason)).inc(parts)

    def saves_shed(self, parts: int = 1) -> None:
        """Save parts were dropped because the backlog was full."""
        self._shed.inc(parts)

    def protocol_error(self, code: str) -> None:
        """A message was refused with this error code."""
        self._protocol_errors.labels(self._bounded(self._protocol_errors, code)).inc()

    def housekeeping_failed(self) -> None:
        """A round of the server's upkeep failed."""
        self._housekeeping_failures.inc()

    def loop_lag(self, seconds: float) -> None:
        """The loop woke up so much later than asked."""
        self._lag.observe(max(0.0, seconds))
        if seconds > self._largest_lag:
            self._largest_lag = seconds
            self._lag_max.set(seconds)

    def limits(self, limits: Limits) -> None:
        """Set the caps that hold from now on."""
        self._limit_layers.set(limits.prefetch_layers)
        self._limit_blocks.set(limits.max_transfer_blocks)
        self._limit_bytes.set(limits.max_transfer_bytes)
        self._limit_inflight.set(limits.max_granted_bytes)
        self._limit_backlog.set(limits.save_backlog_bytes)
        self._limit_stagger.set(limits.stagger_us / 1e6)

    def config_file(self, path: str, sha256: str, applied_at: float, *, refused_at: float, refusals: int) -> None:
        """Show the watched file's state. Times are seconds since the epoch, 0 = never.

        :param refusals: since the start.
        """
        self._config.clear()
        self._config.labels(path, sha256).set(1)
        self._config_applied.set(applied_at)
        self._config_refused.set(refused_at)
        self._seen.raise_to(self._config_refusals, refusals)

    def trial(self, *, on: bool) -> None:
        """Show whether a client tries settings."""
        self._trial.set(on)

    def pool(self, statistics: PoolStatistics) -> None:
        """A fresh snapshot of the pool. Its counts since start become counters; a restarted pool adds on."""
        self._capacity.set(statistics.capacity_bytes)
        self._used.set(statistics.used_bytes)
        self._warm.set(statistics.warm_bytes)
        self._objects.set(statistics.objects)
        self._pinned.set(statistics.pinned)
        self._half_written.set(statistics.half_written)
        for counter, count in (
            (self._commits, statistics.commits),
            (self._revokes, statistics.revoked),
            (self._evictions, statistics.evictions),
            (self._evicted, statistics.evicted_bytes),
        ):
            self._seen.raise_to(counter, count)

    def flow(self, statistics: FlowStatistics) -> None:
        """A fresh snapshot of the core."""
        self._open_steps.set(statistics.steps)
        self._inflight.labels("load").set(statistics.load_inflight_bytes)
        self._inflight.labels("save").set(statistics.save_inflight_bytes)
        self._inflight_batches.labels("load").set(statistics.load_inflight_batches)
        self._inflight_batches.labels("save").set(statistics.save_inflight_batches)
        self._unsaved.set(statistics.unsaved_bytes)
        for name, counter in self._flow_counters.items():
            self._seen.raise_to(counter, getattr(statistics, name))

    def recording(self, statistics: RecorderLike) -> None:
        """A fresh snapshot of the recording; its counts begin anew with each."""
        self._recording.set(statistics.on)
        self._recording_bytes.set(statistics.nbytes if statistics.on else 0)
        self._seen.raise_to(self._recorded, statistics.events)
        self._seen.raise_to(self._unrecorded, statistics.dropped)

    def described(self, statistics: DescribedStatistics) -> None:
        """A fresh snapshot of what engines have said of their chunks."""
        self._described.read(statistics)

    def handoffs(self, statistics: HandoffsLike, followed: int, following: int) -> None:
        """Hand-offs; objects that were followed since the start, and those of them that are not stored yet."""
        self._handoffs.update(statistics, followed, following)

    def tier(self, statistics: TierStatistics) -> None:
        """A fresh snapshot of what lies behind the arena."""
        self._tier.read(statistics)

    def peers(self, statistics: PeerStatistics) -> None:
        """A fresh snapshot of what is read from peers, and lent."""
        self._peers.read(statistics)

    def render(self) -> bytes:
        """Everything in Prometheus's text format 0.0.4."""
        return generate_latest(WithoutCreated(self._registry))

    def summary(self) -> dict[str, float | dict[str, float]]:
        """The figures by name, without the ``layerflow_`` prefix, for ``layerflow status``.

        A labelled figure is a dict by its label, summed over engines and models, those whose series were dropped
        included; a histogram is only its count and sum. On top of the exposition: ``overlap`` by direction, hidden ÷
        transfer seconds, and ``lookup_hit_ratio``.
        """
        figures: dict[str, float | dict[str, float]] = dict.fromkeys(self._by_engine.unlabelled, 0.0)
        for metric in self._registry.collect():
            for sample in metric.samples:
                name = sample.name.removeprefix("layerflow_")
                if name.endswith(("_created", "_bucket", "_info")):
                    continue
                own = [value for label, value in sample.labels.items() if label not in LABELS]
                if own:
                    series = figures.setdefault(name, {})
                    assert isinstance(series, dict)
                    series[own[0]] = series.get(own[0], 0.0) + sample.value
                else:
                    before = figures.setdefault(name, 0.0)
                    assert isinstance(before, float)
                    figures[name] = before + sample.value
        for (sample_name, label), value in self._by_engine.dropped.items():
            name = sample_name.removeprefix("layerflow_")
            known = figures.setdefault(name, {} if label else 0.0)
            if isinstance(known, dict):
                known[label] = known.get(label, 0.0) + value
            else:
                figures[name] = known + value
        hidden, transfer = figures.get("hidden_seconds_total", {}), figures.get("transfer_seconds_total", {})
        assert isinstance(hidden, dict) and isinstance(transfer, dict)
        figures["overlap"] = {way: hidden[way] / total for way, total in transfer.items() if total > 0}
        hit, miss = figures["lookup_hit_tokens_total"], figures["lookup_miss_tokens_total"]
        assert isinstance(hit, float) and isinstance(miss, float)
        figures["lookup_hit_ratio"] = hit / (hit + miss) if hit + miss > 0 else 0.0
        return figures

    def _bounded(self, counter: Counter, reason: str) -> str:
        """`reason` as a label value; past :data:`MAX_REASONS` different ones, ``"other"``.

        Reasons come from other processes: a peer must not be able to grow the exposition without end.
        """
        known = self._reasons.setdefault(counter, set())
        reason = reason[:MAX_REASON_CHARS]
        if reason not in known:
            if len(known) >= MAX_REASONS:
                return OTHER
            known.add(reason)
        return reason
