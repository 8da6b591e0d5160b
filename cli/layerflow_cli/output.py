"""Results as tables with units, and as JSON.

A name carries its unit as a suffix (``wall_ms``, ``used_bytes``, ``events_per_s``) or a prefix
(``us_per_event``); this file is where names become what people read.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from layerflow.errors import ConfigError
from layerflow_cli.options import STANDARD_OUTPUT
from layerflow_cli.output_file import write_file

PLAIN_WIDTH = 160
_LINE_WIDTH, _WORDS_WIDTH = 80, 36
"""Columns of a line about progress, and of the words before a bar: bar, counts and time need the rest."""
SILENT_S = 5.0
"""So long a command may say nothing."""
_SUFFIXES = (
    ("_gb_per_s", "GB/s"),
    ("_per_s", "/s"),
    ("_gbps", "GB/s"),
    ("_bytes", "bytes"),
    ("_seconds", "s"),
    ("_percent", "%"),
    ("_ms", "ms"),
    ("_us", "us"),
    ("_ns", "ns"),
    ("_s", "s"),
)
_PREFIXES = (("us_per_", "us"), ("ms_per_", "ms"), ("ns_per_", "ns"), ("bytes_per_", "bytes"))
_SHARES = ("overlap", "ratio", "share", "bound", "of_bound", "fill")
_IDENTITIES = ("pid", "session", "port")
_PIECES = re.compile(r"[^/_.,:@#-]*[/_.,:@#-]?")
"""Of a word that is too wide: a line may end behind each."""
_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB")


def console(*, stderr: bool = False) -> Console:
    """For people on a terminal; wide, uncoloured lines where a program reads along."""
    made = Console(stderr=stderr)
    if not made.is_terminal:
        made = Console(stderr=stderr, width=PLAIN_WIDTH)
    return made


@contextlib.contextmanager
def progress(
    total: int, screen: Console | None = None, period_s: float = SILENT_S, *, about: bool = False
) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; elsewhere a line on standard error every :data:`SILENT_S` seconds: what, how far, how long.

    What it gives is told what begins; before it, something has ended.

    :param total: how much there is to do. :param about: it is not known exactly.
    :param screen: where a bar goes; None = standard error.
    """
    screen = screen or console(stderr=True)
    if not screen.is_terminal:
        with progress_lines(total, period_s, about=about) as advance:
            yield advance
        return
    from rich.progress import (  # noqa: PLC0415 - most commands show no bar
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    words = TextColumn(f"{{task.description:<{_WORDS_WIDTH}}}")
    columns = (words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def advance(what: str) -> None:
            nonlocal begun
            bar.update(task, advance=int(begun), description=textwrap.shorten(what, _WORDS_WIDTH, placeholder=" ..."))
            begun = True

        yield advance


@contextlib.contextmanager
def progress_lines(total: int, period_s: float = SILENT_S, *, about: bool = False) -> Iterator[Callable[[str], None]]:
    """As :func:`progress`, in lines everywhere."""
    began, done = time.monotonic(), threading.Event()
    told: tuple[int, str] = -1, ""

    def speak() -> None:
        while not done.wait(period_s):
            count, what = told
            elapsed = time.monotonic() - began
            place = f": {max(count, 0)} of {'about ' if about else ''}{total} done, {elapsed:.0f} s"
            said = textwrap.shorten(what or "starting", _LINE_WIDTH - len(place), placeholder=" ...")
            print(said + place, file=sys.stderr, flush=True)

    def advance(what: str) -> None:
        nonlocal told
        told = told[0] + 1, what

    speaker = threading.Thread(target=speak, name="layerflow-progress", daemon=True)
    speaker.start()
    try:
        yield advance
    finally:
        done.set()
        speaker.join()


def unit_of(name: str) -> str:
    """The unit that a name announces: ``"ms"``, ``"bytes"``, ``"%"``; ``""`` for a plain count."""
    bare = name.removesuffix("_total").removesuffix("_sum").removesuffix("_max")
    for suffix, unit in _SUFFIXES:
        if bare.endswith(suffix):
            return unit
    for prefix, unit in _PREFIXES:
        if bare.startswith(prefix):
            return unit
    return "%" if bare.endswith(_SHARES) else ""


def quantity(name: str, value: Any, inherited: str = "") -> tuple[str, str]:
    """A value as text and its unit: sizes in the largest fitting binary unit, shares in percent.

    :param inherited: the unit of the table, where the name announces none.
    """
    unit = unit_of(name) or inherited
    if value is None:
        return "-", ""
    if isinstance(value, bool):
        return ("yes" if value else "no"), ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(quantity("", item)[0] for item in value), unit
    if not isinstance(value, int | float) or name in _IDENTITIES:
        return str(value), ""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value), unit
    if unit == "bytes":
        return _binary(value)
    if unit == "%":
        return f"{value if name.endswith('_percent') else value * 100:.1f}", unit
    return _number(value), unit


def tables(title: str, result: Mapping[str, Any], inherited: str = "") -> Iterator[Table]:
    """A result as tables: plain values first, then one table per nested mapping or list of records.

    Nested mappings with the same keys become the columns of one table.
    """
    nested = {name: value for name, value in result.items() if isinstance(value, Mapping) and value}
    records = {name: value for name, value in result.items() if _is_records(value)}
    plain = {name: value for name, value in result.items() if name not in nested and name not in records}
    if plain:
        yield _list(title, plain, inherited)
    if len(nested) > 1 and _comparable(list(nested.values())):
        yield _matrix(title, nested)
    else:
        for name, value in nested.items():
            yield from tables(f"{title}: {name}", value, unit_of(name))
    for name, value in records.items():
        yield records_table(f"{title}: {name}", value)


def records_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per record; columns are the first record's keys."""
    names = list(rows[0])
    table = Table(title=title, title_justify="left")
    for name in names:
        numeric = isinstance(rows[0][name], int | float) and not isinstance(rows[0][name], bool)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(" ".join(quantity(name, row.get(name))).strip() for name in names))
    return table


