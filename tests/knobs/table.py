"""Each setting that touches transfers: a smallest sensible value, the default, and a large one.

No deadline is shorter than by default, but for that of a lookup, which is asked again: a machine that stands still for
some seconds would be taken for a finding.
"""

from __future__ import annotations

import itertools
from typing import Any

Combination = dict[str, Any]

WAYS = ("wait_layer", "wait_all", "background", "inside_block")
"""How the engine waits: layer by layer; for all at once; not at all, until the load is there; and layer by layer for
the whole blocks of a hit that ends inside a block, whose last block is waited for before the pass."""
SHAPES = ("gqa", "mla", "hybrid", "compressed")
SOURCES = ("arena", "tier", "direct")
"""Where loads come from: the arena, what is behind it, or a pool that workers reach themselves, past the arena."""

KNOBS: dict[str, tuple[Any, ...]] = {
    "transfer.prefetch_layers": (1, 0, 64),
    "transfer.max_transfer_blocks": (8, 4096, 1 << 24),
    "transfer.max_transfer_bytes": ("4KiB", "64MiB", "1GiB"),
    # Under a budget smaller than a load each refill is a message: see test_the_least_that_is_allowed.
    "transfer.max_inflight_bytes": ("256KiB", "256MiB", "4GiB"),
    "transfer.save_backlog_bytes": ("1MiB", "4GiB", "1TiB"),
    "transfer.h2d_stagger_us": (1, 0, 500),
    "transfer.step_timeout_ms": (5000, 3_600_000),
    "transfer.save_timeout_ms": (30_000, 3_600_000),
    "transfer.mode": ("layerwise", "auto", "bulk"),
    "transfer.discard_partial_chunks": (True, False),
    "transfer.save_decode_cache": (True, False),
    "pool.warm": (False, True),
    "pool.lease_ms": (10_000, 3_600_000),
    "pool.lease_share": (0.01, 0.5, 1.0),
    "pool.link_gbps": (0.05, 0.0, 1000.0),
    "pool.link_latency_us": (500, 0),
    "pool.write_backlog": ("1MiB", "1GiB", "1TiB"),
    "pool.lookup_timeout_ms": (20, 100, 86_400_000),
    "pool.fetch_timeout_ms": (10_000, 86_400_000),
    "pool.host_timeout_ms": (5000, 86_400_000),
}

LINK = ("pool.link_gbps", "pool.link_latency_us", "pool.lease_share")
"""What a load costs by default is measured under the same values of these. The link's stand for the machine, and only a
hit within the share brings its plan: a load without one is granted in messages."""

NOT_ABOUT_TRANSFERS = {
    "transfer.copy_way": "of a device, see tests/device/test_kernel.py; the cpu has one way",
    "pool.backend": "which store, not how bytes move; each has the contract suite",
    "pool.size": "how much fits",
    "pool.numa": "on which memory nodes the arena lies, not how bytes move",
    "pool.hugepages": "needs pages that are reserved on the machine",
}


def fits(values: list[Any]) -> bool:
    """Whether the settings accept a combination, given in the order of :data:`AXES`, perhaps cut short."""
    chosen = dict(zip(AXES, values, strict=False))
    if (chosen.get("way"), chosen.get("shape")) == ("inside_block", "compressed"):
        return False  # its hits end with a compressed row, which blocks are made of
    # max_inflight_bytes is at least twice max_transfer_bytes, or the settings are refused.
    allowed = {"256KiB": {"4KiB"}, "256MiB": {"4KiB", "64MiB"}}
    inflight = chosen.get("transfer.max_inflight_bytes")
    each = chosen.get("transfer.max_transfer_bytes")
    return inflight not in allowed or each is None or each in allowed[inflight]


AXES: dict[str, tuple[Any, ...]] = {"way": WAYS, "shape": SHAPES, "source": SOURCES, **KNOBS}

PLACES = [place for place in itertools.product(WAYS, SHAPES, SOURCES) if fits(list(place))]
"""Every way, shape and source that go together."""
