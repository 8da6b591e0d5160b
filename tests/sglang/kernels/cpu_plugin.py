"""What SGLang itself has no CPU branch for, set by its plug-in entry point (``sglang.srt.plugins``) in each process.

Torch's attention knows nothing of speculative decoding: it is told where drafted tokens lie, of which chains of one
(``--speculative-eagle-topk 1 --speculative-num-steps 1``) are tested. HiCache, a contender in the tests, pins host
memory and copies with kernels, and Mooncake's backend pins indices; all are plain here, and with the variable
``PIN_NOTHING`` so are the tables of LoRA's torch backend. Where ``LAYERS_LOG`` names a file, each layer's number is
written there when it has computed its attention, with the time.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch

Tensors = list[torch.Tensor]


def register() -> None:
    """Called by SGLang before anything else."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    layernorm_gated._use_cpu = True  # it asks for AMX; its other branch is a Triton kernel
    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", _unpinned, HookType.BEFORE)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _unpinned_indices, HookType.AFTER)
    for target, hook in (
        ("speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend", _own_attention),
        ("layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend", _verified),
    ):
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)
    if path := os.environ.get("LAYERS_LOG"):
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        computed = functools.partial(_computed, log)
        HookRegistry.register("sglang.srt.layers.radix_attention.RadixAttention.forward", computed, HookType.AFTER)
    if os.environ.get("PIN_NOTHING"):
        _pin_nothing()
    mha.transfer_kv_direct = transfer_kv_direct
    mha.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    mha.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf


def _own_attention(original: Callable[[Any], Any], factory: Any) -> Any:
    """None = the draft model's passes over a prompt use what its runner has anyway: torch's has no kind of its own."""
    own = factory.draft_model_runner.attn_backend
    return None if type(own).__name__ == "TorchNativeAttnBackend" else original(factory)


def _verified(original: Callable[..., Any], backend: Any, *given: Any, **named: Any) -> Any:
    """A pass that verifies a chain of drafted tokens is one over the end of a prompt: they lie behind `seq_lens`."""
    *tensors, layer, batch = given[:5]
    if batch.forward_mode.is_target_verify():
        chain, verified = batch.spec_info.draft_token_num, copy.copy(batch)
        verified.extend_prefix_lens, verified.seq_lens = batch.seq_lens, batch.seq_lens + chain
        verified.extend_seq_lens = torch.full_like(batch.seq_lens, chain)
        batch = verified
    return original(backend, *tensors, layer, batch, *given[5:], **named)


def _unpinned(self: Any, **geometry: Any) -> tuple[tuple[Any], dict[str, Any]]:
    return (self,), {**geometry, "pin_memory": False}


def _pin_nothing() -> None:
    """Without an accelerator torch refuses to pin memory; LoRA's torch backend asks for it without a look."""
    for name in ("tensor", "zeros", "arange"):
        setattr(torch, name, _unpinned_tensor(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment,method-assign]


def _unpinned_tensor(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return made


def _unpinned_indices(kind: Any, *args: Any, **kwargs: Any) -> None:
    if getattr(kind, "supports_host_tensor_indices", False):
        kind.supports_host_tensor_indices = False


def _computed(log: int, result: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    os.write(log, f"{layer.layer_id} {time.monotonic()}\n".encode())


def transfer_kv_direct(
    *, src_layers: Tensors, dst_layers: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Token rows, layer by layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    *,
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer from page-first host memory, shape (pages, layers, page, ...), to token rows."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[_pages(src_indices, page_size), layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    *, src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """All layers from token rows to page-first host memory."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for plane, target in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[plane * layers + layer][src_indices]
            target[_pages(dst_indices, page_size), layer] = rows.unflatten(0, (-1, page_size))


def _pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return indices.view(-1, page_size)[:, 0] // page_size
