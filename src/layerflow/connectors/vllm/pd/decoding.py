"""The decode engine's end of a hand-off: found, waited for, loaded, or lost and computed here."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import httpx
import structlog

from layerflow.agent.values import Follow, Hit
from layerflow.connectors.vllm.pd.conventions import concurrent, metaserver
from layerflow.connectors.vllm.pd.conventions.parts import DecodePart, HandoffTerms, Sizes, layout_mismatch, shown
from layerflow.errors import InvalidTransition, ProtocolError
from layerflow.http_client import TRUST_ENVIRONMENT
from layerflow.system.threads import OwnedThread

if TYPE_CHECKING:
    from layerflow.agent.control import Control
    from layerflow.agent.lookups import Lookups


# HTTP calls of a scheduler that waits for none of them: to metaservers and to other engines' ``GET /query``.


MAX_TRIES = 3
"""Of a connection that is refused: nothing was sent, so that it may be tried again."""
RETRY_S = 0.1
CONNECT_S = 3.0
QUERY_S = 30.0
"""How long a ``GET /query`` may take: all requests that name its address wait for the same one, each as long as its own
hand-off may take."""
KNOWN_S = 30.0
"""How long its answer is believed."""
MOST_KNOWN = 256
"""Addresses that are asked, or were: requests name them."""
MOST_ANSWER_BYTES = 1 << 20
"""Of an answer's body: requests say who is asked, and the engine's memory is everybody's."""

log = structlog.get_logger("layerflow.vllm.pd")


class HttpCall:
    """One call, as the thread that has asked for it sees it."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float) -> bool:
        """Until it has ended; False after `timeout_s`."""
        return not wait([self._future], timeout_s).not_done

    @property
    def error(self) -> str:
        """Why it has failed; "" = it has not, or not yet."""
        if not self._future.done():
            return ""
        if self._future.cancelled():
            return "cancelled"
        error = self._future.exception()
        return "" if error is None else str(error) or type(error).__name__

    @property
    def answer(self) -> Any:
        """The body, from JSON; only of a call that is done and has no error."""
        return self._future.result()

    def when_done(self, then: Callable[[], None]) -> None:
        """Call it once this has ended, well or not: at once if it has, else on the calls' own thread."""
        self._future.add_done_callback(lambda _: then())

    def cancel(self) -> None:
        """Close the connection: nobody waits for the answer any more."""
        self._future.cancel()


