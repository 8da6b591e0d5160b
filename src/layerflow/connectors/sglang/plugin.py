"""layerflow's plug-in for SGLang (entry point ``sglang.srt.plugins``), which SGLang calls in each of its processes.

Two hooks on the external cache linker: a load that has failed ends its own request only, and its client is told why.
They concern no other linker, and import nothing before SGLang has made one.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import structlog

_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
MOST_REASON = 300
"""Characters of a reason that a client is told."""

log = structlog.get_logger("layerflow.sglang")


def register() -> None:
    """Register the hooks. SGLang applies them after all plug-ins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - nothing else needs SGLang

    HookRegistry.register(f"{_WRAPPER}.finish_loads", finish_loads, HookType.AROUND)
    HookRegistry.register(f"{_CACHE}.finish_external_linker_loads", tell_reasons, HookType.AFTER)


def finish_loads(original: Callable[..., list[str]], wrapper: Any, *args: Any, **kwargs: Any) -> list[str]:
    """The requests of the batch that just ran whose loads have failed on some rank, the same on every rank.

    SGLang's own answers with all requests of the batch that load. Ranks compare one number per request here, and
    SGLang's ``inflight_load_rids`` are the same on each.
    """
    linker = wrapper.cache_linker
    if not hasattr(linker, "failed_loads"):
        return original(wrapper, *args, **kwargs)
    import torch  # noqa: PLC0415 - SGLang's frontend has no use for it here

    requests, wrapper.inflight_load_rids = wrapper.inflight_load_rids, []
    if not requests:
        return []
    index, wrapper.inflight_load_index = wrapper.inflight_load_index, -1
    failed = linker.failed_loads(index, requests)
    landed = torch.tensor([request not in failed for request in requests], dtype=torch.int)
    wrapper.cache._all_reduce_attn_groups(landed, torch.distributed.ReduceOp.MIN)
    for request in requests:
        wrapper.private_load_indices.pop(request, None)
    return [request for request, is_there in zip(requests, landed.tolist(), strict=True) if not is_there]


def tell_reasons(failed: list[Any], cache: Any, *args: Any, **kwargs: Any) -> None:
    """Put the reason into what the clients of these requests are told."""
    reasons = getattr(getattr(cache.linker, "cache_linker", None), "failures", None)
    if not failed or reasons is None:
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415 - there is one, where this is called

    for request in failed:
        reason = reasons().get(request.rid, "it failed on another rank")
        text = f"External KV cache load failed: {reason}"[:MOST_REASON]
        request.discard_output_reason = FINISH_ABORT(text, HTTPStatus.SERVICE_UNAVAILABLE)
