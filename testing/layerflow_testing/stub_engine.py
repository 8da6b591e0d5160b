"""An engine that speaks vLLM's API and computes nothing: for tests and benchmarks of what stands before engines.

It answers each prompt with numbered tokens, ``t0 t1 t2 ...``, so that a client can tell what was lost, doubled or
reordered. :class:`Behaviour` makes it slow, broken or lying.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from layerflow_testing.ports import HeldPort

SIX_KEYS = (
    "do_remote_decode",
    "do_remote_prefill",
    "remote_engine_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
)


_MOST_TOKENS = 1_000_000
_FLAG: TypeAdapter[Any] = TypeAdapter(bool | None)
_NUMBER: TypeAdapter[Any] = TypeAdapter(int | None)
_DONE = b"data: [DONE]\n\n"
NO_ANSWER = 0
"""Instead of the metaserver's status: its answer never came."""


@dataclass
class Behaviour:
    """What an engine does with requests.

    :param status: of completions; other than 200 with an OpenAI error.
    :param status_body: instead of that error.
    :param first_s: before the answer, or a stream's headers.
    :param between_s: before each further event of a stream.
    :param dies_after: closes the connection after so many events of a stream; 0 = before the first.
    :param empty: answers 200 without content.
    :param error_event: an error event after so many events.
    :param hangs: never answers.
    :param per_write: events in one write; 0 = cut at odd places instead.
    :param cached: of the prompt's tokens, as the usage tells.
    :param hands_over: answers ``kv_transfer_params`` to the six keys.
    :param health: status of ``/health``.
    :param asks_metaserver: a decoder that is given one asks it before it answers.
    :param asks_for_s: how long it waits for the metaserver's answer; without one it answers by itself.
    """

    status: int = 200
    status_body: bytes | None = None
    first_s: float = 0.0
    between_s: float = 0.0
    dies_after: int | None = None
    empty: bool = False
    error_event: int | None = None
    hangs: bool = False
    per_write: int = 1
    cached: int | None = None
    hands_over: bool = True
    health: int = 200
    asks_metaserver: bool = True
    asks_for_s: float = 60.0
    done: bool = True
    finish: bool = True
    content_type: str = "text/event-stream; charset=utf-8"
    raw: bytes | None = None


