"""The screens of ``layerflow status``: the overview, as wide as the terminal is, and the tables of ``--all``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from layerflow.observe.overview import COLUMNS, TEXTS, overview
from layerflow_cli.output import folded, tables

_GAP = 2


def view(found: Mapping[str, Any], width: int, everything: bool = False, height: int | None = None) -> RenderableType:
    """A status to print.

    :param found: what the server said.
    :param width: of the terminal, characters.
    :param everything: also each session, the limits, the core's statistics and all metrics.
    :param height: rows of workers that do not fit into so many lines are counted instead; None = there is no limit.
    """
    shown = Text("\n".join(screen(found, width, height)))
    if not everything:
        return shown
    parts: list[RenderableType] = [shown, Text("")]
    for session in found.get("sessions") or []:
        parts += tables(f"session {session.get('session', '?')}", _flat(session))
    node = {"memory node": found["memory_node"]} if "memory_node" in found else {}
    parts += tables("pool", node | dict(found.get("pool") or {}))
    if found.get("tier"):
        parts += tables("behind the arena", _tier(found["tier"]))
    parts += _peers(found.get("peers") or {})
    parts += tables("configuration file", found["config"]) if found.get("config") else []
    parts += tables("limits", found.get("limits") or {})
    parts += tables("core", found.get("flow") or {})
    parts += tables("figures", found.get("figures") or {})
    return Group(*parts)


def screen(found: Mapping[str, Any], width: int, height: int | None = None) -> list[str]:
    """The lines of the overview; see :func:`view`."""
    shown = overview(found)
    above = [*folded(shown.title, width), ""]
    below = [""] if shown.workers and shown.notes else []
    below += [line for note in shown.notes for line in _labelled("!", note, 2, width)]
    below += ["", *(line for name, text in shown.parts.items() for line in _labelled(name, text, 10, width))]
    rows = _table(shown.workers, width)
    for count in range(len(shown.workers) - 1, -1, -1):
        if height is None or len(above) + len(rows) + len(below) <= height:
            break
        left = len(shown.workers) - count
        rows = [*_table(shown.workers[:count], width), f"and {left} more; layerflow status shows all"]
    return above + rows + below


def _table(workers: Sequence[Sequence[str]], width: int) -> list[str]:
    """A head and a row for each worker; texts that are too wide go on in the next line."""
    if not workers:
        return []
    widths = [max(map(len, column)) for column in zip(COLUMNS, *workers, strict=True)]
    room = width - sum(widths[TEXTS:]) - _GAP * (len(widths) - 1)
    engine, model = widths[:TEXTS]
    if engine + model > room:
        widths[1] = min(model, max(room // 3, len(COLUMNS[1]), room - engine))
        widths[0] = min(engine, max(room - widths[1], len(COLUMNS[0])))
    lines = []
    for row in (COLUMNS, *workers):
        cells = [folded(text, widths[index]) for index, text in enumerate(row)]
        for number in range(max(map(len, cells))):
            texts = [cell[number] if number < len(cell) else "" for cell in cells]
            padded = [
                text.ljust(widths[index]) if index < TEXTS else text.rjust(widths[index])
                for index, text in enumerate(texts)
            ]
            lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def _labelled(label: str, text: str, indent: int, width: int) -> list[str]:
    lines = folded(text, max(width - indent, 1))
    return [f"{label if not number else '':{indent}}{line}" for number, line in enumerate(lines)]


def _flat(session: Mapping[str, Any]) -> dict[str, Any]:
    """Sentences as text of their own, not as a list of quantities."""
    return {key: "; ".join(map(str, value)) if isinstance(value, list) else value for key, value in session.items()}


def _tier(tier: Mapping[str, Any]) -> dict[str, Any]:
    """The backend first, then what it says of itself, then what the server counted."""
    host = tier.get("host") or {}
    shown: dict[str, Any] = {"backend": tier.get("backend", "?"), "state": "up" if tier.get("up") else "down"}
    if tier.get("reason"):
        shown["reason"] = tier["reason"]
    shown |= {f"host {key}": value for key, value in host.items() if key != "reason" and value not in (None, "")}
    shown |= tier.get("details") or {}
    shown |= tier.get("backend_figures") or {}
    plain = {
        key: value for key, value in tier.items() if isinstance(value, int | float) and key not in ("up", "restarts")
    }
    failures = {f"failures, {outcome}": count for outcome, count in (tier.get("failures") or {}).items()}
    return shown | plain | failures


def _peers(peers: Mapping[str, Any]) -> list[RenderableType]:
    """What is read from other servers, from whom; what is lent, to whom."""
    parts: list[RenderableType] = []
    for title, name, rows in (("read from peers", "reads", "peers"), ("lent to peers", "lends", "who")):
        side = peers.get(name) or {}
        plain = {key: value for key, value in side.items() if isinstance(value, int | float | str)}
        parts += tables(title, plain) if plain else []
        if side.get(rows):
            flat = [
                {key: str(value) if value not in ({}, None, "") else "-" for key, value in row.items()}
                for row in side[rows]
            ]
            for row in flat:
                parts += tables(f"{title}: {next(iter(row.values()))}", row)
    return parts
