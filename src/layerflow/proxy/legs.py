"""One HTTP call to one engine, the prefill's or the decode's leg: what its failures mean, what counts as an answer."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import msgspec

from layerflow.config.proxy import ProxySettings
from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.answers import DONE, Event, EventParser, ResponseSink, make_event
from layerflow.proxy.context import BodyShare
from layerflow.proxy.instances import Instance
from layerflow.proxy.request import NOT_JSON, Body, Headers, decode_values, passed_on

_ELSEWHERE = (408, 425, 429)
"""Refusals that are about the engine's moment, not about the request: another engine may take it."""
_CLOSED_BEFORE_S = 1.0
"""A connection that breaks within so long of a request was closed before it; the longest way to an engine and back."""
_REFUSAL_BYTES = 1 << 20
"""Of an engine's error; a client gets a longer one in the proxy's words."""


def engine_headers(headers: Headers, request_id: str) -> list[tuple[bytes, bytes]]:
    """What an engine gets, under the leg's own request id.

    :param headers: see :func:`headers_for_engines`.
    """
    return [
        *headers,
        (b"x-request-id", request_id.encode()),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),
    ]


@asynccontextmanager
async def post(
    instance: Instance, path: str, body: bytes, headers: Headers, idle_timeout_s: float
) -> AsyncIterator[httpx.Response]:
    """The engine's answer, status 200, its body not read yet. Leaving closes it: the engine sees its client go.

    :param idle_timeout_s: between two pieces of an error's body.
    :raises UpstreamError: the engine cannot be reached, breaks off (also inside the block) or answers another status.
    """
    engine = instance.title
    try:
        response = await _send(instance, path, body, headers)
        try:
            if response.status_code != httpx.codes.OK:
                raise await _refusal(engine, response, idle_timeout_s)
            yield response
        finally:
            await response.aclose()
    except httpx.InvalidURL as error:
        raise UpstreamError(
            f"{engine} cannot be asked at the URL that it was given with: {error}", untouched=True
        ) from error
    except httpx.LocalProtocolError as error:
        # The client's headers: nothing was sent.
        raise UpstreamError(f"the request cannot be passed on: {error}", 400, rejected=True, counts=False) from error
    except httpx.TimeoutException as error:
        raise UpstreamError(
            f"{engine} did not accept a connection in time ({type(error).__name__})", 504, untouched=True
        ) from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise UpstreamError(
            f"{engine} broke the connection: {type(error).__name__} {error}".rstrip(), untouched=True
        ) from error


async def read_answer(
    engine: str, response: httpx.Response, most: int, idle_timeout_s: float, kept: BodyShare | None = None
) -> bytes:
    """A whole body.

    :param engine: what messages call the engine.
    :param kept: what it keeps of the proxy's memory; None = nothing for longer than it takes to read it.
    :raises UpstreamError: it has more than `most` bytes, stops coming, or there is no room for it.
    """
    try:
        content = await _read(response, most, idle_timeout_s, kept)
    except ProxyError as full:
        # The engine did its part, and at another one there would be no more room.
        raise UpstreamError(
            f"{full}; ask for less at once, or later", full.status, rejected=True, counts=False
        ) from None
    if content is None:
        raise UpstreamError(f"{engine} sent a part of its answer, and then nothing for {idle_timeout_s:g} s", 504)
    if len(content) > most:
        raise UpstreamError(f"{engine} answered with more than {most} bytes (proxy.max_request_bytes)", counts=False)
    return bytes(content)


async def _read(
    response: httpx.Response, most: int, idle_timeout_s: float, kept: BodyShare | None = None
) -> bytearray | None:
    """The body, or its beginning if it has more than `most` bytes; None if it stops coming.

    :raises ProxyError: there is no room for it in what is `kept`.
    """
    content = bytearray()
    with anyio.CancelScope(deadline=anyio.current_time() + idle_timeout_s) as scope:
        async for piece in response.aiter_raw():
            if kept is not None:
                kept.add(len(piece))
            content += piece
            if len(content) > most:
                break
            scope.deadline = anyio.current_time() + idle_timeout_s
    return None if scope.cancelled_caught else content


async def _send(instance: Instance, path: str, body: bytes, headers: Headers) -> httpx.Response:
    """Once more over a new connection where a kept one was closed by the engine just before we used it.

    That shows at once. What breaks later may have been read, and computed: sent again it would be computed twice.
    """
    opened, began = False, anyio.current_time()

    async def trace(name: str, _: Any) -> None:
        nonlocal opened
        opened = opened or name == "connection.connect_tcp.started"

    try:
        return await instance.ask("POST", path, body, headers, {"trace": trace})
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        if opened or anyio.current_time() - began > _CLOSED_BEFORE_S:
            raise
    return await instance.ask("POST", path, body, [*headers, (b"connection", b"close")])


