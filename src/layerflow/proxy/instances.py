"""The engines behind the proxy: who they are, who is well, who gets the next request."""

from __future__ import annotations

import itertools
import ssl
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec
import structlog
import xxhash

from layerflow.config.proxy import InstanceAddress, ProxySettings
from layerflow.errors import ProxyError, UpstreamError
from layerflow.http_client import TRUST_ENVIRONMENT
from layerflow.proxy.hosts import Resolver
from layerflow.proxy.request import NOT_JSON, Body, Headers

# A circuit breaker: an engine that fails again and again is left alone for a while.
#
# Only what speaks against the engine counts: 5xx, broken connections, silence. A request that it refuses (4xx) does
# not. A 500 may be the request's fault: engines answer so what they did not foresee. One that two engines answer so
# speaks against neither, and who has failed in no other way is left alone only while another engine can take requests.


_UNFORESEEN = 500


class BreakerState(Enum):
    """What an engine is given: all requests, none, or one that tries it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """One engine's circuit breaker. The proxy's event loop owns it.

    :param failures: so many in a row open it.
    :param open_s: how long it stays open before one request may try the engine.
    :param clock: monotonic seconds.
    """

    def __init__(self, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._most, self._open_s, self._clock = failures, open_s, clock
        self._failed = 0  #: in a row
        self._unanswered = 0  #: of these, how many were no 500
        self._until = 0.0  #: open until then; meaningful while `_failed` has reached `_most`
        self._trials = 0  #: requests of the half-open state on their way
        self._tried_at = 0.0  #: when the last of them was sent; meaningful while there are any

    @property
    def state(self) -> BreakerState:
        if self._failed < self._most:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._until else BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now.

        A trial that goes on says nothing yet, and may take as long as a request may: each `open_s` there is another.
        """
        state = self.state
        if state is not BreakerState.HALF_OPEN:
            return state is BreakerState.CLOSED
        return not self._trials or self._clock() - self._tried_at >= self._open_s

    @property
    def answers(self) -> bool:
        """Whether all that it failed in a row it answered with 500."""
        return not self._unanswered

    def forgive(self) -> None:
        """A failure that was counted was the request's fault."""
        self._failed = max(0, self._failed - 1)

    @contextmanager
    def watch(self) -> Iterator[Callable[[], None]]:
        """Around one call to the engine: learns how it ended. A call that is cancelled says nothing of the engine.

        Yields a call that says that the answer has begun: that of a trial lets all requests to the engine again, until
        its next failure.
        """
        trial = self.state is BreakerState.HALF_OPEN
        if trial:
            self._trials += 1
            self._tried_at = self._clock()

        def answered() -> None:
            # Elsewhere it forgives nothing: an engine may begin every answer, and break off in all of them.
            if trial:
                self._failed, self._unanswered = min(self._failed, self._most - 1), 0

        try:
            yield answered
        except UpstreamError as error:
            if error.counts:
                self._failed += 1
                self._unanswered += error.status != _UNFORESEEN
                self._until = self._clock() + self._open_s
            elif error.rejected:
                self._failed = self._unanswered = 0
            raise
        else:
            self._failed = self._unanswered = 0
        finally:
            if trial:
                self._trials -= 1


# vLLM's API server closes connections that were idle for 5 s; ours go before, so that none closes under a request.
KEEPALIVE_S = 3.0
KEEPALIVE_CONNECTIONS = 256


class InstanceRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Instance:
    """An engine, reached over HTTP.

    :param role: what the proxy sends it.
    :param name: what clients are told of it, who are not told its address.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        role: InstanceRole,
        name: str,
        address: InstanceAddress,
        settings: ProxySettings,
        clock: Callable[[], float],
    ) -> None:
        self.role, self.name, self.url = role, name, address.url
        self.configured_servers = address.servers
        self._told_servers: tuple[str, ...] = ()
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s, clock)
        self.down = False  #: the probes say so
        self.generation = 0  #: grows each time it goes down: what it had cached is gone then
        self.active = 0  #: requests on their way
        self.tokens = 0  #: prompt tokens of these
        self.seen_from: str | None = None  #: this machine's address as the engine sees it; None = not asked yet
        self.last_picked = 0  #: the number of the pick; settles ties
        self.resolver = Resolver()  #: of hosts that it posts
        self._waiting: set[anyio.CancelScope] = set()
        # No client of httpx: it would keep the cookies of one client's answer and send them with the next client's
        # request.
        self.transport: httpx.AsyncBaseTransport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=KEEPALIVE_CONNECTIONS,
                keepalive_expiry=KEEPALIVE_S,
            ),
            verify=ssl.create_default_context() if address.url.startswith("https:") else False,
            trust_env=TRUST_ENVIRONMENT,
        )
        self._timeout = httpx.Timeout(None, connect=settings.connect_timeout_s).as_dict()

    @property
    def title(self) -> str:
        """What errors call it."""
        return f"{self.role.value} engine {self.name}"

    @property
    def hosts(self) -> set[str]:
        """Names and addresses of its host, as configured."""
        return {urlsplit(address).hostname or "" for address in (self.url, *self.configured_servers)} - {""}

    @property
    def servers(self) -> tuple[str, ...]:
        """Control addresses of the layerflow servers that it saves through: as configured, else as it told last."""
        return self.configured_servers or self._told_servers

    def tell_servers(self, servers: tuple[str, ...]) -> None:
        """Note the servers that an engine's answer has named; () = it has named none."""
        self._told_servers = servers or self._told_servers

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Headers = (),
        extensions: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        """Send a request. The body of the response is not read yet; close it.

        :param path: with the query.
        :raises httpx.HTTPError: the engine cannot be reached, or breaks off.
        """
        request = httpx.Request(
            method,
            self.url + path,
            content=body,
            headers=list(headers),
            extensions={"timeout": self._timeout, **(extensions or {})},
        )
        return await self.transport.handle_async_request(request)

    async def fetch(self, method: str, path: str, most: int, headers: Headers = ()) -> tuple[httpx.Response, bytes]:
        """A response with its body, of which more than `most` bytes are not read.

        :raises httpx.HTTPError: the engine cannot be reached, or breaks off.
        """
        response = await self.ask(method, path, headers=headers)
        content = bytearray()
        try:
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > most:
                    break
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()
        return response, bytes(content)

    async def close(self) -> None:
        """Close its connections."""
        await self.transport.aclose()

    def __repr__(self) -> str:
        return f"<{self.name} {self.url} {self.state} active={self.active} tokens={self.tokens}>"

    @property
    def state(self) -> str:
        """``up``, ``down`` (says the probe), ``open`` or ``half-open`` (says the breaker)."""
        if self.down:
            return "down"
        return "up" if self.breaker.state.value == "closed" else self.breaker.state.value

    @property
    def usable(self) -> bool:
        return not self.down and self.breaker.allows

    @property
    def last_resort(self) -> bool:
        """Whether it may be asked where no engine is usable: it is there, and has answered, if with errors."""
        return not self.down and self.breaker.answers

    @contextmanager
    def busy(self, tokens: int) -> Iterator[Callable[[], None]]:
        """Around one request's stay, of `tokens` prompt tokens.

        Yields a call that ends it: the engine's answer has been read, and waits for its client only.
        """
        self.active += 1
        self.tokens += tokens
        here = True

        def end() -> None:
            nonlocal here
            if here:
                here = False
                self.active -= 1
                self.tokens -= tokens

        try:
            yield end
        finally:
            end()

    @contextmanager
    def given_up_when_down(self) -> Iterator[Callable[[], None]]:
        """Around a wait for the engine's answer, which ends as failed when the probes find the engine down.

        Yields a call that ends this watch: an answer that has begun to arrive has deadlines of its own.

        :raises UpstreamError: it went down meanwhile.
        """
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield lambda: self._waiting.discard(scope)
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise UpstreamError(f"{self.title} stopped answering its health probes", 504)

    def went_down(self) -> None:
        """The probes found it down: calls that wait for its answer fail now, not at their deadline."""
        self.down = True
        self.generation += 1
        self._told_servers = ()
        for scope in list(self._waiting):
            scope.cancel()

    def describe(self, *, addresses: bool) -> dict[str, Any]:
        """For ``/health``.

        :param addresses: tell them, too.
        """
        told = {"name": self.name, "state": self.state, "active": self.active}
        return {**told, "url": self.url, "servers": list(self.servers)} if addresses else told


# Who computed which beginnings of prompts: a bounded table of hashed prefixes.
#
# A prompt's bytes are cut into blocks of 1 KiB. Each block has a digest over itself and all before it, so one number
# stands for a whole beginning. Least recently used beginnings are forgotten first.


BLOCK_BYTES = 1024
MAX_BLOCKS = 1024
_MOST_BYTES = MAX_BLOCKS * BLOCK_BYTES
_BUILT_BYTES = 256 << 10
"""Of JSON, whose values the loop builds: 2 ms of a usual conversation."""
_BLANKS = b" \t\r\n"
_LONGEST_ESCAPE = 12  # bytes of JSON for one character: two surrogates
MAX_HOLDERS = 4
"""Engines that are remembered for one beginning: more of them would not make a pick better."""


def prompt_head(body: Body) -> bytes:
    """What :func:`prompt_bytes` begins with: the same for every prompt of a request's list."""
    return b"".join(_canonical(body.raw(name)) for name in ("model", "cache_salt", "tools"))


