"""Addresses in what a decoder posts: a prefill engine is sent to that decoder's own host only."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import socket
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel

from layerflow.errors import ProxyError

RESOLVE_S = 5.0
"""In which all that a post names must be resolved."""
MOST_HOSTS = 32
"""Distinct ones that a post may name."""
_AT_ONCE = 32
"""Names that are resolved at once for one decoder."""
_A_TURN = 256
"""Values that are looked at before the loop does something else, some ms at most."""
_DEPTH = 32
_HOST_KEYS = ("host", "hostname", "ip", "addr", "address")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Resolver:
    """Looks names up for the posts of one decoder; the event loop owns it.

    The system's call cannot be ended, and may take half a minute: each has a thread that nobody waits for, and what one
    decoder names takes no thread that another one, or a connection, needs.
    """

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[set[IpAddress]]] = {}

    async def addresses(self, names: Iterable[str], within_s: float) -> dict[str, set[IpAddress]]:
        """Return the addresses of each name, side by side; none where it has none.

        :raises TimeoutError: one of them was not resolved in time.
        """
        with anyio.fail_after(within_s):
            asked = {name: await self._ask(name) for name in names}
            return {name: await asyncio.shield(found) for name, found in asked.items()}

    async def _ask(self, name: str) -> asyncio.Future[set[IpAddress]]:
        """:raises RuntimeError: the system has no thread for it."""
        loop = asyncio.get_running_loop()
        if (plain := _as_ip(name)) is not None:
            known = loop.create_future()
            known.set_result({plain})
            return known
        while name not in self._asked and len(self._asked) >= _AT_ONCE:
            await asyncio.wait(self._asked.values(), return_when=asyncio.FIRST_COMPLETED)
        if name not in self._asked:
            asked = loop.create_future()

            def ended(found: set[IpAddress]) -> None:
                del self._asked[name]
                asked.set_result(found)

            def look_up() -> None:
                found = _look_up(name)
                with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody asks any more
                    loop.call_soon_threadsafe(ended, found)

            threading.Thread(target=look_up, name="layerflow-resolve", daemon=True).start()
            self._asked[name] = asked
        return self._asked[name]


async def check_hosts(posted: dict[str, Any], own: Collection[str], resolver: Resolver) -> None:
    """Refuse a post that names another host.

    What it names under a key such as ``remote_host``, as a URL or as an IP address counts, at any depth.

    :param own: names and addresses of the decoder's host. Where one is this machine's, all of this machine's are.
    :param resolver: the decoder's.
    :raises ProxyError: 403, another host; 400, what should be one is none, or too many; 504, not resolved in time.
    """
    named: set[str] = set()
    for number, host in enumerate(_hosts(posted), 1):
        if not number % _A_TURN:
            await anyio.lowlevel.checkpoint()
        if host is not None:
            named.add(host)
        if len(named) > MOST_HOSTS:
            raise ProxyError(f"it names more than {MOST_HOSTS} hosts", 400)
    known = {host.lower() for host in own}
    named = {host for host in named if host.lower() not in known}
    if not named:
        return
    try:
        found = await resolver.addresses({*named, *own}, RESOLVE_S)
    except TimeoutError:
        raise ProxyError(
            f"the hosts that it names were not resolved in {RESOLVE_S:g} s; see this machine's DNS", 504
        ) from None
    except RuntimeError as error:
        raise ProxyError(f"the hosts that it names cannot be resolved: {error}", 503) from None
    addresses = {address for host in own for address in found[host]}
    here = any(_is_local(address) for address in addresses)
    for host in named:
        if not found[host] or not all(address in addresses or (here and _is_local(address)) for address in found[host]):
            raise ProxyError(
                f"it names the host {host!r:.200}, which is not the decode engine's own; give that engine to the proxy "
                "with the addresses of its servers (--decode URL=tcp://host:port) if it is",
                403,
            )


def _hosts(posted: dict[str, Any]) -> Iterator[str | None]:
    """The hosts that it names; None for each value that names none.

    :raises ProxyError: 400, a URL that is none, or too deep.
    """
    levels: list[Iterator[tuple[str, Any]]] = [iter(posted.items())]
    while levels:
        key, value = next(levels[-1], (None, None))
        if key is None:
            levels.pop()
            continue
        if isinstance(value, dict):
            levels.append(iter(value.items()))
        elif isinstance(value, list):
            levels.append(zip(itertools.repeat(key), value, strict=False))
        if len(levels) >= _DEPTH:
            raise ProxyError(f"it is nested deeper than {_DEPTH} levels", 400)
        yield _host(value, key) if isinstance(value, str) else None


def _host(text: str, key: str) -> str | None:
    """The host that a text under this key names. :raises ProxyError: 400, it is a URL that is none."""
    if "://" in text:
        return _of_url(text)
    if text and (key.lower().rpartition("_")[2] in _HOST_KEYS or _as_ip(text) is not None):
        return text.strip("[]")
    return None


def _of_url(text: str) -> str | None:
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError:
        raise ProxyError(f"it names {text!r:.200}, which is no URL", 400) from None
    return None if parts.scheme in ("ipc", "inproc") else host or ""  # those have no host


def _as_ip(text: str) -> IpAddress | None:
    if "." not in text and ":" not in text:
        return None
    try:
        return ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None


def _look_up(name: str) -> set[IpAddress]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return set()
    return {address for *_, where in found if (address := _as_ip(str(where[0]))) is not None}


def _is_local(address: IpAddress) -> bool:
    """Whether it is this machine's: the way to such an address begins at the address itself.

    Whether it can be bound says nothing where ``ip_nonlocal_bind`` is set, as balancers set it.
    """
    if address.is_loopback or address.is_unspecified:
        return address.is_loopback
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # sends nothing
            return _as_ip(probe.getsockname()[0]) == address
    except OSError:
        return False