async def _refusal(engine: str, response: httpx.Response, idle_timeout_s: float) -> UpstreamError:
    status = response.status_code
    body = await _read(response, _REFUSAL_BYTES, idle_timeout_s) or bytearray()
    told = bytes(body[:200]).decode(errors="replace").strip()
    if not 400 <= status < 600:
        return UpstreamError(f"{engine} answered HTTP {status}, which is no answer of this API")
    return UpstreamError(
        f"{engine} answered HTTP {status}: {told}".rstrip(": "),
        status,
        rejected=status < 500 and status not in _ELSEWHERE,
        counts=status >= 500,
        untouched=status in _ELSEWHERE,
        body=bytes(body) if body.lstrip()[:1] == b"{" and len(body) <= _REFUSAL_BYTES else None,
    )


# Is what a decode engine answers an answer? A status of 200 is no proof: engines die after it, or send nothing.


_ERRORS = range(400, 600)


class _Choice(msgspec.Struct):
    index: int | None = None
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


class _EngineError(msgspec.Struct):
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
            index = choice.index or 0
            self._seen.add(index)
            if choice.finish_reason is not None:
                self._finished.add(index)
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
        rejected=status < 500,
        counts=status >= 500,
        body=body,
    )


def of_a_handoff(engine: str, error: UpstreamError) -> UpstreamError:
    """What a decode engine's failure means for a request whose prompt was computed by another one.

    vLLM ends a single request with a 500 of fixed words: so do layerflow's connectors where the prefill is lost and the
    prompt is longer than ``pd.max_recompute_tokens``. The engine is well, and the request may be sent again: 503.
    """
    try:
        told = msgspec.json.decode(error.body or b"", type=_EngineError).error
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


class _Finished(msgspec.Struct):
    """What the proxy reads of a choice of a whole answer: 20 log probabilities a token are passed over, not built."""

    finish_reason: str | None = None


_decode_finished = msgspec.json.Decoder(list[_Finished] | None).decode


def whole_answer(engine: str, body: bytes) -> Body:
    """An answer that is not a stream, its values where they stand in `body`.

    :raises UpstreamError: it is empty, no JSON object, an error, or has no choice that was finished.
    """
    try:
        answer = Body(decode_values(body))
        told = msgspec.json.decode(answer.view("error"))
        if told:
            raise reported(engine, body, told)
        choices = _decode_finished(answer.view("choices"))
    except NOT_JSON as error:
        what = f"what is no answer of this API ({error})" if body else "an empty body"
        raise UpstreamError(f"{engine} answered 200 with {what}") from None
    if not choices:
        raise UpstreamError(f"{engine} answered 200 without a choice")
    if not all(choice.finish_reason for choice in choices):
        raise UpstreamError(f"{engine} answered 200 with a choice that has no finish_reason")
    return answer


def object_in(answer: Body, name: str) -> dict[str, Any] | None:
    """A value that is an object, built; None where it is none."""
    try:
        value = msgspec.json.decode(answer.view(name))
    except NOT_JSON:
        return None
    return value if isinstance(value, dict) else None


# Which tokens the prefill engine found cached, told in the decode engine's usage.
#
# A decode engine counts what it was handed over as cached, which says nothing of what the request saved.


# A prefill's answer and the decoder's last token may cross on their way here, where one token was asked for.
_WAIT_S = 0.25


class PrefillUsage:
    """What the prefill of a request found cached, as soon as it has answered; of a list of prompts, all of them."""

    def __init__(self) -> None:
        self._cached: int | None = None
        self._expected = 0  #: prefills that have not answered
        self._answered = anyio.Event()

    def expect(self) -> None:
        """A prefill was sent."""
        if not self._expected:
            self._answered = anyio.Event()
        self._expected += 1

    def prefill_ended(self, cached: int | None) -> None:
        """Note a prefill's end; None: it failed, or does not say (vLLM without ``--enable-prompt-tokens-details``)."""
        if cached is not None:
            self._cached = (self._cached or 0) + cached
        self._expected -= 1
        if not self._expected:
            self._answered.set()

    async def cached_tokens(self) -> int | None:
        """None = not known, or nothing was prefilled apart."""
        with anyio.move_on_after(_WAIT_S):
            while self._expected:  # one that failed may be tried elsewhere
                await self._answered.wait()
        return self._cached


