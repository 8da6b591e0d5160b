"""The tables of ``layerflow status``. Reads what is there: a newer or older server may say more or less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from layerflow_cli.output import records_table, tables


def view(found: Mapping[str, Any], everything: bool = False) -> RenderableType:
    """A status as tables.

    :param found: what the server said.
    :param everything: also the core's statistics and all metrics.
    """
    parts: list[RenderableType] = [_headline(found)]
    sessions = found.get("sessions") or []
    parts.append(records_table("sessions", sessions) if sessions else Text("no engine worker is attached\n"))
    parts += tables("transfer", _transfer(found))
    node = {"memory node": found["memory_node"]} if "memory_node" in found else {}
    parts += tables("pool", node | _pool(found.get("pool") or {}))
    if found.get("tier"):
        parts += tables("behind the arena", _tier(found["tier"]))
    parts += _peers(found.get("peers") or {})
    parts += tables("limits", found.get("limits") or {})
    if everything:
        parts += tables("core", found.get("flow") or {})
        parts += tables("figures", found.get("figures") or {})
    return Group(*parts)


def _headline(found: Mapping[str, Any]) -> Text:
    words = [
        f"layerflow {found.get('version', '?')}",
        f"pid {found.get('pid', '?')}",
        f"up {duration(float(found.get('uptime_s') or 0))}",
        "healthy" if found.get("healthy") else "draining",
        str(found.get("endpoint", "")),
    ]
    if found.get("link_emulated"):
        words.append("emulated link")
    return Text(", ".join(word for word in words if word) + "\n")


def duration(seconds: float) -> str:
    """``"2 d 3 h"``, ``"4 min 5 s"``: the two largest units."""
    total = int(seconds)
    parts = [(total // 86400, "d"), (total // 3600 % 24, "h"), (total // 60 % 60, "min"), (total % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def _transfer(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures people look at first."""
    figures = found.get("figures") or {}
    flow = found.get("flow") or {}
    shown: dict[str, Any] = {}
    for direction, value in (figures.get("overlap") or {}).items():
        shown[f"{direction} overlap"] = value
    if "lookup_hit_ratio" in figures:
        shown["lookup hit ratio"] = figures["lookup_hit_ratio"]
    for key in ("loaded_bytes", "saved_bytes", "load_inflight_bytes", "save_inflight_bytes", "shed_parts"):
        if key in flow:
            shown[key] = flow[key]
    beats, lag = figures.get("loop_lag_seconds_count"), figures.get("loop_lag_seconds_sum")
    if beats:
        shown["loop lag, mean_us"] = lag / beats * 1e6
    if "loop_lag_max_seconds" in figures:
        shown["loop lag, largest_us"] = figures["loop_lag_max_seconds"] * 1e6
    return shown


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
            parts.append(records_table(title, flat))
    return parts


def _pool(pool: Mapping[str, Any]) -> dict[str, Any]:
    capacity = pool.get("capacity_bytes")
    if not capacity:
        return dict(pool)
    asked = pool.get("hits", 0) + pool.get("misses", 0)
    shown: dict[str, Any] = {"fill": pool.get("used_bytes", 0) / capacity}
    if asked:
        shown["object hit ratio"] = pool.get("hits", 0) / asked
    return {**shown, **pool}
