"""Options that several commands share, and ``--set key=value``."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from layerflow.errors import ConfigError
from layerflow_cli.output_file import checked_file


def backend_names() -> list[str]:
    """For the shell's completion."""
    from layerflow.config.pool import backends  # noqa: PLC0415 - `--help` stays quick

    return list(backends())


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", envvar="LAYERFLOW_CONFIG", help="TOML file with settings."),
]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", metavar="URL", help="Control socket, e.g. ipc:///run/layerflow/control.")
]
HttpHost = Annotated[
    str | None, typer.Option("--http-host", metavar="ADDRESS", help="Address of /healthz, /metrics and /status.")
]
HttpPort = Annotated[
    int | None,
    typer.Option("--http-port", metavar="N", help="Port of /healthz, /metrics, /status; 0 = any free one, -1 = off."),
]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error."),
]
PoolSize = Annotated[
    str | None, typer.Option("--pool-size", metavar="SIZE", help="Size of the arena in shared memory, e.g. 16GiB.")
]
BackendName = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Store behind the arena: memory (none), or an installed backend.",
        autocompletion=backend_names,
    ),
]
DiskPath = Annotated[
    str | None,
    typer.Option("--disk-path", metavar="DIR", help="Also keep objects in DIR, across restarts; with memory only."),
]


def _checked_json(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    return path if path == STANDARD_OUTPUT else checked_file(context, option, path)


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Also write the result as JSON in FILE; without FILE, print JSON instead of text.",
        callback=_checked_json,
    ),
]
SettingItems = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.")
]
MOST_SECONDS = 30 * 86_400.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d|)")
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_LEAST_PLAIN_BYTES = 1 << 20
STANDARD_OUTPUT = Path("-")
"""What ``--json`` without a file means: JSON instead of tables."""


def with_json_file(arguments: Sequence[str]) -> list[str]:
    """The arguments, with ``-`` behind each ``--json`` that names no file."""
    completed: list[str] = []
    for position, argument in enumerate(arguments):
        completed.append(argument)
        following = arguments[position + 1 : position + 2]
        if argument == "--json" and (not following or (following[0].startswith("-") and following[0] != "-")):
            completed.append(str(STANDARD_OUTPUT))
    return completed


RecordingsEnd = Annotated[
    str | None, typer.Option("--last", metavar="TIME", help="Of a recording only its end, so long: e.g. 10m.")
]


def parse_duration(option: str, text: str, *, plain: bool = True) -> float:
    """Seconds from ``"90s"``, ``"20m"``, ``"1h"``, ``"500ms"`` or a plain number of seconds.

    :param option: what messages call it. :param plain: a number without a unit is seconds; else it is refused.
    :raises ConfigError: it is none of these, or no time.
    """
    said = f"{option}{text}" if option.endswith("=") else f"{option} {text}"
    match = _DURATION.fullmatch(text.strip().lower())
    if match and not match[2] and not plain:
        raise ConfigError(f"{said}: seconds or milliseconds? Write {text}s or {text}ms")
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f'{said}: write a time such as "90s", "20m" or "1h", at most 30 days')
    return seconds


def with_unit(option: str, text: str | None) -> str | None:
    """A size of memory as it was given: a few bytes without a unit are a unit that was forgotten.

    :param option: what messages call it. :param text: None = it was not given.
    :raises ConfigError: it is such a number.
    """
    if text is not None and text.strip().isdecimal() and int(text) < _LEAST_PLAIN_BYTES:
        raise ConfigError(f"{option} {text}: {text} bytes? Write the unit, e.g. {text.strip()}GiB")
    return text


def assignments(items: Sequence[str]) -> dict[str, str]:
    """``["pool.size=4GiB"]`` as a dict.

    :raises ConfigError: for an item without ``=``, or a key given twice.
    """
    values: dict[str, str] = {}
    for item in items:
        key, found, value = item.partition("=")
        if not found or not key.strip():
            raise ConfigError(f"--set {item}: write it as key=value")
        if key.strip() in values:
            raise ConfigError(f"--set {key.strip()} is given twice; keep one")
        values[key.strip()] = value.strip()
    return values


def overrides(sets: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line sets: ``--set`` items, and flags that were given (not None).

    :raises ConfigError: see :func:`assignments`; or a key is set in both ways.
    """
    values, given = assignments(sets), {key: value for key, value in flags.items() if value is not None}
    for key in values.keys() & given.keys():
        raise ConfigError(f"--set {key} and the option for {key} are both given; keep one")
    return {**values, **given}


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Hide the operator's ``LAYERFLOW_*`` variables: those of a server, which the processes of a bench are not.

    Of all that reads or inherits this process's environment meanwhile: settings, servers, workers, stores.
    """
    from layerflow.config.sources import ENV_PREFIX  # noqa: PLC0415 - pulls pydantic in

    hidden = {name: value for name, value in os.environ.items() if name.upper().startswith(ENV_PREFIX)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def finite(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """An option's number, if it is one: ``nan`` is within every bound, and ``inf`` where there is none above.

    :raises ConfigError: it is neither.
    """
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{parameter.opts[-1]}: {value} is no number to work with")
    return value


def positive(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """As :func:`finite`, of an option whose number is above 0: what it stands for is divided by.

    :raises ConfigError: it is not.
    """
    if value is not None and value <= 0:
        raise ConfigError(f"{parameter.opts[-1]}: {value:g} is too little; give a number above 0")
    return finite(parameter, value)


def refuse_foreign(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options that mean nothing in the command's present mode.

    :param why: what the mode is, as the end of a sentence. :param names: of options' parameters.
    :raises ConfigError: some of them were given on the command line.
    """
    given = [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name in names and _on_command_line(context, parameter.name)
    ]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}; leave {'it' if len(given) == 1 else 'them'} out")


def _on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
