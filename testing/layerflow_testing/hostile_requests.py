"""Requests that no decent client sends, by the number of a seed: bodies, headers, ids and ``kv_transfer_params``.

They are for what stands before engines, and for engines: whatever is answered, nothing may end, and no other request
may be hurt. Each is small, so that what they show is not that a machine is slow.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_ADDRESSES = (
    "http://[::1/x", "http://", "://", "tcp://127.0.0.1:0", "http://127.0.0.1:1/x", "ipc:///nowhere", "http://[v9.a]/",
    "http://a:99999", "file:///etc/passwd", "\ud800", "x" * 3000, "http://\x00", "tcp://[fe80::1%25x]:1", "inproc://x",
)  # fmt: skip
_TEXTS = (
    "",
    "a",
    "\u0000",
    "\ud800",
    "é" * 600,
    "\U0001f600",
    "a" * 5000,
    "null",
    "0_cmpl-x-0",
    "../..",
    "%00",
    "\r\nx: y",
)
_NUMBERS = (0, 1, -1, 2.0, 1.5, 1e999, float("nan"), -(1 << 63), 1 << 64, 1 << 200, True, "2", " 3 ", "0x10", 1e-320)
_KEYS = (
    "do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host", "remote_port",
    "remote_request_id", "transfer_id", "metaserver", "remote_bootstrap_addr", "remote_num_tokens", "tp_size",
    "remote_tp_size", "request_id", "prompt_token_ids", "layerflow",
)  # fmt: skip
_TERMS = ("v", "handoff", "servers", "incarnation", "layout", "prompt", "tokens", "lease_s", "deadline_s")
_FIELDS = (
    "n", "stream", "echo", "max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs",
    "prompt_logprobs",
    "temperature", "top_p", "stop", "seed", "use_beam_search", "prompt_embeds", "cache_salt", "model", "stream_options",
    "logit_bias", "user", "ignore_eos", "return_token_ids", "vllm_xargs", "tools", "priority", "best_of", "request_id",
)  # fmt: skip

_WORK = frozenset((
    "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "n", "stream", "echo", "logprobs",
    "top_logprobs", "prompt_logprobs", "use_beam_search", "ignore_eos", "best_of",
))  # fmt: skip
"""Fields that decide how much an engine computes and answers."""
_JSON = (b"content-type", b"application/json")
_OK = 200
_LEAST_ID = 10  # below it are a model's special tokens
_PROMPTS: tuple[Any, ...] = ([], [[]], [-1], [1 << 40], "", None, {}, [[[1]]], ["]", '"'])
_NAMES = (
    b"x-user", b"cookie", b"authorization", b"x-data-parallel-rank", b"x-prefiller-host-port", b"origin", b"te", b"via",
    b"x-forwarded-for", b"accept-encoding", b"traceparent", b"x-session-id", b"expect", b"priority",
)  # fmt: skip
_IDS = (b"a", b"x" * 200, b"x" * 4000, b"\xe9\xff", b"0_cmpl-x-0", b"a-12345678", b"../..", b"%00", b"a b")
_VALUES = (b"1", b"a\xc3\xa9", b"\xe9", b"x" * 2000, b"127.0.0.1:1", b"*", b"-1", b"gzip", b"[::1/x")


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """One POST.

    :param about: for messages: which seed it is of.
    """

    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    about: str

    def benign(self, status: int) -> HostileRequest:
        """What a decent client sends that asks an engine for as much: who holds up others by more is hostile.

        Where this one was answered 200, the same tokens of a new prompt with the same outputs, and nothing else;
        otherwise a request that an engine refuses.

        :param status: of the answer to this one.
        """
        asked = self._work() if status == _OK else {"prompt": [1], "max_tokens": -1}
        path = self.path if "messages" in asked else COMPLETIONS
        return HostileRequest(path, (_JSON,), json.dumps(asked).encode(), f"as much as {self.about}")

    def _work(self) -> dict[str, Any]:
        dice = random.Random(self.body)
        text = self.body.decode(json.detect_encoding(self.body), errors="replace")  # the proxy drops it unread
        asked = {name: value for name, value in json.loads(text).items() if name in _WORK}
        if "prompt" in asked:
            asked["prompt"] = _anew(dice, asked["prompt"])
        return asked


def hostile_requests(seed: int, count: int, *, vocabulary: int = 200) -> Iterator[HostileRequest]:
    """`count` of them, the same for the same seed.

    :param vocabulary: token ids of prompts are mostly below it.
    """
    for number in range(count):
        dice = random.Random(seed * 1_000_003 + number)
        path = dice.choice((COMPLETIONS, COMPLETIONS, CHAT))
        body = _body(dice, path, vocabulary)
        yield HostileRequest(path, tuple(_headers(dice)), body, f"seed {seed}, number {number}: {path} {body[:400]!r}")


def hostile_params(dice: random.Random) -> Any:
    """A value of ``kv_transfer_params``."""
    if dice.random() < 0.1:
        return _anything(dice)
    params = {key: _param(dice, key) for key in dice.sample(_KEYS, dice.randint(1, 8))}
    # Most begin as true ones do, or they would only be passed by.
    for flags in (("do_remote_prefill", "metaserver"), ("do_remote_decode",), ("do_remote_prefill", "transfer_id")):
        if dice.random() < 0.3:
            params |= {flag: True if flag.startswith("do_") else _param(dice, flag) for flag in flags}
    return params


def _param(dice: random.Random, key: str) -> Any:
    if dice.random() < 0.2:
        return _anything(dice)
    if key == "layerflow":
        return {term: _anything(dice) for term in dice.sample(_TERMS, dice.randint(0, 6))} | {
            "v": 1,
            "handoff": dice.choice(_TEXTS),
            "servers": [dice.choice(_ADDRESSES) for _ in range(dice.randint(0, 3))],
        }
    if key.startswith("do_"):
        return dice.choice((True, True, False, None, "true", 1))
    if key in ("metaserver", "remote_bootstrap_addr", "remote_host"):
        return dice.choice(_ADDRESSES)
    return dice.choice((*_TEXTS, *_NUMBERS, [[1, 2]], None))


def _anything(dice: random.Random, depth: int = 3) -> Any:
    kind = dice.randrange(7 if depth else 4)
    if kind == 0:
        return dice.choice(_TEXTS)
    if kind == 1:
        return dice.choice(_NUMBERS)
    if kind == 2:
        return dice.choice((None, True, False))
    if kind == 3:
        return dice.choice(_ADDRESSES)
    if kind == 4:
        return [_anything(dice, depth - 1) for _ in range(dice.randint(0, 3))]
    return {str(dice.choice((*_TEXTS, *_KEYS))): _anything(dice, depth - 1) for _ in range(dice.randint(0, 3))}


def _anew(dice: random.Random, prompt: Any) -> Any:
    """As many tokens, and others: nothing of them is stored."""
    if isinstance(prompt, list):
        return [_anew(dice, one) for one in prompt]
    return dice.randrange(_LEAST_ID, 200) if isinstance(prompt, int | float) else prompt


def _prompt(dice: random.Random, vocabulary: int) -> Any:
    ids = [dice.randrange(vocabulary) for _ in range(dice.choice((1, 2, 40, 70)))]
    whole = (ids, ids, [ids, ids[:1]], [ids] * 3, "a prompt", ["one", "two"], [ids, "x"], [1.0, 2.0], [True], "\ud800")
    return dice.choice((*whole, *_PROMPTS, _anything(dice)))


def _body(dice: random.Random, path: str, vocabulary: int) -> bytes:
    body: dict[str, Any] = {"max_tokens": 2}
    if path == COMPLETIONS:
        body["prompt"] = _prompt(dice, vocabulary)
    elif dice.random() < 0.7:
        content = dice.choice((*_TEXTS, _anything(dice)))
        body["messages"] = [{"role": dice.choice(("user", "system", "x")), "content": content}]
    else:
        body["messages"] = _anything(dice)
    if dice.random() < 0.4:
        body["stream"] = dice.choice((True, "true", 1, "x"))
    for field in dice.sample(_FIELDS, dice.choice((0, 0, 1, 2, 4))):
        body[field] = dice.choice((*_NUMBERS[:6], _anything(dice)))
    if dice.random() < 0.6:
        body["kv_transfer_params"] = hostile_params(dice)
    if dice.random() < 0.1:
        body["vllm_xargs"] = {"kv_transfer_params": dice.choice((*_TEXTS, *_NUMBERS[:4]))}
    text = json.dumps(body, ensure_ascii=dice.random() < 0.8).encode(errors="surrogatepass")
    way = dice.random()
    if way < 0.05:
        return text[: dice.randrange(len(text))]
    if way < 0.08:
        return dice.choice(
            (b"", b"[]", b"\xff", b"{", b"[" * 5000, b'{"prompt":' + b"[" * 5000, b"\xef\xbb\xbf" + text)
        )
    if way < 0.1:
        return json.dumps(body).encode(dice.choice(("utf-16", "utf-32", "utf-8-sig")))
    if way < 0.15:
        at = dice.randrange(len(text))
        return text[:at] + bytes([dice.randrange(256)]) + text[at + 1 :]
    return text


def _headers(dice: random.Random) -> Iterator[tuple[bytes, bytes]]:
    yield b"content-type", dice.choice((b"application/json",) * 8 + (b"text/plain", b"application/json; charset=\xe9"))
    if dice.random() < 0.5:
        yield b"x-request-id", dice.choice(_IDS)
    for name in dice.sample(_NAMES, dice.choice((0, 1, 3))):
        yield name, dice.choice(_VALUES)
