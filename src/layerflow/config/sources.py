"""Where settings come from: the TOML file, the environment, overrides; and what users call them elsewhere.

Each source is brought to the same shape, ``{section: {key: value}}`` with layerflow's own names
(``pool.disk`` for the section in a section), before sources are merged: a flag under layerflow's name
then beats a file that uses an alias.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, TomlConfigSettingsSource

from layerflow.errors import ConfigError

ENV_PREFIX = "LAYERFLOW_"
Values = dict[str, dict[str, Any]]

# What the layerwise KV pool connectors of serving engines call these settings.
ALIASES = {
    "layerwise_prefetch_layers": ("transfer", "prefetch_layers"),
    "layerwise_max_transfer_blocks": ("transfer", "max_transfer_blocks"),
    "layerwise_max_transfer_bytes": ("transfer", "max_transfer_bytes"),
    "h2d_stagger_us": ("transfer", "h2d_stagger_us"),
    "discard_partial_chunks": ("transfer", "discard_partial_chunks"),
    "backend": ("pool", "backend"),
}
REFUSED = {
    "lookup_rpc_port": "layerflow has no lookup port: every engine process uses server.endpoint; remove this key",
}
_ALIAS_TABLES = ("", "transfer")


def env_name(section: str, key: str) -> str:
    """The environment variable that sets ``section.key``."""
    return f"{ENV_PREFIX}{section}__{key}".replace(".", "__").upper()


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The section classes of a settings class by dotted name, each before those inside it."""
    return dict(_sections(model, ""))


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield prefix + key, field.annotation
            yield from _sections(field.annotation, f"{prefix}{key}.")


def own_keys(section: type[BaseModel]) -> list[str]:
    """A section's keys, without the sections inside it."""
    inner = dict(_sections(section, ""))
    return [key for key in section.model_fields if key not in inner]


def known_keys(model: type[BaseModel]) -> list[str]:
    """Every ``section.key``."""
    return [f"{name}.{key}" for name, section in sections(model).items() for key in own_keys(section)]


