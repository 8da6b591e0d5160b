"""Files that commands write: looked at before the work, written beside their place, and renamed when they are whole."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import typer

from layerflow.errors import ConfigError


def checked_file(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    """As an option's callback: refuse, before anything is done, a file that could not be written at the end.

    :raises ConfigError: it could not be, a recording is there, or another option writes it.
    """
    if path is not None and not context.resilient_parsing:
        name = option.opts[-1]
        try:
            if not _in_place(path):
                place = Path(os.path.realpath(path))
                _check_beside(place.parent)
                if (other := context.meta.setdefault(__name__, {}).setdefault(place, name)) != name:
                    raise ConfigError(f"{other} and {name} are both {path}: give each a file of its own")
        except OSError as error:
            raise _unwritable(name, path, error) from None
        _refuse_recording(name, path)
    return path


def checked_folder(context: typer.Context, option: typer.CallbackParam, path: Path) -> Path:
    """As :func:`checked_file`, for a folder that is made where there is none."""
    if not context.resilient_parsing:
        try:
            _check_beside(next(each for each in (path, *path.absolute().parents) if os.path.lexists(each)))
        except OSError as error:
            raise _unwritable(option.opts[-1], path, error) from None
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


def write_folder(option: str, folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write files, by name, into a folder that is made where there is none; their paths.

    :raises ConfigError: it cannot be made, or one cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(option, folder, error) from None
    for name, text in texts.items():
        write_file(option, folder / name, text)
    return [folder / name for name in texts]


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


def _unwritable(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{option} {path}: cannot be written: {error.strerror}")
