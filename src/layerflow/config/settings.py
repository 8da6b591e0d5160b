"""Typed settings: flags beat the environment, which beats the TOML file, which beats the defaults.

Every key is also ``LAYERFLOW_SECTION__KEY``; a section may hold sections, whose keys are
``section.inner.key`` and ``LAYERFLOW_SECTION__INNER__KEY``. Settings are frozen: a change while running is a new
:class:`Settings`, and :func:`live_changes` says whether the running server may take it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from layerflow.config.fields import (
    OptionalPath,
    Real,
    Section,
    Size,
    Whole,
    format_size,
    host,
    is_port,
    parse_size,
    setting,
)
from layerflow.config.peers import PeersSettings
from layerflow.config.pool import PoolSettings
from layerflow.config.proxy import ProxySettings
from layerflow.config.reference import RESTART, EffectiveRow, ReferenceRow, effective_rows, live_only, reference_rows
from layerflow.config.sources import (
    ALIASES,
    Source,
    Values,
    env_name,
    explain,
    merge,
    nested,
    read_environment,
    read_overrides,
    read_toml,
)
from layerflow.endpoint import default_endpoint, local_endpoint, socket_directory
from layerflow.errors import ConfigError
from layerflow.links import links

# The settings of prefill and decode apart: what is kept for a decoder, and what a lookup may wait for.


class PdSettings(Section):
    """Prefill and decode in engines of their own. Every key may change while the server runs."""

    follow: Literal["asked", "auto"] = setting(
        "asked",
        "Lookups hit what is still being stored where their request asks for it (a hand-off), or also where another "
        "engine is storing it and waiting is quicker than computing it.",
        live=True,
    )
    handoff_share: Real = setting(
        0.25,
        "Hand-offs keep at most this share of the arena; past it the oldest that is complete is taken back. Those of "
        "remote keys make room for this machine's engines, and for another key up to an equal part.",
        unit="of the arena",
        live=True,
        ge=0.0,
        le=0.9,
    )
    handoff_lease_s: Real = setting(
        30.0,
        "A complete hand-off is kept so long for a decoder that has not come, and after one that has.",
        unit="s",
        live=True,
        ge=0.1,
        le=3600,
    )


__all__ = [
    "ALIASES",
    "LogSettings",
    "PdSettings",
    "PeersSettings",
    "PoolSettings",
    "ProxySettings",
    "RecordSettings",
    "ReferenceRow",
    "ServerSettings",
    "Settings",
    "TransferSettings",
    "check_private",
    "format_size",
    "live_changes",
    "make_private",
    "make_private_directory",
    "parse_size",
    "reference",
]

MAX_TRANSFER_BLOCKS = 1 << 24
MIN_TRANSFER_BYTES = 4 << 10
MOST_SESSIONS = 4096
_DAY_MS = 86_400_000


def check_private(folder: Path) -> None:
    """Refuse a directory whose sockets another user could reach or replace, and so read every prompt's KV.

    :raises ConfigError: another user owns it or can enter it.
    :raises OSError: there is none.
    """
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: another user owns or can enter this directory of the server's sockets; "
            f"chmod 700 it, or give server.endpoint a directory of its own with mode 0700, e.g. ipc://{folder}/"
            "layerflow/control"
        )


def make_private_directory(endpoint: str) -> None:
    """Make the directory of an ``ipc://`` endpoint, 0700; other endpoints need none.

    :raises ConfigError: if it cannot be made, or is not private; see :func:`check_private`.
    """
    folder = socket_directory(endpoint)
    if folder is not None:
        make_private(folder)


def make_private(folder: Path) -> None:
    """Make a directory for the server's sockets, 0700.

    :raises ConfigError: if it cannot be made, or is not private; see :func:`check_private`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot make the directory of the server's sockets: {error.strerror}") from None


