"""One prompt on its way through the proxy, and the calls that every order makes for it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, NamedTuple

import structlog

from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.answers import ResponseSink
from layerflow.proxy.context import ProxyContext, RequestRoute, TokenEstimate
from layerflow.proxy.instances import Instance, InstanceRole, digests, prompt_bytes, prompt_head
from layerflow.proxy.legs import DecodeCall, Prefilled, PrefillUsage, decode, engine_headers, prefill, prefill_body
from layerflow.proxy.request import CHAT, ClientRequest, only_prompt

RECOMPUTED = "recomputed"
_RETRIES = 1  # of a prefill, with [proxy] on_prefill_failure = retry
_log = structlog.get_logger("layerflow.proxy")


class Exchange:
    """A request, or one prompt of its list.

    :param sink: where the answer goes.
    :param head: of the request, where it is known: its JSON is built once for all prompts of a list.
    """

    def __init__(
        self, context: ProxyContext, request: ClientRequest, sink: ResponseSink, head: bytes | None = None
    ) -> None:
        self.context, self.request, self.sink = context, request, sink
        self._head = prompt_head(request.body) if head is None else head
        self.usage = PrefillUsage()
        self.route = RequestRoute.APART.value
        prompt = request.prompts[0] if request.prompts else only_prompt(request.body.raw("prompt"))
        self.beginnings = digests(prompt_bytes(request.body, prompt, self._head))  # of a list's first prompt
        self._sizes = _sizes(request, prompt)
        self.tokens = self._sizes.tokens(context.estimate)
        self._began = context.clock()
        self._prefilled_at: float | None = None
        self._sent: dict[tuple[InstanceRole, str], int] = {}
        self._answer_read: Callable[[], None] = lambda: None  #: ends the decoder's stay of being busy
        self._unforeseen: dict[InstanceRole, set[Instance]] = {}  #: engines that answered it with 500

    def child(self, prompt: bytes | None, *, counted: bool) -> Exchange:
        """What a decoder asks for by itself: one prompt of the list, or one of several choices.

        :param prompt: of its list; None = the only one.
        :param counted: its cached tokens belong in the usage, which counts a prompt once.
        """
        request = self.request if prompt is None else self.request.with_prompt(prompt, self.request.request_id)
        child = Exchange(self.context, request, self.sink, self._head)
        if counted:
            child.usage = self.usage
        return child

    def pick(self, role: InstanceRole, tried: Collection[Instance] = ()) -> Instance:
        """:raises ProxyError: 503, no engine can take it."""
        wanted = self.request.header(b"x-prefiller-host-port") if role is InstanceRole.PREFILL else None
        return self.context.instances.pick(role, self.beginnings, self.tokens, tried, wanted)

    def leg_id(self, role: InstanceRole, base: str | None = None) -> str:
        """The engine's request id: `base`, or the client's; another when it is asked again: the first may still run.

        A prompt of a list has its number behind a dash: no leg has another prompt's id.
        """
        base = base or self.request.request_id
        number = self._sent.get((role, base), 0)
        self._sent[role, base] = number + 1
        return f"{base}.r{number}" if number else base

    @property
    def prefill_retries(self) -> int:
        """How often a prefill that failed is tried elsewhere."""
        return _RETRIES if self.context.settings.on_prefill_failure == "retry" else 0

    def prefill_ended(self) -> None:
        """From now on the decoder's first token is what the hand-off takes."""
        self._prefilled_at = self.context.clock()

    async def prefill(self, instance: Instance, params: Mapping[str, Any], request_id: str) -> Prefilled:
        """Compute the prompt there.

        :param params: its ``kv_transfer_params``.
        :raises UpstreamError: it failed or refused.
        """
        context = self.context
        headers = engine_headers(self.request.headers, request_id)
        body = prefill_body(self.request.body, params)
        # Computed once more, for another decoder, the prompt is cached: what the first time has found is what counts.
        usage = self.usage if self._prefilled_at is None else PrefillUsage()
        usage.expect()
        cached, began = None, context.clock()
        try:
            with instance.busy(self.tokens):
                done = await prefill(instance, self.request.path, body, headers, context.settings)
            cached = done.cached_tokens
        except UpstreamError as error:
            self.failed(instance, error)
            raise
        finally:
            usage.prefill_ended(cached)
        instance.tell_servers(done.servers)
        self.prefill_ended()
        context.metrics.prefill.observe(context.clock() - began)
        context.metrics.cached_tokens.inc(cached or 0)
        context.instances.prefixes.record(self.beginnings, instance)
        if self._sizes.text_bytes and not self._sizes.media and done.prompt_tokens:
            context.estimate.learn(self._sizes.text_bytes, done.prompt_tokens)
        return done

    async def prefill_anywhere(self, params: Mapping[str, Any], next_id: Callable[[], str]) -> Prefilled:
        """Compute the prompt at one engine, or where that fails and `on_prefill_failure` says so at another.

        :param next_id: the request's id at the next engine.
        :raises ProxyError: the last one's failure; or no engine can take it.
        """
        tried: list[Instance] = []
        failure: UpstreamError | None = None
        while True:
            try:
                instance = self.pick(InstanceRole.PREFILL, tried)
            except ProxyError as none:
                raise failure or none from None
            try:
                return await self.prefill(instance, params, next_id())
            except UpstreamError as error:
                tried.append(instance)
                if error.rejected or len(tried) > self.prefill_retries:
                    raise
                failure = error
            self.context.metrics.retries.labels(InstanceRole.PREFILL.value).inc()

    async def decode(self, instance: Instance, params: Mapping[str, Any] | None, request_id: str) -> None:
        """Pass that engine's answer on to the client.

        :param params: its ``kv_transfer_params``; None = it computes the prompt.
        :raises UpstreamError: it failed or refused.
        """
        request = self.request
        body = request.body if params is None else request.body.changed({"kv_transfer_params": params})
        headers = engine_headers(request.headers, request_id)
        call = DecodeCall(request.path, body.encode(), headers, request.stream, params is not None)

        def first_token() -> None:
            if not request.stream:  # it is whole, and waits for its client only
                self._answer_read()
            self._first_token(instance)

        await decode(
            instance, call, self.sink, usage=self.usage, settings=self.context.settings, first_token=first_token
        )

    async def decode_anywhere(self, attempt: Callable[[Instance, str], Awaitable[None]]) -> None:
        """Try decoders until one has begun to answer.

        :param attempt: one try, with the engine and the request's id there.
        :raises ProxyError: the last one's failure; or no engine can take it.
        """
        tried: list[Instance] = []
        failure: UpstreamError | None = None
        while True:
            try:
                instance = self.pick(InstanceRole.DECODE, tried)
            except ProxyError as none:
                raise failure or none from None
            try:
                with instance.busy(self.tokens) as self._answer_read:
                    return await attempt(instance, self.leg_id(InstanceRole.DECODE))
            except UpstreamError as error:
                self.failed(instance, error)
                tried.append(instance)
                if self.sink.begun or error.rejected or len(tried) >= self.context.settings.attempts:
                    raise
                failure = error
            self.context.metrics.retries.labels(InstanceRole.DECODE.value).inc()

    async def decode_alone(self) -> None:
        """A decoder computes the prompt by itself."""

        async def attempt(instance: Instance, request_id: str) -> None:
            await self.decode(instance, None, request_id)

        await self.decode_anywhere(attempt)

    async def recompute(self, reason: ProxyError) -> None:
        """The prefill is lost; a decoder computes the prompt, unless that would hold up all others in its batch.

        :raises ProxyError: 503, the prompt is too long for that.
        """
        most = self.context.settings.max_recompute_tokens
        if self.tokens > most:
            raise ProxyError(
                f"the prefill was lost ({reason}) and the prompt, about {self.tokens} tokens, is longer than the "
                f"{most} that a decoder computes (proxy.max_recompute_tokens); try again later",
                503,
            ) from reason
        self.route = RECOMPUTED
        self.context.metrics.recomputed.inc()
        _log.warning("prompt_recomputed", request=self.request.request_id, tokens=self.tokens, reason=str(reason))
        await self.decode_alone()

    def failed(self, instance: Instance, error: UpstreamError) -> None:
        """Count and log a call that an engine failed or refused."""
        if error.status == 500 and error.counts:
            engines = self._unforeseen.setdefault(instance.role, set())
            engines.add(instance)
            for one in engines if len(engines) == 2 else {instance} if len(engines) > 2 else ():
                one.breaker.forgive()
        role = instance.role.value
        self.context.metrics.failures.labels(role, instance.name, str(error.status)).inc()
        log = _log.info if error.rejected else _log.warning
        told = {"request": self.request.request_id, "role": role, "url": instance.url}
        log("leg_failed", **told, status=error.status, reason=str(error))

    def _first_token(self, instance: Instance) -> None:
        context = self.context
        now = context.clock()
        context.metrics.first_token.labels(self.route).observe(now - self._began)
        if self._prefilled_at is not None:
            context.metrics.handoff.observe(now - self._prefilled_at)
        if self.route != RECOMPUTED and self.request.stream:
            context.short_prompts.learn(self.tokens, RequestRoute(self.route), now - self._began)
        context.instances.prefixes.record(self.beginnings, instance)


