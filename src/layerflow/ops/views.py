"""Byte views of tensors by address, for copies that torch makes one by one."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import torch

from layerflow.ops.paged import Int64


class ByteViews:
    """Finds the tensor that a range of memory lies in.

    :param tensors: uint8, one-dimensional, contiguous; no two overlap. They are kept alive.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors: list[torch.Tensor] = []
        self._starts: list[int] = []
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """One more."""
        at = bisect.bisect_right(self._starts, tensor.data_ptr())
        self._starts.insert(at, tensor.data_ptr())
        self._tensors.insert(at, tensor)

    def of(self, addresses: Int64, nbytes: Int64) -> list[torch.Tensor]:
        """A view of each range, none of which lies across two tensors."""
        views = []
        for address, size in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            number = bisect.bisect_right(self._starts, address) - 1
            at = address - self._starts[number]
            views.append(self._tensors[number][at : at + size])
        return views
