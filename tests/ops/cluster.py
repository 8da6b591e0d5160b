"""A model's cache spread over workers of any tensor and pipeline size, and what every byte of it must be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from layerflow.boxes import Box, replica_of, worker_box
from layerflow.objects import object_bytes
from layerflow.ops.copier import CpuCopier
from layerflow.ops.covered import ChunkPlaces, CoveredBlocks
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.spec import GroupSpec, ModelSpec, Plane

from .layouts import FlatArena, raw_bytes, strided

HEAD_AXIS = {"k": ("int8", 3), "v": ("bfloat16", 2)}
"""Plane name to dtype and elements of one head of one token."""
NO_HEAD_AXIS = {"latent": ("bfloat16", 3), "scale": ("float32", 1)}


@dataclass(frozen=True)
class Model:
    """The group under test has the even layers; a group without heads has the odd ones.

    :param heads: KV heads; 0 = a group without a head axis.
    :param chunks: blocks that each chunk's objects hold.
    """

    heads: int
    layers: int = 6
    entries: int = 2
    chunks: tuple[int, ...] = (2, 1, 2)

    @property
    def numbers(self) -> range:
        return range(0, self.layers, 2)

    def span(self, stage: tuple[int, int]) -> tuple[int, int]:
        """The layers of a pipeline stage as a box counts them: within the group."""
        return sum(layer < stage[0] for layer in self.numbers), sum(layer < stage[1] for layer in self.numbers)

    @property
    def planes(self) -> dict[str, tuple[str, int]]:
        return HEAD_AXIS if self.heads else NO_HEAD_AXIS

    def truth(self, layer: int, plane: str) -> np.ndarray:
        """uint8, shape ``(blocks, heads, entries, bytes)``."""
        dtype, width = self.planes[plane]
        shape = (sum(self.chunks), self.heads or 1, self.entries, width * getattr(torch, dtype).itemsize)
        return np.random.default_rng([layer, len(plane)]).integers(0, 256, shape, dtype=np.uint8)


class Worker:
    """One rank's memory: planes head-major, padded and shuffled in its own way."""

    def __init__(self, model: Model, stage: tuple[int, int], rank: int, size: int, seed: int) -> None:
        rng = np.random.default_rng([seed, rank, *stage])
        self.model, self.rank, self.size = model, rank, size
        self.box = worker_box(model.span(stage), model.heads or 1, rank, size)
        self.group = 0
        mine = tuple(layer - stage[0] for layer in range(*stage) if not layer % 2)
        others = tuple(layer - stage[0] for layer in range(*stage) if layer % 2)
        shape = (self.box.heads,) if model.heads else ()
        planes = tuple(Plane(name, dtype, (*shape, width)) for name, (dtype, width) in model.planes.items())
        groups = [GroupSpec("full", model.entries, mine, planes)]
        if others:
            groups.append(GroupSpec("mla", model.entries, others, (Plane("latent", "int8", (4,)),)))
        self.spec = ModelSpec("m", "c", tuple(groups), chunk_tokens=model.entries * 8)
        blocks = sum(model.chunks) + int(rng.integers(0, 3))
        wanted = rng.permutation(blocks) if rng.integers(0, 2) else np.arange(blocks)
        self.ids: np.ndarray = wanted[: sum(model.chunks)].astype(np.int64)
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}
        padded = rng.integers(0, 3)  # 0: dense blocks, 1: alike in all layers, 2: in each layer its own way
        for layer, group in self._layers():
            pads = int(rng.integers(0, 5)) if padded == 2 else int(padded) * 3
            self.tensors[layer] = {}
            for plane in group.planes:
                logical = (blocks, model.entries, *plane.shape)
                order = [0, 2, 1, 3] if len(logical) == 4 else [0, 1, 2]
                inner = 2 if padded and rng.integers(0, 2) else 0  # a block in pieces
                spaces = [pads, *[0] * (len(logical) - 2), inner]
                self.tensors[layer][plane.name] = strided(logical, getattr(torch, plane.dtype), order, spaces, 1)
        self.memory = PagedMemory(self.spec, self.tensors)

    def _layers(self) -> list[tuple[int, GroupSpec]]:
        return sorted((layer, group) for group in self.spec.groups for layer in group.layers)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.spec.groups[0].layers

    def truth(self, layer: int, plane: str) -> np.ndarray:
        """What the worker's blocks hold, in the model's order of blocks; ``(blocks, heads, entries, bytes)``."""
        position = self.box.first_layer + self.layers.index(layer)
        whole = self.model.truth(self.model.numbers[position], plane)
        return whole[:, self.box.first_head : self.box.end_head]

    def blocks_of(self, layer: int, plane: str) -> torch.Tensor:
        """A view, uint8, ``(blocks, heads, entries, bytes)``, by block id."""
        tensor = self.tensors[layer][plane]
        bare = tensor if tensor.dim() == 4 else tensor.unsqueeze(2)
        return bare.permute(0, 2, 1, 3)

    def fill(self) -> None:
        for layer in self.layers:
            for plane in self.model.planes:
                view = self.blocks_of(layer, plane)
                for number, block in enumerate(self.ids.tolist()):
                    truth = torch.from_numpy(self.truth(layer, plane)[number].copy())
                    view[block] = truth.view(view.dtype).reshape(view[block].shape)

    def image(self) -> list[np.ndarray]:
        """Every byte of every allocation."""
        return [raw_bytes(tensor).copy() for planes in self.tensors.values() for tensor in planes.values()]

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per block: its chunk, the blocks of that chunk's objects, its position in them."""
        held = np.array(self.model.chunks, np.int64)
        index = np.concatenate([np.arange(n, dtype=np.int64) for n in held])
        return np.arange(held.size, dtype=np.int64).repeat(held), held.repeat(held), index


