"""HTTP calls of a scheduler that waits for none of them: to metaservers and to other engines' ``GET /query``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import httpx
import structlog

from layerflow.connectors.vllm.pd.conventions.terms import shown
from layerflow.errors import ProtocolError
from layerflow.http_client import TRUST_ENVIRONMENT
from layerflow.system.threads import OwnedThread

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
        """It has ended, well or not."""
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
        """Nobody waits for it any more: the connection is closed."""
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
