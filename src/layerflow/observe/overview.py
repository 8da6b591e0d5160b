"""A running server's status as a person reads it: one row a worker, and a sentence for each part of the server.

``layerflow status`` prints it and the page at ``/`` shows it. Reads what is there: a newer or older server may say more
or less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

COLUMNS: Final = ("engine", "model", "tp", "steps", "GB/s", "exposed ms", "hit %")
TEXTS: Final = 2
"""So many columns, from the first, are text; the others are figures."""
NOTHING: Final = "-"
SHOWN_DIGITS: Final = 12
"""Of a file's hash."""
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Overview:
    """What there is to see.

    :param title: version, age and health.
    :param workers: one row a worker, a text for each of :data:`COLUMNS`.
    :param parts: of the server, by name: a sentence each.
    :param notes: what needs somebody's attention.
    """

    title: str
    workers: tuple[tuple[str, ...], ...]
    parts: Mapping[str, str]
    notes: tuple[str, ...]


def overview(found: Mapping[str, Any]) -> Overview:
    """Lay out what ``/status`` says."""
    sessions = found.get("sessions") or []
    workers = [session for session in sessions if session.get("memory")]
    words = [
        f"layerflow {found.get('version', '?')}",
        f"pid {found.get('pid', '?')}",
        f"up {duration(float(found.get('uptime_s') or 0))}",
        "healthy" if found.get("healthy") else "draining",
        "emulated link" if found.get("link_emulated") else "",
    ]
    parts = {
        "endpoint": str(found.get("endpoint") or ""),
        "loads": _moved(found, "load"),
        "saves": _moved(found, "save"),
        "pool": _pool(found.get("pool") or {}),
        "tier": _tier(found.get("tier") or {}),
        "peers": _peers(found.get("peers") or {}),
        "recording": _recording(found.get("recording") or {}),
        "loop": _loop(found.get("figures") or {}),
        "file": _file(found.get("config") or {}),
    }
    return Overview(
        ", ".join(word for word in words if word),
        tuple(_worker(session, sessions) for session in workers),
        {name: sentence for name, sentence in parts.items() if sentence},
        tuple(_notes(found, workers)),
    )


