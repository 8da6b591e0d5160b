"""The page at ``/``: what ``layerflow status`` shows, in one HTML document that loads nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from string import Template
from typing import Any

from layerflow.observe.overview import COLUMNS, TEXTS, overview

REFRESH_S = 5


def render(found: Mapping[str, Any]) -> str:
    """The document, which asks for itself again every :data:`REFRESH_S` seconds."""
    shown = overview(found)
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        refresh_s=REFRESH_S,
        title=escape(shown.title),
        notes="".join(f"<p class=note>{escape(note)}</p>" for note in shown.notes),
        workers=_table(shown.workers) if shown.workers else "",
        parts="".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in shown.parts.items()),
    )


def _table(workers: tuple[tuple[str, ...], ...]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = "".join(f"<tr>{''.join(_cell(index, text) for index, text in enumerate(row))}</tr>" for row in workers)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _cell(index: int, text: str) -> str:
    return f"<td{'' if index < TEXTS else ' class=figure'}>{escape(text)}</td>"
