"""The orders in which prefill and decode engines are asked, and which of them a request takes."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from layerflow.config.proxy import Order
from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.answers import DONE, ClientGone, ClientResponse, Event, ResponseSink, make_event
from layerflow.proxy.context import BodyShare, ProxyContext, RequestRoute
from layerflow.proxy.exchange import Exchange
from layerflow.proxy.hosts import check_hosts
from layerflow.proxy.instances import Instance, InstanceRole, prompt_head
from layerflow.proxy.legs import Prefilled, object_in
from layerflow.proxy.metaserver import DecodeRequest, PrefillJob
from layerflow.proxy.request import NOT_JSON, Body, ClientRequest, Headers, decoder_alone


class _PrefillLost(Exception):
    """A prefill failed before the first token."""

    def __init__(self, reason: ProxyError) -> None:
        super().__init__(str(reason))
        self.reason = reason


# Both legs at once: they share a ``transfer_id``, and the decoder follows the prefiller's saves layer by layer.


_VERSION = 1  # of what stands under "layerflow"


async def concurrent(exchange: Exchange) -> None:
    """Ask both; a prefill that fails before the first token ends both, and is tried again or left to the decoder.

    :raises ProxyError: the decoder failed, one of them refused, or the prompt is too long to be recomputed.
    """
    tried: list[Instance] = []
    failure: UpstreamError | None = None
    while True:
        try:
            prefiller = exchange.pick(InstanceRole.PREFILL, tried)
        except ProxyError as none:
            return await exchange.recompute(failure or none)
        failure = await _attempt_prefill(exchange, prefiller)
        if failure is None:
            return None
        if failure.rejected:
            raise failure
        tried.append(prefiller)
        if len(tried) > exchange.prefill_retries:
            return await exchange.recompute(failure)
        exchange.context.metrics.retries.labels(InstanceRole.PREFILL.value).inc()


async def _attempt_prefill(exchange: Exchange, prefiller: Instance) -> UpstreamError | None:
    """Decode what one prefill engine computes. Returns why that failed, both legs ended; None = it is answered.

    :raises ProxyError: the decode failed.
    """
    lost: UpstreamError | None = None
    ended: ProxyError | ClientGone | None = None
    claimed: dict[str, Any] | None = None
    prefilling = anyio.CancelScope()

    async def prefill_leg(asked: dict[str, Any], scope: anyio.CancelScope) -> None:
        nonlocal lost
        with scope:
            try:
                await exchange.prefill(prefiller, asked, exchange.leg_id(InstanceRole.PREFILL))
            except UpstreamError as error:
                # Once the client has a token the decoder has the whole prompt, and needs no prefill any more.
                if not exchange.sink.begun:
                    lost = error
                    tasks.cancel_scope.cancel()

    async def attempt(instance: Instance, request_id: str) -> None:
        nonlocal claimed, prefilling
        if claimed is None:
            asked, claimed = _handoff(prefiller, exchange.context.settings.prefill_timeout_s)
            prefilling = anyio.CancelScope()
            tasks.start_soon(prefill_leg, asked, prefilling)
        try:
            await exchange.decode(instance, claimed, request_id)
        except UpstreamError as error:
            # Where this decoder is gone, another one may claim the hand-off. One that is there has given it back.
            if not error.untouched:
                claimed = None
                prefilling.cancel()
            raise

    async with anyio.create_task_group() as tasks:
        try:
            await exchange.decode_anywhere(attempt)
        except (ProxyError, ClientGone) as error:
            ended = error
        tasks.cancel_scope.cancel()
    if ended is not None:
        raise ended
    return lost


def _handoff(prefiller: Instance, deadline_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A new hand-off: what the prefill engine is asked, and what its decoder claims."""
    transfer_id = f"xfer-{uuid.uuid4().hex}"
    handoff: dict[str, Any] = {"v": _VERSION, "handoff": transfer_id}
    if prefiller.servers:
        handoff["servers"] = list(prefiller.servers)
    asked = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "layerflow": {"v": _VERSION, "deadline_s": deadline_s},
    }
    claimed = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "layerflow": handoff,
    }
    return asked, claimed


# The decoder is asked first; once it has blocks it asks ``/v1/metaserver`` for the prefill (vLLM-Ascend).


