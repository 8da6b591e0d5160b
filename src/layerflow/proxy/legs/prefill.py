"""The prefill's leg: one token, no stream, and what the answer says of the hand-off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from layerflow.config.proxy import ProxySettings
from layerflow.errors import UpstreamError
from layerflow.proxy.body import Body
from layerflow.proxy.instances.instance import Instance
from layerflow.proxy.legs.call import post, read_answer
from layerflow.proxy.legs.checks import whole_answer
from layerflow.proxy.legs.usage import cached_of
from layerflow.proxy.request import Headers

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


def prefill_body(body: Body, params: Mapping[str, Any]) -> bytes:
    """The client's request as the prefill engine gets it.

    :param params: its ``kv_transfer_params``.
    """
    asked: dict[str, Any] = {"stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": params}
    if "max_completion_tokens" in body:
        asked["max_completion_tokens"] = 1
    return body.changed(asked, _DROPPED).encode()


async def prefill(instance: Instance, path: str, body: bytes, headers: Headers, settings: ProxySettings) -> Prefilled:
    """Run the prefill. Cancelling it closes the connection, and so aborts it in the engine.

    :raises UpstreamError: it failed, fell silent, refused, or answered 200 without an answer.
    """
    engine, timeout_s = instance.title, settings.prefill_timeout_s
    with instance.breaker.watch(), instance.given_up_when_down():
        try:
            with anyio.fail_after(timeout_s):
                async with post(instance, path, body, headers, settings.idle_timeout_s) as response:
                    content = await read_answer(engine, response, settings.max_request_bytes, settings.idle_timeout_s)
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
