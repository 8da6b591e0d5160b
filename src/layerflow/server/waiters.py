"""Who waits until things have ended, found by what is waited for: an end touches only those that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class _Waiter(Generic[Key]):
    """One that waits, and what it still waits for."""

    __slots__ = ("left", "on_done")

    def __init__(self, left: set[Key], on_done: Callable[[], None]) -> None:
        self.left = left
        self.on_done = on_done


class Waiters(Generic[Key]):
    """All that wait for things of one kind, each of them named by a key."""

    def __init__(self) -> None:
        self._by_key: dict[Key, dict[_Waiter[Key], None]] = {}

    def __len__(self) -> int:
        """How many keys somebody waits for."""
        return len(self._by_key)

    def wait(self, keys: Iterable[Key], on_done: Callable[[], None]) -> Callable[[], None]:
        """Call `on_done` once each of these has ended; at once where there are none.

        :returns: what the caller does when it waits no longer: `on_done` is forgotten. Afterwards it does nothing.
        """
        waiter = _Waiter(set(keys), on_done)
        for key in waiter.left:
            self._by_key.setdefault(key, {})[waiter] = None
        if not waiter.left:
            on_done()
        return lambda: self._forget(waiter)

    def end(self, keys: Iterable[Key]) -> None:
        """These have ended: tell those who wait for nothing else."""
        if not self._by_key:
            return
        done: list[_Waiter[Key]] = []
        for key in keys:
            for waiter in self._by_key.pop(key, ()):
                waiter.left.remove(key)
                if not waiter.left:
                    done.append(waiter)
        # Behind the loop: who is told may wait for something again, or end something.
        for waiter in done:
            waiter.on_done()

    def _forget(self, waiter: _Waiter[Key]) -> None:
        for key in waiter.left:
            others = self._by_key[key]
            del others[waiter]
            if not others:
                del self._by_key[key]
        waiter.left.clear()
        waiter.on_done = _nothing


def _nothing() -> None:
    pass
