"""Bytes to messages and back: typed, size-bounded, never executable."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Generator
from typing import Any, get_type_hints

import msgspec
import numpy as np

from layerflow.errors import ProtocolError, VersionMismatch
from layerflow.wire import messages
from layerflow.wire.messages import Message, ToClient, ToServer

PROTOCOL_VERSION = 1
MAGIC = b"LFLW"
_GREETING = struct.Struct("<4sHH16s")
GREETING_BYTES = _GREETING.size
DEFAULT_MAX_BYTES = 16 << 20
SMALL_BYTES = 64 << 10
"""Largest message to the server of the kinds that do not grow with a prompt or with a step."""

_GROWN = (
    messages.Lookup,
    messages.OpenStep,
    messages.OpenHandoff,
    messages.Report,
    messages.PeerLookup,
    messages.PeerOpenHandoff,
)
_GROWING = frozenset(kind.__struct_config__.tag for kind in _GROWN)

_encoder = msgspec.msgpack.Encoder()
_to_server = msgspec.msgpack.Decoder(ToServer)
_to_client = msgspec.msgpack.Decoder(ToClient)


def schema() -> str:
    """The protocol's shape as text: every message's number, fields and types, in a fixed order."""
    lines = []
    for name in sorted(vars(messages)):
        kind = getattr(messages, name)
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message:
            types = get_type_hints(kind)  # without limits of length, which are the receiver's own
            fields = ", ".join(f"{f.name}: {_type_name(types[f.name])}" for f in msgspec.structs.fields(kind))
            lines.append(f"{kind.__struct_config__.tag or '-'} {name}({fields})")
    return "\n".join(lines)


def _type_name(kind: Any) -> str:
    """Without modules: the protocol is the same wherever its messages are defined."""
    return re.sub(r"\w+\.", "", str(kind)) if hasattr(kind, "__origin__") else getattr(kind, "__name__", str(kind))


FINGERPRINT = hashlib.blake2b(schema().encode(), digest_size=16, person=b"layerflow-wire").digest()
"""Compatibility fingerprint: equal where both ends have the same messages."""


def greeting() -> bytes:
    """The first frame in either direction: magic, protocol version, 0, compatibility fingerprint."""
    return _GREETING.pack(MAGIC, PROTOCOL_VERSION, 0, FINGERPRINT)


def check_greeting(frame: bytes) -> None:
    """Accept the other end's first frame.

    :raises ProtocolError: it is no greeting at all.
    :raises VersionMismatch: it speaks another version or other messages.
    """
    if len(frame) != GREETING_BYTES or frame[:4] != MAGIC:
        raise ProtocolError("the first frame is not a layerflow greeting; is this the right endpoint?")
    _, version, _, fingerprint = _GREETING.unpack(frame)
    if version != PROTOCOL_VERSION or fingerprint != FINGERPRINT:
        raise VersionMismatch(
            f"the other end speaks protocol {version}/{fingerprint.hex()[:8]}, this end "
            f"{PROTOCOL_VERSION}/{FINGERPRINT.hex()[:8]}; run the same layerflow version on both"
        )


def encode(message: Message) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_request(frame: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> ToServer:
    """What a client sent.

    :raises ProtocolError: too large, not msgpack, unknown number, wrong types.
    """
    if len(frame) > SMALL_BYTES and not (frame[0] >> 4 == 0x9 and frame[1] in _GROWING):
        raise ProtocolError(
            f"a message of {len(frame)} bytes; only Lookup, OpenStep, OpenHandoff, Report, PeerLookup and "
            f"PeerOpenHandoff may have more than {SMALL_BYTES}"
        )
    return _decode(_to_server, frame, max_bytes)  # type: ignore[no-any-return]


def decode_reply(frame: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> ToClient:
    """What the server sent.

    :raises ProtocolError: as for requests.
    """
    return _decode(_to_client, frame, max_bytes)  # type: ignore[no-any-return]


def _decode(decoder: Any, frame: bytes, max_bytes: int) -> Any:
    if len(frame) > max_bytes:
        raise ProtocolError(f"a message of {len(frame)} bytes exceeds the limit of {max_bytes}; send less at once")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a valid message: {error}") from error


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


DIGESTS_PER_SLICE = 4096


def split_in_slices(raw: bytes, what: str) -> Generator[None, None, list[bytes]]:
    """As :func:`split_digests`, some at a time.

    :raises ProtocolError: the length is no multiple of 16.
    """
    digests = split_digests(raw[: 16 * DIGESTS_PER_SLICE] if len(raw) % 16 == 0 else raw, what)
    for start in range(16 * DIGESTS_PER_SLICE, len(raw), 16 * DIGESTS_PER_SLICE):
        yield
        digests += split_digests(raw[start : start + 16 * DIGESTS_PER_SLICE], what)
    return digests


def split_digests(raw: bytes, what: str) -> list[bytes]:
    """16-byte digests.

    :raises ProtocolError: the length is no multiple of 16.
    """
    if len(raw) % 16:
        raise ProtocolError(f"{what}: {len(raw)} bytes are no whole number of 16-byte digests")
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]
