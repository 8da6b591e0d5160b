"""Stands in for memcache_hybrid's client, as far as vLLM-Ascend's layer-wise pool calls it: a store in this process.

As in the real one an object is written once, in pieces, and found by others from ``batch_write_finish`` on. Its return
codes are 0 where all went well. The store never evicts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

TO_STORE, FROM_STORE = 0, 1
"""``direct`` of :meth:`DistributedObjectStore.batch_copy`."""
NO_SUCH_OBJECT = -3102


class _Object:
    def __init__(self, size: int) -> None:
        self.memory = ctypes.create_string_buffer(size)
        self.size = size
        self.whole = False

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)


_objects: dict[str, _Object] = {}
COPIES = {"calls": 0, "stored_bytes": 0, "loaded_bytes": 0}


class KeyInfo:
    """Where an object lies; nowhere (size 0) if there is none."""

    def __init__(self, found: _Object | None) -> None:
        self._found = found

    def size(self) -> int:
        return self._found.size if self._found else 0

    def gva_list(self) -> list[int]:
        return [self._found.address] if self._found else []

    def loc_list(self) -> list[int]:
        return [0]

    def type_list(self) -> list[int]:
        return [1]


def _found(key: str) -> _Object | None:
    known = _objects.get(key)
    return known if known and known.whole else None


class DistributedObjectStore:
    """One process's client."""

    def setup(self, _config: Any) -> int:
        return 0

    def init(self, _device: int, init_bm: bool = True) -> int:
        return 0

    def close(self) -> int:
        return 0

    def register_buffer(self, _address: int, _size: int) -> int:
        return 0

    def unregister_buffer(self, _address: int, _size: int) -> int:
        return 0

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [int(_found(key) is not None) for key in keys]

    def batch_get_key_info(self, keys: Sequence[str], _flag: int = 1) -> list[KeyInfo]:
        return [KeyInfo(_found(key)) for key in keys]

    def batch_alloc(self, keys: Sequence[str], sizes: Sequence[int], _media: int = 1, ttl: int = 0) -> list[int]:
        return [_objects.setdefault(key, _Object(size)).address for key, size in zip(keys, sizes, strict=True)]

    def batch_copy(
        self, stored: Sequence[int], local: Sequence[int], sizes: Sequence[int], direct: int = 1, _flag: int = 0
    ) -> int:
        for there, here, size in zip(map(int, stored), map(int, local), map(int, sizes), strict=True):
            to, of = (there, here) if direct == TO_STORE else (here, there)
            ctypes.memmove(to, of, size)
            COPIES["stored_bytes" if direct == TO_STORE else "loaded_bytes"] += size
        COPIES["calls"] += 1
        return 0

    def batch_write_finish(self, keys: Sequence[str], results: Sequence[int]) -> list[int]:
        for key, result in zip(keys, results, strict=True):
            if result == 0:
                _objects[key].whole = True
            else:
                del _objects[key]
        return [0] * len(keys)

    def batch_add_lease(self, keys: Sequence[str], ttl: int = 0) -> list[int]:
        return [0 if key in _objects else NO_SUCH_OBJECT for key in keys]

    def batch_remove_lease(self, keys: Sequence[str]) -> int:
        return 0
