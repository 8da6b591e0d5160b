"""Recurrent state (Mamba, gated delta net): what a layer knows of all tokens up to one position, and of no other."""

from __future__ import annotations

from layerflow.kinds.base import Kind


class RecurrentState(Kind):
    """One state per block: the one after the block's last token.

    Block tables are positional, as everywhere: the state after `n * block_size` tokens is at table position
    ``n - 1``. Engines keep few of them; the other positions are "no block". A block of which only some tokens are
    there has no valid state either: the engine says "no block", and nothing is stored.
    """

    name = "state"
    vllm = ("MambaSpec",)
    exact = True

    @property
    def entries(self) -> int:
        """One state, however many tokens it stands for."""
        return 1

    def first_token(self, hit: int) -> int:
        """The state after the hit's last token is read, which is in that token's block."""
        return max(0, hit - 1)

    def keep(self, tokens: int) -> range:
        """The last block: its state is the one that a hit can end with."""
        blocks = -(-tokens // self.block_size)
        return range(blocks - 1, blocks)
