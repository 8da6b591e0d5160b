"""Numbers as bytes: little-endian, as messages carry many of them. Who speaks without any needs no numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from layerflow.errors import ProtocolError


def pack_u32(values: Any) -> bytes:
    """Integers to little-endian uint32 bytes."""
    return np.asarray(values, dtype="<u4").tobytes()


def pack_u64(values: Any) -> bytes:
    """Integers to little-endian uint64 bytes."""
    return np.asarray(values, dtype="<u8").tobytes()


def unpack_u32(raw: bytes, count: int, what: str) -> np.ndarray:
    """Exactly `count` uint32 as an int64 array.

    :raises ProtocolError: another length.
    """
    return _unpack(raw, "<u4", 4, count, what).astype(np.int64)


def unpack_u64(raw: bytes, count: int, what: str) -> np.ndarray:
    """Exactly `count` uint64.

    :raises ProtocolError: another length.
    """
    return _unpack(raw, "<u8", 8, count, what)


def _unpack(raw: bytes, dtype: str, width: int, count: int, what: str) -> np.ndarray:
    if len(raw) != width * count:
        raise ProtocolError(f"{what}: {len(raw)} bytes where {count} numbers of {width} bytes belong")
    return np.frombuffer(raw, dtype=dtype)


def list_u32(packed: bytes) -> list[int]:
    """All of them, as this program's own process has packed them."""
    return list(np.frombuffer(packed, dtype="<u4").tolist())


def list_u64(packed: bytes) -> list[int]:
    """The same of uint64."""
    return list(np.frombuffer(packed, dtype="<u8").tolist())