async def decode_first(exchange: Exchange) -> None:
    """Ask a decoder; prefill what its children ask for.

    :raises ProxyError: the decoder failed, one of them refused, or the prompt is too long to be recomputed.
    """

    async def attempt(instance: Instance, request_id: str) -> None:
        await _attempt_decode(exchange, instance, request_id)

    try:
        await exchange.decode_anywhere(attempt)
    except _PrefillLost as lost:
        if isinstance(lost.reason, UpstreamError) and lost.reason.rejected:
            raise lost.reason from None
        await exchange.recompute(lost.reason)


async def _attempt_decode(exchange: Exchange, decoder: Instance, request_id: str) -> None:
    """One request at one decoder, with the prefills of its children; all end together."""
    context, request = exchange.context, exchange.request
    url = await context.metaserver_url(decoder)
    ended: Exception | None = None
    counted: set[int] = set()  # prompts

    async def run_job(prompt: int, posted: dict[str, Any], source: str, job: PrefillJob) -> None:
        nonlocal ended
        child = exchange.child(request.prompts[prompt] if request.prompts else None, counted=prompt not in counted)
        counted.add(prompt)
        try:
            await check_hosts(posted, {*decoder.hosts, source} - {""}, decoder.resolver)
            base_id = f"{request_id}-{prompt}" if request.prompts else request_id
            await child.prefill_anywhere(posted, lambda: exchange.leg_id(InstanceRole.PREFILL, base_id))
        except ProxyError as error:
            job.end(error)
            if not exchange.sink.begun:
                ended = _PrefillLost(error)
                tasks.cancel_scope.cancel()
        else:
            exchange.prefill_ended()
            job.end(None)

    def start(prompt: int, posted: dict[str, Any], source: str, job: PrefillJob) -> None:
        tasks.start_soon(run_job, prompt, posted, source, job)

    async with anyio.create_task_group() as tasks:
        with context.metaserver.expecting(DecodeRequest(request, request_id, start)) as ticket:
            params = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": f"{url}/{ticket}"}
            try:
                await exchange.decode(decoder, params, request_id)
            except (ProxyError, ClientGone) as error:
                ended = error
            tasks.cancel_scope.cancel()
    if ended is not None:
        raise ended


# Two phases: the prefill's answer says where its KV is, and goes to the decoder as it is (NIXL's six keys).


_ASKED: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def prefill_first(exchange: Exchange) -> None:
    """Prefill, then decode with what the prefill answered; without it the decoder computes by itself.

    :raises ProxyError: neither a prefill nor a decode engine could do it, or one of them refused it.
    """
    done: Prefilled | None = None

    async def prefill() -> Prefilled:
        try:
            return await exchange.prefill_anywhere(_ASKED, lambda: exchange.leg_id(InstanceRole.PREFILL))
        except ProxyError as error:
            raise _PrefillLost(error) from error

    async def attempt(instance: Instance, request_id: str) -> None:
        nonlocal done
        done = done or await prefill()
        try:
            await exchange.decode(instance, done.params, request_id)
        except UpstreamError as error:
            if not error.untouched:
                done = None  # as in the other order
            raise

    try:
        done = await prefill()
        await exchange.decode_anywhere(attempt)
    except _PrefillLost as lost:
        if isinstance(lost.reason, UpstreamError) and lost.reason.rejected:
            raise lost.reason from None
        await exchange.recompute(lost.reason)


# A list of prompts as one request per prompt, whose answers become one answer.


