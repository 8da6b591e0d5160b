"""Registered engine memory: where every block of every layer and plane lies, whatever the strides.

A block is stored in an object in its *physical* order: its bytes as they lie in memory, ascending. The
logical order of an engine's view (tokens, heads, head dim) may be any permutation of that; two workers
exchange objects only if they pack blocks alike, which :attr:`PagedMemory.packing` makes visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from layerflow.errors import ExtentError, SpecError
from layerflow.spec import GroupSpec, ModelSpec, Plane

Int64 = npt.NDArray[np.int64]

_SHAPE_LETTERS = {1: "D", 2: "HD"}


@dataclass(frozen=True, slots=True)
class PagedPlane:
    """One plane of one layer in engine memory. Everything in bytes.

    :param base: address of block 0's first byte (``data_ptr()``, not the storage's start).
    :param stride: from one block to the next.
    :param pieces: int64, shape ``(pieces,)``: where each dense piece of a block starts, from the block's start.
    :param piece_bytes: bytes of each piece; ``pieces.size * piece_bytes`` is the block.
    :param packing: physical order of a block's dimensions, outermost first, e.g. ``"NHD"``: N tokens,
        H heads, D the last dimension; those of one element are left out.
    """

    base: int
    stride: int
    pieces: Int64
    piece_bytes: int
    packing: str

    @property
    def block_bytes(self) -> int:
        return self.pieces.size * self.piece_bytes

    @property
    def dense(self) -> bool:
        """Neighbouring blocks are neighbours in memory, so that runs of them are one range."""
        return self.pieces.size == 1 and self.stride == self.piece_bytes


class Region(NamedTuple):
    """One allocation that registered tensors lie in.

    :param address: its first byte.
    :param nbytes: its length.
    :param bytes: uint8 tensor of shape ``(nbytes,)`` over it, on the tensors' device.
    """

    address: int
    nbytes: int
    bytes: torch.Tensor


class PagedMemory:
    """An engine worker's KV cache, registered for transfers. Keeps the tensors alive.

    :param spec: what the worker caches.
    :param tensors: ``tensors[layer][plane name]``, logical shape ``(num_blocks, entries, *plane.shape)`` (entries:
        :attr:`GroupSpec.entries`) and of the plane's dtype; any strides, storage offset and sharing of storages, all
        on one device.
        ``num_blocks`` is the same for all layers of a group.
    :raises SpecError: naming the layer and the plane, for a missing or extra one, a wrong shape, dtype or
        device, or a view in which two elements share memory.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        if set(tensors) != set(range(spec.num_layers)):
            missing = sorted(set(range(spec.num_layers)) - set(tensors))
            extra = sorted(set(tensors) - set(range(spec.num_layers)))
            raise SpecError(
                f"model {spec.name!r} caches layers 0 to {spec.num_layers - 1}; registered tensors lack layers "
                f"{missing} and have extra layers {extra}"
            )
        self.spec = spec
        self.device = next(iter(tensors[0].values())).device if tensors[0] else torch.device("cpu")
        self._tensors = {layer: dict(planes) for layer, planes in tensors.items()}
        self._places = spec.layer_places()
        blocks = [0] * len(spec.groups)
        planes: list[tuple[PagedPlane, ...]] = []
        for layer, (number, _) in enumerate(self._places):
            group = spec.groups[number]
            _check_names(layer, group, self._tensors[layer])
            first = self._tensors[layer][group.planes[0].name]
            blocks[number] = blocks[number] or (first.shape[0] if first.dim() else 0)
            planes.append(
                tuple(
                    self._register(layer, group, plane, self._tensors[layer][plane.name], blocks[number])
                    for plane in group.planes
                )
            )
            _check_distinct(layer, group, planes[-1])
        self.num_blocks = tuple(blocks)  #: blocks of each group
        self._planes = tuple(planes)
        kinds: dict[object, int] = {}
        self.shapes = tuple(  #: by layer: a number that layers of a group share whose blocks lie alike
            kinds.setdefault((group, *((p.stride, p.piece_bytes, p.pieces.tobytes()) for p in layer)), len(kinds))
            for layer, (group, _) in zip(planes, self._places, strict=True)
        )
        self._positions: Int64 = np.array([position for _, position in self._places], np.int64)
        self._bases = tuple(
            np.array([[plane.base for plane in planes[layer]] for layer in group.layers], np.int64)
            for group in spec.groups
        )

    def planes(self, layer: int) -> tuple[PagedPlane, ...]:
        """The layer's planes, in storage order."""
        return self._planes[layer]

    def origins(self, layers: Sequence[int]) -> tuple[Int64, Int64]:
        """Where layers of one group begin: their index within it, int64, shape ``(n,)``; and in engine memory the
        address of block 0 in each plane, shape ``(n, planes)``.
        """
        positions = self._positions[list(layers)]
        return positions, self._bases[self._places[layers[0]][0]][positions]

    def place(self, layer: int) -> tuple[int, int]:
        """The layer's group and its index within that group.

        :raises ExtentError: the model has no such layer.
        """
        if not 0 <= layer < len(self._places):
            raise ExtentError(
                f"layer {layer} does not exist; registered memory has layers 0 to {len(self._places) - 1}"
            )
        return self._places[layer]

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of this layer, all planes."""
        return self.spec.groups[self.place(layer)[0]].bytes_per_block

    @property
    def packing(self) -> str:
        """How blocks are packed, for :attr:`ModelSpec.attention`: ``"k=NHD,v=NHD"``, groups joined by ``;``.

        Where a group's layers differ, each differing order is listed, joined by ``|``, with its layers.
        """
        return ";".join(self._group_packing(group) for group in self.spec.groups)

    def regions(self) -> tuple[Region, ...]:
        """The distinct allocations behind the tensors, ascending by address."""
        storages = {}
        for planes in self._tensors.values():
            for tensor in planes.values():
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage
        return tuple(
            Region(
                address,
                storage.nbytes(),
                torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (storage.nbytes(),), (1,)),
            )
            for address, storage in sorted(storages.items())
        )

    def _group_packing(self, group: GroupSpec) -> str:
        orders: dict[str, list[int]] = {}
        for layer in group.layers:
            pairs = zip(group.planes, self._planes[layer], strict=True)
            orders.setdefault(",".join(f"{plane.name}={paged.packing}" for plane, paged in pairs), []).append(layer)
        if len(orders) == 1:
            return next(iter(orders))
        return "|".join(f"{order}@{','.join(map(str, layers))}" for order, layers in orders.items())

    def _register(self, layer: int, group: GroupSpec, plane: Plane, tensor: torch.Tensor, blocks: int) -> PagedPlane:
        where = f"layer {layer}, plane {plane.name!r}"
        dtype = getattr(torch, plane.dtype)
        if tensor.dtype != dtype:
            raise SpecError(
                f"{where}: the tensor is {tensor.dtype} but the plane is {dtype}; register tensor.view({dtype}), "
                "or declare the plane with the tensor's dtype if it holds raw bytes"
            )
        expected = (blocks, group.entries, *plane.shape)
        if blocks < 1 or tuple(tensor.shape) != expected:
            raise SpecError(
                f"{where}: the tensor has shape {tuple(tensor.shape)} but (num_blocks, entries, *plane.shape) is "
                f"{expected if blocks else ('num_blocks > 0', *expected[1:])}; register a view of that shape "
                "(permuted strides are fine)"
            )
        if tensor.device != self.device:
            raise SpecError(f"{where}: the tensor is on {tensor.device}, the others are on {self.device}")
        item = tensor.element_size()
        strides = [stride * item for stride in tensor.stride()]
        _check_no_overlap(where, tensor.shape, strides, item)
        pieces, piece_bytes = _pieces(tensor.shape[1:], strides[1:], item)
        return PagedPlane(tensor.data_ptr(), strides[0], pieces, piece_bytes, _packing(tensor.shape[1:], strides[1:]))


def _check_names(layer: int, group: GroupSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    wanted = {plane.name for plane in group.planes}
    if set(tensors) != wanted:
        raise SpecError(
            f"layer {layer}: planes {sorted(wanted - set(tensors))} are missing and planes "
            f"{sorted(set(tensors) - wanted)} are not in the spec"
        )


def _check_distinct(layer: int, group: GroupSpec, planes: tuple[PagedPlane, ...]) -> None:
    seen: dict[int, str] = {}
    for plane, paged in zip(group.planes, planes, strict=True):
        other = seen.setdefault(paged.base, plane.name)
        if other != plane.name:
            raise SpecError(
                f"layer {layer}: planes {other!r} and {plane.name!r} start at the same address; "
                "was one tensor registered twice?"
            )


def _outermost_first(shape: tuple[int, ...], strides: list[int]) -> list[int]:
    """Dimensions of more than one element by descending stride."""
    return sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -strides[dim])


def _check_no_overlap(where: str, shape: tuple[int, ...], strides: list[int], item: int) -> None:
    span = item
    for dim in reversed(_outermost_first(shape, strides)):
        if strides[dim] < span:
            raise SpecError(
                f"{where}: elements of the tensor share memory (shape {tuple(shape)}, strides in bytes {strides}); "
                "register a view in which each element has its own place"
            )
        span += strides[dim] * (shape[dim] - 1)


def _pieces(shape: tuple[int, ...], strides: list[int], item: int) -> tuple[Int64, int]:
    """Starts of a block's dense pieces, ascending, and the bytes of each."""
    piece_bytes = item
    starts: Int64 = np.zeros(1, np.int64)
    for dim in reversed(_outermost_first(shape, strides)):
        if starts.size == 1 and strides[dim] == piece_bytes:
            piece_bytes *= shape[dim]
        else:
            steps = np.arange(shape[dim], dtype=np.int64) * strides[dim]
            starts = (steps[:, None] + starts).ravel()
    return starts, piece_bytes


def _packing(shape: tuple[int, ...], strides: list[int]) -> str:
    letters = "N" + _SHAPE_LETTERS.get(len(shape) - 1, "".join(chr(ord("a") + n) for n in range(len(shape) - 1)))
    return "".join(letters[dim] for dim in _outermost_first(shape, strides)) or "1"
