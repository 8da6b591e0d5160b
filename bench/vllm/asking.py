"""Requests to a vLLM server, timed by the one who waits for the answer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from bench.vllm.children import BenchFailed
from bench.vllm.model import NAME, VOCABULARY
from bench.vllm.switch import Use

ANSWER_S = 120.0
PATH = "/v1/completions"
_SPECIAL = 3
"""The vocabulary's first tokens, which no prompt here has."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and when.

    :param cached: tokens of the prompt that were not computed.
    :param times_ms: from sending to each token; to the whole answer where it was not streamed.
    """

    tokens: tuple[int, ...]
    cached: int
    times_ms: tuple[float, ...]

    @property
    def first_ms(self) -> float:
        """From sending to the first token."""
        return self.times_ms[0]


class Prompts:
    """Random token ids: prompts that nobody has seen; the same ones in every run."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def fresh(self, tokens: int) -> list[int]:
        """One more."""
        return [int(token) for token in self._random.integers(_SPECIAL, VOCABULARY, tokens)]


class Server:
    """A vLLM server at `url`, asked over connections that are kept open."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=ANSWER_S)

    def ask(self, prompt: Sequence[int]) -> Answer:
        """One token, not streamed.

        :raises BenchFailed: another answer than 200, or none.
        """
        body = _body(prompt, 1)
        began = time.perf_counter()
        response = self._post(PATH, body)
        taken_ms = (time.perf_counter() - began) * 1e3
        answer = response.json()
        tokens = tuple(answer["choices"][0]["token_ids"])
        return Answer(tokens, _cached(answer["usage"]), (taken_ms,))

    def stream(self, prompt: Sequence[int], tokens: int) -> Answer:
        """So many tokens, as they come.

        :raises BenchFailed: see :meth:`ask`.
        """
        heard = _Stream(self.name)
        with self._client.stream("POST", PATH, json=_streamed(prompt, tokens)) as response:
            if response.status_code != httpx.codes.OK:
                raise BenchFailed(f"{self.name}: answered {response.status_code}: {response.read()[:500]!r}")
            for line in response.iter_lines():
                heard.line(line)
        return heard.answer(tokens)

    async def stream_beside(self, client: httpx.AsyncClient, prompt: Sequence[int], tokens: int) -> Answer:
        """The same beside other requests.

        :raises BenchFailed: see :meth:`ask`.
        """
        heard = _Stream(self.name)
        async with client.stream("POST", self.url + PATH, json=_streamed(prompt, tokens)) as response:
            if response.status_code != httpx.codes.OK:
                raise BenchFailed(f"{self.name}: answered {response.status_code}: {(await response.aread())[:500]!r}")
            async for line in response.aiter_lines():
                heard.line(line)
        return heard.answer(tokens)

    def use_connector(self, use: Use) -> None:
        """Take its connector out, put it back, or both in turns; a server that was started with a switch.

        :raises BenchFailed: see :meth:`ask`.
        """
        self._post("/collective_rpc", {"method": "use_connector", "args": [use]})

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            response = self._client.post(path, json=body)
        except httpx.TransportError as error:
            raise BenchFailed(f"{self.name}: no answer: {error!r}") from None
        if response.status_code != httpx.codes.OK:
            raise BenchFailed(f"{self.name}: {path} answered {response.status_code}: {response.text[:500]}")
        return response


class _Stream:
    """Puts a streamed answer together."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.perf_counter()
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._usage: dict[str, Any] = {}

    def line(self, line: str) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        now = time.perf_counter()
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise BenchFailed(f"{self._name}: {chunk['error']}")
        for choice in chunk["choices"]:
            if choice.get("token_ids"):
                self._tokens += choice["token_ids"]
                self._times += [(now - self._began) * 1e3] * len(choice["token_ids"])
        self._usage = chunk.get("usage") or self._usage

    def answer(self, tokens: int) -> Answer:
        if len(self._tokens) != tokens:
            raise BenchFailed(f"{self._name}: {len(self._tokens)} tokens came, {tokens} were asked for")
        return Answer(tuple(self._tokens), _cached(self._usage), tuple(self._times))


def _body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {
        "model": NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _streamed(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return _body(prompt, tokens) | {"stream": True, "stream_options": {"include_usage": True}}


def _cached(usage: dict[str, Any]) -> int:
    # vLLM leaves the details out, or null, where nothing was cached.
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
