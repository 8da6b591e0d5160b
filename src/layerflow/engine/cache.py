"""The paged cache: planes of every layer, one allocator and one block table per group."""

from __future__ import annotations

import numpy as np
import torch

from layerflow.engine.config import CacheGroup, EngineConfig

NULL_BLOCK = 0  # what a table's missing entry reads as; zeros, never handed out and never written
NO_BLOCK = -1


class BlockAllocator:
    """Free blocks of one group, lowest number first; and promises of blocks to admitted requests.

    :param num_blocks: the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._capacity = len(self._free)
        self._promised = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that there are, the null block aside."""
        return self._capacity

    @property
    def unpromised(self) -> int:
        """Blocks that another request can be admitted with."""
        return self._capacity - self._promised

    def promise(self, blocks: int) -> None:
        """Set `blocks` aside for a request that will allocate them later; negative: it is over."""
        self._promised += blocks

    def allocate(self, blocks: int) -> np.ndarray | None:
        """Block ids, int64, shape ``(blocks,)``; None if there are not so many."""
        if blocks > len(self._free):
            return None
        return np.array([self._free.pop() for _ in range(blocks)], dtype=np.int64)

    def release(self, blocks: np.ndarray) -> None:
        """Take blocks back; :data:`NO_BLOCK` entries are ignored."""
        held = sorted((int(block) for block in blocks if block != NO_BLOCK), reverse=True)
        assert not set(held) & set(self._free), f"blocks {held} are released twice"
        self._free.extend(held)


class PagedCache:
    """Every layer's planes, and the allocators.

    :param device: where the planes are. The model computes on the host wherever they are: elsewhere each row it reads
        or writes is copied, on the calling thread's current stream, and no kernel runs.

    :ivar tensors: ``tensors[layer][plane]``: shape ``(num_blocks, block_size, *plane.shape)``.
    """

    def __init__(self, config: EngineConfig, device: str = "cpu") -> None:
        self.on_host = device == "cpu"
        self.groups: tuple[CacheGroup, ...] = config.groups
        self.block_size = config.block_size
        self.allocators = [BlockAllocator(config.num_blocks) for _ in self.groups]
        self.group_of = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        rows = (config.num_blocks, config.block_size)
        self.tensors: dict[int, dict[str, torch.Tensor]] = {
            layer: {
                plane.name: _zeros((*rows, *plane.shape), getattr(torch, plane.dtype), device)
                for plane in self.groups[self.group_of[layer]].planes
            }
            for layer in range(config.num_layers)
        }

    def write(self, layer: int, table: np.ndarray, start: int, planes: dict[str, torch.Tensor]) -> None:
        """Store tokens from position `start` on.

        :param table: int64 block ids by block number.
        :param planes: one tensor per plane, shape ``(tokens, *plane.shape)``.
        """
        tokens = len(next(iter(planes.values())))
        positions = torch.arange(start, start + tokens)
        blocks = torch.from_numpy(table)[positions // self.block_size]
        assert int(blocks.min()) > NULL_BLOCK, f"layer {layer}: tokens {start}+{tokens} lack blocks in {table}"
        for name, rows in planes.items():
            plane = self.tensors[layer][name]
            if self.on_host:
                plane[blocks, positions % self.block_size] = rows.to(plane.dtype)
                continue
            sent = rows.to(plane.dtype).contiguous()
            for at in range(-(start % self.block_size), tokens, self.block_size):
                lo, hi = max(0, at), min(tokens, at + self.block_size)
                plane[int(blocks[lo]), lo - at : hi - at].copy_(sent[lo:hi])

    def gather(self, layer: int, table: np.ndarray, first: int, stop: int, known: int) -> dict[str, torch.Tensor]:
        """Tokens `first` to `stop` of each plane, shape ``(stop - first, *plane.shape)``.

        :param first: a block's first token.
        :param known: positions from here on are not computed yet and read as zeros.
        """
        numbers = np.zeros(-(-stop // self.block_size) - first // self.block_size, dtype=np.int64)
        there = table[first // self.block_size : first // self.block_size + len(numbers)]
        numbers[: len(there)] = np.maximum(there, NULL_BLOCK)
        index = torch.from_numpy(numbers)
        pages = {}
        for name, plane in self.tensors[layer].items():
            rows = self.read(plane, index).flatten(0, 1)[: stop - first]
            rows[known - first :] = 0
            pages[name] = rows
        return pages

    def read(self, plane: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Whole blocks of a plane, on the host: shape ``(len(blocks), block_size, *plane.shape)``."""
        if self.on_host:
            return plane.index_select(0, blocks)
        read = torch.empty(len(blocks), *plane.shape[1:], dtype=plane.dtype)
        for row, block in zip(read, blocks.tolist(), strict=True):
            row.copy_(plane[block])
        return read

    def put(self, plane: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite whole blocks of a plane.

        :param rows: on the host, shape ``(len(blocks), block_size, *plane.shape)``.
        """
        if self.on_host:
            plane[blocks] = rows
            return
        for row, block in zip(rows, blocks.tolist(), strict=True):
            plane[block].copy_(row)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    zeros = torch.zeros(shape, dtype=dtype)
    return zeros if device == "cpu" else torch.empty(shape, dtype=dtype, device=device).copy_(zeros)