def cached_of(usage: dict[str, Any]) -> int | None:
    """``prompt_tokens_details.cached_tokens`` of an answer's usage."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


def _usage_with_cached(usage: dict[str, Any], cached: int) -> dict[str, Any]:
    details = usage.get("prompt_tokens_details")
    details = {**(details if isinstance(details, dict) else {}), "cached_tokens": cached}
    return {**usage, "prompt_tokens_details": details}


def answer_with_cached(answer: Body, cached: int | None) -> Body:
    """The answer with that number in its usage; unchanged where it has none or the number is not known."""
    usage = object_in(answer, "usage")
    if cached is None or usage is None:
        return answer
    return answer.changed({"usage": _usage_with_cached(usage, cached)})


def event_with_cached(event: Event, cached: int | None) -> Event:
    """The same for an event that has a usage."""
    if cached is None or event.data is None:
        return event
    try:
        answer = msgspec.json.decode(event.data)
    except NOT_JSON:
        return event  # what passes unread may hold what only its client can read
    return make_event(msgspec.json.encode({**answer, "usage": _usage_with_cached(answer["usage"], cached)}))


# The decode's leg: its answer goes to the client, a stream event by event, once it is one.


_LAST_CHUNK_S = 0.1  # for the end of a body whose last event was [DONE]
_MOST_HELD = 1 << 16  # events before the first token: engines send one for each choice, with the role


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """What a decode engine is asked.

    :param handoff: its prompt is computed by another engine.
    """

    path: str
    body: bytes
    headers: Headers
    stream: bool
    handoff: bool = False


async def decode(
    instance: Instance,
    call: DecodeCall,
    sink: ResponseSink,
    *,
    usage: PrefillUsage,
    settings: ProxySettings,
    first_token: Callable[[], None],
) -> None:
    """Pass the engine's answer on until its end. Cancelling closes the connection, and so aborts it in the engine.

    Nothing is sent to the client before the answer has begun to be one: until then the caller may ask another engine.
    A call that was cancelled sends nothing either, even where its data had come in the same turn of the event loop: the
    caller has decided to start again.

    :param usage: what the prefill found cached.
    :param first_token: called once, when the first token is there.
    :raises UpstreamError: see `sink.begun` whether the client has got something.
    """
    with instance.breaker.watch() as works, instance.given_up_when_down() as answered:
        leg = _Leg(instance, call, sink, usage, settings, (works, answered, first_token))
        try:
            await (_stream if call.stream else _whole)(leg)
        except UpstreamError as error:
            if not call.handoff or sink.begun:
                raise
            raise of_a_handoff(leg.engine, error) from error


@dataclass(frozen=True, slots=True)
class _Leg:
    """One call on its way, whole or as a stream; see :func:`decode`.

    :param told: called when the first token is there.
    """

    instance: Instance
    call: DecodeCall
    sink: ResponseSink
    usage: PrefillUsage
    settings: ProxySettings
    told: tuple[Callable[[], None], ...]

    @property
    def engine(self) -> str:
        """For errors."""
        return self.instance.title

    def post(self) -> AbstractAsyncContextManager[httpx.Response]:
        """The engine's response."""
        call = self.call
        return post(self.instance, call.path, call.body, call.headers, self.settings.idle_timeout_s)

    def began(self) -> None:
        """The answer has begun to be one."""
        for tell in self.told:
            tell()


async def _whole(leg: _Leg) -> None:
    sink, usage, settings = leg.sink, leg.usage, leg.settings
    with sink.room.answer() as kept:
        async with leg.post() as response:
            headers = passed_on(response.headers.raw)
            content = await read_answer(leg.engine, response, settings.max_request_bytes, settings.idle_timeout_s, kept)
            answer = whole_answer(leg.engine, content)
            cached = await usage.cached_tokens()
        await anyio.lowlevel.checkpoint_if_cancelled()
        leg.began()
        await sink.whole(answer_with_cached(answer, cached), headers, kept)


