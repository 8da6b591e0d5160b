"""How much one call of a host should move.

Small calls let the other transfers have their turn and bring the first layers early; where a call costs much
beside its bytes, as it does at the far end of a network, only large calls are fast. So a call grows while calls
are quick, or while twice the bytes come at a clearly higher rate, and shrinks where they do not.
"""

from __future__ import annotations

FIRST_BYTES, MOST_BYTES = 1 << 20, 64 << 20
QUICK_S = 5e-3
"""A call of so long is large enough: what has to wait for it waits no longer than an engine computes a layer."""
WORTH_IT = 1.25
"""Twice the bytes must come at a rate so many times as high."""


class Pace:
    """The size of the next call of one lane, from the calls that have ended."""

    __slots__ = ("_level", "_rates")

    def __init__(self) -> None:
        self._level = 0
        self._rates = [0.0] * (MOST_BYTES // FIRST_BYTES).bit_length()

    @property
    def nbytes(self) -> int:
        """A call moves about so much."""
        return FIRST_BYTES << self._level

    def ended(self, nbytes: int, seconds: float) -> None:
        """A call has moved so much in so long; small ones say nothing about large ones."""
        level = self._level
        if 2 * nbytes <= self.nbytes or nbytes > 2 * self.nbytes:
            return
        rate = nbytes / max(seconds, 1e-6)
        known = self._rates[level]
        self._rates[level] = rate if not known else (known + rate) / 2
        gains = not level or self._rates[level] > WORTH_IT * self._rates[level - 1]
        if (seconds < QUICK_S or gains) and level + 1 < len(self._rates):
            self._level += 1
        elif not gains and level and seconds > 2 * QUICK_S:
            self._level -= 1
