"""Counters labelled by engine and model, with a bound on how many pairs are shown."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from prometheus_client import CollectorRegistry, Counter

EngineLabels = tuple[str, str]
"""An engine's name and its model's, as label values."""

LABELS: Final = ("engine", "model")
MAX_PAIRS: Final = 128
MAX_LABEL_CHARS: Final = 96


class ByEngine:
    """Counters with the labels ``engine`` and ``model``.

    Engines name themselves, and a restarted one may have a new name: past :data:`MAX_PAIRS` pairs the series of the
    pair that has counted nothing for longest are dropped, so that no peer can grow the exposition without end.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._counters: list[tuple[Counter, tuple[tuple[str, ...], ...]]] = []
        self.unlabelled: list[str] = []  #: names of those with no further label, without prefix
        self._pairs: OrderedDict[EngineLabels, EngineLabels] = OrderedDict()

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
        shown = self._pairs.get(pair)
        if shown is not None:
            self._pairs.move_to_end(pair)
            return shown
        engine, model = pair
        shown = self._pairs[pair] = engine[:MAX_LABEL_CHARS], model[:MAX_LABEL_CHARS]
        if len(self._pairs) > MAX_PAIRS:
            _, dropped = self._pairs.popitem(last=False)
            if dropped not in self._pairs.values():
                self._each(dropped, remove=True)
        self._each(shown, remove=False)
        return shown

    def _each(self, pair: EngineLabels, *, remove: bool) -> None:
        for counter, values in self._counters:
            for value in values:
                (counter.remove if remove else counter.labels)(*pair, *value)
