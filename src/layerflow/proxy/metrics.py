"""What the proxy counts, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from layerflow.observe.metrics.metrics import WithoutCreated
from layerflow.proxy.instances.breaker import BreakerState
from layerflow.proxy.instances.registry import Registry

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class _Instances(Collector):
    """Gauges of each engine, read when they are asked for."""

    def __init__(self, instances: Registry) -> None:
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "instance"]
        up = GaugeMetricFamily("layerflow_proxy_instance_up", "1 = its probes are answered.", labels=labels)
        closed = GaugeMetricFamily(
            "layerflow_proxy_instance_breaker_open", "1 = it failed too often and gets no requests.", labels=labels
        )
        active = GaugeMetricFamily("layerflow_proxy_instance_requests", "Requests on their way.", labels=labels)
        tokens = GaugeMetricFamily(
            "layerflow_proxy_instance_prompt_tokens", "Prompt tokens of these, estimated.", labels=labels
        )
        for instance in self._instances.all:
            values = [instance.role.value, instance.name]
            up.add_metric(values, 0 if instance.down else 1)
            closed.add_metric(values, 0 if instance.breaker.state is BreakerState.CLOSED else 1)
            active.add_metric(values, instance.active)
            tokens.add_metric(values, instance.tokens)
        known = GaugeMetricFamily("layerflow_proxy_prefixes", "Beginnings of prompts that are remembered.")
        known.add_metric([], len(self._instances.prefixes))
        yield from (up, closed, active, tokens, known)


class _Addresses(Collector):
    """Which engine has which name, for those who may know."""

    def __init__(self, instances: Registry) -> None:
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "layerflow_proxy_instance_info", "Always 1: the URL of each engine.", labels=["role", "instance", "url"]
        )
        for instance in self._instances.all:
            info.add_metric([instance.role.value, instance.name, instance.url], 1)
        yield info


class ProxyMetrics:
    """Counters and histograms of one proxy."""

    def __init__(self, instances: Registry) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Instances(instances))
        self._addresses = _Addresses(instances)
        self.requests = Counter(
            "layerflow_proxy_requests", "Requests answered, by status.", ["path", "status"], registry=registry
        )
        self.first_token = Histogram(
            "layerflow_proxy_first_token_seconds",
            "From a request's last byte to the first token of its answer, by who computed the prompt.",
            ["way"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.prefill = Histogram(
            "layerflow_proxy_prefill_seconds", "What prefill engines took.", buckets=_SECONDS, registry=registry
        )
        self.handoff = Histogram(
            "layerflow_proxy_handoff_seconds",
            "From the end of a prefill to the decoder's first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.failures = Counter(
            "layerflow_proxy_instance_failures",
            "Calls that an engine failed or refused, by the status that a client would see.",
            ["role", "instance", "status"],
            registry=registry,
        )
        self.retries = Counter(
            "layerflow_proxy_retries", "Calls repeated at another engine.", ["role"], registry=registry
        )
        self.recomputed = Counter(
            "layerflow_proxy_recomputed",
            "Prompts that a decoder computed because a prefill was lost.",
            registry=registry,
        )
        self.skipped = Counter(
            "layerflow_proxy_prefill_skipped", "Prompts for a decoder alone, by reason.", ["reason"], registry=registry
        )
        self.cut_streams = Counter(
            "layerflow_proxy_cut_streams", "Streams that ended with an error event.", registry=registry
        )
        self.clients_gone = Counter(
            "layerflow_proxy_clients_gone", "Requests whose client left before the end.", registry=registry
        )
        self.cached_tokens = Counter(
            "layerflow_proxy_cached_tokens", "Prompt tokens that prefill engines found cached.", registry=registry
        )

    def render(self, *, addresses: bool) -> bytes:
        """All of it as text.

        :param addresses: tell the engines', too.
        """
        text = generate_latest(WithoutCreated(self._registry))
        return text + generate_latest(self._addresses) if addresses else text
