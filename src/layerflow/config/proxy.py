"""The section ``[proxy]``: what ``layerflow proxy`` is told."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from layerflow.config.fields import PathText, Real, Section, Size, Whole, address, host, setting, shown
from layerflow.endpoint import local_endpoint

Order = Literal["concurrent", "prefill-first", "decode-first"]
_DAY_S = 86_400
MAX_SOCKET_PATH_BYTES = 107  # unix(7)
_HOST_NAME = re.compile(r"[a-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class InstanceAddress:
    """One engine behind the proxy.

    :param url: ``http://host:port``, without a path.
    :param servers: control addresses of the layerflow servers that it saves through; empty where both sides share one.
    """

    url: str
    servers: tuple[str, ...] = ()


def instance_addresses(text: str) -> list[InstanceAddress]:
    """``"http://a:8100=tcp://a:9470, http://b:8100"``, separated by commas or spaces; several servers by ``+``.

    ``a:8100`` is ``http://a:8100``.

    :raises ValueError: an item is not an address, or is given twice.
    """
    found: dict[str, InstanceAddress] = {}
    for item in re.split(r"[,\s]+", text.strip()):
        if not item:
            continue
        url, _, controls = item.partition("=")
        url = _instance_url(url)
        if url in found:
            raise ValueError(f"{url} is given twice; keep one")
        servers = tuple(controls.split("+")) if controls else ()
        for server in servers:
            _check_control(item, server)
        found[url] = InstanceAddress(url, servers)
    return list(found.values())


def _check_control(item: str, server: str) -> None:
    if server.startswith("ipc://"):
        local_endpoint(server)
        return
    try:
        address(server, "tcp://")
    except ValueError:
        raise ValueError(f'{item}: the server\'s control address should be "tcp://host:port", not "{server}"') from None


def _instance_url(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port, host = parts.port, _host(parts.hostname or "")
    except ValueError:
        port, host = None, ""
        parts = urlsplit("")
    plain = parts.path in ("", "/") and not parts.query and not parts.fragment and "@" not in parts.netloc
    if parts.scheme not in ("http", "https") or not host or not port or not plain:
        raise ValueError(f'should be "http://host:port" or "http://host:port=tcp://host:port", not {shown(text)}')
    return f"{parts.scheme}://{host}:{port}"


def _host(name: str) -> str:
    """A URL's host as DNS has it: names in ASCII, an IPv6 address in its brackets.

    :raises ValueError: it can be no host: what asks it would fail by other errors than those of a network.
    """
    if ":" in name:
        return f"[{ipaddress.IPv6Address(name)}]"
    ascii_name = name.encode("idna").decode()
    if not _HOST_NAME.fullmatch(ascii_name):
        raise ValueError(f"{shown(name)} is no name of a host")
    return ascii_name


class ProxySettings(Section):
    """How requests reach prefill and decode engines. Read when ``layerflow proxy`` starts; servers ignore it."""

    host: str = setting("127.0.0.1", "Address that clients connect to.")
    port: Whole = setting(8000, "Port of the same; 0 = any free one.", ge=0, le=65535)
    prefill: str = setting(
        "", "Prefill engines, separated by commas: URL, or URL=tcp://host:port with its layerflow server's address."
    )
    decode: str = setting("", "Decode engines, separated by commas.")
    order: Order = setting("concurrent", "Which engine is asked first, and how both learn of each other.")
    on_prefill_failure: Literal["retry", "recompute"] = setting(
        "retry", "A prefill that fails before the first token is tried once more elsewhere, or computed by the decoder."
    )
    max_recompute_tokens: Whole = setting(
        16_384,
        "Longest prompt that a decoder computes when its prefill is lost; longer ones are answered 503.",
        unit="tokens",
        ge=0,
        le=1 << 30,
    )
    short_prompt_tokens: Whole = setting(
        256,
        "Prompts so short go to the decoder alone, unless prefilling apart was measured to be quicker; 0 = none.",
        unit="tokens",
        ge=0,
        le=1 << 30,
    )
    attempts: Whole = setting(
        3, "Decoders that one request is tried on before its first token.", unit="engines", ge=1, le=32
    )
    connect_timeout_s: Real = setting(
        5.0, "An engine that does not accept in time has failed.", unit="s", ge=0.01, le=300
    )
    prefill_timeout_s: Real = setting(
        300.0, "A prefill that takes longer has failed; also the deadline of a hand-off.", unit="s", ge=0.05, le=_DAY_S
    )
    first_token_timeout_s: Real = setting(
        330.0, "A stream without its first token after so long has failed.", unit="s", ge=0.05, le=_DAY_S
    )
    idle_timeout_s: Real = setting(
        60.0, "A stream without a token, or a client that takes none, for so long is cut.", unit="s", ge=0.05, le=_DAY_S
    )
    request_timeout_s: Real = setting(1800.0, "Longest time of a request.", unit="s", ge=0.1, le=_DAY_S)
    probe_interval_s: Real = setting(1.0, "Time between two health probes of an engine.", unit="s", ge=0.01, le=3600)
    probe_timeout_s: Real = setting(
        5.0, "A probe without an answer after so long has failed.", unit="s", ge=0.01, le=300
    )
    probe_failures: Whole = setting(
        3, "Failed probes in a row after which an engine counts as down.", unit="probes", ge=1, le=1000
    )
    breaker_failures: Whole = setting(
        3, "Failures in a row (5xx, network) after which an engine gets no requests.", unit="failures", ge=1, le=1000
    )
    breaker_open_s: Real = setting(
        10.0, "How long it gets none, before one request may try it.", unit="s", ge=0.01, le=_DAY_S
    )
    affinity_prefixes: Whole = setting(
        65_536,
        "Beginnings of prompts, 1 KiB each, remembered with the engines that have them.",
        unit="prefixes",
        ge=0,
        le=1 << 26,
    )
    drain_timeout_s: Real = setting(
        60.0,
        "How long open requests may finish after SIGTERM; streams that remain end with an error.",
        unit="s",
        ge=0,
        le=_DAY_S,
    )
    max_request_bytes: Size = setting(
        64 << 20, "Largest request, event or answer.", unit="bytes", ge=1 << 10, le=1 << 32
    )
    max_requests_bytes: Size = setting(
        1 << 30,
        "The bodies of all open requests, and of decoders' answers to them that are no streams, together, each counted "
        "once. The last eighth is for answers; the first 64 KiB of each request's always have room. Past it those "
        "requests that have been coming for longest are given up, and then new ones, or those whose answer has no "
        "room, are answered 503.",
        unit="bytes",
        ge=1 << 10,
        le=1 << 40,
    )
    max_prompts: Whole = setting(2048, "Most prompts in one request's list.", unit="prompts", ge=1, le=1 << 20)
    metaserver_url: str = setting(
        "",
        "Where decoders reach /v1/metaserver, and what is below it; empty = this proxy's own address as each decoder "
        "sees it.",
    )
    admin_token: str = setting(
        "",
        "Bearer token of /instances/* and /reset_prefix_cache; empty = they answer on admin_socket only.",
        secret=True,
    )
    admin_socket: PathText = setting(
        "auto",
        "Unix socket of the admin paths, for this user: a path in a directory of mode 0700; "
        '"auto" = proxy-HOST:PORT.sock beside the server\'s control socket; empty = none.',
    )
    allowed_origins: str = setting(
        "", 'Origins of web pages whose scripts may ask (CORS), separated by commas; "*" = all, empty = none.'
    )

    @property
    def origins(self) -> tuple[str, ...]:
        """Return the origins of `allowed_origins`."""
        return tuple(re.findall(r"[^,\s]+", self.allowed_origins))

    @field_validator("host")
    @classmethod
    def _listens(cls, value: str) -> str:
        return host(value)

    @field_validator("admin_socket")
    @classmethod
    def _plain_path(cls, value: str) -> str:
        if value not in ("", "auto") and (not value.startswith("/") or len(value.encode()) > MAX_SOCKET_PATH_BYTES):
            raise ValueError(f'should be a path from the root of at most {MAX_SOCKET_PATH_BYTES} bytes, "auto" or ""')
        return value

    @field_validator("admin_token")
    @classmethod
    def _sendable(cls, value: str) -> str:
        if value != value.strip() or not value.isprintable():
            raise ValueError(
                "no header can carry it: it must not begin or end with a blank, nor have control characters"
            )
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _web_origins(cls, value: str) -> str:
        for origin in re.findall(r"[^,\s]+", value):
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
                raise ValueError(f'should be "*" or origins such as "https://chat.example", not "{origin}"')
        return value

    @field_validator("prefill", "decode")
    @classmethod
    def _addresses(cls, value: str) -> str:
        instance_addresses(value)
        return value

    @field_validator("metaserver_url")
    @classmethod
    def _reachable(cls, value: str) -> str:
        if value and not re.fullmatch(r"https?://[^\s/?#]+/[^\s?#]*", value):
            raise ValueError('should be "http://host:port/v1/metaserver", or "" for the proxy\'s own address')
        return value
