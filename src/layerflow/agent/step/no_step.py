"""A step with nothing to move, which must cost the engine nothing."""

from __future__ import annotations

from layerflow.agent.values import READY, FailedBlocks, LoadResult


class NoStep:
    """A step with nothing to move: every call returns at once."""

    number = -1
    num_layers = 0
    failed: tuple[FailedBlocks, ...] = ()

    def wait_layer(self, layer: int) -> LoadResult:
        """Ready."""
        return READY

    def is_ready(self, layer: int) -> bool:
        """Always."""
        return True

    def want_all(self) -> None:
        """There is nothing to load."""

    def wait_all(self) -> LoadResult:
        """Ready."""
        return READY

    def await_layer(self, layer: int) -> LoadResult:
        """Ready."""
        return READY

    def await_all(self) -> LoadResult:
        """Ready."""
        return READY

    def order(self, layer: int) -> None:
        """Nothing was copied."""

    def wait_loaded(self, timeout_s: float) -> bool:
        """There is nothing to load."""
        return True

    def begin_loads(self, timeout_s: float) -> bool:
        """There is nothing to load."""
        return True

    def layer_done(self, layer: int, event: object = None) -> None:
        """Nothing waits for it."""

    def close(self, ok: bool | None = None) -> None:
        """Nothing is open."""

    def __enter__(self) -> NoStep:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None


NO_STEP = NoStep()