async def _stream(leg: _Leg) -> None:
    sink, usage, settings = leg.sink, leg.usage, leg.settings
    deadline = anyio.current_time() + settings.first_token_timeout_s
    check, waited_s = StreamCheck(leg.engine), settings.first_token_timeout_s
    begun = False
    with anyio.CancelScope(deadline=deadline) as scope:
        async with _complete_at_done(check), leg.post() as response:
            _check_type(leg.engine, response)
            headers = passed_on(response.headers.raw)
            parser = EventParser(settings.max_request_bytes)
            held: list[Event] = []  # what came before the first token; then what one piece brought
            held_bytes = 0
            async for piece in response.aiter_raw():
                if check.done:
                    continue  # read to the end, so that the connection may serve another request
                failure: UpstreamError | None = None
                try:
                    for event in parser.feed(piece):
                        if check.take(event) and not begun:
                            begun, waited_s = True, settings.idle_timeout_s
                            leg.began()
                        if event.data is None and not begun:
                            continue  # a comment, which keeps a connection alive
                        held.append(event)
                        held_bytes += len(event.raw)
                        if check.usage:
                            held[-1] = event_with_cached(event, await usage.cached_tokens())
                        if check.done:
                            break
                except UpstreamError as error:
                    failure = error
                # A first token that came together with the end of the engine is not sent: another one may start.
                if begun and held and (failure is None or sink.begun):
                    scope.deadline = math.inf  # the client's time is not the engine's
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    await sink.events(held, headers)
                    held, held_bytes = [], 0
                if failure is not None:
                    raise failure
                if len(held) > _MOST_HELD or held_bytes > settings.max_request_bytes:
                    raise UpstreamError(f"{leg.engine} sent {len(held)} events without a token", counts=False)
                if check.done:
                    scope.deadline = anyio.current_time() + _LAST_CHUNK_S
                elif begun:
                    scope.deadline = anyio.current_time() + waited_s
            check.ended(parser.unfinished)
    if scope.cancelled_caught and not check.done:
        raise UpstreamError(f"{leg.engine} sent nothing for {waited_s:g} s", 504)


@asynccontextmanager
async def _complete_at_done(check: StreamCheck) -> AsyncIterator[None]:
    """How the connection ends after ``[DONE]`` changes nothing any more."""
    try:
        yield
    except UpstreamError:
        if not check.done:
            raise


def _check_type(engine: str, response: httpx.Response) -> None:
    found = response.headers.get("content-type", "")
    if not found.startswith("text/event-stream"):
        raise UpstreamError(f"{engine} was asked for a stream and answered with {found or 'no content-type'}")


# The prefill's leg: one token, no stream, and what the answer says of the hand-off.


# What decides only how many tokens come and in which form; `logprobs` would be computed for nothing.
_DROPPED = ("stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs", "kv_transfer_params")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill's answer.

    :param params: its ``kv_transfer_params``, for the decoder; None = it hands nothing over.
    :param cached_tokens: prompt tokens that it did not have to compute; None = it does not say.
    :param prompt_tokens: None = it does not say.
    :param servers: control addresses of the layerflow servers that it saves through, if it tells them.
    """

    params: dict[str, Any] | None
    cached_tokens: int | None
    prompt_tokens: int | None
    servers: tuple[str, ...] = ()


def prefill_body(body: Body, params: Mapping[str, Any]) -> bytes:
    """The client's request as the prefill engine gets it.

    :param params: its ``kv_transfer_params``.
    """
    asked: dict[str, Any] = {"stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": params}
    if "max_completion_tokens" in body:
        asked["max_completion_tokens"] = 1
    return body.changed(asked, _DROPPED).encode()


async def prefill(instance: Instance, path: str, body: bytes, headers: Headers, settings: ProxySettings) -> Prefilled:
    """Run the prefill. Cancelling it closes the connection, and so aborts it in the engine.

    :raises UpstreamError: it failed, fell silent, refused, or answered 200 without an answer.
    """
    engine, timeout_s = instance.title, settings.prefill_timeout_s
    with instance.breaker.watch(), instance.given_up_when_down():
        try:
            with anyio.fail_after(timeout_s):
                async with post(instance, path, body, headers, settings.idle_timeout_s) as response:
                    content = await read_answer(engine, response, settings.max_request_bytes, settings.idle_timeout_s)
        except TimeoutError:
            raise UpstreamError(f"{engine} did not answer in {timeout_s:g} s", 504) from None
        answer = whole_answer(engine, content)
    usage, params = object_in(answer, "usage") or {}, object_in(answer, "kv_transfer_params")
    tokens = usage.get("prompt_tokens")
    return Prefilled(params or None, cached_of(usage), tokens if isinstance(tokens, int) else None, _servers(params))


def _servers(params: Any) -> tuple[str, ...]:
    ours = params.get("layerflow") if isinstance(params, dict) else None
    servers = ours.get("servers") if isinstance(ours, dict) else None
    if isinstance(servers, list) and all(isinstance(server, str) for server in servers):
        return tuple(servers)
    return ()
