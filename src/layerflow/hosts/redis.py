"""Redis, Valkey, or any other server that speaks RESP, behind the arena: an object is one string.

It is written under a name of its own, which has an expiry from the moment it exists until it is whole and renamed: no
reader sees a part, and a writer that dies leaves nothing for long. Redis leases nothing, so an object may be evicted
while it is read. Its checksum, in the header, tells: it is compared with the last layer.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from layerflow.backends import LEAST_TRIAL_BYTES, Plugin, Trial
from layerflow.config.fields import BackendOptions, Whole, setting
from layerflow.errors import Unsupported
from layerflow.findings import ANSWER_TIMEOUT_S, Finding, ok, problem, size_text, warning
from layerflow.hosts.backend import (
    OK,
    Backend,
    BackendInfo,
    ObjectLocation,
    ObjectResult,
    ObjectStatus,
    Unreachable,
    Unusable,
    pool_name,
)
from layerflow.objects import HEADER_BYTES, get_checksum, set_checksum, stored_header

if TYPE_CHECKING:
    from xxhash import xxh3_64

    from layerflow.config.pool import PoolSettings
    from layerflow.system.memfd import SharedMemory  # numpy: the configuration reads this module too

MAX_STRING_BYTES = 512 << 20
"""The largest string that Redis keeps (`proto-max-bulk-len`, by default)."""
FIRST_RETRY_S, LAST_RETRY_S = 0.005, 0.1
SCAN_KEYS = 1000
LOOKUP_KEYS = 1024
"""Keys that are asked for in one round trip, some 10 ms."""

_MISSING = ObjectResult(ObjectStatus.MISSING, "it is not there")
_OTHER_SIZE = ObjectResult(ObjectStatus.MISSING, "it is there with another size")
_LEFT = ObjectResult(ObjectStatus.EXPIRED, "it left the store while it was read")
_OTHER_BYTES = ObjectResult(ObjectStatus.BROKEN, "its bytes are not those that were written: the checksum differs")
_EXISTS = ObjectResult(ObjectStatus.EXISTS, "it is stored already")
_BEING_WRITTEN = ObjectResult(ObjectStatus.EXISTS, "it is being written")
_TOO_LARGE = ObjectResult(ObjectStatus.TOO_LARGE, "it is larger than a string of Redis, or than its maxmemory")
_FULL = ObjectResult(ObjectStatus.FULL, "Redis is at its maxmemory and evicts nothing")
_LATE = ObjectResult(ObjectStatus.FAILED, "no time was left for it")
_NOT_OPEN = ObjectResult(ObjectStatus.FAILED, "it was not opened")
_OPENED_ANEW = ObjectResult(ObjectStatus.FAILED, "its room expired, and another job has opened it since")
_OUT_OF_ORDER = ObjectResult(ObjectStatus.FAILED, "its layers came out of order, or not all")
_LOST = ObjectResult(ObjectStatus.FAILED, "what was written of it has left Redis: it expired or was evicted")


class RedisOptions(BackendOptions):
    """A Redis or Valkey server, used with ``backend = "redis"``."""

    url: str = setting(
        "redis://127.0.0.1:6379/0",
        "redis://, rediss:// (TLS) or unix:// with user, password and database as redis-py takes them.",
        secret=True,
    )
    unfinished_s: Whole = setting(
        300, "What a writer that died has left is removed after so long.", unit="s", ge=10, le=86_400
    )

    @field_validator("url")
    @classmethod
    def _scheme(cls, value: str) -> str:
        if not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError('should begin with "redis://", "rediss://" or "unix://"')
        return value


PLUGIN = Plugin(
    backend="layerflow.hosts.redis:Redis",
    options=RedisOptions,
    examine="layerflow.hosts.redis:examine",
    trial="layerflow.hosts.redis:trial",
)


def examine(options: RedisOptions, pool: PoolSettings, running: bool) -> Iterator[Finding]:
    """The package; does a server answer, let this client in, and make room when it is full."""
    check = "redis server"
    try:
        import redis  # noqa: PLC0415 - only where it is used
    except ImportError as error:
        yield problem("redis package", f"not installed: {error}", 'pip install "layerflow[redis]"')
        return
    yield ok("redis package", f"redis {redis.__version__}")
    wait = {"socket_timeout": ANSWER_TIMEOUT_S, "socket_connect_timeout": ANSWER_TIMEOUT_S}
    try:
        with redis.Redis.from_url(options.url, **wait) as client:
            server, memory = client.info("server"), client.info("memory")
    except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        yield problem(check, f"refuses this client: {error}", "correct user and password in pool.redis.url")
        return
    except (redis.exceptions.RedisError, ValueError) as error:
        yield problem(check, f"does not answer: {error}", "start it, or correct pool.redis.url")
        return
    if mode := _other_mode(server):
        yield problem(check, mode, _ONE_SERVER)
        return
    yield ok(check, _version(server))
    most, policy = int(memory.get("maxmemory") or 0), str(memory.get("maxmemory_policy", "?"))
    if not most:
        yield warning(
            "redis memory", "no maxmemory: it takes memory until there is none", "set one in its configuration"
        )
    elif policy.startswith("volatile-"):
        why = f"{policy}: it evicts what expires, and objects never do; once full it stores nothing more"
        yield problem("redis memory", f"{size_text(most)}, {why}", "maxmemory-policy allkeys-lru")
    elif policy == "noeviction":
        yield warning(
            "redis memory", f"{size_text(most)}; once full it stores nothing more", "maxmemory-policy allkeys-lru"
        )
    else:
        yield ok("redis memory", f"{size_text(most)}, {policy}")


def trial(options: RedisOptions, folder: Path, nbytes: int, running: bool) -> Trial:
    """See :class:`layerflow.backends.Plugin`.

    :raises Unsupported: no server is installed.
    """
    if running:
        return Trial()
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise Unsupported("there is no redis-server and no valkey-server here; install one, or name a running one")
    url = f"unix://{folder}/redis.sock"
    command = [program, "--port", "0", "--unixsocket", f"{folder}/redis.sock", "--save", "", "--appendonly", "no"]
    command += ["--maxmemory", str(max(2 * nbytes, LEAST_TRIAL_BYTES)), "--maxmemory-policy", "allkeys-lru"]
    return Trial(options={"url": url}, command=tuple(command), ready=url)


_ONE_SERVER = "name one Redis or Valkey server that is in no cluster in pool.redis.url"


def _other_mode(server: Mapping[str, Any]) -> str:
    """Why this is not a server that keeps objects; "" = it is one."""
    mode = str(server.get("redis_mode") or server.get("server_mode") or "standalone")
    named = {"cluster": "one server of a Redis Cluster, which keeps some of the keys only", "sentinel": "a Sentinel"}
    return "" if mode == "standalone" else f"it is {named.get(mode, f'in mode {mode}')}"


def _version(server: Mapping[str, Any]) -> str:
    return str(server.get("valkey_version") or server.get("redis_version", "?"))


def _xxh3() -> xxh3_64:
    import xxhash  # noqa: PLC0415 - engines read the section, and need no more of this file

    return xxhash.xxh3_64()


@dataclass(slots=True)
class _OpenObject:
    """What has passed of an object, in order.

    :param expires_at: monotonic seconds; an object that is written may have left Redis by then.
    :param offset: in the arena, of one that is written: tells the job that opened it from others of the same key.
    """

    name: str = ""
    expires_at: float = 0.0
    offset: int = 0
    layers: int = 0
    state: xxh3_64 = field(default_factory=_xxh3)


class Redis(Backend):
    """A client of one server. Its connections are made and repaired by redis-py."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._url, self._timeout_s = str(options["url"]), options["timeout_ms"] / 1e3
        self._unfinished_ms = int(options["unfinished_s"]) * 1000
        self._client: Any = None
        self._errors: Any = None
        self._arena: SharedMemory | None = None
        self._most_bytes = MAX_STRING_BYTES
        self._reading: dict[tuple[bytes, int], _OpenObject] = {}
        self._writing: dict[bytes, _OpenObject] = {}
        self._figures: dict[str, float] = {}

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        try:
            import redis  # noqa: PLC0415 - only where it is used
        except ImportError as error:
            raise Unusable(f"{error}; pip install 'layerflow[redis]'") from None
        self._errors = redis.exceptions
        if self._client is None:
            wait = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s}
            self._client = redis.Redis.from_url(self._url, **wait)
        self._arena = arena
        try:
            server, memory = self._client.info("server"), self._client.info("memory")
        except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise Unusable(f"Redis refuses this client: {error}; correct pool.redis.url") from None
        except redis.exceptions.RedisError as error:
            raise Unreachable(f"Redis does not answer: {error}") from None
        if mode := _other_mode(server):
            raise Unusable(f"{mode}; {_ONE_SERVER}")
        self._most_bytes = min(MAX_STRING_BYTES, int(memory.get("maxmemory") or MAX_STRING_BYTES))
        shown = {"version": _version(server)}
        return BackendInfo({**shown, "maxmemory_policy": str(memory.get("maxmemory_policy", "?"))})

    def check(self) -> None:
        try:
            memory = self._client.info("memory")
        except self._errors.RedisError as error:
            raise Unreachable(f"Redis does not answer: {error}") from None
        names = ("used_memory", "maxmemory")
        self._figures = {f"{name}_bytes": float(memory.get(name, 0)) for name in names}

    def statistics(self) -> dict[str, float]:
        return self._figures

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        sizes: list[int] = []
        while len(sizes) < len(keys) and time.monotonic() < until:
            few = keys[len(sizes) : len(sizes) + LOOKUP_KEYS]
            sizes += self._run(("STRLEN", pool_name(key)) for key in few)
        return [size > 0 for size in sizes] + [False] * (len(keys) - len(sizes))

    def hide(self, keys: Sequence[bytes]) -> None:
        self._run(("UNLINK", pool_name(key)) for key in keys)

    def clear(self, keys: Sequence[bytes], until: float) -> int:
        """Everything of layerflow's in this database, whichever server wrote it."""
        try:
            names = list(self._client.scan_iter(match=f"{pool_name(b'')}*", count=SCAN_KEYS))
        except self._errors.RedisError as error:
            raise Unreachable(f"Redis does not answer: {error}") from None
        return sum(self._run(("UNLINK", name) for name in names))

    # Reading --------------------------------------------------------------------------------------

    def open_fetch(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        if time.monotonic() >= until:
            return [_LATE] * len(places)
        sizes = self._run(("STRLEN", pool_name(place.key)) for place in places)
        results = []
        for place, size in zip(places, sizes, strict=True):
            results.append(OK if size == place.nbytes else _OTHER_SIZE if size else _MISSING)
            if results[-1] is OK:
                self._reading[place.key, place.offset] = _OpenObject()
        return results

    def fetch(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        if time.monotonic() >= until:
            return [_LATE] * len(places)
        start = [place.start(lo) if lo else 0 for place in places]
        pairs = list(zip(places, start, strict=True))
        found = self._run(("GETRANGE", pool_name(place.key), at, place.start(hi) - 1) for place, at in pairs)
        return [self._take(place, at, lo, hi, data) for (place, at), data in zip(pairs, found, strict=True)]

    def close_fetch(self, places: Sequence[ObjectLocation]) -> None:
        for place in places:
            self._reading.pop((place.key, place.offset), None)

    def _take(self, place: ObjectLocation, start: int, lo: int, hi: int, data: bytes) -> ObjectResult:
        done = self._reading.get((place.key, place.offset))
        if done is None or self._arena is None:
            return _NOT_OPEN
        if len(data) != place.start(hi) - start:
            return _LEFT
        view = self._arena.view[place.offset : place.offset + place.nbytes]
        view[start : start + len(data)] = data
        if done.layers != lo:
            return OK  # read twice, or by another job's calls: there is no sum of this one
        done.state.update(memoryview(data)[HEADER_BYTES if not lo else 0 :])
        done.layers = hi
        wanted = get_checksum(view[:HEADER_BYTES])
        return OK if hi < place.layers or wanted in (0, done.state.intdigest()) else _OTHER_BYTES

    # Writing --------------------------------------------------------------------------------------

    def open_write(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        now = time.monotonic()
        # Whoever opened these can write no more, and has not said so.
        self._give_up([each.key for each in places if (done := self._writing.get(each.key)) and done.expires_at <= now])
        sizes = self._run(("STRLEN", pool_name(place.key)) for place in places)
        results = [_EXISTS if size else _LATE for size in sizes]
        wanted: dict[bytes, int] = {}
        for at, place in enumerate(places):
            if place.nbytes > self._most_bytes:
                results[at] = _TOO_LARGE
            elif results[at] is _LATE and (place.key in self._writing or wanted.setdefault(place.key, at) != at):
                results[at] = _BEING_WRITTEN
        left, pause = list(wanted.values()), FIRST_RETRY_S
        while left and time.monotonic() < until:
            for at, result in zip(left, self._reserve([places[at] for at in left]), strict=True):
                results[at] = result
            left = [at for at in left if results[at] is _FULL]
            if left:
                time.sleep(max(0.0, min(pause, until - time.monotonic())))
                pause = min(2 * pause, LAST_RETRY_S)
        return results

    def _reserve(self, places: Sequence[ObjectLocation]) -> list[ObjectResult]:
        """A string of the object's size for each: a write at its end makes Redis allocate all of it."""
        expires_at = time.monotonic() + self._unfinished_ms / 1e3
        results = []
        names = [f"{pool_name(b'')}unfinished-{secrets.token_hex(8)}-{place.key.hex()}" for place in places]
        found = self._run_each(
            [("SET", name, b"", "PX", self._unfinished_ms, "NX"), ("SETRANGE", name, place.nbytes - 1, b"\0")]
            for name, place in zip(names, places, strict=True)
        )
        for name, place, answers in zip(names, places, found, strict=True):
            error = _error_of(answers)
            results.append(OK if error is None else self._refusal(error))
            if error is None:
                self._writing[place.key] = _OpenObject(name, expires_at, place.offset)
        return results

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        if time.monotonic() >= until:
            return [_LATE] * len(places)
        spans = [(place.start(lo), place.start(hi)) for place in places]
        parts = [(start, self._bytes(place, start, stop)) for place, (start, stop) in zip(places, spans, strict=True)]
        results = self._put(places, parts, [self._may_write(place, lo) for place in places])
        for place, (_, data), result in zip(places, parts, results, strict=True):
            if result is OK:
                done = self._writing[place.key]
                done.layers = hi
                done.state.update(data)
        return results

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        results = [self._may_write(place, place.layers) for place in places]
        if time.monotonic() >= until:
            results = [_LATE] * len(places)
        for place, result in zip(places, results, strict=True):
            if result is OK:
                set_checksum(self._bytes(place, 0, HEADER_BYTES), self._writing[place.key].state.intdigest())
        assert self._arena is not None
        results = self._put(places, [(0, stored_header(self._arena.view, place.offset)) for place in places], results)
        whole = [at for at, result in enumerate(results) if result is OK]
        names = [(self._writing[places[at].key].name, pool_name(places[at].key)) for at in whole]
        # Both or none: renamed only, the object would expire.
        found = self._run_each([("RENAMENX", own, name), ("PERSIST", name)] for own, name in names)
        for at, answers in zip(whole, found, strict=True):
            error = _error_of(answers)
            if error is not None:
                results[at] = _LOST if str(error) == "no such key" else self._refusal(error)
            elif answers[0] == 1:
                del self._writing[places[at].key]
            else:
                results[at] = _EXISTS
        self.revoke(places)
        return results

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        self._give_up([place.key for place in places if self._of(place) is not None])

    def _give_up(self, keys: Iterable[bytes]) -> None:
        ended = [self._writing.pop(key) for key in dict.fromkeys(keys)]
        try:
            self._run(("UNLINK", done.name) for done in ended)
        except Unreachable:
            return  # they expire

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _of(self, place: ObjectLocation) -> _OpenObject | None:
        """None also for another job of this key: its string is not this one's."""
        done = self._writing.get(place.key)
        return done if done is not None and done.offset == place.offset else None

    def _may_write(self, place: ObjectLocation, layers: int) -> ObjectResult:
        done = self._of(place)
        if done is None:
            return _OPENED_ANEW if place.key in self._writing else _NOT_OPEN
        return OK if done.layers == layers else _OUT_OF_ORDER

    def _put(
        self,
        places: Sequence[ObjectLocation],
        parts: Sequence[tuple[int, bytes | memoryview]],
        results: list[ObjectResult],
    ) -> list[ObjectResult]:
        """Write a part of each object that is OK so far, and put its expiry off.

        :param parts: where each begins in its object, and its bytes.
        """
        wanted = [at for at, result in enumerate(results) if result is OK]
        expires_at, later = time.monotonic() + self._unfinished_ms / 1e3, self._unfinished_ms
        found = self._run_each(
            # Where it has left Redis, the write makes it anew: that too shall expire.
            [("PEXPIRE", own, later), ("SETRANGE", own, start, data), ("PEXPIRE", own, later)]
            for own, start, data in ((self._writing[places[at].key].name, *parts[at]) for at in wanted)
        )
        for at, answers in zip(wanted, found, strict=True):
            error, done = _error_of(answers), self._writing[places[at].key]
            if error is not None:
                results[at] = self._refusal(error)
            elif answers[:2] != [1, places[at].nbytes]:
                results[at] = _LOST
            else:
                done.expires_at = expires_at
        return results

    def _bytes(self, place: ObjectLocation, start: int, stop: int) -> memoryview:
        assert self._arena is not None
        return self._arena.view[place.offset + start : place.offset + stop]

    def _run(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The answers to these, in one round trip.

        :raises Unreachable: there is no answer, or it is an error.
        """
        try:
            with self._client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return list(pipe.execute())
        except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
            raise Unreachable(f"Redis does not answer: {error}") from None
        except self._errors.RedisError as error:
            raise Unreachable(f"Redis refuses: {error}") from None

    def _run_each(self, groups: Iterable[Sequence[tuple[Any, ...]]]) -> list[list[Any]]:
        """The answers to each group of commands, errors among them: of a group all are executed, or none. One round
        trip.

        :raises Unreachable: no answer.
        """
        sizes = []
        try:
            with self._client.pipeline(transaction=False) as pipe:
                for group in groups:
                    sizes.append(len(group))
                    for command in (("MULTI",), *group, ("EXEC",)):
                        pipe.execute_command(*command)
                found = iter(pipe.execute(raise_on_error=False))
        except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
            raise Unreachable(f"Redis does not answer: {error}") from None
        answers = []
        for size in sizes:
            queued, executed = [next(found) for _ in range(size + 1)], next(found)
            # What is refused when it is queued says why; then nothing is executed, which says no more than that.
            refused = [answer for answer in queued if isinstance(answer, Exception)]
            answers.append(refused or (executed if isinstance(executed, list) else [executed]))
        return answers

    def _refusal(self, error: Exception) -> ObjectResult:
        if isinstance(error, self._errors.OutOfMemoryError):
            return _FULL
        return ObjectResult(ObjectStatus.FAILED, f"Redis refuses: {error or type(error).__name__}")


def _error_of(answers: Sequence[Any]) -> Exception | None:
    """The first of these that is an error."""
    return next((answer for answer in answers if isinstance(answer, Exception)), None)
