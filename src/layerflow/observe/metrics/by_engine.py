"""Counters labelled by engine and model, with a bound on how many pairs are shown."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from prometheus_client import CollectorRegistry, Counter

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
        self._gone: OrderedDict[str, None] = OrderedDict()
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
        self._gone.pop(pair[0], None)
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
        """No client of this engine is connected any more."""
        if not any(name == engine for name, _ in self._pairs):
            return
        self._gone[engine] = None
        if len(self._gone) > MAX_GONE:
            oldest, _ = self._gone.popitem(last=False)
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