def prompt_bytes(body: Body, prompt: bytes, head: bytes) -> bytes:
    """What decides a prompt's KV, as bytes: the same beginning of a prompt gives the same beginning of bytes.

    At most what :func:`digests` looks at, whatever the prompt's length.

    :param body: a completion, or a chat completion.
    :param prompt: the JSON of its prompt, or of the first one of its list.
    :param head: of the request; see :func:`prompt_head`.
    """
    if "messages" in body:
        return head + _canonical(body.raw("messages"))
    start = prompt[:_MOST_BYTES]
    if start[:1] != b'"':
        return head + start.translate(None, _BLANKS)  # JSON has one way to write a token's number
    try:
        return head + _text(start).encode(errors="surrogatepass")
    except NOT_JSON:
        return head + start  # one that only the engine can read: it says so


def _text(start: bytes) -> str:
    """Return the text of a JSON string that may end anywhere. :raises msgspec.DecodeError: it is none."""
    whole = start[-1:] == b'"'
    for cut in range(_LONGEST_ESCAPE):
        try:
            return msgspec.json.decode(start if whole and not cut else start[: len(start) - cut] + b'"', type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    raise msgspec.DecodeError("the prompt is not a text")


def _canonical(raw: bytes) -> bytes:
    """The same for every client, however its JSON is written; of what is long, the beginning as it is."""
    if len(raw) > _BUILT_BYTES:
        return raw[:_MOST_BYTES]
    try:
        return msgspec.json.encode(msgspec.json.decode(raw))
    except NOT_JSON:
        return raw


def digests(content: bytes) -> list[int]:
    """Return the digest of each beginning that ends at a block, shortest first; at most :data:`MAX_BLOCKS`."""
    found: list[int] = []
    before = 0
    for number in range(min(len(content) // BLOCK_BYTES, MAX_BLOCKS)):
        block = content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        before = xxhash.xxh3_64_intdigest(struct.pack("<Q", before) + block)
        found.append(before)
    return found


class PrefixTable:
    """Which engines have which beginnings.

    :param most: beginnings remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Holders by the generation in which they had it: an engine that was down has lost it.
        self._holders: OrderedDict[int, dict[Instance, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def matched(self, beginnings: Sequence[int], instances: Iterable[Instance]) -> dict[Instance, int]:
        """How many of the leading blocks each of the instances has; those that have none are left out."""
        longest: dict[Instance, int] = {}
        wanted = set(instances)
        for count, digest in enumerate(beginnings, 1):
            holders = self._holders.get(digest)
            if holders is None:
                break
            self._holders.move_to_end(digest)
            for instance, generation in holders.items():
                if instance in wanted and generation == instance.generation:
                    longest[instance] = count
        return longest

    def record(self, beginnings: Sequence[int], instance: Instance) -> None:
        """The instance has computed a prompt with these beginnings."""
        for digest in beginnings if self._most else ():
            holders = self._holders.setdefault(digest, {})
            self._holders.move_to_end(digest)
            holders.pop(instance, None)
            holders[instance] = instance.generation
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def clear(self) -> None:
        """The engines' prefix caches were emptied."""
        self._holders.clear()


# The engines in use, and who of them gets a request.


# Of a prompt's tokens that an engine does not have: a prefiller computes them, a decoder is only sent their KV.
_MISSED_WEIGHT = {InstanceRole.PREFILL: 1.0, InstanceRole.DECODE: 0.25}


class Registry:
    """Engines by role. An engine that is removed finishes what it has.

    :param clock: monotonic seconds.
    """

    def __init__(self, settings: ProxySettings, clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self._instances: dict[tuple[InstanceRole, str], Instance] = {}
        self._retired: list[Instance] = []
        self._picks = itertools.count(1)
        self._numbers = {role: itertools.count(1) for role in InstanceRole}
        self.prefixes = PrefixTable(settings.affinity_prefixes)

    def of(self, role: InstanceRole) -> list[Instance]:
        return [instance for (of_role, _), instance in self._instances.items() if of_role is role]

    @property
    def all(self) -> list[Instance]:
        return list(self._instances.values())

    def add(self, role: InstanceRole, address: InstanceAddress) -> Instance:
        """:raises ProxyError: 409, it is there already."""
        if (role, address.url) in self._instances:
            raise ProxyError(f"{role.value} instance {address.url} is there already", 409)
        made = Instance(role, f"{role.value}-{next(self._numbers[role])}", address, self._settings, self._clock)
        self._instances[role, address.url] = made
        return made

    def remove(self, role: InstanceRole, url: str) -> Instance:
        """Send an engine no more requests. :raises ProxyError: 404, there is none."""
        instance = self._instances.pop((role, url), None)
        if instance is None:
            known = ", ".join(instance.url for instance in self.of(role)) or "none"
            raise ProxyError(f"no {role.value} instance {url}; there are: {known}", 404)
        self._retired.append(instance)
        return instance

    async def close_retired(self) -> None:
        """Close the connections of removed engines that have finished."""
        for instance in [instance for instance in self._retired if not instance.active]:
            self._retired.remove(instance)
            await instance.close()

    async def close(self) -> None:
        """Close every connection."""
        for instance in [*self._instances.values(), *self._retired]:
            await instance.close()

    def pick(
        self,
        role: InstanceRole,
        beginnings: Sequence[int],
        tokens: int,
        tried: Collection[Instance] = (),
        wanted: str | None = None,
    ) -> Instance:
        """The engine with the least to do before this prompt's last token: what it has open, and what it lacks of it.

        :param beginnings: of the prompt; see :func:`layerflow.proxy.instances.digests`.
        :param tokens: of the prompt.
        :param tried: engines that have failed this request.
        :param wanted: ``host:port`` that the client asked for; taken if it can be.
        :raises ProxyError: 503, no engine can take it.
        """
        there = [instance for instance in self.of(role) if instance not in tried]
        usable = [instance for instance in there if instance.usable]
        usable = usable or [instance for instance in there if instance.last_resort]
        if not usable:
            states = ", ".join(f"{instance.name} {instance.state}" for instance in self.of(role)) or "none"
            failed = f", {len(tried)} of them failed this request" if tried else ""
            raise ProxyError(f"no {role.value} engine can take the request: {states}{failed}; try again later", 503)
        asked_for = [instance for instance in usable if instance.url.partition("://")[2] == wanted]
        matched = self.prefixes.matched(beginnings, usable)
        blocks = max(len(beginnings), 1)

        def cost(instance: Instance) -> tuple[float, int]:
            missed = tokens * (1 - matched.get(instance, 0) / blocks)
            return instance.tokens + _MISSED_WEIGHT[role] * missed, instance.last_picked

        picked = min(asked_for or usable, key=cost)
        picked.last_picked = next(self._picks)
        return picked


# Asks each engine's ``/health`` again and again.


_SERVER_ERROR = 500
_BODY_BYTES = 1 << 16  # of a health's answer: more is not read
_SLICES = 10  # of a probe's time-out
_LATE_S = 0.05
_MOST_LATE = 10
_log = structlog.get_logger("layerflow.proxy")


async def probe_all(registry: Registry, settings: ProxySettings) -> None:
    """Probe every engine until cancelled, each in its own time: one that hangs holds up no other's probe."""
    probed: set[Instance] = set()
    async with anyio.create_task_group() as tasks:
        while True:
            probed &= set(registry.all)
            for instance in registry.all:
                if instance not in probed:
                    probed.add(instance)
                    tasks.start_soon(_probe, registry, instance, settings)
            await registry.close_retired()
            await anyio.sleep(settings.probe_interval_s)


async def _probe(registry: Registry, instance: Instance, settings: ProxySettings) -> None:
    failed = 0
    while instance in registry.all:
        reason = await _ask(instance, settings.probe_timeout_s)
        failed = failed + 1 if reason else 0
        if failed >= settings.probe_failures and not instance.down:
            _log.warning("instance_down", role=instance.role.value, url=instance.url, reason=reason, probes=failed)
            instance.went_down()
        elif not failed and instance.down:
            _log.info("instance_up", role=instance.role.value, url=instance.url)
            instance.down = False
        await anyio.sleep(settings.probe_interval_s)


async def _ask(instance: Instance, timeout_s: float) -> str:
    """Why the engine is not well; empty if it is. One without ``/health`` (404) answers, and so is up."""
    found: str | None = None

    async def ask() -> None:
        nonlocal found
        try:
            answer, _ = await instance.fetch("GET", "/health", _BODY_BYTES)
            found = "" if answer.status_code < _SERVER_ERROR else f"HTTP {answer.status_code}"
        except Exception as error:  # noqa: BLE001 - told: what a probe of one engine raises ends the probes of no other
            found = f"{type(error).__name__}: {error}"
        waiting.cancel_scope.cancel()

    async with anyio.create_task_group() as waiting:
        waiting.start_soon(ask)
        await sleep_on_time(timeout_s)
        waiting.cancel_scope.cancel()
    return f"no answer in {timeout_s:g} s" if found is None else found


async def sleep_on_time(duration_s: float) -> None:
    """Sleep, and longer by what the event loop was late.

    An answer that came while the loop was busy with something else lies in its socket until the loop comes to it: that
    time is not the engine's. A loop that is always late counts all the same, after ten times `duration_s`.
    """
    slice_s = duration_s / _SLICES
    ends_at = anyio.current_time() + _MOST_LATE * duration_s
    slept = 0
    while slept < _SLICES and anyio.current_time() < ends_at:
        began = anyio.current_time()
        await anyio.sleep(slice_s)
        if anyio.current_time() - began - slice_s <= max(slice_s, _LATE_S):
            slept += 1
