"""The settings of peers: other servers whose arenas this one reads, and who may read this one's."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, field_validator, model_validator

from layerflow.config.fields import Real, Section, Whole, address, host, is_port, setting
from layerflow.endpoint import local_endpoint
from layerflow.links import link_names, links

Z85_KEY = 40
"""Characters of a CURVE key in Z85 (rfc.zeromq.org/spec/32)."""
MAX_ATTACHED = 256
"""Servers that one server attaches to."""


def _server_key(value: str) -> str:
    if value and (len(value) != Z85_KEY or not value.isascii() or " " in value):
        raise ValueError(f"should be a CURVE public key of {Z85_KEY} Z85 characters")
    return value


class PeerAddress(Section):
    """One server to read from: an item of ``peers.attach``."""

    name: str = setting(..., "What it is called, in logs, metrics and status.")
    address: str = setting(..., "Its control socket: tcp://host:port, or ipc:///path on this machine.")
    server_key: str = setting("", "Its CURVE public key; needed for tcp.")

    @field_validator("address")
    @classmethod
    def _reachable(cls, value: str) -> str:
        if value.startswith("ipc://"):
            return local_endpoint(value)
        try:
            return address(value, "tcp://")
        except ValueError:
            raise ValueError('should be "tcp://host:port" or "ipc:///path"') from None

    @field_validator("server_key")
    @classmethod
    def _key(cls, value: str) -> str:
        return _server_key(value)

    @model_validator(mode="after")
    def _secure(self) -> PeerAddress:
        if self.address.startswith("tcp://") and not self.server_key:
            raise ValueError(f"{self.name}: a peer at tcp:// needs its server_key: layerflow trusts no network")
        return self


def _listed(value: Any) -> Any:
    """From the environment it comes as JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value) if value.strip() else ()
        except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, deeply nested arrays
            raise ValueError(f"should be a list of tables, in the environment as JSON: {error}") from None
    return value


class PeersSettings(Section):
    """Other servers whose arenas this one may read from, and what it lends them of its own."""

    attach: Annotated[tuple[PeerAddress, ...], BeforeValidator(_listed)] = setting(
        (),
        "Servers to read from: tables with name, address and server_key (for tcp). Lookups find what they have.",
    )
    learn: bool = setting(
        False, "Requests may name servers that are not listed: at ipc:// of this machine, at tcp:// with server_key."
    )
    server_key: str = setting("", "CURVE public key of servers at tcp:// that a request names and that are not listed.")
    serve: bool = setting(False, "Let other servers read this arena; those of tcp by the allow-list of server keys.")
    link_address: str = setting(
        "", 'Where readers fetch bytes, "host:port", port 0 = any; "" = the host of server.tcp_endpoint, any port.'
    )
    link_advertise: str = setting(
        "", 'What readers are told instead, "host:port", where they reach it by another address; "" = as it listens.'
    )
    link: str = setting(
        "tcp", "What bytes of peers come over, the same at both ends: tcp, nixl or mooncake (docs/peers.md)."
    )
    trusted_network: bool = setting(
        False,
        "Whoever can reach this machine's ports may read and write what nixl or mooncake has registered. "
        "These links are refused unless this is true.",
    )
    lookup_timeout_ms: Whole = setting(
        50, "How long a lookup waits for peers; what it did not hear of is a miss.", unit="ms", ge=1, le=60_000
    )
    lease_ms: Whole = setting(
        10_000,
        "What was found at a peer is kept there so long without being read; of this arena, no longer for any reader.",
        unit="ms",
        ge=100,
        le=3_600_000,
    )
    lease_share: Real = setting(
        0.25,
        "What all peers' leases may pin of this arena; each key's an equal part, where several want some.",
        unit="of the arena",
        ge=0.01,
        le=1,
    )
    link_gbps: Real = setting(
        0,
        "Emulate a link of so many gigabytes (10^9 bytes) per second from peers; 0 = off.",
        unit="GB/s",
        ge=0,
        le=10_000,
    )
    max_readers: Whole = setting(
        64,
        "Servers that read this arena at once; past it the key with most makes room for others.",
        unit="servers",
        ge=1,
        le=1024,
    )
    max_leases: Whole = setting(1024, "Leases that one of them may have.", unit="leases", ge=1, le=65_536)

    @property
    def used(self) -> bool:
        """This server lends, or reads."""
        return bool(self.serve or self.learn or self.attach)

    @field_validator("server_key")
    @classmethod
    def _key(cls, value: str) -> str:
        return _server_key(value)

    @field_validator("link_advertise")
    @classmethod
    def _told(cls, value: str) -> str:
        return address(value) if value else value

    @field_validator("link_address")
    @classmethod
    def _listens(cls, value: str) -> str:
        name, _, port = value.rpartition(":")
        if value and not (name and is_port(port)):
            raise ValueError('should be "host:port", or "" for the host of server.tcp_endpoint')
        host(name.strip("[]"))
        return value

    @field_validator("link")
    @classmethod
    def _there(cls, value: str) -> str:
        if value not in link_names():
            raise ValueError(f"there is no such link; there are {', '.join(link_names())}")
        return value

    @model_validator(mode="after")
    def _trusted(self) -> PeersSettings:
        if self.used and self.link != "tcp" and links()[self.link].trusts_network and not self.trusted_network:
            raise ValueError(
                f"link = {self.link!r}: its data plane knows no keys, and lets whoever reaches it read and write the "
                "window that it moves bytes through; set trusted_network = true if nobody else is on that network, or "
                'link = "tcp"'
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> PeersSettings:
        names = [peer.name for peer in self.attach]
        if len(set(names)) < len(names) or len(names) > MAX_ATTACHED:
            raise ValueError(f"attach: names should differ, and be at most {MAX_ATTACHED}")
        return self