def duration(seconds: float) -> str:
    """``"2 d 3 h"``, ``"4 min 5 s"``: the two largest units."""
    total = int(seconds)
    parts = [(total // 86400, "d"), (total // 3600 % 24, "h"), (total // 60 % 60, "min"), (total % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def size(nbytes: float) -> str:
    """``"1.5 GiB"``."""
    power = 0
    while abs(nbytes) >= 1024 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:,.1f}".removesuffix(".0") + f" {_UNITS[power]}"


def _name_of(session: Mapping[str, Any]) -> str:
    return str(session.get("name") or session.get("engine") or NOTHING)


def _other_version(found: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """Which layerflow a worker has, where that is not the server's; "" = the same."""
    own, its = found.get("version"), worker.get("version")
    return "" if its is None or its == own else f"{_name_of(worker)} runs layerflow {its or 'of the version before'}"


def _worker(session: Mapping[str, Any], sessions: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return a worker's row. What its engine's scheduler looked up stands in the row of each of its workers."""
    model = str(session.get("model") or NOTHING).rstrip("/").rpartition("/")[2]
    same = [each for each in sessions if each.get("engine") == session.get("engine")]
    asked = sum(each.get("lookup_tokens", 0) for each in same)
    hit = sum(each.get("hit_tokens", 0) for each in same)
    seconds, loading = session.get("load_seconds", 0), session.get("loading_steps", 0)
    return (
        _name_of(session).removeprefix(f"{model}/"),
        model,
        str(session.get("tp") or NOTHING),
        f"{session['steps']:,}" if "steps" in session else NOTHING,
        f"{session['loaded_bytes'] / seconds / 1e9:.2f}" if seconds else NOTHING,
        f"{session['exposed_load_seconds'] / loading * 1e3:.2f}" if loading else NOTHING,
        f"{100 * hit / asked:.1f}" if asked else NOTHING,
    )


def _moved(found: Mapping[str, Any], way: str) -> str:
    flow, figures = found.get("flow") or {}, found.get("figures") or {}
    moved = flow.get({"load": "loaded_bytes", "save": "saved_bytes"}[way])
    if moved is None:
        return ""
    words = [size(moved)]
    overlap = (figures.get("overlap") or {}).get(way)
    if overlap is not None:
        words.append(f"{100 * overlap:.1f} % hidden")
    if flow.get(f"{way}_inflight_bytes"):
        words.append(f"{size(flow[f'{way}_inflight_bytes'])} in flight")
    if way == "save" and flow.get("shed_parts"):
        words.append(f"{flow['shed_parts']:,} shed")
    if way == "load" and figures.get("lookups_total"):
        words.append(f"hits {100 * figures.get('lookup_hit_ratio', 0):.1f} % of tokens")
    return ", ".join(words)


def _pool(pool: Mapping[str, Any]) -> str:
    capacity = pool.get("capacity_bytes")
    if not capacity:
        return ""
    used = pool.get("used_bytes", 0)
    words = [f"{size(used)} of {size(capacity)} used ({100 * used / capacity:.1f} %)"]
    if "objects" in pool:
        words.append(f"{pool['objects']:,} objects")
    if pool.get("pinned"):
        words.append(f"{pool['pinned']:,} pinned")
    if pool.get("evictions"):
        words.append(f"{pool['evictions']:,} evicted")
    return ", ".join(words)


def _tier(tier: Mapping[str, Any]) -> str:
    if not tier:
        return ""
    words = [str(tier.get("backend", "?")), "up" if tier.get("up") else "down"]
    if tier.get("indexed_objects"):
        words.append(f"{tier['indexed_objects']:,} objects")
    words += [
        f"{size(tier[key])} {what}"
        for key, what in (("written_bytes", "written"), ("fetched_bytes", "read"))
        if key in tier
    ]
    if tier.get("backlog_bytes"):
        words.append(f"{size(tier['backlog_bytes'])} waiting")
    return ", ".join(words)


def _peers(peers: Mapping[str, Any]) -> str:
    read, lent = (peers.get("reads") or {}).get("peers") or [], (peers.get("lends") or {}).get("who") or []
    words = [f"{len(read)} to read from"] if read else []
    words += [f"{len(lent)} reading here"] if lent else []
    return ", ".join(words)


def _recording(recording: Mapping[str, Any]) -> str:
    if not recording.get("on"):
        return ""
    words = [str(recording.get("path", "?")), size(recording.get("bytes", 0)), f"{recording.get('events', 0):,} events"]
    if recording.get("dropped"):
        words.append(f"{recording['dropped']:,} dropped")
    if recording.get("left_s") is not None:
        words.append(f"{duration(max(0, recording['left_s']))} left")
    return ", ".join(words)


def _loop(figures: Mapping[str, Any]) -> str:
    beats = figures.get("loop_lag_seconds_count")
    if not beats:
        return ""
    largest = figures.get("loop_lag_max_seconds", 0)
    return (
        f"{figures.get('loop_lag_seconds_sum', 0) / beats * 1e3:.2f} ms late on average, {largest * 1e3:.1f} ms at most"
    )


def _file(config: Mapping[str, Any]) -> str:
    """The watched file, and when its settings were taken."""
    words = [str(config.get("path") or "")]
    if config.get("applied_s_ago") is not None:
        words.append(f"sha256 {str(config.get('sha256', ''))[:SHOWN_DIGITS]}")
        words.append(f"applied {duration(config['applied_s_ago'])} ago")
    return ", ".join(word for word in words if word)


def _notes(found: Mapping[str, Any], workers: list[Mapping[str, Any]]) -> Iterator[str]:
    if not workers:
        yield "no engine worker is attached"
    config = found.get("config") or {}
    if config.get("refused_since"):
        why = "; ".join(config.get("problems") or [])
        since = f"since {config['refused_since']} ({duration(config.get('refused_s') or 0)})"
        yield f"{config.get('path', '?')} is refused {since}, and the old values hold: {why}"
    for worker in workers:
        if worker.get("silent"):
            since = duration(worker.get("heard_s_ago", 0))
            yield f"{_name_of(worker)}, tp {worker.get('tp')}, pid {worker.get('pid')}: silent for {since}"
    trial = found.get("trial") or {}
    if trial.get("on"):
        tried = ", ".join(f"{key} = {value}" for key, value in (trial.get("changes") or {}).items())
        left = duration(trial.get("left_s") or 0)
        yield f"{trial.get('by', '?')} tries {tried or 'the file as it is'}, for {left} more"
    others = sorted({_other_version(found, worker) for worker in workers} - {""})
    if others:
        yield "upgrade not finished: " + ", ".join(others)
    recording = found.get("recording") or {}
    if recording.get("failed"):
        yield f"nothing is recorded any more: {recording.get('reason', '?')}"
    tier = found.get("tier") or {}
    if tier.get("reason"):
        yield f"{tier.get('backend', 'tier')} is down: {tier['reason']}"
    for peer in ((found.get("peers") or {}).get("reads") or {}).get("peers") or []:
        if peer.get("reason"):
            yield f"peer {peer.get('peer', '?')}: {peer['reason']}"
