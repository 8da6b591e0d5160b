"""A bounded memory of keys, each remembered until a time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Set
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class ExpiringSet(Generic[Key]):
    """Keys that are each remembered until a time, in seconds on one clock of the caller's.

    Adding a key to a full set forgets the key that was added longest ago: whatever a client sends, the set stays small.
    A key whose time is over still counts, in :func:`len` and for `in`, until :meth:`expire` or a newer key removes it.

    :param most: keys that fit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._until: OrderedDict[Key, float] = OrderedDict()  #: in the order in which the keys were last added

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, key: object) -> bool:
        return key in self._until

    def add(self, key: Key, until: float = math.inf) -> Key | None:
        """Remember a key until this time, also where it was to be remembered for longer.

        :returns: the key that was forgotten to make room; None = there was room.
        """
        self._until[key] = until
        self._until.move_to_end(key)
        return self._until.popitem(last=False)[0] if len(self._until) > self._most else None

    def discard(self, key: Key) -> bool:
        """Forget a key. Return whether it was in the set."""
        return self._until.pop(key, None) is not None

    def holds(self, key: Key, now: float) -> bool:
        """Return whether the key's time is not over."""
        return self._until.get(key, now) > now

    def seconds_left(self, key: Key, now: float) -> float:
        """Return how long the key is still remembered; 0 = it is not."""
        return max(0.0, self._until.get(key, now) - now)

    def among(self, keys: Iterable[Key], now: float) -> Set[Key]:
        """Return those of `keys` whose time is not over."""
        if not self._until:  # nearly always
            return frozenset()
        return {key for key in keys if self._until.get(key, now) > now}

    def expire(self, now: float) -> None:
        """Forget keys whose time is over, oldest first, as far as the first one whose time is not.

        These are all of them where every key is remembered equally long. The others are not looked at: of thousands of
        keys few end at a time.
        """
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
