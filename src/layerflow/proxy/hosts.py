"""Addresses in what a decoder posts: a prefill engine is sent to that decoder's own host only."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

import anyio

from layerflow.errors import ProxyError

_RESOLVE_S = 5.0
_DEPTH = 32
_HOST_KEYS = ("host", "hostname", "ip", "addr", "address")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


async def check_hosts(posted: dict[str, Any], own: Collection[str]) -> None:
    """Refuse a post that names another host.

    What it names under a key such as ``remote_host``, as a URL or as an IP address counts, at any depth.

    :param own: names and addresses of the decoder's host. Where one is this machine's, all of this machine's are.
    :raises ProxyError: 403, another host; 400, what should be one is none.
    """
    named = set(_hosts(posted, "", _DEPTH))
    if not named:
        return
    known = {host.lower() for host in own}
    addresses = {address for host in own for address in await _resolve(host)}
    here = any(_is_local(address) for address in addresses)
    for host in named:
        if host.lower() in known:
            continue
        found = await _resolve(host)
        if not found or not all(address in addresses or (here and _is_local(address)) for address in found):
            raise ProxyError(
                f"it names the host {host!r:.200}, which is not the decode engine's own; give that engine to the proxy "
                "with the addresses of its servers (--decode URL=tcp://host:port) if it is",
                403,
            )


def _hosts(value: Any, key: str, depth: int) -> Iterator[str]:
    """:raises ProxyError: 400, a URL that is none, or too deep."""
    if depth == 0:
        raise ProxyError(f"it is nested deeper than {_DEPTH} levels", 400)
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _hosts(one, str(name), depth - 1)
    elif isinstance(value, list):
        for one in value:
            yield from _hosts(one, key, depth - 1)
    elif isinstance(value, str) and value:
        if "://" in value:
            yield from _of_url(value)
        elif _as_ip(value) is not None or key.lower().rpartition("_")[2] in _HOST_KEYS:
            yield value.strip("[]")


def _of_url(text: str) -> Iterator[str]:
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError:
        raise ProxyError(f"it names {text!r:.200}, which is no URL", 400) from None
    if parts.scheme not in ("ipc", "inproc"):  # those have no host
        yield host or ""


def _as_ip(text: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None


async def _resolve(host: str) -> set[IpAddress]:
    """Its addresses; none where it has none."""
    if (plain := _as_ip(host)) is not None:
        return {plain}
    try:
        with anyio.fail_after(_RESOLVE_S):
            found = await anyio.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError, TimeoutError):
        return set()
    return {address for *_, where in found if (address := _as_ip(str(where[0]))) is not None}


def _is_local(address: IpAddress) -> bool:
    """Whether it is this machine's: only such an address can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return not address.is_unspecified
