"""Two phases: the prefill's answer says where its KV is, and goes to the decoder as it is (NIXL's six keys)."""

from __future__ import annotations

from typing import Any

from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.instances.instance import Instance, Role
from layerflow.proxy.orders.exchange import Exchange

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
    try:
        done = await exchange.prefill_anywhere(_ASKED, lambda: exchange.leg_id(Role.PREFILL))
    except UpstreamError as error:
        if error.judged:
            raise
        return await exchange.recompute(error)
    except ProxyError as none:
        return await exchange.recompute(none)

    async def attempt(instance: Instance, request_id: str) -> None:
        await exchange.decode(instance, done.params, request_id)

    return await exchange.decode_anywhere(attempt)
