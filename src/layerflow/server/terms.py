"""What the settings mean: for the core's limits, for clients' terms, and for what lies behind the arena."""

from __future__ import annotations

import json
from typing import Any

from layerflow.config.pool import MEMORY
from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.flow.events import Limits
from layerflow.wire.messages import Terms

PLANNED_SHARE = 4
"""One in so many bytes in flight is for loads that workers move by the plans of their hits."""


def planned_bytes(settings: Settings) -> int:
    """What all workers together may have in flight by plans; the core grants the rest."""
    return settings.transfer.max_inflight_bytes // PLANNED_SHARE


def sharers(workers: int) -> int:
    """Between how many loads by plans share their bytes in flight; so many workers, and up to an eighth more.

    A window that changed with every worker would have to be told to all the others for each one that comes or goes.
    """
    step = 1 << max(0, workers.bit_length() - 4)
    return max(1, -(-workers // step) * step)


def limits_of(settings: Settings, arena_bytes: int) -> Limits:
    """The core's limits out of the settings. It grants three quarters of the bytes in flight: the windows of loads by
    plan have the rest. What waits to be written is pinned: at most half of the arena."""
    transfer = settings.transfer
    return Limits(
        prefetch_layers=transfer.prefetch_layers,
        max_transfer_blocks=transfer.block_cap,
        max_transfer_bytes=transfer.byte_cap,
        max_granted_bytes=max(2, transfer.max_inflight_bytes - planned_bytes(settings)),
        save_backlog_bytes=transfer.save_backlog_bytes,
        write_backlog_bytes=min(settings.pool.write_backlog, arena_bytes // 2),
        stagger_us=transfer.h2d_stagger_us,
        fetch_timeout_s=settings.pool.fetch_timeout_ms / 1e3,
    )


def terms_of(settings: Settings, workers: int) -> Terms:
    """What clients keep to. Loads by plans share their bytes in flight evenly, see :func:`sharers`."""
    transfer, pool = settings.transfer, settings.pool
    return Terms(
        transfer.step_timeout_ms,
        transfer.save_timeout_ms,
        transfer.prefetch_layers,
        transfer.mode,
        not transfer.discard_partial_chunks,
        transfer.save_decode_cache,
        pool.link_gbps,
        pool.link_latency_us,
        transfer.block_cap,
        transfer.byte_cap,
        transfer.h2d_stagger_us,
        settings.pd.follow,
        planned_bytes(settings) // sharers(workers),
        transfer.copy_way,
    )


# What lies behind the arena, out of the settings.


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