class ServerSettings(Section):
    """Where the server listens, and how it notices that a peer is gone."""

    endpoint: str = setting(
        default_endpoint,
        "Control socket for engines on this machine: ipc:// or, embedded, inproc://. Its directory is made 0700.",
        default_text="ipc:// and layerflow-UID/control in $XDG_RUNTIME_DIR, else in /tmp",
    )
    tcp_endpoint: str = setting("", "Control socket for other hosts, tcp://address:port; needs both CURVE files.")
    curve_secret_key_file: OptionalPath = setting(None, "File with the server's CURVE secret key.", secret=True)
    curve_allowed_keys_file: OptionalPath = setting(
        None, "File with the public keys of allowed clients, one a line with its roles."
    )
    http_host: str = setting("127.0.0.1", "Address of /healthz, /metrics and /status.")
    http_port: Whole = setting(9464, "Port of the same; 0 = any free port, -1 = off.", ge=-1, le=65535)
    heartbeat_ms: Whole = setting(500, "Heartbeat interval, both ways.", unit="ms", ge=10, le=60_000)
    liveness_ms: Whole = setting(
        2000, "A peer silent for so long is gone; at least two heartbeats.", unit="ms", ge=20, le=_DAY_MS
    )
    drain_timeout_s: Real = setting(
        10.0, "How long steps may finish after the server was asked to stop.", unit="s", ge=0, le=3600
    )
    max_message_bytes: Size = setting(
        16 << 20, "Largest control message accepted.", unit="bytes", ge=64 << 10, le=1 << 30
    )
    max_sessions: Whole = setting(64, "Engine workers attached at once.", unit="sessions", ge=1, le=MOST_SESSIONS)
    max_clients: Whole = setting(
        256, "Clients without memory, such as schedulers and tools, at once.", unit="sessions", ge=2, le=65_536
    )
    max_open_steps: Whole = setting(
        1024, "Steps that one engine worker may have unfinished.", unit="steps", ge=1, le=1 << 20
    )
    max_step_objects: Whole = setting(
        65_536, "Objects that one step may load and save together.", unit="objects", ge=1, le=1 << 24
    )
    max_open_bytes: Size = setting(
        256 << 30, "Bytes that one worker's unfinished steps may ask to be moved.", unit="bytes", ge=1 << 20
    )
    max_lookup_objects: Whole = setting(
        1 << 20, "Objects of one lookup: chunks x groups x shards.", unit="objects", ge=1, le=1 << 24
    )
    max_leases: Whole = setting(
        16_384, "Requests whose hits one client may have leased.", unit="requests", ge=1, le=1 << 24
    )
    max_client_bytes: Size = setting(
        64 << 20,
        "Memory that one client may make the server keep: messages and watches that wait, lookups, plans, leases.",
        unit="bytes",
        ge=1 << 20,
        le=1 << 40,
        live=True,
    )
    max_clients_bytes: Size = setting(
        1 << 30, "The same of all clients together.", unit="bytes", ge=1 << 20, le=1 << 40, live=True
    )
    max_described_bytes: Size = setting(
        256 << 20,
        "Memory for what engines say of their chunks, so that all of them can tell routers: 1.8 KB for 256 tokens.",
        unit="bytes",
        ge=0,
        le=1 << 40,
        live=True,
    )
    max_deadline_s: Real = setting(
        3600.0, "Longest deadline of a step, and longest lease, that a client may ask for.", unit="s", ge=1, le=86_400
    )

    @field_validator("endpoint")
    @classmethod
    def _local(cls, value: str) -> str:
        scheme, _, rest = value.partition("://")
        if scheme not in ("ipc", "inproc") or not rest:
            raise ValueError(
                'should be "ipc:///path/to/socket" or "inproc://name"; other hosts use server.tcp_endpoint'
            )
        return local_endpoint(value) if scheme == "ipc" else value

    @field_validator("tcp_endpoint")
    @classmethod
    def _remote(cls, value: str) -> str:
        name, _, port = value.removeprefix("tcp://").rpartition(":")
        if value and not (value.startswith("tcp://") and name and (port == "*" or is_port(port))):
            raise ValueError('should be "tcp://address:port", or "" for none')
        host(name.strip("[]"))
        return value

    @field_validator("http_host")
    @classmethod
    def _listens(cls, value: str) -> str:
        return host(value)

    @model_validator(mode="after")
    def _consistent(self) -> ServerSettings:
        if self.liveness_ms < 2 * self.heartbeat_ms:
            raise ValueError(
                f"liveness_ms = {self.liveness_ms} should be at least twice heartbeat_ms = {self.heartbeat_ms}: "
                "one late heartbeat must not cut a session"
            )
        if not self.max_message_bytes <= self.max_client_bytes <= self.max_clients_bytes:
            raise ValueError(
                f"max_client_bytes = {format_size(self.max_client_bytes)} should be at least max_message_bytes = "
                f"{format_size(self.max_message_bytes)}, so that each message may wait, and at most "
                f"max_clients_bytes = {format_size(self.max_clients_bytes)}"
            )
        if self.tcp_endpoint and not (self.curve_secret_key_file and self.curve_allowed_keys_file):
            raise ValueError(
                "tcp_endpoint needs curve_secret_key_file and curve_allowed_keys_file: layerflow does not listen "
                "on a network without knowing its peers"
            )
        return self


