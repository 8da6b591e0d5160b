"""What multimodal inputs are called in keys: by the data that the encoder reads, never by their identifier.

vLLM's identifier is a hash of the input or, verbatim, the ``uuid`` that a client gave it. vLLM finds the encoder's
outputs and its own cached blocks by the identifier. So where one identifier has stood for two contents, it is not known
which of them vLLM computes with, and prompts end for layerflow before such an input.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from layerflow.content import tensor_bytes
from layerflow.keys import Media

MOST_BYTES = 512 << 20
"""Of one input: hashing more would hold the scheduler up, and such an input is of unknown content."""

MOST_KNOWN = 1 << 17
"""Identifiers whose content is remembered. vLLM's caches hold fewer inputs."""

UNKNOWN = b""


class Inputs:
    """The inputs of one engine's requests, for its scheduler's thread."""

    def __init__(self) -> None:
        self._contents: OrderedDict[str, bytes] = OrderedDict()  #: by vLLM's identifier; UNKNOWN = of several contents
        self._hashed: dict[int, tuple[weakref.ref[Any], bytes]] = {}  #: data that vLLM's cache hands out again

    def read(self, features: Iterable[Any]) -> tuple[list[Media], int | None]:
        """A prompt's inputs, and how many of its tokens come before the first one of unknown content (None = all).

        :param features: vLLM's MultiModalFeatureSpecs.
        """
        media: list[Media] = []
        end: int | None = None
        for feature in features:
            where, content = feature.mm_position, self._content(feature)
            if content != UNKNOWN:
                media.append(Media(where.offset, where.length, content))
            else:
                end = where.offset if end is None else min(end, where.offset)
        return [each for each in media if end is None or each.start < end], end

    def _content(self, feature: Any) -> bytes:
        content = self._data_digest(feature.modality, feature.data)
        if self._contents.setdefault(feature.identifier, content) != content:
            self._contents[feature.identifier] = content = UNKNOWN
        self._contents.move_to_end(feature.identifier)
        if len(self._contents) > MOST_KNOWN:
            self._contents.popitem(last=False)
        return content

    def _data_digest(self, modality: str, data: Any) -> bytes:
        """Digest of what the encoder reads; UNKNOWN where vLLM's scheduler has nothing of it, or its address."""
        if data is None:
            return UNKNOWN
        known = self._hashed.get(id(data))
        if known is not None and known[0]() is data:
            return known[1]
        leaves = [(key, leaf) for key in sorted(data) for leaf in _leaves(data[key].data)]
        tensors = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
        readable = all(isinstance(leaf, torch.Tensor | bool | int | float) for _, leaf in leaves)
        on_host = all(leaf.device.type == "cpu" for leaf in tensors)
        if not tensors or not readable or not on_host or sum(leaf.nbytes for leaf in tensors) > MOST_BYTES:
            return UNKNOWN
        hasher = hashlib.sha256(modality.encode())
        for key, leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            head = f"\0{key}\0{leaf.dtype} {list(leaf.shape)}" if is_tensor else f"\0{key}\0{leaf!r}"
            hasher.update(head.encode())
            if is_tensor:
                hasher.update(tensor_bytes(leaf))
        number, hashed = id(data), self._hashed
        gone = weakref.ref(data, lambda _: hashed.pop(number, None))
        hashed[number] = gone, hasher.digest()
        return hashed[number][1]


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors and numbers of a value, in order; a list's length counts as one of them."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    else:
        yield value
