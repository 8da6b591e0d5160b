"""A native library's client, reached only while it is open and never closed under a call, and what it is made from."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from pydantic import ValidationError

from layerflow.config.fields import BackendOptions
from layerflow.hosts.backend import Unreachable, Unusable

CLOSE_PATIENCE_S = 1.0


class ClientHandle:
    """Before they are set up and after they were closed, such clients end the process. Any thread.

    :param away: what a call is told while there is no client.
    """

    def __init__(self, away: str) -> None:
        self._away = away
        self._changed = threading.Condition()
        self._store: Any = None
        self._leaving: Any = None  # not closed yet
        self._under_way = 0
        self._counts: Counter[str] = Counter()

    def open(self, store: Any) -> None:
        """Calls go to `store` from now on."""
        with self._changed:
            self._store = store

    @contextmanager
    def client(self) -> Iterator[Any]:
        """For one call.

        :raises Unreachable: there is none.
        """
        with self._changed:
            store = self._store
            if store is None:
                raise Unreachable(self._away)
            self._under_way += 1
        try:
            yield store
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> bool:
        """Close the client, unless calls are under way that do not end.

        :returns: False: some are, even now. No more can be made; close it again later.
        """
        with self._changed:
            if self._store is not None:
                self._leaving, self._store = self._store, None
            if not self._changed.wait_for(lambda: not self._under_way, patience_s):
                return False
            store, self._leaving = self._leaving, None
        if store is not None:
            store.close()
        return True

    def count(self, name: str, by: int = 1) -> None:
        """Something for :attr:`counts`."""
        with self._changed:
            self._counts[name] += by

    @property
    def counts(self) -> dict[str, int]:
        """What was counted since the start."""
        with self._changed:
            return dict(self._counts)


# What a backend is made from in its host process: its section of the configuration, and how long a call may take.


class HostOptions(BackendOptions):
    """Beside a backend's own section, as a second base class.

    :ivar timeout_ms: what a native call may take.
    """

    timeout_ms: int = 5000

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """:raises Unusable: an option is unknown, or cannot be meant."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            wrong = (
                f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}"
                for each in error.errors(include_url=False)
            )
            raise Unusable(f"its section of [pool] cannot be used: {'; '.join(wrong)}") from None