class HttpCalls:
    """Made by a scheduler's side, for its thread; the calls run on one of its own, which the first of them starts.

    Each has a deadline of its own, an answer other than 2xx is a failure, and one that is asked for again under the
    same name is the same call.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: OwnedThread | None = None
        self._client: httpx.AsyncClient | None = None
        self._calls: dict[str, HttpCall] = {}
        self._known: dict[str, tuple[float, HttpCall]] = {}

    def post(self, name: str, url: str, body: Mapping[str, Any], until: float) -> HttpCall:
        """POST JSON.

        :param name: of the hand-off.
        :param until: monotonic seconds.
        """
        if name not in self._calls:
            self._calls[name] = self._begin(self._call("POST", url, body, until))
        return self._calls[name]

    def get(self, url: str) -> HttpCall:
        """GET JSON, within :data:`QUERY_S`; what is being asked, or was answered a moment ago, is not asked again."""
        known, now = self._known.get(url), time.monotonic()
        if known is None or now - known[0] > KNOWN_S or known[1].error:
            known = now, self._begin(self._call("GET", url, None, now + QUERY_S))
            self._know(url, known)
        return known[1]

    def _know(self, url: str, known: tuple[float, HttpCall]) -> None:
        """Those that were asked last are known, and no more than :data:`MOST_KNOWN`; each takes a descriptor until it
        answers, so of more than those the one that has not answered for longest is given up."""
        self._known.pop(url, None)
        self._known[url] = known
        while len(self._known) > MOST_KNOWN or time.monotonic() - next(iter(self._known.values()))[0] > KNOWN_S:
            self._known.pop(next(iter(self._known)))[1].cancel()

    def forget(self, name: str) -> None:
        """The hand-off is over. A post that still waits for its answer is given up."""
        call = self._calls.pop(name, None)
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """End the thread, and with it what is under way."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None

    def _begin(self, call: Any) -> HttpCall:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = OwnedThread("layerflow-http", self._run, self._loop, lost=self._lost).start()
        return HttpCall(asyncio.run_coroutine_threadsafe(call, self._loop))

    def _lost(self, _: BaseException) -> None:
        """The loop has ended, and with it what was under way; the next call begins another."""
        self._loop = self._thread = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._client = httpx.AsyncClient(
            timeout=None,  # noqa: S113 - each call has its deadline
            trust_env=TRUST_ENVIRONMENT,
            headers={"accept-encoding": "identity"},  # a small packed body may be a large one
            limits=httpx.Limits(max_connections=None),
        )
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(self._client.aclose())
            loop.close()

    async def _call(self, method: str, url: str, body: Mapping[str, Any] | None, until: float) -> Any:
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(0.0, until - time.monotonic())):
                status, content = await self._send(method, url, body)
        except TimeoutError:
            raise ProtocolError(f"{method} {shown(url)}: no answer by the deadline") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProtocolError(f"{method} {shown(url)}: {type(error).__name__} {error}".rstrip()) from None
        if not httpx.codes.is_success(status):
            raise ProtocolError(f"{method} {shown(url)}: status {status}, {content[:200].decode(errors='replace')!r}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            beginning = content[:80].decode(errors="replace")
            raise ProtocolError(f"{method} {shown(url)}: the answer is no JSON: {beginning!r}") from None

    async def _send(self, method: str, url: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        """The answer's status and body."""
        for left in reversed(range(MAX_TRIES)):
            try:
                return await self._ask(method, url, body)
            except httpx.ConnectError:
                if not left:
                    raise
                await asyncio.sleep(RETRY_S)
        raise AssertionError("unreachable")

    async def _ask(self, method: str, url: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        assert self._client is not None
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        async with self._client.stream(method, url, json=body, timeout=timeout) as response:
            content = bytearray()
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > MOST_ANSWER_BYTES:
                    raise ProtocolError(f"{method} {shown(url)}: the answer has more than {MOST_ANSWER_BYTES} bytes")
            return response.status_code, bytes(content)


class DecodeStatus(StrEnum):
    """Where a hand-off is, as its decode engine sees it."""

    SEEKING = "seeking"
    """The prefill engine's servers are not known yet."""
    WAITING = "waiting"
    """It is not open yet."""
    CLAIMED = "claimed"
    """It can be read: a load follows, or is under way."""
    LOADED = "loaded"
    LOST = "lost"
    """What is stored is loaded, the rest computed."""
    RELEASED = "released"


TRANSITIONS = {
    DecodeStatus.SEEKING: (DecodeStatus.WAITING, DecodeStatus.LOST, DecodeStatus.RELEASED),
    DecodeStatus.WAITING: (DecodeStatus.CLAIMED, DecodeStatus.LOST, DecodeStatus.RELEASED),
    DecodeStatus.CLAIMED: (DecodeStatus.WAITING, DecodeStatus.LOADED, DecodeStatus.LOST, DecodeStatus.RELEASED),
    DecodeStatus.LOADED: (DecodeStatus.RELEASED,),
    DecodeStatus.LOST: (DecodeStatus.RELEASED,),
    DecodeStatus.RELEASED: (),
}


@dataclass(slots=True)
class DecodeHandoff:
    """One request's hand-off, as its decoder sees it.

    :param until: monotonic seconds: what is not there by then is computed.
    :param servers: where it is looked for now.
    :param tried: how many of the other places have been tried.
    :param post: to the metaserver.
    :param query: for its servers.
    :param reason: why it is lost.
    :param has_loaded: all of it arrived.
    """

    part: DecodePart
    until: float
    servers: tuple[str, ...]
    status: DecodeStatus = DecodeStatus.WAITING
    tried: int = 0
    post: HttpCall | None = None
    query: HttpCall | None = None
    reason: str = ""
    has_loaded: bool = False

    @property
    def followed(self) -> bool:
        """Lookups of the request ask for the hand-off."""
        return self.status in (DecodeStatus.WAITING, DecodeStatus.CLAIMED)

    def become(self, status: DecodeStatus) -> None:
        """:raises InvalidTransition: not from here."""
        if status not in TRANSITIONS[self.status]:
            raise InvalidTransition(f"hand-off {self.part.handoff}: {self.status} cannot become {status}")
        self.status = status


class Decoding:
    """One per scheduler's side, for its thread.

    :param control: releases what is known only when its request is over, on any thread.
    :param layout: this engine's, see :func:`layerflow.spec.model_facts`.
    :param incarnation: of this engine.
    """

    def __init__(
        self, lookups: Lookups, control: Control, *, layout: dict[str, str], sizes: Sizes, incarnation: str
    ) -> None:
        self._lookups, self._control = lookups, control
        self._layout = layout
        self._sizes = sizes
        self._incarnation = incarnation
        self._calls = HttpCalls()

    def begin(self, part: DecodePart, request: str) -> DecodeHandoff:
        """Start the prefill where this engine is the one to do so. Returns at once.

        :param request: vLLM's id.
        """
        handoff = DecodeHandoff(part, time.monotonic() + part.deadline_s, part.servers)
        told = part.prefiller.layout if part.prefiller is not None else {}
        if why := layout_mismatch(self._layout, told):
            self.lose(handoff, f"it cannot be read: {why}")
            return handoff
        if part.metaserver:
            terms = HandoffTerms(
                handoff=part.handoff,
                incarnation=self._incarnation,
                layout=self._layout,
                prompt=part.prompt,
                deadline_s=part.deadline_s,
            )
            body = metaserver.body(request, terms, self._sizes)
            handoff.post = self._calls.post(part.handoff, part.metaserver, body, handoff.until)
        elif part.bootstrap:
            handoff.status = DecodeStatus.SEEKING
            handoff.query = self._calls.get(part.bootstrap)
        return handoff

    def seeks(self, handoff: DecodeHandoff) -> bool:
        """Must the lookup wait until the hand-off's servers are known?"""
        query = handoff.query
        if handoff.status is not DecodeStatus.SEEKING or query is None:
            return False
        if not query.done and time.monotonic() < handoff.until:
            return True
        try:
            handoff.servers = _found(handoff.part, query)
        except ProtocolError as error:
            self.lose(handoff, str(error))
        else:
            handoff.become(DecodeStatus.WAITING)
        return False

    def follow(self, handoff: DecodeHandoff) -> Follow | None:
        """What the request's next lookup asks for; None = what is stored."""
        if not handoff.followed:
            return None
        return Follow(handoff.until, handoff.part.handoff, handoff.servers)

    def refused(self, handoff: DecodeHandoff) -> bool:
        """Has the metaserver said that there will be no prefill? Then the hand-off is lost, before its deadline."""
        if handoff.status is not DecodeStatus.WAITING or handoff.post is None or not handoff.post.error:
            return False
        self.lose(handoff, handoff.post.error)
        return True

    def answered(self, handoff: DecodeHandoff, hit: Hit) -> bool:
        """The lookup that asked for the hand-off has its answer; False: ask again, elsewhere.

        A hit with a reason is of what is stored: the hand-off cannot be read, and the reason says why.
        """
        if not handoff.followed:
            return True
        if not hit.reason and hit.tokens:
            if handoff.status is DecodeStatus.WAITING:
                handoff.become(DecodeStatus.CLAIMED)
            return True
        if handoff.tried < len(handoff.part.otherwise) and time.monotonic() < handoff.until:
            handoff.servers = handoff.part.otherwise[handoff.tried]
            handoff.tried += 1
            if handoff.status is DecodeStatus.CLAIMED:
                handoff.become(DecodeStatus.WAITING)
            return False
        self.lose(handoff, hit.reason or "its server does not answer")
        return True

    def loaded(self, handoff: DecodeHandoff, *, shared: bool) -> None:
        """All of it has arrived.

        :param shared: other requests read the same hand-off.
        """
        if handoff.status is DecodeStatus.CLAIMED:
            handoff.become(DecodeStatus.LOADED)
            handoff.has_loaded = True
            if not shared:
                self.release(handoff)

    def lose(self, handoff: DecodeHandoff, reason: str) -> None:
        """Give the hand-off up: what is stored, and the request's own computing, make up for it."""
        if handoff.status in (DecodeStatus.LOADED, DecodeStatus.LOST, DecodeStatus.RELEASED):
            return
        handoff.become(DecodeStatus.LOST)
        handoff.reason = reason
        log.warning("handoff_lost", handoff=handoff.part.handoff, reason=reason)

    def release(self, handoff: DecodeHandoff) -> None:
        """This engine needs nothing of it any more: the prefill's side need not keep it, nor go on with it."""
        if handoff.status is DecodeStatus.RELEASED:
            return
        handoff.become(DecodeStatus.RELEASED)
        self._calls.forget(handoff.part.handoff)
        self._lookups.release_handoff(handoff.part.handoff, _keepers(handoff.part, handoff.servers))
        if handoff.query is not None and not handoff.servers:
            self._release_once_found(handoff.part, handoff.query)

    def decline(self, part: DecodePart) -> None:
        """A hand-off that this engine was told of and has no use for."""
        self._lookups.release_handoff(part.handoff, _keepers(part))
        if part.bootstrap:
            self._release_once_found(part, self._calls.get(part.bootstrap))

    def _release_once_found(self, part: DecodePart, query: HttpCall) -> None:
        """The prefill engine's servers are told too, when they are known: the scheduler may call nothing by then."""

        def release() -> None:
            try:
                servers = _found(part, query)
            except ProtocolError as error:
                log.warning("handoff_not_released", handoff=part.handoff, server=part.bootstrap, reason=str(error))
            else:
                if servers:
                    self._control.release_handoff(part.handoff, servers)

        query.when_done(release)

    def close(self) -> None:
        """End what is under way."""
        self._calls.close()


def _found(part: DecodePart, query: HttpCall) -> tuple[str, ...]:
    """The servers that the prefill engine has named.

    :raises ProtocolError: it has named none that can be used.
    """
    if not query.done:
        raise ProtocolError(f"{part.bootstrap} has not told within the hand-off's deadline which servers keep it")
    if query.error:
        raise ProtocolError(query.error)
    return concurrent.servers_in(query.answer, part.engine)


def _keepers(part: DecodePart, learned: Iterable[str] = ()) -> tuple[str, ...]:
    """Every server that may keep it: a router's address may lead to none of them."""
    return tuple(dict.fromkeys([*learned, *part.servers, *itertools.chain.from_iterable(part.otherwise)]))


def summary_of(handoff: DecodeHandoff) -> dict[str, Any]:
    """For the response."""
    if handoff.has_loaded:
        return {"handoff": "loaded"}
    return {"handoff": "lost", "lost": handoff.reason} if handoff.reason else {"handoff": "released"}
