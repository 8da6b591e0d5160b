"""The paged cache: planes of every layer, one allocator and one block table per group."""

from __future__ import annotations

import numpy as np
import torch

from layerflow_engine.config import CacheGroup, EngineConfig, PlaneSize

ALIGNMENT = 64  # bytes: where a cache begins within a block
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
    """Every cache's planes, and the allocators. Numbers are those of :attr:`EngineConfig.caches`.

    :param device: where the planes are. The model computes on the host wherever they are: elsewhere each row it reads
        or writes is copied, on the calling thread's current stream, and no kernel runs.

    :ivar tensors: ``tensors[number][plane]``: shape ``(num_blocks, rows of a block, *plane.shape)``.
    :ivar allocators: by group; one and the same where the groups share their memory.
    """

    def __init__(self, config: EngineConfig, device: str = "cpu") -> None:
        self.on_host = device == "cpu"
        self.groups: tuple[CacheGroup, ...] = config.groups
        shared = BlockAllocator(config.num_blocks)
        self.allocators = [shared if config.packed else BlockAllocator(config.num_blocks) for _ in self.groups]
        self.group_of = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        made = (_packed if config.packed else _apart)(self.groups, config.num_blocks, device)
        self.tensors: dict[int, dict[str, torch.Tensor]] = {number: made[number] for number in sorted(made)}

    def write(self, layer: int, table: np.ndarray, start: int, planes: dict[str, torch.Tensor]) -> None:
        """Store rows from row `start` on: tokens, or what a compressed cache has of several.

        :param table: int64 block ids by block number.
        :param planes: one tensor per plane, shape ``(rows, *plane.shape)``.
        """
        count, size = len(next(iter(planes.values()))), self._rows(layer)
        rows = torch.arange(start, start + count)
        blocks = torch.from_numpy(table)[rows // size]
        assert int(blocks.min()) > NULL_BLOCK, f"cache {layer}: rows {start}+{count} lack blocks in {table}"
        for name, new in planes.items():
            plane = self.tensors[layer][name]
            if self.on_host:
                plane[blocks, rows % size] = new.to(plane.dtype)
                continue
            sent = new.to(plane.dtype).contiguous()
            for at in range(-(start % size), count, size):
                lo, hi = max(0, at), min(count, at + size)
                plane[int(blocks[lo]), lo - at : hi - at].copy_(sent[lo:hi])

    def gather(self, layer: int, table: np.ndarray, first: int, stop: int, known: int) -> dict[str, torch.Tensor]:
        """Rows `first` to `stop` of each plane, shape ``(stop - first, *plane.shape)``.

        :param known: rows from here on are not computed yet and read as zeros.
        """
        size = self._rows(layer)
        numbers = np.zeros(-(-stop // size) - first // size, dtype=np.int64)
        there = table[first // size : first // size + len(numbers)]
        numbers[: len(there)] = np.maximum(there, NULL_BLOCK)
        index, skipped = torch.from_numpy(numbers), first % size
        pages = {}
        for name, plane in self.tensors[layer].items():
            rows = self.read(plane, index).flatten(0, 1)[skipped : skipped + stop - first]
            rows[max(0, known - first) :] = 0
            pages[name] = rows
        return pages

    def read(self, plane: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Whole blocks of a plane, on the host: shape ``(len(blocks), rows of a block, *plane.shape)``."""
        if self.on_host:
            return plane.index_select(0, blocks)
        read = torch.empty(len(blocks), *plane.shape[1:], dtype=plane.dtype)
        for row, block in zip(read, blocks.tolist(), strict=True):
            row.copy_(plane[block])
        return read

    def put(self, plane: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite whole blocks of a plane.

        :param rows: on the host, shape ``(len(blocks), rows of a block, *plane.shape)``.
        """
        if self.on_host:
            plane[blocks] = rows
            return
        for row, block in zip(rows, blocks.tolist(), strict=True):
            plane[block].copy_(row)

    def _rows(self, layer: int) -> int:
        return self.groups[self.group_of[layer]].rows


def _apart(groups: tuple[CacheGroup, ...], blocks: int, device: str) -> dict[int, dict[str, torch.Tensor]]:
    """Each plane of each cache has memory of its own."""
    return {
        number: {
            plane.name: _zeros((blocks, group.rows, *plane.shape), getattr(torch, plane.dtype), device)
            for plane in group.planes
        }
        for group in groups
        for number in group.layers
    }


def _packed(groups: tuple[CacheGroup, ...], blocks: int, device: str) -> dict[int, dict[str, torch.Tensor]]:
    """One allocation, block by block: a block holds all caches of one group, side by side, whichever group that is."""
    places: list[tuple[int, CacheGroup, PlaneSize, int]] = []
    page = 0
    for group in groups:
        offset = 0
        for number in group.layers:
            for plane in group.planes:
                places.append((number, group, plane, offset))
                offset += -(-group.rows * plane.row_bytes // ALIGNMENT) * ALIGNMENT
        page = max(page, offset)
    memory = _zeros((blocks, page), torch.uint8, device)
    made: dict[int, dict[str, torch.Tensor]] = {}
    for number, group, plane, offset in places:
        own = memory[:, offset : offset + group.rows * plane.row_bytes].view(getattr(torch, plane.dtype))
        made.setdefault(number, {})[plane.name] = own.view(blocks, group.rows, *plane.shape)
    return made


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    zeros = torch.zeros(shape, dtype=dtype)
    return zeros if device == "cpu" else torch.empty(shape, dtype=dtype, device=device).copy_(zeros)
