"""Bytes to messages and back: typed, size-bounded, never executable."""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Generator
from typing import Annotated, Any, get_args, get_type_hints

import msgspec

from layerflow.errors import ProtocolError, VersionMismatch
from layerflow.wire import messages
from layerflow.wire.messages import Message, ToClient, ToServer

PROTOCOL_VERSION = 2
PREDECESSOR = bytes.fromhex("6c642fdefc759d8da2e2a036f02e58b1")
"""Fingerprint of the version before, which this end speaks too: what is newer is in fields at the end and in messages
that only those who know them send, and are answered by."""
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
    messages.Spans,
    messages.DescribeChunks,
    messages.PeerLookup,
    messages.PeerOpenHandoff,
)
_GROWN_NAMES = ", ".join(kind.__name__ for kind in _GROWN)
_GROWING = frozenset(kind.__struct_config__.tag for kind in _GROWN)

_SURROGATES = re.compile("[\ud800-\udfff]")
_NUMBERED = frozenset(
    kind.__struct_config__.tag
    for kind in get_args(ToServer)
    if msgspec.structs.fields(kind) and msgspec.structs.fields(kind)[0].name in ("id", "step")
)

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


SPOKEN = {PROTOCOL_VERSION: FINGERPRINT, PROTOCOL_VERSION - 1: PREDECESSOR}
"""The versions that this end speaks, and what messages each has."""


def greeting(version: int = PROTOCOL_VERSION) -> bytes:
    """The first frame in either direction: magic, protocol version, 0, compatibility fingerprint."""
    return _GREETING.pack(MAGIC, version, 0, SPOKEN[version])


def check_greeting(frame: bytes) -> int:
    """Accept the other end's first frame. Return the version that it speaks.

    :raises ProtocolError: it is no greeting at all.
    :raises VersionMismatch: this end does not speak that version, or the other end has other messages in it.
    """
    if len(frame) != GREETING_BYTES or frame[:4] != MAGIC:
        raise ProtocolError("the first frame is not a layerflow greeting; is this the right endpoint?")
    version: int
    _, version, _, fingerprint = _GREETING.unpack(frame)
    if SPOKEN.get(version) != fingerprint:
        spoken = " and ".join(f"{number}/{known.hex()[:8]}" for number, known in SPOKEN.items())
        raise VersionMismatch(
            f"the other end speaks protocol {version}/{fingerprint.hex()[:8]}, this end {spoken}; "
            "run layerflow versions that are at most one apart"
        )
    return version


def check_spoken(message: Message, version: int) -> None:
    """May this be said to a server that speaks `version`?

    :raises VersionMismatch: it has no such message.
    """
    if message.needs_version > version:
        kind = type(message).__name__
        raise VersionMismatch(f"the server speaks protocol {version}, which has no {kind}: upgrade the server first")


def encode(message: Message) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def encode_request(message: Message) -> bytes:
    """One frame of a client, within the limits of names and lists that its server has.

    Names come from elsewhere (a request's id may be its client's). One that is too long, or that UTF-8 does not have,
    is replaced by :func:`short_name` of it, everywhere the same: it costs no other request of the message anything.

    :raises ProtocolError: the message has more parts or items than one message may have.
    """
    try:
        frame = _encoder.encode(message)
    except UnicodeEncodeError:
        frame = b""
    if frame and len(frame) <= messages.MAX_NAME:
        return frame
    checked = _checked(message)
    return frame if frame and checked is message else _encoder.encode(checked)


def short_name(name: str) -> str:
    """A name as the protocol may carry it: itself, or its beginning and a digest."""
    if len(name) <= messages.MAX_NAME and (name.isascii() or not _SURROGATES.search(name)):
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16, person=b"layerflow-name")
    return f"{_SURROGATES.sub('?', name[:64])}...{digest.hexdigest()}"


class _Numbered(msgspec.Struct, array_like=True):
    """How a numbered request begins. What is behind its number is skipped, and not built."""

    kind: int
    number: Annotated[int, msgspec.Meta(ge=0)]


_numbered = msgspec.msgpack.Decoder(_Numbered)


def number_of(frame: bytes) -> int:
    """The number by which a request that is refused unread is answered: its `id` or `step`; -1 = it has none.

    A frame of 16 MiB may hold as many values, which would take seconds and a gigabyte to build.
    """
    try:
        said = _numbered.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return -1
    return said.number if said.kind in _NUMBERED else -1


def _checked(message: Message) -> Message:
    """The message, or one with shorter names."""
    texts, lists = _fields_of(type(message))
    changed: dict[str, Any] = {}
    for name in texts:
        text = getattr(message, name)
        if (short := short_name(text)) is not text:
            changed[name] = short
    for name in lists:
        items = getattr(message, name)
        most = messages.MAX_PARTS if name in ("loads", "saves") else messages.MAX_ITEMS
        if len(items) > most:
            kind = type(message).__name__
            raise ProtocolError(f"{kind} with {len(items)} {name}; one message may have {most}: do less in one step")
        if items and isinstance(items[0], (str, Message)):
            checked = [short_name(item) if isinstance(item, str) else _checked(item) for item in items]
            if any(one is not item for one, item in zip(checked, items, strict=True)):
                changed[name] = checked
    return msgspec.structs.replace(message, **changed) if changed else message


@functools.cache
def _fields_of(kind: type[Message]) -> tuple[list[str], list[str]]:
    """Names of a message's fields that are texts, and that are lists."""
    hints = get_type_hints(kind)
    texts = [field.name for field in msgspec.structs.fields(kind) if hints[field.name] is str]
    lists = [
        field.name for field in msgspec.structs.fields(kind) if getattr(hints[field.name], "__origin__", 0) is list
    ]
    return texts, lists


def decode_request(frame: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> ToServer:
    """What a client sent.

    :raises ProtocolError: too large, not msgpack, unknown number, wrong types.
    """
    if len(frame) > SMALL_BYTES and not (frame[0] >> 4 == 0x9 and frame[1] in _GROWING):
        raise ProtocolError(f"a message of {len(frame)} bytes; only {_GROWN_NAMES} may have more than {SMALL_BYTES}")
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
