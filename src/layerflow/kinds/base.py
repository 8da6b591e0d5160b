"""The contract of a cache kind: three rules, so that a new kind is one new file."""

from __future__ import annotations

from typing import ClassVar


class Kind:
    """How the KV cache of one group of layers relates to token positions.

    All positions and lengths are in tokens. The base class is the rule of full attention, which
    every other kind narrows.

    :param block_size: tokens of one block.
    :param window: tokens that a query can see, itself included; 0 = all.
    :param ratio: tokens that one row of a block stands for, as in DeepSeek-V4's compressed attention, or where ranks
        share a block's tokens.
    """

    name: ClassVar[str]
    vllm: ClassVar[tuple[str, ...]] = ()
    """Names of vLLM's specs of such caches; which of them a vLLM has differs between versions."""
    windowed: ClassVar[bool] = False
    """Takes a window."""
    exact: ClassVar[bool] = False
    """What is stored at T serves a hit of T tokens and no other, so that a hit cannot be shortened."""

    def __init__(self, block_size: int, window: int = 0, ratio: int = 1) -> None:
        self.block_size = block_size
        self.window = window
        self.ratio = ratio

    @property
    def entries(self) -> int:
        """Rows of one block in each plane: one per token, or per `ratio` tokens."""
        return self.block_size // self.ratio

    def first_token(self, hit: int) -> int:
        """First position whose KV a request with `hit` cached tokens still reads.

        The next query sits at position `hit`.
        """
        return 0

    def need(self, hit: int, chunk_tokens: int) -> range:
        """Chunks that must exist for a hit of `hit` tokens."""
        return range(self.first_token(hit) // chunk_tokens, -(-hit // chunk_tokens))

    def inside(self, held: int, shared: int) -> bool:
        """Can a hit that ends after the first `shared` tokens of a chunk be loaded from an object of `held` tokens?"""
        if self.exact and shared != held:
            return False
        return self.first_token(shared) // self.block_size >= self.keep(held).start

    def keep(self, tokens: int) -> range:
        """Blocks worth storing of a chunk that holds `tokens` tokens."""
        return range(0, -(-tokens // self.block_size))
