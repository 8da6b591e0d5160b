"""What lies behind the arena, out of the settings."""

from __future__ import annotations

import json
from typing import Any

from layerflow.config.pool import MEMORY
from layerflow.config.settings import Settings
from layerflow.errors import ConfigError


def tier_of(settings: Settings) -> tuple[str, dict[str, Any]] | None:
    """The backend behind the arena, and its options; None = the arena is all there is.

    :raises ConfigError: other machines of a shared pool could not reach this one.
    """
    pool = settings.pool
    if why := pool.unreachable():
        raise ConfigError("; ".join(why))
    return None if pool.behind == MEMORY else (pool.behind, pool.for_host())


def direct_options(settings: Settings) -> str:
    """What an engine worker's own client of the pool behind the arena is made from, as JSON; empty = it has none."""
    pool = settings.pool
    options = None if pool.behind == MEMORY else pool.section(pool.behind).for_workers()
    return "" if options is None else json.dumps(options | {"timeout_ms": pool.host_timeout_ms})