# How long a prompt is, before an engine has counted it.


MEDIA_TOKENS = 1024
"""What a picture, a sound or a film counts for; engines make some hundreds to some thousands of tokens of one."""
_SEARCHED_BYTES = 512 << 10
"""Of a chat's text that is searched for them; the expression takes up to 0.2 us a byte. They are passed over."""
_MEDIA = re.compile(rb'"(?:(?:image|audio|video)_(?:url|embeds|pil)|input_(?:audio|image)|file)"\s*:\s*')


class _Sizes(NamedTuple):
    """What a prompt is made of.

    :param text_bytes: of JSON. :param counted: tokens that came as numbers. :param media: pictures, sounds, films.
    """

    text_bytes: int = 0
    counted: int = 0
    media: int = 0

    def tokens(self, estimate: TokenEstimate) -> int:
        text = estimate.tokens(self.text_bytes) if self.text_bytes else 0
        return self.counted + text + self.media * MEDIA_TOKENS


def _sizes(request: ClientRequest, prompt: bytes) -> _Sizes:
    """How long its prompts are.

    :param prompt: the only one, or the first one.
    """
    if request.path == CHAT:
        return _sizes_of_messages(request.body.raw("messages"))
    nbytes = tokens = 0
    for one in request.prompts or [prompt]:
        if one[:1] == b'"':
            nbytes += len(one) - 2
        elif one[:1] == b"[":
            tokens += one.count(b",") + (one[1:-1].strip() != b"")
    return _Sizes(nbytes, tokens)


def _sizes_of_messages(messages: bytes) -> _Sizes:
    """Of a chat. Its pictures are no text: in base64 they would count for a thousand times their tokens."""
    text_bytes, media, place, left = len(messages), 0, 0, _SEARCHED_BYTES
    while left > 0 and (found := _MEDIA.search(messages, place, place + left)) is not None:
        begin = found.end()
        left -= begin - place
        place = begin
        # A flat object, or a text: neither URLs nor base64 have its end in them.
        closing = {b"{": b"}", b'"': b'"'}.get(messages[begin : begin + 1])
        if closing is not None:
            end = messages.find(closing, begin + 1)
            if end < 0:
                break
            media += 1
            text_bytes -= end + 1 - begin
            place = end + 1
    return _Sizes(text_bytes, media=media)
