"""What every request of one proxy works on: its engines, its figures, and what it has measured."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final
from urllib.parse import urlsplit

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from layerflow.config.proxy import ProxySettings, instance_addresses
from layerflow.errors import ProxyError, UpstreamError
from layerflow.observe.metrics import WithoutCreated
from layerflow.proxy.instances import BreakerState, Instance, InstanceRole, Registry
from layerflow.proxy.metaserver import Metaserver

# Measured here: bytes per token, and for short prompts which way to the first token is quicker.


_WEIGHT = 0.1  # of a new value in a mean
_BYTES_PER_TOKEN = 4.0  # until engines have told
_LEAST_BYTES, _MOST_BYTES = 1.0, 16.0  # of one token: no text of any language, in JSON, has fewer or more
_RETRIED = 32  # one request in so many goes the slower way, so that its figure stays true


class RequestRoute(Enum):
    """Which engines compute a prompt."""

    APART = "apart"
    ALONE = "alone"


class TokenEstimate:
    """How many tokens a text prompt has, from its bytes; learnt from what engines count."""

    def __init__(self) -> None:
        self._bytes_per_token = _BYTES_PER_TOKEN

    def tokens(self, nbytes: int) -> int:
        return max(1, round(nbytes / self._bytes_per_token))

    def learn(self, nbytes: int, tokens: int) -> None:
        """An engine has counted `tokens` in a text of `nbytes`, which had nothing in it but text."""
        if tokens > 0 and nbytes > 0:
            told = min(max(nbytes / tokens, _LEAST_BYTES), _MOST_BYTES)
            self._bytes_per_token += _WEIGHT * (told - self._bytes_per_token)


class ShortPrompts:
    """Decides for prompts up to `most_tokens` whether the prefill engine is left out.

    Times to the first token are kept by length (powers of two) and way. Apart they are what prefill and hand-off took
    together. Until both ways are known the decoder computes alone.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._seconds: dict[tuple[int, RequestRoute], float] = {}
        self._asked: dict[int, int] = {}

    def choose(self, tokens: int) -> RequestRoute:
        """The way of the next prompt of so many tokens."""
        if tokens > self._most:
            return RequestRoute.APART
        length = tokens.bit_length()
        apart, alone = self._seconds.get((length, RequestRoute.APART)), self._seconds.get((length, RequestRoute.ALONE))
        quicker = (
            RequestRoute.APART if apart is not None and alone is not None and apart < alone else RequestRoute.ALONE
        )
        asked = self._asked[length] = self._asked.get(length, 0) + 1
        if asked % _RETRIED == 0:
            return RequestRoute.ALONE if quicker is RequestRoute.APART else RequestRoute.APART
        return quicker

    def learn(self, tokens: int, way: RequestRoute, seconds: float) -> None:
        """A first token came `seconds` after the request."""
        if tokens <= self._most:
            key = tokens.bit_length(), way
            known = self._seconds.get(key)
            self._seconds[key] = seconds if known is None else known + _WEIGHT * (seconds - known)


# What the proxy counts, in Prometheus's text format.


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

    def __init__(self, instances: Registry, bodies: BodyBudget) -> None:
        self._registry = registry = CollectorRegistry()
        Gauge(
            "layerflow_proxy_request_bytes",
            "Bytes of the bodies of open requests, and of answers to them.",
            registry=registry,
        ).set_function(lambda: bodies.nbytes)
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


# What clients' bodies, and the answers to them, may keep of the proxy's memory, all together.


_ORDINARY_BYTES = 64 << 10
"""Of all answers to one request, in bytes: so much always has room, as the engines' work is done."""


class BodyBudget:
    """The bytes of all requests' bodies, and of answers that are no streams, each counted once; the event loop owns it.

    A body that is complete is served. Where there is no room, those that still come make it, the ones first that have
    been coming for longest: who sends as a decent client does has ended before.

    :param most: bytes, the last eighth for answers. One request with a single prompt may have more where it is alone:
        its body has a bound of its own, and so has each answer to it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_of_bodies = most - most // 8
        self.nbytes = 0
        self._coming: dict[BodyShare, None] = {}  #: since when they come, oldest first

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """Around the stay of one request's body, and of all answers to it."""
        share = BodyShare(self)
        self._coming[share] = None
        try:
            yield share
        finally:
            share.end()

    def add(self, share: BodyShare, nbytes: int) -> None:
        """See :meth:`BodyShare.add`."""
        self.nbytes += nbytes
        share.nbytes += nbytes
        most, what = self._most_of_bodies, "the request's body"
        if share.whole is not None:
            most, what = self._most, "an answer"
            share.request.answered += nbytes
            if share.request.answered <= _ORDINARY_BYTES:
                return
        if self.nbytes <= most or self.nbytes <= share.alone:
            return
        coming = [one for one in self._coming if one is not share and one.nbytes]
        least = self.nbytes - sum(one.nbytes for one in coming)
        if least > most and least > share.alone:
            raise ProxyError(f"the proxy has no room for {what} (proxy.max_requests_bytes)", 503)
        for oldest in coming:
            if self.nbytes <= most or self.nbytes <= share.alone:
                return
            oldest.end()
            oldest.given_up = True
            if oldest.waiting is not None:
                oldest.waiting.cancel()

    def complete(self, share: BodyShare) -> None:
        """See :meth:`BodyShare.complete`."""
        self._coming.pop(share, None)

    def end(self, share: BodyShare) -> None:
        """See :meth:`BodyShare.end`."""
        self._coming.pop(share, None)
        self.nbytes -= share.nbytes
        if share.whole is not None:
            share.request.answered -= share.nbytes
        share.nbytes = 0


