"""The entry point of this backend, and its section of the configuration."""

from __future__ import annotations

from pydantic import field_validator

from layerflow.backends import Plugin
from layerflow.config.fields import (
    BackendOptions,
    Size,
    Whole,
    address,
    format_size,
    http_address,
    is_loopback,
    setting,
)

MIN_SEGMENT_BYTES = 16 << 20
"""Mooncake's own limit: a smaller segment is refused by its setup."""


class MooncakeSettings(BackendOptions):
    """A Mooncake store, used with ``backend = "mooncake"``."""

    master: str = setting("127.0.0.1:50051", "The master's RPC address, host:port.")
    metrics: str = setting(
        "http://127.0.0.1:9003", 'The master\'s HTTP, asked for its health; "" = only connect to `master`.'
    )
    metadata_server: str = setting("P2PHANDSHAKE", "P2PHANDSHAKE, or the URL of a metadata server.")
    hostname: str = setting("127.0.0.1", "This machine's name or address, as other clients of the store reach it.")
    port: Whole = setting(0, "Port of this client; 0 = a free one.", ge=0, le=65535)
    protocol: str = setting("tcp", "Transport between clients: tcp, rdma, or another that the package was built with.")
    devices: str = setting("", 'RDMA devices, separated by commas; "" = all that Mooncake finds.')
    segment_size: Size = setting(
        1 << 30, "Memory that this machine gives to the store; 0 = none, else at least 16MiB.", unit="bytes"
    )
    replicas: Whole = setting(1, "Copies of each object, on different segments.", unit="copies", ge=1, le=64)
    preferred_segment: str = setting("", 'Segment that objects go to where it has room; "" = the store decides.')
    soft_pin: bool = setting(False, "Pin objects softly: the store evicts others first.")
    warm: bool = setting(True, "Touch the segment's pages at start.")

    _master = field_validator("master")(address)
    _metrics = field_validator("metrics")(http_address)

    @field_validator("metadata_server", "hostname", "protocol")
    @classmethod
    def _given(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("should not be empty")
        return value.strip()

    @field_validator("segment_size")
    @classmethod
    def _segment(cls, value: int) -> int:
        if 0 < value < MIN_SEGMENT_BYTES:
            raise ValueError(f"should be 0 or at least {format_size(MIN_SEGMENT_BYTES)}, a limit of Mooncake")
        return value

    def unreachable(self) -> tuple[str, str] | None:
        """See :meth:`BackendOptions.unreachable`."""
        if not is_loopback(f"{self.hostname}:0") or is_loopback(self.master):
            return None
        return (
            f"pool.mooncake.hostname = {self.hostname!r} is this machine's loopback, and the master is elsewhere "
            f"({self.master}): the other machines of the pool cannot reach this one",
            "set pool.mooncake.hostname to an address of this machine that the others reach",
        )


PLUGIN = Plugin(
    backend="layerflow.hosts.mooncake.backend:Mooncake",
    options=MooncakeSettings,
    examine="layerflow.hosts.mooncake.examine:examine",
)
