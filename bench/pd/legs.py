"""One prompt through one contender: when the client has its first token, and how long it took behind the prefill."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, NamedTuple

import httpx
from bench.pd.engines import Engines
from bench.vllm.children import BenchFailed
from bench.vllm.contenders import NAME

SIX_KEYS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ANSWER_S = 120.0


class Times(NamedTuple):
    """Milliseconds.

    :param ttft: from the request to the first token that the client sees.
    :param decode_leg: of it, behind the end of the prefill; without one, all of it.
    """

    ttft: float
    decode_leg: float


async def single(engines: Engines, prompt: list[int]) -> Times:
    """No hand-off."""
    async with _client() as client:
        began = time.perf_counter()
        first = await _first_token(client, engines.decode, prompt, None)
    return Times((first - began) * 1e3, (first - began) * 1e3)


async def two_phases(engines: Engines, prompt: list[int], asked: dict[str, Any] | None) -> Times:
    """P, then D with what P has answered.

    :param asked: of P; None = neither is told anything: the pool.
    """
    async with _client() as client:
        began = time.perf_counter()
        told = await _prefill(client, engines.prefill, prompt, asked)
        prefilled = time.perf_counter()
        first = await _first_token(client, engines.decode, prompt, told if asked else None)
    return Times((first - began) * 1e3, (first - prefilled) * 1e3)


async def at_once(engines: Engines, prompt: list[int]) -> Times:
    """Both legs, with a name in common."""
    shared: dict[str, Any] = {"transfer_id": f"xfer-{uuid.uuid4().hex}"}
    claimed = shared | {"do_remote_prefill": True, "layerflow": {"v": 1, "servers": engines.servers}}
    async with _client() as client:
        began = time.perf_counter()
        prefill = asyncio.create_task(
            _timed(_prefill(client, engines.prefill, prompt, shared | {"do_remote_decode": True}))
        )
        first = await _first_token(client, engines.decode, prompt, claimed)
        prefilled = await prefill
    return Times((first - began) * 1e3, max(0.0, first - prefilled) * 1e3)


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=ANSWER_S)


async def _timed(call: Any) -> float:
    await call
    return time.perf_counter()


def _body(prompt: list[int], tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | ({"kv_transfer_params": params} if params else {})


async def _prefill(client: httpx.AsyncClient, url: str, prompt: list[int], asked: dict[str, Any] | None) -> Any:
    response = await client.post(f"{url}/v1/completions", json=_body(prompt, 1, asked))
    if response.status_code != httpx.codes.OK:
        raise BenchFailed(f"prefill: status {response.status_code}, {response.text[:500]}")
    return response.json().get("kv_transfer_params")


async def _first_token(client: httpx.AsyncClient, url: str, prompt: list[int], params: dict[str, Any] | None) -> float:
    body = _body(prompt, 4, params) | {"stream": True}
    first = None
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise BenchFailed(f"decode: status {response.status_code}, {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if "error" in line[:20]:
                raise BenchFailed(f"decode: {line[:500]}")
            if first is None and line.startswith("data: {"):
                first = time.perf_counter()
    if first is None:
        raise BenchFailed("decode: a stream without a token")
    return first
