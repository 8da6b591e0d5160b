"""Settings that a client tries on the running server, instead of those of the watched file.

The file is not written: what is tried lives in this process alone, for a time that its client gives, and ends with the
client. So nothing has to be put back: not where the client is killed, nor the server, nor the machine.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio.to_thread
import structlog

from layerflow.config.settings import Settings, live_changes, overruled
from layerflow.errors import ProtocolError
from layerflow.server.account import Refused
from layerflow.wire.messages import MAX_TRIED_S

if TYPE_CHECKING:
    from layerflow.wire import messages as wire

KEPT: Final = ("record", "log")
"""Sections that the file's own settings keep: what observes both of two settings is none of them, and a recording that
is given another path, or another size, ends."""

log = structlog.get_logger("layerflow.server.trial")


class Trier(Protocol):
    """What is used of a client's session."""

    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried.

    :param sha256: of the text that is tried; of an empty one where the file's own settings are held.
    :param began: monotonic seconds, when these settings came into force. :param until: when they end by themselves.
    :param changes: the keys that differ from the file's, with what is tried.
    """

    session: int
    name: str
    sha256: str
    began: float
    until: float
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Followed:
    path: Path
    overrides: Mapping[str, Any]
    apply: Callable[[Settings], None]


class Trials:
    """The trial of this server, if there is one. For the server's loop."""

    def __init__(self) -> None:
        self.current: Trial | None = None
        self._file: _Followed | None = None
        self._settings: Settings | None = None
        self._ended = ""

    def watched(
        self, path: Path, overrides: Mapping[str, Any], settings: Settings, apply: Callable[[Settings], None]
    ) -> None:
        """A file is followed: what it says is tried against.

        :param overrides: the flags, which win over what is tried too.
        :param settings: that are in force.
        :param apply: puts settings in force; a :class:`ConfigError` from it refuses them.
        """
        self._file, self._settings = _Followed(path, overrides, apply), settings

    def file_says(self, settings: Settings) -> None:
        """Put what the edited file says in force; a trial ends.

        :raises ConfigError: it is refused, and nothing has changed.
        """
        assert self._file is not None
        self._file.apply(settings)
        self._settings = settings
        self._forget("the file was edited")

    async def asked(self, message: wire.TrySettings, trier: Trier, gone: Callable[[], bool]) -> dict[str, Any]:
        """Try settings, or end that.

        :param gone: whether the client has left.
        :returns: what the server's status says of its trial.
        :raises Refused: there is another one, or no file that they could be tried against.
        :raises ConfigError: no settings, or keys among them that cannot change while the server runs.
        """
        self._refuse_another(trier)
        file = self._file
        if file is None:
            raise Refused(
                "no_file", "this server follows no file to compare with: start it with `layerflow run --config FILE`"
            )
        if not 0 <= message.seconds <= MAX_TRIED_S:
            raise ProtocolError(f"settings can be tried for up to {MAX_TRIED_S:g} s, not {message.seconds} s")
        if not message.seconds and not message.dry:
            self.end("it was asked to")
            return self.status()
        loaded, lost = None, dict[str, str]()
        if message.content:
            load = functools.partial(Settings.load, file.path, file.overrides, content=message.content)
            loaded = await anyio.to_thread.run_sync(load)
            if message.dry:
                look = functools.partial(overruled, file.path, file.overrides, loaded, message.content)
                lost = await anyio.to_thread.run_sync(look)
            self._refuse_another(trier)
        assert self._settings is not None
        held = self._settings
        wanted = held if loaded is None else loaded.model_copy(update={name: getattr(held, name) for name in KEPT})
        changes = live_changes(held, wanted, "let the tried settings have what the server has of them")
        if gone() or message.dry:
            return self.status() | {"changes": _all_shown(changes), "overruled": lost}
        file.apply(wanted)
        now = time.monotonic()
        sha256 = hashlib.sha256(message.content).hexdigest()
        self.current = Trial(trier.number, trier.name, sha256, now, now + message.seconds, changes)
        log.info("trial_begun", changes=changes, seconds=message.seconds, by=trier.name)
        return self.status()

    def check(self, now: float) -> None:
        """End what has run for its time."""
        if self.current is not None and now >= self.current.until:
            self.end("its time is up")

    def lost(self, session: int) -> None:
        """A client is gone; so is what it tried."""
        if self.current is not None and self.current.session == session:
            self.end("its client is gone")

    def end(self, reason: str) -> None:
        """Put the file's settings back in force."""
        if self.current is not None:
            assert self._file is not None and self._settings is not None
            self._file.apply(self._settings)
            self._forget(reason)

    def status(self) -> dict[str, Any]:
        """What the server's status says as ``trial``."""
        current, now = self.current, time.monotonic()
        return {
            "on": current is not None,
            "by": current.name if current else "",
            "sha256": current.sha256 if current else "",
            "began_s_ago": round(now - current.began, 3) if current else None,
            "left_s": round(max(0.0, current.until - now), 3) if current else None,
            "changes": _all_shown(current.changes) if current else {},
            "reason": self._ended,
        }

    def _refuse_another(self, trier: Trier) -> None:
        current = self.current
        if current is not None and current.session != trier.number:
            left = math.ceil(current.until - time.monotonic())
            raise Refused(
                "trial",
                f"{current.name} tries settings on this server already, for {max(0, left)} s more; one at a time",
            )

    def _forget(self, reason: str) -> None:
        if self.current is not None:
            self.current, self._ended = None, reason
            log.info("trial_ended", reason=reason)


def _all_shown(changes: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it."""
    plain = bool | int | float | str | None
    return {key: value if isinstance(value, plain) else str(value) for key, value in changes.items()}