def folded(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters. Only a wider word is parted, behind a mark if it has one."""
    lines = [""]
    for word in re.findall(r"\S+ ?", text):
        for piece in [word] if len(word.rstrip()) <= width else _PIECES.findall(word):
            if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1]:
                lines.append("")
            lines[-1] += piece
            while len(lines[-1].rstrip()) > width:
                lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def write_json(path: Path | None, result: Any) -> bool:
    """Write `result` where ``--json`` says; True = on standard output, where no text belongs then.

    Values that JSON lacks (paths, numpy numbers) are text or plain numbers, NaN is null.

    :param path: a file, or :data:`~layerflow_cli.options.STANDARD_OUTPUT`; None = ``--json`` was not given.
    :raises ConfigError: the file cannot be written; the result is on standard output then.
    """
    if path is None:
        return False
    text = to_json(result)
    if path == STANDARD_OUTPUT:
        print(text)
        return True
    try:
        write_file("--json", path, text + "\n")
    except ConfigError:
        print(text)
        raise
    return False


def to_json(result: Any) -> str:
    """`result` as indented JSON; NaN and infinities as null."""
    return json.dumps(_jsonable(result), indent=2, allow_nan=False)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        return _jsonable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _is_records(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _comparable(values: list[Mapping[str, Any]]) -> bool:
    flat = all(not isinstance(item, Mapping) and not _is_records(item) for value in values for item in value.values())
    return flat and len({tuple(value) for value in values}) == 1


def _list(title: str, values: Mapping[str, Any], inherited: str) -> Table:
    table = Table("", "value", "unit", title=title, title_justify="left")
    table.columns[1].justify = "right"
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    for name, value in values.items():
        table.add_row(name, *quantity(name, value, inherited))
    return table


def _matrix(title: str, columns: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("", *columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in next(iter(columns.values())):
        table.add_row(name, *(" ".join(quantity(name, values[name])).strip() for values in columns.values()))
    return table


def _number(value: float) -> str:
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _binary(nbytes: float) -> tuple[str, str]:
    power = 0
    while abs(nbytes) >= 1024 and power < len(_BINARY) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return _number(round(nbytes, 1) if power else nbytes), _BINARY[power]
