"""Sliding-window attention: a hit needs only the tokens that the next query can see."""

from __future__ import annotations

from layerflow.kinds.base import Kind


class Sliding(Kind):
    """Keys and values of the last `window` tokens."""

    name = "sliding"
    vllm = ("SlidingWindowSpec", "SlidingWindowMLASpec")
    windowed = True

    def first_token(self, hit: int) -> int:
        """The query at position `hit` sees itself and `window - 1` tokens before it."""
        return max(0, hit - self.window + 1)

    def keep(self, tokens: int) -> range:
        """The blocks a later hit can read.

        A hit ends with the chunk, or one token earlier when the prompt ends with it (one token is
        always computed), so `window` tokens before the end are enough.
        """
        first = max(0, tokens - self.window) // self.block_size
        return range(first, -(-tokens // self.block_size))
