"""A client's request, as far as the proxy reads it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from layerflow.errors import ProxyError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,200}")


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One completion or chat completion.

    :param path: of the API.
    :param body: its JSON, without ``kv_transfer_params``: those are the proxy's to give.
    :param headers: the client's.
    :param request_id: the client's ``x-request-id``, or a new one.
    """

    path: str
    body: dict[str, Any]
    headers: Sequence[tuple[str, str]]
    request_id: str

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def prompts(self) -> list[Any]:
        """A list of prompts, one by one; empty where the request has a single one."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)
        return prompt if several and self.path == COMPLETIONS else []  # type: ignore[return-value]

    @property
    def choices(self) -> int:
        """Choices asked for per prompt."""
        n = self.body.get("n")
        return n if isinstance(n, int) and n > 0 else 1

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def with_prompt(self, prompt: Any, request_id: str) -> ClientRequest:
        """The same request for one prompt of its list."""
        return replace(self, body={**self.body, "prompt": prompt}, request_id=request_id)


def request_id_of(headers: Sequence[tuple[str, str]]) -> str:
    """The client's ``x-request-id``; a new one where it has none, or one that is not plain."""
    given = next((value for name, value in headers if name.lower() == "x-request-id"), "")
    return given if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex


def read_request(path: str, headers: Sequence[tuple[str, str]], raw: bytes, request_id: str) -> ClientRequest:
    """:raises ProxyError: 400, it is no JSON object."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ProxyError(f"the request's body is not valid JSON: {error}", 400) from None
    if not isinstance(body, dict):
        raise ProxyError(f"the request's body should be a JSON object, not a {type(body).__name__}", 400)
    body.pop("kv_transfer_params", None)
    return ClientRequest(path, body, headers, request_id)


def decoder_alone(body: Mapping[str, Any]) -> str | None:
    """Why this request is for a decoder alone, whatever its length; None = it is not.

    Logits of prompt tokens come from the engine that computes the prompt, and the answer with ``echo`` or
    ``prompt_logprobs`` needs those of every token.
    """
    for name in ("echo", "use_beam_search", "prompt_embeds"):
        if body.get(name):
            return name
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    return "no_tokens" if body.get("max_tokens") == 0 else None
