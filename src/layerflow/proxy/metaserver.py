"""Decoders that ask for their prefill: what arrives at ``/v1/metaserver`` and what it belongs to (vLLM-Ascend).

Each request at a decoder has an address of its own, with a secret, which only that decoder is told: whoever posts there
steers the request's transfer. The decoder names its own request, ``chatcmpl-{id}`` or ``cmpl-{id}-{prompt}``, with
``{choice}_`` before it for n > 1 and vLLM's eight random digits behind it, where the connector has not cut them off.
"""

from __future__ import annotations

import hmac
import itertools
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import msgspec

from layerflow.errors import ProxyError
from layerflow.proxy.request import CHAT, NOT_JSON, ClientRequest

_CHOICE = re.compile(r"(\d{1,9})_")
_BEHIND = re.compile(r"-[0-9a-f]{8}$")
_MOST_ASKING = 4
"""Posts of one child that may wait at once: one, and what it has repeated over connections that broke."""

_MOST_TEXT = 512 << 10
"""Bytes of values that have text in them; lists of blocks have none."""
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

Child = tuple[int, int]
"""A request as the decoder's engine counts it: the numbers of its prompt and of its choice."""


def read_posted(raw: bytes) -> dict[str, Any]:
    """What a decoder has posted. A value without any text, such as a list of blocks, stays JSON: it names nothing.

    :raises ProxyError: 400, it is no JSON object with request_id; 413, it has too much text.
    """
    try:
        values = _decode(raw)
        texts = {name: value for name, value in values.items() if b'"' in bytes(value)}
        if sum(map(len, texts.values())) > _MOST_TEXT:
            raise ProxyError(f"the body has more than {_MOST_TEXT} bytes beside lists of numbers", 413)
        posted = {**values, **{name: msgspec.json.decode(value) for name, value in texts.items()}}
    except NOT_JSON as error:
        raise ProxyError(f"the body should be a JSON object with request_id: {error}", 400) from None
    if not isinstance(posted.get("request_id"), str):
        raise ProxyError("the body should be an object with request_id", 400)
    return posted


class PrefillJob:
    """One child's prefill, however often the decoder asks for it."""

    def __init__(self) -> None:
        self._ended = anyio.Event()
        self._asking = 0
        self.failure: ProxyError | None = None

    def end(self, failure: ProxyError | None) -> None:
        self.failure = failure
        self._ended.set()

    async def wait(self) -> None:
        """Until it has ended. :raises ProxyError: it failed, or is waited for often enough."""
        if self._asking >= _MOST_ASKING:
            raise ProxyError(f"{self._asking} posts wait for it already", 429)
        self._asking += 1
        try:
            await self._ended.wait()
        finally:
            self._asking -= 1
        if self.failure is not None:
            raise self.failure


class DecodeRequest:
    """One request at a decoder, whose children will ask: at most one for each choice of each prompt.

    :param request_id: the request's id there.
    :param start: begins a child's prefill: the number of its prompt, what the decoder posted, the address from which
        it did, and the job to end.
    """

    def __init__(
        self,
        request: ClientRequest,
        request_id: str,
        start: Callable[[int, dict[str, Any], str, PrefillJob], None],
    ) -> None:
        self._start, self._choices = start, request.choices
        names = [f"chatcmpl-{request_id}"]
        if request.path != CHAT:
            names = [f"cmpl-{request_id}-{number}" for number in range(max(len(request.prompts), 1))]
        self._prompts = {name: number for number, name in enumerate(names)}
        self._jobs: dict[Child, PrefillJob] = {}
        self.secret = secrets.token_urlsafe(24)

    def child(self, name: str) -> Child | None:
        """Which of its children the decoder calls so; None = none of them."""
        choice = 0
        if (numbered := _CHOICE.match(name)) is not None:
            choice, name = int(numbered[1]), name[numbered.end() :]
        prompt = self._prompts.get(name, self._prompts.get(_BEHIND.sub("", name)))
        return None if prompt is None or choice >= self._choices else (prompt, choice)

    def job(self, child: Child, posted: dict[str, Any], source: str) -> PrefillJob:
        """The child's prefill; begun if this is the first time that it is asked for."""
        known = self._jobs.get(child)
        if known is None:
            known = self._jobs[child] = PrefillJob()
            self._start(child[0], posted, source, known)
        return known

    def close(self) -> None:
        """The decoder has answered or is gone: nobody will do what is left."""
        for job in self._jobs.values():
            job.end(job.failure or ProxyError("the request has ended", 502))


class Metaserver:
    """Requests at decoders, by what stands behind ``/v1/metaserver/`` in their addresses."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[str, DecodeRequest] = {}

    @contextmanager
    def expecting(self, decoding: DecodeRequest) -> Iterator[str]:
        """Around a request at a decoder. Yields the last part of its address's path."""
        number = str(next(self._numbers))
        self._open[number] = decoding
        try:
            yield f"{number}.{decoding.secret}"
        finally:
            del self._open[number]
            decoding.close()

    def find(self, ticket: str) -> DecodeRequest | None:
        """The request whose address ends so; None = there is none."""
        number, _, secret = ticket.partition(".")
        decoding = self._open.get(number)
        if decoding is None or not hmac.compare_digest(secret.encode(), decoding.secret.encode()):
            return None
        return decoding
