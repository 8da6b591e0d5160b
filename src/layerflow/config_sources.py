"""Where settings come from: the TOML file, the environment, overrides; and what users call them elsewhere.

Each source is brought to the same shape, ``{section: {key: value}}`` with layerflow's own names,
before sources are merged: a flag under layerflow's name then beats a file that uses an alias.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, TomlConfigSettingsSource

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
    return f"{ENV_PREFIX}{section}__{key}".upper()


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The section classes of a settings class, by name."""
    return {
        name: field.annotation
        for name, field in model.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def known_keys(model: type[BaseModel]) -> list[str]:
    """Every ``section.key``."""
    return [f"{name}.{key}" for name, section in sections(model).items() for key in section.model_fields]


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
    for variable in os.environ:
        section, found, key = variable.removeprefix(ENV_PREFIX).lower().partition("__")
        if not variable.startswith(ENV_PREFIX):
            continue
        if found and section not in known:
            raise ConfigError(f"{variable}: {_unknown(model, f'{section}.{key}')}")
        if section in known and not found:
            raise ConfigError(f"{variable}: {section} is a section; write {variable}__KEY=value")
    source = EnvSettingsSource(model, case_sensitive=False, env_prefix=ENV_PREFIX, env_nested_delimiter="__")
    return _canonical(model, source(), "environment")


def read_overrides(model: type[BaseSettings], overrides: Mapping[str, Any]) -> Values:
    """Flags: ``{"section.key": value}`` or ``{"section": {"key": value}}``; None = not given.

    :raises ConfigError: for an unknown section or key.
    """
    raw: dict[str, Any] = {}
    for name, value in overrides.items():
        section, dotted, key = name.partition(".")
        if value is None:
            continue
        if dotted:
            raw.setdefault(section, {})[key] = value
        elif isinstance(value, Mapping):
            raw.setdefault(section, {}).update(value)
        else:
            raw[name] = value
    return _canonical(model, raw, "flags")


def merge(sources: Iterable[Values]) -> Values:
    """One set of values; later sources win key by key."""
    merged: Values = {}
    for source in sources:
        for section, table in source.items():
            merged.setdefault(section, {}).update(table)
    return merged


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
    known = known_keys(model)
    bare = place.rpartition(".")[2]
    by_key = {key.rpartition(".")[2]: key for key in known} | {old: ".".join(new) for old, new in ALIASES.items()}
    same_section = difflib.get_close_matches(place, known, n=1, cutoff=0.75) if "." in place else []
    elsewhere = [by_key[name] for name in difflib.get_close_matches(bare, by_key, n=1, cutoff=0.6)]
    exact = [by_key[bare]] if bare in by_key else []
    section = difflib.get_close_matches(place, sections(model), n=1, cutoff=0.75)
    close = exact or section or same_section or elsewhere
    hint = f"did you mean {close[0]}?" if close else "`layerflow config` lists every key"
    return f"{place} is not a setting; {hint}"


def _canonical(model: type[BaseModel], raw: Mapping[str, Any], origin: str) -> Values:
    """Rename aliases, refuse what layerflow does not have; every problem in one error."""
    known = sections(model)
    values: Values = {}
    problems: list[str] = []

    def put(place: str, section: str, key: str, value: Any) -> None:
        if key in values.setdefault(section, {}):
            problems.append(f"{place} and {section}.{key} are the same setting; keep one of them")
        values[section][key] = value

    flat: list[tuple[str, str, Any]] = []
    for name, value in raw.items():
        if name in known and isinstance(value, Mapping):
            flat += [(name, key, item) for key, item in value.items()]
        elif name in known:
            problems.append(f"{name} is a section; write [{name}] and its keys below it")
        else:
            flat.append(("", name, value))
    # A section's own keys first, so that an alias finds what it repeats.
    flat.sort(key=lambda item: not item[0] or item[1] not in known[item[0]].model_fields)
    for table, key, value in flat:
        place = f"{table}.{key}" if table else key
        if table and key in known[table].model_fields:
            put(place, table, key, value)
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
