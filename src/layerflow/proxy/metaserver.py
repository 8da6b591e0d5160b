"""Decoders that ask for their prefill: what arrives at ``/v1/metaserver`` and what it belongs to (vLLM-Ascend).

A decoder names its own request, ``chatcmpl-{id}`` or ``cmpl-{id}-{prompt}``, with ``{choice}_`` before it for n > 1 and
vLLM's eight random digits behind it, where the connector has not cut them off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from layerflow.errors import ProxyError
from layerflow.proxy.request import CHAT, ClientRequest

_BEFORE = re.compile(r"^\d+_")
_BEHIND = re.compile(r"-[0-9a-f]{8}$")


class PrefillJob:
    """One child's prefill, however often the decoder asks for it."""

    def __init__(self) -> None:
        self._ended = anyio.Event()
        self.failure: ProxyError | None = None

    def end(self, failure: ProxyError | None) -> None:
        self.failure = failure
        self._ended.set()

    async def wait(self) -> None:
        """Until it has ended. :raises ProxyError: it failed."""
        await self._ended.wait()
        if self.failure is not None:
            raise self.failure


class DecodeRequest:
    """One request at a decoder, whose children will ask.

    :param start: begins a child's prefill: the number of its prompt, what the decoder posted, and the job to end.
    """

    def __init__(self, start: Callable[[int, dict[str, Any], PrefillJob], None]) -> None:
        self._start = start
        self._jobs: dict[str, PrefillJob] = {}

    def job(self, child: str, prompt: int, posted: dict[str, Any]) -> PrefillJob:
        """The child's prefill; begun if this is the first time that it is asked for."""
        known = self._jobs.get(child)
        if known is None:
            known = self._jobs[child] = PrefillJob()
            self._start(prompt, posted, known)
        return known

    def close(self) -> None:
        """The decoder has answered or is gone: nobody will do what is left."""
        for job in self._jobs.values():
            job.end(job.failure or ProxyError("the request has ended", 502))


class Metaserver:
    """Requests at decoders, by the ids of their children."""

    def __init__(self) -> None:
        self._children: dict[str, tuple[DecodeRequest, int]] = {}

    @contextmanager
    def expecting(self, request: ClientRequest, request_id: str, decoding: DecodeRequest) -> Iterator[None]:
        """Around a request at a decoder, under `request_id`."""
        children = _children(request, request_id)
        self._children |= {child: (decoding, number) for number, child in enumerate(children)}
        try:
            yield
        finally:
            for child in children:
                del self._children[child]
            decoding.close()

    def knows(self, request: ClientRequest, request_id: str) -> bool:
        """Whether such a request is open already: clients choose their ids. Ask right before :meth:`expecting`."""
        return any(child in self._children for child in _children(request, request_id))

    def find(self, child: str) -> tuple[DecodeRequest, int] | None:
        """Whose child it is, and which prompt of the request it computes; None = nobody's."""
        plain = _BEFORE.sub("", child)
        for name in (child, plain, _BEHIND.sub("", plain)):
            if name in self._children:
                return self._children[name]
        return None


def _children(request: ClientRequest, request_id: str) -> list[str]:
    if request.path == CHAT:
        return [f"chatcmpl-{request_id}"]
    return [f"cmpl-{request_id}-{number}" for number in range(max(len(request.prompts), 1))]
