"""One engine behind the proxy: its connections, its health, what it has to do."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import anyio
import httpx

from layerflow.config.proxy import InstanceAddress, ProxySettings
from layerflow.errors import UpstreamError
from layerflow.proxy.instances.breaker import Breaker

# vLLM's API server closes connections that were idle for 5 s; ours go before, so that none closes under a request.
KEEPALIVE_S = 3.0
KEEPALIVE_CONNECTIONS = 256


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Instance:
    """An engine, reached over HTTP.

    :param role: what the proxy sends it.
    :param clock: monotonic seconds.
    """

    def __init__(
        self, role: Role, address: InstanceAddress, settings: ProxySettings, clock: Callable[[], float]
    ) -> None:
        self.role, self.url, self.servers = role, address.url, address.servers
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s, clock)
        self.down = False  #: the probes say so
        self.generation = 0  #: grows each time it goes down: what it had cached is gone then
        self.active = 0  #: requests on their way
        self.tokens = 0  #: prompt tokens of these
        self.seen_from: str | None = None  #: this machine's address as the engine sees it; None = not asked yet
        self.last_picked = 0  #: the number of the pick; settles ties
        self._waiting: set[anyio.CancelScope] = set()
        #: For the legs. A client would keep the cookies of one request's answer and send them with the next client's.
        self.transport: httpx.AsyncBaseTransport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=KEEPALIVE_CONNECTIONS,
                keepalive_expiry=KEEPALIVE_S,
            ),
            verify=ssl.create_default_context() if address.url.startswith("https:") else False,
            trust_env=False,
        )
        self.timeout = httpx.Timeout(None, connect=settings.connect_timeout_s)
        self.client = httpx.AsyncClient(base_url=address.url, timeout=self.timeout, transport=self.transport)

    def __repr__(self) -> str:
        return f"<{self.role.value} {self.url} {self.state} active={self.active} tokens={self.tokens}>"

    @property
    def state(self) -> str:
        """``up``, ``down`` (says the probe), ``open`` or ``half-open`` (says the breaker)."""
        if self.down:
            return "down"
        return "up" if self.breaker.state.value == "closed" else self.breaker.state.value

    @property
    def usable(self) -> bool:
        return not self.down and self.breaker.allows

    @contextmanager
    def busy(self, tokens: int) -> Iterator[None]:
        """Around one request's stay, of `tokens` prompt tokens."""
        self.active += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.active -= 1
            self.tokens -= tokens

    @contextmanager
    def given_up_when_down(self) -> Iterator[Callable[[], None]]:
        """Around a wait for the engine's answer, which ends as failed when the probes find the engine down.

        Yields a call that ends this watch: an answer that has begun to arrive has deadlines of its own.

        :raises UpstreamError: it went down meanwhile.
        """
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield lambda: self._waiting.discard(scope)
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise UpstreamError(f"{self.role.value} engine {self.url} stopped answering its health probes", 504)

    def went_down(self) -> None:
        """The probes found it down: calls that wait for its answer fail now, not at their deadline."""
        self.down = True
        self.generation += 1
        for scope in list(self._waiting):
            scope.cancel()

    def describe(self) -> dict[str, Any]:
        """For ``/health``."""
        return {"url": self.url, "state": self.state, "active": self.active, "servers": list(self.servers)}
