"""A list of prompts as one request per prompt, whose answers become one answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.body import NOT_JSON
from layerflow.proxy.outlet import ClientGone, ClientResponse, Outlet
from layerflow.proxy.request import ClientRequest, Headers
from layerflow.proxy.sse import DONE, Event, make_event

_AT_ONCE = 64  # prompts of one list on their way
Serve = Callable[[ClientRequest, Outlet], Awaitable[None]]


async def serve_list(request: ClientRequest, response: ClientResponse, serve: Serve) -> None:
    """Serve each prompt; the first one that fails ends all.

    :raises ProxyError: one failed.
    """
    merged = _Merged(request, response)
    waiting = iter(enumerate(request.prompts))
    ended: ProxyError | ClientGone | None = None

    async def serve_in_turn() -> None:
        nonlocal ended
        try:
            for number, prompt in waiting:
                part = request.with_prompt(prompt, f"{request.request_id}-{number}")
                await serve(part, _Part(merged, number))
        except (ProxyError, ClientGone) as error:
            ended = ended or error
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for _ in range(min(_AT_ONCE, len(request.prompts))):
            tasks.start_soon(serve_in_turn)
    if ended is not None:
        raise ended
    await merged.finish()


class _Merged:
    """The answers so far. A prompt's choices follow those of the prompts before it."""

    def __init__(self, request: ClientRequest, response: ClientResponse) -> None:
        self.response = response
        self._request, self._choices = request, request.choices
        self._turn = anyio.Lock()  # the first events of two prompts may come at once
        self._usage: dict[str, Any] | None = None
        self._usage_event: dict[str, Any] | None = None
        self._wholes: dict[int, tuple[dict[str, Any], Headers]] = {}

    async def events(self, number: int, events: Sequence[Event], headers: Headers) -> None:
        passed = [event for event in map(lambda one: self._renumbered(number, one), events) if event is not None]
        if passed:
            async with self._turn:
                await anyio.lowlevel.checkpoint_if_cancelled()  # see decode(): cancelled while it waited for its turn
                await self.response.events(passed, headers)

    def whole(self, number: int, answer: dict[str, Any], headers: Headers) -> None:
        self._wholes[number] = answer, headers

    async def finish(self) -> None:
        """Every prompt has its answer."""
        if not self._request.stream:
            await self.response.whole(self._whole(), self._wholes[0][1])
            return
        last = [make_event(DONE)]
        if self._usage_event is not None:
            last.insert(0, make_event(msgspec.json.encode({**self._usage_event, "usage": self._usage})))
        await self.response.events(last, [])

    def _renumbered(self, number: int, event: Event) -> Event | None:
        if event.data is None:
            return event
        if event.data == DONE:
            return None
        try:
            chunk = self._named(number, msgspec.json.decode(event.data))
        except NOT_JSON as error:
            raise UpstreamError(f"a decode engine sent an event that cannot be read: {error}") from None
        if chunk.get("choices") or not chunk.get("usage"):
            return make_event(msgspec.json.encode(chunk))
        self._usage_event = chunk
        self._usage = _sum(self._usage, chunk["usage"])
        return None

    def _named(self, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        first = number * self._choices
        choices = [{**choice, "index": choice.get("index", 0) + first} for choice in answer.get("choices", [])]
        return {**answer, "id": f"cmpl-{self._request.request_id}", "choices": choices}

    def _whole(self) -> dict[str, Any]:
        answers = [self._named(number, self._wholes[number][0]) for number in sorted(self._wholes)]
        usage: dict[str, Any] | None = None
        for answer in answers:
            if answer.get("usage"):
                usage = _sum(usage, answer["usage"])
        choices = [choice for answer in answers for choice in answer["choices"]]
        merged = {name: value for name, value in answers[0].items() if name != "kv_transfer_params"}
        return {**merged, "choices": choices} | ({"usage": usage} if usage else {})


class _Part:
    """The outlet of one prompt."""

    def __init__(self, merged: _Merged, number: int) -> None:
        self._merged, self._number = merged, number

    @property
    def begun(self) -> bool:
        return self._merged.response.begun

    async def events(self, events: Sequence[Event], headers: Headers) -> None:
        await self._merged.events(self._number, events, headers)

    async def whole(self, answer: dict[str, Any], headers: Headers) -> None:
        self._merged.whole(self._number, answer, headers)


def _sum(total: dict[str, Any] | None, usage: dict[str, Any]) -> dict[str, Any]:
    """Numbers added, also inside details."""
    added = dict(total or {})
    for name, value in usage.items():
        if isinstance(value, dict):
            added[name] = _sum(added.get(name) or {}, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            added[name] = (added.get(name) or 0) + value
        else:
            added.setdefault(name, value)
    return added
