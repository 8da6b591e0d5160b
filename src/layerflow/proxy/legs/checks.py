"""Is what a decode engine answers an answer? A status of 200 is no proof: engines die after it, or send nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from layerflow.errors import UpstreamError
from layerflow.proxy.body import NOT_JSON
from layerflow.proxy.sse import DONE, Event

_ERRORS = range(400, 600)


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    delta: dict[str, Any] | None = None
    logprobs: Any = None
    token_ids: Any = None


class _Chunk(msgspec.Struct):
    """What the proxy reads of an event; everything else passes unread."""

    choices: list[_Choice] = []
    error: Any = None
    usage: Any = None


class _Words(msgspec.Struct):
    message: str = ""


class _Ended(msgspec.Struct):
    """The error with which an engine has ended a request."""

    error: _Words


_VLLM_ENDED, _VLLM_SAYS = 500, "Internal server error"
_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class StreamCheck:
    """Follows one stream, event by event.

    :param engine: what messages call the engine.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._seen: set[int] = set()
        self._finished: set[int] = set()
        self.done = False  #: the engine said that the stream is complete
        self.usage = False  #: the last event is the usage of the whole stream

    def take(self, event: Event) -> bool:
        """Whether the event brings the client something: a token, with or without text, or the end of a choice.

        A role alone does not.

        :raises UpstreamError: the engine reports an error, sends what is no event of this API, or ends the stream
            without having finished what it began.
        """
        self.usage = False
        if event.data is None:
            return False
        if event.data == DONE:
            if not self._finished or self._seen - self._finished:
                raise UpstreamError(f"{self._engine} ended its stream with [DONE] but without a finish_reason")
            self.done = True
            return False
        try:
            chunk = _decode_chunk(event.data)
        except NOT_JSON as error:
            raise UpstreamError(f"{self._engine} sent an event that is not the API's: {error}") from None
        if chunk.error:
            raise reported(self._engine, event.data, chunk.error)
        self.usage = not chunk.choices and isinstance(chunk.usage, dict)
        for choice in chunk.choices:
            self._seen.add(choice.index)
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
        return any(_brings_something(choice) for choice in chunk.choices)

    def ended(self, unfinished: bytes) -> None:
        """The connection has ended. :raises UpstreamError: before the stream was complete."""
        if not self.done:
            middle = f" in the middle of an event ({len(unfinished)} bytes)" if unfinished else ""
            raise UpstreamError(f"{self._engine} closed its stream before the end{middle}")


def _brings_something(choice: _Choice) -> bool:
    """A chunk without text is a token as well, which a parser of tools or reasoning holds back; a role is none."""
    if choice.delta is None or choice.finish_reason is not None or choice.logprobs or choice.token_ids:
        return True
    return "role" not in choice.delta or any(choice.delta[name] for name in choice.delta if name != "role")


def reported(engine: str, body: bytes, error: Any) -> UpstreamError:
    """The engine's own error, told in a stream or under a status of 200, with the status that it names."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and code in _ERRORS else 500
    return UpstreamError(
        f"{engine} reported an error: {body[:200].decode(errors='replace')}",
        status,
        judged=status < 500,
        counts=status >= 500,
        body=body,
    )


def of_a_handoff(engine: str, error: UpstreamError) -> UpstreamError:
    """What a decode engine's failure means for a request whose prompt was computed by another one.

    vLLM ends a single request with a 500 of fixed words: so do layerflow's connectors where the prefill is lost and the
    prompt is longer than ``pd.max_recompute_tokens``. The engine is well, and the request may be sent again: 503.
    """
    try:
        told = msgspec.json.decode(error.body or b"", type=_Ended).error
    except NOT_JSON:
        return error
    if error.status != _VLLM_ENDED or told.message != _VLLM_SAYS:
        return error
    return UpstreamError(
        f"{engine} ended the request: its prefill was lost on the way there, and the prompt is longer than the engine "
        "computes by itself (pd.max_recompute_tokens), or it failed there; try again later",
        503,
        counts=False,
    )


def whole_answer(engine: str, body: bytes) -> dict[str, Any]:
    """An answer that is not a stream.

    :raises UpstreamError: it is empty, no JSON object, an error, or has no choice that was finished.
    """
    try:
        answer = msgspec.json.decode(body)
    except NOT_JSON as error:
        what = f"no JSON ({error})" if body else "an empty body"
        raise UpstreamError(f"{engine} answered 200 with {what}") from None
    if not isinstance(answer, dict):
        raise UpstreamError(f"{engine} answered 200 with a {type(answer).__name__}, not an object")
    if answer.get("error"):
        raise reported(engine, body, answer["error"])
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise UpstreamError(f"{engine} answered 200 without a choice")
    if not all(isinstance(choice, Mapping) and choice.get("finish_reason") for choice in choices):
        raise UpstreamError(f"{engine} answered 200 with a choice that has no finish_reason")
    return answer
