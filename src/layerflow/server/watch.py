"""Follows the configuration file while the server runs.

Looks at the file's bytes, not at what the file system says has happened to it: an editor that
writes a new file and renames it, a mounted ConfigMap whose symlink turns, and a plain write then
look the same.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread
from watchfiles import awatch

from layerflow.config.settings import Settings, live_changes
from layerflow.errors import ConfigError

# How often to look where nothing was reported: network mounts and replaced directories report nothing.
LOOK_MS = 2000
_SETTLE_MS = 50
_LONGEST_SETTLE_MS = 400


class Log(Protocol):
    """What is used of a structlog logger."""

    def info(self, event: str, **fields: Any) -> Any: ...

    def warning(self, event: str, **fields: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """The watched file as the server has taken it. Times are seconds since the epoch.

    :param path: absolute.
    :param sha256: of the file whose settings are in force, as ``sha256sum`` prints it.
    :param applied_at: when these were taken.
    :param refused_at: since when the file says something else that is refused, or is gone; 0 = it does not.
    :param problems: why, a line each.
    :param refusals: edits that were refused since the watch began.
    """

    path: str
    sha256: str
    applied_at: float
    refused_at: float = 0.0
    problems: tuple[str, ...] = ()
    refusals: int = 0


GONE = "the file is gone"


def _ignore(_: FileState) -> None: ...


async def watch_config(
    path: Path,
    overrides: Mapping[str, Any],
    apply: Callable[[Settings], Awaitable[None] | None],
    log: Log,
    *,
    current: Settings | None = None,
    tell: Callable[[FileState], None] = _ignore,
) -> None:
    """Load and apply the file after each change, until cancelled.

    A bad edit, and one that changes keys which need a restart, is refused as a whole with one
    ``config_refused`` event; the old values stay. A deleted file changes nothing. Where the system reports no changes
    (its watches are used up), the file is looked at every two seconds.

    :param overrides: the flags, which keep winning over the file.
    :param apply: takes the new settings, or raises and has changed nothing: that refuses them.
    :param current: what the caller runs with; None = what the file says now.
    :param tell: told the file's state when the watch begins, and after each edit.
    """
    follower = _Follower(path, overrides, apply, log, tell)
    if current is None:
        found = await anyio.to_thread.run_sync(_read, path)
        current = await _load(path, overrides, found)
        follower.began_with(found)
    follower.current = current
    await follower.look()
    async for _ in _moments(path, log):
        await follower.look()


async def _moments(path: Path, log: Log) -> AsyncIterator[None]:
    """When to look: after each reported change, and from time to time."""
    try:
        async for _ in awatch(
            *_folders(path),
            recursive=False,
            watch_filter=None,
            step=_SETTLE_MS,
            debounce=_LONGEST_SETTLE_MS,
            rust_timeout=LOOK_MS,
            yield_on_timeout=True,
        ):
            yield
    except Exception as error:  # noqa: BLE001 - of the library, by system and version; it is told, and looks go on
        log.warning("config_unwatched", path=str(path), error=str(error), effect=f"a look every {LOOK_MS / 1e3:g} s")
    while True:
        await anyio.sleep(LOOK_MS / 1e3)
        yield


class _Follower:
    """The file as last seen, and the settings in force."""

    current: Settings

    def __init__(
        self,
        path: Path,
        overrides: Mapping[str, Any],
        apply: Callable[[Settings], Awaitable[None] | None],
        log: Log,
        tell: Callable[[FileState], None],
    ) -> None:
        self.seen: bytes | None = b""
        self._state = FileState(path=str(path.absolute()), sha256="", applied_at=0.0)
        self._tell = tell
        self._path = path
        self._overrides = overrides
        self._apply = apply
        self._log = log

    def began_with(self, found: bytes | None) -> None:
        """Note that the settings in force are those of the file with these bytes."""
        self.seen = found
        if found is not None:
            self._taken(found)

    async def look(self) -> None:
        """Take what the file says now, if its bytes differ from those seen last."""
        found = await anyio.to_thread.run_sync(_read, self._path)
        if found == self.seen:
            return
        self.seen = found
        if found is None:
            self._log.warning("config_gone", path=str(self._path), effect="the old values stay")
            self._refused((GONE,))
            return
        try:
            wanted = await _load(self._path, self._overrides, found)
            changes = live_changes(self.current, wanted)
            if not changes:
                self._taken(found)
                return
            outcome = self._apply(wanted)
            if inspect.isawaitable(outcome):
                await outcome
        except Exception as error:  # noqa: BLE001 - told: whatever an edit says, the server that reads it goes on
            expected = isinstance(error, ConfigError)
            problems = str(error).splitlines() if expected else [f"{type(error).__name__}: {error}"]
            self._log.warning(
                "config_refused",
                path=str(self._path),
                problems=problems,
                effect="the old values stay",
                exc_info=None if expected else error,
            )
            self._refused(tuple(problems))
            return
        self.current = wanted
        self._taken(found)
        self._log.info("config_applied", path=str(self._path), changes=changes)

    def _taken(self, found: bytes) -> None:
        self._state = replace(
            self._state,
            sha256=hashlib.sha256(found).hexdigest(),
            applied_at=time.time(),
            refused_at=0.0,
            problems=(),
        )
        self._tell(self._state)

    def _refused(self, problems: tuple[str, ...]) -> None:
        # One bad edit after another: the file has differed from what is in force since the first of them.
        since = self._state.refused_at or time.time()
        refusals = self._state.refusals + 1
        self._state = replace(self._state, refused_at=since, problems=problems, refusals=refusals)
        self._tell(self._state)


async def _load(path: Path, overrides: Mapping[str, Any], content: bytes | None) -> Settings:
    """The settings of these very bytes: the file may say something else by now, which is the next look's to find."""
    return await anyio.to_thread.run_sync(functools.partial(Settings.load, path, overrides, content=content))


def _folders(path: Path) -> set[Path]:
    """The file's own directory, and the one that it links to."""
    return {path.absolute().parent, path.resolve().parent}


def _read(path: Path) -> bytes | None:
    """The file's bytes; None if there is no readable file."""
    try:
        return path.read_bytes()
    except OSError:
        return None
