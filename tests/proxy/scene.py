"""A proxy in this test's event loop, in front of stub engines on threads of their own."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from layerflow.config.proxy import ProxySettings
from layerflow.proxy.context import BodyBudget, BodyShare
from layerflow.proxy.serve import serve_proxy
from layerflow_testing.ports import HeldPort
from layerflow_testing.stub_engine import Seen, StubEngine

TOKEN = "an operator's"
OPERATOR = {"authorization": f"Bearer {TOKEN}"}
ORDERS = ("concurrent", "prefill-first", "decode-first")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROOM = BodyShare(BodyBudget(1 << 30))
_NOBODY = HeldPort()
GONE = _NOBODY.url  # bound for as long as this module is there, and nobody listens


@dataclass
class Scene:
    url: str
    client: httpx.AsyncClient
    shutdown: anyio.Event
    at_once: anyio.Event

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post(
            COMPLETIONS, json={"model": "stub", "prompt": "a prompt", "max_tokens": 3, **body}
        )

    async def metric(self, name: str) -> float:
        text = (await self.client.get("/metrics")).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


@asynccontextmanager
async def proxied(prefill: Any, decode: Any, **settings: Any) -> AsyncIterator[Scene]:
    """`prefill`, `decode`: stub engines or addresses, one or several. Short prompts are prefilled apart too."""
    given = {"short_prompt_tokens": 0, "port": 0, "probe_interval_s": 0.02, "connect_timeout_s": 30}
    given |= {"admin_token": TOKEN, "admin_socket": "", **settings}
    wanted = ProxySettings(prefill=addresses(prefill), decode=addresses(decode), **given)
    shutdown, at_once, told = anyio.Event(), anyio.Event(), anyio.Event()
    urls: list[str] = []

    def started(url: str) -> None:
        urls.append(url)
        told.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_proxy, wanted, started, shutdown, at_once)
        await told.wait()
        async with httpx.AsyncClient(base_url=urls[0], timeout=60, trust_env=False, verify=False) as client:
            try:
                yield Scene(urls[0], client, shutdown, at_once)
            finally:
                shutdown.set()
                at_once.set()


def addresses(engines: Any) -> str:
    listed = engines if isinstance(engines, list | tuple) else [engines]
    return ", ".join(one.url if isinstance(one, StubEngine) else one for one in listed)


def events_of(text: str) -> list[Any]:
    """The data of each event; ``[DONE]`` as text."""
    found = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def said(text: str, index: int = 0) -> str:
    """What one choice says in a stream."""
    pieces = []
    for event in events_of(text):
        for choice in event["choices"] if event != "[DONE]" and "choices" in event else ():
            if choice["index"] == index:
                pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(pieces)


def numbered(count: int) -> str:
    return "".join(f"t{number} " for number in range(count))


async def settled(scene: Scene) -> Any:
    """What ``/health`` says once no request is open: a client may have its answer a moment earlier."""
    with anyio.fail_after(20):
        while (found := (await scene.client.get("/health")).json())["open_requests"]:
            pass
    return found


async def at(engine: StubEngine) -> Seen:
    """The first request that the engine gets."""
    while not engine.seen:  # noqa: ASYNC110 - another thread's list, which has no event
        await anyio.sleep(0.005)
    return engine.seen[0]


async def ended(seen: Seen) -> Seen:
    """The engine's request, once it has ended there."""
    assert await anyio.to_thread.run_sync(seen.ended.wait, 20), "the engine's request goes on"
    return seen