class Stored:
    """What workers of one partition have stored of each chunk: each box once."""

    def __init__(self, model: Model, writers: list[Worker]) -> None:
        self.model = model
        placed: list[tuple[int, Worker, int]] = []
        at = 3
        for writer in writers:
            mine = replica_of(model.heads or 1, writer.rank, writer.size)
            for chunk, blocks in enumerate(model.chunks):
                if mine.is_writer(bytes([chunk * 37]) * 8):
                    placed.append((chunk, writer, at))
                    at += object_bytes(writer.spec.groups[0], blocks) + (chunk % 2) * 5
        self.arena = FlatArena(at)
        self.places: list[list[tuple[Box, int]]] = [[] for _ in model.chunks]
        for chunk, writer, offset in placed:
            self.places[chunk].append((writer.box, offset))
            _save(writer, self.arena, chunk, offset)

    def chunks(self) -> list[ChunkPlaces]:
        return [ChunkPlaces(tuple(box for box, _ in own), tuple(at for _, at in own)) for own in self.places]


def _save(writer: Worker, arena: FlatArena, chunk: int, offset: int) -> None:
    number, held, index = writer.columns()
    mine = number == chunk
    lists = (writer.ids[mine], np.full(mine.sum(), offset, np.int64), held[mine], index[mine])
    blocks = BlockList(writer.memory, 0, arena.nbytes, *lists)
    for layer in writer.layers:
        CpuCopier(arena).save(blocks.extents(layer, 0, len(blocks)))


def workers(model: Model, tp: int, cuts: list[int], seed: int) -> list[Worker]:
    """All ranks of all stages that have a layer of the group.

    :param cuts: layers at which a pipeline stage ends, ascending.
    """
    stages = itertools.pairwise([0, *cuts, model.layers])
    return [Worker(model, stage, rank, tp, seed) for stage in stages if range(*model.span(stage)) for rank in range(tp)]


def covered(reader: Worker, stored: Stored) -> CoveredBlocks:
    chunk, held, index = reader.columns()
    return CoveredBlocks(
        reader.memory, 0, lambda _: stored.arena.nbytes, reader.box, stored.chunks(), reader.ids, chunk, held, index
    )


def check_loaded(reader: Worker, before: list[np.ndarray]) -> None:
    """All blocks hold the truth, and no other byte of the worker's memory changed.

    :param before: :meth:`Worker.image` before the load.
    """
    for layer in reader.layers:
        for plane in reader.model.planes:
            view, truth = reader.blocks_of(layer, plane), reader.truth(layer, plane)
            for number in range(reader.ids.size):
                got = view[int(reader.ids[number])].contiguous().view(torch.uint8).numpy()
                np.testing.assert_array_equal(got, truth[number].reshape(got.shape))
    for image, was, mask in zip(reader.image(), before, _touched(reader), strict=True):
        np.testing.assert_array_equal(np.where(mask, was, image), was)


def _touched(reader: Worker) -> list[np.ndarray]:
    """Of each allocation: the bytes that belong to loaded blocks, element by element from the tensors' strides."""
    masks = []
    for layer, planes in reader.tensors.items():
        for tensor in planes.values():
            mask = np.zeros(tensor.untyped_storage().nbytes(), bool)
            item = tensor.element_size()
            if layer in reader.layers:
                for number in range(reader.ids.size):
                    block = tensor[int(reader.ids[number])]
                    starts = block.storage_offset() + sum(
                        np.arange(size).reshape([-1 if d == dim else 1 for d in range(block.dim())]) * stride
                        for dim, (size, stride) in enumerate(zip(block.shape, block.stride(), strict=True))
                    )
                    mask[(np.asarray(starts).ravel()[:, None] * item + np.arange(item)).ravel()] = True
            masks.append(mask)
    return masks
