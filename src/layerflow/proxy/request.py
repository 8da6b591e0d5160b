"""A client's request and its body, as far as the proxy reads them."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from layerflow.errors import ProxyError

# A request's body: JSON that goes on as it came, and is read only where the proxy decides by it.
#
# msgspec holds the interpreter while it decodes, on a thread as well: what keeps a large body from holding up the event
# loop is that its values are found and copied, never built (64 MiB in some 0.07 s).


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the JSON that was asked for."""
_LENIENT_BYTES = 1 << 20
"""Larger bodies are not tried again with Python's own reader, which builds every value."""
_FIELD_BYTES = 1024  # of a flag or number
MOST_NAMES = 1024
"""Of one request: vLLM's have below 100. Each is built, and written again for each engine and each prompt of a list."""
MOST_HEADERS = 256
"""Of one request: servers in front of this one take about 100. Each engine gets them, with each prompt of a list."""
_COUNTED_BYTES = 1 << 16
"""Shorter bodies have too few names to matter until they are built."""
_STEERING = "kv_transfer_params"
_EXTRA = "vllm_xargs"  # vLLM reads these beside its fields, under the same names

decode_values = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Of a JSON object, by name; each is the place where it stands in the bytes, which it keeps."""
# vLLM's fields are pydantic's, in its lax mode: "2" and 2.0 are 2, "true" and 1 are true.
_FLAG: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_WHOLE: TypeAdapter[int | None] = TypeAdapter(int | None)


class _AnyName(Enum):
    """The type of a JSON object's names where these are to be counted, and no more.

    msgspec asks an enum for every name that it does not know, and ends at the first that the enum does not take: the
    rest is not read.
    """

    ANY = uuid.uuid4().hex

    @classmethod
    def _missing_(cls, value: object) -> _AnyName | None:
        _counted.names += 1
        return cls.ANY if _counted.names <= MOST_NAMES else None


@dataclass(slots=True)
class _Counted:
    names: int = 0


_counted = _Counted()
_count_names = msgspec.json.Decoder(dict[_AnyName, msgspec.Raw]).decode


def _check_names(raw: bytes) -> None:
    """:raises ProxyError: 400, more names than :data:`MOST_NAMES`; what is no JSON object is for others to refuse."""
    _counted.names = 0
    with contextlib.suppress(*NOT_JSON):
        _count_names(raw)
    if _counted.names > MOST_NAMES:
        raise _too_many_names()


def _too_many_names() -> ProxyError:
    return ProxyError(f"the request has more than {MOST_NAMES} fields", 400)


class Body:
    """A JSON object, its values unread.

    :param values: JSON by name.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, bytes | msgspec.Raw]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def view(self, name: str) -> bytes | msgspec.Raw:
        """The value's JSON where it stands; ``null`` where there is none."""
        return self._values.get(name, b"null")

    def raw(self, name: str) -> bytes:
        """A copy of it."""
        value = self.view(name)
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

    def pieces(self) -> list[bytes | msgspec.Raw]:
        """JSON, once they are joined."""
        # Not by msgspec: a name may hold a lone surrogate, which only Python's own reader and writer take.
        pieces: list[bytes | msgspec.Raw] = []
        for name, value in self._values.items():
            pieces += (b"," if pieces else b"{", json.dumps(name).encode(), b":", value)
        return [*pieces, b"}"] if pieces else [b"{}"]

    def encode(self) -> bytes:
        """JSON."""
        return b"".join(self.pieces())

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

    :raises ProxyError: 400, it is no JSON object, or has too many fields.
    """
    try:
        encoding = json.detect_encoding(raw)
        if encoding != "utf-8":
            raw = raw.decode(encoding).encode()
        if len(raw) > _COUNTED_BYTES:
            _check_names(raw)
        values: Mapping[str, bytes | msgspec.Raw] = decode_values(raw)
    except NOT_JSON as error:
        values = _lenient(raw, error)
    if len(values) > MOST_NAMES:
        raise _too_many_names()
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
    """:raises ProxyError: 400, it is too large to be built here."""
    if len(extra) > _LENIENT_BYTES:
        raise ProxyError(
            f"the request's {_EXTRA} has {_STEERING} or a backslash in it, and more than {_LENIENT_BYTES} bytes", 400
        )
    try:
        found = json.loads(extra)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict):
        found.pop(_STEERING, None)
    return json.dumps(found).encode()


def _json(value: Any) -> bytes | msgspec.Raw:
    return value if isinstance(value, bytes | msgspec.Raw) else msgspec.json.encode(value)


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Headers = Sequence[tuple[bytes, bytes]]
"""Of HTTP, in the bytes in which they came: what is not ASCII has no known encoding."""
# RFC 9110 7.6.1, what is said for one connection only; and what the proxy decides itself.
_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te")
)
_FRAMING = frozenset(
    (b"transfer-encoding", b"upgrade", b"host", b"expect", b"content-length", b"content-type", b"content-encoding")
)
_OURS = _ONE_CONNECTION | _FRAMING | {b"trailer", b"accept-encoding", b"date", b"server"}
_CORS = b"access-control-"  # the proxy's own `allowed_origins` decide

_BESIDE_BYTES = 256 << 20
"""What stands beside the prompts of a list, summed up over the requests that it becomes."""
_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,200}")
_TEXTS = re.compile(rb'\[\s*"')
_TOKEN_LISTS = re.compile(rb"\[\s*\[")
_decode_texts = msgspec.json.Decoder(list[str]).decode


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One completion or chat completion.

    :param path: of the API.
    :param prompts: of a list of prompts, the JSON of each; empty where the request has a single one.
    :param headers: the client's that go on to engines.
    :param request_id: the client's ``x-request-id``, or a new one.
    """

    path: str
    body: Body
    headers: Headers
    request_id: str
    prompts: Sequence[bytes] = ()

    @property
    def stream(self) -> bool:
        return self.body.flag("stream")

    @property
    def choices(self) -> int:
        """Choices asked for per prompt."""
        return max(self.body.whole("n") or 1, 1)

    def header(self, name: bytes) -> str | None:
        return header(self.headers, name)

    def with_prompt(self, prompt: bytes, request_id: str) -> ClientRequest:
        """The same request for one prompt of its list."""
        return replace(self, body=self.body.changed({"prompt": prompt}), request_id=request_id, prompts=())


