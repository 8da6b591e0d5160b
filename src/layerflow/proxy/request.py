"""A client's request, as far as the proxy reads it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from layerflow.errors import ProxyError
from layerflow.proxy.body import NOT_JSON, Body, parse_body

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Headers = Sequence[tuple[bytes, bytes]]
"""Of HTTP, in the bytes in which they came: what is not ASCII has no known encoding."""

_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,200}")
_TEXTS = re.compile(rb'\[\s*"')
_TOKEN_LISTS = re.compile(rb"\[\s*\[")
_decode_texts = msgspec.json.Decoder(list[str]).decode


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One completion or chat completion.

    :param path: of the API.
    :param prompts: of a list of prompts, the JSON of each; empty where the request has a single one.
    :param headers: the client's.
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


def read_request(path: str, headers: Headers, raw: bytes, request_id: str, max_prompts: int) -> ClientRequest:
    """:raises ProxyError: 400, it is no JSON object, or has more than `max_prompts` prompts."""
    body = parse_body(raw)
    prompts = prompts_in(body.raw("prompt"), max_prompts) if path == COMPLETIONS else []
    return ClientRequest(path, body, headers, request_id, prompts)


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
            return []
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