class TransferSettings(Section):
    """How layers move. Every key may change while the server runs."""

    prefetch_layers: Whole = setting(
        0,
        "Loads run at most so many layers ahead of compute; 0 = as far as max_inflight_bytes allows.",
        unit="layers",
        live=True,
        ge=0,
        le=10_000,
    )
    max_transfer_blocks: Whole = setting(
        4096,
        "Most blocks that one copy moves, each layer's counted; 0 = as many as max_transfer_bytes allows.",
        unit="blocks",
        live=True,
        ge=0,
        le=MAX_TRANSFER_BLOCKS,
    )
    max_transfer_bytes: Size = setting(
        64 << 20,
        "Most bytes that one copy moves, at least 4KiB; a larger block is split. 0 = half of max_inflight_bytes.",
        unit="bytes",
        live=True,
        ge=0,
    )
    max_inflight_bytes: Size = setting(
        256 << 20,
        "Most bytes in flight, over all sessions; saves take at most half. A quarter is the windows of loads by plan. "
        "What hosts move to and from the pool behind the arena, and from peers, counts for itself.",
        unit="bytes",
        live=True,
        ge=8 << 10,
    )
    save_backlog_bytes: Size = setting(
        4 << 30, "Saves that would take a session's unsaved bytes past this are shed.", unit="bytes", live=True
    )
    h2d_stagger_us: Whole = setting(
        0,
        "Distance of the slots in which tensor-parallel ranks begin to load a layer; 0 = off.",
        unit="us",
        live=True,
        ge=0,
        le=1_000_000,
    )
    copy_way: Literal["auto", "ranges", "kernel"] = setting(
        "auto",
        "How scattered blocks move to and from a device: each as a range of one call, by its copy engines; or all by a "
        "kernel on its cores, which cuda has; auto: the latter where blocks are smaller than 64 KiB.",
        live=True,
    )
    step_timeout_ms: Whole = setting(
        5000,
        "A step's loads that are not in place after so long have failed and are recomputed.",
        unit="ms",
        live=True,
        ge=1,
        le=_DAY_MS,
    )
    save_timeout_ms: Whole = setting(
        30_000, "A step's saves that are not stored after so long are dropped.", unit="ms", live=True, ge=1, le=_DAY_MS
    )
    mode: Literal["auto", "layerwise", "bulk"] = setting(
        "auto", "Load layer by layer, all layers at once, or whichever costs the request less.", live=True
    )
    discard_partial_chunks: bool = setting(False, "Do not store a prompt's last, partial chunk.", live=True)
    save_decode_cache: bool = setting(False, "Also store chunks that fill up while decoding.", live=True)

    @property
    def block_cap(self) -> int:
        """Most blocks that one copy moves."""
        return self.max_transfer_blocks or MAX_TRANSFER_BLOCKS

    @property
    def byte_cap(self) -> int:
        """Most bytes that one copy moves."""
        return self.max_transfer_bytes or self.max_inflight_bytes // 2

    @field_validator("max_transfer_bytes")
    @classmethod
    def _worth_a_copy(cls, value: int) -> int:
        if 0 < value < MIN_TRANSFER_BYTES:
            raise ValueError(
                f"should be at least {format_size(MIN_TRANSFER_BYTES)}, or 0 for half of max_inflight_bytes"
            )
        return value

    @model_validator(mode="after")
    def _budget(self) -> TransferSettings:
        if self.max_inflight_bytes < 2 * self.max_transfer_bytes:
            raise ValueError(
                f"max_inflight_bytes = {format_size(self.max_inflight_bytes)} should be at least twice "
                f"max_transfer_bytes = {format_size(self.max_transfer_bytes)}: saves get half of it"
            )
        return self


class LogSettings(Section):
    """What the server says, and how."""

    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe event that is logged.", live=True
    )
    slow_step_ms: Whole = setting(
        1000,
        "A step whose loads hold its engine for so long is logged, with where the time went; 0 = none is.",
        unit="ms",
        live=True,
        ge=0,
        le=_DAY_MS,
    )
    format: Literal["console", "json"] = setting("console", "For people, or one JSON object a line.")


class RecordSettings(Section):
    """A recording of what happens in the server. Both keys may change while it runs."""

    path: OptionalPath = setting(
        None,
        'File to record in, for `layerflow simulate`; "" = nothing is recorded. The one before is kept as FILE.1.',
        live=True,
    )
    max_bytes: Size = setting(
        256 << 20,
        "Size of the file; when it is full, what is oldest in it is overwritten.",
        unit="bytes",
        live=True,
        ge=1 << 20,
        le=1 << 40,
    )


