"""One guard for every hook of an engine: what goes wrong in one never ends the engine.

An engine's scheduler and its workers end with whatever their connector raises. What a request says, or is, can hurt
that request only: it is computed without layerflow. Where a hook is of a whole step, the step goes on without
layerflow, and each load that the engine was promised is reported as failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import structlog

log = structlog.get_logger("layerflow.connector")

P = ParamSpec("P")
R = TypeVar("R")


def nothing() -> None:
    """What most hooks answer."""


class Side(Protocol):
    """What has hooks: a scheduler's side, or a worker's."""

    def hook_failed(self, hook: str, subject: Any) -> None:
        """Leave out what the hook was about.

        :param hook: its name.
        :param subject: its first argument: a request, or what tells of a step; None = it has none.
        """
        ...


S = TypeVar("S", bound=Side)


def guarded(
    otherwise: Callable[[], R],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Guard a hook.

    :param otherwise: makes what is answered where the hook raises.
    """

    def decorate(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def guard(side: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(side, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - told, and the engine is told what follows from it
                subject = args[0] if args else None
                tell(hook.__name__, subject, error)
                attempt(functools.partial(side.hook_failed, hook.__name__, subject), hook.__name__)
                return otherwise()

        return guard

    return decorate


def attempt(call: Callable[[], object], hook: str) -> bool:
    """Do this; False where it raises, which is logged: what comes behind it is done all the same."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - told
        tell(hook, None, error)
        return False
    return True


_told: set[tuple[str, str]] = set()
MOST_TOLD = 64
"""Different errors of hooks that are logged with their exception; further ones are logged by name."""


def tell(hook: str, subject: Any, error: Exception) -> None:
    """Log what a hook has raised; its exception the first time."""
    kind = hook, type(error).__name__
    request = subject if isinstance(subject, str) else getattr(subject, "request_id", None)
    first = kind not in _told and len(_told) < MOST_TOLD
    if first:
        _told.add(kind)
    reason = f"{kind[1]}: {error}"[:500]
    log.error("hook_failed", hook=hook, request=ascii(request)[:200] if request else None, error=reason, exc_info=first)