def read_toml(model: type[BaseSettings], path: Path) -> Values:
    """The file's tables under layerflow's names.

    :raises ConfigError: if it cannot be read, is not TOML, or names unknown settings.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    try:
        raw = TomlConfigSettingsSource(model, toml_file=path)()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return _canonical(model, raw, str(path))


def read_environment(model: type[BaseSettings]) -> Values:
    """The ``LAYERFLOW_SECTION__KEY`` variables under layerflow's names.

    A variable without the double underscore is not ours: Kubernetes sets ``LAYERFLOW_PORT`` and the
    like for a service of that name.

    :raises ConfigError: for an unknown section or key.
    """
    known = sections(model)
    found: dict[str, Any] = {}
    for variable, value in os.environ.items():
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        place = variable[len(ENV_PREFIX) :].lower().replace("__", ".")
        if place in known:
            raise ConfigError(f"{variable}: {place} is a section; write {variable}__KEY=value")
        if "." not in place:
            continue
        if place.partition(".")[0] not in known:
            raise ConfigError(f"{variable}: {_unknown(model, place)}")
        found[place] = value
    return _canonical(model, found, "environment")


def read_overrides(model: type[BaseSettings], overrides: Mapping[str, Any], called: str) -> Values:
    """Flags: ``{"section.key": value}`` or ``{"section": {"key": value}}``; None = not given.

    :param called: what messages call them.
    :raises ConfigError: for an unknown section or key.
    """
    return _canonical(model, {name: value for name, value in overrides.items() if value is not None}, called)


def merge(sources: Iterable[Values]) -> Values:
    """One set of values; later sources win key by key."""
    merged: Values = {}
    for source in sources:
        for section, table in source.items():
            merged.setdefault(section, {}).update(table)
    return merged


def nested(values: Values) -> dict[str, Any]:
    """`values` with the sections in sections where the settings classes have them."""
    tree: dict[str, Any] = {}
    for section, table in values.items():
        inner = tree
        for name in section.split("."):
            inner = inner.setdefault(name, {})
        inner.update(table)
    return tree


def explain(model: type[BaseModel], error: ValidationError, origin: Mapping[str, str] | None = None) -> str:
    """One line per problem: key, value, where it came from, what is wrong.

    :param origin: where a key's value was set, by ``section.key``.
    """
    lines = []
    for problem in error.errors(include_url=False):
        place = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown(model, place))
            continue
        message = problem["msg"].removeprefix("Value error, ").replace("Input should", "should")
        if problem["type"].startswith("bool_"):
            message = "should be true or false"
        if not place or not isinstance(problem["input"], str | int | float):
            lines.append(f"{place}: {message}" if place else message)
            continue
        where = f" (set by {origin[place]})" if origin and place in origin else ""
        lines.append(f"{place} = {problem['input']!r}{where}: {message}")
    return "\n".join(lines)


def _unknown(model: type[BaseModel], place: str) -> str:
    """`place` is no setting; the closest ones by whole name, else by key in whatever section."""
    known, tables = known_keys(model), sections(model)
    bare = place.rpartition(".")[2]
    by_key: dict[str, list[str]] = {}
    for key in known:
        by_key.setdefault(key.rpartition(".")[2], []).append(key)
    for old, new in ALIASES.items():
        by_key.setdefault(old, []).append(".".join(new))
    by_table = {name.rpartition(".")[2]: name for name in tables} | {name: name for name in tables}

    def nearest(names: list[str]) -> list[str]:
        return sorted(names, key=lambda name: difflib.SequenceMatcher(None, place, name).ratio(), reverse=True)[:1]

    near = difflib.get_close_matches(place, [*by_table, *known] if "." in place else by_table, n=1, cutoff=0.75)
    whole = [by_table.get(name, name) for name in near]
    elsewhere = [key for name in difflib.get_close_matches(bare, by_key, n=1, cutoff=0.6) for key in by_key[name]]
    close = nearest(by_key.get(bare, [])) or whole or nearest(elsewhere)
    hint = f"did you mean {close[0]}?" if close else "`layerflow config` lists every key"
    return f"{place} is not a setting; {hint}"


def _flat(known: Container[str], raw: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    """``section.key`` and value of everything in `raw`; a mapping that is no section stays a value."""
    for name, value in raw.items():
        place = f"{table}.{name}" if table else name
        if place in known and isinstance(value, Mapping):
            yield from _flat(known, value, place)
        else:
            yield place, value


def _canonical(model: type[BaseModel], raw: Mapping[str, Any], origin: str) -> Values:
    """Rename aliases, refuse what layerflow does not have; every problem in one error."""
    known = {name: own_keys(section) for name, section in sections(model).items()}
    values: Values = {}
    problems: list[str] = []

    def put(place: str, section: str, key: str, value: Any) -> None:
        if key in values.setdefault(section, {}):
            problems.append(f"{place} and {section}.{key} are the same setting; keep one of them")
        values[section][key] = value

    flat = [(*place.rpartition(".")[::2], value) for place, value in dict(_flat(known, raw)).items()]
    # A section's own keys first, so that an alias finds what it repeats.
    flat.sort(key=lambda item: item[1] not in known.get(item[0], ()))
    for table, key, value in flat:
        place = f"{table}.{key}" if table else key
        if key in known.get(table, ()):
            put(place, table, key, value)
        elif place in known:
            problems.append(f"{place} is a section; write [{place}] and its keys below it")
        elif key in REFUSED:
            problems.append(f"{place}: {REFUSED[key]}")
        elif table in _ALIAS_TABLES and key in ALIASES:
            put(place, *ALIASES[key], value)
        elif table in _ALIAS_TABLES and key == "use_layerwise":
            _use_layerwise(values.setdefault("transfer", {}), place, value, problems)
        else:
            problems.append(_unknown(model, place))
    if problems:
        raise ConfigError("\n".join(f"{origin}: {problem}" for problem in problems))
    return values


def _use_layerwise(transfer: dict[str, Any], place: str, value: Any, problems: list[str]) -> None:
    """The source systems' switch: false means mode = "bulk"; true leaves the choice to "auto"."""
    switch = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if switch is None:
        problems.append(f"{place} = {value!r}: should be true or false")
    elif "mode" not in transfer:
        transfer["mode"] = "auto" if switch else "bulk"
    elif switch == (transfer["mode"] == "bulk"):
        problems.append(f"{place} = {str(switch).lower()} contradicts transfer.mode = {transfer['mode']!r}; keep mode")
