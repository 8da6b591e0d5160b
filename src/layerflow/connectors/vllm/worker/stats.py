"""Transfers as vLLM's own statistics and metrics show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from layerflow.connectors.vllm.worker.figures import FIGURES


class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """Sums of :data:`.figures.FIGURES` over an interval."""

    def __getitem__(self, field: str) -> Any:
        """As of a dict: vLLM 0.27's MultiConnector reads figures of its own process like those that were sent."""
        return getattr(self, field)

    def reset(self) -> None:
        """Start over."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add another rank's or step's."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        loaded, hidden = self.data.get("load_seconds", 0.0), self.data.get("load_hidden_seconds", 0.0)
        told: dict[str, int | float] = {
            "loaded MB": round(self.data.get("load_bytes", 0) / 1e6, 1),
            "saved MB": round(self.data.get("save_bytes", 0) / 1e6, 1),
            "load ms": round(loaded * 1e3, 1),
            "exposed ms": round(self.data.get("load_exposed_seconds", 0.0) * 1e3, 1),
        }
        if loaded:
            told["overlap %"] = round(100 * hidden / loaded, 1)
        rare = ("failed_loads", "failed_saves", "shed_saves", "revoked_saves")
        return told | {name.replace("_", " "): self.data[name] for name in rare if self.data.get(name)}

    def is_empty(self) -> bool:
        """Nothing happened."""
        return not any(self.data.values())


class TransferMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """:data:`.figures.FIGURES` as Prometheus counters ``layerflow_vllm_…_total`` on vLLM's own /metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._counters = {
            name: make(name=f"layerflow_vllm_{name}", documentation=text, labelnames=labelnames)
            for name, text in FIGURES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's figures."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
