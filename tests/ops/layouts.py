"""Random models, strided tensors and block lists, and a naive reference of where each byte belongs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from layerflow.objects import HEADER_BYTES, object_bytes
from layerflow.spec import GroupSpec, ModelSpec, Plane

GUARD = 0xA5


class FlatArena:
    """Ordinary memory with the arena's face."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.full(nbytes, GUARD, np.uint8)
        self.nbytes = nbytes
        self.address = self.array.ctypes.data


def strided(shape: tuple[int, ...], dtype: torch.dtype, order: list[int], pads: list[int], offset: int) -> torch.Tensor:
    """A tensor of logical `shape` whose dimensions lie in memory in `order` (outermost first).

    :param pads: for each dimension in `order`: elements left free behind the dimensions inside it.
    :param offset: elements before the first one.
    """
    strides = [0] * len(shape)
    step = 1
    for dim, pad in zip(reversed(order), reversed(pads), strict=True):
        strides[dim] = step + pad
        step = strides[dim] * shape[dim]
    raw = torch.full(((offset + step + 3) * dtype.itemsize,), GUARD, dtype=torch.uint8)
    return torch.as_strided(raw.view(dtype), shape, strides, offset)


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's whole storage as uint8, guard bytes included."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()


def block_bytes_in_order(tensor: torch.Tensor, block: int) -> list[int]:
    """Address of each byte of one block, in physical order, element by element."""
    item = tensor.element_size()
    block_view = tensor[block]
    starts = [
        tensor.data_ptr()
        + (tensor.stride(0) * block + sum(i * s for i, s in zip(at, block_view.stride(), strict=True))) * item
        for at in np.ndindex(*block_view.shape)
    ]
    return [start + byte for start in sorted(starts) for byte in range(item)]


def peek(addresses: list[int]) -> bytes:
    return b"".join(ctypes.string_at(address, 1) for address in addresses)


@dataclass
class Case:
    spec: ModelSpec
    tensors: dict[int, dict[str, torch.Tensor]]
    group: int
    arena_bytes: int
    engine_blocks: np.ndarray
    object_offsets: np.ndarray
    object_blocks: np.ndarray
    index: np.ndarray

    @property
    def lists(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.engine_blocks, self.object_offsets, self.object_blocks, self.index

    def reference(self, layer: int, block: int) -> list[tuple[int, int]]:
        """(arena offset, engine address) of each byte of list entry `block`, straight from the layout's definition."""
        group = self.spec.groups[self.group]
        held = int(self.object_blocks[block])
        at = int(self.object_offsets[block]) + HEADER_BYTES + group.layers.index(layer) * held * group.bytes_per_block
        pairs = []
        for plane in group.planes:
            size = plane.token_bytes * group.block_size
            start = at + int(self.index[block]) * size
            addresses = block_bytes_in_order(self.tensors[layer][plane.name], int(self.engine_blocks[block]))
            pairs += [(start + n, address) for n, address in enumerate(addresses)]
            at += held * size
        return pairs


DTYPES = ["bfloat16", "float16", "int8", "uint8", "float8_e4m3fn", "float32", "int64", "bool"]
PLANE_SETS = [["k", "v"], ["latent", "rope"], ["latent", "rope", "indexer", "scale"], ["kv"]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups: list[GroupSpec] = []
    layers = list(range(draw(st.integers(1, 4))))
    count = draw(st.integers(1, min(2, len(layers))))
    for number in range(count):
        block_size = draw(st.sampled_from([1, 2, 4]))
        planes = tuple(
            Plane(name, draw(st.sampled_from(DTYPES)), tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))))
            for name in draw(st.sampled_from(PLANE_SETS))
        )
        mine = tuple(layer for layer in layers if layer % count == number)
        groups.append(GroupSpec("full", block_size, mine, planes))
    spec = ModelSpec("m", "c", tuple(groups), chunk_tokens=8)
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    num_blocks = [draw(st.integers(1, 7)) for _ in groups]
    for number, group in enumerate(groups):
        for layer in group.layers:
            tensors[layer] = {}
            for plane in group.planes:
                shape = (num_blocks[number], group.block_size, *plane.shape)
                order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else list(range(len(shape)))
                pads = [draw(st.sampled_from([0, 0, 0, 1, 5])) for _ in shape]
                dtype = getattr(torch, plane.dtype)
                tensors[layer][plane.name] = strided(shape, dtype, list(order), pads, draw(st.integers(0, 5)))
    number = draw(st.integers(0, count - 1))
    total = draw(st.integers(0, num_blocks[number]))
    ids = draw(st.permutations(range(num_blocks[number])))
    ids = sorted(ids[:total]) if draw(st.booleans()) else list(ids[:total])
    offsets, held, index = [], [], []
    at = draw(st.integers(0, 70))
    while len(index) < total:
        blocks = draw(st.integers(1, 4))
        skip = draw(st.integers(0, blocks - 1))
        for position in range(skip, min(blocks, skip + total - len(index))):
            offsets.append(at), held.append(blocks), index.append(position)
        at += object_bytes(groups[number], blocks) + draw(st.sampled_from([0, 0, 64, 3]))
    arena_bytes = at + object_bytes(groups[number], 1)
    vectors = [np.array(values, np.int64) for values in (ids, offsets, held, index)]
    return Case(spec, tensors, number, arena_bytes, *vectors)
