"""One engine behind the proxy: its connections, its health, what it has to do."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx

from layerflow.config.proxy import InstanceAddress, ProxySettings
from layerflow.errors import UpstreamError
from layerflow.http_client import TRUST_ENVIRONMENT
from layerflow.proxy.hosts import Resolver
from layerflow.proxy.instances.breaker import Breaker
from layerflow.proxy.request import Headers

# vLLM's API server closes connections that were idle for 5 s; ours go before, so that none closes under a request.
KEEPALIVE_S = 3.0
KEEPALIVE_CONNECTIONS = 256


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Instance:
    """An engine, reached over HTTP.

    :param role: what the proxy sends it.
    :param name: what clients are told of it, who are not told its address.
    :param clock: monotonic seconds.
    """

    def __init__(
        self, role: Role, name: str, address: InstanceAddress, settings: ProxySettings, clock: Callable[[], float]
    ) -> None:
        self.role, self.name, self.url = role, name, address.url
        self.configured_servers = address.servers
        self._told_servers: tuple[str, ...] = ()
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s, clock)
        self.down = False  #: the probes say so
        self.generation = 0  #: grows each time it goes down: what it had cached is gone then
        self.active = 0  #: requests on their way
        self.tokens = 0  #: prompt tokens of these
        self.seen_from: str | None = None  #: this machine's address as the engine sees it; None = not asked yet
        self.last_picked = 0  #: the number of the pick; settles ties
        self.resolver = Resolver()  #: of hosts that it posts
        self._waiting: set[anyio.CancelScope] = set()
        # No client of httpx: it would keep the cookies of one client's answer and send them with the next client's
        # request.
        self.transport: httpx.AsyncBaseTransport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=KEEPALIVE_CONNECTIONS,
                keepalive_expiry=KEEPALIVE_S,
            ),
            verify=ssl.create_default_context() if address.url.startswith("https:") else False,
            trust_env=TRUST_ENVIRONMENT,
        )
        self._timeout = httpx.Timeout(None, connect=settings.connect_timeout_s).as_dict()

    @property
    def title(self) -> str:
        """What errors call it."""
        return f"{self.role.value} engine {self.name}"

    @property
    def hosts(self) -> set[str]:
        """Names and addresses of its host, as configured."""
        return {urlsplit(address).hostname or "" for address in (self.url, *self.configured_servers)} - {""}

    @property
    def servers(self) -> tuple[str, ...]:
        """Control addresses of the layerflow servers that it saves through: as configured, else as it told last."""
        return self.configured_servers or self._told_servers

    def tell_servers(self, servers: tuple[str, ...]) -> None:
        """Its answer has named them; () = it has named none."""
        self._told_servers = servers or self._told_servers

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Headers = (),
        extensions: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        """Send a request. The body of the response is not read yet; close it.

        :param path: with the query.
        :raises httpx.HTTPError: the engine cannot be reached, or breaks off.
        """
        request = httpx.Request(
            method,
            self.url + path,
            content=body,
            headers=list(headers),
            extensions={"timeout": self._timeout, **(extensions or {})},
        )
        return await self.transport.handle_async_request(request)

    async def fetch(self, method: str, path: str, most: int, headers: Headers = ()) -> tuple[httpx.Response, bytes]:
        """A response with its body, of which more than `most` bytes are not read.

        :raises httpx.HTTPError: the engine cannot be reached, or breaks off.
        """
        response = await self.ask(method, path, headers=headers)
        content = bytearray()
        try:
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > most:
                    break
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()
        return response, bytes(content)

    async def close(self) -> None:
        """Close its connections."""
        await self.transport.aclose()

    def __repr__(self) -> str:
        return f"<{self.name} {self.url} {self.state} active={self.active} tokens={self.tokens}>"

    @property
    def state(self) -> str:
        """``up``, ``down`` (says the probe), ``open`` or ``half-open`` (says the breaker)."""
        if self.down:
            return "down"
        return "up" if self.breaker.state.value == "closed" else self.breaker.state.value

    @property
    def usable(self) -> bool:
        return not self.down and self.breaker.allows

    @property
    def last_resort(self) -> bool:
        """Whether it may be asked where no engine is usable: it is there, and has answered, if with errors."""
        return not self.down and self.breaker.answers

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
            raise UpstreamError(f"{self.title} stopped answering its health probes", 504)

    def went_down(self) -> None:
        """The probes found it down: calls that wait for its answer fail now, not at their deadline."""
        self.down = True
        self.generation += 1
        self._told_servers = ()
        for scope in list(self._waiting):
            scope.cancel()

    def describe(self, *, addresses: bool) -> dict[str, Any]:
        """For ``/health``.

        :param addresses: tell them, too.
        """
        told = {"name": self.name, "state": self.state, "active": self.active}
        return {**told, "url": self.url, "servers": list(self.servers)} if addresses else told
