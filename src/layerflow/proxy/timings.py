"""Measured here: bytes per token, and for short prompts which way to the first token is quicker."""

from __future__ import annotations

from enum import Enum

_WEIGHT = 0.1  # of a new value in a mean
_BYTES_PER_TOKEN = 4.0  # until engines have told
_RETRIED = 32  # one request in so many goes the slower way, so that its figure stays true


class Way(Enum):
    """Who computes a prompt."""

    APART = "apart"
    ALONE = "alone"


class TokenEstimate:
    """How many tokens a text prompt has, from its bytes; learnt from what engines count."""

    def __init__(self) -> None:
        self._bytes_per_token = _BYTES_PER_TOKEN

    def tokens(self, nbytes: int) -> int:
        return max(1, round(nbytes / self._bytes_per_token))

    def learn(self, nbytes: int, tokens: int) -> None:
        if tokens > 0 and nbytes > 0:
            self._bytes_per_token += _WEIGHT * (nbytes / tokens - self._bytes_per_token)


class ShortPrompts:
    """Decides for prompts up to `most_tokens` whether the prefill engine is left out.

    Times to the first token are kept by length (powers of two) and way. Apart they are what prefill and hand-off took
    together. Until both ways are known the decoder computes alone.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._seconds: dict[tuple[int, Way], float] = {}
        self._asked: dict[int, int] = {}

    def choose(self, tokens: int) -> Way:
        """The way of the next prompt of so many tokens."""
        if tokens > self._most:
            return Way.APART
        length = tokens.bit_length()
        apart, alone = self._seconds.get((length, Way.APART)), self._seconds.get((length, Way.ALONE))
        quicker = Way.APART if apart is not None and alone is not None and apart < alone else Way.ALONE
        asked = self._asked[length] = self._asked.get(length, 0) + 1
        if asked % _RETRIED == 0:
            return Way.ALONE if quicker is Way.APART else Way.APART
        return quicker

    def learn(self, tokens: int, way: Way, seconds: float) -> None:
        """A first token came `seconds` after the request."""
        if tokens <= self._most:
            key = tokens.bit_length(), way
            known = self._seconds.get(key)
            self._seconds[key] = seconds if known is None else known + _WEIGHT * (seconds - known)
