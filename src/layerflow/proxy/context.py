"""What every request of one proxy works on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

import anyio

from layerflow.config.proxy import ProxySettings, instance_addresses
from layerflow.errors import UpstreamError
from layerflow.proxy.instances.instance import Instance, Role
from layerflow.proxy.instances.registry import Registry
from layerflow.proxy.metaserver import Metaserver
from layerflow.proxy.metrics import ProxyMetrics
from layerflow.proxy.timings import ShortPrompts, TokenEstimate


class Cut(Enum):
    """Why a request was ended from outside."""

    CLIENT_GONE = "client gone"
    STOPPING = "stopping"


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request on its way. `scope` is around all that it does."""

    scope: anyio.CancelScope
    cut: Cut | None = None

    def end(self, cut: Cut) -> None:
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
                raise UpstreamError(f"{decoder.title} cannot be reached: {error}") from error
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
    for role, text in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for address in instance_addresses(text):
            instances.add(role, address)
    return ProxyContext(
        settings,
        instances,
        ProxyMetrics(instances),
        metaserver,
        clock,
        short_prompts=ShortPrompts(settings.short_prompt_tokens),
    )
