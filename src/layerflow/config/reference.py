"""What the settings are, read off their classes: the reference table, and what changed between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from layerflow.config.fields import format_size, marks
from layerflow.config.sources import env_name, own_keys, sections
from layerflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """One setting as the documentation shows it.

    :param key: ``section.key`` or ``section.inner.key``.
    :param default: as people read it; words where it depends on the machine.
    :param default_toml: as a file would say it, on this machine.
    :param unit: what the number counts, ``""`` for text and switches.
    :param bounds: e.g. ``"0 ... 65535"``; ``""`` if unbounded.
    :param live: whether the running server takes a new value.
    :param env: the environment variable that sets it.
    """

    key: str
    type: str
    default: str
    default_toml: str
    unit: str
    bounds: str
    live: bool
    env: str
    description: str


def reference_rows(model: type[BaseModel]) -> list[ReferenceRow]:
    """A row for every key, in the order of the classes."""
    return [
        _row(name, section, key, section.model_fields[key])
        for name, section in sections(model).items()
        for key in own_keys(section)
    ]


@dataclass(frozen=True, slots=True)
class EffectiveRow:
    """One setting as it would be used.

    :param value: as text; ``"***"`` for a secret.
    :param origin: the file, variable or flag that set it; ``""`` = the default.
    """

    key: str
    value: str
    origin: str


def effective_rows(settings: BaseModel, origin: Mapping[str, str]) -> list[EffectiveRow]:
    """A row for every key, in the order of the classes.

    :param origin: what set a ``section.key``.
    """
    rows = []
    for name, section in sections(type(settings)).items():
        held = attrgetter(name)(settings)
        for key in own_keys(section):
            noted, value = marks(section, key), getattr(held, key)
            text = _text(value, noted["unit"] == "bytes").strip('"')
            place = f"{name}.{key}"
            rows.append(EffectiveRow(place, "***" if noted["secret"] and value else text, origin.get(place, "")))
    return rows


def changed(old: BaseModel, new: BaseModel) -> tuple[dict[str, Any], dict[str, str]]:
    """What differs: live keys with their new value, other keys with the old and the new one as shown to people."""
    live: dict[str, Any] = {}
    fixed: dict[str, str] = {}
    for name, section in sections(type(old)).items():
        before, after = attrgetter(name)(old), attrgetter(name)(new)
        for key in own_keys(section):
            pair = getattr(before, key), getattr(after, key)
            if pair[0] == pair[1]:
                continue
            noted = marks(section, key)
            if noted.get("live"):
                live[f"{name}.{key}"] = pair[1]
            else:
                fixed[f"{name}.{key}"] = "*** -> ***" if noted.get("secret") else _shown(section, key, pair)
    return live, fixed


def _shown(section: type[BaseModel], key: str, pair: tuple[Any, Any]) -> str:
    size = marks(section, key).get("unit") == "bytes"
    before, after = (format_size(value) if size else value for value in pair)
    default = section.model_fields[key].get_default(call_default_factory=True, validated_data={})
    return f"{before} -> {after}" + (", its default" if pair[1] == default else "")


RESTART = "restart layerflow, the old values stay until then"


def live_only(old: BaseModel, new: BaseModel, advice: str = RESTART) -> dict[str, Any]:
    """The changed live keys.

    :param advice: what to do about others.
    :raises ConfigError: naming every changed key that needs a restart.
    """
    live, fixed = changed(old, new)
    if fixed:
        listed = ", ".join(f"{key} ({shown})" for key, shown in fixed.items())
        raise ConfigError(f"cannot change while running: {listed}; {advice}")
    return live


def _row(name: str, section: type[BaseModel], key: str, field: FieldInfo) -> ReferenceRow:
    noted = marks(section, key)
    size = noted["unit"] == "bytes"
    default = field.get_default(call_default_factory=True)
    return ReferenceRow(
        key=f"{name}.{key}",
        type=_type(field, size),
        default=noted["default_text"] or _text(default, size),
        default_toml=_text(default, size),
        unit=noted["unit"],
        bounds=_bounds(field, size),
        live=noted["live"],
        env=env_name(name, key),
        description=field.description or "",
    )


def _type(field: FieldInfo, size: bool) -> str:
    if size:
        return "size"
    annotation: Any = field.annotation
    options = get_args(annotation)
    if get_origin(annotation) is tuple:
        return "list"
    if Path in options:
        return "path"
    if options:
        return " | ".join(f'"{option}"' for option in options)
    return {"str": "text", "int": "integer", "float": "number", "bool": "true | false"}[annotation.__name__]


def _text(value: Any, size: bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if size:
        return f'"{format_size(value)}"'
    if isinstance(value, tuple):
        return f"[{', '.join(str(item) for item in value)}]"
    if value is None or isinstance(value, str | Path):
        return f'"{value or ""}"'
    return str(value) if isinstance(value, int) else f"{value:g}"


def _bounds(field: FieldInfo, size: bool) -> str:
    low = next((item.ge for item in field.metadata if isinstance(item, Ge)), None)
    high = next((item.le for item in field.metadata if isinstance(item, Le)), None)

    def text(bound: Any) -> str:
        return format_size(bound) if size else f"{bound:,}"

    if low is not None and high is not None:
        return f"{text(low)} ... {text(high)}"
    if low is not None:
        return f">= {text(low)}"
    return f"<= {text(high)}" if high is not None else ""