@dataclass
class Seen:
    """One request that an engine got."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    finished: bool = False
    aborted: bool = False
    asked: list[int] = field(default_factory=list)  #: what the metaserver answered
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def params(self) -> dict[str, Any] | None:
        return self.body.get("kv_transfer_params")


class _Dies(Exception):
    """Ends a response without its end, as a process that is killed does."""


class StubEngine:
    """Serves on a thread of its own. ``behaviour`` may be replaced at any time."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.seen: list[Seen] = []
        self.resets: list[str] = []
        self.answer_for: Callable[[Seen], Behaviour] | None = None
        self._port = HeldPort()  # it may stop and come back
        self._ready = threading.Event()

    def __enter__(self) -> StubEngine:
        self._socket = socket.create_server(("127.0.0.1", self._port.number), backlog=512)
        app = Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/reset_prefix_cache", self._reset, methods=["POST"]),
            ]
        )
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self._server = _Threaded(config, self._ready)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the stub engine did not start in 10 s")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.force_exit = True
        self._server.should_exit = True

    def stop(self) -> None:
        """As leaving, but it is gone when this returns: connections closed, the port free."""
        self.__exit__()
        self._thread.join(10)
        self._socket.close()

    @property
    def port(self) -> int:
        return self._port.number

    @property
    def url(self) -> str:
        return self._port.url

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stub", "object": "model", "root": self.url}]})

    async def _health(self, _: Request) -> Response:
        return Response(status_code=self.behaviour.health)

    async def _reset(self, request: Request) -> Response:
        self.resets.append(request.url.query)
        return Response(status_code=200)

    async def _complete(self, request: Request) -> Response:
        try:
            body = _checked(await request.json())
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            told = {
                "error": {"message": f"stub: {error!r}"[:200], "type": "BadRequestError", "param": None, "code": 400}
            }
            return JSONResponse(told, 400)
        seen = Seen(request.url.path, body, dict(request.headers))
        self.seen.append(seen)
        how = self.answer_for(seen) if self.answer_for else self.behaviour
        if not body.get("stream"):
            return await self._whole(request, seen, how)
        return (
            StreamingResponse(
                _followed(self._events(seen, how), seen),
                media_type=None,
                status_code=200,
                headers={"content-type": how.content_type},
            )
            if how.status == 200 and not how.hangs
            else await self._whole(request, seen, how)
        )

    async def _whole(self, request: Request, seen: Seen, how: Behaviour) -> Response:
        working = asyncio.ensure_future(self._compute(seen, how))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            seen.aborted = True
            seen.ended.set()
            return Response(status_code=499)
        gone.cancel()
        seen.finished = True
        seen.ended.set()
        return working.result()

    async def _compute(self, seen: Seen, how: Behaviour) -> Response:
        await asyncio.sleep(how.first_s)
        if how.hangs:
            await asyncio.Event().wait()
        await self._ask(seen, how)
        if how.status != 200:
            body = (
                how.status_body
                or json.dumps(
                    {"error": {"message": f"stub says {how.status}", "type": "stub", "param": None, "code": how.status}}
                ).encode()
            )
            return Response(body, how.status, media_type="application/json")
        if how.raw is not None:
            return Response(how.raw, 200, media_type="application/json")
        if how.empty:
            return Response(b"", 200)
        if how.dies_after is not None:
            return _Cut()
        return JSONResponse(whole(seen, how))

    async def _events(self, seen: Seen, how: Behaviour) -> AsyncIterator[bytes]:
        await asyncio.sleep(how.first_s)
        await self._ask(seen, how)
        if how.raw is not None:
            yield how.raw
            return
        if how.empty:
            return
        written = 0
        for piece, count in _pieces(stream_events(seen, how), how.per_write):
            await asyncio.sleep(how.between_s if written else 0)  # also notices a client that has left
            if how.dies_after is not None and written >= how.dies_after:
                raise _Dies
            if how.error_event is not None and written >= how.error_event:
                yield b'data: {"error": {"message": "stub fails", "type": "stub", "param": null, "code": 500}}\n\n'
                yield b"data: [DONE]\n\n"
                return
            yield piece
            written += count

    async def _ask(self, seen: Seen, how: Behaviour) -> None:
        params = seen.params or {}
        url = params.get("metaserver")
        if not url or not how.asks_metaserver:
            return
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
            await asyncio.gather(*(self._ask_one(client, url, seen, child, how) for child in children(seen)))

    async def _ask_one(self, client: httpx.AsyncClient, url: str, seen: Seen, child: str, how: Behaviour) -> None:
        posted = {
            "request_id": child,
            "token_ids": [],
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": "stub",
            "layerflow": {"v": 1, "handoff": child},
        }
        try:
            answer = await client.post(url, json=posted, timeout=how.asks_for_s)
        except httpx.HTTPError:
            seen.asked.append(NO_ANSWER)  # it computes the prompt by itself
        else:
            seen.asked.append(answer.status_code)