def header(headers: Headers, name: bytes) -> str | None:
    """The first header of that name (in lower case)."""
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), None)


def request_id_of(headers: Headers) -> str:
    """The client's ``x-request-id``; a new one where it has none, or one that is not plain."""
    given = header(headers, b"x-request-id") or ""
    return given if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers that go on to the other side, known to the proxy or not; none that ``Connection`` names."""
    options = [value for name, value in headers if name.lower() == b"connection"]
    left_out = _OURS | {name.strip().lower() for value in options for name in value.split(b",")}
    return [
        (name, value) for name, value in headers if name.lower() not in left_out and not name.lower().startswith(_CORS)
    ]


def headers_for_engines(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Those of a client's that go on to an engine with each leg, which has its own ``x-request-id``.

    :raises ProxyError: 400, there are too many.
    """
    if len(headers) > MOST_HEADERS:
        raise ProxyError(f"the request has more than {MOST_HEADERS} headers", 400)
    return [(name, value) for name, value in passed_on(headers) if name.lower() != b"x-request-id"]


def read_request(path: str, headers: Headers, raw: bytes, request_id: str, max_prompts: int) -> ClientRequest:
    """:raises ProxyError: 400, it is no JSON object, has too many headers or prompts, or too much beside these."""
    # Once for all legs: one `Connection` of 64 KiB names some 30,000 headers.
    kept = headers_for_engines(headers)
    body = parse_body(raw)
    prompts = prompts_in(body.raw("prompt"), max_prompts) if path == COMPLETIONS else []
    beside = len(raw) - len(body.raw("prompt")) + sum(len(name) + len(value) for name, value in kept)
    if len(prompts) * beside > _BESIDE_BYTES:
        raise ProxyError(
            f"the request has {beside} bytes beside its {len(prompts)} prompts, headers among them, and is sent once "
            f"for each: more than {_BESIDE_BYTES} bytes in all; send several requests",
            400,
        )
    return ClientRequest(path, body, kept, request_id, prompts)


def prompts_in(raw: bytes, most: int) -> list[bytes]:
    """A list of prompts, one by one; empty for a single one, and for what vLLM refuses.

    :param raw: the JSON of ``prompt``.
    :raises ProxyError: 400, there are more than `most`.
    """
    if _TEXTS.match(raw):
        # Each text has one quotation mark without a backslash before it at least, and two at most.
        if raw.count(b'"') - raw.count(b'\\"') > 2 * most:
            raise _too_many(most)
        try:
            prompts = [msgspec.json.encode(text) for text in _decode_texts(raw)]
        except NOT_JSON:
            prompts = _lenient_texts(raw)
    elif _TOKEN_LISTS.match(raw) and b'"' not in raw:
        *lists, last = raw.strip()[1:-1].split(b"]", most + 1)
        if len(lists) > most:
            raise _too_many(most)
        begun = [one.strip(b", \t\r\n") for one in lists]
        if last.strip() or not all(one[:1] == b"[" and one.find(b"[", 1) < 0 for one in begun):
            return []
        prompts = [one + b"]" for one in begun]
    else:
        return []
    if len(prompts) > most:
        raise _too_many(most)
    return prompts if len(prompts) > 1 else []


def _lenient_texts(raw: bytes) -> list[bytes]:
    """Texts that only Python's reader takes, with lone surrogates in them; empty where it does not either."""
    try:
        found: Any = json.loads(raw) if len(raw) <= _LENIENT_BYTES else []
    except (ValueError, RecursionError):
        return []
    return [json.dumps(text).encode() for text in found] if all(isinstance(text, str) for text in found) else []


def only_prompt(raw: bytes) -> bytes:
    """The JSON of a single prompt, out of its list where it stands in one."""
    if not (_TEXTS.match(raw) or _TOKEN_LISTS.match(raw)):
        return raw
    return raw.strip()[1:-1].strip()


def _too_many(most: int) -> ProxyError:
    return ProxyError(f"the request has more than {most} prompts (proxy.max_prompts); send several requests", 400)


def decoder_alone(body: Body) -> str | None:
    """Why this request is for a decoder alone, whatever its length; None = it is not.

    Logits of prompt tokens come from the engine that computes the prompt, and the answer with ``echo`` or
    ``prompt_logprobs`` needs those of every token.
    """
    for name in ("echo", "use_beam_search"):
        if body.flag(name):
            return name
    for name in ("prompt_embeds", "prompt_logprobs"):
        if body.given(name):
            return name
    return "no_tokens" if body.whole("max_tokens") == 0 else None