@dataclass(slots=True, eq=False)
class BodyShare:
    """What one request keeps of the budget, or a part of it: a prompt of its list, an answer.

    :param whole: that it is a part of, and ends with; None = a request.
    :param waiting: around the wait for its body's next piece.
    :param given_up: others have its room.
    :param answered: bytes of all answers to the request, where it is one.
    """

    budget: BodyBudget
    whole: BodyShare | None = None
    nbytes: int = 0
    waiting: anyio.CancelScope | None = None
    given_up: bool = False
    answered: int = 0
    parts: set[BodyShare] = field(default_factory=set, repr=False)

    def add(self, nbytes: int) -> None:
        """A piece has come. :raises ProxyError: 503, there is no room for it."""
        self.budget.add(self, nbytes)

    def complete(self) -> None:
        """The last piece of the request's body has come."""
        self.budget.complete(self)

    def part(self) -> BodyShare:
        """A new part of it, which keeps nothing yet."""
        part = BodyShare(self.budget, self)
        self.parts.add(part)
        return part

    @contextmanager
    def answer(self) -> Iterator[BodyShare]:
        """Around an answer's way from its engine. Its part stays when it has come, and is given back where it fails."""
        part = self.part()
        try:
            yield part
        except BaseException:
            part.end()
            raise

    @property
    def request(self) -> BodyShare:
        """The whole request's."""
        return self if self.whole is None else self.whole.request

    @property
    def alone(self) -> int:
        """Bytes that its prompt, or its request if that has no list, has by itself: the body, and all answers to it."""
        prompt = self.whole or self
        nbytes = prompt.nbytes + sum(part.nbytes for part in prompt.parts)
        return nbytes + (prompt.whole.nbytes if prompt.whole else 0)

    def end(self) -> None:
        """It keeps nothing any more, and no part of it does."""
        for part in list(self.parts):
            part.end()
        self.budget.end(self)
        if self.whole is not None:
            self.whole.parts.discard(self)


class AbortReason(Enum):
    """Why a request was ended from outside."""

    CLIENT_GONE = "client gone"
    STOPPING = "stopping"


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request on its way. `scope` is around all that it does."""

    scope: anyio.CancelScope
    cut: AbortReason | None = None

    def end(self, cut: AbortReason) -> None:
        """End it now: both legs are closed, and so aborted in their engines."""
        self.cut = self.cut or cut
        self.scope.cancel()


@dataclass(slots=True, eq=False)
class ProxyContext:
    """One proxy's state; its event loop owns it.

    :param port: that it listens on, for the metaserver's address.
    """

    settings: ProxySettings
    instances: Registry
    metrics: ProxyMetrics
    metaserver: Metaserver
    bodies: BodyBudget
    clock: Callable[[], float] = time.monotonic
    port: int = 0
    draining: bool = False
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    short_prompts: ShortPrompts = field(default_factory=lambda: ShortPrompts(0))
    requests: set[OpenRequest] = field(default_factory=set)
    drained: anyio.Event = field(default_factory=anyio.Event)  #: draining, and no request is open

    @contextmanager
    def opened(self, scope: anyio.CancelScope) -> Iterator[OpenRequest]:
        """Around one request."""
        request = OpenRequest(scope)
        self.requests.add(request)
        try:
            yield request
        finally:
            self.requests.discard(request)
            self.drain()

    def drain(self, *, begin: bool = False) -> None:
        """Take no new requests from now on (`begin`), and see whether the open ones have ended."""
        self.draining = self.draining or begin
        if self.draining and not self.requests:
            self.drained.set()

    async def metaserver_url(self, decoder: Instance) -> str:
        """Where this decoder reaches ``/v1/metaserver``, below which each request has a path of its own.

        It is the address from which the proxy reaches the decoder.

        :raises UpstreamError: its name cannot be resolved.
        """
        if self.settings.metaserver_url:
            return self.settings.metaserver_url.rstrip("/")
        if decoder.seen_from is None:
            parts = urlsplit(decoder.url)
            try:
                decoder.seen_from = await _own_address(parts.hostname or "", parts.port or 80)
            except OSError as error:
                raise UpstreamError(f"{decoder.title} cannot be reached: {error}", untouched=True) from error
        host = decoder.seen_from
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1/metaserver"


async def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    family, kind, protocol, _, address = (await anyio.getaddrinfo(host, port, type=socket.SOCK_DGRAM))[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
    return found


def make_context(
    settings: ProxySettings, metaserver: Metaserver, clock: Callable[[], float] = time.monotonic
) -> ProxyContext:
    """A proxy that has sent nothing yet, with the engines of its settings."""
    instances = Registry(settings, clock)
    for role, text in ((InstanceRole.PREFILL, settings.prefill), (InstanceRole.DECODE, settings.decode)):
        for address in instance_addresses(text):
            instances.add(role, address)
    bodies = BodyBudget(settings.max_requests_bytes)
    return ProxyContext(
        settings,
        instances,
        ProxyMetrics(instances, bodies),
        metaserver,
        bodies,
        clock,
        short_prompts=ShortPrompts(settings.short_prompt_tokens),
    )
