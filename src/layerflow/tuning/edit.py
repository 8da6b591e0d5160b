"""A configuration file with some keys changed, and nothing else: its comments, order and spelling stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from tomlkit.items import Item, Table

from layerflow.config.fields import format_size
from layerflow.config.settings import Settings
from layerflow.config.sources import ALIASES, read_toml
from layerflow.errors import ConfigError


class Written(NamedTuple):
    """A value for a key, as TOML has it, and the comment behind it."""

    value: Any
    comment: str


def edited(text: str, changes: Mapping[str, Written]) -> str:
    """The file's text with these keys changed, each where it stands, or added to its section.

    :param changes: by ``section.key``. A key that the file calls by another connector's name is changed under that.
    :raises ConfigError: the text is no configuration, or says something so that it cannot be changed alone.
    """
    before = read_toml(Settings, Path("the file"), text.encode()).values
    document = tomlkit.parse(text)
    for key, (value, comment) in changes.items():
        section, _, name = key.rpartition(".")
        if key == "transfer.mode" and any("use_layerwise" in place for place in _places(document)):
            raise ConfigError("the file says use_layerwise, which is transfer.mode; write mode instead, and tune again")
        for place in _places(document):
            alias = next((old for old, new in ALIASES.items() if new == (section, name) and old in place), None)
            if alias is not None:
                _put(place, alias, value, comment)
                break
        else:
            _put(_table(document, section), name, value, comment)
    after_text = tomlkit.dumps(document)
    after = read_toml(Settings, Path("the file"), after_text.encode()).values
    for key, (value, _) in changes.items():
        section, _, name = key.rpartition(".")
        before.setdefault(section, {})[name] = value
    if after != before:
        raise ConfigError("the file is written so that these keys cannot be changed alone; write them by hand")
    return after_text


def _places(document: tomlkit.TOMLDocument) -> list[Any]:
    """Where another connector's names may stand."""
    transfer = document.get("transfer")
    return [document] if transfer is None else [document, transfer]


def _table(document: tomlkit.TOMLDocument, section: str) -> Any:
    place: Any = document
    for name in section.split("."):
        if name not in place:
            if place is document and len(document):
                document.add(tomlkit.nl())
            place.add(name, tomlkit.table())
        place = place[name]
    return place


def _put(place: Any, name: str, value: Any, comment: str) -> None:
    item: Item = tomlkit.item(value)
    if name in place:
        own = str(place[name].trivia.comment).lstrip("# ").strip()
        item.comment(f"{comment} | {own}" if own else comment)
        place[name] = item
        return
    item.comment(comment)
    if isinstance(place, Table):
        # Behind the section's last key, before the blank lines and comments that lead to the next one.
        body, tail = place.value.body, []
        while body and body[-1][0] is None:
            tail.append(body.pop())
        place.append(name, item)
        body.extend(reversed(tail))
        return
    place[name] = item


def as_toml(key: str, value: Any) -> Any:
    """A setting's value as a person writes it: sizes with their unit."""
    if isinstance(value, int) and not isinstance(value, bool) and (key.endswith("_bytes") or key == "pool.size"):
        return format_size(value)
    return value