class _Threaded(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._told = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._told.set()


class _Cut(Response):
    """Promises more bytes than it sends."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"id": "cmpl-', "more_body": True})
        raise _Dies


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _followed(events: AsyncIterator[bytes], seen: Seen) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            seen.finished = event.endswith(_DONE)  # who leaves now has all of it
            yield event
        seen.finished = True
    except _Dies:
        raise
    finally:
        seen.aborted = not seen.finished
        seen.ended.set()


def _checked(body: Any) -> dict[str, Any]:
    """With its flag and numbers as vLLM reads them. :raises ValueError: or another exception: vLLM refuses it."""
    for name, kind in (("stream", _FLAG), ("n", _NUMBER), ("max_tokens", _NUMBER), ("max_completion_tokens", _NUMBER)):
        if name in body:
            body[name] = kind.validate_python(body[name])
    if not isinstance(body.get("model", ""), str):
        raise ValueError("no name of a model")
    body.get("model", "").encode()
    prompts, tokens, choices = len(prompts_of(body)), tokens_of(body), int(body.get("n") or 1)
    kinds = {type(prompt) for prompt in prompts_of(body)}
    if (
        min(prompts, tokens, choices) < 1
        or prompts * tokens * choices > _MOST_TOKENS
        or len(kinds) > 1
        or not kinds <= {str, list}
    ):
        raise ValueError("not a request that can be computed")
    (body.get("stream_options") or {}).get("include_usage")
    return dict(body)


def tokens_of(body: dict[str, Any]) -> int:
    """How many tokens it is asked for."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)


def prompts_of(body: dict[str, Any]) -> list[Any]:
    prompt = body.get("prompt", "")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return list(prompt) if several else [prompt]


def children(seen: Seen) -> list[str]:
    """The ids of its requests, as vLLM makes them."""
    given = seen.headers["x-request-id"]
    if seen.path.endswith("chat/completions"):
        ids = [f"chatcmpl-{given}"]
    else:
        ids = [f"cmpl-{given}-{number}" for number in range(len(prompts_of(seen.body)))]
    n = int(seen.body.get("n") or 1)
    return ids if n == 1 else [f"{choice}_{one}" for one in ids for choice in range(n)]


def usage_of(seen: Seen, how: Behaviour) -> dict[str, Any]:
    prompts = prompts_of(seen.body)
    count = sum(len(prompt) for prompt in prompts) or 7
    made = tokens_of(seen.body) * len(prompts) * int(seen.body.get("n") or 1)
    usage: dict[str, Any] = {"prompt_tokens": count, "completion_tokens": made, "total_tokens": count + made}
    if how.cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": how.cached}
    return usage


def whole(seen: Seen, how: Behaviour) -> dict[str, Any]:
    """The answer to a request without a stream."""
    chat = seen.path.endswith("chat/completions")
    text = "".join(f"t{number} " for number in range(tokens_of(seen.body)))
    choices: list[dict[str, Any]] = []
    for index in range(len(prompts_of(seen.body)) * int(seen.body.get("n") or 1)):
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices.append({"index": index, **said, "finish_reason": "length"})
    answer: dict[str, Any] = {
        "id": ("chatcmpl-" if chat else "cmpl-") + seen.headers.get("x-request-id", "none"),
        "object": "chat.completion" if chat else "text_completion",
        "created": 1,
        "model": seen.body.get("model", "stub"),
        "choices": choices,
        "usage": usage_of(seen, how),
    }
    params = seen.params or {}
    if how.hands_over and set(SIX_KEYS) <= params.keys() and params["do_remote_decode"]:
        answer["kv_transfer_params"] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": "p0",
            "remote_request_id": answer["id"],
            "remote_host": "10.0.0.1",
            "remote_port": 20000,
            "layerflow": {"v": 1, "xfer": answer["id"]},
        }
    return answer


def stream_events(seen: Seen, how: Behaviour) -> Iterator[bytes]:
    """Every event of a stream, as vLLM sends it."""
    chat = seen.path.endswith("chat/completions")
    base = {
        "id": ("chatcmpl-" if chat else "cmpl-") + seen.headers.get("x-request-id", "none"),
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1,
        "model": seen.body.get("model", "stub"),
    }

    def event(**more: Any) -> bytes:
        return b"data: " + json.dumps({**base, **more}).encode() + b"\n\n"

    indices = range(len(prompts_of(seen.body)) * int(seen.body.get("n") or 1))
    if chat:
        for index in indices:
            delta = {"role": "assistant", "content": ""}
            yield event(choices=[{"index": index, "delta": delta, "finish_reason": None}])
    count = tokens_of(seen.body)
    for number in range(count):
        finish = "length" if number == count - 1 and how.finish else None
        for index in indices:
            said: dict[str, Any] = {"delta": {"content": f"t{number} "}} if chat else {"text": f"t{number} "}
            yield event(choices=[{"index": index, **said, "finish_reason": finish}])
    if (seen.body.get("stream_options") or {}).get("include_usage"):
        yield event(choices=[], usage=usage_of(seen, how))
    if how.done:
        yield b"data: [DONE]\n\n"


def _pieces(events: Iterator[bytes], per_write: int) -> Iterator[tuple[bytes, int]]:
    """Writes, with how many events end in each. 0: cut at odd places."""
    if per_write == 1:
        for event in events:
            yield event, 1
        return
    if per_write:
        batch: list[bytes] = []
        for event in events:
            batch.append(event)
            if len(batch) == per_write:
                yield b"".join(batch), len(batch)
                batch = []
        if batch:
            yield b"".join(batch), len(batch)
        return
    rest, size = b"", 7
    for event in events:
        rest += event
        while len(rest) > size:
            yield rest[:size], rest[:size].count(b"\n\n")
            rest, size = rest[size:], 7 + (size * 31) % 211
    if rest:
        yield rest, rest.count(b"\n\n")


def main() -> None:
    """``python -m layerflow_testing.stub_engine first_s=0.03``: serve until killed; the first line says where."""
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    with StubEngine(Behaviour(**{name: float(value) for name, value in given.items()})) as engine:
        print(engine.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
