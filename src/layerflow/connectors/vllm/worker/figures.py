"""What a worker counts and measures of its transfers, for vLLM's statistics."""

from __future__ import annotations

from layerflow.observe.trace import StepFigures

FIGURES = {
    "load_bytes": "Bytes loaded from the pool.",
    "load_seconds": "Time during which loads were moving.",
    "load_exposed_seconds": "Time that the engine stood still for loads.",
    "load_hidden_seconds": "Load time that compute covered.",
    "save_bytes": "Bytes saved to the pool.",
    "save_seconds": "Time during which saves were moving.",
    "save_exposed_seconds": "Save time that outlasted compute.",
    "step_loads": "Requests that were loaded in the step, layer by layer.",
    "background_loads": "Requests that waited until they were loaded.",
    "failed_loads": "Requests of which a load failed; their tokens were recomputed.",
    "failed_saves": "Saves that failed; they cost a later miss.",
    "shed_saves": "Saves dropped to keep out of the way.",
    "revoked_saves": "Steps whose saves were given up because vLLM reused their blocks.",
}
"""Every figure, summed over steps and ranks, with what it counts."""


class StepCounters:
    """One worker's figures since they were last taken."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: float) -> None:
        """Add up :data:`FIGURES`."""
        if value:
            self._sums[name] = self._sums.get(name, 0) + value

    def moved(self, load: StepFigures, save: StepFigures) -> None:
        """A step has finished."""
        for name, value in (
            ("load_bytes", load.bytes),
            ("load_seconds", load.transfer_ms / 1e3),
            ("load_exposed_seconds", load.exposed_ms / 1e3 if load.bytes else 0.0),
            ("load_hidden_seconds", load.hidden_ms / 1e3),
            ("save_bytes", save.bytes),
            ("save_seconds", save.transfer_ms / 1e3),
            ("save_exposed_seconds", save.exposed_ms / 1e3),
        ):
            self.add(name, value)

    def take(self) -> dict[str, float]:
        """The figures that are not 0, and start over."""
        taken, self._sums = self._sums, {}
        return taken
