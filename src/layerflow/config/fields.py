"""The building blocks of the settings: sizes, fields with a unit, and sections."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from layerflow.endpoint import expanded
from layerflow.errors import ConfigError

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5})")
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}{rest}": 1024**power for power, letter in enumerate("kmgt", 1) for rest in ("ib", "i", "")}
MOST_BYTES = 1 << 60
"""Largest size. Sums and shares of sizes then fit the 64 bits that a message has for them."""
MOST_SHOWN = 200
"""Characters of a value that is refused."""
_BINARY = tuple((1024**power, f"{letter}iB") for power, letter in reversed([*enumerate("KMGT", 1)]))


def parse_size(value: int | str) -> int:
    """Bytes from a number of bytes or from text such as ``"512MiB"``, ``"4Gi"``, ``"16G"``, ``"512m"``, ``"10GB"``.

    ``KiB``, ``Ki`` (Kubernetes) and ``K`` (Docker, systemd, mount) are powers of 1,024, ``kB`` and ``MB`` powers of
    1,000, in any case.

    :raises ConfigError: for anything else: negative numbers, fractions of a byte, more than :data:`MOST_BYTES`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"{value} is not a size: it must not be negative")
        return _bounded(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f'{shown(value)} is not a size; write bytes or a unit, e.g. 1048576, "512MiB", "4Gi" or "10GB"'
        )
    nbytes = Decimal(match[1]) * factor
    whole = _bounded(nbytes)
    if nbytes != whole:
        raise ConfigError(f"{value!r} is not a whole number of bytes")
    return whole


def _bounded(nbytes: int | Decimal) -> int:
    if nbytes > MOST_BYTES:
        raise ConfigError("no size is above 1048576TiB (2^60 bytes)")
    return int(nbytes)


def shown(value: object) -> str:
    """`value` as Python writes it, of a long one the beginning: what is refused goes to logs and to the status."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"


def format_size(nbytes: int) -> str:
    """`nbytes` in the largest binary unit that divides it: ``"64MiB"``; plain digits where none does."""
    for factor, unit in _BINARY:
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def is_port(text: str) -> bool:
    """Whether it is the number of a port, or 0 for any free one. Sockets take larger numbers modulo 65,536."""
    return len(text) <= 5 and text.isdecimal() and int(text) <= 65535


def host(value: str) -> str:
    """`value` if it can be the name or the address of a host, as :func:`socket.getaddrinfo` takes it.

    :raises ValueError: it can be none; a look-up would fail by other errors than those of a network.
    """
    try:
        value.encode("idna")
    except UnicodeError:
        raise ValueError(f"{shown(value)} is no host: a label of a name is empty, or too long") from None
    if not value.isprintable() or " " in value:
        raise ValueError(f"{shown(value)} is no host: there is a blank in it, or what cannot be printed")
    return value


def address(value: str, scheme: str = "") -> str:
    """`value` if it is ``host:port`` after `scheme`.

    :raises ValueError: it is not.
    """
    match = _ADDRESS.fullmatch(value.removeprefix(scheme))
    if not value.startswith(scheme) or match is None or not 0 < int(match[2]) <= 65535:
        raise ValueError(f'should be "{scheme}host:port"')
    host(match[1].strip("[]"))
    return value


def http_address(value: str) -> str:
    """`value` if it is ``http://host:port`` or empty.

    :raises ValueError: it is neither.
    """
    if not value:
        return value
    try:
        return address(value.rstrip("/"), "http://")
    except ValueError:
        raise ValueError('should be "http://host:port", or "" for none') from None


def is_loopback(address: str) -> bool:
    """Whether ``host:port``, with or without a scheme, is a machine's own loopback, which no other machine reaches."""
    host = address.rpartition("://")[2].rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _to_size(value: Any) -> int:
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _not_bool(value: Any) -> Any:
    """Python counts True as 1; an operator who writes `true` for a number made a mistake."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    return value


def _no_path(value: Any) -> Any:
    return None if value == "" else expanded(value)


Size = Annotated[int, BeforeValidator(_to_size)]
Whole = Annotated[int, BeforeValidator(_not_bool)]
Real = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
OptionalPath = Annotated[Path | None, BeforeValidator(_no_path)]
PathText = Annotated[str, BeforeValidator(expanded)]
"""A path, or "" for none."""


def setting(
    default: Any,
    description: str,
    *,
    unit: str = "",
    live: bool = False,
    secret: bool = False,
    ge: float | None = None,
    le: float | None = None,
    default_text: str = "",
) -> Any:
    """A field of a section.

    :param default: the value, or a function that makes it.
    :param unit: what the number counts: ``"ms"``, ``"bytes"``; ``""`` for text and switches.
    :param live: whether the running server takes a new value.
    :param secret: shown as ``***`` by ``repr`` and by listings.
    :param ge: smallest value allowed.
    :param le: largest value allowed.
    :param default_text: the default as the reference shows it, where it depends on the machine.
    """
    extra: dict[str, Any] = {"unit": unit, "live": live, "secret": secret, "default_text": default_text}
    common: dict[str, Any] = {"description": description, "ge": ge, "le": le, "json_schema_extra": extra}
    if callable(default):
        return Field(default_factory=default, **common)
    return Field(default=default, **common)


def marks(model: type[BaseModel], key: str) -> dict[str, Any]:
    """What :func:`setting` noted beside the type of field `key`: unit, live, secret, default_text."""
    extra = model.model_fields[key].json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}


class Section(BaseModel):
    """One table of the TOML file. Frozen; unknown keys are refused; secrets are masked in ``repr``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __repr_args__(self) -> Any:
        for key, value in super().__repr_args__():
            hidden = key is not None and value is not None and marks(type(self), key).get("secret")
            yield key, "***" if hidden else value


class BackendOptions(Section):
    """The section ``[pool.NAME]`` of a backend."""

    def unreachable(self) -> tuple[str, str] | None:
        """Why the other machines of a shared pool could not reach this one, and what to do; None = they can."""
        return None

    def for_host(self) -> dict[str, Any]:
        """What its class is made from in the host process, as JSON's types."""
        return self.model_dump(mode="json")

    def for_workers(self) -> dict[str, Any] | None:
        """What an engine worker's own client of the pool is made from; None = bytes pass the arena only."""
        return None
