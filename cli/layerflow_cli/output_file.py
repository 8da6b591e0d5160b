"""Files that commands write: looked at before the work, written beside their place, and renamed when they are whole."""

from __future__ import annotations

import os
import secrets
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path

import typer
from typer.core import TyperCommand

from layerflow.errors import ConfigError

_PLACES = f"{__name__}.places"
_OPTIONS = f"{__name__}.options"

PAGE, TRACE = "timeline.html", "trace.json"
"""What a folder gets: steps for a browser, and for Perfetto."""

_BEGIN = {
    PAGE: (b"<title>layerflow",),
    TRACE: (
        b'{"traceEvents": [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name"',
        b'{"traceEvents": [], "displayTimeUnit": "ms"}',
    ),
}
"""Where such files of layerflow begin; those of others do not."""
_BEGIN_BYTES = 1024


class LayerflowCommand(TyperCommand):
    """A command whose outputs are none of its inputs. Callbacks see one parameter, and this all of them."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse, and refuse a file that the command would read and replace."""
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            _check_inputs(ctx)
        return rest


def checked_file(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    """As an option's callback: refuse, before anything is done, a file that could not be written at the end.

    :class:`LayerflowCommand` refuses one that the command reads.

    :raises ConfigError: it could not be, a recording or a file of settings is there, or another option writes it.
    """
    if path is not None and not context.resilient_parsing:
        _refuse_settings(option.opts[-1], path)
    return checked_settings(context, option, path)


def checked_settings(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    """As :func:`checked_file`, for an option that writes settings and may replace some."""
    _writes(context, option)
    if path is not None and not context.resilient_parsing:
        name = option.opts[-1]
        try:
            if not _in_place(path):
                place = Path(os.path.realpath(path))
                _check_beside(place.parent)
                if (other := context.meta.setdefault(_PLACES, {}).setdefault(place, name)) != name:
                    raise ConfigError(f"{other} and {name} are both {path}: give each a file of its own")
        except OSError as error:
            raise _unwritable(name, path, error) from None
        _refuse_recording(name, path)
    return path


def checked_folder(context: typer.Context, option: typer.CallbackParam, path: Path) -> Path:
    """As :func:`checked_file`, for a folder that is made where there is none: it gets :data:`PAGE`, :data:`TRACE`."""
    _writes(context, option)
    if not context.resilient_parsing:
        try:
            _check_beside(next(each for each in (path, *path.absolute().parents) if os.path.lexists(each)))
        except OSError as error:
            raise _unwritable(option.opts[-1], path, error) from None
        _refuse_foreign(option.opts[-1], path)
    return path


def write_file(option: str, path: Path, text: str) -> None:
    """Write a file; until it is whole, what is there stays. Symbolic links are followed.

    :param option: what messages call it.
    :raises ConfigError: it cannot be written, or a recording is there: it may have been made meanwhile.
    """
    _refuse_recording(option, path)
    try:
        if _in_place(path):
            path.write_text(text, encoding="utf-8")
            return
        place = Path(os.path.realpath(path))
        fd, beside = _made_beside(place.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                if place.exists():
                    os.fchmod(fd, stat.S_IMODE(place.stat().st_mode))
                file.write(text)
            beside.replace(place)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(option, path, error) from None


def write_folder(option: str, folder: Path, page: str, trace: str) -> list[Path]:
    """Write :data:`PAGE` and :data:`TRACE` into a folder that is made where there is none; their paths.

    :raises ConfigError: it cannot be made, one cannot be written, or one is there that layerflow did not write.
    """
    _refuse_foreign(option, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(option, folder, error) from None
    texts = {folder / PAGE: page, folder / TRACE: trace}
    for path, text in texts.items():
        write_file(option, path, text)
    return list(texts)


def write_all(*writes: Callable[[], object]) -> None:
    """Write each of these, so that one that cannot be written costs no other.

    :raises ConfigError: behind them all: some could not be written.
    """
    problems = []
    for write in writes:
        try:
            write()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _in_place(path: Path) -> bool:
    """Say whether nothing can be renamed to it: a device, a pipe, a file in a folder that is not ours to change.

    :raises OSError: it is a folder, or not ours to write.
    """
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(0, "it is a folder")
    if not os.access(path, os.W_OK):
        raise PermissionError(0, "it is read-only")
    if not stat.S_ISREG(there.st_mode) or path.absolute().is_relative_to("/dev"):
        return True
    return not os.access(Path(os.path.realpath(path)).parent, os.W_OK | os.X_OK)


def _check_beside(folder: Path) -> None:
    fd, beside = _made_beside(folder)
    os.close(fd)
    beside.unlink()


def _made_beside(folder: Path) -> tuple[int, Path]:
    beside = folder / f".layerflow-{secrets.token_hex(6)}"
    return os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), beside


def _refuse_recording(option: str, path: Path) -> None:
    from layerflow.recording.format import MAGIC  # noqa: PLC0415 - `--help` stays quick

    if not path.is_file() or not os.access(path, os.R_OK):
        return
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            raise ConfigError(f"{option} {path}: is a recording, which this would replace; give another name")


def _refuse_foreign(option: str, folder: Path) -> None:
    for name, begins in _BEGIN.items():
        path = folder / name
        try:
            with path.open("rb") as file:
                found = file.read(_BEGIN_BYTES)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unwritable(option, path, error) from None
        if not any(begin in found for begin in begins):
            raise ConfigError(f"{option} {folder}: {name} there is not layerflow's; give another folder")


def _refuse_settings(option: str, path: Path) -> None:
    if not path.is_file() or not os.access(path, os.R_OK):
        return
    try:
        found = tomllib.loads(path.read_bytes().decode())
    except (ValueError, RecursionError):
        return
    from layerflow.config.settings import Settings  # noqa: PLC0415 - `--help` stays quick
    from layerflow.config.sources import ALIASES, sections  # noqa: PLC0415

    if found.keys() & {*sections(Settings), *ALIASES, "use_layerwise"}:
        raise ConfigError(f"{option} {path}: is a file of settings, which this would replace; give another name")


def _writes(context: typer.Context, option: typer.CallbackParam) -> None:
    context.meta.setdefault(_OPTIONS, set()).add(option.name)


def _check_inputs(context: typer.Context) -> None:
    outputs: set[str] = context.meta.get(_OPTIONS, set())
    for option in context.command.params:
        path = context.params.get(option.name or "")
        if option.name not in outputs or not isinstance(path, Path) or not path.is_file():
            continue
        for other, used in context.params.items():
            if other not in outputs and isinstance(used, Path) and _holds(used, path):
                raise ConfigError(
                    f"{option.opts[-1]} {path}: this command uses {used}, and would replace it; give another name"
                )


def _holds(read: Path, path: Path) -> bool:
    """Say whether an input is this file, or the folder that it lies in."""
    return read.exists() and any(read.samefile(each) for each in (path, Path(os.path.realpath(path)).parent))


def _unwritable(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{option} {path}: cannot be written: {error.strerror}")
