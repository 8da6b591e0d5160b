"""The prefill's leg: one token, no stream, and what the answer says of the hand-off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec

from layerflow.errors import UpstreamError
from layerflow.proxy.instances.instance import Instance
from layerflow.proxy.legs.call import Headers, post
from layerflow.proxy.legs.checks import whole_answer
from layerflow.proxy.legs.usage import cached_of

# What decides only how many tokens come and in which form; `logprobs` would be computed for nothing.
_DROPPED = ("stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs", "kv_transfer_params")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill's answer.

    :param params: its ``kv_transfer_params``, for the decoder; None = it hands nothing over.
    :param cached_tokens: prompt tokens that it did not have to compute; None = it does not say.
    :param prompt_tokens: None = it does not say.
    :param servers: control addresses of the layerflow servers that it saves through, if it tells them.
    """

    params: dict[str, Any] | None
    cached_tokens: int | None
    prompt_tokens: int | None
    servers: tuple[str, ...] = ()


def prefill_body(body: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """The client's request as the prefill engine gets it.

    :param params: its ``kv_transfer_params``.
    """
    asked = {name: value for name, value in body.items() if name not in _DROPPED}
    asked |= {"stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": params}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    return msgspec.json.encode(asked)


async def prefill(instance: Instance, path: str, body: bytes, headers: Headers, timeout_s: float) -> Prefilled:
    """Run the prefill. Cancelling it closes the connection, and so aborts it in the engine.

    :raises UpstreamError: it failed, fell silent, refused, or answered 200 without an answer.
    """
    engine = f"prefill engine {instance.url}"
    with instance.breaker.watch(), instance.given_up_when_down():
        try:
            with anyio.fail_after(timeout_s):
                async with post(instance, path, body, headers) as response:
                    content = await response.aread()
        except TimeoutError:
            raise UpstreamError(f"{engine} did not answer in {timeout_s:g} s", 504) from None
        answer = whole_answer(engine, content)
    usage = answer.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    params = answer.get("kv_transfer_params")
    return Prefilled(
        params if isinstance(params, dict) and params else None,
        cached_of(answer),
        tokens if isinstance(tokens, int) else None,
        _servers(params),
    )


def _servers(params: Any) -> tuple[str, ...]:
    ours = params.get("layerflow") if isinstance(params, dict) else None
    servers = ours.get("servers") if isinstance(ours, dict) else None
    if isinstance(servers, list) and all(isinstance(server, str) for server in servers):
        return tuple(servers)
    return ()
