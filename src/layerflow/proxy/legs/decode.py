"""The decode's leg: its answer goes to the client, a stream event by event, once it is one."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import httpx

from layerflow.config.proxy import ProxySettings
from layerflow.errors import UpstreamError
from layerflow.proxy.instances.instance import Instance
from layerflow.proxy.legs.call import passed_on, post, read_answer
from layerflow.proxy.legs.checks import StreamCheck, of_a_handoff, whole_answer
from layerflow.proxy.legs.usage import PrefillUsage, event_with_cached, with_cached
from layerflow.proxy.outlet import Outlet
from layerflow.proxy.request import Headers
from layerflow.proxy.sse import Event, EventParser

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
    outlet: Outlet,
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
    :raises UpstreamError: see `outlet.begun` whether the client has got something.
    """
    with instance.breaker.watch(), instance.given_up_when_down() as answered:
        leg = _Leg(instance, call, outlet, usage, settings, first_token, answered)
        try:
            await (_stream if call.stream else _whole)(leg)
        except UpstreamError as error:
            if not call.handoff or outlet.begun:
                raise
            raise of_a_handoff(leg.engine, error) from error


@dataclass(frozen=True, slots=True)
class _Leg:
    """One call on its way, whole or as a stream; see :func:`decode`.

    :param answered: told, too, when the first token is there.
    """

    instance: Instance
    call: DecodeCall
    outlet: Outlet
    usage: PrefillUsage
    settings: ProxySettings
    first_token: Callable[[], None]
    answered: Callable[[], None]

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
        self.answered()
        self.first_token()


async def _whole(leg: _Leg) -> None:
    outlet, usage, settings = leg.outlet, leg.usage, leg.settings
    async with leg.post() as response:
        content = await read_answer(leg.engine, response, settings.max_request_bytes, settings.idle_timeout_s)
        answer = whole_answer(leg.engine, content)
        cached = await usage.cached_tokens()
        await anyio.lowlevel.checkpoint_if_cancelled()
        leg.began()
        await outlet.whole(with_cached(answer, cached), passed_on(response.headers.raw))


async def _stream(leg: _Leg) -> None:
    outlet, usage, settings = leg.outlet, leg.usage, leg.settings
    deadline = anyio.current_time() + settings.first_token_timeout_s
    check, waited_s = StreamCheck(leg.engine), settings.first_token_timeout_s
    begun = False
    with anyio.CancelScope(deadline=deadline) as patience:
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
                if begun and held and (failure is None or outlet.begun):
                    patience.deadline = math.inf  # the client's time is not the engine's
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    await outlet.events(held, headers)
                    held, held_bytes = [], 0
                if failure is not None:
                    raise failure
                if len(held) > _MOST_HELD or held_bytes > settings.max_request_bytes:
                    raise UpstreamError(f"{leg.engine} sent {len(held)} events without a token", counts=False)
                if check.done:
                    patience.deadline = anyio.current_time() + _LAST_CHUNK_S
                elif begun:
                    patience.deadline = anyio.current_time() + waited_s
            check.ended(parser.unfinished)
    if patience.cancelled_caught and not check.done:
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
