"""What an operator has written for a connector: JSON, read key by key, each problem named with its place."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from layerflow.config.sources import what_to_write
from layerflow.endpoint import local_endpoint
from layerflow.errors import ConfigError


class WrittenOptions:
    """An engine's object of options for its connector.

    :param where: what the engine calls it, for errors.
    """

    def __init__(self, where: str, written: Mapping[str, Any]) -> None:
        self.where = where
        self.written = written

    def __contains__(self, key: str) -> bool:
        return key in self.written

    def refuse_unknown(self, known: Collection[str]) -> None:
        """:raises ConfigError: a line for each key that means nothing here: what to write, the closest, or all keys."""
        problems = []
        for key in self.written:
            if key in known:
                continue
            close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.75)
            if advice := what_to_write(key):
                problems.append(f"{self.where}: {key} has no use here: {advice}")
            elif close:
                problems.append(f"{self.where}: unknown key {key!r}; did you mean {close[0]}?")
            else:
                problems.append(f"{self.where}: unknown key {key!r}; known are {', '.join(sorted(known))}")
        if problems:
            raise ConfigError("\n".join(problems))

    def endpoint(self) -> str:
        """The server's control socket; "" where none is written.

        :raises ConfigError: it is on another machine, or no address of a socket.
        """
        written = self.text("endpoint")
        if written.startswith("tcp://"):
            raise ConfigError(
                f"{self.where}: endpoint {written!r}: workers share memory with the server, so it must run "
                "on this machine; give its ipc:// endpoint"
            )
        if not written.startswith("ipc://"):
            return written
        try:
            return local_endpoint(written)
        except ValueError as error:
            raise ConfigError(f"{self.where}: endpoint: {error}") from None

    def text(self, key: str) -> str:
        """:raises ConfigError: it is no text."""
        value = self.written.get(key, "")
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {key} = {value!r}: should be text")
        return value

    def switch(self, key: str, default: bool) -> bool:
        """:raises ConfigError: it is neither true nor false."""
        value = self.written.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} = {value!r}: should be true or false")
        return value

    def number(self, key: str, default: float, *, least: float = float("-inf"), most: float = float("inf")) -> float:
        """:raises ConfigError: it is no number, or outside of these bounds."""
        value = self.written.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.where}: {key} = {value!r}: should be a number")
        if not least <= value <= most:
            raise ConfigError(f"{self.where}: {key} = {value}: should be {least:g} to {most:g}")
        return value

    def table(self, key: str, title: str) -> dict[str, Any]:
        """:param title: of the table whose keys it may hold. :raises ConfigError: it is no object."""
        value = self.written[key]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key} = {value!r}: should be an object with the keys of {title}")
        return dict(value)
