"""A request's body: JSON that goes on as it came, and is read only where the proxy decides by it.

msgspec holds the interpreter while it decodes, on a thread as well: what keeps a large body from holding up the event
loop is that its values are found and copied, never built (64 MiB in some 0.07 s).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from layerflow.errors import ProxyError

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the JSON that was asked for."""
_LENIENT_BYTES = 1 << 20
"""Larger bodies are not tried again with Python's own reader, which builds every value."""
_FIELD_BYTES = 1024  # of a flag or number
_STEERING = "kv_transfer_params"
_EXTRA = "vllm_xargs"  # vLLM reads these beside its fields, under the same names

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# vLLM's fields are pydantic's, in its lax mode: "2" and 2.0 are 2, "true" and 1 are true.
_FLAG: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_WHOLE: TypeAdapter[int | None] = TypeAdapter(int | None)


class Body:
    """A JSON object, its values unread.

    :param values: JSON by name.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, bytes | msgspec.Raw]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def raw(self, name: str) -> bytes:
        """The value's JSON; ``null`` where there is none."""
        value = self._values.get(name, b"null")
        return value if isinstance(value, bytes) else bytes(value)

    def given(self, name: str) -> bool:
        """Whether it has a value that is not null."""
        value = self._values.get(name)
        return value is not None and (len(value) != 4 or bytes(value) != b"null")

    def flag(self, name: str) -> bool:
        """As vLLM reads it; false where there is none, or one that vLLM refuses."""
        try:
            return bool(_FLAG.validate_python(self._field(name)))
        except ValidationError:
            return False

    def whole(self, name: str) -> int | None:
        """As vLLM reads it; None where there is none, or one that vLLM refuses."""
        try:
            return _WHOLE.validate_python(self._field(name))
        except ValidationError:
            return None

    def changed(self, values: Mapping[str, Any], dropped: Iterable[str] = ()) -> Body:
        """Another body without the names `dropped`, and with these `values`, which bytes are the JSON of."""
        without = set(dropped)
        kept = {name: value for name, value in self._values.items() if name not in without}
        return Body(kept | {name: _json(value) for name, value in values.items()})

    def encode(self) -> bytes:
        """JSON."""
        # Not by msgspec: a name may hold a lone surrogate, which only Python's own reader and writer take.
        pieces: list[bytes | msgspec.Raw] = []
        for name, value in self._values.items():
            pieces += (b"," if pieces else b"{", json.dumps(name).encode(), b":", value)
        return b"".join([*pieces, b"}"]) if pieces else b"{}"

    def _field(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None or len(value) > _FIELD_BYTES:
            return None
        try:
            return json.loads(bytes(value))
        except (ValueError, RecursionError):
            return None


def parse_body(raw: bytes) -> Body:
    """A client's body, without what steers transfers: ``kv_transfer_params`` are the proxy's to give.

    What vLLM reads is read: with a byte order mark, in UTF-16, and with NaN.

    :raises ProxyError: 400, it is no JSON object.
    """
    try:
        encoding = json.detect_encoding(raw)
        if encoding != "utf-8":
            raw = raw.decode(encoding).encode()
        values: Mapping[str, bytes | msgspec.Raw] = _decode(raw)
    except NOT_JSON as error:
        values = _lenient(raw, error)
    dropped = [_STEERING] if _STEERING in values else []
    body = Body(values)
    extra = body.raw(_EXTRA)
    if _STEERING.encode() in extra or b"\\" in extra:
        body = body.changed({_EXTRA: _without_steering(extra)})
    return body.changed({}, dropped) if dropped else body


def _lenient(raw: bytes, error: Exception) -> dict[str, bytes]:
    """Python's reader takes NaN and lone surrogates, as vLLM does, which has the same."""
    found: Any = None
    if len(raw) <= _LENIENT_BYTES:
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError) as plain:
            error = plain
    if isinstance(found, dict):
        return {name: json.dumps(value).encode() for name, value in found.items()}
    if found is not None:
        raise ProxyError(f"the request's body should be a JSON object, not a {type(found).__name__}", 400)
    raise ProxyError(f"the request's body is not valid JSON: {error}", 400) from None


def _without_steering(extra: bytes) -> Any:
    try:
        found = json.loads(extra)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict):
        found.pop(_STEERING, None)
    return json.dumps(found).encode()


def _json(value: Any) -> bytes | msgspec.Raw:
    return value if isinstance(value, bytes | msgspec.Raw) else msgspec.json.encode(value)