_AT_ONCE = 64  # prompts of one list on their way
_MERGED = ("choices", "usage", "kv_transfer_params")  # of a whole answer, what is not the first one's
_decode_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_decode_index = msgspec.json.Decoder(int | None).decode
Serve = Callable[[ClientRequest, ResponseSink], Awaitable[None]]


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
                await serve(part, _PromptSink(merged, number))
        except (ProxyError, ClientGone) as error:
            ended = ended or error
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for _ in range(min(_AT_ONCE, len(request.prompts))):
            tasks.start_soon(serve_in_turn)
            # Each prompt is prepared in a turn of the loop of its own: other requests have theirs between.
            await anyio.lowlevel.checkpoint()
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
        self._wholes: dict[int, tuple[bytes, BodyShare]] = {}  #: the JSON of each prompt's choices, and what it keeps
        self._beside: tuple[bytes, Headers] = b"{}", ()  #: of the first one's answer

    async def events(
        self, number: int, events: Sequence[Event], headers: Headers, *, begins: Callable[[], None]
    ) -> None:
        """Pass on the next events of one prompt.

        :param begins: called when the client is about to get the first byte of them.
        """
        passed = [event for event in map(lambda one: self._renumbered(number, one), events) if event is not None]
        if passed:
            async with self._turn:
                await anyio.lowlevel.checkpoint_if_cancelled()  # see decode(): cancelled while it waited for its turn
                begins()
                await self.response.events(passed, headers)

    def whole(self, number: int, answer: Body, headers: Headers, kept: BodyShare) -> None:
        """:raises UpstreamError: its choices cannot be read."""
        first = number * self._choices
        try:
            choices = [
                Body(choice).changed({"index": (_decode_index(choice.get("index", b"null")) or 0) + first}).encode()
                for choice in _decode_choices(answer.view("choices"))
            ]
        except NOT_JSON as error:
            raise UpstreamError(f"a decode engine sent choices that cannot be read: {error}") from None
        if usage := object_in(answer, "usage"):
            self._usage = _sum(self._usage, usage)
        if number == 0:
            self._beside = answer.changed({"id": self._id}, _MERGED).encode(), headers
        self._wholes[number] = b",".join(choices), kept

    async def finish(self) -> None:
        """Every prompt has its answer."""
        if not self._request.stream:
            beside, headers = self._beside
            begin, end = beside[:-1] + b',"choices":[', b"]}"
            if self._usage:
                end = b'],"usage":' + msgspec.json.encode(self._usage) + b"}"
            length = len(begin) + sum(len(choices) + 1 for choices, _ in self._wholes.values()) - 1 + len(end)
            await self.response.json(200, length, self._pieces(begin, end), headers)
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
        choices = [{**choice, "index": (choice.get("index") or 0) + first} for choice in answer.get("choices", [])]
        return {**answer, "id": self._id, "choices": choices}

    @property
    def _id(self) -> str:
        return f"cmpl-{self._request.request_id}"

    def _pieces(self, begin: bytes, end: bytes) -> Iterator[bytes]:
        """The one answer. Each prompt's choices are let go of when the next piece is asked for."""
        yield begin
        for number in sorted(self._wholes):
            choices, kept = self._wholes.pop(number)
            if number:
                yield b","
            yield choices
            kept.end()
        yield end


class _PromptSink:
    """The outlet of one prompt. What the client has of the others says nothing of this one, which may start again."""

    def __init__(self, merged: _Merged, number: int) -> None:
        self._merged, self._number = merged, number
        self.room = merged.response.room.part()
        self._begun = False

    @property
    def begun(self) -> bool:
        return self._begun

    async def events(self, events: Sequence[Event], headers: Headers) -> None:
        await self._merged.events(self._number, events, headers, begins=self._begins)

    async def whole(self, answer: Body, headers: Headers, kept: BodyShare) -> None:
        self._merged.whole(self._number, answer, headers, kept)
        self._begins()

    def _begins(self) -> None:
        self._begun = True


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


_ORDERS: Mapping[Order, Callable[[Exchange], Awaitable[None]]] = {
    "concurrent": concurrent,
    "prefill-first": prefill_first,
    "decode-first": decode_first,
}


async def serve(context: ProxyContext, request: ClientRequest, response: ClientResponse) -> None:
    """Answer a request.

    A list of prompts has a hand-off for each. A decoder that asks for its prefills (decode-first) asks for each by
    itself, so that it takes the list as it is; in the other orders the proxy sends one request per prompt.

    :raises ProxyError: it cannot be answered.
    """
    head = prompt_head(request.body)

    async def serve_prompt(part: ClientRequest, sink: ResponseSink) -> None:
        await _serve_prompt(context, part, sink, head)

    apart = request.prompts and context.settings.order != "decode-first" and decoder_alone(request.body) is None
    if apart:
        await serve_list(request, response, serve_prompt)
    else:
        await serve_prompt(request, response)


async def _serve_prompt(context: ProxyContext, request: ClientRequest, sink: ResponseSink, head: bytes) -> None:
    exchange = Exchange(context, request, sink, head)
    reason = decoder_alone(request.body)
    if reason is None and context.short_prompts.choose(exchange.tokens) is RequestRoute.ALONE:
        reason = "short"
    if reason is None:
        await _ORDERS[context.settings.order](exchange)
        return
    context.metrics.skipped.labels(reason).inc()
    exchange.route = RequestRoute.ALONE.value
    await exchange.decode_alone()
