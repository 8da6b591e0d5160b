"""When a tensor-parallel rank begins a layer's copies, so that the ranks of a machine do not share a link.

Time is cut into turns of `tp_size` slots, counted from zero of the monotonic clock, which all processes of a machine
share. Each layer takes a turn of its own; within it, a rank begins in slot ``(tp_rank + layer) % tp_size``: ranks that
load the same layers in the same turns never begin together, and none of them is always the last.
"""

from __future__ import annotations

import math


class Stagger:
    """One rank's slots.

    :param stagger_us: length of a slot; 0 = everything begins at once.
    """

    def __init__(self, tp_rank: int, tp_size: int, stagger_us: int) -> None:
        self._rank = tp_rank
        self._size = tp_size
        self._slot_s = stagger_us * 1e-6
        self._last_turn = -1

    @property
    def on(self) -> bool:
        """Is there anything to wait for?"""
        return self._slot_s > 0.0 and self._size > 1

    def begin(self, layer: int, now: float, patience_s: float) -> float:
        """When to begin a layer that could begin now. Call once for each layer, right before it is submitted.

        :param now: monotonic seconds.
        :param patience_s: a slot that is further off is not waited for.
        :returns: the slot's beginning, or `now`.
        """
        turn_s = self._slot_s * self._size
        offset = self._slot_s * ((self._rank + layer) % self._size)
        turn = max(math.ceil((now - offset) / turn_s), self._last_turn + 1)
        when = turn * turn_s + offset
        if when - now > patience_s:
            return now
        self._last_turn = turn
        return max(now, when)
