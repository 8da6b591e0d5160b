"""What the engine asks of whatever moves its KV: the seam between the engine and its glue."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Protocol

from layerflow_engine.request import Request, TokenSpan


class StepHooks(Protocol):
    """One forward pass, as its transfers see it."""

    def wait_layer(self, layer: int) -> Collection[str]:
        """Before anything reads or writes `layer`'s cache: ids of requests of which not every byte arrived.

        Such a request is out of the step: nothing of it is computed or saved any more.
        """
        ...

    def layer_done(self, layer: int) -> None:
        """The new tokens' KV of `layer` is written."""
        ...

    def __enter__(self) -> StepHooks: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Connection(Protocol):
    """Where KV comes from and goes to."""

    def lookup(self, request: Request) -> int:
        """Leading prompt tokens that can be loaded; fewer than the prompt has."""
        ...

    def open_step(self, spans: Sequence[TokenSpan]) -> StepHooks:
        """A forward pass over `spans` begins."""
        ...

    def poll(self) -> None:
        """Hear what has ended."""
        ...

    def busy(self, request: Request) -> bool:
        """May a transfer still read or write this request's blocks?"""
        ...

    def abort(self, request: Request) -> None:
        """Stop its transfers; they have stopped when it is no longer busy."""
        ...

    def forget(self, request: Request) -> None:
        """It is over, and no transfer of it is left."""
        ...

    def reset(self, model_content: str = "") -> None:
        """The weights are being replaced, by those of this name if they have one: what was stored is no use now."""
        ...


class NoStep:
    """A forward pass with nothing to move."""

    def wait_layer(self, layer: int) -> Collection[str]:
        """Every byte is in place."""
        return ()

    def layer_done(self, layer: int) -> None:
        """Nobody waits for it."""

    def __enter__(self) -> NoStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class NullConnection:
    """An engine on its own: every prompt is computed, nothing is kept."""

    def lookup(self, request: Request) -> int:
        """A miss."""
        return 0

    def open_step(self, spans: Sequence[TokenSpan]) -> StepHooks:
        """Nothing to move."""
        return NoStep()

    def poll(self) -> None:
        """Nothing ends."""

    def busy(self, request: Request) -> bool:
        """Never."""
        return False

    def abort(self, request: Request) -> None:
        """Nothing to stop."""

    def forget(self, request: Request) -> None:
        """Nothing to forget."""

    def reset(self, model_content: str = "") -> None:
        """Nothing is stored."""