class Settings(BaseSettings):
    """All settings. ``Settings(pool={"size": "4GiB"})`` takes only what it is given; see :meth:`load`.

    :raises ConfigError: one line per problem.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    server: ServerSettings = Field(default_factory=ServerSettings)
    pool: PoolSettings = Field(default_factory=PoolSettings)
    transfer: TransferSettings = Field(default_factory=TransferSettings)
    proxy: ProxySettings = Field(default_factory=ProxySettings)
    pd: PdSettings = Field(default_factory=PdSettings)
    peers: PeersSettings = Field(default_factory=PeersSettings)
    record: RecordSettings = Field(default_factory=RecordSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    @model_validator(mode="after")
    def _deadlines(self) -> Settings:
        most = self.server.max_deadline_s
        for key, value_ms in (
            ("transfer.step_timeout_ms", self.transfer.step_timeout_ms),
            ("transfer.save_timeout_ms", self.transfer.save_timeout_ms),
            ("pool.lease_ms", self.pool.lease_ms),
        ):
            if value_ms > most * 1e3:
                raise ValueError(f"{key} = {value_ms} should be at most server.max_deadline_s = {most:g} s")
        return self

    @model_validator(mode="after")
    def _link(self) -> Settings:
        if self.pool.hugepages and self.peers.used and not links()[self.peers.link].maps_arena:
            raise ValueError(
                f"peers.link = {self.peers.link!r} copies through the arena's descriptor, which memory of "
                'pool.hugepages does not take; use link = "tcp", or ordinary pages'
            )
        return self

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(type(self), error)) from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The constructor takes what it is given; :meth:`load` reads the file and the environment."""
        return (init_settings,)

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        called: str = "a flag",
        content: bytes | None = None,
    ) -> Settings:
        """Overrides, then environment, then the file, then defaults.

        :param path: a TOML file; None = none.
        :param content: the file's bytes, where they have been read already.
        :param overrides: ``{"pool.size": "4GiB"}`` or ``{"pool": {"size": ...}}``; None values are ignored.
        :param called: what messages call the overrides.
        :raises ConfigError: one line per problem, with the key, where it was set and what to write instead.
        """
        values, origin, problems = _gather(cls, path, overrides, called, content)
        try:
            settings = cls(**nested(values))
        except ConfigError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            problems.append(explain(cls, error.__cause__, origin))
        if problems:
            raise ConfigError("\n".join(problems))
        return settings


def _gather(
    model: type[Settings],
    path: Path | None,
    overrides: Mapping[str, Any] | None,
    called: str,
    content: bytes | None = None,
) -> tuple[Values, dict[str, str], list[str]]:
    """What file, environment and overrides set together, which of them set each ``section.key``, and what is none."""
    file = read_toml(model, path, content) if path is not None else Source({}, [])
    environment, flags = read_environment(model), read_overrides(model, overrides or {}, called)
    origin = {f"{section}.{key}": str(path) for section, keys in file.values.items() for key in keys}
    origin |= {
        f"{section}.{key}": env_name(section, key) for section, keys in environment.values.items() for key in keys
    }
    origin |= {f"{section}.{key}": called for section, keys in flags.values.items() for key in keys}
    sources = (file, environment, flags)
    return (
        merge(source.values for source in sources),
        origin,
        [problem for source in sources for problem in source.problems],
    )


def effective(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> list[EffectiveRow]:
    """Every key with the value that ``layerflow run`` would use, secrets masked, and what set it.

    :raises ConfigError: see :meth:`Settings.load`.
    """
    _, origin, _ = _gather(Settings, path, overrides, "a flag")
    return effective_rows(Settings.load(path, overrides), origin)


def overruled(path: Path, overrides: Mapping[str, Any], loaded: Settings, content: bytes) -> dict[str, str]:
    """Keys of a file that flags or the environment set to another value, and which of them.

    :param loaded: what all of them say together. :param content: the file's bytes.
    """
    file = read_toml(Settings, path, content).values
    _, origin, _ = _gather(Settings, path, overrides, "a flag", content)
    held = {row.key: row.value for row in effective_rows(loaded, origin)}
    found = {}
    for section, keys in file.items():
        for key, value in keys.items():
            name = f"{section}.{key}"
            if origin[name] == str(path):
                continue
            try:
                alone = effective_rows(Settings(**nested({section: {key: value}})), {})
            except ConfigError:  # it needs others beside it, and what it says alone is not known
                continue
            if any(row.key == name and row.value != held[name] for row in alone):
                found[name] = origin[name]
    return found


def live_changes(old: Settings, new: Settings, advice: str = RESTART) -> dict[str, Any]:
    """The live keys that differ, ``{"transfer.prefetch_layers": 3}``; empty if nothing does.

    A server takes no part in ``[proxy]``, which may stand in the same file: what changes there is not its business.

    :param advice: what to do about keys that need a restart.
    :raises ConfigError: if such keys differ, naming them; nothing may be applied then.
    """
    return live_only(old, new.model_copy(update={"proxy": old.proxy}), advice)


def reference() -> list[ReferenceRow]:
    """Every key with its type, default, unit, bounds and environment variable."""
    return reference_rows(Settings)
