"""``layerflow bench pool``: a pool behind the arena, beside the pool's own calls."""

from layerflow_cli.bench.pool.measurement import measure, present

__all__ = ["measure", "present"]
